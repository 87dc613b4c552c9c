"""Host time of a generated program over that of the same calls written by hand, on one GPU, call by call in turn."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import hostweave as hw
from hostweave.base.paths import BENCHMARKS, EXAMPLES
from hostweave.cli.programs import load_file, programs_in

CHUNKS = 48
SIZES = {"M": 96 * CHUNKS, "N": 256, "K": 256}
LIMIT = 1.10


def main() -> None:
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
