"""Docstrings and comments are plain: they begin with a verb or a noun phrase, and their sentences are short."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAGMENTS = ("What", "Whether", "Of", "Those", "That", "Where", "By", "As")  # first words of fragments
MOST_WORDS = 30
FOLDERS = [
    path.relative_to(ROOT) for path in sorted((ROOT / "codegen" / "hostweave").iterdir()) if path.name not in ("__pycache__", "py.typed")
]
FOLDERS += [Path(name) for name in ("tests", "benchmarks", "examples", "docs", "templates", "runtime_cpp")]
CPP = (".h", ".cuh", ".cpp", ".cu", ".j2")
NOT_PROSE = re.compile(r"type:|noqa|clang-format|mypy:|ruff:")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """First line and text of each comment of a file. Comments on consecutive lines are one, except those behind code."""
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        found = [(*token.start, token.string.lstrip("# "), token.line) for token in tokens if token.type == tokenize.COMMENT]
    else:
        lines = enumerate(path.read_text().splitlines(), 1)
        matches = ((number, line, re.search(r"(?<!\S)// ?(?!clang)(.*)", line)) for number, line in lines)
        found = [(number, match.start(), match[1], line) for number, line, match in matches if match]
    first, last, text = 0, -1, ""
    for number, column, part, line in found:
        alone = not line[:column].strip()
        if alone and number == last + 1 and part:
            text += " " + part
        else:
            yield first, text
            first, text = number, part
        last = number if alone else -1
    yield first, text


def sentences(text: str) -> Iterator[str]:
    """Sentences of the prose of a docstring, without indented code and tables. An item of a list is a paragraph."""
    prose = "\n".join("" if re.match(r" {4}|\|", line) else line for line in text.split("\n"))
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", prose):
        yield from re.split(r"(?<=[.;:?!])\s+", " ".join(paragraph.split()))


def problems(text: str) -> list[str]:
    words = text.split()
    begin = [f"begins with {words[0]}"] if words and words[0].strip(",") in FRAGMENTS else []
    return begin + [f"{len(words)} words: {' '.join(words)}" for words in map(str.split, sentences(text)) if len(words) > MOST_WORDS]


def files(folder: Path) -> list[Path]:
    path = ROOT / folder
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [one for one in found if one.suffix in (".py", *CPP) and "golden" not in one.parts]


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_prose_is_plain(folder: Path) -> None:
    found = []
    for file in files(folder):
        prose = [*(docstrings(file) if file.suffix == ".py" else ()), *comments(file)]
        found += [f"{file.relative_to(ROOT)}:{line} {one}" for line, text in prose if not NOT_PROSE.match(text) for one in problems(text)]
    assert not found, "\n".join(found)


def test_problems_are_found(tmp_path: Path) -> None:
    assert problems("Whether it is.\n\n" + "word " * 31) == ["begins with Whether", "31 words: " + " ".join(["word"] * 31)]
    assert not problems("True if it is:\n\n    " + "code " * 31 + "\n\n- an item\n- " + "word " * 29)
    for name, mark in (("a.py", "#"), ("a.cpp", "//")):
        (tmp_path / name).write_text(f"{mark} Two lines\n{mark} of one.\nx = 1  {mark} behind\n")
        assert [text for _, text in comments(tmp_path / name) if text] == ["Two lines of one.", "behind"]
