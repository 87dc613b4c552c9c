"""Repeats: which calls become a repeat, text, verifier rules, results compared with NumPy, and faults that the check detects."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unrolling import unrolled

import hostweave as hw
from hostweave.base.errors import ParseError, ProgramError
from hostweave.check.check import check
from hostweave.check.sizes import minimal_sizes
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower

TEXT = """\
function @layer(%x: f32[M@x, E], %w: f32[E, E]) {
  %h: f32[M@x, E] = matmul(%x, %w)
  %s: f32[M@x, E] = multiply(%h, %h)
  return %h, %s
}
fusion @model(%x: f32[M@x, E], %w: f32[depth, E, E] as w_0 to w_3 of layers) mesh(x=2) {
  %h: f32[M@x, E] = repeat @layer(%x, %w, depth=depth, each=(1,), carried=(0,), returned=(0,))
  %s: f32[depth, M@x, E] = output @layer(%h, index=1, depth=depth)
  %k: f32[depth, M@x, E] = output @layer(%h, index=2, depth=depth)
  return %h, %s as s_0 to s_3 of sums, %k as k_0 to k_3 of sums
}
"""


def layers(count: int, backward: bool = False, name: str = "w_{}") -> Fusion:
    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E"])
    def layer(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return hw.clip(x * w, -1, 1), x - w

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"], **{name.format(i): hw.f32["E"] for i in range(count)})
    def model(x: hw.Tensor, **w: hw.Tensor) -> tuple[hw.Tensor, ...]:
        given = []
        for i in range(count)[:: -1 if backward else 1]:
            x, one = layer(x, w[name.format(i)])
            given.append(one)
        return x, given[0] + given[1] - given[-2]

    return model


def arrays_of(fusion: Fusion) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {v.name: random.standard_normal([size.bind({"M": 4, "E": 3}) for size in v.type.shape]) for v in fusion.arguments}


@pytest.mark.parametrize("backward", [False, True])
def test_indices_of_one_tensor_are_a_slice(backward: bool) -> None:
    """Consecutive calls take adjacent elements of one tensor, such as a random seed per layer. The repeat takes a slice of this tensor."""

    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E"], number=hw.f32[()])
    def layer(x: hw.Tensor, w: hw.Tensor, number: hw.Tensor) -> hw.Tensor:
        return hw.clip(x * w, -1, 1) + number

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"], numbers=hw.f32[7], **{f"w_{i}": hw.f32["E"] for i in range(4)})
    def model(x: hw.Tensor, numbers: hw.Tensor, **w: hw.Tensor) -> hw.Tensor:
        for i in range(4)[:: -1 if backward else 1]:
            x = layer(x, w[f"w_{i}"], numbers[2 + i])
        return x

    assert "%numbers_of_layer: f32[depth] = slice(%numbers, axis=0, start=2, step=1)" in str(model)
    assert str(model).count("repeat @layer") == 1
    arrays = arrays_of(model)
    x = arrays["x"]
    for i in range(4)[:: -1 if backward else 1]:
        x = np.clip(x * arrays[f"w_{i}"], -1, 1) + arrays["numbers"][2 + i]
    np.testing.assert_allclose(run_reference(model, arrays)[0], x)
    check(lower(model, Options()))


def test_text_and_numpy() -> None:
    fusion = Fusion.parse(TEXT)
    assert str(fusion) == TEXT
    assert [value.name for value in fusion.arguments] == ["x", "w_0", "w_1", "w_2", "w_3"]
    assert [value.name for value in fusion.results] == ["h", *(f"{name}_{i}" for i in range(4) for name in "sk")]
    arrays = arrays_of(fusion)
    last, *others = run_reference(fusion, arrays)
    x = arrays["x"]
    for i in range(4):
        np.testing.assert_allclose(others[2 * i + 1], x)
        x = x @ arrays[f"w_{i}"]
        np.testing.assert_allclose(others[2 * i], x * x)
    np.testing.assert_allclose(last, x)
    for one, other in zip(run_reference(unrolled(fusion), arrays), (last, *others), strict=True):
        np.testing.assert_allclose(one, other)


@pytest.mark.parametrize("backward", [False, True])
def test_repeated_calls_become_one_repeat(backward: bool) -> None:
    fusion = layers(5, backward)
    assert str(fusion).count(" = repeat @layer(") == 1
    assert " call " not in str(fusion)
    assert ("backward=true" in str(fusion)) == backward
    arrays = arrays_of(fusion)
    for one, other in zip(run_reference(fusion, arrays), run_reference(unrolled(fusion), arrays), strict=True):
        np.testing.assert_allclose(one, other)
    assert [str(layers(count, backward)).count("\n") for count in (4, 50)] == [str(fusion).count("\n")] * 2


@pytest.mark.parametrize(
    ("function", "repeats"),
    [
        (lambda layer, x, w: layer(layer(x, w["w_0"]), w["w_1"]), 1),
        (lambda layer, x, w: layer(layer(x, w["w_0"]), w["v"]), 0),  # The names w_0 and v have no consecutive numbers.
        (lambda layer, x, w: layer(layer(x, w["v"]), w["w_0"]), 0),  # One number does not show that the calls are numbered.
        (lambda layer, x, w: layer(layer(x, w["w_1"]), w["w_0"]), 1),
        (lambda layer, x, w: layer(layer(x, w["w_0"]) * 2, w["w_1"]), 0),  # Another op is between the calls.
        (lambda layer, x, w: layer(x, w["w_0"]) + layer(x, w["w_1"]), 1),
        (lambda layer, x, w: layer(x, w["w_0"]), 0),
        (lambda layer, x, w: layer(layer(x, w["w_0"]), w["w_0"]), 1),
    ],
)
def test_number_of_repeats(function: Any, repeats: int) -> None:
    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E"])
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.clip(x * w, -1, 1)

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"], **dict.fromkeys(("w_0", "w_1", "v"), hw.f32["E"]))
    def model(x: hw.Tensor, **w: hw.Tensor) -> hw.Tensor:
        return function(layer, x, w) + w["v"]  # type: ignore[no-any-return]

    assert str(model).count(" repeat ") == repeats
    arrays = arrays_of(model)
    np.testing.assert_allclose(*(run_reference(each, arrays)[0] for each in (model, unrolled(model))))
    check(lower(model, Options()), fusion=model)


def test_a_first_layer_that_differs_keeps_its_inputs_apart() -> None:
    """The inputs of layers 1 to 3 form groups. The groups do not include u_0 and w_0, the inputs of layer 0."""

    @hw.block(x=hw.f32["M@x", "E"], u=hw.f32["E"], w=hw.f32["E"])
    def layer(x: hw.Tensor, u: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.clip(x * w, -1, 1) + u

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"], **{f"{name}_{i}": hw.f32["E"] for i in range(4) for name in "uw"})
    def model(x: hw.Tensor, **given: hw.Tensor) -> hw.Tensor:
        x = x * given["w_0"] + given["u_0"]
        for i in range(1, 4):
            x = layer(x, given[f"u_{i}"], given[f"w_{i}"])
        return x

    assert [op.kind for op in model.ops if op.callee] == ["repeat"]
    (once,) = run_reference(unrolled(model), arrays_of(model))
    np.testing.assert_array_equal(run_reference(model, arrays_of(model)), [once])


def test_functions_that_differ_in_one_attribute_are_separate_repeats() -> None:
    def block(factor: float) -> Any:
        def layer(x: hw.Tensor) -> hw.Tensor:
            return x * factor

        layer.__name__ = f"layer_{str(factor).replace('.', '_')}"
        return hw.block(x=hw.f32["M@x", "E"])(layer)

    one, other = block(1.5), block(2.5)

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"])
    def model(x: hw.Tensor) -> hw.Tensor:
        return other(other(one(one(x))))  # type: ignore[no-any-return]

    assert str(model).count(" repeat ") == 2
    x = np.ones((4, 3))
    np.testing.assert_allclose(run_reference(model, {"x": x})[0], x * 1.5**2 * 2.5**2)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("w_0 to w_3", "w_0 to v_3", "is not a range of names"),
        ("w_0 to w_3", "w_3 to w_0", "is not a range of names"),
        (", depth=depth, each", ", each", "write one, as in depth=2"),
        ("returned=(0,)", "returned=(1,)", "correct its type"),
        (
            "returned=(0,)",
            "returned=(2,)",
            "takes 2 tensors and gives 2; pass 2, name each operand at most once .* existing results in returned=",
        ),
        ("each=(1,), ", "", "only the mesh axes may differ"),
        ("carried=(0,), ", "", "give as many of both"),
        ("index=2", "index=6", "has no output 6; use 1 to 5"),
        ("return %h, %s as", "%t: f32[depth, E, E] = negative(%w)\n  return %t, %s as", "%w is a parameter group"),
        ("%k as", "%k, %s as", "returns one tensor twice"),
    ],
)
def test_rules(old: str, new: str, error: str) -> None:
    text = TEXT.replace(old, new, 1)
    assert text != TEXT
    with pytest.raises((ProgramError, ParseError), match=error):
        Fusion.parse(text)


HOST = str(lower(layers(5), Options()))


def test_host_text_and_check() -> None:
    host = HostProgram.parse(HOST)
    assert str(host) == HOST
    assert [p.name for p in host.arguments] == ["x", *(f"w_{i}" for i in range(5))]
    check(host, fusion=layers(5))
    check(lower(layers(4), Options()), fusion=layers(4))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("select %w[0: %i]", "select %w[0: 0]"),
        ("select %w[0: %i]", "select %w[0: depth - 1 - %i]"),
        ("select %w[0: %i]", "select %w[0: %i + 1]"),
        ("if %i == 0 else", "if %i == 1 else"),
        ("if %i % 2 == 0 else", "if %i % 2 == 1 else"),
        ("if %i % 2 == 0 else", "if %i % 3 == 0 else"),
        ("for %i in 0..depth", "for %i in 0..depth - 1"),
    ],
)
def test_the_check_detects_errors_in_a_loop(old: str, new: str) -> None:
    assert old in HOST
    with pytest.raises((ProgramError, ParseError)):
        check(HostProgram.parse(HOST.replace(old, new, 1)), fusion=layers(5))


def test_sizes_of_the_check_have_the_parity_of_the_depth() -> None:
    found = [minimal_sizes(lower(layers(count), Options()))["depth"] for count in (2, 3, 4, 5, 32, 33)]
    assert found == [2, 3, 4, 3, 4, 3]


def test_a_repeat_needs_no_group() -> None:
    @hw.block(x=hw.f32["M@x"], low=hw.f32["M@x"])
    def step(x: hw.Tensor, low: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return (x + low) / 2, low

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x"])
    def bisect(x: hw.Tensor) -> hw.Tensor:
        low = x * 0
        for _ in range(7):
            x, low = step(x, low)
        return x

    assert "depth=7" in str(bisect)
    check(lower(bisect, Options()), fusion=bisect)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_calls_that_use_the_previous_tensor(count: int, backward: bool) -> None:
    """A backward pass uses the input of each layer. The input of a layer is a result of the previous layer. In the repeat, the function
    `back` reshards the gradients."""

    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E"], s=hw.f32["M@x", "E"])
    def back(x: hw.Tensor, w: hw.Tensor, s: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return hw.clip(x * w - s, -1, 1), hw.sum(x * s, axis="M")

    @hw.block(donate={"w": 0}, w=hw.f32["E@x"], g=hw.f32["E@x"])
    def update(w: hw.Tensor, g: hw.Tensor) -> hw.Tensor:
        return w - g / 8

    types = {
        f"{name}_{i}": type for name, type in (("v", hw.f32["E@x"]), ("w", hw.f32["E"]), ("s", hw.f32["M@x", "E"])) for i in range(count)
    }

    @hw.fusion(
        mesh=hw.Mesh(x=2),
        donate={f"v_{i}": 1 + i for i in range(count)},
        x=hw.f32["M@x", "E"],
        first=hw.f32["M@x", "E"],
        **types,
    )
    def model(x: hw.Tensor, first: hw.Tensor, **given: hw.Tensor) -> tuple[hw.Tensor, ...]:
        gradients = {}
        x = x + given[f"s_{count - 1}"]
        for i in range(count)[:: -1 if backward else 1]:
            x, gradient = back(x, given[f"w_{i}"], given[f"s_{i - 1}"] if i else first)
            gradients[i] = hw.reshard(gradient, "E@x")
        return (x, *(update(given[f"v_{i}"], gradients[i]) for i in range(count)))

    assert str(model).count(" repeat ") == 2
    assert "lagged=(2,)" in str(model)
    assert Fusion.parse(str(model)) == model
    arrays = arrays_of(model)
    for one, other in zip(run_reference(model, arrays), run_reference(unrolled(model), arrays), strict=True):
        np.testing.assert_allclose(one, other)
    check(lower(model, Options()), fusion=model)


@pytest.mark.parametrize("backward", [False, True])
def test_carried_values_can_be_returned(backward: bool) -> None:
    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E"])
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.clip(x * w, -1, 1)

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"], **{f"w_{i}": hw.f32["E"] for i in range(5)})
    def model(x: hw.Tensor, **w: hw.Tensor) -> tuple[hw.Tensor, ...]:
        made = {}
        for i in range(5)[:: -1 if backward else 1]:
            made[i] = x = layer(x, w[f"w_{i}"]).named(f"made_{i}")
        return (hw.sum(x, axis="E"), *(made[i] for i in range(5)))

    assert str(model).count(" repeat ") == 1
    assert "as made_0 to made_4 of layers" in str(model)
    arrays = arrays_of(model)
    for one, other in zip(run_reference(model, arrays), run_reference(unrolled(model), arrays), strict=True):
        np.testing.assert_allclose(one, other)
    check(lower(model, Options()), fusion=model)


def taken_again(
    both: Sequence[str] = ("before", "after"), donate: Sequence[str] = (), weight: str = "E", order: Sequence[int] = (0, 1, 2, 3)
) -> Fusion:
    """Calls `layer`, and then `back` in reverse order, as in a backward pass. Each call of `back` belongs to a call of `layer`. The call of
    `back` reads the layer's operand if `both` has "before", and the layer's result if `both` has "after"."""

    @hw.block(donate=donate, x=hw.f32["M@x", "E"], w=hw.f32["E"])
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.clip(x * w, -1, 1)

    @hw.block(y=hw.f32["M@x", "E"], **dict.fromkeys(both, hw.f32["M@x", "E"]))
    def back(y: hw.Tensor, **taken: hw.Tensor) -> hw.Tensor:
        return y - sum((number * value for number, value in enumerate(taken.values(), 2)), start=y * 0.5)

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"], **{f"w_{i}": hw.f32[weight] for i in range(4)})
    def model(x: hw.Tensor, **w: hw.Tensor) -> tuple[hw.Tensor, ...]:
        values = [x]
        for i in order:
            values.append(layer(values[-1], w[f"w_{i}"]))  # type: ignore[arg-type]
        y = values[-1] * 3
        for before, after in [*pairwise(values)][::-1] if both else ():
            y = back(y, **{name: {"before": before, "after": after}[name] for name in both})  # type: ignore[assignment]
        return y, values[-1], values[2] - values[1]

    return model


@pytest.mark.parametrize("donate", [(), ("x",)])
@pytest.mark.parametrize("both", [("before", "after"), ("after",), ("before",)])
def test_operands_and_results_of_all_calls_are_used_again(both: Sequence[str], donate: Sequence[str]) -> None:
    model = taken_again(both, donate)
    assert str(model).count(" repeat ") == 2
    check(lower(model, Options()), fusion=model)


def test_each_call_reshards_its_tensor_of_a_group() -> None:
    model = taken_again(weight="E@x")
    assert "%w_given: f32[E@x]" in str(model)
    assert str(model).count(" repeat ") == 2
    check(lower(model, Options()), fusion=model)


def test_a_tensor_of_a_group_is_used_in_another_sharding() -> None:
    """The repeat reads the group in its sharding. A rank takes its columns of one weight."""

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M", "E"], **{f"w_{i}": hw.f32["E", "E"] for i in range(6)})
    def model(x: hw.Tensor, **w: hw.Tensor) -> hw.Tensor:
        for weight in w.values():
            x = hw.relu(x @ weight)
        return x @ hw.reshard(w["w_2"], "E", "E@x")

    assert str(model).count(" repeat ") == 1
    check(lower(model, Options()), fusion=model)


def test_a_value_between_calls_of_tied_weights_is_used() -> None:
    """The program uses values between calls of a layer. The first two calls share a weight, so there are more calls than weights."""
    model = taken_again((), order=(0, 0, 1, 2, 3))
    check(lower(model, Options()), fusion=model)


def test_a_program_is_the_same_in_each_process() -> None:
    """The order of sets of strings differs between processes."""
    path, ours = os.pathsep.join(sys.path), str(taken_again())
    command = [sys.executable, "-c", "from test_repeats import taken_again; print(taken_again(), end='')"]
    for seed in "13":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
        made = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
        assert made.stdout == ours
