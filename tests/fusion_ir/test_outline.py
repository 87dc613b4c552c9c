"""Python loops that become repeats: which loops do, names and lines, results compared with the unrolled program, and predicted times."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.check.check import check
from hostweave.emit import render
from hostweave.fusion_ir.frontend import tracing
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.machine import H200

MESH = hw.Mesh(tp=2)
Make = Callable[[], Fusion]


def rolled_and_unrolled(make: Make, monkeypatch: pytest.MonkeyPatch) -> tuple[Fusion, Fusion]:
    rolled = make()
    with monkeypatch.context() as patched:
        patched.setattr(tracing, "loops", lambda *_: iter(()))
        return rolled, make()


def mlp(count: int, x: str = "M@tp", norm: bool = False, mesh: hw.Mesh = MESH, E: Any = "E", F: Any = "F", dtype: Any = hw.f32) -> Fusion:
    weights = {}
    for i in range(count):
        weights |= {f"norm_{i}": dtype[E]} if norm else {}
        weights |= {f"w_in_{i}": dtype[E, f"{F}@tp"], f"w_out_{i}": dtype[f"{F}@tp", E]}

    @hw.fusion(mesh=mesh, x=dtype[x, E], **weights)
    def model(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        given = x.type.dims
        for i in range(count):
            n = hw.rms_norm(x, weights[f"norm_{i}"]) if norm else x
            h = hw.silu(n @ weights[f"w_in_{i}"])
            x = x + hw.reshard(h @ weights[f"w_out_{i}"], *map(str, given))
        return x

    return model


def arrays_of(fusion: Fusion, **sizes: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    sizes = {"M": 24, "E": 24, "F": 48} | sizes
    return {value.name: random.standard_normal([size.bind(sizes) for size in value.type.shape]) / 4 for value in fusion.arguments}


# --- the repeat -------------------------------------------------------------------------------------------------------


def test_a_loop_becomes_a_repeat() -> None:
    """A body begins with the matmul by `w_out`, because the gather of x must not be the first op of a function."""
    text = str(mlp(8))
    assert text.count(" = repeat @layer(") == 1
    assert " call " not in text
    assert "function @layer(%x: f32[M@tp, E], %h: f32[M, F@tp], %w_in: f32[E, F@tp], %w_out: f32[F@tp, E])" in text
    assert "return %x_out, %h_out" in text
    assert "%w_out: f32[depth, F@tp, E] as w_out_0 to w_out_6 of layers, %w_in: f32[depth, E, F@tp] as w_in_1 to w_in_7 of layers" in text
    assert len({len(str(mlp(count)).splitlines()) for count in (5, 8, 32)}) == 1


def test_a_whole_iteration_is_a_body_if_possible() -> None:
    text = str(mlp(8, "M"))
    assert "function @layer(%x: f32[M, E], %w_in: f32[E, F@tp], %w_out: f32[F@tp, E])" in text
    assert "as w_in_0 to w_in_7 of layers" in text


def test_names_in_the_generated_loop() -> None:
    """Names say the user's variable and its role. Plans of matmuls by `w_out` and `w_out_7` have one name."""
    text = render(lower(mlp(8), Options()))["program.cpp"]
    assert "layer(x_i, h_i, in.layers[i], x_out_i, h_out_i, caller);" in text
    assert "Program::layer(const float* x, const float* h, const LayerInputs& in, float* x_out, float* h_out, cudaStream_t" in text
    assert "plan_matmul_w_out_.multiply(h_out_, w_out_7, " in text
    assert "add_copy_x_new_x_out" in text


def test_a_norm_stays_in_the_kernel_of_the_iteration_before() -> None:
    text = str(mlp(8, "M", norm=True))
    assert "as norm_1 to norm_7 of layers" in text
    function, program = text.split("fusion @")
    assert function.index("silu") < function.index("rsqrt")
    assert program.count("rsqrt(") == 1


def test_values_keep_their_lines() -> None:
    rolled = mlp(8, norm=True)
    (repeat,) = (op for op in rolled.ops if op.kind == "repeat")
    lines = [{str(op.location) for op in body.ops if op.kind in ("matmul", "silu")} for body in (rolled, repeat.called)]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 2
    assert str(repeat.location).startswith("test_outline.py:")


def test_two_loops_become_two_repeats() -> None:
    @hw.fusion(mesh=MESH, x=hw.f32["M", "E"], **{f"{name}_{i}": hw.f32["E", "E"] for name in "vw" for i in range(5)})
    def model(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        for i in range(5):
            x = hw.relu(x @ weights[f"v_{i}"])
        for i in reversed(range(5)):
            x = x + hw.sigmoid(x @ weights[f"w_{i}"])
        return x

    assert [op.called.name for op in model.ops if op.kind == "repeat"] == ["layer", "layer_2"]
    assert str(model).count("backward=true") == 1
    check(lower(model, Options()), fusion=model)


def test_elements_of_a_tensor_are_weights() -> None:
    @hw.fusion(mesh=MESH, x=hw.f32["M@tp", "E"], w=hw.f32[6, "E", "E"])
    def model(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        for i in range(6):
            x = hw.relu(x @ w[i])
        return x

    assert "repeat @layer(%x, %w_of_layer" in str(model)
    check(lower(model, Options()), fusion=model)


def test_functions_in_a_loop() -> None:
    """Calls of two functions alternate."""

    @hw.block(x=hw.f32["M@tp", "E"], w=hw.f32["E", "E"])
    def one(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return x + hw.relu(x @ w), x * 2

    @hw.block(x=hw.f32["M@tp", "E"], y=hw.f32["M@tp", "E"], w=hw.f32["E", "E"])
    def other(x: hw.Tensor, y: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return x + hw.sigmoid(y @ w)

    @hw.fusion(mesh=MESH, x=hw.f32["M@tp", "E"], **{f"{name}_{i}": hw.f32["E", "E"] for i in range(5) for name in "vw"})
    def model(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        for i in range(5):
            x = other(*one(x, weights[f"v_{i}"]), weights[f"w_{i}"])
        return x

    assert [op.kind for op in model.ops] == ["repeat"]
    check(lower(model, Options()), fusion=model)


def test_a_body_of_two_equal_halves() -> None:
    """Both halves of an iteration run one function of the user, with weights of different names."""

    def half(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return x + hw.relu(x @ w)

    @hw.fusion(mesh=MESH, x=hw.f32["M@tp", "E"], **{f"{name}_{i}": hw.f32["E", "E"] for i in range(5) for name in "vw"})
    def model(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        for i in range(5):
            x = half(half(x, weights[f"v_{i}"]), weights[f"w_{i}"])
        return x

    assert [op.kind for op in model.ops] == ["repeat"]
    check(lower(model, Options()), fusion=model)


# --- loops that stay unrolled -----------------------------------------------------------------------------------------

W = {f"w_{i}": hw.f32["E", "E"] for i in range(6)}


def loop(body: Callable[..., Any], count: int = 6, donate: tuple[str, ...] = (), **types: Any) -> Fusion:
    @hw.fusion(mesh=MESH, donate=donate, **{"x": hw.f32["M@tp", "E"], **W, **types})
    def model(x: hw.Tensor, **given: hw.Tensor) -> Any:
        carried: Any = x
        for i in range(count):
            carried = body(carried, given[f"w_{i}"], i, given)
        return carried

    return model


def test_the_loop_of_these_tests_is_a_repeat() -> None:
    assert " repeat " in str(loop(lambda x, w, i, given: hw.relu(x @ w)))


def inputs(name: str, type: Any) -> dict[str, Any]:
    return {f"{name}_{i}": type for i in range(6)}


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        pytest.param(lambda x, w, i, given: hw.relu(x @ w), {"count": 3}, id="three iterations"),
        pytest.param(lambda x, w, i, given: hw.relu(x * given[f"b_{i}"]) + 1, inputs("b", hw.f32["E"]), id="one kernel"),
        pytest.param(lambda x, w, i, given: hw.relu(x @ w) + hw.sum(given["c"]), {"c": hw.f32["E"]}, id="an equal value in all iterations"),
        pytest.param(lambda x, w, i, given: hw.relu(x @ given[f"v_{i}"]), inputs("v", hw.f32["E@tp", "E"]), id="weights are gathered"),
        pytest.param(
            lambda x, w, i, given: hw.relu(x @ hw.reshard(given[f"v_{i}"], "E", "E")),
            inputs("v", hw.f32["E", "E@tp"]),
            id="the user gathers weights",
        ),
        pytest.param(lambda x, w, i, given: hw.relu(x @ w) * (i + 1), {}, id="a number that differs"),
        pytest.param(lambda x, w, i, given: hw.relu(x @ given[f"w_{i * 5 % 6}"]), {}, id="weights in another order"),
        pytest.param(lambda x, w, i, given: hw.relu(x @ given[f"w_{min(i, 4)}"]), {}, id="a weight that is used twice"),
        pytest.param(lambda x, w, i, given: hw.relu(x @ w).stream("M", 2), {}, id="streamed"),
        pytest.param(lambda x, w, i, given: hw.relu(x @ w).named(f"h_{i}"), {}, id="named"),
        pytest.param(lambda x, w, i, given: hw.relu(x @ w), {"donate": ("x",)}, id="donated"),
        pytest.param(lambda x, w, i, given: hw.reshard(hw.relu(x @ w), "M", "E" if i % 2 else "E@tp"), {}, id="other shardings"),
        pytest.param(lambda x, w, i, given: (x @ w).T, {"x": hw.f32["E", "E"]}, id="a view is carried"),
    ],
)
def test_loops_that_stay_unrolled(body: Callable[..., Any], facts: dict[str, Any]) -> None:
    assert " repeat " not in str(loop(body, **facts))


def test_values_of_other_iterations_stay_unrolled() -> None:
    @hw.fusion(mesh=MESH, x=hw.f32["M@tp", "E"], **W)
    def returned(x: hw.Tensor, **weights: hw.Tensor) -> tuple[hw.Tensor, ...]:
        values = [x := hw.relu(x @ weights[f"w_{i}"]) for i in range(6)]
        return tuple(values)

    @hw.fusion(mesh=MESH, x=hw.f32["M@tp", "E"], **W)
    def two_before(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        before, last = x, hw.relu(x)
        for i in range(6):
            before, last = last, hw.relu(before @ weights[f"w_{i}"]) + last
        return last

    @hw.fusion(mesh=MESH, x=hw.f32["M@tp", "E"], y=hw.f32["M@tp", "E"], **W)
    def beside(x: hw.Tensor, y: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        for i in range(6):
            x, y = hw.relu(x @ weights[f"w_{i}"]), hw.relu(y @ weights[f"w_{i}"].T)
        return x + y

    for model in (returned, beside):
        assert " repeat " not in str(model)
    check(lower(two_before, Options()), fusion=two_before)


def test_parts_of_the_mesh_stay_unrolled() -> None:
    half = hw.Mesh(x=4).ranks([0, 1], z=2)

    @hw.fusion(mesh=hw.Mesh(x=4), x=hw.f32["M", "E"], w=hw.f32["E", "E"])
    def model(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        x, w = (hw.reshard(one, *dims, mesh=half) for one, dims in ((x, ("M", "E")), (w, ("E", "E"))))
        for _ in range(6):
            x = hw.relu(x @ w)
        return x

    assert " repeat " not in str(model)


# --- results ----------------------------------------------------------------------------------------------------------


def random_loop(seed: int, ranks: int) -> Make:
    """A loop of random ops. Its weights count up, and it may carry two values."""
    choose = Random(seed)
    count, x = choose.randint(4, 6), choose.choice(["M@tp", "M"])
    steps = [choose.choice(["norm", "matmul", "scale", "mlp", "beside", "columns"]) for _ in range(choose.randint(1, 3))] + ["mlp"]
    choose.shuffle(steps)
    is_residual, is_backward, is_returned = (choose.random() < 0.5 for _ in range(3))
    of_step = {"norm": hw.f64["E"], "scale": hw.f64["E"], "matmul": hw.f64["E", "E"], "columns": hw.f64["E", "E@tp"]}
    weights: dict[str, Any] = {}
    for i in range(count):
        for number, step in enumerate(steps):
            if step == "mlp":
                weights |= {f"in_{number}_{i}": hw.f64["E", "F@tp"], f"out_{number}_{i}": hw.f64["F@tp", "E"]}
            elif step in of_step:
                weights[f"{step}_{number}_{i}"] = of_step[step]

    def body(i: int, x: hw.Tensor, y: hw.Tensor, given: dict[str, hw.Tensor]) -> tuple[hw.Tensor, hw.Tensor]:
        before = x
        for number, step in enumerate(steps):
            if step == "mlp":
                x = hw.reshard(hw.tanh(x @ given[f"in_{number}_{i}"]) @ given[f"out_{number}_{i}"], sharding, "E")
            elif step == "norm":
                x = hw.rms_norm(x, given[f"norm_{number}_{i}"])
            elif step == "scale":
                x = x * given[f"scale_{number}_{i}"]
            elif step == "beside":
                x, y = x + y, hw.tanh(x)
            else:
                x = hw.tanh(x @ given[f"{step}_{number}_{i}"])
        return (before + x if is_residual else x), y

    sharding = x

    def make() -> Fusion:
        @hw.fusion(mesh=hw.Mesh(tp=ranks), x=hw.f64[x, "E"], y=hw.f64[x, "E"], **weights)
        def model(x: hw.Tensor, y: hw.Tensor, **given: hw.Tensor) -> Any:
            for i in range(count)[:: -1 if is_backward else 1]:
                x, y = body(i, x, y, given)
            return (x * 2, y + 1) if is_returned else x + y

        return model

    return make


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_random_loops(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rolled = 0
    for seed in range(8):
        one, other = rolled_and_unrolled(random_loop(seed, ranks), monkeypatch)
        rolled += " repeat " in str(one)
        arrays = arrays_of(other)
        assert [value.name for value in one.arguments] == [value.name for value in other.arguments]
        expected = run_reference(other, arrays)
        for result, wanted in zip(run_reference(one, arrays), expected, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-12, atol=1e-12)
        check(lower(one, Options()), fusion=one)
    assert rolled >= 3


@pytest.mark.parametrize("x", ["M@tp", "M"])
def test_results_are_equal_bit_for_bit(x: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rolled, unrolled = rolled_and_unrolled(lambda: mlp(5, x, norm=True), monkeypatch)
    arrays = {name: array.astype(np.float32) for name, array in arrays_of(rolled).items()}
    one, other = (hw.compile(fusion).run(**arrays) for fusion in (rolled, unrolled))
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(
    ("x", "norm", "ranks", "rows"),
    [("M@tp", True, 8, 8192), ("M", True, 4, 8), pytest.param("M@tp", False, 8, 8192, marks=pytest.mark.more), ("M", True, 1, 4096)],
)
def test_predicted_times(x: str, norm: bool, ranks: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeat is not slower than the unrolled loop. If x itself is gathered, a function writes x twice, which takes 0.3% of the time."""
    made = rolled_and_unrolled(lambda: mlp(5, x, norm, hw.Mesh(tp=ranks), 4096, 14336, hw.bf16), monkeypatch)
    options = hw.Options(machine=H200, check=False, sizes={"M": rows})
    one, other = (hw.compile(fusion, options=options).predict({"M": rows}).predicted.micros for fusion in made)
    assert one <= other * (1.0001 if norm else 1.003)
