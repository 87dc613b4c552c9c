"""Docstrings, comments and pages have short sentences without unusual words, and do not begin with a word of FRAGMENTS."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAGMENTS = ("What", "Whether", "Of", "Those", "That", "Where", "By", "As")  # first words of fragments
BROKEN_OFF = ("of", "those", "that", "whose", "which", "and", "as")  # first words of comments that are not sentences
PRIVATE = re.compile(  # unusual words; the usual ones are: separate, next to, equal, one after another, contiguous, in
    r"\b(?:of (?:its|their) own|in turn|turn by turn|beside|anew|other \w+ than|of ours|(?:of|to|for|from|by|with) what"
    r"|what (?:it|they|is|are|has|have)|(?:stands?|lies?|lie) (?:in|at|on|behind|before|above|below|between|apart|over|under))\b"
)
LIST_ITEM = re.compile(r"\s*(?:-|\d+\.) ")
MOST_WORDS = 30
FOLDERS = [
    path.relative_to(ROOT) for path in sorted((ROOT / "codegen" / "hostweave").iterdir()) if path.name not in ("__pycache__", "py.typed")
]
FOLDERS += [Path(name) for name in ("tests", "benchmarks", "examples", "docs", "templates", "runtime_cpp")]
CPP = (".h", ".cuh", ".cpp", ".cu", ".j2")
NOT_PROSE = re.compile(r"type:|noqa|clang-format|mypy:|ruff:")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield node.body[0].lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """First line and text of each comment of a file. Comments on consecutive lines count as one, except comments at the end of a line of
    code."""
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
    """Sentences of a docstring or a page, without code, tables, HTML and headings. An item of a list is a paragraph."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?: {4}|\||<|#+ ).*", "", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text):
        yield from re.split(r"(?<=[.;:?!])\s+", " ".join(paragraph.split()))


def problems(text: str) -> list[str]:
    words = text.split()
    found = [f"begins with {words[0]}"] if words and words[0].strip(",") in FRAGMENTS else []
    for sentence in sentences(text):
        found += [f"has {private[0]!r}: {sentence}" for private in PRIVATE.finditer(re.sub(r"`[^`]*`", "", sentence))]
        found += [f"{count} words: {sentence}" for count in (len(sentence.split()),) if count > MOST_WORDS]
    return found


def broken_lists(text: str) -> list[str]:
    """Items of lists that Markdown shows as a part of the preceding paragraph, because no blank line precedes the list."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    paragraphs = (paragraph.split("\n") for paragraph in re.split(r"\n\s*\n", text.strip("\n")))
    return [line for first, *lines in paragraphs if not LIST_ITEM.match(first) for line in lines if LIST_ITEM.match(line)]


def files(folder: Path) -> list[Path]:
    path = ROOT / folder
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [one for one in found if one.suffix in (".py", *CPP) and "golden" not in one.parts]


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_prose_is_plain(folder: Path) -> None:
    found = []
    for file in files(folder):
        notes = [(line, text) for line, text in comments(file) if not NOT_PROSE.match(text)]
        found += [f"{file}:{line} begins with {text}" for line, text in notes if text.partition(" ")[0] in BROKEN_OFF]
        written = list(docstrings(file)) if file.suffix == ".py" else []
        found += [f"{file}:{line} no blank line before {one}" for line, text in written for one in broken_lists(text)]
        prose = [*written, *notes]
        found += [f"{file}:{line} {one}" for line, text in prose for one in problems(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name)
def test_a_page_is_plain(page: Path) -> None:
    text = page.read_text()
    found = problems(text) + broken_lists(text)
    assert not found, "\n".join(found)


def test_problems_are_found(tmp_path: Path) -> None:
    assert problems("Whether it is.\n\n" + "word " * 31) == ["begins with Whether", "31 words: " + "word " * 30 + "word"]
    assert not problems("True if it is:\n\n    " + "code " * 31 + "\n\n- an item\n- " + "word " * 29)
    assert not problems("# What it is\n\n```\n" + "code " * 31 + "\n```\n\nTakes `beside`.")
    assert problems("A stream of its own.\nIt lies in memory.") == [
        "has 'of its own': A stream of its own.",
        "has 'lies in': It lies in memory.",
    ]
    assert broken_lists("Two:\n- a\n- b\n\nThree:\n\n- c\n  d\n- e\n\n```\nx\n- y\n```\n") == ["- a", "- b"]
    for name, mark in (("a.py", "#"), ("a.cpp", "//")):
        (tmp_path / name).write_text(f"{mark} Two lines\n{mark} of one.\nx = 1  {mark} behind\n")
        assert [text for _, text in comments(tmp_path / name) if text] == ["Two lines of one.", "behind"]
