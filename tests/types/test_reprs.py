"""Short reprs of types, meshes and programs, and the HTML of programs in notebooks."""

from __future__ import annotations

import hostweave as hw
from hostweave.host_ir.ir import HostProgram


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.bf16["K", "N"])
def mixed(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
    assert repr(x) == "Tensor(f32[M@x, K])"
    return hw.matmul(x, hw.astype(w, hw.f32))


def test_types_and_meshes() -> None:
    assert repr(hw.f32["M@x", "K"]) == "f32[M@x, K]"
    assert repr([hw.bf16[()]]) == "[bf16[]]"
    assert repr(hw.f32["M"].on(hw.Mesh(x=4).ranks([0, 1]))) == "f32[M] on mesh(x=2 of ranks 0, 1)"
    assert repr(hw.Mesh(dp=2, tp=4)) == "mesh(dp=2, tp=4)"


def test_programs() -> None:
    inputs = "(x: f32[M@x, K], w: bf16[K, N])"
    # No pass has chosen the sharding of the result yet.
    assert repr(mixed) == f"<hostweave fusion mixed{inputs} -> f32[M, N] on mesh(x=2)>"
    program = hw.compile(mixed)
    assert repr(program) == "<hostweave program mixed for cpu on mesh(x=2)>"
    host = HostProgram.parse(program.host_ir)
    assert repr(host) == f"<hostweave host program mixed{inputs} -> {host.outputs[0].name}: f32[M@x, N] on mesh(x=2)>"


def test_notebooks_show_texts_that_are_escaped() -> None:
    program = hw.compile(mixed)
    assert mixed._repr_html_().startswith("<pre>fusion @mixed(")
    host = HostProgram.parse(program.host_ir)
    assert "-&gt;" in host._repr_html_()
    html = program._repr_html_()
    assert html.startswith("<details><summary>&lt;hostweave program mixed")
    assert "matmul %x" in html
