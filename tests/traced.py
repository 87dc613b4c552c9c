"""Fusions from the text of a function's body."""

from __future__ import annotations

from typing import Any

import hostweave as hw

X = 'hw.bf16["M", "K"]'


def trace(body: str, mesh: str = "hw.Mesh(x=8)", **inputs: str) -> hw.Fusion:
    """Traces a function with this body, whose first line is line 4 of mlp.py."""
    types = ", ".join(f"{name}={type}" for name, type in inputs.items())
    lines = ["import hostweave as hw", f"@hw.fusion(mesh={mesh}, {types})", f"def f({', '.join(inputs)}):"]
    scope: dict[str, Any] = {}
    exec(compile("\n".join([*lines, *("    " + line for line in body.split("\n"))]), "/home/me/mlp.py", "exec"), scope)
    fusion = scope["f"]
    assert isinstance(fusion, hw.Fusion)
    return fusion
