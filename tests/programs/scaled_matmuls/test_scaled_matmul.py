"""Scaled matmuls of 8-bit floats: granularities of scales, shardings, chunk loops, epilogues, and matmuls that replace scaled matmuls."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from functools import cache, cached_property
from inspect import Parameter, Signature
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_here import needs_cuda
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.ops.scaled import multiplied
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.machine import H200
from hostweave.types.numpy_dtypes import cast

Array = np.ndarray[Any, Any]
NUMPY = {hw.f8e4m3: ml_dtypes.float8_e4m3fn, hw.f8e5m2: ml_dtypes.float8_e5m2}
KINDS = ("tensor", "row", "vectors", "blocks", "mixed")
M, K, N = 24, 3072, 256
FOUR = pytest.param(4, marks=pytest.mark.slow)  # 2, 3 and 8 ranks cover all code paths of the loops.
TWO = pytest.param(2, marks=pytest.mark.slow)  # Except for all_gather, test_quantised_rows_are_sent_with_their_scales covers 2 ranks.
OTHERS = [("row", 24), ("block", "M")]  # (kind of scales, number of rows) that are tested only with `-m slow`
OLD = replace(H200, no_scales=tuple((kind, "the GPU is old") for kind in ("tensor", "row", "block")))


def scales_of(kind: str, m: int, k: int, n: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return {
        "tensor": ((1, 1), (1, 1)),
        "row": ((m, 1), (1, n)),
        "vectors": ((m, k // 128), (k // 128, n)),
        "blocks": ((m, k // 128), (k // 128, n // 128)),
        "mixed": ((m // 128, k // 128), (k // 128, n)),
    }[kind]


class Operands(dict[str, Array]):
    """Operands a [M, K] and w [N, K], the scales s of a, and the scales t of w."""

    @cached_property
    def product(self) -> Array:
        """The product in float64."""
        a, w = (self[name].astype(np.float64) for name in "aw")
        return multiplied(np, a, w.T, self["s"], self["t"])


@cache
def arrays(kind: str, dtypes: tuple[hw.DType, hw.DType] = (hw.f8e4m3, hw.f8e4m3), m: int = M, k: int = K, n: int = N) -> Operands:
    """Random operands. The scales have many magnitudes."""
    random = np.random.default_rng(len(kind))
    of_a, of_b = scales_of(kind, m, k, n)
    made = {name: random.standard_normal(shape) for name, shape in (("a", (m, k)), ("w", (n, k)))}
    scales = {name: np.exp2(random.uniform(-6, 6, shape)).astype(np.float32) for name, shape in (("s", of_a), ("t", of_b))}
    return Operands({"a": made["a"].astype(NUMPY[dtypes[0]]), "w": made["w"].astype(NUMPY[dtypes[1]]), **scales})


def near(y: Array, want: Array, dtype: hw.DType = hw.f32, terms: int = 1) -> None:
    """Compares `y` with `want`, relative to the largest value. The tolerance is `terms` roundings of `dtype`, or twice as much for f32."""
    unit = {hw.f32: 2.0**-23, hw.bf16: 2.0**-8, hw.f16: 2.0**-11}[dtype]
    assert y.shape == want.shape
    np.testing.assert_array_less(np.abs(y.astype(np.float64) - want), terms * unit * (np.abs(want).max() + 1e-30))


def sharded(ranks: int, split: str, dims: str, sizes: tuple[int, int]) -> list[Any]:
    return [f"{size}@x" if dim == split and size % ranks == 0 and size > 1 else size for dim, size in zip(dims, sizes, strict=True)]


def rows_of(kind: str) -> int:
    return 256 if kind == "mixed" else M


def product(
    ranks: int,
    kinds: Collection[str],
    splits: str,
    out: hw.DType = hw.f32,
    dtypes: tuple[hw.DType, hw.DType] = (hw.f8e4m3, hw.f8e4m3),
) -> Fusion:
    """Makes a matmul for each kind of scales and each dim in `splits`. An operand or scale is sharded along the dim if the size of the dim
    is a multiple of `ranks`, and not 1."""
    types: dict[str, hw.TensorType] = {}
    ends = [f"{kind}_{split}" for kind in kinds for split in splits]
    for kind, split in itertools.product(kinds, splits):
        m, end = rows_of(kind), f"{kind}_{split}"
        of_a, of_b = scales_of(kind, m, K, N)
        types[f"a_{end}"] = dtypes[0][tuple(sharded(ranks, split, "MK", (m, K)))]
        types[f"w_{end}"] = dtypes[1][tuple(sharded(ranks, split, "NK", (N, K)))]
        types[f"s_{end}"] = hw.f32[tuple(sharded(ranks, split, "MK", of_a))]
        types[f"t_{end}"] = hw.f32[tuple(sharded(ranks, split, "KN", of_b))]

    def products(**given: hw.Tensor) -> tuple[hw.Tensor, ...]:
        operands = ([given[f"{name}_{end}"] for name in "awst"] for end in ends)
        return tuple(hw.scaled_matmul(a, w.T, s, t, out_dtype=out) for a, w, s, t in operands)

    products.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in types])  # type: ignore[attr-defined]
    return hw.fusion(mesh=hw.Mesh(x=ranks), **types)(products)


def given_to(splits: str, **given: dict[str, Array]) -> dict[str, Array]:
    """Arguments of a fusion made by `product`. `given` has arrays for each kind of scales. Each dim in `splits` gets the same arrays."""
    return {f"{name}_{kind}_{split}": array for kind, of in given.items() for split in splits for name, array in of.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, FOUR, 8])
def test_kinds_and_shardings(ranks: int) -> None:
    given = {kind: arrays(kind, m=rows_of(kind)) for kind in KINDS}
    program = hw.compile(product(ranks, KINDS, "MKN"))
    results = program.run(**given_to("MKN", **given))
    for (kind, _), y in zip(itertools.product(KINDS, "MKN"), results, strict=True):
        near(y, given[kind].product, terms=ranks)
    assert "composed" not in program.explain()


@pytest.mark.parametrize("out", [hw.bf16, hw.f16], ids=str)
@pytest.mark.parametrize("dtypes", [(hw.f8e4m3, hw.f8e5m2), (hw.f8e5m2, hw.f8e4m3), (hw.f8e5m2, hw.f8e5m2)], ids=str)
def test_dtypes(dtypes: tuple[hw.DType, hw.DType], out: hw.DType) -> None:
    large = arrays("row", dtypes)
    given = Operands(large, s=large["s"] / 256, t=large["t"] / 256)
    program = hw.compile(product(2, ["row"], "M", out, dtypes))
    near(program.run(**given_to("M", row=given)), given.product, out)
    is_composed = dtypes[0] == dtypes[1] == hw.f8e5m2
    assert (
        "composed of casts, a matmul and multiplications, because cuBLASLt has no product of f8e5m2" in program.explain()
    ) == is_composed


def test_results_are_rounded_only_once() -> None:
    """Operands are small integers, and scales are powers of two. So all sums are exact, and results are bitwise equal to the rounded
    reference."""
    random = np.random.default_rng(0)
    given = Operands(
        {name: random.integers(-4, 5, shape).astype(ml_dtypes.float8_e4m3fn) for name, shape in (("a", (M, K)), ("w", (N, K)))}
    )
    given |= {
        "s": np.exp2(random.integers(-3, 4, (M, 1))).astype(np.float32),
        "t": np.exp2(random.integers(-3, 4, (1, N))).astype(np.float32),
    }
    y = hw.compile(product(2, ["row"], "M", hw.bf16)).run(**given_to("M", row=given))
    np.testing.assert_array_equal(y.astype(np.float64), cast(given.product.astype(np.float32), hw.bf16).astype(np.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_host_programs_compute_the_same(kind: str) -> None:
    given = arrays(kind, m=rows_of(kind))
    for options in (Options(), Options(machine=OLD)):
        host = lower(product(2, [kind], "K"), options)
        assert ("scales" in str(host)) == (options.machine is None)
        near(interpret(host, given_to("K", **{kind: given}))[0][host.outputs[0].name], given.product, terms=64)


# --- chunk loops ------------------------------------------------------------------------------------------------------


LOOPED = ("tensor", "row", "blocks")


def loops(ranks: int, split: str, streamed: Any) -> Fusion:
    types: dict[str, hw.TensorType] = {}
    for kind in LOOPED:
        of_a, of_b = scales_of(kind, 48, K, N)
        types[f"a_{kind}"] = hw.f8e4m3[tuple(sharded(ranks, split, "MK", (48, K)))]
        types[f"w_{kind}"] = hw.f8e4m3[tuple(sharded(ranks, split, "NK", (N, K)))]
        types[f"s_{kind}"] = hw.f32[tuple(sharded(ranks, split, "MK", of_a))]
        types[f"t_{kind}"] = hw.f32[tuple(sharded(ranks, split, "KN", of_b))]

    def loops(**given: hw.Tensor) -> tuple[hw.Tensor, ...]:
        names = ([f"{name}_{kind}" for name in "awst"] for kind in LOOPED)
        return tuple(streamed(hw.scaled_matmul(given[a], given[w].T, given[s], given[t], out_dtype=hw.f32)) for a, w, s, t in names)

    loops.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in types])  # type: ignore[attr-defined]
    return hw.fusion(mesh=hw.Mesh(x=ranks), **types)(loops)


# Algorithms of loops, and the number of pieces of each chunk.
LOOPS = ("p2p", 1), ("ring", 1), ("put", 1), pytest.param("put", 2, marks=pytest.mark.more), ("broadcast", 1)


def run_loops(fusion: Fusion, terms: int) -> None:
    given = {kind: arrays(kind, m=48) for kind in LOOPED}
    results = hw.compile(fusion).run(**{f"{name}_{kind}": array for kind in LOOPED for name, array in given[kind].items()})
    for kind, y in zip(LOOPED, results, strict=True):
        near(y, given[kind].product, terms=terms)


@pytest.mark.parametrize("ranks", [TWO, 3, FOUR, 8])
@pytest.mark.parametrize(("algorithm", "pieces"), [*LOOPS, ("all_gather", 0)])
def test_gathers_in_loops(algorithm: str, pieces: int, ranks: int) -> None:
    """Matmuls are pipelined with the gathers of their rows and of the scales of the rows."""
    fusion = loops(ranks, "M", lambda y: y.stream(0, ranks * pieces or 2, algorithm=algorithm))
    host = lower(fusion, Options())
    assert str(host).count("fork loop") == (len(LOOPED) if pieces else 1)  # The loops with all_gather are merged.
    outside = [i for i in host.body if isinstance(i, ir.Communication)]
    assert not [i for i in outside if not isinstance(i, ir.OneSided)]
    run_loops(fusion, 1)


@pytest.mark.parametrize(("kind", "rows"), [("row", "M"), ("block", 24), *(pytest.param(*c, marks=pytest.mark.slow) for c in OTHERS)])
@pytest.mark.parametrize(("algorithm", "pieces"), LOOPS)
def test_quantised_rows_are_sent_with_their_scales(kind: str, algorithm: str, pieces: int, rows: int | str) -> None:
    """In each iteration, values and scales are sent in one group, or are read after one signal. This holds for any number of rows."""
    ranks = 2

    @hw.fusion(mesh=hw.Mesh(x=ranks), a=hw.f32[f"{rows}@x", 256], w=hw.f8e4m3[32, 256])
    def gathered(a: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        a, s = hw.quantize(a, kind)
        t = hw.full((1, 32) if kind == "row" else (2, 32), 2.0, hw.f32)
        return hw.scaled_matmul(a, w.T, s, t, out_dtype=hw.f32).stream(0, ranks * pieces, algorithm=algorithm)

    host, random = lower(gathered, Options()), np.random.default_rng(0)
    (loop,) = (i for i in host.body if isinstance(i, ir.For))
    found = list(tree.walk((loop,)))
    kinds = {"p2p": ir.Group, "ring": ir.Group, "put": ir.WaitSignal, "broadcast": ir.Group}
    assert len([i for i in found if isinstance(i, kinds[algorithm])]) == 1
    assert len([i for i in found if isinstance(i, ir.Get | ir.Recv | ir.Broadcast)]) == 2
    assert not any(isinstance(i, ir.Copy) and i.src in ("a", "s") for i in found)  # The local shard is used without a copy.
    program = hw.compile(gathered)
    for count in (4, 12, 20) if rows == "M" else (24,):
        a, w = (np.exp2(random.integers(-3, 4, shape)).astype(np.float32) for shape in ((count, 256), (32, 256)))
        y = program.run(a, w.astype(ml_dtypes.float8_e4m3fn))
        near(y, a.astype(np.float64) @ w.T * 2, terms=4)


@pytest.mark.parametrize("ranks", [2, 3, FOUR, 8])
@pytest.mark.parametrize("algorithm", ["p2p", "ring", "put", "reduce_scatter", "all_reduce"])
def test_sums_in_loops(algorithm: str, ranks: int) -> None:
    rows, chunks = (48, 2) if algorithm == "all_reduce" else ("48@x", 2 if algorithm == "reduce_scatter" else ranks)
    run_loops(loops(ranks, "K", lambda y: hw.reshard(y, rows, N).stream(0, chunks, algorithm=algorithm)), ranks + 1)


def test_the_compiler_chooses_a_loop() -> None:
    @hw.fusion(mesh=hw.Mesh(x=8), a=hw.f8e4m3["M@x", 8192], w=hw.f8e4m3["7168@x", 8192], s=hw.f32["M@x", 1], t=hw.f32[1, "7168@x"])
    def layer(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor) -> hw.Tensor:
        return hw.scaled_matmul(a, w.T, s, t)

    text = str(lower(layer, Options(sizes={"M": 32768})))
    assert "choice %a_gathered of @layer predicted: put(" in text
    assert "f8e4m3[M, 8192]" in text
    assert "bf16[M, 8192]" not in text
    assert "all_gather" not in text[text.index("host @layer") :]


@pytest.mark.parametrize("kind", ["vectors", "blocks"])
@pytest.mark.parametrize("algorithm", ["", "ring", "put"])
def test_numbers_of_rows_that_need_padding(algorithm: str, kind: str) -> None:
    """With scales [M, K/128], more than 16 rows are padded to a multiple of 4, as cuBLASLt requires."""
    of_a, of_b = scales_of(kind, M, K, N)

    @hw.fusion(
        mesh=hw.Mesh(x=2),
        a=hw.f8e4m3["M", f"{K}@x"],
        w=hw.f8e4m3[N, f"{K}@x"],
        s=hw.f32["M", f"{of_a[1]}@x"],
        t=hw.f32[f"{of_b[0]}@x", of_b[1]],
    )
    def summed(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor) -> hw.Tensor:
        y = hw.reshard(hw.scaled_matmul(a, w.T, s, t, out_dtype=hw.f32), "M@x" if algorithm else "M", N)
        return y.stream(0, 2, algorithm=algorithm) if algorithm else y

    program = hw.compile(summed)
    for m in (2, 8, 10, 36) if algorithm else (0, 1, 3, 4, 17):
        given = arrays(kind, m=m)
        near(program.run(**given), given.product, terms=3) if m else program.run(**given)


def test_named_sizes_of_blocks() -> None:
    """The row stride of scales of 128 x 128 blocks is a multiple of 4 elements, even if sizes are known only at the call."""

    @hw.fusion(a=hw.f32["M", "K"], w=hw.f32["N", "K"])
    def of_blocks(a: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        (a, s), (w, t) = hw.quantize(a, "block"), hw.quantize(w, "block2d")
        return hw.scaled_matmul(a, w.T, s, t.T, out_dtype=hw.f32)

    program, random = hw.compile(of_blocks), np.random.default_rng(0)
    for m, k in ((20, 512), (17, 384)):
        a, w = (np.exp2(random.integers(-3, 4, shape)).astype(np.float32) for shape in ((m, k), (256, k)))
        near(program.run(a, w), a.astype(np.float64) @ w.T, terms=4)


def test_a_bias_in_f32() -> None:
    """If the result of an 8-bit product is f32, cuBLASLt reads the bias as bf16. So a kernel adds a bias in f32."""

    @hw.fusion(a=hw.f8e4m3["M", K], w=hw.f8e4m3[N, K], s=hw.f32["M", 1], t=hw.f32[1, N], b=hw.f32[N])
    def ended(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
        return hw.relu(hw.scaled_matmul(a, w.T, s, t, out_dtype=hw.f32) + b)

    assert " bias " not in str(lower(ended, Options()))
    given = arrays("row")
    near(hw.compile(ended).run(**given, b=np.full(N, 3, np.float32)), np.maximum(given.product + 3, 0), terms=2)


# --- epilogues, layouts, errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_epilogues_and_empty_operands(kind: str) -> None:
    m = rows_of(kind)
    of_a, of_b = scales_of(kind, m, K, N)

    @hw.fusion(a=hw.f8e4m3[m, K], w=hw.f8e4m3[K, N], s=hw.f32[of_a], t=hw.f32[of_b], b=hw.bf16[N], r=hw.bf16[m, N])
    def ended(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor, b: hw.Tensor, r: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return hw.relu(hw.scaled_matmul(a, w, s, t) + b), hw.scaled_matmul(-a, w, s, t) * 2.0 + r

    host = str(lower(ended, Options()))
    assert " bias %b activation relu -> " in host
    assert " scaled 2.0 accumulate %r -> " in host
    given = arrays(kind, m=m)
    b, r = np.full(N, 3.0, ml_dtypes.bfloat16), np.full((m, N), -1.0, ml_dtypes.bfloat16)
    y, z = hw.compile(ended).run(a=given["a"], w=np.ascontiguousarray(given["w"].T), s=given["s"], t=given["t"], b=b, r=r)
    near(y, np.maximum(given.product + 3, 0), hw.bf16, 2)
    near(z, -2 * given.product - 1, hw.bf16, 3)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 32, 32), (3, 0, 32), (1, 16, 16), (5, 128, 16)])
def test_small_sizes(m: int, k: int, n: int) -> None:
    @hw.fusion(a=hw.f8e4m3["M", "K"], w=hw.f8e4m3["N", "K"], s=hw.f32["M", 1], t=hw.f32["N", 1])
    def small(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor) -> hw.Tensor:
        return hw.scaled_matmul(a, w.T, s, t.T, out_dtype=hw.f32)

    given = arrays("row", m=m, k=k, n=n)
    y = hw.compile(small).run(a=given["a"], w=given["w"], s=given["s"], t=given["t"].reshape(n, 1))
    near(y, given.product) if m else None
    assert y.shape == (m, n)


def test_the_scale_of_a_row_is_not_sharded() -> None:
    """The inner dim has size 1, like the scales. More ranks share it."""

    @hw.fusion(mesh=hw.Mesh(x=3), a=hw.f32["M", 1], b=hw.f32["N", "1@x"])
    def outer(a: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
        (first, scale_a), (second, scale_b) = (hw.quantize(t, "row") for t in (a, b))
        return hw.scaled_matmul(first, second.T, scale_a, scale_b.T, out_dtype=hw.f32)

    hw.compile(outer).check()


def test_sizes_that_tensor_cores_do_not_support() -> None:
    """If K or N is an int that is not a multiple of 16, casts and a matmul replace the scaled matmul. Symbolic sizes must be multiples."""

    @hw.fusion(a=hw.f8e4m3["M", 24], w=hw.f8e4m3[20, 24], s=hw.f32["M", 1], t=hw.f32[1, 20])
    def odd(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor) -> hw.Tensor:
        return hw.scaled_matmul(a, w.T, s, t, out_dtype=hw.f32)

    given, program = arrays("row", m=5, k=24, n=20), hw.compile(odd)
    near(program.run(**given), given.product, terms=8)
    assert "are multiples of 16; pad them" in program.explain()

    @hw.fusion(a=hw.f8e4m3["M", "K"], w=hw.f8e4m3["N", "K"], s=hw.f32["M", 1], t=hw.f32[1, "N"])
    def named(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor) -> hw.Tensor:
        return hw.scaled_matmul(a, w.T, s, t)

    with pytest.raises(ExecutionError, match=r"scaled matmul: 5x24 times 24x20: cuBLASLt multiplies .* are multiples of 16; pad them"):
        hw.compile(named).run(**given)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_composed_on_a_machine_without_scales(ranks: int) -> None:
    given = {kind: arrays(kind, m=rows_of(kind)) for kind in KINDS}
    program = hw.compile(product(ranks, KINDS, "M"), options=Options(machine=OLD))
    for kind, y in zip(KINDS, program.run(**given_to("M", **given)), strict=True):
        near(y, given[kind].product, terms=64)
    reason = "composed of casts, a matmul and multiplications, because the GPU is old"
    assert program.explain().count(reason) == len(KINDS)


def test_mistakes() -> None:
    def fails(message: str, out: hw.DType = hw.bf16, **types: hw.TensorType) -> None:
        given = {"a": hw.f8e4m3["M", "K"], "w": hw.f8e4m3["K", "N"], "s": hw.f32["M", 1], "t": hw.f32[1, "N"]} | types
        with pytest.raises(ProgramError, match=message):
            hw.fusion(**given)(lambda a, w, s, t: hw.scaled_matmul(a, w, s, t, out_dtype=out))

    fails("bf16.*not a tensor of 8-bit floats; use hw.quantize", a=hw.bf16["M", "K"])
    fails("scales bf16.*not of f32", s=hw.bf16["M", 1])
    fails(r"do not fit .* they must be \[1, 1\] and \[1, 1\]", t=hw.f32[1, 1])
    fails("exactly 2 are needed; use hw.reshape", a=hw.f8e4m3[2, "M", "K"])
    fails("inner dims differ", w=hw.f8e4m3["L", "N"])
    fails("out_dtype=f64 is none of bf16, f16, f32", out=hw.f64)


@needs_cuda
def test_compiles_and_links_for_cuda() -> None:
    program = hw.compile(product(2, KINDS, "K"), target="cuda")
    assert "warning" not in (program.folder / "build.log").read_text()
    for kind in KINDS:
        program = hw.compile(product(2, [kind], "K"), target="cuda")
        for mode in {"tensor": ["SCALAR"], "row": ["OUTER_VEC"], "vectors": ["VEC128"]}.get(kind, ["VEC128", "BLK128x128"]):
            assert f"CUBLASLT_MATMUL_MATRIX_SCALE_{mode}_32F" in program.source
        assert "composed" not in program.explain()
