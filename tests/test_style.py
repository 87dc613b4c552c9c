"""Docstrings are plain: they begin with a verb or a noun phrase, and their sentences are short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostweave.base.paths import PACKAGE

FRAGMENTS = ("What", "Whether", "Of", "Those", "That", "Where", "By", "As")  # first words of fragments
MOST_WORDS = 30
TO_DO: tuple[str, ...] = ()  # folders that are not rewritten yet

FOLDERS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")} - {"examples", "benchmarks", *TO_DO})


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Place and text of each docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield f"{path.relative_to(PACKAGE)}:{node.body[0].lineno}", text


def sentences(text: str) -> Iterator[str]:
    """Sentences of the prose of a docstring, without indented code and tables. An item of a list is a paragraph."""
    prose = "\n".join("" if re.match(r" {4}|\|", line) else line for line in text.split("\n"))
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", prose):
        yield from re.split(r"(?<=[.;:?!])\s+", " ".join(paragraph.split()))


def problems(text: str) -> list[str]:
    begin = [f"begins with {text.split()[0]}"] if text.split()[0].strip(",") in FRAGMENTS else []
    return begin + [f"{len(words)} words: {' '.join(words)}" for words in map(str.split, sentences(text)) if len(words) > MOST_WORDS]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_are_plain(folder: str) -> None:
    path = PACKAGE / folder
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found = [f"{place} {problem}" for file in files for place, text in docstrings(file) for problem in problems(text)]
    assert not found, "\n".join(found)


def test_problems_are_found() -> None:
    assert problems("Whether it is.\n\n" + "word " * 31) == ["begins with Whether", "31 words: " + " ".join(["word"] * 31)]
    assert not problems("True if it is:\n\n    " + "code " * 31 + "\n\n- an item\n- " + "word " * 29)
