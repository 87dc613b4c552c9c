"""Exceptions of Hostweave, and locations in the user's source."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import os
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self


def __dir__() -> list[str]:
    """Lists the exceptions and warnings that users catch."""
    return [name for name, value in globals().items() if isinstance(value, type) and issubclass(value, HostweaveError | UserWarning)]


_PACKAGE = str(Path(__file__).resolve().parents[1])
# Libraries that may call functions of this package, such as np.sum of a tensor.
LIBRARIES = (contextlib.__file__, inspect.__file__, str(find_spec("numpy").origin).removesuffix("__init__.py"))  # type: ignore[union-attr]
# The package of a wheel has these folders, but the code in the folders counts as the user's.
_AS_USERS = (f"{_PACKAGE}/examples/", f"{_PACKAGE}/benchmarks/")


def is_of_package(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_PACKAGE) and not file.startswith(_AS_USERS)


@dataclass(frozen=True)
class Location:
    """A line of the user's source, with its text if the file can be read."""

    file: str
    line: int
    text: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @staticmethod
    def of_caller(*others: str) -> Location:
        """The location of `stated_location`, otherwise the location of the innermost frame outside of this package, of `LIBRARIES` and of
        the paths `others`."""
        if (stated := _stated.get()) is not None:
            return stated
        frame, others = sys._getframe(1), (*LIBRARIES, *others)
        while frame.f_back is not None and (is_of_package(frame) or frame.f_code.co_filename.startswith(others)):
            frame = frame.f_back
        path, line = frame.f_code.co_filename, frame.f_lineno
        linecache.checkcache(path)  # the file may have changed
        return Location(Path(path).name, line, linecache.getline(path, line, frame.f_globals))


_stated: ContextVar[Location | None] = ContextVar("stated", default=None)


@contextlib.contextmanager
def stated_location(location: Location | None) -> Iterator[None]:
    """Makes `Location.of_caller` return `location`, unless `location` is None."""
    token = _stated.set(location)
    try:
        yield
    finally:
        _stated.reset(token)


class HostweaveError(Exception):
    """Base class of Hostweave's errors. The message has the location if known, the reason, and usually a remedy."""

    def __init__(self, message: str, location: Location | None = None):
        super().__init__(f"{location}: {message}" if location else message)
        self.location = location


class ProgramError(HostweaveError, ValueError):
    """An invalid program or option, or a program that cannot be lowered or fails the check."""

    @classmethod
    def here(cls, message: str) -> Self:
        """Error at the user's line that called Hostweave."""
        return cls(message, Location.of_caller())


class UnknownAttribute(ProgramError, AttributeError):
    """A missing attribute. Also an AttributeError, so that `hasattr` returns False."""


class ParseError(ProgramError):
    """IR text that does not parse."""


class ArgumentError(HostweaveError, ValueError):
    """A call with invalid arguments, such as an array of the wrong dtype, shape, device or layout."""


class SizeError(ArgumentError):
    """A call with an array whose dim differs from the size that the program requires."""


class BuildError(HostweaveError, RuntimeError):
    """A toolchain that is missing or fails, or a cache of builds that cannot be used."""


class MissingPackage(HostweaveError, ImportError):
    """A Python package that a feature needs and that cannot be imported."""


class ExecutionError(HostweaveError, RuntimeError):
    """A program or group that failed at run time, or that the process cannot run."""


class CaptureError(ExecutionError):
    """A call that could not be captured as a CUDA graph. The group stays usable."""


class OverlapWarning(UserWarning):
    """A `.stream(...)` in the user's program overlaps no communication."""


def reason_of(error: BaseException) -> str:
    """Text of an error, or the name of its class, as for KeyboardInterrupt, whose text is empty."""
    return str(error) or type(error).__name__


def users_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Removes the frames of this package from a traceback, unless HOSTWEAVE_FRAMES is set."""
    if traceback is None or os.environ.get("HOSTWEAVE_FRAMES"):
        return traceback
    rest = users_frames(traceback.tb_next)
    return rest if is_of_package(traceback.tb_frame) else TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Remedy for an unknown word: the most similar known word, or the list of all known words."""
    known = list(known)
    return closest_word(word.lower(), known) or f"use one of {', '.join(known)}"


def closest_word(word: str, known: Iterable[str], similarity: float = 0.65) -> str | None:
    """Remedy `did you mean WORD?`, or None if no word has at least `similarity` (0 to 1)."""
    matches = get_close_matches(word, known, 1, similarity)
    return f"did you mean {matches[0]}?" if matches else None


def optional(module: str, user: str) -> Any:
    """Imports a module of an optional package. Raises MissingPackage, which names the feature `user`."""
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except Exception as error:  # a package may raise RuntimeError or OSError if a library is missing
        if isinstance(error, ModuleNotFoundError) and error.name in (package, module):
            reason = f"{package} is not installed; pip install {package}"
        else:
            reason = f"{package} cannot be imported ({error}); pip install --force-reinstall {package}"
        raise MissingPackage(f"{user}: {reason}") from error
