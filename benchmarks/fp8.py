"""Products, an MLP and decoding in 8-bit floats, compared with torch, with Hostweave in bf16, or with both.

- products: one scaled matmul of 16 to 8192 rows, compared with torch._scaled_mm. Shapes are those of Llama 3: 70B at TP 8, per rank, and 8B
  on one GPU. Both matmuls are CUDA graphs.
- layer: the sequence-parallel MLP of 70B at per-rank shapes of TP 8, on all GPUs of this machine, with quantised weights. The peers are
  Hostweave in bf16, and torch.compile without and with asynchronous tensor parallelism.
- decode: 16 MLPs of 8B for few rows, on one GPU, with quantised weights, compared with Hostweave in bf16.

Data is random. One process per GPU runs all variants alternately. Printed times are milliseconds of the slowest rank, as medians over
calls. All ranks start a call together. Arguments are names of the list above; default: all. `layer` needs at least two GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

from peers import report
from peers.torch_graphs import in_a_graph
from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.build.cuda import gpus

REPETITIONS = 15
WAIT = 2_000_000  # cycles that a kernel spins before each call, to hide host time
ROWS = (16, 128, 1024, 2048, 8192)
# (inner dim, columns) of four products: q, k and v; o; gate and up; down.
SHAPES = {
    "70B at TP8": ((8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192)),
    "8B": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
}
SCALINGS = ("tensor", "row", "block")
HIDDEN, INNER = 8192, 3584  # dims of the layer; INNER is per rank
DECODED, OF_8B, BLOCKS = (1, 16, 64), (4096, 14336), 16
TOLERANCE = 0.02  # relative to the largest element; sums of thousands of terms are rounded to bf16
OURS, BF16 = "fp8", "bf16"

Calls = dict[str, Callable[[], Any]]


def main(names: Sequence[str]) -> None:
    parts = {"products": (_products, 1), "layer": (_layers, len(gpus())), "decode": (_decoded, 1)}
    for name, (calls, ranks) in parts.items():
        if name not in names and names:
            continue
        if name == "layer" and ranks < 2:
            print("layer: needs two GPUs")
            continue
        for times in times_on_ranks(calls, ranks, REPETITIONS, WAIT):
            ours = next(iter(times))  # The first call is that of Hostweave in 8-bit floats.
            print(f"{name}: {report.line(times, [ours])}", flush=True)


# --- products ---------------------------------------------------------------------------------------------------------


@cache
def product_of(scaling: str, k: int | str, n: int | str) -> hw.Program:
    """Program of one product. Block scales of `a` have torch's layout: the scales of adjacent rows are contiguous."""
    of_a, of_w = ((1, 1), (1, 1)) if scaling == "tensor" else ((1, "M"), (n, 1))
    if isinstance(k, int) and isinstance(n, int):
        of_a, of_w = (k // 128, "M"), (n // 128, k // 128)

    @hw.fusion(a=hw.f8e4m3["M", k], w=hw.f8e4m3[n, k], s=hw.f32[of_a], t=hw.f32[of_w])
    def product(a: hw.Tensor, w: hw.Tensor, s: hw.Tensor, t: hw.Tensor) -> hw.Tensor:
        return hw.scaled_matmul(a, w.T, s.T, t.T)

    return hw.compile(product, target="cuda")


def _products(rank: int, ranks: int) -> Iterator[Calls]:
    """Yields a call of Hostweave and a call of torch for every shape, kind of scales and number of rows that torch supports. Raises
    AssertionError if results differ."""
    import torch

    group = hw.init()
    for case, shapes in SHAPES.items():
        for (k, n), scaling, rows in product(shapes, SCALINGS, ROWS):
            program = product_of(scaling, *((k, n) if scaling == "block" else ("K", "N")))
            a, w = (torch.randn(size, k, device="cuda").to(torch.float8_e4m3fn) for size in (rows, n))
            of_a, of_w = {
                "tensor": ((1, 1), (1, 1)),
                "row": ((1, rows), (n, 1)),
                "block": ((k // 128, rows), (n // 128, k // 128)),
            }[scaling]
            s, t = (torch.rand(shape, device="cuda") for shape in (of_a, of_w))
            ours = program.capture(a, w, s, t, group=group)
            name = f"{case}, {rows} x {k} x {n}, {scaling}, {OURS}"
            try:
                of_torch = in_a_graph(_torch_product(scaling, a, w, s, t))
            except (RuntimeError, ValueError) as error:  # This version of torch, or this GPU, does not support the scaled matmul.
                print(f"{name}: torch._scaled_mm refuses it: {str(error).splitlines()[0]}")
                continue
            _expect_near(ours(), of_torch())
            yield {name: ours, "torch._scaled_mm": of_torch}


def _torch_product(scaling: str, a: Any, w: Any, s: Any, t: Any) -> Callable[[], Any]:
    """torch's product, with scales in torch's layout. For block scales of weights, row strides are multiples of 4 elements."""
    import torch

    if scaling == "block":
        padded = torch.zeros(t.shape[0], -(-t.shape[1] // 4) * 4, device=t.device)
        padded[:, : t.shape[1]] = t
        t = padded[:, : t.shape[1]]
    return lambda: torch._scaled_mm(a, w.t(), scale_a=s.t(), scale_b=t.t(), out_dtype=torch.bfloat16)


def _expect_near(got: Any, wanted: Any) -> None:
    assert float((got - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


# --- a layer ----------------------------------------------------------------------------------------------------------


def layer(ranks: int, rows: int, dtype: str) -> hw.Fusion:
    """The sequence-parallel MLP with 8-bit weights that have one scale per row, or with weights in bf16."""
    inner, whole = INNER * ranks, hw.bf16 if dtype == BF16 else hw.f8e4m3
    types = {
        "x": hw.bf16[f"{rows}@tp", HIDDEN],
        "wg": whole[f"{inner}@tp", HIDDEN],
        "wu": whole[f"{inner}@tp", HIDDEN],
        "wd": whole[HIDDEN, f"{inner}@tp"],
    }
    if dtype == BF16:

        @hw.fusion(mesh=hw.Mesh(tp=ranks), **types)
        def mlp_bf16(x: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
            return hw.reshard((hw.silu(x @ wg.T) * (x @ wu.T)) @ wd.T, f"{rows}@tp", HIDDEN)

        return mlp_bf16

    scales = {"sg": hw.f32[f"{inner}@tp", 1], "su": hw.f32[f"{inner}@tp", 1], "sd": hw.f32[HIDDEN, 1]}

    @hw.fusion(mesh=hw.Mesh(tp=ranks), **types, **scales)
    def mlp_fp8(x: hw.Tensor, wg: hw.Tensor, wu: hw.Tensor, wd: hw.Tensor, sg: hw.Tensor, su: hw.Tensor, sd: hw.Tensor) -> hw.Tensor:
        a, s = hw.quantize(x, "row")
        h = hw.silu(hw.scaled_matmul(a, wg.T, s, sg.T)) * hw.scaled_matmul(a, wu.T, s, su.T)
        b, t = hw.quantize(h, "row")
        return hw.reshard(hw.scaled_matmul(b, wd.T, t, sd.T), f"{rows}@tp", HIDDEN)

    return mlp_fp8


def _layers(rank: int, ranks: int) -> Iterator[Calls]:
    """Calls of Hostweave in 8-bit floats and in bf16, and of torch's variants, for each number of rows."""
    import torch

    group = hw.init()
    for rows in (2048, 8192):
        x = torch.randn(rows // ranks, HIDDEN, device="cuda", dtype=torch.bfloat16)
        wide = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))]
        narrow, scales = zip(*map(_quantized, wide), strict=True)
        torch.distributed.all_reduce(scales[2], torch.distributed.ReduceOp.MAX)  # All ranks need the same scale of wd.
        narrow = (*narrow[:2], (wide[2].float() / scales[2]).to(torch.float8_e4m3fn))
        programs = {dtype: hw.compile(layer(ranks, rows, dtype), target="cuda") for dtype in (OURS, BF16)}
        given = {OURS: (x, *narrow, *scales), BF16: (x, *wide)}
        calls: Calls = {
            f"70B at TP8, {rows} rows, {ranks} GPUs, {OURS}": programs[OURS].capture(*given[OURS], group=group),
            f"ours in {BF16}": programs[BF16].capture(*given[BF16], group=group),
        }
        if rank == 0:
            print(programs[OURS].explain())
        got = next(iter(calls.values()))()
        for name, call in _torch_layers().items():
            try:
                _expect_near_of_8_bits(got, call(x, *narrow, *scales))
            except RuntimeError as error:  # All ranks raise the same error.
                print(f"{name} does not run: {str(error).splitlines()[0]}") if rank == 0 else None
                continue
            calls[name] = partial(call, x, *narrow, *scales)
        yield calls
        for program in programs.values():
            program.close()


def _expect_near_of_8_bits(got: Any, wanted: Any) -> None:
    """Compares results with a tolerance for rounding to 8-bit floats."""
    assert float((got - wanted).float().norm()) <= 0.1 * float(wanted.float().norm())


def _quantized(x: Any) -> tuple[Any, Any]:
    import torch

    scale = x.abs().amax(1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def _torch_layers() -> dict[str, Callable[..., Any]]:
    import torch
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    group = dist.group.WORLD
    assert group is not None
    enable_symm_mem_for_group(group.group_name)

    def product(a: Any, w: Any, s: Any, t: Any) -> Any:
        return torch._scaled_mm(a, w.t(), scale_a=s, scale_b=t.t(), out_dtype=torch.bfloat16)

    def mlp(x: Any, wg: Any, wu: Any, wd: Any, sg: Any, su: Any, sd: Any) -> Any:
        a, s = _quantized(x)
        a, s = all_gather_tensor(a, 0, group), all_gather_tensor(s, 0, group)
        h = torch.nn.functional.silu(product(a, wg, s, sg)) * product(a, wu, s, su)
        b, t = _quantized(h)
        return reduce_scatter_tensor(product(b, wd, t, sd), "sum", 0, group)

    plain = torch.compile(mlp, dynamic=False)
    return {"torch.compile": plain, "torch async TP": torch.compile(mlp, dynamic=False, options={"_micro_pipeline_tp": True})}


# --- decoding ---------------------------------------------------------------------------------------------------------


def decoding(rows: int, dtype: str) -> hw.Fusion:
    """16 blocks x + mlp(rms_norm(x)) with 8-bit weights that have one scale per row, or with weights in bf16."""
    hidden, inner = OF_8B
    whole = hw.bf16 if dtype == BF16 else hw.f8e4m3
    types = {"n": hw.bf16[hidden], "wgu": whole[2 * inner, hidden], "wd": whole[hidden, inner]}
    if dtype != BF16:
        types |= {"sgu": hw.f32[2 * inner, 1], "sd": hw.f32[hidden, 1]}

    def linear(x: hw.Tensor, w: hw.Tensor, scale: hw.Tensor | None) -> hw.Tensor:
        if scale is None:
            return x @ w.T
        values, scales = hw.quantize(x, "row")
        return hw.scaled_matmul(values, w.T, scales, scale.T)

    def mlp(x: hw.Tensor, n: hw.Tensor, wgu: hw.Tensor, wd: hw.Tensor, sgu: hw.Tensor | None, sd: hw.Tensor | None) -> hw.Tensor:
        y = linear(hw.rms_norm(x, n), wgu, sgu)
        return x + linear(hw.silu(y[:, :inner]) * y[:, inner:], wd, sd)

    if dtype == BF16:

        @hw.block(x=hw.bf16[rows, hidden], **types)
        def block_bf16(x: hw.Tensor, n: hw.Tensor, wgu: hw.Tensor, wd: hw.Tensor) -> hw.Tensor:
            return mlp(x, n, wgu, wd, None, None)

        block = block_bf16
    else:

        @hw.block(x=hw.bf16[rows, hidden], **types)
        def block_fp8(x: hw.Tensor, n: hw.Tensor, wgu: hw.Tensor, wd: hw.Tensor, sgu: hw.Tensor, sd: hw.Tensor) -> hw.Tensor:
            return mlp(x, n, wgu, wd, sgu, sd)

        block = block_fp8
    weights = {f"{name}_{i}": type_ for i in range(BLOCKS) for name, type_ in types.items()}

    @hw.fusion(x=hw.bf16[rows, hidden], **weights)
    def decode(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        for i in range(BLOCKS):
            x = block(x, *(weights[f"{name}_{i}"] for name in types))
        return x

    return decode


def _decoded(rank: int, ranks: int) -> Iterator[Calls]:
    import torch

    group, (hidden, inner) = hw.init(), OF_8B
    wide = [
        [torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.01 for shape in ((2 * inner, hidden), (hidden, inner))]
        for _ in range(BLOCKS)
    ]
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    of_bf16, of_fp8 = list[Any](), list[Any]()
    for pair in wide:
        (gate_up, s), (down, t) = map(_quantized, pair)
        of_bf16 += [norm, *pair]
        of_fp8 += [norm, gate_up, down, s, t]
    for rows in DECODED:
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        programs = {dtype: hw.compile(decoding(rows, dtype), target="cuda") for dtype in (OURS, BF16)}
        calls = {
            f"8B, {BLOCKS} MLPs, {rows} rows, {OURS}": programs[OURS].capture(x, *of_fp8, group=group),
            f"ours in {BF16}": programs[BF16].capture(x, *of_bf16, group=group),
        }
        got, wanted = (call() for call in calls.values())
        _expect_near_of_8_bits(got, wanted)
        yield calls
        for program in programs.values():
            program.close()


if __name__ == "__main__":
    main(sys.argv[1:])
