"""Reductions that move past ops, contractions over several dims, and means and variances of uneven shards."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compiled_fusions import expect, random_arrays

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.runtime.cpu import parallel, seeded

MESHES: list[Any] = [hw.Mesh(y=1, x=1), hw.Mesh(y=1, x=3), hw.Mesh(y=2, x=2), pytest.param(hw.Mesh(y=1, x=2), marks=pytest.mark.more)]

SIZES = {"S": 12, "B": 2, "F": 12, "E": 5, "T": 2, "C": 6, "K": 3, "N": 4}


def gradients(mesh: hw.Mesh) -> Fusion:
    names = "qkv"
    inputs = {f"d{n}": hw.bf16["S", "B@y", "F@x"] for n in names} | {f"w{n}": hw.bf16["E", "F@x"] for n in names}
    inputs |= {f"x{i}": hw.bf16["T", "C@x", "K"] for i in range(2)} | {f"g{i}": hw.bf16["T", "C@x", "N@y"] for i in range(2)}
    inputs |= {"f": hw.f32["S", "E"]}

    @hw.fusion(mesh=mesh, **inputs)
    def gradients(dq, dk, dv, wq, wk, wv, x0, x1, g0, g1, f):
        dx = hw.reshard(dq @ wq.T + dk @ wk.T - dv @ wv.T, "S@x", "B@y", "E")
        dw = (hw.reshape(x0, "T*C", "K").T @ hw.reshape(g0, "T*C", "N") + hw.einsum("tck,tcn->kn", x1, g1)) * 0.5
        columns = hw.tensordot(g0, x0, (("T", "C"), ("T", "C")))
        wide = hw.astype(hw.concat([dq[:, 0] @ wq.T, dk[:, 0] @ wk.T], axis=0), hw.f32)
        total = hw.sum(hw.reshape(wide, 2, "S", "E") * f / 4, axis=(0, 2))
        return dx, dw, columns, hw.astype(total, hw.bf16), hw.einsum("sbf,ef->esb", dv, wv), hw.einsum("tck,tcn->ckn", x0, g0)

    return gradients


def norms(mesh: hw.Mesh) -> Fusion:
    @hw.fusion(mesh=mesh, x=hw.f32["M@x", "N@y"], z=hw.f32[5, "N@y,x"], w=hw.f32["N"])
    def norms(x, z, w):
        moments = hw.mean(x, axis=0), hw.var(x, axis=0), hw.mean(x), hw.var(x), hw.mean(hw.mean(x, axis=1), axis=0)
        return *moments, hw.layer_norm(z, w, w), hw.var(z, axis=-1, keepdims=True), hw.rms_norm(z), hw.mean(x[:, :1] * 1, axis=0)

    return norms


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_on_ranks(mesh: hw.Mesh) -> None:
    """Some sizes are uneven, and some ranks have no elements."""
    for fusion, all_sizes in (
        (gradients(mesh), [SIZES, SIZES | {"F": 7, "T": 3, "C": 1}]),
        (norms(mesh), [{"M": 12, "N": 12}, {"M": 7, "N": 5}, {"M": 1, "N": 1}]),
    ):
        program = hw.compile(fusion)
        for seed, sizes in enumerate(all_sizes):
            arrays = random_arrays(fusion, sizes, seed)
            for schedule in (parallel(check_dependencies=True), seeded(seed)):
                with schedule:
                    ranks: Any = program.run(**arrays, ranks=True)
                expect(fusion, arrays, ranks)
        program.close()


def test_variance_of_values_far_from_zero() -> None:
    """Differences from the global mean are squared. So a variance is accurate even if it is small compared with the mean."""

    @hw.fusion(mesh=hw.Mesh(x=3), x=hw.f32["M@x", 4])
    def moments(x):
        return hw.mean(x, axis=0), hw.var(x, axis=0)

    x = (1000 + np.random.default_rng(0).standard_normal((301, 4))).astype(np.float32)
    mean, variance = hw.compile(moments).run(x=x)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=1e-7)
    np.testing.assert_allclose(variance, x.astype(np.float64).var(0), rtol=1e-5)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.more), 3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("stated", [False, True], ids=["names", "ints"])
def test_variance_of_samples(stated: bool, ranks: int) -> None:
    """Variances and standard deviations with several corrections, over sharded and unsharded dims.

    The variance of one element with a correction of 1 is NaN.
    """
    rows, columns = (5, 3) if stated else ("M", "K")

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32[f"{rows}@x", columns], y=hw.bf16[rows, columns])
    def samples(x: hw.Tensor, y: hw.Tensor) -> tuple[hw.Tensor, ...]:
        of_one = hw.var(x[:, :1], 1, correction=1)
        return hw.var(x, correction=1), hw.std(x, 0, 2), hw.var(x, 1, 1, True), hw.var(x, (0, 1), -1), of_one, hw.std(x, 1), hw.std(y, 1, 1)

    assert Fusion.parse(str(samples)) == samples
    x = (np.random.default_rng(0).standard_normal((5, 3)) + 100).astype(np.float32)
    y = (x - 99).astype(ml_dtypes.bfloat16)
    wide, narrow = x.astype(np.float64), y.astype(np.float64)
    wanted = (wide.var(ddof=1), wide.std(0, ddof=2), wide.var(1, ddof=1, keepdims=True), wide.var(ddof=-1), np.full(5, np.nan), wide.std(1))
    *got, of_narrow = hw.compile(samples).run(x, y)
    for number, (result, want) in enumerate(zip(got, wanted, strict=True)):
        np.testing.assert_allclose(result, want, rtol=1e-5, err_msg=str(number))
    np.testing.assert_allclose(of_narrow.astype(np.float64), narrow.std(1, ddof=1), rtol=2**-8)
