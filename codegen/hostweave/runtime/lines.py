"""Source lines of the user in errors that name a line of the generated program."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path
from types import ModuleType

from hostweave.base.errors import ExecutionError

_PLACE = re.compile(r"\(program\.cpp:(\d+)\)")
_USERS = re.compile(r"\s*// (\S+\.py:\d+)  ")  # comment above the code of a source line


def name_users_lines(error: ExecutionError, module: ModuleType) -> None:
    """Inserts the user's source line before each line of `program.cpp` that the error names, if program.cpp has a comment with it."""
    if not _PLACE.search(str(error)) or module.__file__ is None:
        return
    try:
        lines = Path(module.__file__).with_name("program.cpp").read_text().splitlines()
    except OSError:  # the cache was cleared
        return

    def placed(found: re.Match[str]) -> str:
        above = map(_USERS.match, takewhile(str.strip, reversed(lines[: int(found[1])])))
        users = next(filter(None, above), None)
        return f"({users[1]}, {found[0][1:]}" if users else found[0]

    error.args = (_PLACE.sub(placed, str(error)),)
