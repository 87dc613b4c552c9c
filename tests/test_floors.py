"""The floors of the house: an import points to a floor below, or stays on its own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hostweave.base.paths import PACKAGE, RUNTIME
from hostweave.pipeline import PASSES
from hostweave.targets.target import NAMES

# From the top down. `options` is what passes and users share.
FLOORS = (
    ("__main__", "api", "cli", "pipeline"),
    ("runtime",),
    ("targets",),
    ("build",),
    ("emit",),
    ("passes",),
    ("check",),
    ("analysis",),
    ("host_ir",),
    ("fusion_ir",),
    ("options",),
    ("transports",),
    ("types",),
    ("base",),
)
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}


def imports(path: Path) -> Iterator[str]:
    """The parts of the package that a file imports, also inside functions and for its types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (module.split(".")[1] for module in modules if module.startswith("hostweave."))


def test_imports_point_down() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py"]
    assert len(files) > 100
    wrong = []
    for path in files:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        wrong += [
            f"{path.relative_to(PACKAGE)} imports {part}" for part in imports(path) if FLOOR_OF.get(part, len(FLOORS)) < FLOOR_OF[own]
        ]
    assert not wrong


def test_passes_are_those_of_the_list_and_call_no_others() -> None:
    """A file of `passes/fusion` and `passes/host` is one pass, and only the pipeline imports it as such."""
    names, folders = {apply.__name__ for apply in PASSES}, ("fusion", "host")
    files = [path for folder in folders for path in (PACKAGE / "passes" / folder).glob("*.py") if path.name != "__init__.py"]
    assert {path.stem for path in files} == names - {"lower_to_host"}
    for path in (PACKAGE / "passes").rglob("*.py"):
        imported = {
            alias.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) for alias in node.names
        }
        assert imported.isdisjoint(names), f"{path.stem} imports another pass"


def test_what_a_reshard_does_is_worked_out_before_it_is_decomposed() -> None:
    """Later passes read it from the op."""
    early = {"insert_reshards.py", "decompose_reshards.py"}
    for path in (PACKAGE / "passes").rglob("*.py"):
        modules = {"hostweave.fusion_ir.resharding": {"plan", "reshard_step"}, "hostweave.types.routes": {"transfer"}}
        for node in ast.walk(ast.parse(path.read_text())) if path.name not in early else ():
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                assert modules[node.module].isdisjoint(alias.name for alias in node.names), path.name


def test_targets_are_asked_and_not_compared() -> None:
    """A target is an object; what one of a certain name does differently stands in the folder `targets`."""
    compared = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "targets"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and "target" in ast.unparse(node.left)
        if any(isinstance(side, ast.Constant) and side.value in NAMES for side in ast.walk(node))
    ]
    assert not compared


def test_transports_are_asked_and_not_compared() -> None:
    """The library of a transport is named by it, by its templates, and by what finds it on a machine."""
    words, there = re.compile(r'nccl|"two_sided"', re.IGNORECASE), ("transports", "targets", "build")
    # What generated code may not be called; a public class that takes communicators; what `doctor` reports.
    known = {"emit/names.py", "runtime/providers.py", "cli/main.py"}
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if words.search(path.read_text())}
    assert {name for name in found - known if not name.startswith(there)} == set()


def test_modules_that_cpp_imports_are_there() -> None:
    named = {name for path in RUNTIME.rglob("*.cpp") for name in re.findall(r'import\("(hostweave[\w.]*)"\)', path.read_text())}
    assert "hostweave.base.errors" in named
    assert [name for name in sorted(named) if find_spec(name) is None] == []


def test_compiling_imports_nothing_that_runs_programs() -> None:
    """NumPy and the rendezvous take longer to import than a program takes to compile."""
    compile_one = """if True:
        import sys, hostweave as hw
        x = hw.f32["M@x", "K"]
        hw.compile(hw.fusion(mesh=hw.Mesh(x=2), x=x)(lambda x: hw.relu(x)))
        print(*{"numpy", "asyncio", "hostweave.runtime"} & sys.modules.keys())
    """
    run = subprocess.run([sys.executable, "-c", compile_one], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "\n", "")
