"""Files, text and errors of rendering."""

from __future__ import annotations

import host_text
import pytest

from hostweave.base.errors import ProgramError
from hostweave.emit import render
from hostweave.emit.instructions import Emitter, method_of
from hostweave.emit.layout import COMMON, macros_of
from hostweave.host_ir.instructions import inlined
from hostweave.host_ir.ir import Communication, HostProgram
from hostweave.host_ir.tree import Instruction, roles
from hostweave.transports.transport import NAMES, find_transport

PROGRAM = """host @f(%x: f32[M@d, K]) -> (%y: f32[M, K]) mesh(d=2) channels(d: d two_sided) {
  all_gather %x -> %y on d
}
"""


def test_equal_programs_give_the_same_bytes() -> None:
    program = host_text.parse(PROGRAM)
    assert render(program) == render(HostProgram.parse(str(program)))


def _kinds(base: type[Instruction]) -> list[type[Instruction]]:
    return [kind for below in base.__subclasses__() for kind in _kinds(below)] or [base]


@pytest.mark.parametrize("kind", [kind for kind in _kinds(Instruction) if kind.__module__ != inlined.__name__])
def test_every_instruction_has_a_macro_or_a_method(kind: type[Instruction]) -> None:
    transports = [find_transport(name) for name in NAMES]
    files = (
        [transport.template for transport in transports if kind.posts in transport.carries] if issubclass(kind, Communication) else [COMMON]
    )
    emits_nothing = "free" in roles(kind).values()  # `prepare` plans the arena, and a run frees no memory.
    assert emits_nothing or method_of(kind) is not Emitter.lay_out or all(kind.__name__ in macros_of(file) for file in files)


def test_a_member_call_declares_no_variable() -> None:
    """A call of a member function, such as `channel_d_.rank()`, declares no variable `rank`."""
    body = "  gather %x -> %y to 0 on d\n}\n"
    block = f"function @b(%x: f32[4]) -> (%y: f32[8]) {{\n{body}"
    text = f"{block}host @f(%x: f32[4], %z: f32[size]) -> (%y: f32[8]) mesh(d=2) {{\n  call @b %x -> %y\n}}\n"
    function = render(host_text.parse(text))["program.cpp"].partition("void Program::b(")[2]
    assert "channel_d_.rank() == 0" in function
    assert "int64_t rank =" not in function
    assert "auto [size]" not in function


def test_only_programs_with_kernels_have_kernel_files() -> None:
    assert list(render(host_text.parse(PROGRAM))) == ["program.hw", "program.h", "program.cpp", "binding.cpp"]


def test_the_host_ir_is_a_separate_file() -> None:
    texts = render(host_text.parse(PROGRAM))
    assert texts["program.hw"] == PROGRAM
    assert texts["program.cpp"].startswith('#include "program.h"\n')
    assert not any("%x" in text for path, text in texts.items() if path != "program.hw")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kernel @k(%x: f32[4, 5]) {\n  %a: f32[4] = sum(%x, axis=(1,))\n  %y: f32[] = sum(%a, axis=(0,))\n}\n"
            "host @f(%x: f32[4, 5]) -> (%y: f32[]) mesh() {\n  launch @k %x -> %y\n}",
            "kernel @k: %y is reduced over other dims; split it",
        ),
        (
            "kernel @k(%x: f32[4]) {\n  %y: f32[4] = reshard(%x)\n}\nhost @f(%x: f32[4]) -> (%y: f32[4]) mesh() {\n  launch @k %x -> %y\n}",
            "text:2: reshard: no kernel computes this op",
        ),
    ],
)
def test_an_op_without_cpp_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ProgramError) as error:
        render(host_text.parse(text))
    assert str(error.value) == message
