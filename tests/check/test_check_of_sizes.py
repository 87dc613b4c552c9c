"""The static check for given sizes, and for sizes that it chooses."""

from __future__ import annotations

import host_text
import pytest
from lowered_fusions import program

from hostweave.base.errors import ProgramError
from hostweave.check.check import check


@pytest.mark.parametrize("times", [1, 2, 5])
def test_given_sizes(times: int) -> None:
    check(program("ag_matmul_flat_across"), {"M": 12 * times, "K": 3 * times, "N": 7})


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ProgramError) as caught:
        check(program("ag_matmul_flat"), {"M": 6, "K": 1, "N": 1})
    assert str(caught.value) == "@ag_matmul_flat: M/4: 4 does not divide 6: choose sizes that divide without a remainder"


def test_sizes_that_pieces_in_zigzag_do_not_divide() -> None:
    with pytest.raises(ProgramError) as caught:
        check(host_text.parse("host @t(%x: f32[S@zigzag(x)]) -> (%y: f32[S@zigzag(x)]) mesh(x=2) {\ncopy %x -> %y\n}"), {"S": 6})
    assert str(caught.value) == "@t: S/4: 4 does not divide 6: choose sizes that divide without a remainder"


def test_sizes_that_are_missing() -> None:
    with pytest.raises(ProgramError) as caught:
        check(program("ag_matmul_flat"), {"M": 8, "K": 1})
    assert str(caught.value) == "@ag_matmul_flat: the size N is not given: give one for each of M, K, N"


def test_sizes_that_are_never_integers() -> None:
    halves = "%a = chunk %x[0: 0 of 2]\n%s = slice %x[0: (M - 1) from 1]\n%b = chunk %s[0: 0 of 2]\ncopy %x -> %y"
    with pytest.raises(ProgramError) as caught:
        check(host_text.parse(f"host @t(%x: f32[M]) -> (%y: f32[M]) mesh() {{\n{halves}\n}}"))
    assert (
        str(caught.value)
        == "text:4: %b = chunk %s[0: 0 of 2]: (M - 1)/2: 2 does not divide 1: choose sizes that divide without a remainder"
    )
