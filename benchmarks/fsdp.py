"""Eight layers with weights sharded over all GPUs (FSDP): the fraction of the gathers' time that matmuls hide.

Each layer is x + swiglu(x) on a sharded batch. Three weights of 4096 x 8192 or 8192 x 4096 are gathered before use. The number of rows is
chosen so that a matmul takes about 1.1 times as long as the gather of its weight. Printed times are milliseconds of the slowest rank, as
medians over calls. All ranks start a call together. One program has only the gathers, one has only the layers with replicated weights, and
one has gathers and layers. The last program has several variants: sequential, the compiler's choice, and asynchronous gathers by NCCL
kernels or by copy engines. Weights are sharded by rows, by columns, or by rows of their transposes, which PyTorch linear layers store. If
weights are sharded by columns or by rows of transposes, matmuls can process one shard after another. With `calls`, a layer is a function,
and each call gathers the weights of the next call. Data is random, in bf16. One thread per GPU.
"""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from peers.report import print_machine, spread

import hostweave as hw
from hostweave.base.errors import HostweaveError
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.programs import load_file

LAYERS, HIDDEN, INNER, ROWS = 8, 4096, 8192, 1408  # ROWS is per rank
ROUNDS, REPETITIONS = 3, 5


def main() -> None:
    print_machine()
    ranks = len(gpus())
    programs = {"gathers": compiled_for(ranks, "rows", multiplies=False), "layers": compiled_for(ranks, "")}
    for layout in ("rows", "columns", "rows of transposes"):
        programs[f"by {layout}, in sequence"] = compiled_for(ranks, layout, overlap="off")
        programs[f"by {layout}, as chosen"] = chosen = compiled_for(ranks, layout)
        for name, chunks in (("NCCL's kernels", 0), ("copy engines", 1), ("copy engines, shard by shard", ranks)):
            if stated := {choice.name: one.name for choice in chosen.choices for one in choice.alternatives if one.chunks == chunks}:
                programs[f"by {layout}, by {name}"] = compiled_for(ranks, layout, choices=stated)
    programs["by rows, calls, in sequence"] = compiled_for(ranks, "rows", is_called=True, overlap="off")
    programs["by rows, calls, as chosen"] = compiled_for(ranks, "rows", is_called=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hw.Program.build, programs.values()))
    times: dict[str, list[float]] = {name: [] for name in programs}
    x, weights = _arrays(ranks)
    turned = {name: w.T.contiguous() for name, w in weights.items()}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            try:
                given = turned if "transposes" in name else weights
                per_rank = program.measure(warmups=2, repetitions=REPETITIONS, x=x, **given)
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
            print(f"  {name}: {spread(times[name])} ms, {hidden:.2f} of the communication is hidden", flush=True)


def compiled_for(ranks: int, layout: str, multiplies: bool = True, is_called: bool = False, **options: Any) -> hw.Program:
    """Program of the layers. `layout` is "rows", "columns" or "rows of transposes" for sharded weights, and "" for replicated weights. If
    not `multiplies`, the program has only the gathers. If `is_called`, a layer is a function."""
    swiglu = load_file(EXAMPLES / "transformer.py").swiglu

    def model(x: hw.Tensor, **weights: hw.Tensor) -> tuple[hw.Tensor, ...] | hw.Tensor:
        if not multiplies:
            return tuple(hw.reshard(weights[name], *shape) for name, shape in shapes.items())
        for i in range(LAYERS):
            x = (called if is_called else layer)(x, *(weights[f"{name}_{i}"] for name in ("wg", "wu", "wd")))
        return x

    def layer(x: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
        whole = [hw.reshard(w, *shapes[f"{name}_0"]) for name, w in (("wg", wg), ("wu", wu), ("wd", wd))]
        return x + swiglu(x, *((each.T for each in whole) if is_turned else whole))

    is_turned = layout == "rows of transposes"
    shapes = {name: shape[::-1] if is_turned else shape for name, shape in _shapes().items()}
    split = {"": ("", ""), "columns": ("", "@dp")}.get(layout, ("@dp", ""))
    types = {name: hw.bf16[f"{rows}{split[0]}", f"{columns}{split[1]}"] for name, (rows, columns) in shapes.items()}
    called = hw.block(x=hw.bf16["M@dp", HIDDEN], **{name: types[f"{name}_0"] for name in ("wg", "wu", "wd")})(layer)
    fusion = hw.fusion(mesh=hw.Mesh(dp=ranks), x=hw.bf16["M@dp", HIDDEN], **types)(model)
    return hw.compile(fusion, target="cuda", options=hw.Options(sizes={"M": ROWS * ranks}, **options))


def _shapes() -> dict[str, tuple[int, int]]:
    of_layer = {"wg": (HIDDEN, INNER), "wu": (HIDDEN, INNER), "wd": (INNER, HIDDEN)}
    return {f"{name}_{i}": shape for i in range(LAYERS) for name, shape in of_layer.items()}


def _arrays(ranks: int) -> tuple[Any, dict[str, Any]]:
    import torch

    def random(shape: tuple[int, int]) -> Any:
        return torch.randn(shape, device="cuda:0", dtype=torch.bfloat16) / 64

    return random((ROWS * ranks, HIDDEN)), {name: random(shape) for name, shape in _shapes().items()}


if __name__ == "__main__":
    main()
