"""An MLP with collectives and a chunk loop. The inputs of the MLP, and the result in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import hostweave as hw

RANDOM = np.random.default_rng(0)


def mlp_on(ranks: int, **options: Any) -> hw.Program:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["T@x", "E"], up=hw.f32["E", "F@x"], down=hw.f32["F@x", "E"])
    def mlp(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
        hidden = hw.maximum(hw.matmul(hw.reshard(x, "T", "E").stream("T", chunks=2) if ranks > 1 else x, up), 0)
        return hw.reshard(hw.matmul(hidden, down), "T@x", "E")

    return hw.compile(mlp, options=hw.Options(**options))


def arrays_of(tokens: int) -> dict[str, np.ndarray]:
    shapes = {"x": (tokens, 8), "up": (8, 16), "down": (16, 8)}
    return {name: RANDOM.integers(-3, 4, shape).astype(np.float32) for name, shape in shapes.items()}


def blocks(arrays: Mapping[str, np.ndarray], rank: int, ranks: int) -> list[np.ndarray]:
    axes = {"x": 0, "up": 1, "down": 0}
    return [np.ascontiguousarray(np.split(array, ranks, axes[name])[rank]) for name, array in arrays.items()]


def wanted(x: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return np.maximum(x @ up, 0) @ down
