"""Options(partial_dtype=hw.f32): partial sums of 16-bit floats are sent in f32, and rounded once at the end."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_fusions import fusion_of, random_arrays, sizes_of

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.cli.tolerance import tolerance
from hostweave.fusion_ir.reference import run_reference
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.tensor import DType

RANKS, CHUNKS = 8, 3


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("matmul_ar_flat", hw.f16),
        *((name, hw.bf16) for name in ("matmul_ar_flat", "matmul_rs_flat", "matmul_rs_ring", "matmul_rs_through_bcast")),
    ],
    ids=str,
)
def test_sums_are_closer(name: str, dtype: DType) -> None:
    fusion = fusion_of(name, RANKS, CHUNKS, dtype)
    # A rank has one element of K, so the products of a rank are exact in f32. The sum in f32 is nearly exact, and is rounded once.
    exact = tolerance(dtype).rtol / 4
    sizes = {**sizes_of(fusion), "K": 1 if name == "matmul_rs_through_bcast" else RANKS}
    worst: dict[bool, float] = {}
    for wide in (False, True):
        program = hw.compile(fusion, options=Options(partial_dtype=hw.f32 if wide else None))
        errors = []
        for seed in range(3):
            arrays = random_arrays(fusion, sizes, seed)
            (want,) = run_reference(fusion, arrays)
            got = program.run(**arrays).astype(np.float64)
            errors.append(np.max(np.abs(got - want) / np.maximum(np.abs(want), 0.25)))
            if wide:
                np.testing.assert_allclose(got, want, rtol=1.01 * exact, atol=1e-6)
        worst[wide] = max(errors)
        program.close()
    assert worst[True] < worst[False]


AR = """\
kernel @astype_y(%y_f32: f32[M, N]) {
  %y: bf16[M, N] = astype(%y_f32)
}
host @product(%x: bf16[M, K@x], %w: bf16[K@x, N]) -> (%y: bf16[M, N]) mesh(x=2) channels(x: x two_sided) uneven(K) {
  %y_partial = allocate f32[M, N]
  matmul %x, %w -> %y_partial
  %y_f32 = reshape %y_partial to [M, N]
  all_reduce sum %y_partial -> %y_f32 on x
  launch @astype_y %y_f32 -> %y
}
"""


def test_a_matmul_returns_its_sum_in_f32() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.bf16["M", "K@x"], w=hw.bf16["K@x", "N"])
    def product(x, w):
        return hw.matmul(x, w)

    assert str(lower(product, Options(partial_dtype=hw.f32))) == AR
    f32 = "f32".join(str(product).split("bf16"))
    program = hw.Fusion.parse(f32)
    assert lower(program, Options(partial_dtype=hw.f32)) == lower(program, Options())


def test_other_reductions_cast_their_operands() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.bf16["M@x", "N"])
    def reductions(x):
        return hw.sum(x, axis=0), hw.prod(x, axis=0), hw.max(x, axis=0)

    stages: dict[str, str] = {}
    lower(reductions, Options(partial_dtype=hw.f32), lambda name, stage: stages.setdefault(name, str(stage)))
    body = stages["insert_reshards"].partition("{\n")[2]
    assert (
        body
        == """\
  %x_f32: f32[M@x, N] = astype(%x)
  %sum_x_partial: f32[N] partial(sum, x) = sum(%x_f32, axis=(0,))
  %sum_x_f32: f32[N] = reshard(%sum_x_partial)
  %sum_x: bf16[N] = astype(%sum_x_f32)
  %x_f32_2: f32[M@x, N] = astype(%x)
  %prod_x_partial: f32[N] partial(prod, x) = prod(%x_f32_2, axis=(0,))
  %prod_x_f32: f32[N] = reshard(%prod_x_partial)
  %prod_x: bf16[N] = astype(%prod_x_f32)
  %max_x_partial: bf16[N] partial(max, x) = max(%x, axis=(0,))
  %max_x: bf16[N] = reshard(%max_x_partial)
  return %sum_x, %prod_x, %max_x
}
"""
    )


def test_another_dtype() -> None:
    with pytest.raises(ProgramError) as caught:
        Options(partial_dtype=hw.bf16)
    assert str(caught.value) == "Options: partial_dtype=hw.bf16 is neither f32 nor None; use hw.f32"
