"""`hostweave doctor`: lists what is installed on this machine, and how to install what is missing."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator

from hostweave.base.errors import BuildError
from hostweave.build import cache
from hostweave.build.toolchain import find_compiler
from hostweave.targets.target import NAMES, find_target


def report() -> str:
    """One line for each thing that a target needs. Lines of what is missing end in what to install."""
    return "\n".join(f"{name:<10} {text}" for name, text in _lines())


def _lines() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    yield "compiler", _or_why_not(_compiler, "missing")
    for target in NAMES:
        yield from find_target(target).report()
    yield "cache", _or_why_not(cache.summary, "cannot be used")


def _or_why_not(text: Callable[[], str], otherwise: str) -> str:
    try:
        return text()
    except BuildError as error:
        return f"{otherwise}: {error}"


def _compiler() -> str:
    compiler = find_compiler()
    version = subprocess.run([str(compiler), "--version"], stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return f"{version[0] if version else 'unknown version'}, {compiler}"
