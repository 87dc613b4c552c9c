"""Code in the documentation runs, and the documentation names every environment variable that the code reads."""

from __future__ import annotations

import json
import re
import runpy
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

import hostweave as hw
from hostweave.base.paths import PACKAGE
from hostweave.fusion_ir.ops import OPS
from hostweave.types.machine import H200
from hostweave.types.tensor import DType

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / "docs" / "reference" / "environment.md"


def python_of(path: Path) -> str:
    """Python blocks of a page, in order. All lines outside of the blocks are blank, so that line numbers are the same as on the page."""
    lines, inside = [], False
    for line in path.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence and not inside else inside and not fence
    return "\n".join(lines)


def as_built(path: Path) -> str:
    """Text of a page with generated parts inserted."""
    build: Callable[[str], str] = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["on_page_markdown"]
    return build(path.read_text())


def run_page(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs the Python blocks of a page in order, in an empty folder. Returns the names that the blocks define."""
    monkeypatch.chdir(folder)
    path = ROOT / "docs" / f"{name}.md"
    seen: dict[str, Any] = {"__name__": name}
    exec(compile(python_of(path), str(path), "exec"), seen)
    assert len(seen) > 2  # This detects a page without Python.
    return seen


def test_the_guide_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run_page("guide", tmp_path, monkeypatch)
    np.testing.assert_array_equal(seen["y"], (seen["X"] @ seen["W"]).astype(bfloat16))
    assert len(seen["ys"]) == 8
    assert (tmp_path / "hidden" / "CMakeLists.txt").is_file()


def test_the_tutorial_runs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run_page("tutorial", tmp_path, monkeypatch)
    np.testing.assert_allclose(seen["y"], seen["expected"], rtol=1e-4, atol=1e-4)
    assert (tmp_path / "overlapped" / "CMakeLists.txt").is_file()


@pytest.mark.parametrize("name", ["shardings", "check", "recipes", "coming-from"])
def test_the_page_runs_in_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(name, tmp_path, monkeypatch)


def test_the_page_on_timelines_shows_the_printed_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = run_page("timeline", tmp_path, monkeypatch)
    assert f"```text\n{seen['report']}\n```" in (ROOT / "docs" / "timeline.md").read_text()
    assert (tmp_path / "down_proj.html").is_file()


def test_the_gallery_shows_compiled_examples() -> None:
    """Generates one entry of the gallery. The build of the documentation generates all entries."""
    made = runpy.run_path(str(ROOT / "docs" / "gallery.py"))
    ring = next(entry for entry in made["ENTRIES"] if entry.name == "ag_matmul_ring")
    page = "\n".join(made["shown"](ring))
    assert 'algorithm="ring"' in page
    assert "for (int64_t i = 0; i < 4; ++i) {" in page
    assert "](data:image/svg+xml;base64," in page
    assert {entry.file for entry in made["ENTRIES"]} <= {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.extra("torch")
def test_the_page_on_pytorch_shows_a_fusion_of_functions_of_torch() -> None:
    """Runs only one block of the page. The other blocks need a model."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    text = (ROOT / "docs" / "pytorch.md").read_text()
    (block,) = re.findall(r"```python\n(import torch.nn.functional as F.*?)```", text, re.DOTALL)
    seen: dict[str, Any] = {"hw": hw, "torch": torch, "mesh": hw.Mesh(tp=2)}
    exec(compile(block, "pytorch.md", "exec"), seen)
    assert [str(type) for type in seen["gated"].output_types] == ["bf16[T, 14336]"]


def test_every_page_is_in_the_navigation_and_the_reference_has_every_function() -> None:
    docs = ROOT / "docs"
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [path for path in docs.rglob("*.md") if str(path.relative_to(docs)) not in navigation] == []
    reference = "\n".join(as_built(path) for path in (docs / "reference").glob("*.md"))
    documented = re.findall(r"^::: hostweave\.(?:\w+\.)*(\w+)$", reference, re.MULTILINE)
    assert set(dir(hw.errors)) <= set(documented)
    callables = {name for name in hw.__all__ if callable(getattr(hw, name)) and not isinstance(getattr(hw, name), DType)}
    assert callables - set(documented) == {"Fusion", "HostProgram"}
    assert sorted(set(documented)) == sorted(documented)  # Each name is documented once.
    assert all(getattr(hw, name).__doc__ for name in callables)


def test_pages_have_the_op_table() -> None:
    """The table has one row per op."""
    pages = {path.name: as_built(path) for path in (ROOT / "docs").rglob("*.md")}
    assert not [name for name, text in pages.items() if re.search(r"<!-- [^>]* -->$", text, re.MULTILINE)]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", pages["ir.md"].partition("## Ops")[2], re.MULTILINE)
    assert [kind for kind, _ in rows] == list(OPS)
    assert dict(rows)["add"] == "2 |  | `a + b` |  | terms | `a + b` | 1"
    assert dict(rows)["sum"] == "1 | axis, keepdims |  | sum | first | `hw::Add()(total, a)` | "
    assert all(f"| {OPS[kind].cost}" in row for kind, row in rows if OPS[kind].cpp)
    assert all(f"::: hostweave.{kind}\n" in pages["functions.md"] for kind, op in OPS.items() if op.is_public)


def test_the_pictures_are_those_that_the_code_makes() -> None:
    """`python docs/pictures.py` rewrites the pictures."""
    made = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["PICTURES"]
    images = ROOT / "docs" / "images"
    assert {path.name for path in images.iterdir()} == {f"{picture.__name__}.svg" for picture in made}
    for picture in made:
        assert (images / f"{picture.__name__}.svg").read_text() == picture()
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    assert not [path.name for path in images.iterdir() if f"images/{path.name})" not in pages]


def test_notebooks_are_the_pages() -> None:
    """`python docs/notebook.py` rewrites the notebooks. Other tests run the blocks."""
    made = runpy.run_path(str(ROOT / "docs" / "notebook.py"))
    for page in (ROOT / "docs" / f"{name}.md" for name in made["PAGES"]):
        notebook = made["notebook"](page.read_text())
        assert page.with_suffix(".ipynb").read_text() == notebook
        code = ["".join(cell["source"]) for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]
        assert "\n".join(code).split() == python_of(page).split()
    assert {path.stem for path in (ROOT / "docs").glob("*.ipynb")} == {*made["PAGES"]}


def test_pages_show_the_figures_that_pictures_have() -> None:
    page, figures = (ROOT / "docs" / "figures.md").read_text(), json.loads((ROOT / "docs" / "figures.json").read_text())
    for row in figures["rows"]:
        assert f"| {row['ms']} ms | {row['ratio']:.2f} x | `{row['command']}` |" in page


@pytest.mark.extra("torch")
def test_the_readme_trains_a_module() -> None:
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    (block,) = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    seen: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), seen)
    assert seen["module"][0].weight.grad.abs().sum() > 0


def test_the_readme_shows_the_loop_that_is_generated() -> None:
    seen: dict[str, Any] = {"X": np.ones((64, 16), bfloat16), "W": np.ones((16, 8), bfloat16)}
    readme = ROOT / "README.md"
    exec(compile(python_of(readme).partition("y = program.run")[0], "README.md", "exec"), seen)
    shown = re.search(r"```cpp\n(.*?)```", readme.read_text(), re.DOTALL)
    assert shown is not None
    assert textwrap.indent(shown[1], "  ") in seen["program"].source


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: dict[str, Any] = {"X": np.ones((64, 16), bfloat16), "W": np.ones((16, 8), bfloat16)}
    exec(compile(python_of(ROOT / "README.md"), "README.md", "exec"), seen)
    np.testing.assert_array_equal(seen["y"], np.full((64, 8), 16, bfloat16))


def test_the_page_on_overlap_shows_the_output_of_explain() -> None:
    types = {"x": hw.bf16["M@x", "K"], "w": hw.bf16["K", "N@x"]}
    sizes = {"M": 8192, "K": 8192, "N": 14336}
    mlp = hw.fusion(mesh=hw.Mesh(x=2), **types)(lambda x, w: hw.matmul(x, w))
    program = hw.compile(mlp, options=hw.Options(sizes=sizes, machine=H200))
    page = (ROOT / "docs" / "overlap.md").read_text()
    assert f"sizes={sizes}".replace("'", '"') in page
    (explained,) = (line for line in program.explain().splitlines() if "all_gather" in line)
    assert f"{explained.strip()}\n" in page
    assert str(program.choices[0]).replace("@program", "@mlp") in page


def test_every_environment_variable_is_documented() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if "benchmarks" not in path.parts]  # Benchmarks set variables of other libraries.
    code = "\n".join(path.read_text() for path in files)
    read = set(re.findall(r'environ(?:\.get\(|\[)\s*"(\w+)"|"(\w+)" in environ|_number\(environ, "(\w+)"\)', code))
    names = {name for groups in read for name in groups if name}
    assert {"HOSTWEAVE_CACHE", "HOSTWEAVE_CUDA_ARCH", "HOSTWEAVE_EDIT", "HOSTWEAVE_PORT", "CXX", "CUDA_HOME"} <= names
    page = ENVIRONMENT.read_text()
    assert not {name for name in names if name not in page} - {"SLURM_STEP_NODELIST"}  # srun sets this variable.


def test_no_file_cites_documents_that_users_do_not_have() -> None:
    folders = ("docs", "examples", "codegen/hostweave", "templates", "runtime_cpp")
    texts = [ROOT / "README.md", *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    texts = [path for path in texts if path.suffix in (".md", ".py", ".h", ".cpp", ".j2")]
    assert not [str(path) for path in texts if "DESIGN" in path.read_text()]
