"""Text of host programs: printing and parsing are inverse. Malformed text raises ParseError with a line and column."""

from __future__ import annotations

import contextlib
import random
import re

import pytest
from lowered_fusions import NAMES, RANKS, evaluate, program, text

from hostweave.base.errors import Location, ParseError, ProgramError
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Binary, Const, Coordinate, Expr, Symbol, Var
from hostweave.host_ir.ir import HostProgram

EVERYTHING = """\
kernel @k(%a: f32[M/2, 4], %b: f32[M/2, 4]) {
  %c: f32[M/2, 4] = add(%a, %b)
  %d: f32[M/2] = sum(%c, axis=(1,))
}
function @b(%s: f32[M@x, 4]) -> (%t: f32[M@x, 4]) {
  copy %s -> %t
}
host @t(%x: f32[M@x, 4]) -> (%y: f32[M@x, 4], %z: f32[M]) mesh(x=2, dp=3) \
channels(x_dp: x, dp two_sided, near: x one_sided, x: x two_sided, back: dp, x two_sided, \
dp: dp two_sided, pair: x, tp on mesh(x=2, tp=1 of ranks 0, 3) two_sided) \
streams(ring[2], copy[1]) events(done[3]) uneven(M) {
  %b = allocate f32[M/2, 4]
  fill %b with -0.5
  fork ring
  for %i in 0..M/2 {
    %p = (rank.x - 1 - %i) % 2
    %q = %p * 2 + %i % 3
    stream ring[%i] {
      %x_i = select %x[0: %i]
      %s_i = chunk %b[1: %q / 2 of 2]
      %r_i = reshape %x_i to [2, 2]
      %t_i = permute %r_i by [1, 0]
      %u_i = slice %b[0: local(M, x) from rank.x * ceil(M/2)]
      %v_i = strided %b[1: 2 from 1 by 2]
      %w_i = choose %x_i if %p == rank.x + 1 else %u_i
      if %p == rank.x {
        copy %t_i -> %r_i
      } else {
        group {
          recv %x_i from %p on x_dp
          send %x_i to (rank.x + %i) % 6 on x_dp
        }
      }
      if %i < M / 4 {
        record done[%i % 3]
        mark
      }
      wait done[0]
    }
  }
  join ring
  launch @k %x, %b -> %z
  matmul %x, %b -> %y
  matmul %x, %b accumulate %y -> %y
  matmul %x, %b in tf32 scaled -0.125 accumulate %x bias %b activation gelu_tanh rest [1, 0, 2] -> %y
  matmul %x, %b bias %z activation relu -> %y
  grouped_matmul %x, %b rows %z to %z -> %y
  grouped_outer %x, %b rows %z to %z from rank.x * 4 -> %y
  attention %x, %b, %b scaled 0.125 -> %y
  attention %x, %b, %b scaled 0.125 diagonal rank.x * 4 + M - 2 window 128 -> %y lse %z
  attention %x, %b, %b scaled 0.125 diagonal -1 corner bottom_right lengths %z -> %y
  attention_backward %x, %b, %b, %y, %x, %z scaled 0.125 diagonal 0 window 128 lengths %z -> %x, %b, %y
  attention_backward %x, %b, %b, %y, %x, %z scaled 0.125 bias %z kernels bf16_64 -> %x, %b, %y dbias %z
  pack %x -> %b in [2 of M/2, 1 of 4]
  unpack %b -> %y in [4 of local(M, x), 1 of 4]
  all_gather %x -> %y on x
  all_gather %x -> %z along 0 on x
  reduce_scatter sum %x along 1 -> %y on x
  all_to_all %x along 1 -> %y along 0 on x
  all_reduce sum %x -> %y on x
  launch_all_reduce @k %x, %b -> %z on x
  launch_reduce_scatter @k %x, %b -> %z on x
  launch_all_gather @k %x, %b -> %z on x
  launch @k %x, %b -> %z sent on x
  reduce_scatter max %x -> %y on dp
  broadcast %x -> %y from rank.dp + 1 on x
  broadcast_to_others %x to %y from rank.dp + 1 on x
  reduce min %x -> %y to 1 on x
  gather %x -> %y to 0 on x
  scatter %x -> %y from rank.dp on x
  all_to_all %x -> %y on back
  collective_permute %x -> %y from [none, 0, 1] on dp
  barrier %b on x
  on mesh(x=2, tp=1 of ranks 0, 3) {
    all_gather %x -> %y on pair
    send %x to rank - 1 on x_dp
    send_blocks %x in 2 by [0[1] -> 2[0], 0[0] -> 3[0]] on x_dp
    recv_blocks %y in [2 of M, 1 of 4] by [0[1] -> 2[0]] on x_dp
  }
  on mesh(of ranks 2) {
    recv_blocks %y in 1 by [0[1] -> 2[0], 0[0] -> 3[0]] on x_dp
  }
  %w = allocate_window f32[M/2, 4]
  signal 0 at rank.x + 1 that %w is free on near
  wait_signal 63 from 1 until %w is free on near
  put %x -> %w at 1 - rank.x signal 2 on near
  get %w at 1 - rank.x -> %y on near
  deallocate %b
  call @b %x -> %y
}
"""


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
    commented = EVERYTHING.replace("fork ring\n", "fork ring  # every stream waits for the caller's\n")
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


def test_truncated_text() -> None:
    tokens = TOKEN.findall(EVERYTHING.rstrip())
    for end in range(len(tokens)):
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
