"""Random programs in which calls of a function repeat with different parameters, like the layers of a model.

One or two blocks of random ops pass a value from call to call. Each call takes a weight, which may be resharded. Some calls take the weight
of another call. The calls may also take caches, which may be donated, and may return additional results. Some values between calls are
returned or used again. Then another block may be called once per earlier call, usually in reverse order, as in a backward pass. Each call
of this block reads the input of an earlier call, the result of the earlier call, or both. Each call of this block also reads the result of
the previous call.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from fusion_properties import IGNORED, computes, seed_ranges
from random_donations import Donating
from random_fusions import Generator
from unrolling import unrolled

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.tensor import TensorType

LARGE = Options(sizes=dict.fromkeys("MNK", 40320))  # The cost model then chooses loops.
TRANSPORTS = ("auto", "two_sided", "peer", "one_sided")


class Repeats(Donating):
    def __init__(self, seed: int):
        super().__init__(seed)
        self.seed, self.has_zigzag = seed, False
        self.calls = self.random.randint(2, 6)

    def weight(self, shape: tuple[Any, ...]) -> TensorType:
        return self.dtype[self.sharded(shape)]

    def fusion(self) -> Fusion:
        g = self
        shape = tuple(g.random.sample("MNK", g.random.randint(1, 3)))
        of_weight = g.random.choice([shape, shape[-1:], (shape[0], *(1 for _ in shape[1:]))])
        carried, inside = g.dtype[g.sharded(shape)], g.dtype[g.sharded(shape)]
        blocks, has_more, has_cache = g.random.choice([1, 1, 1, 2]), g.random.random() < 0.5, g.random.random() < 0.5
        cache = g.dtype[g.sharded(shape)]
        weights = {f"w_{i}": g.weight(of_weight) if g.random.random() < 0.2 else None for i in range(g.calls)}
        usual = g.weight(of_weight)
        inputs: dict[str, TensorType] = {"x": carried, **{name: given or usual for name, given in weights.items()}}
        inputs |= {f"c_{i}": cache for i in range(g.calls)} if has_cache else {}
        is_donated = has_cache and g.random.random() < 0.7
        made: list[Any] = []
        for number in range(blocks):

            def layer(x: hw.Tensor, w: hw.Tensor, *c: hw.Tensor) -> tuple[hw.Tensor, ...]:
                y = g.body([x, x * 1 + w], 3, g.ops)[-1]
                moved = y if (y.type.shape, y.dtype) == (x.type.shape, x.dtype) else x * w - w
                updated = [-each + moved for each in c]
                more = [hw.sum(moved * 2, 0)] if has_more else []
                return (moved + 1, *updated, *more)

            if has_cache:

                def with_cache(x: hw.Tensor, w: hw.Tensor, c: hw.Tensor, layer: Any = layer) -> tuple[hw.Tensor, ...]:
                    return layer(x, w, c)  # type: ignore[no-any-return]

                with_cache.__name__ = f"layer{number}"
                donate = {"c": 1} if is_donated else {}
                made.append(hw.block(donate=donate, x=inside, w=g.weight(of_weight), c=cache)(with_cache))
            else:

                def without(x: hw.Tensor, w: hw.Tensor, layer: Any = layer) -> tuple[hw.Tensor, ...]:
                    return layer(x, w)  # type: ignore[no-any-return]

                without.__name__ = f"layer{number}"
                made.append(hw.block(x=inside, w=g.weight(of_weight))(without))
        order = [i % blocks if g.random.random() < 0.9 else 0 for i in range(g.calls)]
        of_call = [i if g.random.random() < 0.9 else g.random.randrange(g.calls) for i in range(g.calls)]
        kept, backward = [g.random.random() < 0.2 for _ in order], g.random.random() < 0.3

        def repeated(**given: hw.Tensor) -> tuple[hw.Tensor, ...]:
            x, results, updated = given["x"], list[hw.Tensor](), list[hw.Tensor]()
            between = [x]
            for i, (block, weight) in enumerate(zip(order, of_call, strict=True)):
                at = g.calls - 1 - weight if backward else weight
                cached = [given[f"c_{i}"]] if has_cache else []
                returned = made[block](x, given[f"w_{at}"], *cached)
                returned = returned if isinstance(returned, tuple) else (returned,)
                if kept[i]:
                    results.append(returned[0] - x if i % 2 else returned[-1])
                x = returned[0]
                between.append(x)
                updated += returned[1 : 1 + len(cached)]
            return (*updated, *results, x * 2, *g.taken_again(between, inside))

        donate = {f"c_{i}": i for i in range(g.calls)} if is_donated and g.random.random() < 0.7 else {}
        return hw.fusion(mesh=self.mesh, donate=donate, **inputs)(repeated)

    def taken_again(self, between: list[hw.Tensor], type: TensorType) -> tuple[hw.Tensor, ...]:
        """Calls another block once per earlier call, or never. Each call takes the input of the earlier call, the result, or both. Returns
        the result of the last call, if any."""
        draw = Random(~self.seed)  # A separate generator does not change the random choices outside this method.
        if draw.random() < 0.6:
            return ()
        names = draw.choice([("before",), ("after",), ("before", "after")])

        @hw.block(y=type, **dict.fromkeys(names, type))
        def again(y: hw.Tensor, **taken: hw.Tensor) -> hw.Tensor:
            return y * 2 - sum((number * value for number, value in enumerate(taken.values(), 2)), start=y)

        y, pairs = between[-1] * 3, [{"before": one, "after": other} for one, other in pairwise(between)]
        for pair in pairs[::-1] if draw.random() < 0.7 else pairs:
            y = again(y, **{name: pair[name] for name in names})  # type: ignore[assignment]
        return (y,)


class Layers(Generator):
    """Layers of two matmuls with random shardings. At large sizes, the compiler chooses loops for many of the reshards."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.has_zigzag, self.meshes, self.dtype = False, [self.mesh], hw.f64
        self.sizes = dict.fromkeys("MNK", 8 * self.mesh.size)

    def maybe_resharded(self, t: hw.Tensor) -> hw.Tensor:
        return self.random.choice([t, hw.reshard(t, *t.shape), self.resharded(t)])

    def fusion(self) -> Fusion:
        types = {"x": self.input("MN"), "e": self.input("MN"), "w": self.input("NK"), "v": self.input("KN")}

        @hw.block(**types | {"x": self.random.choice([types["x"], self.input("MN")])})
        def layer(x: hw.Tensor, e: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
            h = hw.relu(self.maybe_resharded(self.random.choice([x, e])) @ w)
            y = self.maybe_resharded(self.maybe_resharded(h) @ v)
            return y + self.random.choice([x, e])

        weights = {f"{name}_{i}": types[name] for i in range(self.random.randint(2, 4)) for name in "wv"}

        @hw.fusion(mesh=self.mesh, x=types["x"], e=types["e"], **weights)
        def layers(x: hw.Tensor, e: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
            for i in range(len(weights) // 2):
                x = layer(x, e, weights[f"w_{i}"], weights[f"v_{i}"])  # type: ignore[assignment]
            return x * 2

        return layers


def is_right(seed: int) -> bool:
    """Returns True if the program of this seed runs, and otherwise False. A refused program must also be refused if its repeat ops are
    unrolled."""
    generator, options = Repeats(seed), Options(transport=TRANSPORTS[seed % len(TRANSPORTS)])
    fusion = generator.fusion()
    if computes(generator, fusion, seed, options):
        return True
    try:
        lower(fusion, options)
    except ProgramError:
        with pytest.raises(ProgramError):
            lower(unrolled(fusion), options)
    return False


@pytest.mark.parametrize("seeds", seed_ranges(32, 10000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_repeats(seeds: range) -> None:
    assert sum(map(is_right, seeds)) > 0.4 * len(seeds)


@pytest.mark.parametrize("seeds", seed_ranges(24, 4000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_layers_with_loops(seeds: range) -> None:
    """States an alternative of a choice in each program. The last program with a loop also runs, with even and with uneven sizes."""
    generators, made = [Layers(seed) for seed in seeds], list[tuple[Layers, Fusion, Options]]()
    for seed, generator in zip(seeds, generators, strict=True):
        fusion, options = generator.fusion(), LARGE
        if choices := lower(fusion, LARGE).choices:
            choice = generator.random.choice(choices)
            options = replace(LARGE, choices={choice.name: generator.random.choice(choice.alternatives).name})
        assert computes(generator, fusion, seed, options)
        made += [(generator, fusion, options)] if any(one.chosen.chunks for one in lower(fusion, options).choices) else []
    assert made
    generator, fusion, options = made[-1]
    program = hw.compile(fusion, options=options)
    for more in (0, 1):
        generator.sizes = {name: size + more for name, size in generator.sizes.items()}
        arrays = generator.arrays(fusion, seed=more)
        (wanted,) = run_reference(fusion, arrays)
        np.testing.assert_allclose(program.run(**arrays), wanted, rtol=1e-12, atol=1e-12)
    program.close()
