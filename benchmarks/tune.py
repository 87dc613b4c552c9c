"""Matmuls with tuned algorithms, `Options(tune=True)`, compared with cuBLASLt's first recommendation, alternately on one GPU.

A call has several matmuls of one operand with different weights. The weights exceed the cache of the GPU, like the weights of a model.
"""

from __future__ import annotations

import statistics

from peers.report import print_machine, spread

import hostweave as hw

COLD_BYTES = 256 << 20  # maximum bytes of all weights of a call
ROUNDS, REPETITIONS = 3, 10
ROWS = (16, 64, 128, 512, 2048)
SHAPES = {"8B, gate": (4096, 14336), "8B, down": (14336, 4096), "70B at TP8, gate": (8192, 3584), "70B at TP8, down": (3584, 8192)}


def main() -> None:
    print_machine()
    for rows in ROWS:
        for name, (depth, columns) in SHAPES.items():
            _compare(name, rows, depth, columns)


def program_of(depth: int, types: dict[str, hw.TensorType], tune: bool) -> hw.Program:
    @hw.fusion(x=hw.bf16["T", depth], **types)
    def products(x: hw.Tensor, **weights: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return tuple(hw.silu(x @ w) for w in weights.values())

    return hw.compile(products, target="cuda", options=hw.Options(tune=tune))


def _compare(name: str, rows: int, depth: int, columns: int) -> None:
    import torch

    count = max(2, COLD_BYTES // (2 * depth * columns))
    types = {f"w_{i}": hw.bf16[depth, columns] for i in range(count)}
    arrays = {"x": torch.randn(rows, depth, device="cuda").bfloat16()}
    arrays |= {w: (torch.randn(depth, columns, device="cuda") * depth**-0.5).bfloat16() for w in types}

    programs = {tune: program_of(depth, types, tune) for tune in (False, True)}
    times: dict[bool, list[float]] = {tune: [] for tune in programs}
    for _ in range(ROUNDS):
        for tune, program in programs.items():
            times[tune] += [timing.total_ms for timing in program.measure(**arrays, warmups=2, repetitions=REPETITIONS)[0]]
    ratio = statistics.median(times[False]) / statistics.median(times[True])
    first, tuned = (spread(times[tune], 1, count / 1e3) for tune in programs)
    print(f"{name}, {rows} rows: recommended {first} us, measured {tuned} us, {ratio:.2f} times as fast", flush=True)
    for program in programs.values():
        program.close()


if __name__ == "__main__":
    main()
