"""Matmuls with a common first operand of at most 8 rows, fused with their consumer into one kernel. Results are compared with NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compiled_fusions import compiled, expect, integer_arrays, lowered, random_arrays
from cuda_here import needs_cuda

import hostweave as hw
from hostweave.base.paths import RUNTIME
from hostweave.build.nvrtc import Nvrtc, Unit, units_of
from hostweave.check.sizes import sizes_to_check
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.targets.target import find_target
from hostweave.types.tensor import DType


def gated(t: DType, ranks: int = 1) -> Fusion:
    columns = f"{24 * ranks}@tp" if ranks > 1 else 24
    mesh = hw.Mesh(tp=ranks) if ranks > 1 else None

    @hw.fusion(mesh=mesh, x=t["T", 40], n=t[40], wg=t[40, columns], wu=t[40, columns], wd=t[columns, 40])
    def gated(x, n, wg, wu, wd):  # type: ignore[no-untyped-def]
        y = hw.rms_norm(x, n)
        h = hw.silu(hw.matmul(y, wg)) * hw.matmul(y, wu)
        return x + hw.reshard(hw.matmul(h, wd), "T", 40)

    return gated


@hw.fusion(
    x=hw.f32["T", "K"], a=hw.f32["N", "K"], b=hw.f32["N", "K"], c=hw.f32["N", "K"], bias=hw.f32["N"], r=hw.f32["T", "N"],
    z=hw.f32[2, "T", 24], v=hw.f32[24, 130], w=hw.f32[24, 130], one=hw.f32[1, 24],
)  # fmt: skip
def layouts(x, a, b, c, bias, r, z, v, w, one):  # type: ignore[no-untyped-def]
    """Transposed weights, three matmuls with a common operand, rows in two dims, and a single row."""
    three = hw.relu(hw.matmul(x, a.T)) * (hw.matmul(x, b.T) + bias) - hw.matmul(x, c.T)
    return three + r, hw.maximum(hw.matmul(z, v), 2) * hw.matmul(z, w), hw.maximum(hw.matmul(one, v), hw.matmul(one, w))


def conditions(fusion: Fusion) -> list[str]:
    return [str(i.condition) for i in tree.walk(lowered(fusion).body) if isinstance(i, ir.If)]


@pytest.mark.parametrize("dtype", [hw.f32, hw.f16, hw.bf16], ids=str)
def test_matches_numpy_around_few_rows(dtype: DType) -> None:
    fusion = gated(dtype)
    assert conditions(fusion) == ["T <= 8"]
    for rows in (0, 1, 2, 7, 8, 9, 16):
        arrays = random_arrays(fusion, {"T": rows}, seed=rows)
        expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_columns(ranks: int) -> None:
    fusion = gated(hw.f32, ranks)
    for rows in (1, 8, 9):
        arrays = random_arrays(fusion, {"T": rows}, seed=rows)
        expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True))


def test_layouts() -> None:
    assert conditions(layouts) == ["T <= 8", "2 * T <= 8"]  # For one row, there is no condition.
    for rows, k, n in ((1, 7, 5), (4, 70, 65), (5, 8, 64), (9, 33, 130)):
        arrays = integer_arrays(layouts, {"T": rows, "K": k, "N": n}, seed=rows)
        expect(layouts, arrays, compiled(layouts).run(**arrays, ranks=True), exact=True)


def test_a_comparison_rounds_the_products() -> None:
    """The products 300 and 301 are equal in bf16."""

    @hw.fusion(x=hw.bf16[4, 40], v=hw.bf16[40, 24], w=hw.bf16[40, 24])
    def same(x, v, w):  # type: ignore[no-untyped-def]
        return hw.equal(hw.matmul(x, v), hw.matmul(x, w))

    assert any("_of_few_rows" in kernel.name for kernel in lowered(same).kernels)
    x, v = (np.full(shape, value, ml_dtypes.bfloat16) for shape, value in (((4, 40), 1), ((40, 24), 7.5)))
    w = v.copy()
    w[0] += 1
    assert compiled(same).run(x=x, v=v, w=w).all()


def test_a_result_reuses_the_memory_of_its_operand() -> None:
    @hw.fusion(x=hw.f32["T", 16], u=hw.f32[16, 8], v=hw.f32[16, 8], w=hw.f32[16, 8], r=hw.f32["T", 8])
    def shared(x, u, v, w, r):  # type: ignore[no-untyped-def]
        p = hw.matmul(x, u)
        return p + r, hw.maximum(p, hw.matmul(x, v)) - hw.matmul(x, w)

    assert conditions(shared) == ["T <= 8"]
    for rows in (3, 9):
        arrays = integer_arrays(shared, {"T": rows}, seed=rows)
        expect(shared, arrays, compiled(shared).run(**arrays, ranks=True), exact=True)


def test_a_result_reuses_the_memory_of_a_donated_input() -> None:
    """The ops after the matmuls also read the common operand of the matmuls."""

    @hw.fusion(donate={"r": 0}, x=hw.f32[4, 16], v=hw.f32[16, 16], w=hw.f32[16, 16], r=hw.f32[4, 16])
    def gated_residual(x, v, w, r):  # type: ignore[no-untyped-def]
        return x + hw.matmul(x, v) * hw.matmul(x, w) + r

    assert any("_of_few_rows" in kernel.name for kernel in lowered(gated_residual).kernels)
    arrays = integer_arrays(gated_residual, {}, seed=1)
    given = arrays | {"r": arrays["r"].copy()}
    expect(gated_residual, arrays, compiled(gated_residual).run(**given, ranks=True), exact=True)


def test_the_rows_of_a_rank_decide() -> None:
    @hw.fusion(mesh=hw.Mesh(dp=3), x=hw.f32["T@dp", 16], v=hw.f32[16, 8], w=hw.f32[16, 8])
    def sharded_rows(x, v, w):  # type: ignore[no-untyped-def]
        return hw.sigmoid(hw.matmul(x, v)) * hw.matmul(x, w)

    assert conditions(sharded_rows) == ["local(T, dp) <= 8"]
    for rows in (1, 24, 25, 27):
        arrays = random_arrays(sharded_rows, {"T": rows}, seed=rows)
        expect(sharded_rows, arrays, compiled(sharded_rows).run(**arrays, ranks=True))


def test_matmuls_of_more_rows_are_concurrent() -> None:
    """For more than 8 rows, all matmuls but one have a separate stream. If there are always few rows, the program has no streams."""
    for fusion, count in ((gated(hw.bf16), 2), (layouts, 3)):
        program = lowered(fusion)
        assert program.streams == (ir.Streams("beside", count - 1),)
        rest = next(i.orelse for i in tree.walk(program.body) if isinstance(i, ir.If))
        assert [type(i) for i in rest] == [ir.Fork, *[ir.OnStream] * (count - 1), ir.Matmul, ir.Join, ir.Launch]
        assert len([i for i in tree.walk(rest) if isinstance(i, ir.Matmul)]) == count

    @hw.fusion(x=hw.f32[4, 16], v=hw.f32[16, 8], w=hw.f32[16, 8])
    def always_few(x, v, w):  # type: ignore[no-untyped-def]
        return hw.sigmoid(hw.matmul(x, v)) * hw.matmul(x, w)

    assert lowered(always_few).streams == ()


def test_matmuls_that_are_not_fused() -> None:
    """Matmuls are not fused if a product is also a result, if their first operands differ, or if the rows of a product are summed."""

    @hw.fusion(x=hw.f32["T", 16], y=hw.f32["T", 16], v=hw.f32[16, 16], w=hw.f32[16, 16])
    def apart(x, y, v, w):  # type: ignore[no-untyped-def]
        g = hw.matmul(x, v)
        other = hw.relu(hw.matmul(x, w + v)) - hw.matmul(y, w + v)
        return hw.sin(g) * hw.matmul(x, w), g, other, hw.cos(hw.matmul(y, v)) * hw.sum(hw.matmul(y, w), 1)[:, None]

    assert conditions(apart) == []
    arrays = random_arrays(apart, {"T": 3}, seed=0)
    expect(apart, arrays, compiled(apart).run(**arrays, ranks=True))


@needs_cuda
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])  # The first architecture has no clusters, the second has.
def test_kernels_compile_for_gpus(arch: str, tmp_path: Path) -> None:
    found = find_target("cuda").toolchain().kernel_compiler
    assert isinstance(found, Nvrtc)
    own = next(unit for unit in units_of(hw.compile(layouts, "cuda").sources["kernels.cu"]) if "hw::few_rows" in unit.text)
    of_plans = Unit("few_rows", 1, "", (RUNTIME / "src/few_rows.cu").read_text())
    kinds = ("multiply_few_rows_transposed", "multiply_few_scaled_rows", "multiply_few_rows_of_scaled_blocks")
    of_kinds = [f"{kind}{end}" for kind in kinds for end in ("", "_by_large_blocks")] + [f"multiply_16_{kind[13:]}" for kind in kinds[1:]]
    for unit, names in ((own, [own.name]), (of_plans, of_kinds)):
        cubin = replace(found, arch=arch).compile(unit, tmp_path)
        assert all(name.encode() in cubin for name in names)


def test_both_branches_are_checked() -> None:
    for fusion in (gated(hw.f32), gated(hw.f32, 2)):
        rows = [sizes["T"] for sizes in sizes_to_check(lowered(fusion))]
        assert min(rows) <= ir.FEW_ROWS < max(rows)
