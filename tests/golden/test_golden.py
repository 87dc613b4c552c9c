"""Every program at every stage, as files to read: the IR after each pass, and the C++. `pytest --update-golden` writes them anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from example_programs import all_fusions, more_fusions, pipelines

from hostweave.emit import render
from hostweave.fusion.ir import Fusion
from hostweave.host.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower

FOLDER = Path(__file__).parent
FUSIONS = {**all_fusions(ranks=4, chunks=3), **more_fusions(ranks=4), **pipelines(ranks=4)}


def stages(fusion: Fusion) -> Iterator[tuple[str, Fusion | HostProgram]]:
    seen: list[tuple[str, Fusion | HostProgram]] = []
    lower(fusion, Options(), lambda name, stage: seen.append((name, stage)))
    yield from seen


def files(fusion: Fusion) -> dict[str, str]:
    """What the folder of a program holds: file -> text."""
    irs = {f"{name}.hw": str(stage) for name, stage in stages(fusion)}
    return {**irs, **render(lower(fusion, Options()))}


@pytest.mark.parametrize("name", FUSIONS)
def test_every_stage(name: str, request: pytest.FixtureRequest) -> None:
    wanted = files(FUSIONS[name])
    if request.config.getoption("--update-golden"):
        for path, text in wanted.items():
            (FOLDER / name).mkdir(exist_ok=True)
            (FOLDER / name / path).write_text(text)
    for path, text in wanted.items():
        assert text == (FOLDER / name / path).read_text(), f"{name}/{path}: run pytest --update-golden and read the difference"


@pytest.mark.parametrize("name", FUSIONS)
def test_every_stage_parses_back_equal(name: str) -> None:
    for _, stage in stages(FUSIONS[name]):
        assert type(stage).parse(str(stage)) == stage


def test_no_file_is_left_over(request: pytest.FixtureRequest) -> None:
    expected = {FOLDER / name / path for name, fusion in FUSIONS.items() for path in files(fusion)}
    extra = [path for path in FOLDER.rglob("*") if path.is_file() and path.parent != FOLDER and path not in expected]
    extra = [path for path in extra if "__pycache__" not in path.parts]
    if request.config.getoption("--update-golden"):
        for path in extra:
            path.unlink()
        extra = []
    assert not extra, "no program has these; run pytest --update-golden"
