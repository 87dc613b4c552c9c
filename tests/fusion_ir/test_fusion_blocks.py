"""Tracing, text and errors of blocks. The text has each block once, before the callers of the block."""

from __future__ import annotations

from typing import Any

import pytest
from unrolling import inlined

import hostweave as hw
from hostweave.base.errors import ParseError, ProgramError
from hostweave.fusion_ir.ir import Fusion

TYPES = {"x": hw.f32["M@x", "E"], "w": hw.f32["E", "E"]}
MESH = hw.Mesh(x=2)

STACK = """\
function @mlp(%x: f32[M@x, E], %w: f32[E, E]) {
  %h: f32[M, E] = matmul(%x, %w)
  %y: f32[M, E] = add(%x, %h)
  return %y
}
function @layer(%x: f32[M@x, E], %w: f32[E, E]) {
  %mlp_x: f32[M, E] = call @mlp(%x, %w)
  %y: f32[M, E] = negative(%mlp_x)
  return %y
}
fusion @stack(%x: f32[M@x, E], %w: f32[E, E], %v: f32[E, E]) mesh(x=2) {
  %layer_x: f32[M, E] = call @layer(%x, %w)
  %layer_x_2: f32[M, E] = call @layer(%layer_x, %v)
  %y: f32[M, E] = call @mlp(%layer_x_2, %w)
  return %y
}
"""


def stack() -> tuple[Fusion, list[str]]:
    """The program of STACK, and the names of the blocks in the order of tracing."""
    ran = []

    @hw.block(**TYPES)
    def mlp(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        ran.append("mlp")
        return x + hw.matmul(x, w).named("h")

    @hw.block(**TYPES)
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        ran.append("layer")
        return -mlp(x, w)

    @hw.fusion(mesh=MESH, **TYPES, v=TYPES["w"])
    def stack(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        return mlp(w=w, x=layer(layer(x, w), w=v))

    return stack, ran


def test_a_block_is_traced_once_and_printed_before_its_callers() -> None:
    fusion, ran = stack()
    assert ran == ["layer", "mlp"]
    assert str(fusion) == STACK
    assert Fusion.parse(STACK) == fusion


def test_each_fusion_traces_a_block_for_itself() -> None:
    @hw.block(**TYPES)
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.matmul(x, w)

    meshes = (hw.Mesh(x=2), hw.Mesh(x=4))
    for mesh in meshes:
        made = hw.fusion(mesh=mesh, **TYPES)(lambda x, w: layer(x, w))
        assert [function.mesh for function in made.functions] == [mesh]


def test_an_unused_call_and_its_block_are_removed() -> None:
    @hw.block(**TYPES)
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.matmul(x, w)

    @hw.fusion(mesh=MESH, **TYPES)
    def f(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        layer(x, w)
        return -x

    assert str(f) == "fusion @f(%x: f32[M@x, E], %w: f32[E, E]) mesh(x=2) {\n  %y: f32[M, E] = negative(%x)\n  return %y\n}\n"


def test_a_block_that_returns_its_input_returns_a_copy() -> None:
    @hw.block(x=hw.f32["M"])
    def same(x: hw.Tensor) -> hw.Tensor:
        return x

    fusion = hw.fusion(x=hw.f32["M"])(lambda x: same(x))
    assert [op.kind for op in fusion.functions[0].ops] == ["copy"]


RESULTS = """\
function @norm(%x: f32[M@x, E]) {
  %s: f32[M, 1] = sum(%x, axis=(1,), keepdims=true)
  %divide_x: f32[M, E] = divide(%x, %s)
  return %divide_x, %s
}
fusion @f(%x: f32[M@x, E]) mesh(x=2) {
  %y_2: f32[M, E] = call @norm(%x)
  %total: f32[M, 1] = output @norm(%y_2, index=1)
  %y: f32[M, E] = subtract(%y_2, %total)
  return %y
}
"""


def test_a_block_of_two_results() -> None:
    @hw.block(x=TYPES["x"])
    def norm(x: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        total = hw.sum(x, axis="E", keepdims=True).named("s")
        return x / total, total

    @hw.fusion(mesh=MESH, x=TYPES["x"])
    def f(x: hw.Tensor) -> hw.Tensor:
        y, total = norm(x)
        return y - total

    assert str(f) == RESULTS
    assert Fusion.parse(RESULTS) == f
    assert str(inlined(f)).splitlines()[1:6] == [
        "  %norm_x: f32[M@x, E] pinned = reshard(%x)",
        "  %norm_s: f32[M, 1] = sum(%norm_x, axis=(1,), keepdims=true)",
        "  %y_2: f32[M, E] = divide(%norm_x, %norm_s)",
        "  %total: f32[M, 1] = copy(%norm_s)",
        "  %y: f32[M, E] = subtract(%y_2, %total)",
    ]


def test_inlined() -> None:
    text = """\
function @layer(%x: f32[M@x, E], %w: f32[E, E]) {
  %h: f32[M, E] = matmul(%x, %w)
  %y: f32[M, E] = add(%x, %h)
  return %y
}
fusion @f(%x: f32[M, E], %w: f32[E, E]) mesh(x=2) {
  %layer_h: f32[M, E] = call @layer(%x, %w)
  %y: f32[M, E] = call @layer(%layer_h, %w)
  return %y
}
"""
    expected = """\
fusion @f(%x: f32[M, E], %w: f32[E, E]) mesh(x=2) {
  %layer_x: f32[M@x, E] pinned = reshard(%x)
  %layer_w: f32[E, E] pinned = reshard(%w)
  %layer_h_2: f32[M, E] = matmul(%layer_x, %layer_w)
  %layer_h: f32[M, E] = add(%layer_x, %layer_h_2)
  %layer_x_2: f32[M@x, E] pinned = reshard(%layer_h)
  %layer_w_2: f32[E, E] pinned = reshard(%w)
  %layer_h_3: f32[M, E] = matmul(%layer_x_2, %layer_w_2)
  %y: f32[M, E] = add(%layer_x_2, %layer_h_3)
  return %y
}
"""
    assert str(inlined(Fusion.parse(text))) == expected


# --- errors -----------------------------------------------------------------------------------------------------------


def run(lines: str) -> None:
    head = "import hostweave as hw\nT = {'x': hw.f32['M@x', 'E'], 'w': hw.f32['E', 'E']}\n"
    exec(compile(head + lines, "/home/me/mlp.py", "exec"), {})


LAYER = "@hw.block(**T)\ndef layer(x, w):\n    return hw.matmul(x, w)\n"  # lines 3 to 5
FUSION = "@hw.fusion(mesh=hw.Mesh(x=2), **T, v=hw.f32['E', 'F'])\ndef f(x, w, v):\n"  # lines 6 and 7
TAKES = "mlp.py:8: call: @layer takes x, w; "

REFUSED = {
    "sizes": (
        LAYER + FUSION + "    return layer(x, v)",
        "mlp.py:8: call: @layer takes f32[E, E] as w, not f32[E, F]; only the mesh axes may differ",
    ),
    "dtype": (
        LAYER + FUSION + "    return layer(hw.astype(x, hw.bf16), w)",
        "mlp.py:8: call: @layer takes f32[M@x, E] as x, not bf16[M, E]; only the mesh axes may differ",
    ),
    "missing": (LAYER + FUSION + "    return layer(x)", TAKES + "missing a required argument: 'w'"),
    "too many": (LAYER + FUSION + "    return layer(x, w, v)", TAKES + "too many positional arguments"),
    "twice": (LAYER + FUSION + "    return layer(x, w, x=x)", TAKES + "multiple values for argument 'x'"),
    "unknown": (LAYER + FUSION + "    return layer(x, w, v=v)", TAKES + "got an unexpected keyword argument 'v'"),
    "no tensor": (LAYER + FUSION + "    return layer(x, 2.0)", TAKES + "w is 2.0, which is not a tensor of a fusion"),
    "outside": (LAYER + "layer(1, 2)", "mlp.py:6: call: @layer takes x, w; x is 1, which is not a tensor of a fusion"),
    "stream of a result": (
        LAYER + FUSION + "    return layer(x, w).stream('M')",
        "mlp.py:8: stream: the value is the result of the function @layer; stream a tensor in the function",
    ),
    "recursion": (
        "@hw.block(**T)\ndef layer(x, w):\n    return layer(x, w)\n" + FUSION + "    return layer(x, w)",
        "mlp.py:5: call: @layer calls itself, and tracing would not end; use a Python loop",
    ),
    "one name": (
        LAYER + "other = layer\n" + LAYER + "@hw.fusion(**T, mesh=hw.Mesh(x=2))\ndef f(x, w):\n    return layer(other(x, w), w)",
        "mlp.py:12: call: two functions are named @layer; rename one",
    ),
    "no tensor returned": (
        "@hw.block(**T)\ndef layer(x, w):\n    return 1\n" + FUSION + "    return layer(x, w)",
        "mlp.py:3: function @layer returns 1; return a tensor of the function, or a tuple of tensors",
    ),
    "another function's tensor": (
        FUSION + "    @hw.block(**T)\n    def layer(x, w):\n        return x + v\n    return layer(x, w)",
        "mlp.py:7: add: the tensors belong to different fusions or functions; make one of them an input",
    ),
    "mesh": (
        LAYER + "@hw.fusion(x=hw.f32['M', 'E'], w=T['w'])\ndef f(x, w):\n    return layer(x, w)",
        "mlp.py:3: f32[M@x, E]: there is no axis x in mesh(); its axes: none",
    ),
    "size": (
        "@hw.block(**T)\ndef layer(x, w):\n    return hw.sum(hw.broadcast_to(x, 'B', 'M', 'E'), 'B')\n" + FUSION + "    return layer(x, w)",
        "mlp.py:5: broadcast_to: no input has a dim B, which %x_broadcast has, so its size is unknown; add it to an input, or write an int",
    ),
    "no parameters": (
        "@hw.block()\ndef layer():\n    pass",
        "mlp.py:3: function @layer has no parameters; add at least one tensor parameter",
    ),
    "no type": (
        "@hw.block(x=T['x'])\ndef layer(x, w):\n    pass",
        "mlp.py:3: function @layer: w has no type; pass w=hw.f32[...] to hw.block",
    ),
    "no name": (
        "hw.block(**T)(lambda x, w: x)",
        "mlp.py:3: function <lambda>: its name is not of ASCII letters, digits and _; use def",
    ),
    "no parameter": (
        "@hw.block(**T, v=T['w'])\ndef layer(x, w):\n    pass",
        "mlp.py:3: function @layer: v is not a parameter of the function; add it or leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    lines, message = REFUSED[case]
    with pytest.raises(ProgramError) as caught:
        run(lines)
    assert str(caught.value) == message


HEAD = "function @b(%x: f32[M]) {\n  %y: f32[M] = negative(%x)\n  return %y\n}\n"


TWO = HEAD.replace("  return %y", "  %z: f32[M] = negative(%y)\n  return %y, %z")


def calling(call: str, head: str = HEAD) -> str:
    return f"{head}fusion @f(%x: f32[M], %w: f32[N]) mesh(x=2) {{\n  {call}\n  return %y\n}}\n"


TEXTS: dict[str, tuple[type[Exception], str]] = {
    calling("%y: f32[M] = call @c(%x)"): (ParseError, "line 6, column 22: there is no function @c above; the functions here: @b"),
    calling("%y: f32[M] = call @b(%x)", HEAD + HEAD): (ParseError, "line 5, column 11: function @b is defined twice; rename one"),
    calling("%y: f32[M] = call(%x)"): (ParseError, "line 6, column 20: expected '@', found '('"),
    calling("%y: f32[M] = call @b()"): (ProgramError, "text:6: call: takes one or more operands, not 0"),
    calling("%y: f32[M] = call @b(%x, %w)"): (ProgramError, "text:6: call: @b takes 1 tensors, not 2; pass x"),
    calling("%y: f32[M] = call @b(%w)"): (ProgramError, "text:6: call: @b takes f32[M] as x, not f32[N]; only the mesh axes may differ"),
    calling("%y: f32[N] = call @b(%x)"): (ProgramError, "text:6: call: %y is f32[N], but its operands give f32[M]; correct its type"),
    calling("%y: f32[M] stream(M, 2) = call @b(%x)"): (
        ProgramError,
        "text:6: stream of %y: it is made by the function @b; stream a tensor in the function",
    ),
    calling("%y: f32[M] = call @b(%x)", HEAD.replace("return %y", "return %x")): (
        ProgramError,
        "function @b: %x is returned, but no op makes it; return a copy of it",
    ),
    calling("%a: f32[M] = call @b(%x)\n  %y: f32[M] = output @b(%a, index=1)"): (
        ProgramError,
        "text:7: output: @b has no output 1; use the value of the call",
    ),
    calling("%a: f32[M] = negative(%x)\n  %y: f32[M] = output @b(%a, index=1)", TWO): (
        ProgramError,
        "text:8: output: %a is not a call of @b; correct it",
    ),
    calling("%a: f32[M] = call @b(%x)\n  %c: f32[M] = output @b(%a, index=1)\n  %y: f32[M] = output @b(%a, index=1)", TWO): (
        ProgramError,
        "text:8: output: output 1 of %a is named twice; use the first name",
    ),
    calling("%y: f32[M] = call @b(%x)", HEAD.replace("@b(%x: f32[M]", "@b(%x: f32[M] partial(sum, x)")): (
        ProgramError,
        "function @b: input %x is partial; pass its terms along a sharded dim, and sum over this dim",
    ),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text: str) -> None:
    kind, message = TEXTS[text]
    with pytest.raises(kind) as caught:
        Fusion.parse(text)
    assert str(caught.value) == message


# --- functions of many tensors ----------------------------------------------------------------------------------------


def test_unnamed_inputs_are_keyword_arguments() -> None:
    @hw.fusion(x=hw.f32["M"], **{f"b_{i}": hw.f32["M"] for i in range(3)})
    def total(x: hw.Tensor, **biases: hw.Tensor) -> hw.Tensor:
        for bias in biases.values():
            x = x + bias
        return x

    assert [value.name for value in total.inputs] == ["x", "b_0", "b_1", "b_2"]
    assert len(total.ops) == 3


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"layers.0.w": hw.f32["M"]}, "fusion @f: 'layers.0.w' is not a name; use ASCII letters, digits and _, and no digit first"),
        ({"w": 3}, "fusion @f: w=3 is not the type of a tensor; write w=hw.f32[...]"),
    ],
)
def test_inputs_that_no_parameter_names(inputs: dict[str, Any], message: str) -> None:
    def f(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        return x

    with pytest.raises(ProgramError) as caught:
        hw.fusion(x=hw.f32["M"], **inputs)(f)
    assert str(caught.value).endswith(message)
