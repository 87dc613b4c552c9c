"""Progress of long work: one rewritten line on a terminal, and records of the logger `hostweave`.

    hostweave: compiling mlp: 2 of 5, kernels.cu, 3.1 s

There is no progress line if stderr is not a terminal, or TERM is `dumb`.
"""

import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from hostweave.base.forks import reset_after_fork

log = logging.getLogger("hostweave")
log.addHandler(logging.NullHandler())

_CLEAR = "\r\033[K"  # moves to the first column, and clears the line


class _Line:
    """State of the progress line: the outermost work, its start, and its steps."""

    def __init__(self) -> None:
        self.lock = reset_after_fork(threading.Lock())
        self.what, self.began, self.expected, self.done = "", 0.0, 0, 0


_line = _Line()


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Shows the progress of a `with` block. Nested blocks appear only in the log. Their steps count for the outermost block."""
    with _line.lock:
        is_outermost = not _line.what
        if is_outermost:
            _line.what, _line.began, _line.expected, _line.done = what, perf_counter(), 0, 0
    begin = perf_counter()
    try:
        yield
    finally:
        log.info("%s: %.2f s", what, perf_counter() - begin)
        if is_outermost:
            with _line.lock:
                _line.what = ""
                _show("")


def expect_steps(count: int) -> None:
    with _line.lock:
        _line.expected += count


def step_done(name: str) -> None:
    with _line.lock:
        _line.done += 1
        if _line.what:
            _show(f"hostweave: {_line.what}: {_line.done} of {_line.expected}, {name}, {perf_counter() - _line.began:.1f} s")


def tell(text: str) -> None:
    """Clears the progress line, and prints a line on stdout."""
    with _line.lock:
        _show("")
        print(text, flush=True)


def _show(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        sys.stderr.write(f"{_CLEAR}{text[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()
