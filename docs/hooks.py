"""Replaces lines such as `<!-- table of ops -->` in pages by generated text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostweave as hw
from hostweave.fusion_ir.ops import OPS, pointwise, reductions
from hostweave.fusion_ir.ops.definition import OpDef
from hostweave.types.tensor import DTYPES


def functions(ops: Mapping[str, OpDef]) -> str:
    """Directives of mkdocstrings for the public functions of `ops`."""
    return "\n\n".join(f"::: hostweave.{kind}" for kind, op in ops.items() if op.is_public)


@dataclass(frozen=True)
class Field:
    """Replaces a field of an op's C++ template, for example `std` or `T`, by a readable pattern."""

    pattern: str

    def __format__(self, spec: str) -> str:
        return self.pattern.format(spec)


def table(ops: Mapping[str, OpDef]) -> str:
    rows = ["| op | operands | attributes | Python | ranks' results | linear in | C++ | cost |", "|---|---|---|---|---|---|---|---|"]
    for kind, op in ops.items():
        cpp = (
            op.cpp.format(*"abcdef", std=Field("std::{}"), T=Field("T({})"))
            or op.fiber.partition("<")[0]
            or (f"{op.combine.functor}()(total, a)" if op.combine else "")
        )
        texts = (cpp, op.written, kind)
        cpp, written, name = (f"`{text}`" if text else "" for text in texts)
        attributes = ", ".join(attribute.name for attribute in op.attributes)
        operands, cost = "1 or more" if op.arity is None else op.arity, op.cost if op.cpp else ""
        rows.append(f"| {name} | {operands} | {attributes} | {written} | {op.partial} | {op.linear} | {cpp} | {cost} |")
    return "\n".join(rows)


def errors() -> str:
    return "\n\n".join(f"::: hostweave.base.errors.{name}\n    options:\n      members: []" for name in dir(hw.errors))


def dtypes() -> str:
    parts = []
    for dtype in DTYPES.values():
        names = [f"`hw.{name}`" for name in hw.__all__ if getattr(hw, name, None) is dtype]
        bits = "1 byte" if dtype.itemsize == 1 else f"{dtype.itemsize} bytes"
        parts.append(f"## {dtype.name}\n\n{', '.join(sorted(names, key=len))}: {dtype.kind}, {bits} an element, `{dtype.cpp}` in C++.")
    return "\n\n".join(parts)


def on_config(config: Any, **_: object) -> Any:
    """Removes the links to edit pages if the repository's URL is unknown."""
    if not config.repo_url:
        config.edit_uri = None
    return config


def on_page_markdown(markdown: str, **_: object) -> str:
    """Inserts the generated parts of a page. mkdocs calls this function for every page."""
    made = {
        "<!-- functions of one element of each operand -->": functions(pointwise.OPS),
        "<!-- reductions -->": functions(reductions.OPS),
        "<!-- table of ops -->": table(OPS),
        "<!-- errors -->": errors(),
        "<!-- dtypes -->": dtypes(),
    }
    if "<!-- gallery -->" in markdown:
        sys.path.insert(0, str(Path(__file__).parent))
        from gallery import gallery

        made["<!-- gallery -->"] = gallery()
    return "\n".join(made.get(line, line) for line in markdown.split("\n"))
