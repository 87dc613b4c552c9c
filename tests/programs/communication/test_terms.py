"""Collectives inside kernels: results on the CPU device, sizes near the limit for kernels, and cases in which NCCL is used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compiled_fusions import compiled, expect, integer_arrays, lowered, random_arrays
from cuda_here import needs_cuda

import hostweave as hw
from hostweave.build.nvrtc import Nvrtc, units_of
from hostweave.check.sizes import sizes_to_check
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import seeded
from hostweave.runtime.group import Group
from hostweave.targets.target import find_target
from hostweave.tune.cost import most_in_kernel
from hostweave.types.machine import H200
from hostweave.types.tensor import DType

WIDTH = 4096  # Number of elements of a row. An all-reduce of a few such rows is small enough for a kernel.


def mlp(dtype: DType, ranks: int) -> Fusion:
    """A program with four all_reduces. Two are in calls of a function that adds a residual and computes a row maximum. One
    precedes a matmul, and one precedes a sum over the rows."""

    @hw.block(x=dtype["T", WIDTH], w=dtype[WIDTH, f"{4 * ranks}@tp"], v=dtype[f"{4 * ranks}@tp", WIDTH])
    def layer(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        y = x + hw.reshard(hw.matmul(hw.matmul(x, w), v), "T", WIDTH)
        return y, y - hw.max(y, 1, keepdims=True)

    @hw.fusion(
        mesh=hw.Mesh(tp=ranks), x=dtype["T", WIDTH], w=dtype[WIDTH, f"{4 * ranks}@tp"], v=dtype[f"{4 * ranks}@tp", WIDTH], u=dtype[WIDTH, 3]
    )
    def mlp(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, u: hw.Tensor) -> tuple[hw.Tensor, ...]:
        y, z = layer(x, w, v)
        y, z = layer(hw.maximum(hw.minimum(z, 1), -1), w, v)
        whole = hw.reshard(hw.matmul(hw.matmul(x, w), v), "T", WIDTH)
        return y, z, hw.matmul(whole, u), hw.sum(hw.reshard(hw.matmul(hw.matmul(x * 2, w), v), "T", WIDTH), 0)

    return mlp


def launches(host: HostProgram) -> list[ir.LaunchExchange]:
    parts = (host.body, *(function.body for function in host.functions))
    return [i for body in parts for i in tree.walk(body) if isinstance(i, ir.LaunchExchange)]


@pytest.mark.parametrize(("dtype", "ranks"), [(hw.bf16, 2), (hw.f32, 3), (hw.f16, 4)], ids=str)
def test_matches_numpy_around_the_largest(dtype: DType, ranks: int) -> None:
    fusion, most = mlp(dtype, ranks), most_in_kernel(H200, "all_reduce", ranks) // (WIDTH * dtype.itemsize)
    host = lowered(fusion)
    assert len(launches(host)) == 3
    assert {str(i.condition) for part in (host.body, host.functions[0].body) for i in tree.walk(part) if isinstance(i, ir.If)} == {
        f"T <= {most}"
    }
    assert [sizes["T"] > most for sizes in sizes_to_check(host)] == [False, True]
    for rows in (0, 1, 3, most, most + 1):
        arrays = random_arrays(fusion, {"T": rows}, seed=rows)
        expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True))


def test_sums_in_random_schedules() -> None:
    """Several calls are in flight. Outputs and temporaries are NaN before each call."""
    fusion = reduced(hw.f32, ranks=3)
    calls = [integer_arrays(fusion, {}, number) for number in range(3)]
    for seed in range(10):
        with seeded(seed):
            results = compiled(fusion).run_in_flight(calls, poison=True)
        for arrays, got in zip(calls, results, strict=True):
            expect(fusion, arrays, got)


def reduced(dtype: DType = hw.bf16, ranks: int = 2, rows: int | str = 4, width: int | str = 64) -> Fusion:
    @hw.fusion(mesh=hw.Mesh(tp=ranks), p=dtype[f"{ranks}@tp", rows, width])
    def reduced(p: hw.Tensor) -> hw.Tensor:
        return hw.maximum(hw.sum(p, 0), 0)

    return reduced


def test_all_reduces_by_nccl() -> None:
    """NCCL reduces sums with two unknown sizes, large sums, sums of i32, and sums over 16 ranks. NCCL reduces all sums with transports
    two_sided and one_sided, and without peer access."""
    assert launches(lowered(reduced()))
    assert launches(lowered(reduced(ranks=8, rows="T")))
    for fusion, options in (
        (reduced(rows="T", width="E"), Options()),
        (reduced(rows=1 << 15), Options()),
        (reduced(hw.i32), Options()),
        (reduced(ranks=16), Options()),
        (reduced(), Options(transport="two_sided")),
        (reduced(), Options(transport="one_sided")),
        (reduced(), Options(machine=replace(H200, no_peers="here"))),
    ):
        assert not launches(lower(fusion, options)), str(fusion)
    most = most_in_kernel(H200, "all_reduce", 2)
    text = f"%sum_p = all_reduce of %sum_p_partial: up to {most} bytes by an exchange in the consuming kernel"
    assert text in hw.compile(reduced()).explain()
    assert "an exchange" not in hw.compile(reduced(), options=Options(transport="two_sided")).explain()


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
def test_terms_that_are_read_again(ranks: int) -> None:
    """Each rank has one index of the reduced dim. Most of the kernels read the sent elements again."""

    @hw.fusion(
        mesh=hw.Mesh(ep=ranks), x=hw.f32["T", f"{ranks}@ep"], c=hw.f32[4, f"{ranks}@ep", 3], w=hw.f32["T", 5], v=hw.f32[5, f"{ranks}@ep"]
    )
    def routed(x: hw.Tensor, c: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return (
            x / hw.sum(x, 1, keepdims=True),
            hw.softmax(w @ v, 1),
            (c + 1) * hw.expand_dims(hw.sum(c + 1, 1), 1),
            hw.sum(c, 1) - hw.sum(c * 2, 1),
        )

    for rows in (1, 4):
        arrays = random_arrays(routed, {"T": rows}, seed=rows)
        expect(routed, arrays, compiled(routed).run(**arrays, ranks=True))


def blocks(ranks: int, dtype: DType = hw.bf16) -> Fusion:
    """Gathers before a pointwise kernel and before matmuls. Reduce-scatters before a kernel and at the end."""

    @hw.fusion(
        mesh=hw.Mesh(tp=ranks),
        n=hw.i64[f"{4 * ranks}@tp"],
        x=dtype[f"{4 * ranks}@tp", "T"],
        w=dtype["T", f"{ranks}@tp"],
        v=dtype[f"{ranks}@tp", "T"],
    )
    def blocks(n: hw.Tensor, x: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, ...]:
        numbers = hw.reshard(n, 4 * ranks) * 2
        h = hw.matmul(hw.matmul(hw.reshard(x, 4 * ranks, "T"), w), v)
        y = hw.maximum(hw.reshard(h, f"{4 * ranks}@tp", "T"), x)
        h = hw.matmul(hw.matmul(hw.reshard(y, 4 * ranks, "T"), w), v)
        return numbers, y, hw.reshard(h, f"{4 * ranks}@tp", "T")

    return blocks


@pytest.mark.parametrize(("ranks", "dtype"), [(1, hw.bf16), (2, hw.bf16), (3, hw.f32), (4, hw.f16), (8, hw.f32)], ids=str)
def test_blocks_match_numpy_around_the_largest(ranks: int, dtype: DType) -> None:
    fusion = blocks(ranks, dtype)
    host = lowered(fusion)
    most = most_in_kernel(H200, "all_gather", ranks) // (4 * dtype.itemsize)
    if ranks > 1:
        assert [i.kind for i in launches(host)] == ["all_gather", "all_gather", "reduce_scatter", "all_gather", "reduce_scatter"]
        assert f"T <= {most}" in {str(i.condition) for i in tree.walk(host.body) if isinstance(i, ir.If)}
    for rows in (0, 1, 5, 8, *((most, most + 1) if ranks == 8 else ())):
        arrays = integer_arrays(fusion, {"T": rows}, rows)
        expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True))


def sent(ranks: int, dtype: DType = hw.f32, width: str = "T", product: bool = False) -> Fusion:
    """A reduce-scatter of the result of a kernel. With `product`, a matmul computes the operand of the kernel."""
    tail = (width,) * bool(width)

    @hw.fusion(mesh=hw.Mesh(tp=ranks), p=dtype[f"{ranks}@tp", 8 * ranks, *tail], w=dtype[*tail * 2])
    def sent(p: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.sum(hw.tanh(hw.matmul(p, w) if product else p) + hw.sum(w), 0), f"{8 * ranks}@tp", *tail) + 1

    return sent


@pytest.mark.parametrize(
    ("ranks", "dtype", "product"),
    [(1, hw.f32, False), (2, hw.f32, True), (2, hw.f32, False), (3, hw.bf16, False), (8, hw.f32, True)],
    ids=str,
)
def test_kernels_send_their_results(ranks: int, dtype: DType, product: bool) -> None:
    fusion = sent(ranks, dtype, product=product)
    assert str(lowered(fusion)).count("sent on tp") == (ranks > 1)
    for rows in (0, 1, 5, 8):
        arrays = random_arrays(fusion, {"T": rows}, seed=rows)
        expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True))


def test_results_with_one_dim_are_not_sent() -> None:
    """A vector access to a result with one dim may cross the end of a block."""
    host = lowered(sent(2, width=""))
    assert "launch_reduce_scatter" in str(host)
    assert "sent on" not in str(host)


def test_blocks_in_random_schedules() -> None:
    fusion = blocks(3, hw.f32)
    calls = [integer_arrays(fusion, {"T": 6}, number) for number in range(3)]
    for seed in range(10):
        with seeded(seed):
            results = compiled(fusion).run_in_flight(calls, poison=True)
        for arrays, got in zip(calls, results, strict=True):
            expect(fusion, arrays, got)


def test_graphs_and_calls_of_two_programs() -> None:
    """Graphs and calls of two programs are ordered on their common channel."""
    ranks = 2
    program, other = compiled(reduced(hw.f32, ranks)), compiled(reduced(hw.f32, ranks, rows="T", width=8))
    p = np.arange(ranks * 4 * 64, dtype=np.float32).reshape(ranks, 4, 64) - 100
    q = np.arange(ranks * 3 * 8, dtype=np.float32).reshape(ranks, 3, 8) - 20
    threads = hw.Threads(ranks)

    def on_rank(rank: int) -> None:
        hw.init(threads)
        mine, small = p[rank : rank + 1].copy(), q[rank : rank + 1].copy()
        step, tiny = program.capture(mine), other.capture(small)
        for times in range(1, 4):
            mine[:], small[:] = p[rank] * times, q[rank] * times
            for _ in range(2):
                np.testing.assert_array_equal(step(), np.maximum(p.sum(0) * times, 0))
                np.testing.assert_array_equal(other(small[:, :2]), np.maximum(q.sum(0)[:2] * times, 0))
                np.testing.assert_array_equal(tiny(), np.maximum(q.sum(0) * times, 0))
                np.testing.assert_array_equal(program(mine), step.outputs)

    threads.run(on_rank)


def test_ranks_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "hosts", 2)
    monkeypatch.setattr(type(find_target("cpu")), "needs_one_host", False)
    program, threads = hw.compile(reduced(hw.f32, rows=2)), hw.Threads(2)
    p = np.arange(256, dtype=np.float32).reshape(2, 2, 64)

    def on_rank(rank: int) -> None:
        hw.init(threads)
        np.testing.assert_array_equal(program(p[rank : rank + 1].copy()), p.sum(0))

    threads.run(on_rank)
    assert "launch_all_reduce" in program.host_ir
    (made,) = program.variants
    assert made is not None
    assert "launch_all_reduce" not in str(made.compiled.host)


# --- CUDA -------------------------------------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize(("arch", "ranks", "width"), [("sm_80", 2, 64), ("sm_90", 8, 31)])
def test_kernels_compile_for_gpus(arch: str, ranks: int, width: int, tmp_path: Path) -> None:
    """Compiles kernels for rows of whole packets (8 bytes of data each), and for rows that end in a partial packet."""
    found = find_target("cuda").toolchain().kernel_compiler
    assert isinstance(found, Nvrtc)
    made = hw.compile(reduced(ranks=ranks, rows="T", width=width), "cuda", options=Options(machine=H200))
    (unit,) = (unit for unit in units_of(made.sources["kernels.cu"]) if "hw::Terms<hw::bf16" in unit.text)
    assert unit.name.encode() in replace(found, arch=arch).compile(unit, tmp_path)


@needs_cuda
@pytest.mark.parametrize(("arch", "ranks"), [("sm_80", 3), ("sm_90", 2)])
def test_kernels_of_blocks_compile_for_gpus(arch: str, ranks: int, tmp_path: Path) -> None:
    found = find_target("cuda").toolchain().kernel_compiler
    assert isinstance(found, Nvrtc)
    made = hw.compile(blocks(ranks), "cuda", options=Options(machine=H200))
    units = [
        unit for unit in units_of(made.sources["kernels.cu"]) if "hw::GatheredBlocks<" in unit.text or "hw::ScatteredSums<" in unit.text
    ]
    assert len(units) == 4
    for unit in units:
        assert unit.name.encode() in replace(found, arch=arch).compile(unit, tmp_path)


@needs_cuda
@pytest.mark.parametrize("ranks", [2, 8])
def test_every_reduction_of_an_all_reduced_row_compiles_for_gpus(ranks: int, tmp_path: Path) -> None:
    """Blocks of a cluster exchange accumulators of 4 to 16 bytes: floats, integers, and elements with their indices."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16[4, "K@x"], w=hw.bf16["K@x", 2048 * ranks])
    def heads(x, w):
        y = hw.reshard(x @ w, 4, 2048 * ranks)
        return hw.argmax(y, -1), hw.sum(hw.astype(y > 0, hw.i32), -1), hw.max(y, -1), hw.any(y > 1, -1)

    found = find_target("cuda").toolchain().kernel_compiler
    assert isinstance(found, Nvrtc)
    units = units_of(hw.compile(heads, "cuda", options=Options(machine=H200)).sources["kernels.cu"])
    assert any("hw::Terms<" in unit.text for unit in units)
    for unit in units:
        assert unit.name.encode() in replace(found, arch="sm_90").compile(unit, tmp_path)
