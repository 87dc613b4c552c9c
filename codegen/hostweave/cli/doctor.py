"""`hostweave doctor`: what is installed on this machine, and how to install what is missing."""

import os
import platform
import subprocess
from collections.abc import Callable, Iterator

from hostweave.base.errors import BuildError
from hostweave.build import cache
from hostweave.build.toolchain import find_compiler
from hostweave.targets.target import NAMES, find_target


def report() -> Iterator[tuple[str, str]]:
    """Each thing that a target needs, and what was found of it. Texts of what is missing end in what to install."""
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
