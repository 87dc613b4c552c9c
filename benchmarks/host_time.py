"""Host time of calls, in turn: with bound weights over the same weights passed, and, on one GPU, of a generated program over the
same calls written by hand."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import hostweave as hw
from hostweave.base.paths import BENCHMARKS, EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.programs import load_file, programs_in

CHUNKS = 48
SIZES = {"M": 96 * CHUNKS, "N": 256, "K": 256}
LIMIT = 1.10
WEIGHTS = 289  # of Llama 8B


def main() -> None:
    _bound_weights("cpu")
    if gpus():
        _bound_weights("cuda")
        _by_hand_and_generated()


def _bound_weights(target: str) -> None:
    """A call whose work is one addition, so that what it costs is to take its inputs."""
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
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(200):
        for name, call in calls.items():
            wait()
            begin = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - begin) * 1e6)
    medians = {name: statistics.median(us[20:]) for name, us in times.items()}
    ratios = ", ".join(f"{name} {us:.0f} us ({us / medians['bound']:.1f} times bound)" for name, us in medians.items())
    print(f"a call with {WEIGHTS} weights, {target}, host time: {ratios}", flush=True)


def _by_hand_and_generated() -> None:
    fusions = programs_in(load_file(EXAMPLES / "single_device.py", {"S": CHUNKS}))
    for name, instructions in (("matmul_m", CHUNKS), ("set", CHUNKS)):
        generated = hw.compile(fusions[name], target="cuda")
        by_hand = _by_hand(generated, fusions[name])
        arrays = {
            parameter.name: np.ones([extent.bind(SIZES) for extent in parameter.type.shape], ml_dtypes.bfloat16)
            for parameter in fusions[name].inputs
        }
        times = {"generated": _host_us(generated, arrays), "by hand": _host_us(by_hand, arrays)}
        rounds = [(_host_us(generated, arrays), _host_us(by_hand, arrays)) for _ in range(9)]
        ratio = statistics.median(ours / theirs for ours, theirs in rounds)
        per = ", ".join(f"{which} {us / instructions:.2f}" for which, us in times.items())
        print(f"{name:10} us of host time an instruction: {per}; ratio {ratio:.3f} (limit {LIMIT})")


def _by_hand(generated: Any, fusion: Any) -> Any:
    """The same program with the hand-written files in place of the generated ones."""
    folder = Path(tempfile.mkdtemp())
    try:
        (folder / generated.name).mkdir()
        for path, text in generated.sources.items():
            (folder / generated.name / path).write_text(text)
        (folder / generated.name / "host_ir.txt").write_text(generated.host_ir)
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
    main()
