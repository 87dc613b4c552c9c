"""Programs of the CPU tests on up to 8 GPUs, and behaviour that is specific to GPUs: devices, streams of other libraries, memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from compiled_fusions import (
    ONE_DEVICE,
    SEVERAL,
    compiled,
    expect,
    fusion_of,
    integer_arrays,
    random_arrays,
    run_in_flight_on_gpus,
    sizes_of,
)
from turns import alone

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.build.cuda import gpus
from hostweave.cli.tolerance import tolerance_of
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.options import Options
from hostweave.runtime.cpu import seeded
from hostweave.types.tensor import DType

GPUS = len(gpus())
ALL = max((ranks for ranks in (1, 2, 4, 8) if ranks <= GPUS), default=1)
DTYPES = {1: hw.f32, 2: hw.f16, 4: hw.bf16, 8: hw.bf16}

# Other libraries warn at import.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@dataclass(frozen=True)
class Case:
    name: str
    ranks: int
    dtype: DType

    def __str__(self) -> str:
        return f"{self.name}-{self.ranks}-{self.dtype}"

    @property
    def fusion(self) -> Fusion:
        return fusion_of(self.name, self.ranks, 3, self.dtype)

    @property
    def program(self) -> hw.Program:
        return compiled(self.fusion, target="cuda")


def cases() -> list[Case]:
    found = [Case(name, ranks, dtype) for ranks, dtype in DTYPES.items() for name in SEVERAL]
    found += [Case(name, ALL, dtype) for name in ("ag_matmul_p2p", "matmul_rs_ring", "allreduce_rows") for dtype in (hw.f32, hw.f16)]
    found += [Case(name, 1, dtype) for name in ONE_DEVICE for dtype in (hw.f32, hw.f16, hw.bf16)]
    return [case for case in dict.fromkeys(found) if case.fusion.mesh.size <= GPUS]


@pytest.fixture
def built(request: pytest.FixtureRequest) -> None:
    """Builds the programs of all cases in the xdist group of this test, in parallel."""
    together = request.node.get_closest_marker("xdist_group")
    items = [item for item in request.session.items if item.get_closest_marker("xdist_group") == together]
    calls = [getattr(item, "callspec", None) for item in items]
    chosen = [call.params["case"] for call in calls if call and isinstance(call.params.get("case"), Case)]
    with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)) // 2, 2)) as pool:
        list(pool.map(lambda case: case.program.build(), chosen))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_matches_numpy(case: Case) -> None:
    for times in (1, 16):
        sizes = sizes_of(case.fusion, times)
        arrays = random_arrays(case.fusion, sizes, seed=times)
        expect(case.fusion, arrays, case.program.run(**arrays, ranks=True))
    calls = [integer_arrays(case.fusion, sizes, seed) for seed in range(4)]
    for arrays, ranks in zip(calls, case.program.run_in_flight(calls, poison=True), strict=True):
        expect(case.fusion, arrays, ranks, exact=True)


def test_both_targets_in_one_process() -> None:
    fusion = fusion_of("ag_matmul_p2p", ALL, 3, hw.f32)
    arrays = integer_arrays(fusion, sizes_of(fusion), seed=0)
    for target in ("cpu", "cuda", "cpu", "cuda"):
        expect(fusion, arrays, compiled(fusion, target).run(**arrays, ranks=True), exact=True)


def test_programs_take_turns_on_the_same_channels() -> None:
    fusions = [fusion_of(name, ALL, 3, hw.bf16) for name in ("ag_matmul_flat", "matmul_rs_flat", "ag_matmul_ring")]
    for seed in range(5):
        for fusion in fusions:
            arrays = integer_arrays(fusion, sizes_of(fusion), seed)
            expect(fusion, arrays, compiled(fusion, "cuda").run(**arrays, ranks=True), exact=True)


def test_measure() -> None:
    fusion = fusion_of("ag_matmul_p2p", ALL, 3, hw.bf16)
    times = compiled(fusion, "cuda").measure(**random_arrays(fusion, sizes_of(fusion), seed=0), warmups=1, repetitions=3)
    assert [len(rank) for rank in times] == [3] * ALL
    assert all(t.enqueue_us > 0 and t.total_ms > 0 for rank in times for t in rank)


# --- arrays on GPUs ---------------------------------------------------------------------------------------------------


def flat_matmul(dtype: DType) -> tuple[Fusion, hw.Program]:
    fusion = fusion_of("ag_matmul_flat", ALL, 3, dtype)
    return fusion, compiled(fusion, "cuda")


@pytest.mark.parametrize("dtype", [hw.f32, hw.f16, hw.bf16], ids=str)
def test_torch(dtype: DType) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    fusion, program = flat_matmul(dtype)
    sizes = sizes_of(fusion, times=8)
    arrays = {name: array.astype(np.float32) for name, array in integer_arrays(fusion, sizes, seed=0).items()}
    torch_dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype.name]
    x, w = (torch.from_numpy(array).to("cuda:0", torch_dtype) for array in arrays.values())
    (want,) = run_reference(fusion, arrays)
    y = program.run(x=x, w=w)
    assert (y.device, y.dtype) == (x.device, torch_dtype)
    np.testing.assert_array_equal(y.float().cpu().numpy(), want)
    for rank, copy in enumerate(program.run(x=x, w=w, ranks=True)):
        assert copy.device == torch.device("cuda", rank)
        np.testing.assert_array_equal(copy.float().cpu().numpy(), want)


def test_torch_tensors_that_are_not_contiguous_or_on_another_gpu() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    fusion, program = flat_matmul(hw.f32)
    arrays = integer_arrays(fusion, sizes_of(fusion, times=8), seed=0)
    (want,) = run_reference(fusion, arrays)
    last = f"cuda:{GPUS - 1}"
    x = torch.from_numpy(arrays["x"].T.copy()).to(last).T
    y = program.run(x=x, w=torch.from_numpy(arrays["w"]).to("cuda:0"))
    assert y.device == torch.device(last)
    np.testing.assert_array_equal(y.cpu().numpy(), want)


def test_the_current_stream_of_torch_is_waited_for() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    fusion, program = flat_matmul(hw.f32)
    arrays = integer_arrays(fusion, sizes_of(fusion, times=8), seed=0)
    (want,) = run_reference(fusion, arrays)
    x, w = (torch.from_numpy(array).to("cuda:0") for array in arrays.values())
    program.run(x=x, w=w)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(0)):
        late = torch.zeros_like(x)
        torch.cuda._sleep(300_000_000)  # The unit is cycles. The GPU is busy for a fraction of a second.
        late += x
        y = program.run(x=late, w=w)
        np.testing.assert_array_equal(y.cpu().numpy(), want)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install '.[cuda13]'")
    fusion, program = flat_matmul(hw.f32)
    arrays = integer_arrays(fusion, sizes_of(fusion, times=8), seed=0)
    (want,) = run_reference(fusion, arrays)
    with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True):
        x, w = (cupy.asarray(array) for array in arrays.values())
        y = program.run(x=x, w=w)
        assert isinstance(y, cupy.ndarray)
        assert y.device.id == 0
        np.testing.assert_array_equal(cupy.asnumpy(y), want)


@pytest.mark.parametrize("count", [2, 6, 12])
def test_calls_in_flight_with_torch_tensors_stay_in_order(count: int) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    fusion, program = flat_matmul(hw.bf16)
    sizes = sizes_of(fusion, times=64)
    calls = [random_arrays(fusion, sizes, seed) for seed in range(count)]
    allowed = tolerance_of(fusion, fusion.outputs[0], sizes)
    tensors = [{name: torch.from_numpy(a.astype(np.float32)).to("cuda:0", torch.bfloat16) for name, a in call.items()} for call in calls]
    for arrays, ranks in zip(calls, program.run_in_flight(tensors, poison=True), strict=True):
        (want,) = run_reference(fusion, arrays)
        for y in ranks:
            np.testing.assert_allclose(y.double().cpu().numpy(), want, allowed.rtol, allowed.atol)


def test_calls_in_flight_with_one_hardware_queue() -> None:
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    test = f"{__file__}::{test_calls_in_flight_with_torch_tensors_stay_in_order.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", test]
    done = subprocess.run(
        command, env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}, stdout=subprocess.PIPE, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout


@hw.fusion(x=hw.f32["M", "N"])
def back_and_forth(x):
    """Alternates sums of columns and rows, so that kernels read data from many thread blocks of the previous kernel."""
    for _ in range(8):
        x = x * 0.5 + hw.sum(x, 0, keepdims=True) * (1 / 2048)
        x = x * 0.5 - hw.sum(x, 1, keepdims=True) * (1 / 2048)
    return x


def test_a_kernel_that_is_launched_early_waits_for_the_previous_kernel() -> None:
    """Each call has 16 programmatic launches. The memory of the calls is first filled with NaN. So a kernel that reads too early gives
    wrong results."""
    program = hw.compile(back_and_forth, target="cuda")
    assert program.source.count("hw::launch_pdl(") == 16
    calls = [random_arrays(back_and_forth, {"M": 3000, "N": 2048}, seed) for seed in range(3)]
    for arrays, (y,) in zip(calls, run_in_flight_on_gpus(program, calls), strict=True):
        (want,) = run_reference(back_and_forth, arrays)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
    program.close()


# --- memory and errors ------------------------------------------------------------------------------------------------


def test_close_frees_the_memory_of_every_gpu() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    alone()

    def free() -> list[int]:
        return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(ALL)]

    fusion = fusion_of("matmul_ar_flat", ALL, 3, hw.f32)
    sizes = {"M": 3 * 2048, "K": ALL, "N": 4096}
    small, large = (integer_arrays(fusion, s, seed=0) for s in (sizes_of(fusion), sizes))
    compiled(fusion, "cuda").run(**large)  # The warm-up creates contexts, and NCCL's buffers for the large arrays.
    output = 4 * sizes["M"] * sizes["N"]

    def takes_and_frees(program: hw.Program) -> bool:
        program.run(**small)
        before = free()
        program.run(**large)
        takes = all(b - a >= output for b, a in zip(before, free(), strict=True))
        program.close()
        return takes and all(b - a < output / 8 for b, a in zip(before, free(), strict=True))

    programs = (hw.compile(fusion, target="cuda") for _ in range(3))
    program = next(filter(takes_and_frees, programs), None)  # Freed memory of earlier tests can hide the output of a round.
    assert program is not None
    with pytest.raises(ExecutionError) as error:
        program.run(**small)
    assert str(error.value) == "matmul_ar_flat: the program is closed; compile it again"


def message_of(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_more_ranks_than_gpus() -> None:
    fusion = fusion_of("allgather_p2p", 2 * GPUS, 3, hw.f32)
    arrays = integer_arrays(fusion, sizes_of(fusion), seed=0)
    assert message_of(ExecutionError, lambda: compiled(fusion, "cuda", Options(check=False)).run(**arrays)) == (
        f"allgather_p2p: {2 * GPUS} GPUs are needed, and this machine has {GPUS}; compile for a smaller mesh, or for the CPU"
    )


def test_an_array_on_a_gpu_for_a_program_on_the_cpu() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    fusion = fusion_of("set", 1, 3, hw.f32)
    assert message_of(ArgumentError, lambda: compiled(fusion).run(x=torch.ones(3, 2, device="cuda:0"))) == (
        "set: x: is on GPU 0, but the program was compiled for the CPU; pass an array in host memory, or compile for cuda"
    )


def test_seeded_schedules_are_for_the_cpu() -> None:
    fusion = fusion_of("set", 1, 3, hw.f32)
    with seeded(0):
        message = message_of(ExecutionError, lambda: compiled(fusion, "cuda").run(x=np.ones((3, 2), np.float32)))
    assert message == "set: seeded schedules exist on the CPU target only"


# The time limit is 3 seconds per call, so two calls in flight have 6 seconds.
STUCK = """
import faulthandler, os, signal, threading
import numpy as np
import hostweave as hw
from hostweave.options import Options
from hostweave.runtime.cpu import parallel

TEXT = '''
host @stuck(%x: f32[2@x, N]) -> (%y: f32[2@x, N]) mesh(x=2) channels(x: x two_sided) {
  recv %y from 1 - rank.x on x
}
'''
stuck = hw.compile(hw.HostProgram.parse(TEXT), target="cuda", options=Options(check=False))
x = np.ones((2, 4), np.float32)
stuck.build()
faulthandler.dump_traceback_later(100)  # If this process hangs, the test fails with the stacks of all threads.
threading.Timer(5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    stuck.run(x=x)
except KeyboardInterrupt:
    print("interrupted")
try:
    with parallel(timeout_seconds=3):
        stuck.run_in_flight([{"x": x}, {"x": x}])
except hw.base.errors.ExecutionError as error:
    print("reported" if "is not done after 6 seconds" in str(error) else error)
TEXT = TEXT.replace("@stuck", "@works").replace("recv %y from 1 - rank.x on x", "all_reduce sum %x -> %y on x")
assert (hw.compile(hw.HostProgram.parse(TEXT), target="cuda").run(x=x) == 2).all()
print("works")
"""


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_ctrl_c_and_the_time_out_end_ranks_that_wait_for_ever() -> None:
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        out, err = process.communicate()
    assert (process.returncode, out.split()) == (0, ["interrupted", "reported", "works"]), err


def test_outputs_belong_to_the_stream_of_the_call(request: pytest.FixtureRequest) -> None:
    """Torch's allocator provides the memory of outputs for the stream of the call, and reuses the memory only on this stream."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["M"])
    def twice(x):  # type: ignore[no-untyped-def]
        return x + x

    group, stream = hw.init(hw.Threads(1)), torch.cuda.Stream()
    request.addfinalizer(group.close)
    program, x = hw.compile(twice, target="cuda"), torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    for given in (None, stream):
        with torch.cuda.stream(torch.cuda.current_stream() if given else stream):
            y = program(x, stream=given)
        stream.synchronize()
        assert (y == 2).all()
        address = y.data_ptr()
        del y
        other = torch.empty_like(x)
        with torch.cuda.stream(stream):
            same = torch.empty_like(x)
        assert same.data_ptr() == address != other.data_ptr()
        del same, other
