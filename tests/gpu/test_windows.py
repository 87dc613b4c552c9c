"""Programs in which ranks access each other's memory, on GPUs of one host. Transport one_sided is tested with NCCL 2.29 or later."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from compiled_fusions import (
    EXCHANGES,
    compiled,
    expect,
    fusion_of,
    integer_arrays,
    lowered,
    random_arrays,
    run_in_flight_on_gpus,
    sizes_of,
)
from cuda_here import nccl

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.cli.tolerance import tolerance_of
from hostweave.fusion_ir.reference import run_reference
from hostweave.options import Options
from hostweave.types.tensor import block_of

GPUS = len(gpus())
RANKS = [ranks for ranks in (2, 4, 8) if ranks <= GPUS]
NAMES = ("ag_matmul_put", "ag_matmul_pull", "matmul_rs_put", "mlp_put", "columns_put")
# programs whose channels all use the stated transport
WHOLLY = ("ag_matmul_ring", "matmul_rs_ring", "matmul_ar", "ag_matmul_flat_chunked")


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and there are {GPUS}"),
]
OLD = pytest.mark.skipif(GPUS >= 2 and nccl() < 22900, reason="needs NCCL 2.29 or later: set NCCL_HOME to its folder")
TRANSPORTS = ["peer", pytest.param("one_sided", marks=OLD)]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", [*NAMES, *WHOLLY])
def test_matches_numpy(name: str, ranks: int, transport: str) -> None:
    """Sizes grow and shrink between calls. Later calls run in memory that was filled with NaN."""
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    program = compiled(fusion, "cuda", Options(transport=transport))
    for times in (1, 16, 128, 16):
        sizes = sizes_of(fusion, times)
        arrays = random_arrays(fusion, sizes, seed=times)
        expect(fusion, arrays, program.run(**arrays, ranks=True))
    for times in (1, 64):
        calls = [integer_arrays(fusion, sizes_of(fusion, times), seed) for seed in range(8)]
        for arrays, results in zip(calls, run_in_flight_on_gpus(program, calls), strict=True):
            expect(fusion, arrays, results, exact=True)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [1, *RANKS])
@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_match_numpy(name: str, ranks: int, transport: str) -> None:
    """Communication outside of loops, with growing memory, several calls in flight, and blocks of two sizes, one of which may be 0."""
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    if fusion.mesh.size == 1:
        pytest.skip("one rank has no peer")
    if fusion.mesh.size > GPUS:
        pytest.skip(f"needs {fusion.mesh.size} GPUs, and there are {GPUS}")
    program = compiled(fusion, "cuda", Options(transport=transport))
    for times, more in ((1, 0), (8, 1), (1, 1 - ranks), (2, 0)):
        calls = [integer_arrays(fusion, sizes_of(program.host, times, more), seed) for seed in range(4)]
        for arrays, results in zip(calls, run_in_flight_on_gpus(program, calls), strict=True):
            expect(fusion, arrays, results, exact=True)


@pytest.mark.parametrize("ranks", RANKS)
def test_programs_take_turns_on_one_channel(ranks: int) -> None:
    fusions = [fusion_of(name, ranks, 3, hw.bf16) for name in NAMES]
    for seed in range(5):
        for fusion in fusions:
            arrays = integer_arrays(fusion, sizes_of(fusion, times=8), seed)
            expect(fusion, arrays, compiled(fusion, "cuda").run(**arrays, ranks=True), exact=True)


@pytest.mark.parametrize("ranks", RANKS)
def test_torch_tensors_of_a_layer(ranks: int) -> None:
    """At these sizes, copies and matmuls take so long that an early read of a copy gives wrong results."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    for name in ("ag_matmul_put", "matmul_rs_put"):
        fusion = fusion_of(name, ranks, 3, hw.bf16)
        sizes = {"M": 2048, "K": 1024, "N": 1024}
        calls = [random_arrays(fusion, sizes, seed) for seed in range(4)]
        allowed = tolerance_of(fusion, fusion.outputs[0], sizes)
        tensors = [{key: torch.from_numpy(a.astype("f4")).to("cuda:0", torch.bfloat16) for key, a in call.items()} for call in calls]
        for arrays, results in zip(calls, compiled(fusion, "cuda").run_in_flight(tensors, poison=True), strict=True):
            (want,) = run_reference(fusion, arrays)
            blocks = [y.double().cpu() for y in results]
            got = torch.cat(blocks).numpy() if name == "matmul_rs_put" else blocks[-1].numpy()
            assert abs(got - want).max() <= allowed.atol + allowed.rtol * abs(want).max()


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["ag_matmul_put", "exchanges"])
def test_arrays_of_a_group_are_read_in_place(name: str, ranks: int) -> None:
    """Peers read arrays of `group.empty` in place, although arrays are freed between calls. Ranks are threads."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    program, provider = hw.compile(fusion, target="cuda", options=Options(transport="peer")), hw.Threads(ranks)

    def rank(rank: int) -> None:
        group = hw.init(provider, call_timeout=40)
        torch.cuda.set_device(rank)
        for times in (1, 16, 8):
            arrays = integer_arrays(fusion, sizes_of(fusion, times), seed=times)
            given = {}
            for value in fusion.inputs:
                block = arrays[value.name][block_of(value.type, fusion.mesh, rank, arrays[value.name].shape)]
                given[value.name] = torch.from_dlpack(group.empty(block.shape, value.type.dtype, "cuda"))
                given[value.name].copy_(torch.from_numpy(block.astype("f4")))
            results = program(**given)
            torch.cuda.synchronize()
            group.check()
            results = results if isinstance(results, tuple) else (results,)
            for output, got, want in zip(lowered(fusion).outputs, results, run_reference(fusion, arrays), strict=True):
                block = want[block_of(output.type, fusion.mesh, rank, want.shape)]
                assert (got.double().cpu().numpy() == block.astype("f8")).all(), output.name
        floats = group.empty((2, 3), hw.f32, "cuda")
        assert floats.__cuda_array_interface__["shape"] == (2, 3)
        assert torch.as_tensor(floats, device=f"cuda:{rank}").data_ptr() == torch.from_dlpack(floats).data_ptr()

    provider.run(rank)
    assert any(other.compiled.host.windows for other in program.variants)


def test_closed_programs_leave_their_channel() -> None:
    fusion = fusion_of("mlp_put", 2, 3, hw.bf16)
    arrays = integer_arrays(fusion, sizes_of(fusion, times=8), seed=0)
    for _ in range(3):
        program = hw.compile(fusion, target="cuda")
        expect(fusion, arrays, program.run(**arrays, ranks=True), exact=True)
        program.close()


@pytest.mark.parametrize("connections", ["1", "8"])
def test_with_several_numbers_of_hardware_queues(connections: str) -> None:
    test = f"{__file__}::{test_matches_numpy.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", test]
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout
