"""Errors of donated inputs and of dynamic slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.check.check import check as check_host
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host

Traced = Callable[..., Any]
torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")


def test_a_read_after_an_overwrite_is_detected() -> None:
    """Errors of outputs in donated inputs, such as a read of the input after the update of the input."""
    text = """kernel @put(%x: f32[S], %u: f32[1], %at: i64[], %rows: i64[S]) {
  %y: f32[S] = dynamic_update_slice(%x, %u, %at, %rows, axes=(0,))
}
kernel @total(%x: f32[S]) {
  %sum: f32[] = sum(%x, axis=(0,))
}
host @f(%x: f32[S], %u: f32[1], %at: i64[], %rows: i64[S]) -> (%y: f32[S] in %x, %sum: f32[]) mesh() {
  launch @total %x -> %sum
  launch @put %x, %u, %at, %rows -> %y
}
"""
    host = HostProgram.parse(text)
    assert HostProgram.parse(str(host)) == host
    verify_host(host)
    check_host(host)
    late = replace(host, body=host.body[::-1])
    verify_host(late)
    with pytest.raises(ProgramError, match=r"launch @total %x -> %sum reads %x after %y has overwritten .* keep a copy"):
        check_host(late)
    unwritten = replace(host, body=host.body[:1])
    with pytest.raises(ProgramError, match=r"nothing writes bytes .* of the output %y"):
        check_host(unwritten)
    for wrong, message in {
        "%sum: f32[] in %x": r"%x is f32\[S\]: give them the same dtype, mesh and dims",
        "%sum: f32[] in %sum": "only an output may be in an input: write one of",
    }.items():
        with pytest.raises(ProgramError, match=message):
            verify_host(HostProgram.parse(text.replace("%sum: f32[])", f"{wrong})")))
    twice = text.replace("%sum: f32[])", "%sum: f32[S] in %x)")
    with pytest.raises(ProgramError, match=r"another output uses the same input: name a separate input for each"):
        verify_host(HostProgram.parse(twice))
    with pytest.raises(ProgramError, match=r"%x is an input and may not be written"):
        verify_host(HostProgram.parse(text.replace("-> %y\n", "-> %x\n")))


IN_FUNCTION = """kernel @twice(%x: f32[S, 4]) {
  %y: f32[S, 4] = multiply(%x, 2.0)
}
kernel @sum(%y: f32[S, 4], %z: f32[S, 4]) {
  %t: f32[S, 4] = add(%y, %z)
}
function @fn(%x: f32[S, 4]) -> (%y: f32[S, 4] in %x, %first: f32[4]) {
  %x_0 = select %x[0: 0]
  copy %x_0 -> %first
  launch @twice %x -> %y
}
function @twice_fn(%x: f32[S, 4]) -> (%y: f32[S, 4] in %x, %first: f32[4]) {
  call @fn %x -> %y, %first
  launch @twice %y -> %y
}
function @plus(%x: f32[S, 4], %z: f32[S, 4]) -> (%y: f32[S, 4] in %x) {
  launch @twice %x -> %y
  launch @sum %y, %z -> %y
}
host @f(%c: f32[S, 4]) -> (%out: f32[S, 4], %again: f32[4], %last: f32[4]) mesh() {
  copy %c -> %out
  call @plus %out, %c -> %out
  call @fn %out -> %out, %again
  call @twice_fn %out -> %out, %last
}
"""


REFUSED_IN_FUNCTION: dict[str, tuple[str, str, str]] = {
    "late": (
        "  copy %x_0 -> %first\n  launch @twice %x -> %y\n",
        "  launch @twice %x -> %y\n  copy %x_0 -> %first\n",
        r"copy %fn_x_0 -> %again reads %fn_x_0 after %fn_y has overwritten bytes 0 to 16 of %out, which is donated: read %fn_x_0 before",
    ),
    "a late read in a function that calls another one": (
        "  call @fn %x -> %y, %first\n",
        "  %t = allocate f32[S, 4]\n  call @fn %x -> %y, %first\n  copy %x -> %t\n",
        r"copy %twice_fn_x -> %twice_fn_t reads %twice_fn_x after %fn_y_2 has overwritten bytes .* of %out, which is donated",
    ),
    "a view of the donated memory as another argument": (
        "  call @plus %out, %c -> %out\n",
        "  %t = reshape %out to [S, 4]\n  call @plus %out, %t -> %out\n",
        r"launch @sum .* reads %plus_z after %plus_y has overwritten bytes .* of %out, which is donated",
    ),
    "not written": (
        "  launch @twice %x -> %y\n}",
        "}",
        r"returned %fn_y reads %fn_y before bytes .* of %out are written: write these bytes first",
    ),
}


@pytest.mark.parametrize("name", REFUSED_IN_FUNCTION)
def test_a_function_that_reads_overwritten_memory(name: str) -> None:
    check_host(HostProgram.parse(IN_FUNCTION))
    before, after, message = REFUSED_IN_FUNCTION[name]
    wrong = HostProgram.parse(IN_FUNCTION.replace(before, after))
    verify_host(wrong)
    with pytest.raises(ProgramError, match=message):
        check_host(wrong)


X, Y = hw.f32["M", "N"], hw.f32["M@x", "N"]


REFUSED: dict[str, tuple[Any, Traced, str]] = {
    "unknown": (("z",), lambda x, y: x + y, "donate: 'z' is not an input; use one of x, y"),
    "twice": (("x", "x"), lambda x, y: x + y, "donate: x is named twice; name it once"),
    "none fits": (
        ("x",),
        lambda x, y: hw.sum(x + y, 0),
        "no result of f32\\[M, N\\], apart from results that other inputs use, is computed from x; return",
    ),
    "no result is computed from it": (
        ("x",),
        lambda x, y: (hw.exp(y), hw.sum(x)),
        "is computed from x; return one, or leave x out of donate",
    ),
    "several": (
        ("x",),
        lambda x, y: (x + y, x - y),
        'results 0 and 1 are of f32\\[M, N\\] and computed from x; choose one: donate={"x": 0',
    ),
    "a result of another type": (
        {"x": 1},
        lambda x, y: (x + y, hw.sum(x)),
        "donate: result 1 does not have the type of x, f32\\[M, N\\]; results that do: 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inputs_that_cannot_be_donated(name: str) -> None:
    donate, function, message = REFUSED[name]

    def both(x, y):  # type: ignore[no-untyped-def]
        return function(x, y)

    with pytest.raises(ProgramError, match=message) as caught:
        hw.fusion(mesh=hw.Mesh(x=2), donate=donate, x=X, y=Y)(both)
    assert "test_donation_errors.py" in str(caught.value)


def test_parameters_that_a_function_cannot_update() -> None:
    @hw.block(donate=("x",), x=X)
    def summed(x):  # type: ignore[no-untyped-def]
        return hw.sum(x, axis=0)

    with pytest.raises(ProgramError, match=r"function @summed: donate: no result of f32.* is computed from x; return one, or leave x out"):
        hw.fusion(x=X)(lambda x: summed(x))


def test_a_result_is_chosen_by_its_number() -> None:
    @hw.fusion(donate={"x": 1, "y": 0}, x=X, y=hw.f32["M", "N"])
    def swapped(x, y):  # type: ignore[no-untyped-def]
        return x + y, x - y

    assert swapped.donated == ("y", "x")
    with pytest.raises(ProgramError, match=r"is returned in %z, which is not an input|%z is used before it is defined"):
        Fusion.parse(str(swapped).replace("in %y", "in %z"))
    with pytest.raises(ProgramError, match=r"two results are returned in %x; donate an input for each"):
        Fusion.parse(str(swapped).replace("in %y", "in %x"))


SLICES: dict[str, tuple[Traced, str]] = {
    "starts": (
        lambda x, u, at: hw.dynamic_slice(x, (at,), (1, 2)),
        "1 starts and 2 sizes for the 2 dims of f32\\[4, N\\]; give one of each",
    ),
    "a tensor": (lambda x, u, at: hw.dynamic_slice(x, at, (1, 2)), "give one of each for every dim"),
    "too long": (
        lambda x, u, at: hw.dynamic_slice(x, (at, 0), (5, "N")),
        "5 elements exceed dim 0 of f32\\[4, N\\]; take at most 4",
    ),
    "no size": (lambda x, u, at: hw.dynamic_slice(x, (at, 0), ("1+", "N")), "dynamic_slice: "),
    "a float": (lambda x, u, at: hw.dynamic_slice(x, (0.5, 0), (1, "N")), "dim 0 cannot start at 0.5; pass an int that fits i64, or a"),
    "floats": (lambda x, u, at: hw.dynamic_slice(x, (hw.sum(x), 0), (1, "N")), "dim 0 cannot start at f32\\[\\]; pass an int"),
    "several": (lambda x, u, at: hw.dynamic_slice(x, (hw.iota(x, 0), 0), (1, "N")), "dim 0 cannot start at i32\\[4\\]; pass an int"),
    "several places": (
        lambda x, u, at: hw.dynamic_update_slice(x, u[:, :1], (0, hw.iota(x, 1))),
        r"dim 1 cannot start at i32\[N\]; pass an int that fits i64, or a tensor of ints that has one element$",
    ),
    "a dtype": (
        lambda x, u, at: hw.dynamic_update_slice(x, hw.astype(u, hw.f16), (at, 0)),
        "cannot write f16.* to f32\\[4, N\\]; use hw.astype",
    ),
    "a number": (lambda x, u, at: hw.dynamic_update_slice(x, 1.0, (at, 0)), "cannot write 1.0 to f32\\[4, N\\]"),
    "an update": (lambda x, u, at: hw.dynamic_update_slice(x, hw.concat([u] * 5), (at, 0)), "5 elements exceed dim 0"),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_that_do_not_fit(name: str) -> None:
    function, message = SLICES[name]

    def sliced(x, u, at):  # type: ignore[no-untyped-def]
        return function(x, u, at)

    with pytest.raises(ProgramError, match=message) as caught:
        hw.fusion(x=hw.f32[4, "N"], u=hw.f32[1, "N"], at=hw.i32[()])(sliced)
    assert "test_donation_errors.py" in str(caught.value)


def test_arrays_that_cannot_be_donated(request: pytest.FixtureRequest) -> None:
    """Donated arrays must be writable, without overlaps. For a result in a donated array, `out=` takes None or the donated array."""

    @hw.fusion(donate=("x", "y"), x=hw.f32["N"], y=hw.f32["N"], z=hw.f32["N"])
    def sums(x, y, z):  # type: ignore[no-untyped-def]
        return x + z, y - z

    compiled = hw.compile(sums)
    x, y, z = (np.full(4, number, np.float32) for number in range(3))
    fixed = x.copy()
    fixed.flags.writeable = False
    request.addfinalizer(hw.init(hw.Threads(1)).close)
    for call in (compiled.run, compiled):
        with pytest.raises(ArgumentError, match=r"sums: x: is donated but read-only; pass a writable array"):
            call(fixed, y, z)
    with pytest.raises(ArgumentError, match=r"sums: bind: x: is donated, so each call writes to it; pass it to each call"):
        compiled.bind(x=x)
    held = compiled.bind(z=z)
    first, _ = held(x, y)
    assert first is x
    assert x.tolist() == [2.0] * 4
    x, y = np.zeros(4, np.float32), np.ones(4, np.float32)
    assert held.run(x, y)[0] is x
    assert (x.tolist(), y.tolist()) == ([2.0] * 4, [-1.0] * 4)
    with pytest.raises(ArgumentError, match=r"x and y are the same array, and both are donated|y and x are the same array"):
        compiled.run(x, x, z)
    with pytest.raises(ArgumentError, match=r"x, which is donated: x and y overlap in memory; pass separate arrays"):
        compiled(x, x, z)
    with pytest.raises(ArgumentError, match=r"which is donated: x and z overlap in memory"):
        compiled(x, y, x)
    with pytest.raises(ArgumentError, match=r"out=: .*: is returned in x, which is donated; pass None, or the array of x"):
        compiled(x, y, z, out=(z.copy(), None))
    tx, ty, tz = (torch.full((4,), float(number)) for number in range(3))
    first, second = compiled(tx, ty, tz)
    assert first is tx
    assert second.data_ptr() == ty.data_ptr()
    assert (tx.tolist(), ty.tolist()) == ([2.0] * 4, [-1.0] * 4)
    wide = torch.zeros(8)
    assert compiled.run(wide[::2], ty, z)[0].tolist() == [2.0] * 4  # x is strided, and z is a NumPy array.
    assert wide.tolist() == [2.0, 0.0] * 4
