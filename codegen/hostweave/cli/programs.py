"""Loads programs from files, such as `examples/seeds.py:ag_matmul`."""

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hostweave.base.errors import HostweaveError, MissingPackage, ParseError
from hostweave.base.paths import EXAMPLES
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram


def load_file(path: Path, constants: Mapping[str, Any] | None = None) -> ModuleType:
    """Runs a Python file as a module. `constants` replace values of top-level assignments such as `D = 8` or `D: int = 8`."""
    try:
        tree = ast.parse(_content(path), str(path))  # Python decodes the bytes, as it does for `python FILE`.
    except SyntaxError as error:
        raise HostweaveError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    unset = dict(constants or {})
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name)) if name in unset:
                setattr(module, f"_{name}_given", unset.pop(name))
                statement.value = ast.copy_location(ast.Name(f"_{name}_given", ast.Load()), statement)
    if unset:
        raise HostweaveError(f"{path.name}: there is no top-level constant {next(iter(unset))!r} to set")
    folder = str(path.resolve().parent)  # imports search the file's folder, like `python FILE`
    sys.path.insert(0, folder)
    previous = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # dataclasses find the module of string annotations there
    try:
        exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)
    except ModuleNotFoundError as error:
        raise MissingPackage(f"{path.name} imports {error.name}, which is not installed; pip install {error.name}") from error
    finally:
        sys.path.remove(folder)
        sys.modules.pop(module.__name__)
        if previous:
            sys.modules[module.__name__] = previous
    return module


def programs_in(module: ModuleType) -> dict[str, Fusion | HostProgram]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Fusion | HostProgram)}


def load_program(reference: str, constants: Mapping[str, Any] | None = None) -> Fusion | HostProgram:
    """Loads `FILE.py:NAME`, or `FILE.py` if the file has only one program. `FILE.hw` is text of either IR. `seeds:NAME` is a program of
    examples/seeds.py. The names of other files of examples/ also work in place of `seeds`."""
    file, _, name = reference.partition(":")
    if file.endswith(".hw"):
        if constants:
            raise HostweaveError(f"{file}: IR text has no constant {next(iter(constants))!r} to set; edit the text")
        return _parse_ir(file)
    example = EXAMPLES / f"{file}.py"
    programs = programs_in(load_file(example if example.is_file() else Path(file), constants))
    if not name and len(programs) == 1:
        return next(iter(programs.values()))
    if not programs:
        raise HostweaveError(f"{file}: defines no program; decorate a function with @hw.fusion")
    if name not in programs:
        what = f"there is no program {name!r}" if name else "there are several programs"
        raise HostweaveError(f"{file}: {what}; give {file}:NAME with one of {', '.join(programs)}")
    return programs[name]


def _parse_ir(file: str) -> Fusion | HostProgram:
    content = _content(Path(file))
    try:
        text = content.decode("utf-8-sig")  # editors on Windows may write a byte order mark
        return Fusion.parse(text) if re.search(r"^fusion @", text, re.M) else HostProgram.parse(text)
    except ParseError as error:
        raise ParseError(f"{file}: {error}") from None
    except UnicodeDecodeError as error:
        raise HostweaveError(f"{file}: byte {error.start} is not UTF-8; give the text of an IR") from None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise HostweaveError(f"{path}: {error.strerror}; give FILE.py:FUSION, or FILE.hw with the text of an IR") from None
