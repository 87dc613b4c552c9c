"""The list of targets, their runtime sources, and devices and streams of the target cpu."""

from __future__ import annotations

import pytest

from hostweave.base.paths import RUNTIME_SOURCES
from hostweave.targets.target import CPU_DEVICE, NAMES, find_target, sources_of


def test_a_target_is_found_by_its_name() -> None:
    assert NAMES == ("cpu", "cuda")
    assert [find_target(name).name for name in NAMES] == [*NAMES]


def test_a_target_compiles_only_its_own_sources() -> None:
    cpu, cuda = ({path.stem for path in sources_of(RUNTIME_SOURCES, name)} for name in NAMES)
    assert cpu & cuda
    assert {stem.rpartition("_")[2] for stem in cpu ^ cuda} == {*NAMES}
    assert not any(stem.endswith("_cuda") for stem in cpu)
    assert not any(stem.endswith("_cpu") for stem in cuda)


def test_the_target_cpu_has_no_gpus_and_no_streams() -> None:
    cpu = find_target("cpu")
    cpu.expect_device(CPU_DEVICE)
    with pytest.raises(TypeError, match=r"^is on GPU 1, but the program was compiled for the CPU; "):
        cpu.expect_device(1)
    assert cpu.stream(None) == 0
    with pytest.raises(TypeError, match=r"^stream= is for the target cuda; "):
        cpu.stream(5)
