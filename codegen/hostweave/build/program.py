"""Builds the extension module of a host program, or finds it in the cache, and loads it.

The cache key contains the IR, but no source locations and no predicted times. So edits that only move lines cause no build, and the cached
sources keep the line comments of the first build.

`HOSTWEAVE_EDIT=folder` builds hand-edited sources from `folder/<program>`. The generated sources are written to this folder if it is
missing.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from hostweave.base.errors import BuildError
from hostweave.base.forks import reset_after_fork
from hostweave.base.interrupts import in_current_context
from hostweave.base.paths import HOST_IR, PACKAGE, RUNTIME, TEMPLATES
from hostweave.base.progress import log, progress
from hostweave.base.shortages import remedy_of
from hostweave.build.cache import EVICTION_PERIOD, evict, get_or_make, lookup, name_of, opened, stamp_of
from hostweave.build.make import make_program
from hostweave.build.toolchain import LIBRARIES_FILE, Library, Toolchain, require_native

SourceFiles = Mapping[str, str]  # path -> text

_MODULE = "hostweave_program"  # NAME in PyInit_NAME
_dlopen_flags = reset_after_fork(threading.Lock())  # held while dlopen flags are changed, because they apply to the whole interpreter


def build(
    name: str,
    host_ir: str,
    toolchain: Toolchain,
    runtime_libraries: Callable[[Toolchain], tuple[Library, ...]],
    render: Callable[[], SourceFiles],
    title: str = "",
    figures: str = "",
) -> Path:
    """Returns the folder with the sources and the module of a program.

    `render` makes the sources, and is called only if they are missing. Progress messages show `title`. `figures` names the machine for
    which kernels are scheduled.
    """
    require_native()
    edited = _edited_sources(name, host_ir, render)
    libraries = runtime_libraries(toolchain)
    generator = map(stamp_of, (PACKAGE, TEMPLATES, RUNTIME))
    toolchain_texts = toolchain.stamp, *(str(library.path) for library in libraries)
    entry = name_of(name, host_ir, figures, *generator, *toolchain_texts, *(text for item in (edited or {}).items() for text in item))
    with progress(f"compiling {title or name}"), ThreadPoolExecutor(len(libraries)) as pool:
        futures = [pool.submit(in_current_context(library.make)) for library in libraries]

        def built() -> tuple[Library, ...]:
            for future in futures:
                future.result()
            return libraries

        if folder := lookup(entry):
            built()
            log.debug("%s is in the cache: %s", name, folder)
            return folder

        def make(folder: Path) -> None:
            sources = edited or render()
            _write(folder, sources)
            make_program(folder, tuple(sources), toolchain, built)

        folder = get_or_make(entry, make)
    evict(EVICTION_PERIOD)
    return folder


@cache
def load(path: Path, dlopen_flags: int) -> ModuleType:
    """Loads the module of a built program. First loads the cached libraries that the module needs. The dynamic loader then finds these
    libraries by their sonames."""
    with opened(path.parent / LIBRARIES_FILE) as list_file:
        libraries = Path(list_file).read_text().split("\n")[:-1]
    for library in libraries:
        load_library(path.parent.parent / library)
    name = f"{path.parent.name}.{_MODULE}"  # pybind11 registers modules by their full name
    with opened(path) as file, _dlopen_flags:
        spec = spec_from_file_location(name, file, loader=ExtensionFileLoader(name, file))
        assert spec is not None
        assert spec.loader is not None
        flags_before = sys.getdlopenflags()
        sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL | dlopen_flags)
        try:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            module.__file__ = str(path)
        except ImportError as error:
            reason = str(error).replace(file, path.name)
            remedy = remedy_of(reason) or "remove its folder to build it again"
            raise BuildError(f"{path} cannot be loaded: {reason}; {remedy}") from error
        finally:
            sys.setdlopenflags(flags_before)
    return module


@cache
def load_library(path: Path) -> ctypes.CDLL:
    """Loads a library of the cache, so that the loader finds it for modules. Raises BuildError if its file was replaced."""
    with opened(path) as file:
        try:
            return ctypes.CDLL(file, os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            reason = str(error).replace(file, path.name)
            remedy = remedy_of(reason) or "remove its folder to build it again"
            raise BuildError(f"{path} cannot be loaded: {reason}; {remedy}") from error


def _edited_sources(name: str, host_ir: str, render: Callable[[], SourceFiles]) -> SourceFiles | None:
    """Sources in the folder of HOSTWEAVE_EDIT, which are generated if the folder is missing. None if the variable is not set."""
    if not (folder_name := os.environ.get("HOSTWEAVE_EDIT")):
        return None
    folder = Path(folder_name).absolute() / name
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            _write(folder, render())
        if (folder / HOST_IR).read_text() != host_ir:
            raise BuildError(f"the sources in {folder} were generated from another program; remove that folder, or unset HOSTWEAVE_EDIT")
        return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.suffix in (".hw", ".h", ".cpp", ".cu", ".cuh")}
    except OSError as error:
        raise BuildError(
            f"HOSTWEAVE_EDIT={folder_name}: {error.filename}: {error.strerror}; set it to a folder that you can write"
        ) from error


def _write(folder: Path, files: SourceFiles) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
