"""The use of a missing optional package raises an error with the command that installs the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hostweave as hw
from hostweave.base.errors import MissingPackage, optional
from hostweave.base.paths import BENCHMARKS, EXAMPLES, PACKAGE, RUNTIME
from hostweave.cli.main import main

PACKAGES = {"torch", "jax", "jaxlib", "cupy", "mpi4py", "transformers"}


@hw.fusion(x=hw.f32["M"])
def double(x: hw.Tensor) -> hw.Tensor:
    return 2 * x


USERS: dict[str, tuple[str, Callable[[], Any], str]] = {
    "TorchStore": ("torch.distributed", lambda: hw.TorchStore(3, 0, 1), "hw.TorchStore: torch is not installed; pip install torch"),
    "MPI": ("mpi4py.MPI", lambda: hw.MPI(), "hw.MPI: mpi4py is not installed; pip install mpi4py"),
    "JAX": ("jax", lambda: hw.compile(double).as_jax_ffi(), "double: as_jax_ffi: jax is not installed; pip install jax"),
}


@pytest.mark.parametrize("user", USERS)
def test_an_error_names_the_command_that_installs_the_package(user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, use, message = USERS[user]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackage, match=f"^{re.escape(message)}$"):
        use()


def test_hostweave_torch_without_pytorch() -> None:
    """The error is also an ImportError, because callers may test if a module can be imported."""
    script = """
import sys
sys.modules["torch"] = None
try:
    import hostweave.torch
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed == "MissingPackage: hostweave.torch: torch is not installed; pip install torch\n"


def test_a_file_and_a_benchmark_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "model.py").write_text("import torch\n")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["compile", str(path)]) == 1
    assert capsys.readouterr().err == "hostweave: model.py imports torch, which is not installed; pip install torch\n"
    monkeypatch.setattr("hostweave.cli.bench.find_spec", {}.get)
    assert main(["bench", "torch_training"]) == 1
    assert capsys.readouterr().err == "hostweave: bench: torch_training needs torch and transformers: pip install torch transformers\n"


def test_an_installed_package_whose_import_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_library.py").write_text("raise RuntimeError('cannot load libmpi.so')")
    monkeypatch.syspath_prepend(tmp_path)
    message = "hw.MPI: no_library cannot be imported (cannot load libmpi.so); pip install --force-reinstall no_library"
    with pytest.raises(MissingPackage, match=f"^{re.escape(message)}$"):
        optional("no_library", "hw.MPI")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and isinstance(node.args[0], ast.Constant):
            yield node.args[0].value


def test_only_one_function_imports_optional_packages() -> None:
    """There are two exceptions: `hostweave.torch` imports PyTorch and transformers, and jax_ffi.py imports jaxlib."""
    others = {EXAMPLES, BENCHMARKS, RUNTIME, PACKAGE / "torch"}
    files = [path for path in PACKAGE.rglob("*.py") if not others & {*path.parents}]
    assert len(files) > 100
    found = {f"{path.name}: {name}" for path in files for name in imports(path) if name.partition(".")[0] in PACKAGES}
    assert found == {"jax_ffi.py: jaxlib"}  # jaxlib is imported only after optional("jax") has succeeded.
