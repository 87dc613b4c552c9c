"""Text of fusions: printing and parsing are inverse, and malformed text is refused."""

from __future__ import annotations

import contextlib
import re

import pytest
from fusions_from_files import all_fusions

from hostweave.base.errors import ParseError, ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.passes.lower.lower_to_host import lower_to_host
from hostweave.pipeline import PASSES

FUSION_PASSES = PASSES[: PASSES.index(lower_to_host)]

TEXT = """\
fusion @f(%x: bf16[M@x, K], %w: bf16[K, 8*N/4]) mesh(x=8, y=2) {
  %a: bf16[M@x, K] stream(M, 16, by_shard, ring) = negative(%x)
  loop 16 chunks by_shard local_last {
    %h: bf16[M, 8*N/4] partial(sum, x) stream(M) = matmul(%a, %w)
    %y: bf16[M@y,x, 8*N/4] pinned stream(0, p2p) = reduce_scatter(%h, dim=0, axes=(y, x), reduction=sum)
  }
  return %y, %h
}
"""


def every_stage(fusion: Fusion) -> list[Fusion]:
    stages = [fusion]
    for apply in FUSION_PASSES:
        stages.append(apply(stages[-1], Options()))
    return stages


@pytest.mark.parametrize("name", all_fusions())
@pytest.mark.parametrize("ranks", [1, 4])
def test_round_trip_at_every_stage(name: str, ranks: int) -> None:
    for stage in every_stage(all_fusions(ranks)[name]):
        assert Fusion.parse(str(stage)) == stage
        assert str(Fusion.parse(str(stage))) == str(stage)


def test_the_form_of_the_text() -> None:
    assert str(all_fusions()["ag_matmul_flat"]) == (
        "fusion @ag_matmul_flat(%x: bf16[M@x, K], %w: bf16[K, N]) mesh(x=8) {\n"
        "  %y: bf16[M, N] stream(M, 8) = matmul(%x, %w)\n"
        "  return %y\n"
        "}\n"
    )


def test_all_attributes_of_a_line() -> None:
    text = """\
fusion @f(%x: f32[M, M, 4], %mask: bool[M]) {
  %a: f32[M, M, 4] stream(1, 2, across_shards) = add(%x, -inf)
  %b: f32[M, M, 4] pinned = multiply(%a, 1e-05)
  %c: f32[M, M, 4] = where(true, %b, nan)
  %d: f32[M, 1, 1] = max(%c, axis=(1, 2), keepdims=true)
  %e: i8[M, 1, 1] = astype(%d)
  %y: i8[M, 1, 1] = add(%e, -5)
  return %y
}
"""
    text = text.replace("where(true, %b, nan)", "maximum(%b, nan)")
    assert str(Fusion.parse(text)) == text
    assert Fusion.parse(text) == Fusion.parse(text)


def test_comments_and_spaces_do_not_count() -> None:
    text = str(all_fusions()["ag_matmul_flat"])
    changed = text.replace("{", "{  # the program", 1).replace(",", " , ").replace("  %y", "# above\n\n    %y")
    assert Fusion.parse(changed) == Fusion.parse(text)


def test_leading_zeros_do_not_count() -> None:
    text = "fusion @f(%x: i64[M@x, 7]) mesh(x=8) {\n  %y: i64[M@x, 7] = add(%x, 5)\n  return %y\n}\n"
    assert Fusion.parse(re.sub(r"\b([57])\b", "0" * 5000 + r"\1", text)) == Fusion.parse(text)


GOOD = "fusion @f(%x: f32[M@x, K]) mesh(x=8) {\n  %y: f32[M@x, K] = negative(%x)\n  return %y\n}\n"
ERRORS = [
    ("= neg", "= negg", "line 2, column 21: unknown op 'neggative'; did you mean negative?"),
    ("negative(%x)", "negative(%z)", "line 2, column 30: %z is used before it is defined; define it above this line"),
    ("return %y", "return %z", "line 3, column 10: %z is used before it is defined; define it above this line"),
    ("negative(%x)", "negative(x)", "line 2, column 30: expected a %value or a number"),
    (
        "f32[M@x, K] =",
        "f33[M@x, K] =",
        "line 2, column 7: unknown dtype 'f33'; use one of f64, f32, f16, bf16, f8e4m3, f8e5m2, i64, i32, i16, i8, u64, u32, u16, u8, bool",
    ),
    ("K] = neg", "K] stream(N) = neg", "line 2, column 26: f32[M@x, K] has no dim named N"),
    ("}\n", "", "line 4, column 1: expected '}', found the end of the text: is it complete?"),
    ("  return %y\n}\n", "", "line 3, column 1: expected '%', found the end of the text: is it complete?"),
    ("}\n", "}\nmore", "line 5, column 1: expected the end of the text, found 'more'"),
    ("fusion", "fission", "line 1, column 1: expected 'fusion', found 'fission'"),
]


@pytest.mark.parametrize(("old", "new", "message"), ERRORS)
def test_parse_error(old: str, new: str, message: str) -> None:
    with pytest.raises(ParseError) as caught:
        Fusion.parse(GOOD.replace(old, new))
    assert str(caught.value) == message


def test_every_truncation_is_a_parse_error() -> None:
    text = TEXT.rstrip()
    for end in range(len(text)):
        with pytest.raises((ParseError, ProgramError)):
            Fusion.parse(text[:end])


def test_garbled_text_is_never_another_error() -> None:
    for at in range(len(TEXT)):
        for garbled in (TEXT[:at] + TEXT[at + 1 :], *(TEXT[:at] + c + TEXT[at + 1 :] for c in "x7@(,]%=-. \n")):
            with contextlib.suppress(ParseError, ProgramError):
                Fusion.parse(garbled)


def test_an_invalid_op_names_its_line() -> None:
    with pytest.raises(ProgramError) as caught:
        Fusion.parse("fusion @f(%x: f32[M, K], %w: f32[J, N]) {\n  %y: f32[M, N] = matmul(%x, %w)\n  return %y\n}\n")
    assert str(caught.value).startswith("text:2: matmul: inner dims differ: f32[M, K] x f32[J, N]; ")
