"""Options(tf32=True): f32 matmuls use TF32 on CUDA. The CPU target computes these matmuls in f32."""

from __future__ import annotations

import numpy as np
from compiled_fusions import compiled, fusion_of, random_arrays, sizes_of
from cuda_here import needs_cuda

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.pipeline import lower


def products(t: hw.DType) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(x=2), x=t["M@x", "K"], w=t["K", "N"], u=t["K", "N"], v=hw.f64["K", "N"], b=t["N"])
    def products(x, w, u, v, b):  # type: ignore[no-untyped-def]
        return hw.relu(hw.matmul(x, w) + b), hw.matmul(x, u), hw.matmul(v.T, v)

    return products


def test_products_of_f32_are_marked_in_the_ir() -> None:
    host, plain = (lower(products(hw.f32), options) for options in (Options(tf32=True), Options()))
    assert "  matmul %x, %w in tf32 bias %b activation relu -> %relu_w\n" in str(host)
    assert "  matmul %x, %u in tf32 -> %matmul_u\n" in str(host)
    assert "  matmul %v_transposed, %v -> %matmul_v\n" in str(host)
    assert "tf32" not in str(plain)
    assert "tf32" not in str(lower(products(hw.bf16), Options(tf32=True)))
    ring = str(lower(fusion_of("matmul_rs_ring", 2, 3, hw.f32), Options(tf32=True)))
    assert "matmul %x_i, %w in tf32 accumulate %matmul_w_i -> %matmul_w_i\n" in ring


def test_source() -> None:
    source = compiled(products(hw.f32), options=Options(tf32=True)).source
    f32 = "(rank, CUDA_R_32F, CUDA_R_32F"
    assert f"plan_relu_w_{f32}, CUBLASLT_EPILOGUE_RELU_BIAS, CUBLAS_COMPUTE_32F_FAST_TF32)" in source
    assert f"plan_matmul_u_{f32}, CUBLASLT_EPILOGUE_DEFAULT, CUBLAS_COMPUTE_32F_FAST_TF32)" in source
    assert "plan_matmul_v_(rank, CUDA_R_64F, CUDA_R_64F)" in source
    assert source != compiled(products(hw.f32)).source


def test_the_cpu_computes_in_f32() -> None:
    fusion = products(hw.f32)
    arrays = random_arrays(fusion, sizes_of(fusion), seed=0)
    program, plain = compiled(fusion, options=Options(tf32=True)), compiled(fusion)
    for one, other in zip(program.run(**arrays), plain.run(**arrays), strict=True):
        np.testing.assert_array_equal(one, other)
    assert program.folder != plain.folder


@needs_cuda
def test_compiles_and_links_for_cuda() -> None:
    program = compiled(products(hw.f32), "cuda", Options(tf32=True))
    assert program.module.name == "products"
    assert "warning" not in (program.folder / "build.log").read_text()
