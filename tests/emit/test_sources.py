"""Generated sources are equal for both targets, and need no toolchain. The sources compile with the real CUDA, NCCL and cuBLASLt."""

from __future__ import annotations

import pytest
from compiled_fusions import ONE_DEVICE, ONE_SIDED, PIPELINES, SEVERAL, compiled, fusion_of
from cuda_here import needs_cuda

import hostweave as hw
from hostweave.base.errors import BuildError
from hostweave.fusion_ir.ir import Fusion
from hostweave.targets.target import find_target

NAMES = (*SEVERAL, *ONE_DEVICE, *ONE_SIDED, *PIPELINES)
# Programs whose instructions all occur in other programs. These programs are compiled for CUDA only with -m slow. Tests of ops
# compile the same kernels.
COVERED = ("ag_matmul_flat_chunked", "matmul_ar_unstreamed", "two_outputs", "gated_in_loops", "set", "add", "row_sum", "matmul_m")
COVERED += ("matmul_n", "matmul_batch", "two_ops", "three_ops", "residual_put", "ag_pieces_put")


def fusion(name: str) -> Fusion:
    return fusion_of(name, ranks=4, chunks=3, dtype=hw.bf16)


@pytest.mark.parametrize("name", NAMES)
def test_both_targets_have_the_same_sources(name: str) -> None:
    cpu, cuda = (hw.compile(fusion(name), target=target) for target in ("cpu", "cuda"))
    assert cpu.source == cuda.source
    assert dict(cpu.sources) == dict(cuda.sources)


def test_emission_needs_no_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError):
        find_target("cpu").toolchain()
    for target in ("cpu", "cuda"):
        assert "ncclRecv" in hw.compile(fusion("ag_matmul_p2p"), target=target).source


@needs_cuda
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in COVERED else []) for name in NAMES])
def test_compiles_and_links_for_cuda(name: str) -> None:
    program = compiled(fusion(name), target="cuda")
    assert program.module.name == name  # Loading resolves all symbols, and needs no driver.
    assert "warning" not in (program.folder / "build.log").read_text()
