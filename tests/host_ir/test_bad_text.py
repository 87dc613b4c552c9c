"""Text of fusions and host programs with random changes, huge sizes or other errors.

The result is a program or a ProgramError, in bounded time.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

import numpy as np
import pytest
from host_text import EVERYTHING
from lowered_fusions import GOLDEN, NAMES, text

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host

TOKEN = re.compile(r"\s+|\w+|->|\.\.|[^\s\w]")
NUMBERS = ("0", "1", "7", str(2**31), str(2**32), str(2**63), "9" * 400, "1e400", "-1", "²", "\u0663")
WORDS = (
    "local(M, x)",
    "local(M, x on ranks 0, 1)",
    "ceil(M/0)",
    "*",
    "%a",
    "on",
    "of",
    "rank",
    "(",
    ")",
    "{",
    "}",
    "[",
    "]",
    "/0",
    "@x",
    "…",
)
SECONDS = 5.0


def read_fusion(source: str) -> Fusion:
    return hw.Fusion.parse(source)  # Parsing also verifies.


def read_host(source: str) -> HostProgram:
    program = HostProgram.parse(source)
    verify_host(program)
    return program


def mutated(source: str, draw: random.Random) -> str:
    """Text with some tokens deleted, repeated, swapped or replaced."""
    tokens = TOKEN.findall(source)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        at, other = (draw.randrange(len(tokens)) for _ in range(2))
        match draw.randrange(6):
            case 0:
                del tokens[at : at + draw.choice([1, 1, 3])]
            case 1:
                tokens[at:at] = tokens[at : at + draw.choice([1, 5, 20])] * draw.choice([1, 1, 30])
            case 2:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3:
                tokens[at] = tokens[other]
            case 4:
                numbers = [i for i, token in enumerate(tokens) if token.isdigit()] or [at]
                tokens[draw.choice(numbers)] = draw.choice(NUMBERS)
            case _:
                tokens[at] = draw.choice((*WORDS, *NUMBERS))
    return "".join(tokens)


def expect_a_program_or_an_error(read: Callable[[str], Fusion | HostProgram], source: str) -> bool:
    """Returns True if the text is a program. Fails if the printed text of the program does not parse to the same program, or if reading
    and printing take too long."""
    start = time.monotonic()
    try:
        program = read(source)
    except ProgramError:
        found = None
    else:
        assert type(program).parse(str(program)) == program
        found = program
    assert time.monotonic() - start < SECONDS
    return found is not None


@pytest.mark.parametrize("seed", range(12))
def test_host_texts_that_were_changed(seed: int) -> None:
    draw = random.Random(seed)
    sources = [EVERYTHING, *(text(name) for name in NAMES)]
    programs = sum(expect_a_program_or_an_error(read_host, mutated(draw.choice(sources), draw)) for _ in range(100))
    assert programs < 100


@pytest.mark.parametrize("seed", range(12))
def test_fusion_texts_that_were_changed(seed: int) -> None:
    draw = random.Random(seed)
    sources = [path.read_text() for path in sorted(GOLDEN.glob("*/*.hw")) if re.search("^fusion @", path.read_text(), re.M)]
    programs = sum(expect_a_program_or_an_error(read_fusion, mutated(draw.choice(sources), draw)) for _ in range(100))
    assert programs < 100


# --- excessive sizes and other errors ---------------------------------------------------------------------------------

CPU_DEVICE = "host @p(%x: f32[M@x]) -> (%y: f32[M@x]) mesh(x=2) {\n  BODY\n}\n"
BIG = "9" * 400


def host(body: str) -> str:
    return CPU_DEVICE.replace("BODY", body)


BAD_HOSTS = {
    host("if rank.x == 0 { " * 1000 + "}" * 1000): "line 2, column .*more than 64 nested bodies or parentheses",
    host("%i = " + "(" * 1000 + "1" + ")" * 1000): "line 2, column .*more than 64 nested bodies or parentheses",
    host(f"%a = allocate f32[{BIG}]"): "line 2, column 21: an int of 400 digits is too large; the largest int is",
    host(f"%a = allocate f32[{2**62}*{2**62}]"): "line 2, column 21: .* is more than 9223372036854775807, the largest size",
    host(f"%a = allocate f32[{'ceil(' * 5000}M"): "more than 64 nested bodies or parentheses",
    host("%a = allocate f32[M/0]"): "line 2, column 21: .* is divided by 0; divide by at least 1",
    host(f"%i = {BIG}"): "line 2, column 8: an int of 400 digits",
    host(
        "if 0 < rank.x < 2 {\n  }"
    ): "line 2, column 17: a comparison cannot be compared: write one `if` inside of another, or parentheses",
    host("%a = chunk %x[0: 0 of 0]"): "the number of chunks must be at least 1",
    host("all_to_all %x -> %y on *"): "line 2, column .*expected a name, found '\\*'",
    host("all_to_all %x -> %y on x"): "channel x is not declared: add channels\\(x: ...\\) to the header; declared: none",
    CPU_DEVICE.replace(
        "mesh(x=2)", "mesh(x=2) channels(x: x by_pigeon)"
    ): "line 1, column .*unknown transport 'by_pigeon'; use one of one_sided, peer, two_sided",
    host("on mesh(x=2 of ranks 1, 7) {\n  }"): "mesh\\(x=2\\) has no rank 7",
    host("on mesh(x=2 of ranks 1, 1) {\n  }"): "name each rank once",
    host(
        f"on mesh(x={2**40} of ranks 0..{2**40}) {{\n  }}"
    ): "line 2, column .*a range of ranks must end above its start, and at most at 65536",
    CPU_DEVICE.replace("mesh(x=2)", f"mesh(x={2**40})"): f"a mesh has at most 65536 ranks, not {2**40}",
    CPU_DEVICE.replace("mesh(x=2)", "mesh(x=2, x=2)"): "line 1, column \\d+: mesh axis x is given twice",
    CPU_DEVICE.replace("mesh(x=2)", f"mesh(x=2) streams(loop[{2**40}])").replace(
        "BODY", ""
    ): f"loop\\[{2**40}\\] is more than 1024: declare fewer",
    "kernel @k(%a: f32[M/2]) {\n  %b: f32[M/2] = negative(%a)\n  %c: f32[M/2] = exp(%a)\n  return %b, %c\n}\n"
    + host(
        "%a = allocate f32[M/2]\n  launch @k %x -> %a, %a"
    ): "launch @k %x -> %a, %a: %a is named twice: give each result its own buffer",
}


@pytest.mark.parametrize(("source", "message"), BAD_HOSTS.items(), ids=map(str, range(len(BAD_HOSTS))))
def test_a_host_text_with_excessive_sizes(source: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(ProgramError, match=message):
        read_host(source)
    assert time.monotonic() - start < SECONDS


def test_local_sizes_in_an_expression_parse_back() -> None:
    program = read_host(
        host("if local(M, x) % 2 + ceil(M/2) * 2 == 0 {\n    copy %x -> %y\n  }\nif (0 < rank.x) == (M < 2) {\n}").replace(
            "mesh(x=2)", "mesh(x=2) uneven(M)"
        )
    )
    assert HostProgram.parse(str(program)) == program
    assert "if local(M, x) % 2 + ceil(M/2) * 2 == 0 {" in str(program)
    assert "if (0 < rank.x) == (M < 2) {" in str(program)


@pytest.mark.parametrize("chunks", [2**13, 2**32])
def test_more_steps_than_a_loop_can_have(chunks: int) -> None:
    def streamed(x: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x * 2, "M", "K").stream("M", chunks)

    with pytest.raises(ProgramError, match=rf"stream: {chunks} iterations are more than 4096, the maximum of a loop; give fewer chunks"):
        hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])(streamed)
    text = f"fusion @f(%x: f32[M]) {{\n  %y: f32[M] stream(M, {chunks}) = negative(%x)\n  return %y\n}}\n"
    with pytest.raises(ProgramError, match=f"{chunks} iterations are more than 4096"):
        read_fusion(text)


def test_slices_of_slices_of_a_size() -> None:
    @hw.fusion(x=hw.f32["M"])
    def sliced(x):  # type: ignore[no-untyped-def]
        return -x[1:][::2][1:]

    assert str(sliced.ops[-1].result.type) == "f32[(M - 3)/2]"
    assert hw.Fusion.parse(str(sliced)) == sliced
    x = np.arange(9, dtype=np.float32)
    np.testing.assert_array_equal(hw.compile(sliced).run(x=x), -x[1:][::2][1:])
    with pytest.raises(ArgumentError, match="2 does not divide"):
        hw.compile(sliced).run(x=x[:8])
