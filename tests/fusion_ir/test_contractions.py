"""Results and errors of hw.einsum and hw.tensordot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.reference import run_reference

SIZES = {"a": 2, "b": 3, "c": 4, "d": 5}


def traced(make: Callable[..., Any], *shapes: str, mesh: hw.Mesh | None = None) -> hw.Fusion:
    """Traces a function of f64 tensors. SIZES has the size of each letter in `shapes`."""
    inputs = {f"x{i}": hw.f64[tuple(SIZES[letter] for letter in shape) or ()] for i, shape in enumerate(shapes)}
    return hw.fusion(mesh=mesh, **inputs)(lambda **tensors: make(*tensors.values()))


def arrays_of(fusion: hw.Fusion) -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {v.name: random.standard_normal([int(size) for size in v.type.shape]) for v in fusion.inputs}


@pytest.mark.parametrize(
    "subscripts",
    [
        "ab->ba",
        "ab->",
        "ba",
        "ab,bc",
        "ab,bc->ca",
        "ab,ab->",
        "a,b->ab",
        "a,b->ba",
        "ab,a->ab",
        "abc,abd->cd",
        "abc,bad->dc",
        "abc,cd->abd",
        "ab,bcd->acd",
        "abc,acd->abd",
        "abcd,bd->ac",
        "abcd,abd->cab",
        "abc,dc->d",
        "ab,bc,cd->ad",
        "ab , ac , ad -> bcd",
        "abc,a,b,c->",
        ",ab->ab",
    ],
)
def test_einsum(subscripts: str) -> None:
    terms = subscripts.replace(" ", "").partition("->")[0].split(",")
    fusion = traced(lambda *xs: hw.einsum(subscripts, *xs) + 0, *terms)
    arrays = arrays_of(fusion)
    (got,) = run_reference(fusion, arrays)
    np.testing.assert_allclose(got, np.einsum(subscripts, *arrays.values()))


@pytest.mark.parametrize(
    ("first", "second", "axes"),
    [
        ("abc", "bcd", 2),
        ("ab", "cd", 0),
        ("abc", "abc", 3),
        ("abc", "dba", ((0, 1), (2, 1))),
        ("abc", "cd", ((2,), (0,))),
        ("abc", "dc", (-1, 1)),
        ("abc", "bd", ([1], [0])),
    ],
)
def test_tensordot(first: str, second: str, axes: Any) -> None:
    fusion = traced(lambda a, b: hw.tensordot(a, b, axes) + 0, first, second)
    arrays = arrays_of(fusion)
    (got,) = run_reference(fusion, arrays)
    np.testing.assert_allclose(got, np.tensordot(*arrays.values(), axes))


def test_several_dims_are_one_matmul() -> None:
    fusion = traced(lambda x, y: hw.einsum("abc,abd->cd", x, y), "abc", "abd")
    assert [str(fusion).splitlines()[i].strip() for i in (1, 2)] == [
        "%x0_transposed: f64[4, 2, 3] = permute_dims(%x0, axes=(2, 0, 1))",
        "%y: f64[4, 5] = matmul(%x0_transposed, %x1, contracted=2)",
    ]
    assert hw.Fusion.parse(str(fusion)) == fusion


@pytest.mark.parametrize(
    ("subscripts", "shapes", "message"),
    [
        ("...a,a->...", ("ba", "a"), "an ellipsis is not supported; write a letter for each dim"),
        ("aa->a", ("aa",), "'aa' has a letter twice; a diagonal is not supported"),
        ("ab,b1->a", ("ab", "bc"), "it may contain only letters, commas and one arrow; write it like 'ij,jk->ik'"),
        ("ab->a->b", ("ab",), "it may contain only letters, commas and one arrow; write it like 'ij,jk->ik'"),
        ("ab", ("ab", "bc"), "1 terms for 2 operands; write one for each"),
        ("abc->a", ("ab",), "'abc' has 3 letters, but f64[2, 3] has 2 dims; write one for each"),
        ("ab->ac", ("ab",), "no operand has c, but the result does; remove the letter"),
        ("ab->aa", ("ab",), "the result 'aa' has a letter twice; name it once"),
        ("ab,bc->ac", ("ab", "cb"), "b has size 3, but size 4 in f64[4, 3]; dims with the same letter must have equal sizes"),
        (None, ("ab",), "not a string; write the letters of each operand and of the result, such as 'ij,jk->ik'"),
    ],
)
def test_einsum_refuses(subscripts: Any, shapes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        traced(lambda *xs: hw.einsum(subscripts, *xs), *shapes)
    place, _, text = str(caught.value).partition(": ")
    assert place.startswith("test_contractions.py:")
    assert text == f"einsum: {subscripts!r}: {message}"


def test_einsum_of_a_number() -> None:
    with pytest.raises(ProgramError, match=r"1\.0 is not a tensor of this fusion; make it an input"):
        traced(lambda x: hw.einsum("ab,b->a", x, 1.0), "ab")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (4, "axes=4 of f64[2, 3] and f64[3, 4]: pass a number from 0 to the smaller number of dims, or name the dims of each"),
        (((0,), (0,)), "dim 0 of f64[2, 3] and dim 0 of f64[3, 4] differ; contracted dims must have equal sizes"),
        (
            ((0, 1), (0,)),
            "axes=((0, 1), (0,)) do not pair dims of f64[2, 3] with those of f64[3, 4]; name the same number of dims in both, each once",
        ),
        (
            ((1, 1), (0, 0)),
            "axes=((1, 1), (0, 0)) do not pair dims of f64[2, 3] with those of f64[3, 4]; name the same number of dims in both, each once",
        ),
        (((5,), (0,)), "f64[2, 3] has no dim 5: dims go from 0 to 1"),
        ("ab", "axes='ab' is neither a number nor a pair; write ((0, 1), (0, 1))"),
    ],
)
def test_tensordot_refuses(axes: Any, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        traced(lambda a, b: hw.tensordot(a, b, axes), "ab", "bc")
    assert str(caught.value).partition(": tensordot: ")[2] == message


def test_contracted_dims_must_be_equal_in_both_operands() -> None:
    with pytest.raises(ProgramError, match="at least 4 are needed"):
        hw.Fusion.parse("fusion @f(%x: f32[2, 3, 4], %y: f32[3, 4, 5]) {\n  %z: f32[2, 5] = matmul(%x, %y, contracted=3)\n  return %z\n}\n")
    with pytest.raises(ProgramError, match="inner dims differ"):
        hw.Fusion.parse("fusion @f(%x: f32[2, 3, 4], %y: f32[4, 3, 5]) {\n  %z: f32[2, 5] = matmul(%x, %y, contracted=2)\n  return %z\n}\n")
