"""Compares the results of a host program with those of its fusion, for random numbers over a finite field (Schwartz 1980, Zippel 1979)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, prod
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.check.match_collectives import MatchedCollective, meetings
from hostweave.check.operations import Access, Instances, instruction_text
from hostweave.check.results.arithmetic import HASHED, JOINED, run_fusion
from hostweave.check.results.functions import Functions
from hostweave.check.results.inputs import random_inputs, steering_integers
from hostweave.check.results.lanes import Lanes
from hostweave.check.results.ranks import FieldRanks
from hostweave.check.simulate import instantiate
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import CONTRACTED, DEPTH
from hostweave.fusion_ir.ops.grouped import OUTER
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import inlined
from hostweave.host_ir.expr import Const
from hostweave.types.mesh import Sizes
from hostweave.types.tensor import block_of, global_shape, holds

SEEDS, MOST_SEEDS = 3, 12
NEARLY = 1e-9  # equal in f64
FEW = 2 * 10**4  # elements of all seeds
MANY, VERY_MANY = 5 * 10**4, 5 * 10**5  # programs with more elements have two seeds with opposite signs, and one seed


@dataclass(frozen=True)
class Difference:
    """The first element of an output that differs from the fusion's."""

    output: str
    rank: int
    index: tuple[int, ...]  # position in the global output
    sizes: Sizes
    seeds: int
    got: float
    want: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        element = f"%{self.output}[{', '.join(map(str, self.index))}]"
        values = f"{self.got:.6g}, not {self.want:.6g}"
        return f"rank {self.rank}: the output {element} is not what the fusion computes ({values}), at {sizes}"


def _seeds(elements: float) -> int:
    """Returns the number of seeds: several for small programs, because a wrong comparison shows only for numbers between the two bounds."""
    if elements > MANY:
        return 1 if elements > VERY_MANY else 2
    return max(SEEDS, min(MOST_SEEDS, int(FEW / max(elements, 1))))


class Wanted:
    """The results of a fusion for random inputs of some sizes."""

    def __init__(self, fusion: Fusion, sizes: Sizes, functions: Functions = HASHED, seeds: int = 0):
        self.fusion, self.sizes, self.functions = fusion, sizes, functions
        self.seeds = seeds or _seeds(work(fusion, sizes))

    @cached_property
    def inputs(self) -> dict[str, Lanes]:
        return random_inputs(self.fusion, self.sizes, self.seeds, self.functions, steering_integers(self.fusion, self.sizes))

    @cached_property
    def outputs(self) -> tuple[Lanes, ...]:
        return run_fusion(self.fusion, self.inputs, self.sizes, self.functions)

    def of(self, functions: Functions) -> Wanted:
        return Wanted(self.fusion, self.sizes, functions, self.seeds)


def difference(
    wanted: Wanted, instances: Instances, met: Sequence[MatchedCollective], ran: set[tree.Instruction] | None = None
) -> Difference | None:
    """Returns the first difference between a host program and its fusion, at the sizes of `wanted`.

    In the first run exp is a random function. A program that joins softmaxes by their log-sum-exps differs in this run, so exp is a
    homomorphism in a second one. A multiple of a joined log-sum-exp differs in both. It counts as equal if it is equal in f64.
    """
    if _difference(wanted, instances, met, ran) is None:
        return None
    joined = wanted.of(JOINED)
    found = _difference(joined, instances, met, ran)
    return found if found and (not _uses_joined(instances.program) or _differs_in_f64(joined, instances, met)) else None


def _uses_joined(program: ir.HostProgram) -> bool:
    """True if anything but the gradients of attention reads log-sum-exps."""
    whole: dict[str, str] = {}  # view -> its memory
    made: set[str] = set()
    for i in tree.walk(program.body):
        whole.update({view: whole.get(of, of) for view in tree.names(i, "view") for of in tree.names(i, "alias")[:1]})
        if i.log_sum_exps == "gives":
            made.update(whole.get(name, name) for name in i.lse)  # type: ignore[attr-defined]
        elif i.log_sum_exps != "takes" and not made.isdisjoint(whole.get(name, name) for name in tree.names(i, "read")):
            return True
    return False


def _differs_in_f64(wanted: Wanted, instances: Instances, met: Sequence[MatchedCollective]) -> bool:
    return any(output.differs_in_f64(NEARLY).any() for output in computed_outputs(wanted, instances, met))


def _difference(
    wanted: Wanted, instances: Instances, met: Sequence[MatchedCollective], ran: set[tree.Instruction] | None
) -> Difference | None:
    for output in computed_outputs(wanted, instances, met, ran):
        wrong = output.got.differs(output.want)
        if wrong.any():
            return output.difference(wanted, [int(i) for i in np.argwhere(wrong)[0]])
    return None


@dataclass(frozen=True)
class ComparedOutput:
    """A rank's block of an output, and the expected block."""

    name: str
    rank: int
    got: Lanes
    want: Lanes
    places: NDArray[np.intp]  # indices of its elements in the global output
    shape: tuple[int, ...]  # shape of the global output

    def differs_in_f64(self, tolerance: float) -> NDArray[np.bool_]:
        """Returns True at the elements whose shadows or integers differ."""
        got, want = self.got.value, self.want.value
        if want.dtype.kind != "f":
            return np.asarray(got != want)
        near = (np.abs(got - want) <= tolerance * (1 + np.abs(want))) | (got == want) | (np.isnan(got) & np.isnan(want))
        return np.asarray(~near)

    def difference(self, wanted: Wanted, at: Sequence[int]) -> Difference:
        """Returns the difference of the element at a lane and an index."""
        seed, *index = at
        values = (float(x.value[min(seed, x.lanes - 1)][tuple(index)]) for x in (self.got, self.want))
        place = np.unravel_index(self.places[tuple(index)], self.shape) if self.shape else ()
        return Difference(self.name, self.rank, tuple(map(int, place)), dict(wanted.sizes), wanted.seeds, *values)


def computed_outputs(
    wanted: Wanted,
    instances: Instances,
    met: Sequence[MatchedCollective],
    ran: set[tree.Instruction] | None = None,
    watch: Callable[[int, Access, Lanes], None] | None = None,
) -> Iterator[ComparedOutput]:
    """Runs a host program on all ranks, and yields the block of each rank for each output."""
    program, mesh = instances.program, instances.program.mesh
    ranks = FieldRanks(instances, met, wanted.seeds, wanted.functions)
    ranks.watch = watch
    for parameter in program.inputs:
        whole = wanted.inputs[parameter.name]
        for rank in range(mesh.size):
            if holds(parameter.type, mesh, rank):
                ranks.put(rank, parameter.name, whole[block_of(parameter.type, mesh, rank, whole.shape)])
    ranks.run()
    if ran is not None:
        ran |= ranks.ran
    for output, want in zip(program.outputs, wanted.outputs, strict=True):
        numbers = np.arange(want.size).reshape(want.shape)
        for rank in range(mesh.size):
            if holds(output.type, mesh, rank):
                block = want[block_of(output.type, mesh, rank, want.shape)]
                got = ranks.whole(rank, output.memory or output.name).reshape(block.shape)  # donated memory may have another order of dims
                places = np.asarray(numbers[block_of(output.type, mesh, rank, want.shape)])
                yield ComparedOutput(output.name, rank, got, block, places, want.shape)


# --- a program at several sizes ---------------------------------------------------------------------------------------

Stages = Callable[[], Iterable[tuple[str, Fusion | ir.HostProgram]]]  # names of the passes, each with the program after it


class Results:
    """The results of a host program, compared with those of its fusion at one size after another."""

    def __init__(self, fusion: Fusion, program: ir.HostProgram, stages: Stages | None = None, most: float = inf):
        """`most` bounds the work: sizes with more elements are skipped."""
        self.most = most
        self.fusion, self.program, self.stages = fusion, program, stages
        self.ran: set[tree.Instruction] = set()
        self.left_out: list[str] = []

    def compare(self, instances: Instances, met: Sequence[MatchedCollective], sizes: Sizes) -> None:
        """Raises ProgramError for the first element of an output that differs, and names the pass that introduced the difference."""
        if (elements := work(self.fusion, sizes)) > self.most:
            at = "".join(f", {name}={size}" for name, size in sizes.items())
            self.left_out.append(f"the results{at}: {elements:.1e} elements are more than {self.most:.1e}")
            return
        with np.errstate(all="ignore"):
            found = difference(Wanted(self.fusion, sizes), instances, met, self.ran)
        if found:
            self.fail(found)

    def fail(self, found: Difference) -> NoReturn:
        values = {op.result.name: op for op in self.fusion.ops}
        output = [p.name for p in self.program.outputs].index(found.output)
        op = values.get(self.fusion.outputs[output])
        after, first = first_wrong_stage(self.fusion, self.stages(), found) if self.stages else ("", None)
        where = f"; the first wrong pass is {after}" if after else ""
        if first:
            line = f" ({first.location})" if first.location else ""
            where += f", where %{first.result.name}{line} is the first value that differs"
        remedy = "this is a bug of the compiler: please report it, and compile with Options(check=False) until it is mended"
        raise ProgramError(f"@{self.program.name}: {found}{where}: {remedy}", op.location if op else None)

    def unchecked(self) -> tuple[str, ...]:
        """Returns the sizes that were left out, the lines of the program that never ran, and the user's kernels."""
        ran = {_without_values(i) for i in tree.walk(tuple(self.ran))}  # including the operations of groups
        there = dict.fromkeys(i for i in tree.walk(inlined(self.program).body) if i.work or isinstance(i, ir.Communication))
        lines = [f"never ran: {instruction_text(i)}" for i in there if ran and _without_values(i) not in ran]
        return (*self.left_out, *lines, *(f"the C++ of the kernel {kernel.name}" for kernel in self.program.user_kernels))


def _without_values(i: tree.Instruction) -> tree.Instruction:
    """Drops the values of expressions, which an execution adds to its instruction."""
    return tree.with_expressions(i, lambda _: Const(0)) if i.work == "compute" else i


def first_wrong_stage(fusion: Fusion, stages: Iterable[tuple[str, Fusion | ir.HostProgram]], found: Difference) -> tuple[str, Op | None]:
    """Returns the pass that first changed a result, and the op of the first value that differs after it.

    The pass is "" if no stage has a different result. The op is None if no value differs that the fusion and the stage have under one name.
    """
    right = fusion
    for name, stage in stages:
        try:
            if _is_wrong(fusion, stage, found):
                return name, _first_wrong_value(right, stage, found)
        except (ExecutionError, ProgramError):
            continue  # a stage that cannot run before later passes complete it
        right = stage if isinstance(stage, Fusion) else right
    return "", None


OpsByName = dict[str, tuple[Op, Lanes]]  # a name in an inlined host program -> the op that makes this value in a fusion


def _named_values(fusion: Fusion, wanted: Wanted) -> OpsByName:
    """Values of a fusion and of the functions that it calls, by their names after inlining."""
    found: OpsByName = {}
    calls: Counter[str] = Counter()

    def observe(body: Fusion, values: Mapping[str, Lanes]) -> None:
        calls[body.name] += 1
        prefix, suffix = ("", "") if body is fusion else (f"{body.name}_", f"_{calls[body.name]}" if calls[body.name] > 1 else "")
        found.update({f"{prefix}{op.result.name}{suffix}": (op, values[op.result.name]) for op in body.ops})

    run_fusion(fusion, wanted.inputs, wanted.sizes, wanted.functions, observe)
    return found


@np.errstate(all="ignore")
def _first_wrong_value(right: Fusion, stage: Fusion | ir.HostProgram, found: Difference) -> Op | None:
    """Returns the op of the first value that differs between a fusion and the program after the next pass."""
    wanted = Wanted(right, found.sizes, JOINED, found.seeds)
    values = _named_values(right, wanted)
    if isinstance(stage, Fusion):
        for name, (op, got) in _named_values(stage, wanted).items():
            if name in values and got.shape == (want := values[name][1]).shape and got.differs(want).any():
                return op
        return None
    last: dict[tuple[str, int], bool] = {}  # (value, rank) -> True if the whole block is wrong, in the order of the last writes

    def watch(rank: int, access: Access, got: Lanes) -> None:
        if access.name not in values:
            return
        op, want = values[access.name]
        if not op.result.type.partial and holds(op.result.type, right.mesh, rank):
            block = want[block_of(op.result.type, right.mesh, rank, want.shape)]
            if got.shape == block.shape:
                last.pop((access.name, rank), None)
                last[access.name, rank] = bool(got.differs(block).any())

    instances = instantiate(stage, found.sizes)
    for _ in computed_outputs(wanted, instances, meetings(instances), watch=watch):
        pass
    return next((values[name][0] for (name, _), is_wrong in last.items() if is_wrong), None)


@np.errstate(all="ignore")
def _is_wrong(fusion: Fusion, stage: Fusion | ir.HostProgram, found: Difference) -> bool:
    wanted = Wanted(fusion, found.sizes, seeds=found.seeds)
    if isinstance(stage, ir.HostProgram):
        instances = instantiate(stage, found.sizes)
        return difference(wanted, instances, meetings(instances)) is not None
    for functions in (HASHED, JOINED):
        at = wanted.of(functions)
        results = run_fusion(stage, at.inputs, found.sizes, functions)
        if not any(got.differs(want).any() for got, want in zip(results, at.outputs, strict=True)):
            return False
    return True


def work(fusion: Fusion, sizes: Sizes) -> float:
    """Returns the number of elements that all ops make. A hundred multiplications of a matmul count as one."""
    total = float(sum(prod(global_shape(v.type, sizes)) for v in fusion.inputs))
    types, of_functions = fusion.values(), dict[str, float]()
    for op in fusion.ops:
        if op.callee:
            name = op.callee.name
            of_functions[name] = of_functions[name] if name in of_functions else work(op.callee, sizes)
            calls = {"output": 0, "repeat": op[DEPTH].bind(sizes)}.get(op.kind, 1)
            total += calls * of_functions[name]
            continue
        made: float = prod(global_shape(op.result.type, sizes))
        if OPS[op.kind].is_product:
            left = types[op.tensors[0]].type.shape
            terms = left[-2:-1] if op.kind == OUTER else left[-(op[CONTRACTED] if op.kind == "matmul" else 1) :]
            made *= 1 + prod(size.bind(sizes) for size in terms) / 100
        total += made
    return total
