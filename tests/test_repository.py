"""Names, links, versions and workflows in files that no other test covers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import hostweave as hw

ROOT = Path(__file__).parents[1]


def test_names_of_test_files_are_unique() -> None:
    """Base names of test files are unique, because pytest imports test files by base name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_all_folders_of_tests_are_collected(request: pytest.FixtureRequest) -> None:
    """pytest skips folders with some names, by default also folders with the name build."""
    paths = (path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    names = {name for path in paths for name in path.parts[:-1]}
    assert not [name for name in names for skipped in request.config.getini("norecursedirs") if fnmatch(name, skipped)]


def test_the_contributors_guide_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    package = ("passes/", "host_ir/", "fusion_ir/", "targets/", "pipeline.py")
    for path in re.findall(r"`([\w./]+)`", text):
        if "/" in path and "NAME" not in path:
            where = ROOT / "codegen" / "hostweave" if path.startswith(package) else ROOT
            assert (where / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


def test_the_citation_and_the_changelog_have_the_version() -> None:
    assert f"\nversion: {hw.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {hw.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.xdist_group("some group")
def test_workers_know_the_groups_of_tests(request: pytest.FixtureRequest) -> None:
    """Without groups, tests still pass, but several workers compile the programs that the tests of a group share."""
    is_worker = hasattr(request.config, "workerinput")
    assert not is_worker or request.node.nodeid.endswith("@some group"), "the versions of pytest and pytest-xdist do not fit"


@pytest.mark.extra("yaml")
@pytest.mark.parametrize("path", sorted(str(path.relative_to(ROOT)) for path in (ROOT / ".github").rglob("*.yml")))
def test_github_reads_the_file(path: str) -> None:
    yaml = pytest.importorskip("yaml", reason="needs the packages of the documentation: pip install '.[docs]'")
    found = yaml.safe_load((ROOT / path).read_text())
    if "ISSUE_TEMPLATE" in path and not path.endswith("config.yml"):
        assert {"name", "description", "body"} <= found.keys()
        assert all({"type", "attributes"} <= part.keys() for part in found["body"])
    if "workflows" in path:
        assert all(job["steps"] and job["runs-on"] for job in found["jobs"].values())


def test_the_workflow_runs_the_script_for_every_change() -> None:
    assert "      - run: .ci/run\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_released_packages_link_to_their_repository(tmp_path: Path) -> None:
    """The release workflow adds the links to the metadata, because a checkout does not know the URL of its repository."""
    (command,) = re.findall(r"- run: (printf .*)", (ROOT / ".github" / "workflows" / "release.yml").read_text())
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**os.environ, "URL": "https://host/owner/name"}, check=True)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["urls"] == {"Repository": "https://host/owner/name", "Changelog": "https://host/owner/name/blob/main/CHANGELOG.md"}
    assert project["name"] == "hostweave"
