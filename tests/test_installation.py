"""Contents of an installation: version, licence, types, and data files of the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import hostweave as hw
from hostweave.base import paths
from hostweave.cli.main import main

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"hostweave {hw.__version__}\n"


def test_the_version_is_defined_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    source = (ROOT / PROJECT["tool"]["scikit-build"]["metadata"]["version"]["input"]).read_text()
    assert re.findall(r'(?m)^__version__ = "(.*)"$', source) == [hw.__version__]
    assert f"## {hw.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_licence_and_types() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    licence = (ROOT / PROJECT["project"]["license-files"][0]).read_text()
    assert "Apache License\n" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert (paths.PACKAGE / "py.typed").is_file()


def test_an_editable_installation_finds_its_files(tmp_path: Path) -> None:
    """Python code is in the source tree, and built files are in site-packages. The import hook adds both folders to the path of the
    package."""
    built = tmp_path / "site-packages" / "hostweave"
    (built / "native").mkdir(parents=True)
    script = textwrap.dedent(
        f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location(
            "hostweave", {str(paths.PACKAGE / "__init__.py")!r}, submodule_search_locations=[{str(built)!r}, {str(paths.PACKAGE)!r}]
        )
        module = sys.modules["hostweave"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        from hostweave.base import paths
        print(paths.NATIVE, paths.TEMPLATES, paths.RUNTIME, sep="\\n")
        """
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(built / "native"), str(paths.TEMPLATES), str(paths.RUNTIME)]


@pytest.mark.slow
def test_pip_install_editable(tmp_path: Path) -> None:
    clone, venv = tmp_path / "clone", tmp_path / "venv"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    subprocess.run([str(venv / "bin" / "pip"), "install", "-q", "-e", "."], cwd=clone, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["HOSTWEAVE_CACHE"] = str(tmp_path / "cache")
    command = [str(venv / "bin" / "hostweave"), "demo", "--ranks", "2", "--target", "cpu"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert shown.count("matches NumPy") == 2
