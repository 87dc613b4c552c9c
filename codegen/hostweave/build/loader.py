"""Loads a built program as a Python extension module."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from hostweave.base.errors import BuildError

MODULE = "hostweave_program"  # the glue's PyInit_ name: the same for every program, each from a file of its own
_dlopen_flags = threading.Lock()  # are the interpreter's, not the thread's


@cache
def load(path: Path, dlopen_flags: int) -> ModuleType:
    """The module of a built program, with these flags of its target. Raises BuildError where the file cannot be loaded here."""
    name = f"{path.parent.name}.{MODULE}"  # pybind11 keeps modules by their full name
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    with _dlopen_flags:
        before = sys.getdlopenflags()
        sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | dlopen_flags)
        try:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            raise BuildError(f"{path} cannot be loaded: {error}; remove its folder to build it again") from error
        finally:
            sys.setdlopenflags(before)
    return module
