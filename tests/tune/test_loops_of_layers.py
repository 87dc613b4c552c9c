"""Chunk loops that the compiler chooses in repeated layers: calls with all sizes, and choices by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hostweave as hw

LAYERS = 3
SIZES = {"S": 8192, "K": 8192, "N": 4096}
WEIGHTS = {f"{name}_{i}": hw.f16["N", "K@x"] if name == "w" else hw.f16["K@x", "N"] for i in range(LAYERS) for name in "wv"}


@hw.block(x=hw.f16["S@x", "N"], w=hw.f16["N", "K@x"], v=hw.f16["K@x", "N"])
def layer(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
    return x + hw.reshard(hw.relu(x @ w) @ v, "S@x", "N")


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f16["S@x", "N"], **WEIGHTS)
def model(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
    for i in range(LAYERS):
        x = layer(x, weights[f"w_{i}"], weights[f"v_{i}"])  # type: ignore[assignment]
    return x


def arrays(fusion: hw.Fusion, **sizes: int) -> dict[str, Any]:
    random = np.random.default_rng(sizes["S"])
    shapes = {value.name: [size.bind(sizes) for size in value.type.shape] for value in fusion.arguments}
    return {name: random.integers(-1, 2, shape).astype(np.float16) for name, shape in shapes.items()}


def expected(given: dict[str, Any]) -> Any:
    x = given["x"].astype(np.float64)
    for i in range(LAYERS):
        x = x + np.maximum(x @ given[f"w_{i}"], 0) @ given[f"v_{i}"]
    return x


@pytest.mark.parametrize("rows", [16, 5])
def test_calls(rows: int) -> None:
    """`run` and calls of ranks run the loop if it divides the rows."""
    sizes = {"S": rows, "K": 4, "N": 2}
    program, given, threads = hw.compile(model, options=hw.Options(sizes=SIZES)), arrays(model, **sizes), hw.Threads(2)
    assert any(choice.chosen.chunks for choice in program.choices)

    def on_rank(rank: int) -> Any:
        hw.init(provider=threads)
        blocks = {v.name: np.ascontiguousarray(v.type.shard(given[v.name], rank, model.mesh)) for v in model.arguments}
        return program(**blocks, sizes=sizes)

    np.testing.assert_array_equal(program.run(**given), expected(given))
    np.testing.assert_array_equal(np.concatenate(threads.run(on_rank)), expected(given))
    program.close()
