"""Properties in the op table that passes rely on, tested over a finite field: linearity, and dims that may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from op_examples import EXAMPLES

import hostweave as hw
from hostweave.check.check import check
from hostweave.check.results.arithmetic import MULTIPLICATIVE_EXP, RANDOM_EXP, function_of, run_fusion
from hostweave.check.results.field import PRIME
from hostweave.check.results.functions import Functions
from hostweave.check.results.inputs import random_inputs
from hostweave.check.results.ranks import OPS_OF_REDUCTIONS
from hostweave.check.results.samples import Real, Samples, apply
from hostweave.fusion_ir.ir import Fusion, Op, attributes
from hostweave.fusion_ir.ops import OPS, index_map, operand_types
from hostweave.fusion_ir.ops.definition import bound_attributes
from hostweave.fusion_ir.ops.grouped import GROUPED
from hostweave.fusion_ir.ops.reductions import as_term
from hostweave.options import Options
from hostweave.pipeline import lower, stages
from hostweave.types.numpy_dtypes import computing_dtype
from hostweave.types.size import Size
from hostweave.types.tensor import block_of

SIZES = {"M": 4, "N": 6, "H": 4, "G": 2, "S": 4, "T": 6}
SEEDS = 3
RANKS = 2  # number of ranks that shard a dim


def attention(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor, bias: hw.Tensor) -> hw.Tensor:
    return hw.scaled_dot_product_attention(q, k, v, attn_mask=bias)


HEADS = {"q": hw.f32[2, "H", "S", 8], "k": hw.f32[2, "H", "T", 8], "v": hw.f32[2, "H", "T", 8], "bias": hw.f32["H", "S", "T"]}
# In EXAMPLES, `astype` casts to i32, which is not linear. `pad` pads both dims, so ranks can share neither dim.
OTHERS: dict[str, Callable[[hw.Tensor], hw.Tensor]] = {
    "astype": lambda x: hw.astype(x, hw.f32),
    "pad": lambda x: hw.pad(x, (1, 2), value=7),
}
FUSIONS: dict[str, Fusion] = {
    kind: hw.fusion(mesh=hw.Mesh(x=RANKS), x=hw.f64["M", "N"])(lambda x, function=function: function(x))
    for kind, function in ({kind: function for kind, (function, _) in EXAMPLES.items()} | OTHERS).items()
}
FUSIONS["attention"] = hw.fusion(mesh=hw.Mesh(x=RANKS), **HEADS)(attention)
HALVES = """fusion @h(%x: f64[2, M, N]) mesh(x=2) {
  %y: f64[2, M, N] = reverse_second(%x, axis=1, halves=0)
  return %y
}
"""
FUSIONS["reverse_second"] = Fusion.parse(HALVES)
STARTS = """fusion @s(%n: i64[M], %x: f64[N]) mesh(x=2) {
  %rows: i64[N] = iota(offset=0)
  %y: i64[M] = start(%n, %rows)
  return %y
}
"""
FUSIONS["start"] = Fusion.parse(STARTS)


def gradients() -> str:
    masked, rows, given = "scale=0.5, bias=true", "f32[2, H, S, 8]", "%q, %k, %v, %o, %g, %lse, %bias"
    return f"""fusion @g(%q: {rows}, %k: f32[2, H, T, 8], %v: f32[2, H, T, 8], %g: {rows}, %bias: f32[H, S, T]) mesh(x=2) {{
  %o: {rows} = attention(%q, %k, %v, %bias, {masked})
  %lse: f32[2, H, S] = attention_lse(%q, %k, %bias, {masked})
  %dq: {rows} = attention_query_gradient({given}, {masked})
  %dk: f32[2, H, T, 8] = attention_key_gradient({given}, {masked})
  %dv: f32[2, H, T, 8] = attention_value_gradient({given}, {masked})
  %db: f32[H, S, T] = attention_bias_gradient({given}, {masked})
  return %dq, %dk, %dv, %db
}}
"""


@dataclass(frozen=True)
class Case:
    """An op, and two independent sets of operands."""

    op: Op
    fusion: Fusion
    operands: tuple[list[Any], list[Any]]
    functions: Functions

    def run(self, operands: Sequence[Any], shape: tuple[int, ...] | None = None, op: Op | None = None) -> Samples:
        op = op or self.op
        whole = tuple(size.bind(SIZES) for size in op.result.type.shape)
        stated = OPS[op.kind].stated_type(lambda: shape or whole, computing_dtype(op.result.type.dtype))
        result: Samples = apply(partial(function_of(op), self.functions, **bound_attributes(op, SIZES), **stated), *operands)
        return result


def cases(fusion: Fusion, functions: Functions) -> list[Case]:
    names = (*(v.name for v in fusion.inputs), *(op.result.name for op in fusion.ops))
    every = replace(fusion, outputs=names, donated=())
    given = random_inputs(fusion, SIZES, SEEDS, functions, {})
    others = {name: x if not isinstance(x, Real) else other(x) for name, x in given.items()}
    with np.errstate(all="ignore"):
        values = [dict(zip(names, run_fusion(every, inputs, SIZES, functions), strict=True)) for inputs in (given, others)]
    return [
        Case(op, fusion, tuple([of[o] if isinstance(o, str) else o for o in op.operands] for of in values), functions)  # type: ignore[arg-type]
        for op in fusion.ops
        if not op.callee
    ]


def other(x: Real) -> Real:
    random = np.random.default_rng(x.size)
    return type(x).from_components(random.standard_normal(x.value.shape), random.integers(1, PRIME, x.value.shape, np.uint64))


def of_kind(kind: str, functions: Functions = RANDOM_EXP) -> Case:
    return only(FUSIONS[kind], kind, functions)


def only(fusion: Fusion, kind: str, functions: Functions = RANDOM_EXP) -> Case:
    return next(case for case in cases(fusion, functions) if case.op.kind == kind)


def same(x: Samples, y: Samples) -> bool:
    return x.shape == y.shape and not x.differs(y).any()


# --- linear -----------------------------------------------------------------------------------------------------------

LINEAR = [kind for kind, op in OPS.items() if op.linear]


@pytest.mark.parametrize("kind", [kind for kind in LINEAR if kind in FUSIONS])
def test_linear(kind: str) -> None:
    case = of_kind(kind)
    if isinstance(case.operands[0][0], Real) or not isinstance(case.operands[0][0], Samples):
        expect_linear(case, OPS[kind].linear)


def expect_linear(case: Case, fact: str) -> None:
    add, (xs, ys) = case.functions.add, case.operands
    shape = next(x.value.shape for x in xs if isinstance(x, Samples))
    zero = np.zeros(shape)
    xs, ys = ([x if isinstance(x, Samples) else other(Real.of(zero[None])[0]) for x in of] for of in (xs, ys))
    ys = [other(y) if isinstance(y, Real) else y for y in ys]  # Operands differ even if one value is used twice.
    with np.errstate(all="ignore"):
        if fact == "first":
            assert same(case.run([add(xs[0], ys[0]), *xs[1:]]), add(case.run(xs), case.run([ys[0], *xs[1:]])))
        elif fact == "factors":
            for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
                one, two, both = ([*xs[:i], each, *xs[i + 1 :]] for each in (x, y, add(x, y)))
                assert same(case.run(both), add(case.run(one), case.run(two)))
        else:
            assert same(case.run([add(x, y) for x, y in zip(xs, ys, strict=True)]), add(case.run(xs), case.run(ys)))


@pytest.mark.parametrize("kind", ["maximum", "abs", "reciprocal", "exp", "pad", "relu"])
def test_nonlinear_ops_are_detected(kind: str) -> None:
    with pytest.raises(AssertionError):
        expect_linear(of_kind(kind), "first")


# --- dims that ranks share --------------------------------------------------------------------------------------------


def expect_shared(case: Case) -> int:
    """For each index label that ranks may share, cuts the dims with this label into two blocks. Tests that the op on blocks gives a block
    of the result, or a partial result.

    Returns the number of tested labels.
    """
    types = operand_types(case.op, {name: value.type for name, value in case.fusion.values().items()})
    indices, definition, tried = index_map(case.op, types), OPS[case.op.kind], 0
    for label in dict.fromkeys(label for labels in indices.operands for label in labels if label):
        if label in dict(indices.blocks) or not (label in indices.result or definition.partial):
            continue
        blocks = [
            [halved(operand, labels, label, rank) for operand, labels in zip(case.operands[0], indices.operands, strict=True)]
            for rank in range(RANKS)
        ]
        if any(part is None for block in blocks for part in block):
            continue  # A dim of odd size cannot be halved.
        if case.op.kind in GROUPED and label == "t":  # Groups end at global row numbers, so a rank needs the number of its first row.
            blocks = [[*block, rank * len(block[0])] for rank, block in enumerate(blocks)]
        whole = case.run(case.operands[0])
        if label in indices.result:
            dim = indices.result.index(label)
            shape = (*whole.shape[:dim], whole.shape[dim] // RANKS, *whole.shape[dim + 1 :])
            joined = case.functions.concatenate([case.run(block, shape) for block in blocks], dim)
        else:
            term = as_term(case.op, types[0])
            joined = combine(case.functions, definition.partial)(*(case.run(block, op=term) for block in blocks))
        assert same(joined, whole), f"{case.op.kind}: {label}"
        tried += 1
    return tried


def combine(functions: Functions, reduction: str) -> Callable[..., Samples]:
    result: Callable[..., Samples] = getattr(functions, OPS_OF_REDUCTIONS[reduction])
    return result


def halved(operand: Any, labels: Sequence[str | None], label: str, rank: int) -> Any:
    """Returns the block of a rank, or None if a dim labelled `label` has an odd size."""
    for dim, own in enumerate(labels):
        if own == label:
            size = operand.shape[dim]
            if size % RANKS:
                return None
            operand = operand[(slice(None),) * dim + (slice(size // RANKS * rank, size // RANKS * (rank + 1)),)]
    return operand


@pytest.mark.parametrize("kind", FUSIONS)
def test_shared(kind: str) -> None:
    with np.errstate(all="ignore"):
        for case in cases(FUSIONS[kind], RANDOM_EXP):
            expect_shared(case)


def test_gradients_of_attention_are_shared() -> None:
    with np.errstate(all="ignore"):
        tried = {case.op.kind: expect_shared(case) for case in cases(Fusion.parse(gradients()), MULTIPLICATIVE_EXP)}
    assert min(tried.values()) >= 2


def test_every_op_is_tested() -> None:
    with np.errstate(all="ignore"):
        shared = {case.op.kind for kind in FUSIONS for case in cases(FUSIONS[kind], RANDOM_EXP) if expect_shared(case)}
    gradients = {kind for kind in OPS if kind.startswith("attention_")}
    have_no_facts = {"call", "repeat", "kernel", "output"}  # The ops of the callee have facts. Users state the types of kernels.
    assert set(OPS) == shared | gradients | {"iota", "fill", "renumber", *STEPS} | have_no_facts
    assert {kind for kind, op in OPS.items() if op.linear} <= set(FUSIONS) | {"renumber"}
    assert {op.partial for op in OPS.values() if op.linear} == {"", "sum"}


@pytest.mark.parametrize("kind", ["iota", "fill"])
def test_a_rank_computes_its_shard_from_indices(kind: str) -> None:
    case = of_kind(kind)
    assert OPS[kind].arity == 0
    whole = case.run(case.operands[0])
    half = whole.shape[0] // RANKS
    for rank in range(RANKS):
        op = replace(case.op, attributes=attributes(offset=Size(rank * half))) if kind == "iota" else case.op
        assert same(case.run(case.operands[0], (half, *whole.shape[1:]), op), whole[rank * half : (rank + 1) * half])


RENUMBERED = """fusion @r(%x: f64[M@x, N]) mesh(x=2) {
  %y: f64[M@zigzag(x), N] = renumber(%x, axis=0, sources=(0, 2, 3, 1))
  return %y
}
"""


def test_renumber_moves_no_element() -> None:
    """The op `renumber` changes only the positions of rows in the global tensor, not the local rows of a rank."""
    fusion = Fusion.parse(RENUMBERED)
    case = only(fusion, "renumber")
    expect_linear(case, OPS["renumber"].linear)
    (x,), y = case.operands[0], case.run(case.operands[0])
    assert not same(x, y)
    for rank in range(RANKS):
        before, after = (block_of(type, fusion.mesh, rank, y.shape) for type in (fusion.inputs[0].type, case.op.result.type))
        assert same(x[before], y[after])


PARTIAL = "%s: f32[K] partial(sum, x) = sum(%x, axis=(0,))\n"
STEPS = {  # Steps of reshards, on a mesh of 2 x 2.
    "all_gather": ("M@x", "%y: f32[M, K] pinned = reshard(%x)"),
    "shard": ("M", "%y: f32[M@x, K] pinned = reshard(%x)"),
    "permute_shards": ("M@x,y", "%y: f32[M@y,x, K] pinned = reshard(%x)"),
    "all_to_all": ("M@x", "%y: f32[M, K@x] pinned = reshard(%x)"),
    "all_reduce": ("M@x", f"{PARTIAL}%y: f32[K] = reshard(%s)"),
    "reduce_scatter": ("M@x", f"{PARTIAL}%y: f32[K@x] = reshard(%s)"),
    "reduce": ("M@x", f"{PARTIAL}%y: f32[K] on mesh(of ranks 3) = reshard(%s)"),
    "transfer": ("M@x", "%y: f32[M, K@z] on mesh(z=2 of ranks 1, 2) pinned = reshard(%x)"),
}


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_of_a_reshard_keeps_the_values(kind: str) -> None:
    dim, body = STEPS[kind]
    fusion = Fusion.parse(f"fusion @f(%x: f32[{dim}, K]) mesh(x=2, y=2) {{\n{body}\nreturn %y\n}}\n")
    made = stages(fusion, Options())
    assert kind in {op.kind for _, stage in made if isinstance(stage, Fusion) for op in stage.ops}
    host = lower(fusion, Options())
    assert check(host, fusion=fusion) == ()


def test_a_wrong_fact_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, wrong in (("max", "sum"), ("sum", "max"), ("prod", "sum"), ("matmul", "max")):
        with monkeypatch.context() as patched:
            patched.setitem(OPS, kind, replace(OPS[kind], partial=wrong))
            with pytest.raises(AssertionError), np.errstate(all="ignore"):
                expect_shared(of_kind(kind))
