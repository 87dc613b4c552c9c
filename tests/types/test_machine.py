"""Figures of machines: as JSON, and those of the package."""

from __future__ import annotations

import pytest

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.options import Options
from hostweave.types.machine import H100, H200, Machine, shipped


def test_machine_as_json() -> None:
    assert Machine.from_json(H200.to_json(), "here") == H200
    changes = ("put", "pot"), ('"flops": 8', '"flops": -8'), ('"ranks": 2', '"ranks": "two"'), ("9.5e-06", "null"), ("1048576", "16384")
    for wrong in ("", "[]", "{}", *(H200.to_json().replace(*change) for change in (*changes, ("850000000000000.0", "NaN")))):
        with pytest.raises(
            ProgramError, match=r"h200.json: contains no valid figures of a machine .*; remove it, and run hostweave calibrate"
        ):
            Machine.from_json(wrong, "h200.json")
    with pytest.raises(ProgramError, match=r"Options: machine='H200' is not an hw.Machine"):
        Options(machine="H200")  # type: ignore[arg-type]


def test_figures_of_known_and_unknown_gpus() -> None:
    assert (shipped("NVIDIA H200"), shipped("NVIDIA H100 80GB HBM3")) == (H200, H100)
    other = shipped("NVIDIA B300")
    assert other.flops == H200.flops

    @hw.fusion(x=hw.f32["M"])
    def f(x: hw.Tensor) -> hw.Tensor:
        return x + 1

    text = hw.compile(f, options=Options(machine=other)).explain()
    assert (
        "times predicted from the figures of NVIDIA H200, at no stated sizes; there are no figures of NVIDIA B300: run hostweave calibrate"
        in text
    )
