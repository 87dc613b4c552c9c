"""Host time of calls. Most variants of a case are measured alternately.

The cases are: bound weights compared with passed weights; Llama 8B on one GPU, as calls and as a CUDA graph; calls with varying sizes,
whose times include the GPU; and generated programs compared with the same calls written by hand. Without a GPU, only the first case runs,
on the CPU. `host_time.py hand` runs only the last case, which needs a GPU.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from peers.report import print_machine, spread

import hostweave as hw
from hostweave.base.paths import BENCHMARKS, EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.programs import load_file, programs_in

CHUNKS = 48
SIZES = {"M": 96 * CHUNKS, "N": 256, "K": 256}
LIMIT = 1.10
WEIGHTS = 289  # weights of Llama 8B without the embedding and lm_head
STEP = {"B": 1, "L": 4096}  # sizes for the decode step
SERVED_CALLS, SERVED_SIZES = 10_000, 2_000


def main(hand_only: bool = False) -> None:
    print_machine()
    if hand_only:
        _by_hand_and_generated()
        return
    _bound_weights("cpu")
    if gpus():
        _bound_weights("cuda")
        _llama()
        _varying_sizes()
        _by_hand_and_generated()


def _bound_weights(target: str) -> None:
    """Calls of a program with one addition and many inputs. The inputs take most of the host time."""
    weights = {f"w_{i}": hw.f32[16] for i in range(WEIGHTS)}

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32[16], **weights)
    def model(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        return x + weights["w_0"]

    hw.init()
    program = hw.compile(model, target=target)
    if target == "cuda":
        import torch

        x, *values = torch.ones(WEIGHTS + 1, 16, device="cuda")
        wait = torch.cuda.synchronize
    else:
        x, *values = np.ones((WEIGHTS + 1, 16), np.float32)
        wait = int
    arrays = dict(zip(weights, values, strict=True))
    bound, out = program.bind(**arrays), values[0] * 0
    calls: dict[str, Callable[[], Any]] = {
        "by name": lambda: program(x, out=out, **arrays),
        "by position": lambda: program(x, *values, out=out),
        "bound": lambda: bound(x, out=out),
    }
    medians = _medians(calls, wait)
    ratios = ", ".join(f"{name} {us:.0f} us ({us / medians['bound']:.1f} times as long as bound)" for name, us in medians.items())
    print(f"a call with {WEIGHTS} weights, {target}, host time: {ratios}", flush=True)


def _llama() -> None:
    """Times of a decode step of all layers of Llama 8B.

    The baseline is the generated C++ function `enqueue` without Python. Library calls take most of its time.
    """
    import torch

    example = load_file(EXAMPLES / "llama.py")
    fusion = example.program(example.Config(), 1, decode=True)
    dtypes = {hw.bf16: torch.bfloat16, hw.f32: torch.float32, hw.i32: torch.int32}
    arrays = {
        v.name: torch.zeros([size.bind(STEP) for size in v.type.shape], dtype=dtypes[v.type.dtype], device="cuda") for v in fusion.arguments
    }
    updated = [arrays.pop(name) for name in list(arrays) if name.startswith(("ids", "position", "keys_", "values_"))]
    programs = [hw.compile(fusion, target="cuda", options=hw.Options(graph=graph)) for graph in (None, "auto")]
    model, replaying = (program.bind(**arrays) for program in programs)
    out = (None, torch.zeros(1, 1, 128256, dtype=torch.bfloat16, device="cuda"), None, *[None] * (len(updated) - 2))
    calls: dict[str, Callable[[], Any]] = {
        "captured": model.capture(*updated, out=out),
        "graph=auto": lambda: replaying(*updated, out=out),
        "uncaptured": lambda: model(*updated, out=out),
    }
    medians = _medians(calls, torch.cuda.synchronize)
    timings = model.measure(*updated, warmups=20, repetitions=100)[0]
    medians["generated run"] = statistics.median(timing.enqueue_us for timing in timings)
    times = ", ".join(f"{name} {us:.0f} us" for name, us in medians.items())
    ratio = medians["uncaptured"] / medians["generated run"]
    print(f"Llama 8B, {len(arrays)} inputs bound, host time: {times}; uncaptured / generated run = {ratio:.3f}", flush=True)
    for program in programs:
        program.close()


def _varying_sizes() -> None:
    """Times of calls with varying sizes. A wait follows each call, as in a server. A call is compared with other calls of the same size.
    Also prints the growth of memory."""
    import torch

    swiglu = load_file(EXAMPLES / "transformer.py").swiglu
    columns, rows = hw.bf16[4096, 14336], hw.bf16[14336, 4096]

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.bf16["T", 4096], n=hw.bf16[4096], wg=columns, wu=columns, wd=rows)
    def mlp(x: hw.Tensor, n: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
        return x + swiglu(hw.rms_norm(x, n), wg, wu, wd)

    x, *weights = (
        torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((SERVED_SIZES, 4096), (4096,), (4096, 14336), (4096, 14336), (14336, 4096))
    )
    program = hw.compile(mlp, target="cuda")
    model, out = program.bind(**dict(zip(("n", "wg", "wu", "wd"), weights, strict=True))), torch.empty_like(x)
    begin = time.perf_counter()
    model.prepare(*({"T": rows} for rows in range(1, SERVED_SIZES + 1)))
    prepared = time.perf_counter() - begin
    order = [int(i) % SERVED_SIZES + 1 for i in np.random.default_rng(0).permutation(SERVED_CALLS)]
    times: dict[int, list[float]] = {rows: [] for rows in order}

    def serve() -> None:
        for rows in order:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model(x[:rows], out=out[:rows])
            torch.cuda.synchronize()
            times[rows].append((time.perf_counter() - begin) * 1e6)

    for rows in order[:SERVED_SIZES]:
        model(x[:rows], out=out[:rows])
    gc.collect()
    gc.freeze()  # A server also freezes objects, because a garbage collection of all PyTorch objects takes 70 ms.
    before = torch.cuda.mem_get_info()[0], _resident_bytes()
    serve()
    gc.unfreeze()
    grown = [
        (now - then) / 2**20 for now, then in zip((-torch.cuda.mem_get_info()[0], _resident_bytes()), (-before[0], before[1]), strict=True)
    ]
    worst = max(us / statistics.median(of_size) for of_size in times.values() for us in of_size)
    usual = statistics.median(us for of_size in times.values() for us in of_size)
    print(
        f"MLP of Llama 8B, {SERVED_CALLS} calls of {SERVED_SIZES} sizes, prepared in {prepared:.1f} s: {usual:.0f} us in the median, "
        f"the slowest {worst:.2f} times the median of its size; memory grew by {grown[0]:.1f} MiB on the GPU, {grown[1]:.1f} on the host",
        flush=True,
    )
    program.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _medians(calls: dict[str, Callable[[], Any]], wait: Callable[[], Any], repetitions: int = 200) -> dict[str, float]:
    """Median host microseconds of calls that alternate on an idle device. The first tenth of the calls does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: statistics.median(us[repetitions // 10 :]) for name, us in times.items()}


def _by_hand_and_generated() -> None:
    fusions = programs_in(load_file(EXAMPLES / "single_device.py", {"S": CHUNKS}))
    for name, instructions in (("matmul_m", CHUNKS), ("set", CHUNKS)):
        generated = hw.compile(fusions[name], target="cuda")
        by_hand = _by_hand(generated, fusions[name])
        arrays = {
            parameter.name: np.ones([extent.bind(SIZES) for extent in parameter.type.shape], ml_dtypes.bfloat16)
            for parameter in fusions[name].inputs
        }
        _ = _host_us(generated, arrays), _host_us(by_hand, arrays)
        rounds = [(_host_us(generated, arrays), _host_us(by_hand, arrays)) for _ in range(9)]
        ours, theirs = (spread(times, 2, instructions) for times in zip(*rounds, strict=True))
        ratio = spread([ours / theirs for ours, theirs in rounds])
        print(f"{name:10} us of host time an instruction: generated {ours}, by hand {theirs}; ratio {ratio} (limit {LIMIT})", flush=True)


def _by_hand(generated: Any, fusion: Any) -> Any:
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / generated.name).mkdir()
        for path, text in generated.sources.items():
            (folder / generated.name / path).write_text(text)
        for path in (BENCHMARKS / "handwritten" / generated.name).iterdir():
            shutil.copy(path, folder / generated.name)
        os.environ["HOSTWEAVE_EDIT"] = str(folder)
        program = hw.compile(fusion, target="cuda")
        program.build()
        return program
    finally:
        os.environ.pop("HOSTWEAVE_EDIT", None)
        shutil.rmtree(folder)


def _host_us(program: Any, arrays: dict[str, Any]) -> float:
    times = program.measure(warmups=5, repetitions=30, **arrays)
    return statistics.median(t.enqueue_us for t in times[0])


if __name__ == "__main__":
    main("hand" in sys.argv[1:])
