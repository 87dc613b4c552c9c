"""`hostweave calibrate`: measures the constants of the cost model on the GPUs of this machine."""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product

import hostweave as hw
from hostweave.base.errors import BuildError, ExecutionError
from hostweave.base.progress import expect_tasks, task_done
from hostweave.build import cuda, figures
from hostweave.communication.cost import LOOP_SECONDS
from hostweave.fusion_ir.ir import Fusion
from hostweave.targets.cuda import why_no_puts
from hostweave.tune.cost import Product
from hostweave.types.machine import H200, KB, MB, Link, Machine

SHAPES = ((8192, 8192, 7168), (8192, 8192, 1280), (8192, 4096, 3584), (2048, 8192, 7168), (8192, 3584, 8192), (8192, 1024, 8192))
SHARDS = (16 * KB, MB, 16 * MB, 64 * MB)  # bytes
GROUPS = (2, 4, 8)  # ranks
COLUMNS = 4096  # bf16 elements in a row of the gathered tensor
BUSY = 5e-4  # seconds; another program uses the GPUs if the smallest gather takes longer


def calibrate() -> Iterator[str]:
    """Measures and stores the constants, and yields lines of text about them."""
    gpus = cuda.gpus()
    if not gpus:
        raise BuildError("calibrate: there is no GPU to measure; run it on a machine with GPUs")
    cuda.find_cuda().require()
    machine = replace(H200, name=gpus[0].name, links=()).with_limits(dict(gpus[0].limits))
    expect_tasks(2 + len(SHAPES))
    machine = _computing(machine)
    yield f"{machine.name}: {machine.flops / 1e12:.0f} TFLOP/s, {machine.memory / 1e12:.2f} TB/s"
    for ranks in (ranks for ranks in GROUPS if ranks <= len(gpus)):
        for link in links(machine, ranks):
            yield f"{link.by} among {ranks}: {', '.join(f'{size / MB:g} MiB {seconds * 1e6:.1f} us' for size, seconds in link.points)}"
            machine = replace(machine, links=(*machine.links, link))
    known = {link.by for link in machine.links}
    machine = replace(machine, links=(*machine.links, *(link for link in H200.links if link.by not in known)))
    yield f"stored in {figures.save(machine, gpus)}"


def _computing(machine: Machine) -> Machine:
    """The machine with measured constants of a single GPU."""
    launch = seconds_of(_negated(), {"M": 1, "K": 128})
    copied = 256 * MB
    memory = 2 * copied / (seconds_of(_negated(), {"M": copied // 2 // COLUMNS, "K": COLUMNS}) - launch)
    matmul = hw.fusion(mesh=hw.Mesh(), x=hw.bf16["M", "K"], w=hw.bf16["K", "N"])(lambda x, w: hw.matmul(x, w))
    times = [seconds_of(matmul, dict(zip("MKN", shape, strict=True))) - launch for shape in SHAPES]
    return fit(replace(machine, launch=launch, memory=memory), times)


def fit(machine: Machine, times: list[float]) -> Machine:
    """The machine whose rate and time per wave fit the measured times of SHAPES best."""
    fastest = max(2 * m * k * n / time for (m, k, n), time in zip(SHAPES, times, strict=True))

    def error(flops: float, wave: float) -> float:
        at = replace(machine, flops=flops, wave=wave)
        predicted = (Product(1, m, k, n, hw.bf16).seconds(at) for m, k, n in SHAPES)
        return sum((a / b - 1) ** 2 for a, b in zip(predicted, times, strict=True))

    flops, wave = min(product((fastest * i / 100 for i in range(95, 131)), (i * 0.2e-6 for i in range(51))), key=lambda pair: error(*pair))
    return replace(machine, flops=flops, wave=wave)


def _negated() -> Fusion:
    return hw.fusion(mesh=hw.Mesh(), x=hw.bf16["M", "K"])(lambda x: -x)


def links(machine: Machine, ranks: int) -> Iterator[Link]:
    """Measures an all-gather and, if possible, a put and a get, for each of SHARDS. Puts and gets are measured in loops with a matmul. The
    weight has only 8 columns, so that the matmul takes only as long as a read of its left operand."""
    can_put = not why_no_puts(ranks)
    expect_tasks(len(SHARDS) * (3 if can_put else 1))
    mesh = hw.Mesh(x=ranks)
    x, w = hw.bf16["M@x", "K"], hw.bf16["K", "N"]
    gather = hw.fusion(mesh=mesh, x=x)(lambda x: hw.reshard(x, "M", "K"))
    put = hw.fusion(mesh=mesh, x=x, w=w)(lambda x, w: hw.matmul(x, w).stream("M", chunks=ranks, algorithm="put"))
    get = hw.fusion(mesh=mesh, x=x, w=w)(lambda x, w: hw.matmul(-x, w).stream("M", chunks=ranks, algorithm="put"))

    def rows(shard: int) -> int:
        return max(1, shard // 2 // COLUMNS) * ranks

    times = [seconds_of(gather, {"M": rows(shard), "K": COLUMNS}) for shard in SHARDS]
    if times[0] > BUSY:
        why = f"a gather of {SHARDS[0]} bytes among {ranks} GPUs takes {times[0] * 1e6:.0f} us, so another program uses them"
        raise ExecutionError(f"calibrate: {why}; run it again when they are idle")
    yield Link("collective", ranks, tuple(zip([shard * (ranks - 1) for shard in SHARDS], accumulate(times, max), strict=True)))
    if not can_put:
        return
    for by, fusion in (("put", put), ("get", get)):
        times = []
        for shard in SHARDS:
            spent = LOOP_SECONDS + (machine.launch + 2 * shard / machine.memory if by == "get" else 0.0) + shard / machine.memory
            taken = seconds_of(fusion, {"M": rows(shard), "K": COLUMNS, "N": 8})
            times.append(max(taken - spent, machine.launch) / (ranks - 1))
        yield Link(by, ranks, tuple(zip(SHARDS, accumulate(times, max), strict=True)))  # more bytes never take less time


def seconds_of(fusion: Fusion, sizes: dict[str, int]) -> float:
    """Median seconds of a call on its slowest rank."""
    from hostweave.runtime.search import random_array

    program = hw.compile(fusion, target="cuda", options=hw.Options(overlap="off", check=False))
    try:
        arrays = {value.name: random_array(value.type, sizes) for value in fusion.arguments}
        per_rank = program.measure(warmups=3, repetitions=9, **arrays)
        task_done(f"{fusion.mesh}, {', '.join(f'{name}={size}' for name, size in sizes.items())}")
        slowest = [max(time.total_ms for time in call) for call in zip(*per_rank, strict=True)]
        return float(statistics.median(slowest)) / 1e3
    finally:
        program.close()
