"""Compares a host program with its fusion, for random inputs over a finite field (Schwartz 1980, Zippel 1979)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf, prod
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.check.match_collectives import MatchedCommunications, match_communications
from hostweave.check.operations import Access, Instances, instruction_text
from hostweave.check.results.arithmetic import MULTIPLICATIVE_EXP, RANDOM_EXP, run_fusion
from hostweave.check.results.functions import Functions
from hostweave.check.results.inputs import index_roles, random_inputs
from hostweave.check.results.ranks import FieldRanks
from hostweave.check.results.samples import Samples
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import NEAR_FACTOR, sizes_to_check, with_far_branches
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import CONTRACTED
from hostweave.fusion_ir.ops.calls import times_called
from hostweave.fusion_ir.ops.grouped import OUTER
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import inlined
from hostweave.host_ir.expr import Const
from hostweave.types.mesh import Mesh, Sizes
from hostweave.types.tensor import INTS, TensorType, block_of, global_shape, holds

SEEDS, MAX_SEEDS = 4, 12
NEARLY = 1e-9  # f64 numbers count as equal if their difference is at most NEARLY * (1 + magnitude)
FEW_ELEMENTS = 2 * 10**4  # approximate number of elements that all seeds of a small program compute together
MANY_ELEMENTS, VERY_MANY_ELEMENTS = 10**5, 3 * 10**5  # numbers above which the check uses two seeds with opposite signs, or one seed


@dataclass(frozen=True)
class Difference:
    """First element at which an output differs from the output of the fusion."""

    output: str
    rank: int
    index: tuple[int, ...]  # position in the global output
    sizes: Sizes
    seeds: int
    actual: float
    expected: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        element = f"%{self.output}[{', '.join(map(str, self.index))}]"
        values = f"{self.actual:.6g}, not {self.expected:.6g}"
        return f"rank {self.rank}: the output {element} is not what the fusion computes ({values}), at {sizes}"


def _seeds(elements: float, has_integers: bool) -> int:
    """Number of seeds. More for small programs and for integers, because few numbers seldom show a wrong bound of a comparison."""
    if elements > MANY_ELEMENTS:
        return 1 if elements > VERY_MANY_ELEMENTS else 2
    return MAX_SEEDS if has_integers else max(SEEDS, min(MAX_SEEDS, int(FEW_ELEMENTS / max(elements, 1))))


@ir.analysis
def _has_integers(fusion: Fusion) -> bool:
    kinds = {value.type.dtype.kind for value in fusion.values().values()}
    return not kinds.isdisjoint(INTS) or any(_has_integers(op.callee) for op in fusion.ops if op.callee)


class Expected:
    """Results of a fusion for random inputs."""

    def __init__(self, fusion: Fusion, sizes: Sizes, functions: Functions = RANDOM_EXP, seeds: int = 0):
        self.fusion, self.sizes, self.functions = fusion, sizes, functions
        self.elements = count_elements(fusion, sizes)
        self.seeds = seeds or _seeds(self.elements, _has_integers(fusion))

    @cached_property
    def inputs(self) -> dict[str, Samples]:
        return random_inputs(self.fusion, self.sizes, self.seeds, self.functions, index_roles(self.fusion, self.sizes))

    @cached_property
    def outputs(self) -> tuple[Samples, ...]:
        return run_fusion(self.fusion, self.inputs, self.sizes, self.functions)

    def of(self, functions: Functions) -> Expected:
        return Expected(self.fusion, self.sizes, functions, self.seeds)


def difference(
    expected: Expected, instances: Instances, matches: Sequence[MatchedCommunications], executed: set[tree.Instruction] | None = None
) -> Difference | None:
    """First difference between a host program and its fusion, or None.

    In the first run, exp is a random function. A correct program that merges softmaxes by log-sum-exps differs in this run. The second run
    therefore uses exp(a + b) = exp(a) exp(b). A correct program may differ in both runs if an instruction reads log-sum-exps. Values in f64
    then decide. The backward pass of attention does not count as such an instruction.
    """
    if _difference(expected, instances, matches, executed) is None:
        return None
    multiplicative = expected.of(MULTIPLICATIVE_EXP)
    found = _difference(multiplicative, instances, matches, executed)
    return found if found and (not _reads_log_sum_exps(instances.program) or _differs_in_f64(multiplicative, instances, matches)) else None


def _reads_log_sum_exps(program: ir.HostProgram) -> bool:
    buffer_of: dict[str, str] = {}  # view -> buffer that contains it
    made: set[str] = set()
    for i in tree.walk(program.body):
        buffer_of.update({view: buffer_of.get(of, of) for view in tree.names(i, "view") for of in tree.names(i, "alias")[:1]})
        if i.log_sum_exps == "gives":
            made.update(buffer_of.get(name, name) for name in i.lse)  # type: ignore[attr-defined]
        elif i.log_sum_exps != "takes" and not made.isdisjoint(buffer_of.get(name, name) for name in tree.names(i, "read")):
            return True
    return False


def _differs_in_f64(expected: Expected, instances: Instances, matches: Sequence[MatchedCommunications]) -> bool:
    return any(output.differs_in_f64(NEARLY).any() for output in computed_outputs(expected, instances, matches))


def _difference(
    expected: Expected, instances: Instances, matches: Sequence[MatchedCommunications], executed: set[tree.Instruction] | None
) -> Difference | None:
    for output in computed_outputs(expected, instances, matches, executed):
        wrong = output.actual.differs(output.expected)
        if wrong.any():
            return output.difference(expected, [int(i) for i in np.argwhere(wrong)[0]])
    return None


@dataclass(frozen=True)
class ComparedOutput:
    name: str
    rank: int
    actual: Samples
    expected: Samples
    block: tuple[Any, ...]  # index of the block in the global output
    shape: tuple[int, ...]  # shape of the global output

    def differs_in_f64(self, tolerance: float) -> NDArray[np.bool_]:
        """True for each element whose f64 values differ by more than tolerance * (1 + magnitude), or whose integers or bools differ."""
        actual, expected = self.actual.value, self.expected.value
        if expected.dtype.kind != "f":
            return np.asarray(actual != expected)
        return ~np.isclose(actual, expected, tolerance, tolerance, equal_nan=True)

    def difference(self, expected: Expected, at: Sequence[int]) -> Difference:
        """Difference at one element. `at` is the number of the sample, followed by the index in the block."""
        seed, *index = at
        values = (float(x.value[min(seed, x.samples - 1)][tuple(index)]) for x in (self.actual, self.expected))
        positions = np.arange(prod(self.shape)).reshape(self.shape)[self.block]
        index_in_result = np.unravel_index(positions[tuple(index)], self.shape) if self.shape else ()
        return Difference(self.name, self.rank, tuple(map(int, index_in_result)), dict(expected.sizes), expected.seeds, *values)


def computed_outputs(
    expected: Expected,
    instances: Instances,
    matches: Sequence[MatchedCommunications],
    executed: set[tree.Instruction] | None = None,
    on_write: Callable[[int, Access, Samples], None] | None = None,
) -> Iterator[ComparedOutput]:
    program, mesh = instances.program, instances.program.mesh
    ranks = FieldRanks(instances, matches, expected.seeds, expected.functions)
    ranks.on_write = on_write
    for parameter in program.inputs:
        global_input = expected.inputs[parameter.name]
        for index, holders in _blocks(parameter.type, mesh, global_input.shape):
            ranks.put(holders, parameter.name, global_input[index])
    ranks.run()
    if executed is not None:
        executed |= ranks.executed
    for output, whole in zip(program.outputs, expected.outputs, strict=True):
        root = output.memory or output.name
        for rank in output.type.mesh_in(mesh).all_ranks:
            index = block_of(output.type, mesh, rank, whole.shape)
            block = whole[index]
            whole_output = ranks.buffer(root).view([rank], 0, ranks.instances.roots[rank][root].layout).read()
            actual = whole_output.reshape(block.shape)  # A donated input may have its dims in another order.
            yield ComparedOutput(output.name, rank, actual, block, index, whole.shape)


@lru_cache(maxsize=1024)
def _blocks(type: TensorType, mesh: Mesh, shape: tuple[int, ...]) -> list[tuple[tuple[Any, ...], list[int]]]:
    """Index of each block of a tensor, and the ranks that hold the block."""
    of_tensor = type.mesh_in(mesh)
    axes = [axis for dim in type.dims for axis in dim.axes]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in of_tensor.all_ranks:
        holders.setdefault(tuple(of_tensor.coordinate(rank, axis) for axis in axes), []).append(rank)
    return [(block_of(type, mesh, ranks[0], shape), ranks) for ranks in holders.values()]


# --- comparison at several sizes -----------------------------------------------------------------------------------------

Case = tuple[Sizes, Instances, Sequence[MatchedCommunications]]
Stages = Callable[[], Iterable[tuple[str, Fusion | ir.HostProgram]]]  # yields each pass and the program after the pass


class Results:
    """Comparison of a host program with its fusion, at several sizes."""

    def __init__(self, fusion: Fusion, program: ir.HostProgram, stages: Stages | None = None, max_elements: float = inf):
        """Sizes at which the fusion computes more than `max_elements` elements are skipped."""
        self.max_elements = max_elements
        self.fusion, self.program, self.stages = fusion, program, stages
        self.executed: set[tree.Instruction] = set()
        self.skipped: list[str] = []

    def compare_all(self, checked: Sequence[Case], has_given_sizes: bool) -> None:
        """Compares at the sizes of `checked` if the user gave sizes, otherwise at the sizes that `cases` chooses."""
        known = {tuple(sizes.items()): case for case in checked for sizes in case[:1]}
        expected: dict[tuple[tuple[str, int], ...], Expected] = {}
        for sizes, instances, matches in checked if has_given_sizes else cases(self.fusion, self.program, known):
            at = expected.setdefault(tuple(sizes.items()), Expected(self.fusion, sizes))
            if at.elements > self.max_elements:
                where = "".join(f", {name}={size}" for name, size in sizes.items())
                self.skipped.append(f"the results{where}: {at.elements:.1e} elements are more than {self.max_elements:.1e}")
                continue
            with np.errstate(all="ignore"):
                found = difference(at, instances, matches, self.executed)
            if found:
                self.fail(found)

    def fail(self, found: Difference) -> NoReturn:
        output = [p.name for p in self.program.outputs].index(found.output)
        op = self.fusion.made.get(self.fusion.outputs[output])
        after, first = first_wrong_stage(self.fusion, self.stages(), found) if self.stages else ("", None)
        where = f"; the first wrong pass is {after}" if after else ""
        if first:
            line = f" ({first.location})" if first.location else ""
            where += f", where %{first.result.name}{line} is the first value that differs"
        remedy = "this is a bug of the compiler: please report it, and compile with Options(check=False) until it is fixed"
        raise ProgramError(f"@{self.program.name}: {found}{where}: {remedy}", op.location if op else None)

    def unchecked(self) -> tuple[str, ...]:
        """Skipped sizes, lines of the program that never ran, and user kernels, whose C++ is not checked."""
        executed = {_without_values(i) for i in tree.walk(tuple(self.executed))}
        lines = [f"never ran: {instruction_text(i)}" for line, i in _lines(self.program).items() if executed and line not in executed]
        return (*self.skipped, *lines, *(f"the C++ of the kernel {kernel.name}" for kernel in self.program.user_kernels))


def cases(fusion: Fusion, program: ir.HostProgram, known: Mapping[tuple[tuple[str, int], ...], Case]) -> list[Case]:
    """Sizes at which results are compared, each with the program or a variant that runs the branches for much larger sizes.

    Sizes that do not divide evenly come first, if there are any. The remaining sizes follow if they run more lines. If instructions pack or
    unpack blocks, all sizes follow: a swap of pack and unpack does not show if there are as many blocks as rows. For a fusion with many
    elements, the variant replaces large sizes.
    """
    max_factor = NEAR_FACTOR if count_elements(fusion, sizes_to_check(program, NEAR_FACTOR)[-1]) <= MANY_ELEMENTS else 1
    sizes = sizes_to_check(program, max_factor)
    lines = _lines(program)
    needed, remaining, has_blocks = list[Case](), set(lines), any(i.packed for i in lines)
    programs = [(program, each) for each in (*sizes[1:2], *sizes[:1], *sizes[2:])]
    for each, at in (*programs, (None, sizes[-1])):
        if needed and not (remaining or has_blocks):
            break
        if each := each or with_far_branches(program, max_factor):
            case = known.get(tuple(at.items())) if each is program else None
            instances = case[1] if case else instantiate(each, at)
            case = case or (at, instances, match_communications(instances))
            executed = {operation.instruction for operations in instances.ranks for operation in operations}
            executed = set(map(_without_values, tree.walk(tuple(executed))))
            needed += [case] if not needed or has_blocks or executed & remaining else []
            remaining -= executed
    return needed


@ir.analysis
def _lines(program: ir.HostProgram) -> dict[tree.Instruction, tree.Instruction]:
    """Instructions that compute or communicate, by the result of `_without_values`."""
    return {_without_values(i): i for i in tree.walk(inlined(program).body) if i.work or isinstance(i, ir.Communication)}


def _without_values(i: tree.Instruction) -> tree.Instruction:
    """Replaces the expressions of a computation by 0. Executed instructions have values in place of expressions."""
    return tree.with_expressions(i, lambda _: Const(0)) if i.work == "compute" else i


def first_wrong_stage(fusion: Fusion, stages: Iterable[tuple[str, Fusion | ir.HostProgram]], found: Difference) -> tuple[str, Op | None]:
    """First pass that changes a result, and the op of the first value that the pass changes.

    The pass is "" if no stage has a wrong result. The op is None if all named values are equal before and after the pass.
    """
    correct = fusion
    for name, stage in stages:
        try:
            if _is_wrong(fusion, stage, found):
                return name, _first_wrong_value(correct, stage, found)
        except (ExecutionError, ProgramError):
            continue  # The program needs later passes before it can run.
        correct = stage if isinstance(stage, Fusion) else correct
    return "", None


OpsByName = dict[str, tuple[Op, Samples]]  # name after inlining -> op and value


def _named_values(fusion: Fusion, expected: Expected) -> OpsByName:
    found: OpsByName = {}
    calls: Counter[str] = Counter()

    def observe(body: Fusion, values: Mapping[str, Samples]) -> None:
        calls[body.name] += 1
        prefix, suffix = ("", "") if body is fusion else (f"{body.name}_", f"_{calls[body.name]}" if calls[body.name] > 1 else "")
        found.update({f"{prefix}{op.result.name}{suffix}": (op, values[op.result.name]) for op in body.ops})

    run_fusion(fusion, expected.inputs, expected.sizes, expected.functions, observe)
    return found


@np.errstate(all="ignore")
def _first_wrong_value(correct: Fusion, stage: Fusion | ir.HostProgram, found: Difference) -> Op | None:
    """Op of the first value that differs between a fusion and a later stage."""
    expected = Expected(correct, found.sizes, MULTIPLICATIVE_EXP, found.seeds)
    values = _named_values(correct, expected)
    if isinstance(stage, Fusion):
        for name, (op, actual) in _named_values(stage, expected).items():
            if name in values and actual.shape == (value := values[name][1]).shape and actual.differs(value).any():
                return op
        return None
    last: dict[tuple[str, int], bool] = {}  # (value, rank) -> True if the rank's block is wrong, in the order of the last writes

    def on_write(rank: int, access: Access, actual: Samples) -> None:
        if access.name not in values:
            return
        op, expected = values[access.name]
        if not op.result.type.partial and holds(op.result.type, correct.mesh, rank):
            block = expected[block_of(op.result.type, correct.mesh, rank, expected.shape)]
            if actual.shape == block.shape:
                last.pop((access.name, rank), None)
                last[access.name, rank] = bool(actual.differs(block).any())

    instances = instantiate(stage, found.sizes)
    for _ in computed_outputs(expected, instances, match_communications(instances), on_write=on_write):
        pass
    return next((values[name][0] for (name, _), is_wrong in last.items() if is_wrong), None)


@np.errstate(all="ignore")
def _is_wrong(fusion: Fusion, stage: Fusion | ir.HostProgram, found: Difference) -> bool:
    expected = Expected(fusion, found.sizes, seeds=found.seeds)
    if isinstance(stage, ir.HostProgram):
        instances = instantiate(stage, found.sizes)
        return difference(expected, instances, match_communications(instances)) is not None
    for functions in (RANDOM_EXP, MULTIPLICATIVE_EXP):
        at = expected.of(functions)
        results = run_fusion(stage, at.inputs, found.sizes, functions)
        if not any(actual.differs(expected).any() for actual, expected in zip(results, at.outputs, strict=True)):
            return False
    return True


def count_elements(fusion: Fusion, sizes: Sizes) -> float:
    """Number of elements of the inputs and of the results of all ops. A hundred multiplications of a matmul count as one element."""
    return _count_elements(fusion, tuple(sizes.items()))


@ir.analysis
def _count_elements(fusion: Fusion, items: tuple[tuple[str, int], ...]) -> float:
    sizes = dict(items)
    total = float(sum(prod(global_shape(v.type, sizes)) for v in fusion.inputs))
    for op in fusion.ops:
        if op.callee:
            total += times_called(op, sizes) * count_elements(op.callee, sizes)
            continue
        made: float = prod(global_shape(op.result.type, sizes))
        if OPS[op.kind].is_product:
            shape = fusion.types[op.tensors[0]].shape
            terms = shape[-2:-1] if op.kind == OUTER else shape[-op[CONTRACTED] :]
            made *= 1 + prod(size.bind(sizes) for size in terms) / 100
        total += made
    return total
