"""The pass fold_conditions decides or simplifies conditions by the ranges of their variables, and joins adjacent bodies."""

from __future__ import annotations

from itertools import product

import pytest
from lowered_fusions import evaluate

from hostweave.host_ir.expr import OPERATORS, Binary, Const, Coordinate, Expr, Var, range_of, simpler
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.passes.host.fold_conditions import fold_conditions
from hostweave.types.mesh import Mesh

CASES = {
    "a condition on a quotient becomes a condition on the index": (
        "for %i in 0..6 {\nif %i / 2 != 0 {\nfill %y with 1.0\n}\nif %i / 3 == 0 {\nfill %y with 2.0\n}\n}\n",
        "for %i in 0..6 {\nif %i >= 2 {\nfill %y with 1.0\n}\nif %i < 3 {\nfill %y with 2.0\n}\n}\n",
    ),
    "conditions that are always true or never true": (
        "for %i in 0..1 {\nif %i == 0 {\ncopy %x -> %y\n} else {\nwait done[%i - 1]\n}\nif %i < 0 {\nrecord done[%i]\n}\n}\n",
        "copy %x -> %y\n",
    ),
    "a loop of one iteration, and a remainder of a number that is less than the divisor": (
        "%p = rank.b + 1\nfor %i in 0..1 {\n"
        "for %j in 0..3 {\n%v = slice %x[0: 1 from %i * 2 + %p + %j % 3 + %j % 2]\nfill %v with 1.0\n}\n}\n",
        "for %j in 0..3 {\n%v = slice %x[0: 1 from 1 + %j + %j % 2]\nfill %v with 1.0\n}\n",
    ),
    "a decided choice becomes the selected buffer, and the other buffer is removed": (
        "%p = rank.b % 2\n%a = allocate f32[4]\n%c = choose %x if %p == 0 else %a\n%d = choose %c if %p < 1 else %a\n"
        "%v = reshape %d to [2, 2]\n"
        "%w = reshape %y to [2, 2]\ncopy %v -> %w\n",
        "%v = reshape %x to [2, 2]\n%w = reshape %y to [2, 2]\ncopy %v -> %w\n",
    ),
    "a channel without communication is removed": (
        "if rank.b == 0 {\ncopy %x -> %y\n} else {\nrecv %y from 0 on b\n}\n",
        "copy %x -> %y\n",
    ),
    "a channel with another communication is kept": (
        "if rank.b > 0 {\nrecv %y from 0 on b\n}\nall_reduce sum %x -> %y on b\n",
        "all_reduce sum %x -> %y on b\n",
    ),
    "adjacent bodies with the same condition": (
        "if rank.a == 0 {\nfill %y with 1.0\n}\nif rank.a == 0 {\nif rank.b == 0 {\ncopy %x -> %y\n}\n} else {\nfill %y with 2.0\n}\n"
        "if rank.a == 1 {\nfill %y with 3.0\n}\n",
        "if rank.a == 0 {\nfill %y with 1.0\ncopy %x -> %y\n} else {\nfill %y with 2.0\n}\nif rank.a == 1 {\nfill %y with 3.0\n}\n",
    ),
    "adjacent bodies on the same stream": (
        "fork s\nstream s[0] {\ncopy %x -> %y\n}\nstream s[0] {\nrecord done[0]\n}\nstream s[1] {\nwait done[0]\n}\njoin s\n",
        "fork s\nstream s[0] {\ncopy %x -> %y\nrecord done[0]\n}\nstream s[1] {\nwait done[0]\n}\njoin s\n",
    ),
    "a condition on the rank on a mesh of one rank": (
        "on mesh(a=1 of ranks 1) {\nif rank == 1 {\ncopy %x -> %y\n}\nif rank == 0 {\nfill %y with 1.0\n}\n}\n",
        "on mesh(a=1 of ranks 1) {\ncopy %x -> %y\n}\n",
    ),
    "a condition on a coordinate of a mesh of some ranks": (
        "on mesh(a=1 of ranks 1) {\nif rank.a == 0 {\ncopy %x -> %y\n}\n}\nif rank.a == 0 {\ncopy %x -> %y\n}\n",
        "on mesh(a=1 of ranks 1) {\ncopy %x -> %y\n}\nif rank.a == 0 {\ncopy %x -> %y\n}\n",
    ),
}


def program(body: str) -> HostProgram:
    """Program with `body`, and with declarations of the channel, streams and events that `body` uses."""
    channels, events = " channels(b: b two_sided)" if " on b" in body else "", " events(done[1])" if "done" in body else ""
    streams = " streams(s[2])" if "stream s" in body else ""
    return HostProgram.parse(f"host @f(%x: f32[4]) -> (%y: f32[4]) mesh(a=2, b=1){channels}{streams}{events} {{\n{body}}}\n")


@pytest.mark.parametrize("case", CASES)
def test_fold_conditions(case: str) -> None:
    before, after = CASES[case]
    result = fold_conditions(program(before), Options())
    assert str(result) == str(program(after))
    assert fold_conditions(result, Options()) is result


def test_a_simplified_condition_has_the_same_value() -> None:
    mesh, count = Mesh(a=2, b=1), 4
    terms: list[Expr] = [Const(0), Const(1), Const(3), Var("i"), Coordinate("a"), Coordinate("b")]
    terms += [Binary(op, Var("i"), right) for op in "+-*" for right in terms[1:5]] + [Var("i") // 2, Var("i") // 5, Var("i") % 3]
    compared = [op for op, (precedence, _) in OPERATORS.items() if precedence == 1]
    for op, left, right in product(compared, terms, terms):
        condition = Binary(op, left, right)
        result = simpler(condition, lambda expr: range_of(expr, {"i": (0, count - 1)}, mesh))
        for i, a in product(range(count), range(2)):
            values = {"i": i}, {"a": a, "b": 0}, {}
            assert bool(evaluate(result, *values)) == bool(evaluate(condition, *values)), f"{condition} is not {result} at {values}"


def test_quotient_and_remainder_give_the_number() -> None:
    i = Var("i")
    assert (i // 2) * 2 + i % 2 == i
    assert isinstance((i // 2) * 3 + i % 2, Binary)
    assert isinstance((i // 2) * 2 + Var("k") % 2, Binary)
