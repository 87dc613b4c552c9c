"""Makes mutants of host programs, each with one mathematical error, such as a wrong shard, slice, order, reduction, scale, operand,
epilogue or condition.

`mutants(host)` returns all mutants. `Subject.judge` returns the verdict on a mutant. docs/check-tests.md explains the verdicts.
`python tests/math_mutants.py 22 others` judges about 22 mutants of each program, and prints the table of docs/check-tests.md. The arguments
`60 training` select training programs, which need PyTorch. The arguments `22 others 3 8` select every eighth program, from number 3 on.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise, permutations, zip_longest
from typing import Any

import numpy as np

from hostweave.base.errors import HostweaveError
from hostweave.check.check import MAX_ELEMENTS, check
from hostweave.check.match_collectives import match_communications
from hostweave.check.results.results import Case, Expected, cases, computed_outputs, count_elements, difference
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import NEAR_FACTOR, minimal_sizes, sizes_to_check, with_far_branches
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXES
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies, joined
from hostweave.host_ir.expr import Binary, Const, Coordinate, Expr, Rank, Symbol, leaves
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import BufferType

Mutant = tuple[str, str, Callable[[], HostProgram]]  # kind and position of the error, and a function that makes the program

OTHER_REDUCTION = {"sum": "max", "max": "sum", "min": "max", "prod": "sum", "avg": "sum", "and": "or", "or": "and", "xor": "or"}
OTHER_OP = {
    **{"add": "subtract", "subtract": "add", "multiply": "add", "divide": "multiply", "maximum": "minimum", "minimum": "maximum"},
    **{"sum": "max", "max": "sum", "mean": "max", "min": "max", "exp": "negative", "relu": "abs", "greater": "less", "less": "less_equal"},
    **{"tanh": "sin", "sigmoid": "tanh", "rsqrt": "sqrt", "silu": "relu", "gelu": "relu", "negative": "abs", "cumsum": "negative"},
    **{"reduce_and": "reduce_or", "reduce_or": "reduce_and", "reduce_xor": "reduce_or", "sin": "cos", "cos": "sin"},
}


# --- one instruction --------------------------------------------------------------------------------------------------


def _other_place(i: tree.Instruction) -> Iterator[tuple[str, tree.Instruction]]:
    """Yields the instruction with another chunk, index, offset or step, or with swapped buffers of a choice."""
    if isinstance(i, ir.Chunk):
        yield "another chunk", replace(i, index=Binary("%", Binary("+", i.index, Const(1)), _count(i)))
    if isinstance(i, ir.Select):
        yield "another index", replace(i, index=_nudged(i.index))
    if isinstance(i, ir.Slice):
        yield "another offset", replace(i, start=_nudged(i.start))
    if isinstance(i, ir.Strided):
        yield "another step", replace(i, step=i.step + 1)
    if isinstance(i, ir.Choose):
        yield "another buffer of a choice", replace(i, src=i.other, other=i.src)


def _count(i: ir.Chunk) -> Expr:
    return Const(int(i.count)) if i.count.is_int else Symbol(i.count)


def _nudged(expr: Expr) -> Expr:
    return Const(expr.value - 1 if expr.value else 1) if isinstance(expr, Const) else Binary("+", expr, Const(1))


def _other_order(i: tree.Instruction) -> Iterator[tuple[str, tree.Instruction]]:
    if isinstance(i, ir.Permute):
        for order in permutations(range(len(i.order))):
            if order != i.order:
                yield "another permutation", replace(i, order=order)
    if isinstance(i, ir.CollectivePermute):
        yield "another source", replace(i, sources=(*i.sources[1:], i.sources[0]))
    if isinstance(i, ir.Pack):
        yield "another order of blocks", (ir.Pack if isinstance(i, ir.Unpack) else ir.Unpack)(i.src, i.dst, i.cuts)


def _other_reduction(i: tree.Instruction) -> Iterator[tuple[str, tree.Instruction]]:
    if isinstance(i, ir.Reduction) and not isinstance(i, ir.Barrier):
        yield "another reduction", replace(i, op=OTHER_REDUCTION[i.op])  # type: ignore[call-arg]


def _other_product(i: tree.Instruction) -> Iterator[tuple[str, tree.Instruction]]:
    if isinstance(i, ir.Matmul):
        yield "another scale", replace(i, scale=i.scale * 1.5)
        yield "another order of operands", replace(i, a=i.b, b=i.a)
        if i.accumulate:
            yield "a missing addend", replace(i, accumulate=())
        if i.bias:
            yield "a missing addend", replace(i, bias=())
        for activation in {"", "relu", "gelu_tanh"} - {i.activation}:
            yield "another epilogue", replace(i, activation=activation)


def _other_attention(i: tree.Instruction) -> Iterator[tuple[str, tree.Instruction]]:
    if isinstance(i, ir.Attention | ir.AttentionBackward):
        yield "another scale", replace(i, scale=i.scale * 1.5)
        yield "another order of operands", replace(i, q=i.k, k=i.q)
        if i.diagonal is not None:
            yield "another mask", replace(i, diagonal=Binary("+", i.diagonal, Const(1)))
            yield "another mask", replace(i, diagonal=None, window=None)
        if i.window:
            yield "another mask", replace(i, window=i.window + 1)
        if i.lengths or i.bias:
            yield "another mask", replace(i, lengths=(), corner="") if i.lengths else replace(i, bias=())


def _other_groups(i: tree.Instruction) -> Iterator[tuple[str, tree.Instruction]]:
    if isinstance(i, ir.Grouped):
        yield "other groups", replace(i, ends=i.starts)  # type: ignore[call-arg]
        yield "other groups", replace(i, first=Binary("+", i.first or Const(0), Const(1)))  # type: ignore[call-arg]


def _other_value(i: tree.Instruction) -> Iterator[tuple[str, tree.Instruction]]:
    if isinstance(i, ir.Fill):
        yield "another constant", replace(i, value=i.value + 1)


def _other_condition(i: tree.Instruction) -> Iterator[tuple[str, tree.Instruction]]:
    if isinstance(i, ir.If):
        yield "another condition", replace(i, condition=Binary("==", i.condition, Const(0)))


def _of_other_rank(i: tree.Instruction, mesh: Mesh) -> Iterator[tuple[str, tree.Instruction]]:
    """Yields the instruction with the coordinates of the next rank in one of its expressions."""
    for expr in tree.expressions(i):
        if any(isinstance(leaf, Coordinate | Rank) for leaf in leaves(expr)):
            yield "another rank", tree.with_expressions(i, lambda e, expr=expr: _next_rank(e, mesh) if e is expr else e)


def _next_rank(expr: Expr, mesh: Mesh) -> Expr:
    match expr:
        case Binary(op, left, right):
            return Binary(op, _next_rank(left, mesh), _next_rank(right, mesh))
        case Coordinate(axis) if axis in dict(mesh.axes):
            return Binary("%", Binary("+", expr, Const(1)), Const(mesh.size_of((axis,))))
        case Rank():
            return Binary("%", Binary("+", expr, Const(1)), Const(mesh.size))
    return expr


RULES = (_other_place, _other_order, _other_reduction, _other_product, _other_attention, _other_groups, _other_value, _other_condition)


def of_instructions(host: HostProgram) -> Iterator[Mutant]:
    """Yields mutants in which one instruction is missing, is changed, or reads another buffer. Also yields mutants in which two
    instructions have swapped operands."""
    parts = bodies(host)
    for at, part in enumerate(parts):
        types = ir.buffer_types(part)
        walked = list(tree.walk(part.body))

        def edited(edits: tree.Edits, at: int = at, part: HostProgram = part) -> HostProgram:
            body = tree.edited(part.body, edits)
            return joined([*parts[:at], replace(part, body=body), *parts[at + 1 :]])

        for number, i in enumerate(walked):
            where = f"{part.name} {number}: {i.lines()[0].strip()}"
            for rule in RULES:
                for kind, other in rule(i):
                    yield kind, where, lambda n=number, o=other, e=edited: e({n: o})  # type: ignore[misc]
            for kind, other in (*_other_operands(i, types), *_of_other_rank(i, part.mesh)):
                yield kind, where, lambda n=number, o=other, e=edited: e({n: o})  # type: ignore[misc]
            if i.work and not tree.bodies(i):
                yield "a missing instruction", where, lambda n=number, e=edited: e({n: ()})  # type: ignore[misc]
        yield from _swapped(walked, types, part.name, edited)


def _other_operands(i: tree.Instruction, types: dict[str, BufferType]) -> Iterator[tuple[str, tree.Instruction]]:
    """Yields the instruction with two operands of the same type swapped, or with another buffer of the same type as operand."""
    reads = [name for name in tree.names(i, "read") if name in types]
    if tree.bodies(i) or not (i.work or isinstance(i, ir.Communication | ir.Call)):
        return
    for one, other in pairwise(reads):
        if one != other and types[one] == types[other]:
            yield "another order of operands", tree.with_names(i, {one: other, other: one}, "read")
    for name in dict.fromkeys(reads):
        alike = [other for other, type in types.items() if type == types[name] and other != name]
        for other in alike[:2]:
            yield "a stale buffer", tree.with_names(i, {name: other}, "read")


def _swapped(walked: list[tree.Instruction], types: dict[str, BufferType], name: str, edited: Callable[..., HostProgram]) -> Iterator[Any]:
    """Yields mutants in which two matmuls, two launches of one kernel, or two calls of one function exchange one operand."""
    by_kind: dict[object, list[int]] = defaultdict(list)
    for number, i in enumerate(walked):
        if isinstance(i, ir.Matmul | ir.Call) or tree.names(i, "launch"):
            by_kind[type(i), tree.names(i, "launch", "call")].append(number)
    for numbers in by_kind.values():
        for one, other in pairwise(numbers):
            a, b = walked[one], walked[other]
            for left, right in zip_longest(tree.names(a, "read"), tree.names(b, "read")):
                if left != right and left in types and types.get(right) == types[left]:
                    edits = {one: tree.with_names(a, {left: right}, "read"), other: tree.with_names(b, {right: left}, "read")}
                    yield "swapped weights of two layers", f"{name} {one}, {other}: %{left}, %{right}", lambda e=edits: edited(e)


# --- one op of a kernel -----------------------------------------------------------------------------------------------


def of_kernels(host: HostProgram) -> Iterator[Any]:
    for at, kernel in enumerate(host.kernels):
        for number, op in enumerate(kernel.ops):
            for kind, other in _other_ops(op):
                ops = (*kernel.ops[:number], other, *kernel.ops[number + 1 :])
                kernels = (*host.kernels[:at], replace(kernel, ops=ops), *host.kernels[at + 1 :])
                yield kind, f"{kernel.name} {number}: {op}", lambda kernels=kernels: replace(host, kernels=kernels)


def _other_ops(op: Op) -> Iterator[tuple[str, Op]]:
    if op.kind in OTHER_OP and (OPS[op.kind].combine is None or OPS[OTHER_OP[op.kind]].combine is not None):
        named = tuple((name, value) for name, value in op.attributes if name in {a.name for a in OPS[OTHER_OP[op.kind]].attributes})
        yield "another op", replace(op, kind=OTHER_OP[op.kind], attributes=named)
    if len(op.operands) == 2 and op.operands[0] != op.operands[1] and OPS[op.kind].cpp:
        yield "another order of operands", replace(op, operands=op.operands[::-1])
    if op.kind in ("add", "subtract") and len(op.tensors) == 2:
        yield "a missing addend", replace(op, operands=(op.operands[0], 0))
    for place, operand in enumerate(op.operands):
        if not isinstance(operand, str) and not isinstance(operand, bool):
            other = operand + 1 if isinstance(operand, int) else operand * 1.25 + 0.25
            yield "another constant", replace(op, operands=(*op.operands[:place], other, *op.operands[place + 1 :]))
    if OPS[op.kind].combine and len(op[AXES]) > 1:
        yield "another reduction", op.with_attribute(AXES, op[AXES][1:])
    if len(op.operands) == 3 and op.kind == "where":
        yield "another order of operands", replace(op, operands=(op.operands[0], op.operands[2], op.operands[1]))


def mutants(host: HostProgram) -> list[Mutant]:
    return [*of_instructions(host), *of_kernels(host)]  # type: ignore[list-item]


# --- verdicts of the check --------------------------------------------------------------------------------------------

CAUGHT, REFUSED, SAME, MISSED = "caught", "refused", "the same in f64", "missed"
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Subject:
    """A fusion, its host program, and the expected results at the sizes of the check and at larger sizes."""

    name: str
    fusion: Fusion
    options: Options = field(default_factory=Options)

    @cached_property
    def host(self) -> HostProgram:
        return lower(self.fusion, self.options)

    @cached_property
    def at(self) -> dict[tuple[tuple[str, int], ...], Expected]:
        """Expected results at the sizes of the check. Omits sizes at which the program has too many elements."""
        return {
            tuple(at.items()): Expected(self.fusion, at)
            for at in sizes_to_check(self.host, NEAR_FACTOR)
            if count_elements(self.fusion, at) < MAX_ELEMENTS
        }

    @cached_property
    def elsewhere(self) -> list[Expected]:
        """Expected results of the comparison in f64: the results of `at`, and results of 5 seeds at larger sizes."""
        larger = {name: 2 * size for name, size in minimal_sizes(self.host).items()} | self.host.depths()
        return [*self.at.values(), Expected(self.fusion, larger, seeds=5)]

    def judge(self, made: Callable[[], HostProgram]) -> str:
        """Returns the verdict on the mutant that `made` returns. REFUSED means that a verifier or `check` rejects the mutant, or that the
        mutant cannot be made or executed."""
        try:
            mutant = made()
            verify_host(mutant)
            if any(self.differs(case) for case in cases(self.fusion, mutant, {})):
                return CAUGHT
            changed = any(_differs_in_f64(mutant, expected) for expected in self.elsewhere)
            if changed:
                check(mutant)
            return MISSED if changed else SAME
        except (HostweaveError, KeyError, ValueError, TypeError, IndexError):
            return REFUSED

    def differs(self, case: Case) -> bool:
        sizes, instances, met = case
        key = tuple(sizes.items())
        if count_elements(self.fusion, sizes) >= MAX_ELEMENTS:
            return False
        expected = self.at[key] if key in self.at else Expected(self.fusion, sizes)
        with np.errstate(all="ignore"):
            return difference(expected, instances, met) is not None


def _differs_in_f64(mutant: HostProgram, expected: Expected) -> bool:
    for program in filter(None, (mutant, with_far_branches(mutant))):
        instances = instantiate(program, expected.sizes)
        with np.errstate(all="ignore"):
            if any(
                output.differs_in_f64(TOLERANCE).any() for output in computed_outputs(expected, instances, match_communications(instances))
            ):
                return True
    return False


def subjects(ranks: int) -> Iterator[Subject]:
    import fusions_from_files as examples
    import moe_reference
    import parts_of_transformers
    import random_fusions
    from attention_cases import keys_in_a_loop

    import hostweave as hw
    from hostweave.base.paths import EXAMPLES
    from hostweave.cli.programs import load_file, programs_in

    found: dict[str, Any] = {**examples.all_fusions(ranks, 3), **examples.more_fusions(ranks), **examples.one_sided_fusions(ranks)}
    found |= {**examples.exchange_fusions(ranks), **examples.pipelines(ranks)}
    found |= {make.__name__: make(ranks, hw.f32) for make in parts_of_transformers.PROGRAMS}
    found |= {f"keys_in_a_loop_{by}": keys_in_a_loop(3, by, hw.bf16) for by in ("p2p", "ring")}
    found |= {f"transformer.py {name}": program for name, program in programs_in(load_file(EXAMPLES / "transformer.py")).items()}
    found |= {"decode": small_llama(ranks, decode=True), "prefill": small_llama(ranks, decode=False)}
    adamw = load_file(EXAMPLES / "adamw.py")
    found |= {**examples.fusions_of_features(ranks), **{f"adamw {stage}": adamw.adamw(ranks, stage) for stage in adamw.ZERO}}
    experts = {"mesh": hw.Mesh(ep=ranks), "EXPERTS": moe_reference.experts_of(ranks), "TOP": moe_reference.TOP, "dtype": hw.f64}
    for name, program in programs_in(load_file(EXAMPLES / "moe.py", experts)).items():
        if isinstance(program, Fusion):
            yield from (Subject(f"{name} by {way} on {ranks} ranks", program, Options(transport=way)) for way in ("auto", "peer"))
    for name, program in found.items():
        if isinstance(program, Fusion):
            yield Subject(f"{name} on {ranks} ranks", program)
    for seed in range(100 * ranks, 100 * ranks + 100):
        transport = "auto" if seed % 5 else "one_sided"
        try:
            subject = Subject(f"random {seed}", random_fusions.Generator(seed).fusion(), Options(transport=transport))
            subject.host.code  # noqa: B018  raises if the program is refused
        except HostweaveError:
            continue
        yield subject


def training_subjects(ranks: int) -> Iterator[Subject]:
    """Programs that train a module: forward and backward pass, and a whole step with AdamW."""
    import torch
    from torch import nn

    import hostweave as hw
    import hostweave.torch

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
            self.up, self.down = nn.Linear(8, 8 * ranks), nn.Linear(8 * ranks, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(nn.functional.gelu(self.up(x), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layers, self.head = nn.Embedding(12, 8), nn.ModuleList([Layer(), Layer()]), nn.Linear(8, 12)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            for layer in self.layers:
                x = layer(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    ids = torch.arange(8 * ranks).reshape(2 * ranks, 4) % 12
    for axis, plan in (
        ("tp", {"up.weight": "tp, -", "up.bias": "tp", "down.weight": "-, tp"}),
        ("dp", {"ids": "dp, -", "labels": "dp, -"}),
    ):
        mesh = hw.Mesh(**{axis: ranks})
        trained = hostweave.torch.compile(Model(), mesh, plan, (ids, ids), training=True)
        module = Model()
        step = hostweave.torch.compile(module, mesh, plan, (ids, ids), optimizer=torch.optim.AdamW(module.parameters(), lr=0.1))
        for name, program in (("forward", trained.program), ("backward", trained.backward), ("step", step.program)):
            yield Subject(f"{name} by {axis} on {ranks} ranks", program.compiled.given, program.compiled.options)


def small_llama(ranks: int, decode: bool) -> Fusion:
    """A Llama whose layers are calls of one function."""
    from hostweave.base.paths import EXAMPLES
    from hostweave.cli.programs import load_file

    example = load_file(EXAMPLES / "llama.py")
    given = {"hidden_size": 8, "intermediate_size": 4 * ranks, "num_attention_heads": 2 * ranks, "num_key_value_heads": ranks}
    config = example.Config(**given, head_dim=4, num_hidden_layers=2, vocab_size=4 * ranks)
    made: Fusion = example.program(config, ranks, decode)
    return made


def judged(count: int, of: Sequence[Subject], seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Kind, position and verdict of about `count` random mutants, spread over the programs and the kinds of errors."""
    each = -(-count // len(of))
    for subject in of:
        chosen = random.Random(f"{seed} {subject.name}")
        by_kind: dict[str, list[Any]] = defaultdict(list)
        for kind, where, made in mutants(subject.host):
            by_kind[kind].append((where, made))
        for kind, several in by_kind.items():
            for where, made in chosen.sample(several, min(len(several), -(-each // len(by_kind)))):
                yield kind, f"{subject.name}: {where}", subject.judge(made)


def main() -> None:
    table: dict[str, Counter[str]] = defaultdict(Counter)
    part, parts = map(int, sys.argv[3:5] or (0, 1))
    made = {"others": lambda: [*subjects(4), *subjects(3)], "training": lambda: [*training_subjects(4), *training_subjects(2)]}
    programs = made[sys.argv[2]]()[part::parts]
    for kind, where, verdict in judged(int(sys.argv[1]) * len(programs), programs):
        table[kind][verdict] += 1
        if verdict == MISSED:
            print(f"missed: {kind}: {where}", flush=True)
    print(f"| mutants of {len(programs)} programs | in all | caught | the same in f64 | refused | missed |\n|---|---|---|---|---|---|")
    for kind, verdicts in [*sorted(table.items()), ("in all", sum(table.values(), Counter()))]:
        print(f"| {kind} | {verdicts.total()} | " + " | ".join(str(verdicts[v]) for v in (CAUGHT, SAME, REFUSED, MISSED)) + " |")


if __name__ == "__main__":
    main()
