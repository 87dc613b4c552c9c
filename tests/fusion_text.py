"""Helpers for tests that compare the text of a fusion before and after a pass."""

from __future__ import annotations

from collections.abc import Callable

from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.options import Options
from hostweave.pipeline import level_of

Pass = Callable[[Fusion, Options], Fusion]


def fusion(inputs: str, ops: str, mesh: str = "x=8") -> Fusion:
    """Parses a fusion. If `ops` does not end in a line with `return`, the fusion returns the result of its last op. Lines with choices may
    follow the ops."""
    lines = [line.strip() for line in ops.strip().splitlines()]
    last = [line for line in lines if line.startswith("%")][-1].partition(":")[0]
    lines += [] if lines[-1].startswith("return") else [f"return {last}"]
    body = "".join(f"  {line}\n" for line in lines)
    return Fusion.parse(f"fusion @f({inputs}) mesh({mesh}) {{\n{body}}}\n")


def check(apply: Pass, inputs: str, before: str, after: str, mesh: str = "x=8") -> None:
    result = apply(fusion(inputs, before, mesh), Options())
    verify_fusion(result, after=level_of(apply.__name__))
    lines, wanted = ([line.strip() for line in text.splitlines()] for text in (str(result), after.strip()))
    assert lines[1 : -1 if wanted[-1].startswith("return") else -2] == wanted
