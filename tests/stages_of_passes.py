"""A program immediately before and after a pass of the pipeline, and the lines that differ."""

from __future__ import annotations

from collections.abc import Callable
from difflib import unified_diff
from typing import Any

from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.pipeline import lower


def before_and_after(apply: Callable[..., Any], fusion: Fusion, options: Options | None = None) -> tuple[Any, Any]:
    stages: list[tuple[str, Any]] = []
    lower(fusion, options or Options(), lambda name, stage: stages.append((name, stage)))
    at = [name for name, _ in stages].index(apply.__name__)
    return stages[at - 1][1], stages[at][1]


def changes(apply: Callable[..., Any], fusion: Fusion, options: Options | None = None) -> str:
    """Diff of the program, without indentation. A removed line begins with "- ", and an added line with "+ ". Empty if nothing changes."""
    before, after = ([line.strip() for line in str(stage).splitlines()] for stage in before_and_after(apply, fusion, options))
    found = list(unified_diff(before, after, n=0, lineterm=""))[2:]
    return "".join(f"{line[0]} {line[1:]}\n" for line in found if line[0] in "+-")
