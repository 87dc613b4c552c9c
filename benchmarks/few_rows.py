"""Matmuls of 1 to 8 rows on one GPU, compared with a device copy of the weights, and with torch in a CUDA graph.

A captured call has several matmuls of one operand with different weights. All weights together exceed the cache of the GPU. torch's graph
has the same matmuls. The captured call, torch's graph and a copy are timed alternately. The benchmark prints the bandwidth of reading the
weights as a fraction of the bandwidth of a copy. The bytes of a copy are its reads plus its writes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from peers.report import print_machine, spread
from peers.torch_graphs import in_a_graph

import hostweave as hw

COLD_BYTES = 512 << 20  # bytes of weights; many times the cache of a GPU
TIMINGS = 15
WARMUPS = 3
WAIT = 200_000  # cycles that the GPU spins while the host launches the graph
SHARE = 0.85  # smallest allowed fraction of the bandwidth of a copy, if a weight has at least LARGE bytes
LARGE = 58_000_000
ROWS = (1, 2, 4, 8)
SHAPES = {"70B at TP8, gate": (8192, 3584), "70B at TP8, down": (3584, 8192), "8B, gate": (4096, 14336), "8B, down": (14336, 4096)}
TOLERANCE = 0.02  # relative to the largest element; both implementations round to bf16


def main() -> None:
    print_machine()
    import torch

    hw.init()
    with torch.no_grad():
        for name, (depth, columns) in SHAPES.items():
            for is_gated in (False, True) if "gate" in name else (False,):
                for rows in ROWS:
                    _compare(name + (" and up" if is_gated else ""), rows, depth, columns, is_gated)


def _compare(name: str, rows: int, depth: int, columns: int, is_gated: bool) -> None:
    import torch

    size, each = 2 * depth * columns, 2 if is_gated else 1
    count = max(2, COLD_BYTES // (size * each))
    x = torch.randn(rows, depth, device="cuda").bfloat16()
    weights = [(torch.randn(depth, columns, device="cuda") * depth**-0.5).bfloat16() for _ in range(count * each)]
    groups = [tuple(weights[i : i + each]) for i in range(0, len(weights), each)]
    program = program_of(count, depth, columns, is_gated)
    calls = {
        "ours": program.capture(x, *weights),
        "torch": in_a_graph(lambda: [_product(torch.nn.functional, x, *group) for group in groups]),
        "copy": in_a_graph(lambda: [a.copy_(b) for a, b in zip(weights[0::2], weights[1::2], strict=False)]),
    }
    for ours, theirs in zip(calls["ours"](), calls["torch"](), strict=True):
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        assert error <= TOLERANCE, f"{name}, {rows} rows: {error}"
    timed = _timed(calls)
    us = {way: statistics.median(each) for way, each in timed.items()}
    read = size * len(weights)
    rate = {way: (read if way != "copy" else 2 * size * (len(weights) // 2)) / time / 1e6 for way, time in us.items()}
    share = rate["ours"] / rate["copy"]
    verdict = "" if size < LARGE or share >= SHARE else f", below {SHARE}"
    print(
        f"{name}, {rows} rows, {size * each / 1e6:.0f} MB: {spread(timed['ours'], 1, count)} us, {rate['ours']:.2f} TB/s,"
        f" {share:.2f} of a copy's {rate['copy']:.2f}{verdict}; {us['torch'] / us['ours']:.2f} times as fast as torch in a graph",
        flush=True,
    )
    program.close()


def _product(ops: Any, x: Any, *weights: Any) -> Any:
    gate, *up = (x @ w for w in weights)
    return ops.silu(gate) * up[0] if up else gate


def program_of(count: int, depth: int, columns: int, is_gated: bool) -> hw.Program:
    """Program of `count` products of the same rows with different weights."""
    each = 2 if is_gated else 1
    types = {f"w_{i}": hw.bf16[depth, columns] for i in range(count * each)}

    @hw.fusion(x=hw.bf16["T", depth], **types)
    def products(x: hw.Tensor, **weights: hw.Tensor) -> tuple[hw.Tensor, ...]:
        w = list(weights.values())
        return tuple(_product(hw, x, *w[i : i + each]) for i in range(0, len(w), each))

    return hw.compile(products, target="cuda")


def _timed(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Microseconds per call, from alternating measurements."""
    import torch

    times: dict[str, list[float]] = {name: [] for name in calls}
    for timing in range(WARMUPS + TIMINGS):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(WAIT)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if timing >= WARMUPS:
                times[name].append(begin.elapsed_time(end) * 1e3)
    return times


if __name__ == "__main__":
    main()
