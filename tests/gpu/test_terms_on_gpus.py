"""Collectives inside kernels on GPUs: results, with and without a graph, several calls in flight, and a missing rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.build.cuda import gpus

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

RANKS = min(len(gpus()), 8)
CALLS = 200

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(RANKS < 2, reason="needs 2 GPUs")]

DTYPES = {hw.bf16: "bfloat16", hw.f16: "float16", hw.f32: "float32"}


def reducing(width: int, dtype: hw.DType = hw.bf16, transport: str = "auto") -> hw.Program:
    """Program that computes y = x + all_reduce(p), and y minus the row sums of y. So one kernel reads y twice."""

    @hw.fusion(mesh=hw.Mesh(tp=RANKS), x=dtype["T", width], p=dtype[f"{RANKS}@tp", "T", width])
    def reduced(x: hw.Tensor, p: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        y = x + hw.sum(p, 0)
        return y, y - hw.sum(y, 1, keepdims=True)

    program = hw.compile(reduced, target="cuda", options=hw.Options(transport=transport))
    assert ("launch_all_reduce" in program.host_ir) == (transport == "auto")
    return program


def integers(*shape: int, seed: int) -> Any:
    """Inputs of -1, 0 and 1, generated on the CPU. So sums are exact, and all ranks generate the same global inputs."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


class Rank:
    def __init__(self, rank: int, rows: int, width: int, dtype: hw.DType = hw.bf16):
        self.rank, self.shape, self.dtype = rank, (rows, width), getattr(torch, DTYPES[dtype])
        self.x = torch.zeros(rows, width, device=f"cuda:{rank}", dtype=self.dtype)
        self.p = torch.zeros(1, rows, width, device=f"cuda:{rank}", dtype=self.dtype)

    def fill(self, seed: int) -> Any:
        x, p = integers(*self.shape, seed=seed), integers(RANKS, *self.shape, seed=seed + 1000)
        self.x.copy_(x)
        self.p.copy_(p[self.rank][None])
        y = x + p.sum(0)
        return y.to(self.dtype), (y - y.sum(1, keepdim=True)).to(self.dtype)


def expect(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0)


def on_ranks(body: Callable[[int, hw.Group], None], **options: Any) -> None:
    threads = hw.Threads(RANKS)

    def on_rank(rank: int) -> None:
        torch.cuda.set_device(rank)
        with torch.cuda.stream(torch.cuda.Stream(rank)):
            group = hw.init(threads, **options)
            body(rank, group)
            torch.cuda.synchronize()
            group.check()

    threads.run(on_rank)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(dtype: hw.DType) -> None:
    """Sizes that do or do not fill whole packets. NCCL reduces the sizes that exceed the limit of a kernel.

    On 2 ranks, 16 rows of 8192 f32 elements have exactly the largest size for a kernel.
    """
    programs = [(width, reducing(width, dtype)) for width in (8192, 96, 31)]

    def body(rank: int, group: hw.Group) -> None:
        for width, program in programs:
            for rows in (16, 1, 3, 64, 1000):
                mine = Rank(rank, rows, width, dtype)
                for seed in range(5):
                    want = mine.fill(seed)
                    expect(program(mine.x, mine.p), want)

    on_ranks(body)


def test_as_nccl_rounds() -> None:
    """On two ranks, the result equals NCCL's. On more ranks, both results may differ from the exact sum by one rounding error for
    each addition."""
    programs = [reducing(8192), reducing(8192, transport="two_sided")]

    def body(rank: int, group: hw.Group) -> None:
        x, *terms = (torch.randn(16, 8192, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(1 + RANKS))
        ours, theirs = (program(x.cuda(rank), terms[rank][None].cuda(rank))[0].cpu() for program in programs)
        if RANKS == 2:
            expect([ours], [theirs])
        exact, sizes = sum(t.double() for t in (x, *terms)), sum(t.double().abs() for t in (x, *terms))
        for result in (ours, theirs):
            assert ((result.double() - exact).abs() <= RANKS * 2**-8 * sizes).all()

    on_ranks(body)


def test_graphs_and_calls_in_flight() -> None:
    """Launches graphs of two programs, and calls one of the programs with another size, without waits in between.

    All ranks must give each exchange the same sequence number.
    """
    program, other = reducing(8192), reducing(256)

    def body(rank: int, group: hw.Group) -> None:
        mine, small, wide = Rank(rank, 16, 8192), Rank(rank, 5, 256), Rank(rank, 2, 8192)
        wants = [one.fill(seed) for seed, one in enumerate((mine, small, wide))]
        step, tiny = program.capture(mine.x, mine.p), other.capture(small.x, small.p)
        program(wide.x, wide.p)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(rank) for _ in range(3)]
        outs = [tuple(map(torch.empty_like, (wide.x, wide.x))) for _ in range(CALLS)]
        for i, out in enumerate(outs):
            step(stream=streams[i % 3])
            if i % 2:
                tiny(stream=streams[(i + 1) % 3])
            program(wide.x, wide.p, out=out, stream=streams[(i + 2) % 3])
        torch.cuda.synchronize()
        expect(step.outputs, wants[0])
        expect(tiny.outputs, wants[1])
        for out in outs:
            expect(out, wants[2])
        for seed in range(20):
            want = mine.fill(seed)
            expect(step(), want)
            if seed % 3 == 0:
                expect(program(mine.x, mine.p), want)

    on_ranks(body)


ROWS = 8  # rows of each rank


def exchanging(dtype: hw.DType = hw.bf16, transport: str = "auto") -> hw.Program:
    """Program with y = x + reduce_scatter(p), all_gather(y) * 2, and all_gather(y * 2)."""

    @hw.fusion(mesh=hw.Mesh(tp=RANKS), x=dtype[f"{ROWS * RANKS}@tp", "T"], p=dtype[f"{RANKS}@tp", ROWS * RANKS, "T"])
    def exchanged(x: hw.Tensor, p: hw.Tensor) -> tuple[hw.Tensor, ...]:
        y = x + hw.reshard(hw.sum(p, 0), f"{ROWS * RANKS}@tp", "T")
        return y, hw.reshard(y, ROWS * RANKS, "T") * 2, hw.reshard(y * 2, ROWS * RANKS, "T")

    program = hw.compile(exchanged, target="cuda", options=hw.Options(transport=transport))
    assert [f"launch_{kind}" in program.host_ir for kind in ("reduce_scatter", "all_gather")] == [transport == "auto"] * 2
    return program


class RowsOf:
    def __init__(self, rank: int, columns: int, dtype: hw.DType = hw.bf16):
        self.rank, self.columns, self.dtype = rank, columns, getattr(torch, DTYPES[dtype])
        self.x = torch.zeros(ROWS, columns, device=f"cuda:{rank}", dtype=self.dtype)
        self.p = torch.zeros(1, ROWS * RANKS, columns, device=f"cuda:{rank}", dtype=self.dtype)

    def fill(self, seed: int) -> Any:
        x, p = (integers(*shape, ROWS * RANKS, self.columns, seed=seed) for shape in ((), (RANKS,)))
        own = slice(self.rank * ROWS, (self.rank + 1) * ROWS)
        self.x.copy_(x[own])
        self.p.copy_(p[self.rank][None])
        y = (x + p.sum(0)).to(self.dtype)
        return y[own], 2 * y, 2 * y


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks(dtype: hw.DType) -> None:
    """Sizes that do or do not fill whole vectors, and the largest size for a kernel. NCCL does both collectives of a larger size."""
    program = exchanging(dtype)
    largest = (8 << 20) // RANKS // ROWS // (4 if dtype == hw.f32 else 2)

    def body(rank: int, group: hw.Group) -> None:
        for columns in (1, 31, 96, 8192, largest, largest + 1):
            mine = RowsOf(rank, columns, dtype)
            for seed in range(5):
                want = mine.fill(seed)
                expect(program(mine.x, mine.p), want)

    on_ranks(body)


@pytest.mark.parametrize("columns", [96, 100_000])
def test_blocks_as_nccl_rounds(columns: int) -> None:
    programs = [exchanging(), exchanging(transport="two_sided")]

    def body(rank: int, group: hw.Group) -> None:
        generator = torch.Generator().manual_seed(rank)
        x, p = (torch.randn(*shape, columns, generator=generator).bfloat16().cuda(rank) for shape in ((ROWS,), (1, ROWS * RANKS)))
        ours, theirs = ([one.float().cpu() for one in program(x, p)] for program in programs)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0 if RANKS == 2 else 0.25)

    on_ranks(body)


def test_exchanges_of_blocks_and_of_packets_in_flight() -> None:
    """Launches two graphs, with calls in between, without waits. One graph and the calls exchange blocks. The other graph exchanges
    packets."""
    program, other = exchanging(), reducing(8192)

    def body(rank: int, group: hw.Group) -> None:
        mine, wide, terms = RowsOf(rank, 4096), RowsOf(rank, 50_000), Rank(rank, 16, 8192)
        wants = [one.fill(seed) for seed, one in enumerate((mine, wide, terms))]
        step, sums = program.capture(mine.x, mine.p), other.capture(terms.x, terms.p)
        out = program(wide.x, wide.p)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(rank) for _ in range(3)]
        for i in range(CALLS):
            step(stream=streams[i % 3])
            if i % 2:
                sums(stream=streams[(i + 1) % 3])
            program(wide.x, wide.p, out=out, stream=streams[(i + 2) % 3])
        torch.cuda.synchronize()
        for got, want in zip((step.outputs, out, sums.outputs), wants, strict=True):
            expect(got, want)
        for seed in range(20):
            want = mine.fill(seed)
            expect(step(), want)

    on_ranks(body)


@pytest.mark.parametrize("exchanges", ["terms", "blocks"])
def test_a_rank_that_never_launches_its_kernel(exchanges: str) -> None:
    """The kernels that wait for a missing rank end when the call is aborted. The GPU then reports no error."""
    program = reducing(8192) if exchanges == "terms" else exchanging()
    ended = threading.Event()

    def body(rank: int, group: hw.Group) -> None:
        mine = Rank(rank, 16, 8192) if exchanges == "terms" else RowsOf(rank, 8192)
        want = mine.fill(0)
        step = program.capture(mine.x, mine.p)
        expect(step(), want)
        if rank == 0:
            step()
            torch.cuda.synchronize()  # This call blocks until the watchdog aborts the wait of the kernel.
            with pytest.raises(ExecutionError, match="is not done after 5 seconds"):
                group.check()
            ended.set()
        else:
            assert ended.wait(90)

    with pytest.raises(ExecutionError):
        on_ranks(body, call_timeout=5)
