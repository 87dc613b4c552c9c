"""Chunk loops that the compiler chooses for the GPUs of this machine, and figures that `hostweave calibrate` measures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.build import figures
from hostweave.build.cuda import gpus
from hostweave.cli.calibrate import calibrate
from hostweave.runtime import search
from hostweave.runtime.search import random_array
from hostweave.targets.cuda import why_no_puts

GPUS = len(gpus())
SIZES = {"M": 4096, "K": 4096, "F": 8192}
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and there are {GPUS}")]


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.bf16["M@x", "K"], wg=hw.bf16["K", "F@x"], wu=hw.bf16["K", "F@x"], wd=hw.bf16["F@x", "K"])
def mlp(x: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
    h = hw.reshard(hw.tanh(x), "M", "K").named("h")
    return hw.reshard(hw.matmul(hw.silu(hw.matmul(h, wg)) * hw.matmul(h, wu), wd), "M@x", "K")


def test_chosen_loops_match_the_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "root", lambda: tmp_path)
    arrays = {value.name: random_array(value.type, SIZES) * ml_dtypes.bfloat16(0.125) for value in mlp.inputs}
    results = {}
    for overlap in ("off", "auto", "search"):
        program = hw.compile(mlp, target="cuda", options=hw.Options(sizes=SIZES, overlap=overlap))
        results[overlap] = program.run(**arrays).astype(np.float32)
        assert overlap == "off" or len(program.choices) == 2
        if overlap == "auto" and not why_no_puts(2):
            assert [choice.chosen.algorithm for choice in program.choices] == ["put", "put"]
        assert all(time.total_ms > 0 for rank in program.measure(repetitions=3, **arrays) for time in rank)
        program.close()
    largest = np.abs(results["off"]).max()
    for overlap in ("auto", "search"):
        assert np.abs(results[overlap] - results["off"]).max() < 0.01 * largest


def test_calibrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "root", lambda: tmp_path)
    try:
        lines = list(calibrate())
    except ExecutionError as error:
        if "another program uses them" not in str(error):
            raise
        pytest.skip(str(error))
    measured = figures.measured(gpus())
    assert measured is not None
    assert measured.name == gpus()[0].name
    assert {"name": measured.name, **dict(gpus()[0].limits)}.items() <= asdict(measured).items()
    assert str(figures.file_of(gpus())) in lines[-1]
    assert {link.by for link in measured.links} == {"collective", "put", "get"}
    assert all(seconds > 0 for link in measured.links for _, seconds in link.points)
    figures.read.cache_clear()
