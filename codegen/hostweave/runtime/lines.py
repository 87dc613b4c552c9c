"""Adds the user's source lines to errors that name lines of the generated program."""

import re
from functools import cache
from pathlib import Path
from types import ModuleType

from hostweave.base.errors import ExecutionError

_PROGRAM_LINE = re.compile(r"(?<!\d, )program\.cpp:(\d+)")  # does not match if the user's line is already in front
_SOURCE_COMMENT = re.compile(r"\s*// (\S+\.py:\d+)  ")  # comment above the C++ for a line of the user


def with_source_lines(text: str, module: ModuleType) -> str:
    """Inserts the user's source line, if known, before each line of `program.cpp` that a text names, as in `model.py:12,
    program.cpp:64`."""

    def with_source(found: re.Match[str]) -> str:
        source = _source_lines(module.__file__ or "").get(int(found[1]))
        return f"{source}, {found[0]}" if source else found[0]

    return _PROGRAM_LINE.sub(with_source, text)


def add_source_lines(error: ExecutionError, module: ModuleType) -> None:
    error.args = (with_source_lines(str(error), module), *error.args[1:])


@cache
def _source_lines(file_of_module: str) -> dict[int, str]:
    """Maps line numbers of a module's program.cpp to the user's lines. A source comment applies up to an empty line or the next
    source comment."""
    try:
        text = Path(file_of_module).with_name("program.cpp").read_text()
    except OSError:  # the cache was cleared
        return {}
    lines: dict[int, str] = {}
    source = None
    for number, line in enumerate(text.splitlines(), start=1):
        if found := _SOURCE_COMMENT.match(line):
            source = found[1]
        elif not line.strip():
            source = None
        if source:
            lines[number] = source
    return lines
