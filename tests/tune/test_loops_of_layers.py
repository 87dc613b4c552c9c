"""Chunk loops that the compiler chooses in repeated layers: calls with all sizes, and choices by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.targets.target import find_target

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


@hw.block(h=hw.f16["S", "N"], e=hw.f16["S@x", "K"], w=hw.f16["K", "N"])
def decode(h: hw.Tensor, e: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
    return hw.relu(hw.reshard(e, "S", "K") @ w + h)


@hw.fusion(mesh=hw.Mesh(x=2), h=hw.f16["S", "N"], e=hw.f16["S@x", "K"], w_0=hw.f16["K", "N"], w_1=hw.f16["K", "N"])
def decoder(h: hw.Tensor, e: hw.Tensor, w_0: hw.Tensor, w_1: hw.Tensor) -> Any:
    return decode(decode(h, e, w_0), e, w_1)


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


def test_a_gather_with_a_choice_stays_in_its_function() -> None:
    """Without the choice, the callers gather ahead of the repeat. Each alternative can be stated, as the search states it."""
    options = hw.Options(sizes=SIZES)
    program = hw.compile(decoder, options=options)
    (choice,) = program.choices
    assert (choice.name, choice.chosen.name) == ("@decode %e_gathered", "put(2)")
    for one in choice.alternatives:
        made = hw.compile(decoder, options=replace(options, choices={choice.name: one.name}))
        assert [each.chosen.name for each in made.choices] == [one.name]
    for rows in (8, 5):
        given = arrays(decoder, S=rows, K=4, N=2)
        h = given["h"].astype(np.float64)
        for name in ("w_0", "w_1"):
            h = np.maximum(given["e"] @ given[name] + h, 0)
        np.testing.assert_array_equal(program.run(**given), h)
    program.close()


def test_a_stated_none_without_one_sided_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant without one-sided transports keeps the stated choice. The cost model would choose p2p(2)."""
    options = hw.Options(sizes=SIZES, choices={"@layer %x_gathered": "none"})
    program, given = hw.compile(model, options=options), arrays(model, S=16, K=4, N=2)
    monkeypatch.setattr(type(find_target("cpu")), "why_not", lambda _, transport: "old driver" if transport.is_optional else "")
    np.testing.assert_array_equal(program.run(**given), expected(given))
    (variant,) = program.variants
    taken = [{choice.value: choice.chosen.name for choice in made.choices} for made in (program, variant.compiled.host)]
    assert taken == [{"x_gathered": "none", "matmul_v_scattered": "put(2)"}, {"x_gathered": "none", "matmul_v_scattered": "none"}]
    program.close()
