"""Norms, attention, rotary embeddings, linears and random numbers in whole programs on the CPU device, compared with NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled, lowered
from numpy.typing import NDArray

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir, tree
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType

Array = NDArray[Any]
SIZES = {"B": 3, "S": 12, "T": 12, "M": 12, "N": 72, "K": 20, "F": 6}
TOLERANCE = {"f64": 1e-13, "f32": 2e-5, "bf16": 3e-2}  # absolute and relative: values are about 1


def norms(ranks: int, t: DType) -> Fusion:
    """Norms and reductions of sharded rows. One norm reads the sum of r and the result of a dropout.
    Another norm reads the sum of q and the result of a norm."""

    rows = {"p": t["M@x", 32], "q": t["M@x", 32], "v": t[32], "u": t[32]}

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["M@x", "N"], r=t["M@x", "N"], w=t["N"], b=t["N"], seed=hw.u32[()], **rows)
    def norms(x, r, w, b, seed, p, q, v, u):  # type: ignore[no-untyped-def]
        h = (hw.dropout(x + b, 0.25, seed) + r).named("h")
        statistics = hw.var(x, axis="N"), hw.argmax(hw.abs(x), axis="N"), hw.clip(x, -0.5, 0.5)
        added = q + hw.rms_norm(p, v)
        return (
            h,
            hw.softmax(h),
            hw.log_softmax(x, "N"),
            hw.layer_norm(h, w, b),
            hw.rms_norm(x, w),
            *statistics,
            added,
            hw.rms_norm(added, u),
        )

    return norms


def columns(ranks: int, t: DType) -> Fusion:
    """Reductions over a sharded dim, and a softmax over an unsharded dim. Sums and maxima are all-reduced. argmax gathers its operand."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["M", "N@x"], w=t["N@x"])
    def columns(x, w):  # type: ignore[no-untyped-def]
        return hw.softmax(x), hw.rms_norm(x, w), hw.softmax(x, axis="M"), hw.argmax(x, axis=1), hw.argmax(x)

    return columns


def in_loops(ranks: int, t: DType) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["M", "K@x"], w=t["K@x", "N"], b=t["N"], r=t["M", "N"])
    def in_loops(x, w, b, r):  # type: ignore[no-untyped-def]
        h = hw.reshard(hw.matmul(x, w), "M@x", "N")
        y = hw.relu(hw.dropout(h + b, 0.5, seed=3) + hw.reshard(r, "M@x", "N"))
        a = (hw.exp(r) * 0.5).stream("M", chunks=3)
        c = (a - hw.max(a, axis="N", keepdims=True).stream("M", chunks=3)).stream("M", chunks=3)
        return y, hw.softmax(c).stream("M", chunks=3)

    return in_loops


def attention(ranks: int, t: DType) -> Fusion:
    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        q=t["B", f"{4 * ranks}@x", "S", 8],
        k=t["B", f"{2 * ranks}@x", "T", 8],
        v=t["B", f"{2 * ranks}@x", "T", "F"],
        mask=hw.bool_["S", "T"],
        bias=t["B", f"{4 * ranks}@x", "S", "T"],
    )
    def attention(q, k, v, mask, bias):  # type: ignore[no-untyped-def]
        attend = hw.scaled_dot_product_attention
        return (
            attend(q, k, v, is_causal=True, enable_gqa=True),
            attend(q, k, v, mask, scale=0.5, enable_gqa=True),
            attend(q, k, v, bias, enable_gqa=True),
            attend(k, k, v),
        )

    return attention


def rotary(ranks: int, t: DType) -> Fusion:
    """Rotary embeddings with both orders of pairs, with heads before and after the rows, and on a view of a product."""

    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        x=t["B", f"{2 * ranks}@x", "S", 8],
        z=t["B", "S", f"{2 * ranks}@x", 8],
        w=t[8, 8],
        cos=hw.f32["S", 4],
        sin=hw.f32["S", 4],
    )
    def rotary(x, z, w, cos, sin):  # type: ignore[no-untyped-def]
        rotate = hw.rotary_embedding
        turned = hw.permute_dims(hw.matmul(z, w), (0, 2, 1, 3))
        return rotate(x, cos, sin), rotate(z, cos[:, None], sin[:, None], interleaved=True), rotate(turned, cos, sin) + x

    return rotary


def dropped(ranks: int, t: DType) -> Fusion:
    """Attention with dropout, with and without grouped heads. Both must use the same random numbers."""

    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        q=t["B", f"{4 * ranks}@x", "S", 8],
        k=t["B", f"{2 * ranks}@x", "T", 8],
        mask=t[1, "S", "T"],
        seed=hw.u32[()],
    )
    def dropped(q, k, mask, seed):  # type: ignore[no-untyped-def]
        def attend(key, **how):  # type: ignore[no-untyped-def]
            return hw.scaled_dot_product_attention(q, key, key, mask, 0.25, seed=seed, draw=1, **how)

        repeated = hw.reshape(hw.broadcast_to(k[:, :, None], "B", 2 * ranks, 2, "T", 8), "B", 4 * ranks, "T", 8)
        grouped = attend(k, enable_gqa=True)
        return grouped, grouped - attend(repeated)

    return dropped


def linears(ranks: int, t: DType) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=t["M@x", "K"], w=t["N", "K"], b=t["N"])
    def linears(x, w, b):  # type: ignore[no-untyped-def]
        return hw.linear(x, w), hw.gelu(hw.linear(x, w, b), approximate="tanh")

    return linears


PROGRAMS: tuple[Callable[[int, DType], Fusion], ...] = (norms, columns, in_loops, attention, rotary, dropped, linears)


def arrays_of(fusion: Fusion) -> dict[str, Array]:
    random = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    for value in fusion.inputs:
        shape = tuple(size.bind(SIZES) for size in value.type.shape)
        kind = value.type.dtype.kind
        drawn = random.uniform(-1, 1, shape) if kind == "float" else random.integers(0, 2, shape) if kind == "bool" else np.asarray(7)
        arrays[value.name] = np.asarray(drawn).astype(numpy_dtype(value.type.dtype))
    if "mask" in arrays:
        arrays["mask"][:, 0] = True  # In a mask of bools, each row attends to at least one column.
    return arrays


def schedules() -> Iterator[Any]:
    yield parallel(check_dependencies=True)
    yield from (seeded(seed) for seed in range(2))


@pytest.mark.parametrize(("ranks", "dtype"), [(1, hw.f64), (2, hw.bf16), pytest.param(4, hw.f32, marks=pytest.mark.more)], ids=str)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_matches_numpy(make: Callable[[int, DType], Fusion], ranks: int, dtype: DType) -> None:
    fusion = make(ranks, dtype)
    arrays = arrays_of(fusion)
    wanted = run_reference(fusion, arrays)
    allowed = TOLERANCE[dtype.name]
    for schedule in schedules():
        with schedule:
            results = compiled(fusion).run(**arrays)
        for output, got, want in zip(lowered(fusion).outputs, results, wanted, strict=True):
            np.testing.assert_allclose(got.astype(want.dtype), want, allowed, allowed, err_msg=output.name)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_random_numbers_do_not_depend_on_the_sharding(ranks: int) -> None:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "N"])
    def drawn(x):  # type: ignore[no-untyped-def]
        return hw.uniform(x, seed=1), hw.reshard(hw.uniform(x, seed=1, draw=2), "M", "N@x")

    first, second = compiled(drawn).run(x=np.zeros((40, 64), np.float32))
    wanted = run_reference(drawn, {"x": np.zeros((40, 64))})
    np.testing.assert_array_equal(first, wanted[0])
    np.testing.assert_array_equal(second, wanted[1])
    assert abs(first.mean() - 0.5) < 0.03
    assert first.min() >= 0
    assert first.max() < 1
    assert np.abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.06


def test_a_norm_is_one_kernel() -> None:
    @hw.fusion(x=hw.bf16["M", "N"], w=hw.bf16["N"])
    def norm(x, w):  # type: ignore[no-untyped-def]
        return hw.rms_norm(x, w)

    assert len(lowered(norm).kernels) == 1


def test_a_rotary_embedding_is_one_kernel_and_copies_nothing() -> None:
    host = lowered(rotary(1, hw.bf16))
    assert len(host.kernels) == 3
    assert not [i for i in tree.walk(host.body) if isinstance(i, ir.Copy)]


def test_results_of_heads_are_written_in_the_layout_of_the_next_matmul() -> None:
    """The attention writes its result in the layout that the output projection reads."""

    @hw.fusion(q=hw.bf16["B", 4, "S", 8], w=hw.bf16[32, "N"])
    def layer(q, w):  # type: ignore[no-untyped-def]
        heads = hw.scaled_dot_product_attention(q, q, q)
        return hw.matmul(hw.reshape(hw.permute_dims(heads, (0, 2, 1, 3)), "B", "S", 32), w)

    assert not [i for i in tree.walk(lowered(layer).body) if isinstance(i, ir.Copy)]
