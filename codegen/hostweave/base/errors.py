"""The exceptions of Hostweave, and the locations in the user's source that they name."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self


def __dir__() -> list[str]:
    """What users catch."""
    return [name for name, value in globals().items() if isinstance(value, type) and issubclass(value, HostweaveError | UserWarning)]


_PACKAGE = str(Path(__file__).resolve().parents[1])
_AS_USERS = (f"{_PACKAGE}/examples/", f"{_PACKAGE}/benchmarks/")  # where a wheel has what is written as users write it


def is_of_package(frame: FrameType) -> bool:
    """Whether a frame is Hostweave's own, and not the user's."""
    file = frame.f_code.co_filename
    return file.startswith(_PACKAGE) and not file.startswith(_AS_USERS)


@dataclass(frozen=True)
class Location:
    """A place in the user's source, and what that line says, where it can be read."""

    file: str
    line: int
    text: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @staticmethod
    def of_caller(*others: str) -> Location:
        """The innermost frame outside this package, and other ones in these folders: the user's line; or what `stated_location` states."""
        if (stated := _stated.get()) is not None:
            return stated
        frame = sys._getframe(1)
        while frame.f_back is not None and (is_of_package(frame) or frame.f_code.co_filename.startswith(others)):
            frame = frame.f_back
        path, line = frame.f_code.co_filename, frame.f_lineno
        return Location(Path(path).name, line, linecache.getline(path, line, frame.f_globals))


_stated: ContextVar[Location | None] = ContextVar("stated", default=None)


@contextmanager
def stated_location(location: Location | None) -> Iterator[None]:
    """Here this is the user's line, where a graph that was recorded is traced and no frame is that of its author."""
    token = _stated.set(location)
    try:
        yield
    finally:
        _stated.reset(token)


class HostweaveError(Exception):
    """The base of all errors that Hostweave raises: one line with a location, a reason and a remedy."""

    def __init__(self, message: str, location: Location | None = None):
        super().__init__(f"{location}: {message}" if location else message)
        self.location = location


class ProgramError(HostweaveError, ValueError):
    """A program that is invalid, cannot be lowered, or has a race or a deadlock."""

    @classmethod
    def here(cls, message: str) -> Self:
        """The error of what the user calls, at his line."""
        return cls(message, Location.of_caller())


class UnknownAttribute(ProgramError, AttributeError):
    """An attribute that is not there, for `hasattr` as well."""


class ParseError(ProgramError):
    """IR text that does not parse."""


class ArgumentError(HostweaveError, ValueError):
    """A call with an array of the wrong dtype, shape, device or layout."""


class SizeError(ArgumentError):
    """A call with an array whose dim has another size than the program has there."""


class BuildError(HostweaveError, RuntimeError):
    """A toolchain that is missing or that failed."""


class MissingPackage(HostweaveError, ImportError):
    """A Python package that this use of Hostweave needs, and that cannot be imported."""


class ExecutionError(HostweaveError, RuntimeError):
    """A program that failed while it ran."""


class CaptureError(ExecutionError):
    """A call that could not be captured as a CUDA graph. Nothing else has failed."""


class OverlapWarning(UserWarning):
    """A stream that the user stated overlaps no communication."""


def reason_of(error: BaseException) -> str:
    """The text of an error, or its kind if it has no text, as KeyboardInterrupt has none."""
    return str(error) or type(error).__name__


def users_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this package, unless HOSTWEAVE_FRAMES is set."""
    if traceback is None or os.environ.get("HOSTWEAVE_FRAMES"):
        return traceback
    rest = users_frames(traceback.tb_next)
    return rest if is_of_package(traceback.tb_frame) else TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The remedy for a word that is not known: the nearest of those that are, or all of them."""
    known = list(known)
    return nearest(word.lower(), known) or f"one of {', '.join(known)}"


def nearest(word: str, known: Iterable[str], likeness: float = 0.65) -> str | None:
    """The question for the known word that is most like a word, at least so much of 1; None if none is."""
    near = get_close_matches(word, known, 1, likeness)
    return f"did you mean {near[0]}?" if near else None


def optional(module: str, user: str) -> Any:
    """Imports a module of a package that Hostweave does not depend on, for `user`. Raises MissingPackage if that fails."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except Exception as error:  # packages raise RuntimeError and OSError for libraries that they do not find
        if isinstance(error, ModuleNotFoundError) and error.name in (package, module):
            reason = f"{package} is not installed; pip install {package}"
        else:
            reason = f"{package} cannot be imported ({error}); pip install --force-reinstall {package}"
        raise MissingPackage(f"{user}: {reason}") from error
