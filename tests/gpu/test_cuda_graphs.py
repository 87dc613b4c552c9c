"""Programs in CUDA graphs, captured by `program.capture`, torch, CuPy or the driver API: replays between calls, and failed captures."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import hostweave as hw
from hostweave.base.errors import CaptureError, ExecutionError
from hostweave.build.cuda import gpus

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

GPUS = len(gpus())
REPLAYS = 100
SEVERAL = [ranks for ranks in (1, 2) if ranks <= max(GPUS, 1)]

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def mlp_on(ranks: int, **options: Any) -> hw.Program:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["T", "E"], up=hw.bf16["E", "F@x"], down=hw.bf16["F@x", "E"])
    def mlp(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.matmul(hw.maximum(hw.matmul(x, up), 0), down), "T", "E")

    return hw.compile(mlp, target="cuda", options=hw.Options(**options))


def streamed_on(ranks: int) -> hw.Program:
    """A gather in a chunk loop with matmuls. The loop uses side streams and events."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["T@x", "E"], w=hw.bf16["E", "N"])
    def gathered(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.matmul(x, w).stream("T", chunks=2 * ranks)

    return hw.compile(gathered, target="cuda")


def layers_on(ranks: int) -> hw.Program:
    """Three layers, each with two chunk loops of sends and recvs. Two collectives follow the layers. Each communication forks and joins
    NCCL's stream."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["T@x", "E"], up=hw.bf16["E", "F@x"], down=hw.bf16["F@x", "E"])
    def layers(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        for _ in range(3):
            hidden = hw.matmul(x, up).stream("T", chunks=2 * ranks, algorithm="p2p")
            sums = hw.reshard(hw.matmul(hw.maximum(hidden, 0), down), "T@x", "E").stream("T", chunks=2 * ranks)
            x = hw.clip(sums, -1, 1)
        return hw.reshard(x, "T", "E"), hw.reshard(hw.sum(x, 0), "E")

    return hw.compile(layers, target="cuda", options=hw.Options(transport="two_sided"))


def what_layers_give(x: Any, up: Any, down: Any) -> tuple[Any, Any]:
    for _ in range(3):
        hidden = (x.float() @ up.float()).bfloat16()
        x = (torch.relu(hidden).float() @ down.float()).clamp(-1, 1)
    return x.bfloat16(), x.sum(0).bfloat16()


def integers(*shape: int, seed: int) -> Any:
    """Inputs of -1, 0 and 1, generated on the CPU. So sums are exact, and all ranks have the same inputs."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Rank:
    """Arrays of the MLP on one rank, and the expected output."""

    def __init__(self, rank: int, ranks: int, tokens: int = 16):
        self.device = torch.device("cuda", rank)
        self.tokens = tokens
        self.up, self.down = integers(32, 64, seed=1), integers(64, 32, seed=2)
        self.weights = [
            self.up.chunk(ranks, 1)[rank].contiguous().to(self.device),
            self.down.chunk(ranks, 0)[rank].contiguous().to(self.device),
        ]
        self.x = torch.zeros(tokens, 32, device=self.device, dtype=torch.bfloat16)

    def fill(self, seed: int) -> Any:
        """Sets new inputs. Returns the expected output."""
        x = integers(self.tokens, 32, seed=seed)
        self.x.copy_(x)
        return (torch.relu(x.float() @ self.up.float()).bfloat16().float() @ self.down.float()).bfloat16()


def expect(got: Any, want: Any) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


def on_ranks(ranks: int, body: Callable[[int, hw.Group], None]) -> None:
    threads = hw.Threads(ranks)

    def on_rank(rank: int) -> None:
        torch.cuda.set_device(rank)
        with torch.cuda.stream(torch.cuda.Stream(rank)):
            group = hw.init(threads)
            body(rank, group)
            torch.cuda.synchronize()
            group.check()

    threads.run(on_rank)


# --- captured by the program ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", SEVERAL)
def test_replays_beside_calls(ranks: int) -> None:
    """Replays the graphs of two programs in each of 100 rounds. The MLP has new inputs in each round. The MLP is also called: in 10 rounds
    with more tokens, and in 10 other rounds with the arrays of the graph."""
    program, streamed = mlp_on(ranks), streamed_on(ranks)

    def body(rank: int, group: hw.Group) -> None:
        mine, larger = Rank(rank, ranks), Rank(rank, ranks, tokens=64)
        step = program.bind(up=mine.weights[0], down=mine.weights[1]).capture(mine.x)
        shard, w = integers(8, 32, seed=7).to(mine.device), integers(32, 32, seed=8).to(mine.device)
        gathered = streamed.capture(shard, w)
        for seed in range(REPLAYS):
            want = mine.fill(seed)
            assert step() is step.outputs
            result = step.outputs.clone()
            if seed % 10 == 3:
                also = larger.fill(seed)
                expect(program(larger.x, *larger.weights), also)
            if seed % 10 == 5:
                expect(program(mine.x, *mine.weights), want)
            expect(result, want)
            expect(gathered(), torch.cat([integers(8, 32, seed=7)] * ranks).float().matmul(integers(32, 32, seed=8).float()).bfloat16())

    on_ranks(ranks, body)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_a_launch_is_right_after_many_communications(ranks: int) -> None:
    """The graph has no nodes for the events of NCCL. Instead, each launch waits for these events and records them. Uncaptured calls follow
    some launches."""
    program = layers_on(ranks)

    def body(rank: int, group: hw.Group) -> None:
        device, mine = torch.device("cuda", rank), slice(rank * 16, (rank + 1) * 16)
        up, down = integers(32, 64, seed=1), integers(64, 32, seed=2)
        weights = [up.chunk(ranks, 1)[rank].contiguous().to(device), down.chunk(ranks, 0)[rank].contiguous().to(device)]
        x = torch.zeros(16, 32, device=device, dtype=torch.bfloat16)
        step = program.capture(x, *weights)
        for seed in range(REPLAYS):
            new = integers(16 * ranks, 32, seed=seed)
            x.copy_(new[mine])
            results = step()
            if seed % 7 == 0:
                results = *results, *program(x, *weights)
            wanted = what_layers_give(new, up, down)
            for got, want in zip(results, wanted * (len(results) // 2), strict=True):
                expect(got, want)

    on_ranks(ranks, body)


# (M, N, K) of matmuls for which cuBLASLt splits K. cuBLASLt then sets counters or partial sums to zero by a memset.
PRODUCTS = ((16, 64, 2048), (64, 64, 2048), (128, 256, 2048), (1024, 1280, 1024), (2048, 3584, 512))


@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_memsets_of_cublaslt_are_kernels_of_a_graph(shape: tuple[int, int, int]) -> None:
    """Tests only the results of replays, not the nodes of the graph."""
    rows, columns, terms = shape

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.bf16["T", "E"], w=hw.bf16["E", "F"], v=hw.bf16["F", "E"])
    def twice(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        y = hw.matmul(x, w)
        return y, hw.matmul(hw.clip(y, -1, 1), v)

    program = hw.compile(twice, target="cuda")

    def body(rank: int, group: hw.Group) -> None:
        w, v = integers(terms, columns, seed=1), integers(columns, terms, seed=2)
        x = torch.zeros(rows, terms, device="cuda", dtype=torch.bfloat16)
        step = program.capture(x, w.cuda(), v.cuda())
        for seed in (3, 4, 5):
            new = integers(rows, terms, seed=seed)
            x.copy_(new)
            y = (new.float() @ w.float()).bfloat16()
            z = (y.clamp(-1, 1).float() @ v.float()).bfloat16()
            for got, want in zip(step(), (y, z), strict=True):
                expect(got, want)

    on_ranks(1, body)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_launches_and_calls_on_several_streams_keep_their_order(ranks: int) -> None:
    """The program orders launches and calls on different streams. A call waits for the previous launch. A launch waits for the previous
    call."""
    program = mlp_on(ranks)

    def body(rank: int, group: hw.Group) -> None:
        mine = Rank(rank, ranks, tokens=512)
        want = mine.fill(0)
        step = program.capture(mine.x, *mine.weights)
        torch.cuda.synchronize()
        others = [torch.cuda.Stream(rank) for _ in range(2)]
        outs = [torch.empty_like(mine.x) for _ in range(REPLAYS)]
        for i, out in enumerate(outs):
            step(stream=others[i % 2])
            program(mine.x, *mine.weights, out=out, stream=others[(i + 1) % 2])
        torch.cuda.synchronize()
        for out in (*outs, step.outputs):
            expect(out, want)

    on_ranks(ranks, body)


@pytest.mark.parametrize("ranks", SEVERAL)
def test_calls_are_captured_automatically(ranks: int) -> None:
    program = mlp_on(ranks, graph="auto")

    def body(rank: int, group: hw.Group) -> None:
        mine = Rank(rank, ranks)
        outs = [torch.empty_like(mine.x) for _ in range(18)]
        for seed in range(4):
            want = mine.fill(seed)
            for out in (*outs, *outs[:3]):
                program(mine.x, *mine.weights, out=out)
            for out in outs:
                expect(out, want)
            expect(program(mine.x, *mine.weights), want)

    on_ranks(ranks, body)


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and there are {GPUS}")
def test_a_rank_that_does_not_launch() -> None:
    """Rank 1 does not launch. The watchdog ends the launch of rank 0, and names the call."""
    program, threads = mlp_on(2), hw.Threads(2)
    captured, failed = threading.Barrier(2), threading.Event()

    def on_rank(rank: int) -> None:
        torch.cuda.set_device(rank)
        with torch.cuda.stream(torch.cuda.Stream(rank)):
            group = hw.init(threads)
            mine = Rank(rank, 2)
            want = mine.fill(0)
            step = program.capture(mine.x, *mine.weights)
            expect(step(), want)
            captured.wait(60)
            group.call_timeout = 3  # The time-out is set only now, because planning may take longer.
            if rank == 1:
                failed.wait(60)
                return
            step()
            deadline = time.monotonic() + 30
            while group.failure is None and time.monotonic() < deadline:
                time.sleep(0.1)
            failed.set()
            with pytest.raises(ExecutionError, match=r"rank 0: call 3 of mlp is not done after 3 seconds"):
                group.check()
            with pytest.raises(ExecutionError, match="has failed"):
                step()

    threads.run(on_rank)


# --- captured by torch ------------------------------------------------------------------------------------------------


def in_torch_graph(rank: int, ranks: int, group: hw.Group) -> None:
    """Replays a torch graph of two programs and torch ops, between calls. Then another capture fails. Then a call and a replay follow."""
    program, other = mlp_on(ranks), mlp_on(ranks)
    mine = Rank(rank, ranks)
    for one in (program, other):  # These calls build, connect and allocate before the capture.
        one(mine.x, *mine.weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = program(mine.x, *mine.weights)
        z = other(torch.clamp(y, -1, 1), *mine.weights)
        last = program(torch.clamp(z, -1, 1), *mine.weights) + 1
    for seed in range(REPLAYS):
        want = mine.fill(seed)
        graph.replay()
        if seed % 7 == 0:
            expect(program(mine.x, *mine.weights), want)
        expect(y, want)
        for result, bias in ((z, 0), (last, 1)):
            x = torch.clamp(want, -1, 1).float()
            want = (torch.relu(x @ mine.up.float()).bfloat16().float() @ mine.down.float()).bfloat16() + bias
            expect(result, want)
            want = want - bias
    fails(program, mine)
    want = mine.fill(1)
    expect(program(mine.x, *mine.weights), want)
    graph.replay()
    expect(y, want)
    assert group.overdue() is None
    torch.cuda.synchronize()
    group.check()


def fails(program: hw.Program, mine: Rank) -> None:
    """Tries to capture a call with unprepared shapes. The call raises an error, and torch ends the capture."""
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(24, 32, device=mine.device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    with (
        pytest.raises(CaptureError, match="not prepared for arrays of these shapes"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        program(x, *mine.weights, out=out)
    torch.cuda.synchronize()


@pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and there are {GPUS}")
@pytest.mark.parametrize(
    ("make", "edges", "peers"),
    [(mlp_on, {"collective"}, [0, 1]), (streamed_on, {"signal", "credit", "transfer"}, [1])],
)
def test_a_launch_by_torch_names_its_line(
    make: Callable[[int], hw.Program], edges: set[str], peers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 launches its graph before rank 1 launches. The progress of rank 0 then names the line that waits, and the expected ranks. Each
    rank launches its graph twice."""
    monkeypatch.setenv("HOSTWEAVE_GRAPH_PROGRESS", "1")
    program, late = make(2), [threading.Event() for _ in range(2)]

    def body(rank: int, group: hw.Group) -> None:
        mine = Rank(rank, 2)
        arrays = [mine.x, *mine.weights] if make is mlp_on else [mine.x, torch.zeros(32, 32, device=mine.device, dtype=mine.x.dtype)]
        out = [program(*arrays) for _ in range(2)][-1]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(rank), capture_error_mode="thread_local"):
            program(*arrays, out=out)
        (local,) = group.programs.values()
        for before, go in enumerate(late, 2):
            torch.cuda.synchronize()
            assert local.position().call == 0
            if rank == 1:
                go.wait(20)
            graph.replay()
            if rank == 0:
                until, seen, waits = time.monotonic() + 10, local.position(), []
                while not waits and time.monotonic() < until:
                    seen = local.position()
                    waits = [stream for stream in seen.streams if stream["edge"] in edges]
                go.set()
                assert (seen.call, seen.made, seen.done, seen.is_graph) == (before + 1, before + 1, before, True)
                assert waits, seen.streams
                assert all(stream["ranks"] == peers for stream in waits), seen.streams
                assert "test_cuda_graphs.py:" in waits[0]["next"]

    on_ranks(2, body)


def test_in_a_graph_of_torch() -> None:
    on_ranks(1, lambda rank, group: in_torch_graph(rank, 1, group))


@pytest.mark.parametrize("ranks", [ranks for ranks in SEVERAL if ranks > 1])
def test_puts_in_a_graph(ranks: int) -> None:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["T@x", "E"], w=hw.bf16["E", "N"])
    def gathered(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.matmul(x, w).stream("T", chunks=ranks, algorithm="put")

    program = hw.compile(gathered, target="cuda")

    def body(rank: int, group: hw.Group) -> None:
        device = torch.device("cuda", rank)
        x, w = torch.zeros(64, 32, device=device, dtype=torch.bfloat16), integers(32, 32, seed=8).to(device)
        step = program.capture(x, w)
        for seed in range(REPLAYS):
            new = integers(64, 32, seed=seed)
            x.copy_(new)
            want = torch.cat([new] * ranks).float().matmul(w.cpu().float())
            expect(step(), want.bfloat16())
            if seed % 7 == 0:
                expect(program(x, w), want.bfloat16())

    on_ranks(ranks, body)


class Driver:
    """Captures and launches graphs by the CUDA driver API, without torch."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        assert getattr(self.library, name)(*arguments) == 0, name

    def capture(self, stream: int, enqueue: Callable[[], object]) -> ctypes.c_void_p:
        graph, executable, thread_local = ctypes.c_void_p(), ctypes.c_void_p(), 1
        self.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), thread_local)
        enqueue()
        self.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        self.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        return executable

    def launch(self, executable: ctypes.c_void_p, stream: int) -> None:
        self.call("cuGraphLaunch", executable, ctypes.c_void_p(stream))


def test_in_a_capture_of_cuda() -> None:
    program, streamed = mlp_on(1), streamed_on(1)

    def body(rank: int, group: hw.Group) -> None:
        mine, driver = Rank(rank, 1), Driver()
        shard, w = integers(8, 32, seed=7).to(mine.device), integers(32, 32, seed=8).to(mine.device)
        y, z = torch.empty_like(mine.x), streamed(shard, w)
        want_z = z.clone()
        program(mine.x, *mine.weights, out=y)
        torch.cuda.synchronize()
        stream = torch.cuda.current_stream().cuda_stream

        def enqueue() -> None:
            program(mine.x, *mine.weights, out=y, stream=stream)
            streamed(shard, w, out=z, stream=stream)

        graph = driver.capture(stream, enqueue)
        for seed in range(REPLAYS):
            want = mine.fill(seed)
            y.zero_()
            z.zero_()
            driver.launch(graph, stream)
            if seed % 7 == 0:
                expect(program(mine.x, *mine.weights), want)
            expect(y, want)
            expect(z, want_z.cpu())

    on_ranks(1, body)


def test_in_a_graph_of_cupy() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install '.[cuda13]'")

    def body(rank: int, group: hw.Group) -> None:
        mine, program = Rank(rank, 1), mlp_on(1)
        stream = cupy.cuda.Stream(non_blocking=True)
        x, up, down = map(cupy.from_dlpack, (mine.x, *mine.weights))
        out = torch.empty_like(mine.x)
        y = cupy.from_dlpack(out)
        with stream:
            program(x, up, down, out=y)
            stream.synchronize()
            stream.begin_capture()
            program(x, up, down, out=y)
            graph = stream.end_capture()
            for seed in range(10):
                want = mine.fill(seed)
                torch.cuda.synchronize()
                graph.launch()
                stream.synchronize()
                expect(out, want)

    on_ranks(1, body)


def test_a_first_call_in_a_capture_is_refused() -> None:
    def body(rank: int, group: hw.Group) -> None:
        mine, program = Rank(rank, 1), mlp_on(1)
        want = mine.fill(0)
        graph = torch.cuda.CUDAGraph()
        message = "this is the first call; make one call before"
        with pytest.raises(CaptureError, match=message), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            program(mine.x, *mine.weights)
        expect(program(mine.x, *mine.weights), want)

    on_ranks(1, body)


def test_a_query_on_another_thread_does_not_end_a_capture() -> None:
    """While torch captures, another thread queries the state of calls, as the watchdog does. In torch's default mode, CUDA forbids unsafe
    calls on all threads. A query that makes an unsafe call would invalidate the capture."""
    program = mlp_on(1)

    def body(rank: int, group: hw.Group) -> None:
        mine = Rank(rank, 1)
        program(mine.x, *mine.weights)
        torch.cuda.synchronize()
        graph, stop = torch.cuda.CUDAGraph(), threading.Event()

        def look() -> None:
            while not stop.is_set():
                group.overdue()

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            for _ in range(20):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = program(mine.x, *mine.weights)
        finally:
            stop.set()
            watcher.join()
        want = mine.fill(3)
        graph.replay()
        expect(y, want)

    on_ranks(1, body)


def test_in_graphs_of_torch_on_two_processes(built_here: Mapping[str, str]) -> None:
    ranks = 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    done = subprocess.run(command, env=dict(built_here), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("is right") == ranks


@pytest.fixture
def built_here() -> Mapping[str, str]:
    if GPUS < 2:
        pytest.skip("needs 2 GPUs")
    from processes import environment

    mlp_on(2).build()
    return environment()


def main() -> None:
    group = hw.init(timeout=120, call_timeout=60)
    torch.cuda.set_device(group.local_rank)
    with torch.cuda.stream(torch.cuda.Stream()):
        in_torch_graph(group.rank, group.count, group)
    sys.stdout.write(f"rank {group.rank} is right\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
