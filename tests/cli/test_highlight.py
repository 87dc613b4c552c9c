"""Syntax highlighting. The lexer finds no error in texts of both IRs. Output on a terminal differs from other output only by colours."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from pygments import highlight
from pygments.formatters import TerminalFormatter
from pygments.lexers import CppLexer
from pygments.token import Error, Keyword, Name, Token

from hostweave.base.paths import EXAMPLES
from hostweave.cli.highlight import ir_lexer
from hostweave.cli.programs import load_file, programs_in
from hostweave.emit import render
from hostweave.options import Options
from hostweave.pipeline import lower

GOLDEN = Path(__file__).parents[1] / "golden"
SEEDS = EXAMPLES / "seeds.py"
ESCAPES = re.compile(r"\x1b\[[\d;]*m")
ERROR = "\x1b[04m\x1b[91m"  # Format of an Error token: underlined, bright red.


def errors(text: str) -> list[str]:
    tokens = list(ir_lexer().get_tokens(text))
    assert "".join(value for _, value in tokens) == text
    return [value for kind, value in tokens if kind in Error]


def wrong_lines(places: Mapping[str, object]) -> dict[str, object]:
    """Returns the lines with errors, each with its stage or file. Lines are tested one by one, because no token spans several lines."""
    return {line: place for line, place in places.items() if errors(line)}


OF_TORCH = pytest.mark.extra("torch", "transformers")
FILES = [pytest.param(path, marks=[OF_TORCH] * path.stem.startswith("torch_"), id=path.stem) for path in sorted(EXAMPLES.glob("*.py"))]


@pytest.mark.parametrize("file", FILES)
def test_no_stage_of_an_example_has_an_error(file: Path) -> None:
    for name, program in programs_in(load_file(file)).items():
        stages: dict[str, str] = {}
        host = lower(program, Options(), lambda stage, ir, stages=stages: stages.update(dict.fromkeys(str(ir).splitlines(), stage)))
        assert not wrong_lines(stages), name
        if file == SEEDS:
            tokens = CppLexer().get_tokens(render(host)["program.cpp"])
            assert not [value for kind, value in tokens if kind in Error], name


def test_no_golden_file_has_an_error() -> None:
    files = sorted([*GOLDEN.glob("*/*.hw"), *GOLDEN.glob("*/*.loops")])
    assert files
    assert not wrong_lines({line: file for file in files for line in file.read_text().splitlines()})


def test_how_an_error_is_shown() -> None:
    assert ERROR in highlight("$", ir_lexer(), TerminalFormatter())


def test_characters_of_neither_ir_are_errors() -> None:
    assert errors("  %y = $reshape ~%x") == ["$", "~"]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("%y: bf16[M@x, 8] = matmul(%x, 2.0)", {"%y": Name, "bf16": Keyword.Type, "@x": Name.Decorator, "matmul": Keyword}),
        ("launch @gelu_a %h -> %a", {"launch": Keyword, "@gelu_a": Name.Function, "->": Token.Operator}),
        (
            "fusion @f(%x: f32[N]) mesh(x=8) {",
            {"fusion": Keyword.Declaration, "mesh": Keyword, "x": Name, "8": Token.Literal.Number.Integer},
        ),
        ('"a \\" b"  # ends here', {'"a \\" b"': Token.Literal.String, "# ends here": Token.Comment.Single}),
        ("} else {", {"else": Keyword.Declaration}),
    ],
)
def test_tokens(text: str, kinds: dict[str, object]) -> None:
    found = {value: kind for kind, value in ir_lexer().get_tokens(text)}
    assert {value: found.get(value) for value in kinds} == kinds


def on_a_terminal(*arguments: str) -> str:
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "hostweave", *arguments], stdout=theirs) as process:
        os.close(theirs)
        chunks = b"".join(iter(lambda: _read(ours), b""))
        os.close(ours)
        assert process.wait() == 0
    return chunks.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux raises OSError after the command has closed its end of the terminal.
        return b""


@pytest.mark.parametrize("after", [("--after", "all"), ()])
def test_a_terminal_gets_the_same_text_in_colours(after: tuple[str, ...]) -> None:
    arguments = ("inspect", f"{SEEDS}:ag_matmul_ring", *after)
    shown = on_a_terminal(*arguments)
    plain = subprocess.run([sys.executable, "-m", "hostweave", *arguments], capture_output=True, text=True, check=True).stdout
    assert ESCAPES.search(shown)
    assert ERROR not in shown
    assert ESCAPES.sub("", shown) == plain
