"""The pass transpose_beside: the kernel that computes a result also writes transposed copies of the result."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from compiled_fusions import compiled, lowered

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.passes.host.transpose_beside import transpose_beside

PROGRAM = """\
kernel @halve(%x: bf16[64, 128]) {{
  %h: f32[64, 128] = multiply(%x, 0.5)
  %q: f8e4m3[64, 128] = astype(%h)
}}
kernel @norm(%x: bf16[64, 128]) {{
  %top: bf16[64, 1] = max(%x, axis=(1,), keepdims=true)
  %r: bf16[64, 128] = subtract(%x, %top)
  %s: f8e4m3[64, 128] = astype(%r)
}}
host @p(%x: bf16[64, 128], %w: f8e4m3[128, 128]) -> (%y: f8e4m3[64, 128], %z: f8e4m3[128, 64]) mesh() {{
  %q = allocate f8e4m3[64, 128]
  {body}
}}
"""
STAYS = {
    "the kernel reduces, so it has no tiles": "launch @norm %x -> %q %t = permute %q by [1, 0] copy %t -> %z copy %q -> %y",
    "the operand changes": "launch @halve %x -> %q launch @norm %x -> %q %t = permute %q by [1, 0] copy %t -> %z copy %q -> %y",
    "the copy is a part of a buffer": "launch @halve %x -> %q %t = permute %q by [1, 0] %part = slice %z[0: 128 from 0] copy %t -> %part "
    "copy %q -> %y",
    "the buffer of the copy is read before": "copy %z -> %z launch @halve %x -> %q %t = permute %q by [1, 0] copy %t -> %z copy %q -> %y",
}


def program(body: str) -> HostProgram:
    return HostProgram.parse(PROGRAM.format(body=body))


def test_the_copy_is_made_with_its_operand() -> None:
    """The launch that computes %q also writes the transpose of %q. The kernel has the cast twice, so that each of the two stores converts
    pairs of elements."""
    made = transpose_beside(program("launch @halve %x -> %q copy %q -> %y %t = permute %q by [1, 0] copy %t -> %z"), Options())
    text = str(made)
    assert "  launch @fused_q_z %x -> %q, %z\n  copy %q -> %y\n}" in text
    assert "  %z_wide: f32[128, 64] = permute_dims(%h, axes=(1, 0))\n  %z: f8e4m3[128, 64] = astype(%z_wide)\n" in text


@pytest.mark.parametrize("case", STAYS)
def test_programs_that_the_pass_does_not_change(case: str) -> None:
    given = program(STAYS[case])
    assert transpose_beside(given, Options()) is given


def quantised(rows: int | str) -> Fusion:
    @hw.fusion(x=hw.bf16[rows, 96], s=hw.f32[1, 1])
    def quantised(x: hw.Tensor, s: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        values, _ = hw.quantize(x, "tensor", scale=s)
        return values, values.T

    return quantised


@pytest.mark.parametrize("rows", ["M", 64])
def test_both_results_are_equal(rows: int | str) -> None:
    fusion = quantised(rows)
    (kernel,) = (kernel for kernel in lowered(fusion).kernels if len(kernel.results) > 1)
    assert [op.kind for op in kernel.ops][-2:] == ["permute_dims", "astype"]
    for count in (0, 1, 37, 200) if rows == "M" else (rows,):
        x = np.random.default_rng(count).standard_normal((count, 96)).astype(ml_dtypes.bfloat16)
        values, turned = compiled(fusion).run(x=x, s=np.full((1, 1), 0.25, np.float32))
        np.testing.assert_array_equal(values.T.view(np.uint8), turned.view(np.uint8))
        wanted = (x.astype(np.float32) / np.float32(0.25)).astype(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(values.view(np.uint8), wanted.view(np.uint8))
