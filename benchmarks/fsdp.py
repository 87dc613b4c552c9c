"""Eight layers whose weights are sharded over all GPUs (FSDP): how much of the gathers of weights is hidden behind the matmuls.

Each layer is x + swiglu(x), of a batch that is sharded and of three weights of 4096 x 8192 that are gathered where they are used, for so
many rows that a matmul takes about 1.1 times its gather. Milliseconds of the slowest rank, the median over calls that all ranks begin
together: the gathers alone, the layers with weights that every GPU has, and both, in sequence, as the compiler chooses, and with
gathers beside by NCCL's kernels and by copy engines. Random bf16 data, a thread a GPU. Copy engines want NCCL 2.29 or later
(`NCCL_HOME` names another one).
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import hostweave as hw
from hostweave.base.errors import HostweaveError
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.programs import load_file
from hostweave.fusion_ir.choice import IN_SEQUENCE

LAYERS, HIDDEN, INNER, ROWS = 8, 4096, 8192, 1408  # rows of one rank
ROUNDS, REPETITIONS = 3, 5


def main() -> None:
    ranks = len(gpus())
    chosen = _compiled(ranks, is_sharded=True)
    programs = {
        "gathers": _compiled(ranks, is_sharded=True, multiplies=False),
        "layers": _compiled(ranks, is_sharded=False),
        "in sequence": _compiled(ranks, is_sharded=True, overlap="off"),
        "as chosen": chosen,
    }
    for name, is_none in (("by kernels", True), ("by copy engines", False)):
        stated = {choice.name: way.name for choice in chosen.choices for way in choice.ways if (way.algorithm == IN_SEQUENCE) == is_none}
        programs[name] = _compiled(ranks, is_sharded=True, ways=stated)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hw.Program.build, programs.values()))
    times: dict[str, list[float]] = {name: [] for name in programs}
    arrays = _arrays(ranks)
    for _ in range(ROUNDS):
        for name, program in programs.items():
            try:
                per_rank = program.measure(warmups=2, repetitions=REPETITIONS, **arrays)
            except HostweaveError as why:
                print(f"{name}: not here: {why}", flush=True)
                continue
            times[name].extend(max(t.total_ms for t in call) for call in zip(*per_rank, strict=True))
    medians = {name: statistics.median(ms) for name, ms in times.items() if ms}
    gathers, layers = medians["gathers"], medians["layers"]
    print(f"{ranks} x {gpus()[0].name}: gathers alone {gathers:.3f} ms, layers alone {layers:.3f} ms, {layers / gathers:.2f} x the gathers")
    for name in list(programs)[2:]:
        if name in medians:
            hidden = 1 - (medians[name] - layers) / gathers
            print(f"  {name}: {medians[name]:.3f} ms, {hidden:.2f} of the communication is hidden", flush=True)


def _compiled(ranks: int, is_sharded: bool, multiplies: bool = True, **options: Any) -> hw.Program:
    swiglu = load_file(EXAMPLES / "transformer.py").swiglu

    def model(x: hw.Tensor, **weights: hw.Tensor) -> tuple[hw.Tensor, ...] | hw.Tensor:
        if not multiplies:
            return tuple(hw.reshard(weights[name], *shape) for name, shape in shapes.items())
        for i in range(LAYERS):
            own = [f"{name}_{i}" for name in ("wg", "wu", "wd")]
            x = x + swiglu(x, *(hw.reshard(weights[name], *shapes[name]) for name in own))
        return x

    shapes = _shapes()
    types = {name: hw.bf16[f"{rows}@dp" if is_sharded else rows, columns] for name, (rows, columns) in shapes.items()}
    fusion = hw.fusion(mesh=hw.Mesh(dp=ranks), x=hw.bf16["M@dp", HIDDEN], **types)(model)
    return hw.compile(fusion, target="cuda", options=hw.Options(sizes={"M": ROWS * ranks}, **options))


def _shapes() -> dict[str, tuple[int, int]]:
    of_layer = {"wg": (HIDDEN, INNER), "wu": (HIDDEN, INNER), "wd": (INNER, HIDDEN)}
    return {f"{name}_{i}": shape for i in range(LAYERS) for name, shape in of_layer.items()}


def _arrays(ranks: int) -> dict[str, torch.Tensor]:
    shapes = {"x": (ROWS * ranks, HIDDEN), **_shapes()}
    return {name: torch.randn(shape, device="cuda:0", dtype=torch.bfloat16) / 64 for name, shape in shapes.items()}


if __name__ == "__main__":
    main()
