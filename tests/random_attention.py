"""Random attention, forward and backward. A seed selects sizes, head groups, masks and shardings."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

import hostweave as hw
from hostweave.types.size import Size
from hostweave.types.tensor import TensorType

MESHES = ({"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 8}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 4})
REFUSED = (
    "are in zigzag, which supports no lengths",
    "are in zigzag, but there are",
    "cannot be divided evenly",
    "choose sizes that divide without a remainder",
)


class Case:
    def __init__(self, seed: int, meshes: Sequence[dict[str, int]] = MESHES):
        self.random = random = Random(seed)
        self.mesh = hw.Mesh(**random.choice(meshes))
        groups, of_group, self.size = random.choice([1, 2, 3, 4]), random.choice([1, 1, 2]), random.choice([4, 8, 16])
        self.sizes = {"B": random.randint(1, 4), "S": random.choice([1, 2, 7, 12, 24]), "T": random.choice([1, 5, 12, 48])}
        known = Random(~seed)  # A separate generator keeps the draws of `self.random` unchanged.
        self.stated = {name: size if known.random() < 0.5 else name for name, size in self.sizes.items()}
        rows, keys = self.stated["S"], self.stated[random.choice("ST")]  # The numbers of rows and keys may be equal.
        self.batch: list[int | str] = random.choice([[], [self.stated["B"]]])
        heads, columns = groups * of_group, random.choice([8, self.size])
        self.inputs = {
            "query": self.input(heads, rows, self.size),
            "key": self.input(groups, keys, self.size),
            "value": self.input(groups, keys, columns),
        }
        self.causal = random.choice([None, "top_left", "bottom_right"])
        self.window = random.choice([None, 1, 3, 10]) if self.causal else None
        mask = random.choice(["", "", "lengths", "bias", *(["offsets"] if keys == rows else [])])
        types = {
            "lengths": hw.i32[(*self.batch,)],
            "offsets": hw.i32[(*self.batch, 4)],
            "bias": hw.f32[(*(random.choice([1, size]) for size in self.batch), random.choice([1, heads]), random.choice([1, rows]), keys)],
        }
        self.masks = {mask: types[mask]} if mask else {}
        self.backward = {"gradient": self.input(heads, rows, columns)} if random.random() < 0.5 else {}

    def input(self, heads: int, rows: int | str, size: int) -> TensorType:
        axes = [name for name, _ in self.mesh.axes]
        self.random.shuffle(axes)
        dims: list[Any] = [*self.batch, heads, rows]
        for i, often in enumerate((*([0.25] * len(self.batch)), 0.3, 0.5)):
            own = tuple(axes.pop() for _ in tuple(axes) if self.random.random() < often)
            in_pieces = (
                dims[i] == rows and Size.of(rows).bind(self.sizes) % (2 * self.mesh.size_of(own)) == 0 and self.random.random() < 0.6
            )
            if own:
                dims[i] = f"{dims[i]}@zigzag({','.join(own)})" if in_pieces else f"{dims[i]}@{','.join(own)}"
        return hw.f32[(*dims, size)]

    def fusion(self) -> hw.Fusion:
        def attention(query, key, value, gradient=None, **masks):  # type: ignore[no-untyped-def]
            how = {"causal": self.causal, "window": self.window, "enable_gqa": True, **masks}
            y, lse = hw.attention(query, key, value, **how)
            return (y, lse, *(hw.attention_backward(query, key, value, y, gradient, lse, **how) if self.backward else ()))

        return hw.fusion(mesh=self.mesh, **self.inputs, **self.masks, **self.backward)(attention)

    def arrays(self, fusion: hw.Fusion, seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        shapes = {value.name: [size.bind(self.sizes) for size in value.type.shape] for value in fusion.inputs}
        arrays: dict[str, Any] = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        keys = shapes["key"][-2]
        if "lengths" in arrays:
            arrays["lengths"] = random.integers(1, keys + 1, shapes["lengths"]).astype(np.int32)
        if "offsets" in arrays:
            arrays["offsets"] = np.sort(random.integers(0, keys + 1, shapes["offsets"]), -1).astype(np.int32)
        return arrays
