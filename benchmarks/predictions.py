"""Compares predicted with measured times of gathers and reduce-scatters with matmuls, sharded weights, a layer, decoding and experts.

`predictions.py predict` writes predicted.json, without a GPU, from the figures of H100 and H200 in the package. Without `predict`, the
script runs the programs of the benchmarks `overlap`, `fsdp`, `sequence_parallel`, `decode` and `moe`, as the cost model chooses. Programs
run on two GPUs, except cases of one GPU in `decode` and `moe`. The programs of `overlap` and `fsdp` also run sequentially. The script
prints the error of each prediction. Times are milliseconds of the slowest rank, as medians over calls with random data. All ranks start a
call together. Arguments are names of parts; default: all.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import decode
import fsdp
import moe
import overlap
import sequence_parallel
from peers.report import print_machine

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.types.machine import SHIPPED, Machine, shipped

PREDICTED = Path(__file__).with_name("predicted.json")
RANKS, WARMUPS, REPETITIONS = 2, 3, 15
LIMIT = 0.1  # largest allowed error, as a fraction of the measured time

Sizes = dict[str, int]
Row = tuple[str, Callable[[Machine], hw.Program], Sizes]


def main(words: Sequence[str]) -> None:
    parts = {"overlap": _overlap, "fsdp": _fsdp, "sequence_parallel": _layers, "decode": _decoding, "moe": _experts}
    chosen = [name for name in parts if name in words] or list(parts)
    if "predict" in words:
        rows = {name: {gpu: _predictions(parts[name](), machine) for gpu, machine in SHIPPED.items()} for name in parts}
        PREDICTED.write_text(json.dumps(rows, indent=1) + "\n")
        return
    print_machine()
    predicted = json.loads(PREDICTED.read_text())
    machine = shipped(gpus()[0].name)
    for name in chosen:
        rows = list(parts[name]())
        programs = [make(machine) for _, make, _ in rows]
        with ThreadPoolExecutor() as pool:
            list(pool.map(hw.Program.build, programs))
        for (row, _, sizes), program in zip(rows, programs, strict=True):
            expected, measured = predicted[name][machine.name][row], _measured(program, sizes)
            program.close()
            error = expected / measured - 1
            missed = "  MISSED" if abs(error) > LIMIT else ""
            print(f"{name}, {row}: predicted {expected:.3f} ms, measured {measured:.3f} ms, {error:+.1%}{missed}", flush=True)


def _predictions(rows: Iterator[Row], machine: Machine) -> dict[str, float]:
    return {row: round(make(machine).predict(sizes, machine=machine).predicted.micros / 1e3, 4) for row, make, sizes in rows}


def _measured(program: hw.Program, sizes: Sizes) -> float:
    import torch

    def random(value: Any) -> Any:
        shape, dtype = [size.bind(sizes) for size in value.type.shape], value.type.dtype
        if dtype is hw.i64:  # Only the indices of the experts of each token are i64.
            return torch.rand(*shape[:-1], moe.EXPERTS, device="cuda:0").argsort(-1)[..., : shape[-1]].contiguous()
        return (torch.randn(shape, device="cuda:0") / 64).to(getattr(torch, {"bf16": "bfloat16", "f32": "float32"}[str(dtype)]))

    arrays = {value.name: random(value) for value in program.host.arguments}
    per_rank = program.measure(warmups=WARMUPS, repetitions=REPETITIONS, **arrays)
    return statistics.median(max(time.total_ms for time in call) for call in zip(*per_rank, strict=True))


# --- rows -------------------------------------------------------------------------------------------------------------


def _overlap() -> Iterator[Row]:
    for case in overlap.CASES:
        sizes = {"M": case.M, "K": case.K if case.kind == "ag" else case.K * RANKS, "N": case.N}
        for how in ("auto", "off"):
            yield (
                f"{case}, {'as chosen' if how == 'auto' else 'in sequence'}",
                lambda machine, case=case, how=how: overlap.chosen(case, RANKS, machine=machine, overlap=how),
                sizes,
            )


def _fsdp() -> Iterator[Row]:
    for layout in ("rows", "columns", "rows of transposes"):
        for how in ("auto", "off"):
            yield (
                f"by {layout}, {'as chosen' if how == 'auto' else 'in sequence'}",
                lambda machine, layout=layout, how=how: fsdp.compiled_for(RANKS, layout, machine=machine, overlap=how),
                {"M": fsdp.ROWS * RANKS},
            )


def _layers() -> Iterator[Row]:
    for tokens in sequence_parallel.GOALS:
        sizes = sequence_parallel.sizes_of(tokens)
        yield (
            f"{tokens} tokens",
            lambda machine, sizes=sizes: hw.compile(
                sequence_parallel.fusion_of(RANKS), target="cuda", options=hw.Options(sizes=sizes, machine=machine)
            ),
            sizes,
        )


def _decoding() -> Iterator[Row]:
    for case, ranks in ((decode.ALONE, 1), (decode.TOGETHER, RANKS)):
        for tokens in decode.TOKENS:
            yield (
                f"{case.name}, {tokens} tokens, {ranks} GPUs",
                lambda machine, case=case, ranks=ranks: decode.program_of(case, ranks, machine=machine, graph="auto"),
                {"T": tokens},
            )


def _experts() -> Iterator[Row]:
    for tokens in (128, 4096):
        yield (
            f"dispatch and combine, {tokens} tokens a GPU",
            lambda machine, sizes={"T": tokens * RANKS}: hw.compile(
                moe.dispatched_and_combined(RANKS), target="cuda", options=hw.Options(machine=machine, sizes=sizes)
            ),
            {"T": tokens * RANKS},
        )
    sizes = {"T": moe.LAYER["tokens"], "H": moe.LAYER["hidden"], "I": moe.LAYER["inner"]}
    for what, name in (("forward", "moe"), ("forward and backward", "moe_training")):
        yield f"a Mixtral layer, {what}, 1 GPU", lambda machine, name=name: moe.layer_of(name, machine=machine), sizes


if __name__ == "__main__":
    main(sys.argv[1:])
