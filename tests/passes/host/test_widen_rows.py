"""The pass widen_rows pads the rows of matrices of matmuls, so that each row begins at a multiple of 16 bytes."""

from __future__ import annotations

import re
from typing import Any

import hostweave as hw


def host_ir(function: Any, options: hw.Options | None = None, **specs: Any) -> str:
    return hw.compile(hw.fusion(**specs)(function), options=options).host_ir


def test_a_vocabulary_of_gpt2() -> None:
    """The logits are computed in a buffer with aligned rows. One kernel reads these rows, and copies them to the result."""

    def loss(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        logits = x @ hw.transpose(w, -2, -1)
        return logits, hw.max(hw.exp(hw.astype(logits, hw.f32)), 1)

    text = host_ir(loss, x=hw.bf16[4096, 1024], w=hw.bf16[50257, 1024])
    assert re.search(r"= allocate bf16\[4096, 50264\]", text)
    assert re.search(r"slice %w_transposed\[1: 50256 from 0\]", text)
    assert text.count("matmul ") == 2
    assert text.count("launch ") == 1  # The kernel of the maximum also copies the logits.


def test_gradients_of_logits_are_computed_in_wide_rows() -> None:
    def gradients(x: hw.Tensor, w: hw.Tensor, dy: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        logits = dy * 2.0
        return logits @ w, hw.transpose(logits, -2, -1) @ x

    text = host_ir(gradients, x=hw.bf16[4096, 1024], w=hw.bf16[50257, 1024], dy=hw.bf16[4096, 50257])
    assert text.count("launch ") == 1
    assert text.count("allocate ") == 1
    assert "copy" not in text
    assert re.search(
        r"matmul .*_rest, %w_rest -> %(\w+)\n(.*\n){1,3}.* matmul .*_aligned, %w_aligned accumulate %\1 rest \[1, 0, 0\] -> %\1\n", text
    )
    assert "[0: 50256 from 0]" in text
    assert "[0: 1 from 50256]" in text


def test_small_matmuls_unknown_sizes_and_f32_stay() -> None:
    def product(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return x @ w

    for sizes in ((64, 64, 57), (4096, "K", 50257), (4096, 1024, "N")):
        m, k, n = sizes
        text = host_ir(product, x=hw.bf16[m, k], w=hw.bf16[k, n])
        assert text.count("matmul ") == 1
        assert "slice" not in text
    assert "slice" not in host_ir(product, x=hw.f32[4096, 1024], w=hw.f32[1024, 50257])
    assert "slice" in host_ir(product, hw.Options(tf32=True), x=hw.f32[4096, 1024], w=hw.f32[1024, 50257])


def test_a_copy_that_takes_longer_is_not_made() -> None:
    def product(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return x @ w

    assert "@copy_x_apart" in host_ir(product, x=hw.bf16[8192, 4095], w=hw.bf16[4095, 4096])
    assert "@copy_x_apart" not in host_ir(product, x=hw.bf16[8192, 4095], w=hw.bf16[4095, 16])
