"""Text of host programs: printing and parsing are inverse. Malformed text raises ParseError with a line and column."""

from __future__ import annotations

import contextlib
import random
import re

import pytest
from host_text import EVERYTHING
from lowered_fusions import NAMES, RANKS, evaluate, program, text

from hostweave.base.errors import Location, ParseError, ProgramError
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Binary, Const, Coordinate, Expr, Symbol, Var
from hostweave.host_ir.ir import HostProgram


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str, ranks: int) -> None:
    assert ranks != 4 or str(program(name)) == text(name)
    assert HostProgram.parse(str(program(name, ranks))) == program(name, ranks)


def test_every_instruction() -> None:
    host = HostProgram.parse(EVERYTHING)
    assert str(host) == EVERYTHING
    every = {kind for kind in vars(ir).values() if isinstance(kind, type) and issubclass(kind, tree.Instruction) and kind.syntax}
    assert {type(instruction) for instruction in tree.walk(host.body)} == every


def test_comments_are_dropped_and_places_kept() -> None:
    commented = EVERYTHING.replace("fork loop\n", "fork loop  # every stream waits for the caller's\n")
    host = HostProgram.parse(commented)
    assert host == HostProgram.parse(EVERYTHING)
    assert [i.location for i in host.body[:3]] == [Location("text", line) for line in (9, 10, 11)]


def test_a_percent_at_the_start_of_a_line_is_a_name() -> None:
    host = HostProgram.parse("host @t() -> () mesh(x=2) {\n%a = 7\n%b = %a % 4\n%c = 1\n}\n")
    assert host.body == (ir.Let("a", Const(7)), ir.Let("b", Binary("%", Var("a"), Const(4))), ir.Let("c", Const(1)))


@pytest.mark.parametrize("seed", range(200))
def test_expressions(seed: int) -> None:
    draw = random.Random(seed)

    def expr(depth: int) -> Expr:
        if not depth or draw.random() < 0.2:
            return draw.choice([Const(draw.randrange(9)), Var("i"), Coordinate("x"), Symbol("M")])
        return Binary(draw.choice("+-*/%<"), expr(depth - 1), expr(depth - 1))

    built = expr(4)
    host = HostProgram("t", program("set").mesh, (), (), body=(ir.Let("a", built),))
    (let,) = HostProgram.parse(str(host)).body
    assert isinstance(let, ir.Let)
    assert _value(let.value) == _value(built)


def _value(expr: Expr) -> int | str:
    try:
        return evaluate(expr, {"i": 5}, {"x": 3}, {"M": 12})
    except ZeroDivisionError:
        return "division by zero"


TOKEN = re.compile(r"\s+|->|\.\.|\w+|[^\s\w]")


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.more)])
def test_truncated_text(first: int) -> None:
    tokens = TOKEN.findall(EVERYTHING.rstrip())
    for end in range(first, len(tokens), 2):
        if end == 0 or not tokens[end - 1].isspace():  # A space at the end changes nothing.
            with pytest.raises(ParseError):
                HostProgram.parse("".join(tokens[:end]))


@pytest.mark.parametrize("name", [name for name in NAMES if name in ("ag_matmul_ring", "matmul_rs_flat", "allreduce_rows")])
def test_garbled_text(name: str) -> None:
    """Text with one token deleted, doubled or replaced parses, or raises ProgramError."""
    tokens = [token for token in TOKEN.findall(text(name)) if not token.isspace()]
    draw = random.Random(name)
    for _ in range(400):
        at = draw.randrange(len(tokens))
        replacement = draw.choice([[], [tokens[at]] * 2, [draw.choice(tokens)]])
        wrong = " ".join(tokens[:at] + replacement + tokens[at + 1 :])
        with contextlib.suppress(ParseError, ProgramError):
            HostProgram.parse(wrong)


ERRORS = {
    "": "line 1, column 1: expected 'host', found the end of the text: is it complete?",
    "host @t() -> () mesh(x=2) {": "line 1, column 28: the text ends inside a program: is it complete?",
    "host @t() -> () mesh(x=2) {\n  fork\n}": "line 3, column 1: expected a name, found '}'",
    "host @t() -> () mesh(x=2) {\n} more": "line 2, column 3: expected the end of the text, found 'more'",
    "host @t(%x: f99[M]) -> () mesh(x=2) {\n}": (
        "line 1, column 13: unknown dtype 'f99'; use one of f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, i32, i16, i8, u64, u32, u16, u8, bool"
    ),
    "host @t() -> () mesh(x=2) {\n  sned %x to 1 on x\n}": "line 2, column 3: unknown instruction 'sned'; did you mean send?",
    "host @t() -> () mesh(x=2) {\n  fill %x with red\n}": "line 2, column 16: expected a number",
    "host @t() -> () mesh(x=2) {\n  %i = (1 + 2\n}": "line 3, column 1: expected ')', found '}'",
    "host @t() -> () mesh(x=2) {\n  %b = allocate f32[M/K]\n}": "line 2, column 23: expected an int, found 'K'",
}


@pytest.mark.parametrize("wrong", ERRORS)
def test_errors(wrong: str) -> None:
    with pytest.raises(ParseError) as caught:
        HostProgram.parse(wrong)
    assert str(caught.value) == ERRORS[wrong]
