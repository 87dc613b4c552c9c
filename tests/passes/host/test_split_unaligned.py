"""The pass split_unaligned splits a matmul with unaligned sizes into an aligned matmul and smaller matmuls."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.fusion_ir.reference import run_reference
from hostweave.types.machine import H200
from hostweave.types.numpy_dtypes import numpy_dtype

SLOW = hw.Options(machine=replace(H200, unaligned=1e9))  # In this cost model, unaligned matmuls of all sizes are slow.


def computes(function: Any, options: hw.Options = SLOW, mesh: Any = None, **specs: Any) -> str:
    """Compares a program with the reference on small integers, whose products are exact. Returns the host IR."""
    fusion = hw.fusion(**({"mesh": mesh} if mesh else {}), **specs)(function)
    program = hw.compile(fusion, options=options)
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        value.name: random.integers(-1, 2, [int(size) for size in value.type.shape]).astype(numpy_dtype(value.type.dtype))
        for value in fusion.inputs
    }
    found, wanted = program.run(**arrays), run_reference(fusion, arrays)
    for one, right in zip(found if isinstance(found, tuple) else (found,), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float64), np.asarray(right, np.float64))
    return program.host_ir


@pytest.mark.parametrize("seed", range(16))
def test_random_sizes_layouts_and_epilogues(seed: int) -> None:
    random = Random(seed)
    m, n, k = (random.choice([8, 9, 16, 19, 23]) for _ in range(3))
    turned_x, turned_w, turned_y, has_bias, added, reads, computed = (random.random() < 0.4 for _ in range(7))
    batch = random.choice([(), (), (3,)])
    dtype, options = random.choice([(hw.bf16, SLOW), (hw.f16, SLOW), (hw.f32, replace(SLOW, tf32=True))])

    def product(x: hw.Tensor, w: hw.Tensor, bias: hw.Tensor, c: hw.Tensor) -> tuple[hw.Tensor, ...]:
        x, w = (hw.transpose(one, -2, -1) if turned else one for one, turned in ((x, turned_x), (w, turned_w)))
        y = (x + 1.0 if computed else x) @ w
        y = y + c if added else y
        y = hw.relu(y + bias) if has_bias else y
        y = hw.transpose(y, -2, -1) if turned_y else y
        return (y, hw.max(y, -1)) if reads else (y,)

    x, w = (k, m) if turned_x else (m, k), (n, k) if turned_w else (k, n)
    text = computes(product, options, x=dtype[*batch, *x], w=dtype[*w], bias=dtype[n], c=dtype[*batch, m, n])
    step = 16 // dtype.itemsize
    rows = [] if computed else [m if turned_x else k, k if turned_w else n]
    assert not any(size % step for size in rows) or "slice" in text


def test_in_a_chunk_loop_on_two_ranks() -> None:
    def gathered(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.max(hw.matmul(hw.reshard(x, 16, 16), hw.transpose(w, 0, 1)).stream(0, algorithm="ring"), 1)

    text = computes(gathered, SLOW, hw.Mesh(x=2), x=hw.bf16["16@x", 16], w=hw.bf16[19, 16])
    assert "for %i" in text
    assert "_rest" in text


def test_explain_says_how_a_matmul_is_split() -> None:
    """`explain` does not report slices of the program, or aligned matmuls, as splits."""

    def products(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        x_rest, w_rest = x[:, 8:], w[8:]
        return hw.max(x @ w, 1) + hw.max(x_rest @ w_rest, 1)

    explained = {
        n: hw.compile(hw.fusion(x=hw.bf16[16, k], w=hw.bf16[k, n])(products), options=SLOW).explain() for n, k in ((25, 17), (24, 16))
    }
    assert re.findall(r"%matmul_w = .*", explained[25]) == [
        "%matmul_w = matmul: split into 16 and 1 terms, and 24 and 1 columns, because unaligned matmuls are slower"
    ]
    assert "split" not in explained[24]
