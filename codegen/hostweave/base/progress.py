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
    """State of the progress line: the outermost work, its start, and its tasks."""

    lock = reset_after_fork(threading.Lock())
    what, began, expected, done = "", 0.0, 0, 0


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Shows the progress of a `with` block. Nested blocks appear only in the log. Their tasks count for the outermost block."""
    with _Line.lock:
        is_outermost = not _Line.what
        if is_outermost:
            _Line.what, _Line.began, _Line.expected, _Line.done = what, perf_counter(), 0, 0
    begin = perf_counter()
    try:
        yield
    finally:
        log.info("%s: %.2f s", what, perf_counter() - begin)
        if is_outermost:
            with _Line.lock:
                _Line.what = ""
                _show("")


def expect_tasks(count: int) -> None:
    with _Line.lock:
        _Line.expected += count


def task_done(name: str) -> None:
    with _Line.lock:
        _Line.done += 1
        if _Line.what:
            _show(f"hostweave: {_Line.what}: {_Line.done} of {_Line.expected}, {name}, {perf_counter() - _Line.began:.1f} s")


def tell(text: str) -> None:
    """Clears the progress line, and prints a line on stdout."""
    with _Line.lock:
        _show("")
        print(text, flush=True)


def _show(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        sys.stderr.write(f"{_CLEAR}{text[: shutil.get_terminal_size().columns - 1]}")
        sys.stderr.flush()
