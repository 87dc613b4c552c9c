"""Random fusions that donate inputs, and return views of donated inputs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from random_fusions import OUTER_OPS, Generator, MakeOp, cut, parameter, turned

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion


class Donating(Generator):
    """Generates programs and blocks that donate some inputs. Both also return views of inputs, of computed values and of results."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.outer_ops = (*OUTER_OPS, *[_called_in_place] * 5)

    def fusion(self) -> Fusion:
        sizes = [(name, self.sizes[name])[self.random.random() < 0.3] for name in "MNK"]
        shapes = [self.random.choices(sizes, k=self.random.randint(1, 3)) for _ in range(2)]
        inputs = {f"x{i}": self.input(self.random.choice(shapes)) for i in range(self.random.randint(1, 4))}
        donate = self.donated([*inputs], [name for name in inputs if self.random.random() < 0.7])

        def random(**tensors: hw.Tensor) -> tuple[hw.Tensor, ...]:
            return self.in_place(tensors, donate, 4, (*self.ops, *self.outer_ops))

        return hw.fusion(mesh=self.mesh, donate=donate, **inputs)(random)

    def donated(self, inputs: list[str], chosen: list[str]) -> dict[str, int]:
        """Chooses the index of the result that uses each donated input."""
        return dict(zip(chosen, self.random.sample(range(len(chosen) + 3), len(chosen)), strict=True))

    def in_place(self, tensors: dict[str, hw.Tensor], donate: dict[str, int], most: int, ops: Sequence[MakeOp]) -> tuple[hw.Tensor, ...]:
        """Results in donated memory, and views of inputs, of computed values, or of the results in donated memory."""
        made = list(self.body([*tensors.values()], most, ops))
        taken = {number: self.result_in(tensors[name], [*tensors.values(), *made]) for name, number in donate.items()}
        viewed = [*tensors.values(), *made, *taken.values()]
        return tuple(taken[number] if number in taken else self.view(self.random.choice(viewed)) for number in range(len(donate) + 3))

    def result_in(self, x: hw.Tensor, values: list[hw.Tensor]) -> hw.Tensor:
        alike = [t for t in values if (t.dtype, t.type.shape, t.type.mesh) == (x.dtype, x.type.shape, x.type.mesh)]
        other = self.random.choice(alike)
        made = self.random.choice([-x, x * 2 + other, other + self.random.choice(alike), other])
        made = made if made.type.dims == x.type.dims else made + 0
        if self.random.random() < 0.4:
            orders = [order for order in itertools.permutations(range(x.ndim)) if self.random.random() < 0.2 or same_shape(x, order)]
            made = hw.permute_dims(made, self.random.choice(orders))
        return made if self.random.random() < 0.8 else hw.reshape(hw.reshape(made, -1), *made.shape)

    def view(self, t: hw.Tensor) -> hw.Tensor:
        """A chain of views and reshards."""
        for _ in range(self.random.randint(1, 3)):
            with contextlib.suppress(ProgramError):
                t = self.random.choice(VIEWS)(self, [], t)
        return t


def same_shape(x: hw.Tensor, order: tuple[int, ...]) -> bool:
    return tuple(x.type.shape[dim] for dim in order) == x.type.shape


VIEWS: tuple[MakeOp, ...] = (
    turned,
    cut,
    cut,
    lambda g, values, t: hw.reshape(t, -1),
    lambda g, values, t: hw.expand_dims(t, g.random.randint(0, t.ndim)),
    lambda g, values, t: g.resharded(t),
)


def _called_in_place(g: Generator, values: list[hw.Tensor], t: hw.Tensor) -> hw.Tensor:
    assert isinstance(g, Donating)
    other = g.random.choice([t, g.other(values, t)])
    known = g.blocks.setdefault((t.dtype, t.shape, other.dtype, other.shape, "in place"), [])
    if not known or g.random.random() < 0.2:
        donate = g.donated(["x", "y"], g.random.choice([["x"], ["y"], ["x", "y"]]))

        def block(x: hw.Tensor, y: hw.Tensor) -> tuple[hw.Tensor, ...]:
            return g.in_place({"x": x, "y": y}, donate, 3, (*g.ops, _called_in_place) if len(g.blocks) < 3 else g.ops)

        block.__name__ = f"block{sum(map(len, g.blocks.values()))}"
        known.append(hw.block(donate=donate, x=parameter(g, t), y=parameter(g, other))(block))
    made = g.random.choice(known)(t, other)
    values.extend(made)
    return g.random.choice(made)
