"""Fusions that tracing returns, and errors of tracing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from traced import X, trace

import hostweave as hw
from hostweave.base.errors import HostweaveError, ProgramError


def ops(fusion: hw.Fusion) -> list[str]:
    return [line.strip() for line in str(fusion).splitlines()[1:-1]]


def test_a_parameter_without_a_type_keeps_its_default() -> None:
    def scaled(x, factor=2.0, *, bias=None):  # type: ignore[no-untyped-def]
        return x * factor if bias is None else x * factor + bias

    assert [i.name for i in hw.fusion(x=hw.f32[4])(scaled).inputs] == ["x"]
    assert [i.name for i in hw.fusion(x=hw.f32[4], bias=hw.f32[4])(scaled).inputs] == ["x", "bias"]


def test_parameters_and_inputs_agree() -> None:
    with pytest.raises(ProgramError, match=r"fusion @f: w has no type; pass w=hw.f32\[...\] to hw.fusion$"):
        hw.fusion(x=hw.f32[1])(lambda_named("f", lambda x, w: x))
    with pytest.raises(ProgramError, match=r"fusion @f: w is not a parameter of the function; add it or leave it out$"):
        hw.fusion(x=hw.f32[1], w=hw.f32[1])(lambda_named("f", lambda x: x))


def lambda_named(name: str, function: Any) -> Any:
    function.__name__ = name
    return function


def test_mesh_sizes() -> None:
    with pytest.raises(ProgramError, match=r"mesh axis x has size 0: it must be an int of at least 1$"):
        hw.Mesh(x=0)


def test_tensors_of_two_fusions() -> None:
    leaked: list[hw.Tensor] = []

    @hw.fusion(x=hw.f32[4])
    def first(x: hw.Tensor) -> hw.Tensor:
        leaked.append(x)
        return -x

    with pytest.raises(ProgramError, match=r"add: the tensors belong to different fusions or functions; make one of them an input$"):

        @hw.fusion(x=hw.f32[4])
        def second(x: hw.Tensor) -> hw.Tensor:
            return x + leaked[0]


def test_names() -> None:
    fusion = trace("h = hw.relu(x).named('h')\na = h * 2\nb = h * 3\nreturn a + b, b, h, x, h", x=X)
    assert ops(fusion) == [
        "%h: bf16[M, K] = relu(%x)",
        "%a: bf16[M, K] = multiply(%h, 2.0)",
        "%b: bf16[M, K] = multiply(%h, 3.0)",
        "%add_a: bf16[M, K] = add(%a, %b)",
        "%x_copied: bf16[M, K] = copy(%x)",
        "%h_copied: bf16[M, K] = copy(%h)",
        "return %add_a, %b, %h, %x_copied, %h_copied",
    ]


def test_names_of_variables() -> None:
    """Values have the names of variables, also of variables in functions that the traced function calls. A variable may be assigned several
    times.

    An argument keeps the name of its value in the caller. A leading _ is dropped. A variable that is not ASCII, or only _, names no value.
    """
    fusion = trace(
        "def layer(h, w):\n    product = h @ w\n    gated = product * hw.sigmoid(product)\n    return gated\n"
        "for w in (v, u):\n    x = layer(x, w)\n"
        "_, _tail, größe = x * 2, x * 3, x * 4\ntotal, unused = (hw.sum(x + t) for t in (_tail, größe + _))\nreturn total, unused",
        x='hw.f32["M", "M"]',
        v='hw.f32["M", "M"]',
        u='hw.f32["M", "M"]',
    )
    assert [op.result.name for op in fusion.ops] == [
        *("product", "sigmoid_product", "x_2"),
        *("product_2", "sigmoid_product_2", "x_3"),
        *("multiply_x_3", "tail", "multiply_x_3_2", "add_x_3", "add_x_3_2", "total", "add_x_3_3", "unused"),
    ]


def test_names_of_ops_and_their_operands() -> None:
    fusion = trace(
        "n = hw.rms_norm(x)\n"
        "return hw.softmax(hw.relu(n @ wq) @ wq.T @ hw.reshape(wk, 'K', 'K')) + hw.astype(hw.softmax(hw.astype(n, hw.f32)), hw.bf16)",
        x=X,
        wq='hw.bf16["K", "N"]',
        wk='hw.bf16["K", "K"]',
    )
    names = [op.result.name for op in fusion.ops]
    assert names[names.index("n") :][:6] == ["n", "matmul_wq", "relu_wq", "wq_transposed", "matmul_wq_2", "wk_reshaped"]
    assert {"matmul_wk", "max_wk", "softmax_wk", "n_f32", "softmax_n", "softmax_n_bf16", "y"} <= set(names)
    fusion = trace("return hw.where(x[0] > hw.iota(x, 'K'), x[2], hw.concat([x[1][:2], x[1][2:]]))", x='hw.i32[4, "K"]')
    assert [op.result.name for op in fusion.ops] == [
        *("x_0", "iota_K", "greater_x", "x_2", "x_1", "x_sliced", "x_1_2", "x_from_2", "x_joined", "y")
    ]


def test_names_that_are_already_used() -> None:
    fusion = trace("a = -y\nb = -a\nreturn hw.exp(-b)", y=X)
    assert ops(fusion) == [
        "%a: bf16[M, K] = negative(%y)",
        "%b: bf16[M, K] = negative(%a)",
        "%negative_b: bf16[M, K] = negative(%b)",
        "%y_2: bf16[M, K] = exp(%negative_b)",
        "return %y_2",
    ]


def test_unused_ops_are_removed() -> None:
    assert ops(trace("hw.exp(x)\nreturn -x", x=X)) == ["%y: bf16[M, K] = negative(%x)", "return %y"]


def test_numbers_get_the_dtype_of_the_tensor() -> None:
    assert ops(trace("return 1 - x", x=X))[0] == "%y: bf16[M, K] = subtract(1.0, %x)"
    assert ops(trace("return x * -3", x='hw.i32["M"]'))[0] == "%y: i32[M] = multiply(%x, -3)"
    assert ops(trace("return hw.where(x < 0, x, float('-inf'))", x=X))[:2] == [
        "%less_x: bool[M, K] = less(%x, 0.0)",
        "%y: bf16[M, K] = where(%less_x, %x, -inf)",
    ]


def test_shapes() -> None:
    fusion = trace(
        "a = hw.reshape(x, 4, 'M/4', -1)\nb = hw.permute_dims(a, (2, 0, 1))\nc = b[:, None]\nd = hw.broadcast_to(c, 'K', 2, 4, 'M/4')\n"
        "e = hw.mean(d, axis=[0, -1], keepdims=True)\nreturn hw.astype(e, hw.f32)",
        x=X,
    )
    assert ops(fusion) == [
        "%a: bf16[4, M/4, K] = reshape(%x)",
        "%b: bf16[K, 4, M/4] = permute_dims(%a, axes=(2, 0, 1))",
        "%c: bf16[K, 1, 4, M/4] = expand_dims(%b, axis=(1,))",
        "%d: bf16[K, 2, 4, M/4] = broadcast_to(%c)",
        "%e: bf16[1, 2, 4, 1] = mean(%d, axis=(0, 3), keepdims=true)",
        "%y: f32[1, 2, 4, 1] = astype(%e)",
        "return %y",
    ]


def test_matmul_broadcasts_batches() -> None:
    fusion = trace("return x @ w", x='hw.f32[4, 8, "M", "K"]', w='hw.f32[8, "K", "N"]')
    assert ops(fusion)[0] == "%y: f32[4, 8, M, N] = matmul(%x, %w)"


def test_python_can_iterate_over_a_first_dim_of_known_size() -> None:
    @hw.fusion(x=hw.f32[3, "N"])
    def total(x):
        assert len(x) == 3
        return sum(x)

    assert [op.kind for op in total.ops] == ["select", "add"] * 3


def test_invalid_dims_and_meshes() -> None:
    with pytest.raises(ProgramError, match=r"not a dim: 'M N'; write it like 'M', 'M@x' or 'M@dp,tp'$"):
        hw.f32["M N"]
    assert hw.f32["M @ x"] == hw.f32["M@x"]
    with pytest.raises(
        ProgramError, match=r"fusion: mesh=f32\[M\] is not an hw.Mesh; if the function has a parameter mesh, rename this parameter$"
    ):
        hw.fusion(mesh=hw.f32["M"])


def test_attributes_of_a_tensor() -> None:
    @hw.fusion(x=hw.bf16["M", 4])
    def f(x: hw.Tensor) -> hw.Tensor:
        assert x.shape == ("M", 4)
        assert x.ndim == 2
        assert x.dtype is hw.bf16
        return x.T


def test_a_cast_to_the_same_dtype_is_the_tensor_itself() -> None:
    fusion = hw.fusion(x=hw.f32["N"])(lambda_named("f", lambda x: -hw.astype(x, hw.f32)))
    assert [op.kind for op in fusion.ops] == ["negative"]


def test_a_result_in_donated_memory_has_the_name_of_the_input() -> None:
    f = lambda_named("f", lambda w, g: (w - g, g * 2.0))
    assert hw.fusion(w=hw.f32["N"], g=hw.f32["N"], donate={"w": 0})(f).outputs == ("w_updated", "multiply_g")


def test_one_device_without_a_mesh() -> None:
    assert str(trace("return -x", mesh="None", x=X)).startswith("fusion @f(%x: bf16[M, K]) {\n")


def test_errors_are_value_errors() -> None:
    assert issubclass(ProgramError, ValueError)
    assert issubclass(ProgramError, HostweaveError)


def test_import_is_light() -> None:
    code = "import sys, hostweave; print([m for m in ('numpy', 'jinja2', 'torch', 'ml_dtypes') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
