"""Comments in generated code with the user's source lines."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import hostweave as hw
from hostweave.emit import render
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower

NASTY = (
    "a = hw.relu(x)  # ends */ begins /* and a trigraph ??/",
    "b = a + hw.tanh(a) * \\\n        2",
    "c = hw.exp(b)  # the next line is C++, too \\",
    "d = hw.sigmoid(c)  # gr\u00f6\u00dfe \u202e \x0c \x1c \u2028 \\ \\ ",
    f"e = hw.sin(d)  # {'long ' * 500}",
    f"f = hw.cos(e)  # {'-' * 200}\\\\ ??/",
)


def program(folder: Path, lines: tuple[str, ...], encoding: str = "utf-8") -> HostProgram:
    body = "\n".join(f"    {line}" for line in lines)
    text = f'# coding: {encoding}\nimport hostweave as hw\n@hw.fusion(x=hw.f32["M"])\ndef nasty(x):\n{body}\n    return {lines[-1][0]}\n'
    (folder / "nasty.py").write_text(text, encoding, newline="\n")
    return lower(runpy.run_path(str(folder / "nasty.py"))["nasty"], Options())


def comments(cpp: str) -> list[str]:
    return re.findall(r"^ *(// nasty\.py.*)", cpp, re.M)


def test_any_line_is_one_comment(tmp_path: Path) -> None:
    host = program(tmp_path, NASTY)
    cpp = render(host)["program.cpp"]
    found = comments(cpp)
    assert [line.partition("  ")[0] for line in found] == [f"// nasty.py:{number}" for number in (5, 6, 8, 9, 10, 11)]
    assert found[:3] == [
        "// nasty.py:5  a = hw.relu(x)  # ends */ begins /* and a trigraph ...",
        "// nasty.py:6  b = a + hw.tanh(a) * ...",
        "// nasty.py:8  c = hw.exp(b)  # the next line is C++, too ...",
    ]
    assert all(re.fullmatch(r"[ -~]{1,120}", line) for line in found)
    bare = "\n".join(line for line in cpp.splitlines() if line.strip() not in found)
    assert bare + "\n" == render(HostProgram.parse(str(host)))["program.cpp"]  # Parsed text has no source lines.
    (tmp_path / "comments.cpp").write_text("".join(f"{line}\nint line_{i};\n" for i, line in enumerate(found)))
    flags = ["-std=c++14", "-trigraphs", "-Wall", "-Wextra", "-Werror"]
    listed = subprocess.run(["g++", *flags, "-S", "-o", "-", "comments.cpp"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(f"line_{i}:" in listed.stdout for i in range(len(found)))


def test_a_line_is_not_repeated_for_the_next_kernel(tmp_path: Path) -> None:
    host = program(tmp_path, ("a = hw.relu(x)", "b = hw.cumsum(hw.tanh(a), 0) + hw.sum(x)"))
    assert [line.partition("  ")[0] for line in comments(render(host)["program.cpp"])] == ["// nasty.py:5", "// nasty.py:6"]


def test_other_encodings(tmp_path: Path) -> None:
    host = program(tmp_path, ("a = hw.relu(x)  # gr\u00f6\u00dfe",), "latin-1")
    assert comments(render(host)["program.cpp"]) == ["// nasty.py:5  a = hw.relu(x)  # gr??e"]


def test_source_that_cannot_be_read() -> None:
    scope: dict[str, hw.Fusion] = {}
    exec('import hostweave as hw\nf = hw.fusion(x=hw.f32["M"])(lambda x: hw.relu(x))', scope)
    assert "<string>" not in render(lower(scope["f"], Options()))["program.cpp"]


def test_lines_that_moved_are_the_same_program(tmp_path: Path) -> None:
    """Moved lines change neither the IR, which is in the cache key of a program, nor the C++ outside of comments."""
    first, second = (program(tmp_path, (*before, "a = hw.relu(x)")) for before in ((), ("import math", "import math")))
    assert str(first) == str(second)
    texts = [render(host)["program.cpp"] for host in (first, second)]
    assert [comments(text) for text in texts] == [["// nasty.py:5  a = hw.relu(x)"], ["// nasty.py:7  a = hw.relu(x)"]]
    assert re.sub("//.*", "//", texts[0]) == re.sub("//.*", "//", texts[1])


def test_lines_of_a_file_that_has_changed(tmp_path: Path) -> None:
    for line in ("a = hw.relu(x)", "b = hw.sigmoid(x)"):
        assert comments(render(program(tmp_path, (line,)))["program.cpp"]) == [f"// nasty.py:5  {line}"]
