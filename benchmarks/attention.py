"""Causal bf16 attention, forward and backward. One GPU is compared with torch with cuDNN, and two GPUs are compared with one.

Cases of Llama 3 8B have 32 heads of queries and 8 heads of keys. Cases of Llama 3 70B at TP 8 have 8 heads of queries and one head of keys
per rank. Other cases shard the sequence over two GPUs, in order or in zigzag. In zigzag, each GPU has one piece of each half of the
sequence, so both GPUs have equal work. The outermost dim of q, k and v is the sequence. Times are medians of alternating measurements,
without host time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from peers.report import print_machine, spread

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.types.numpy_dtypes import numpy_dtype

HEADS = ((32, 8), (8, 1))  # numbers of heads of queries and keys
ROWS = (8192, 32768, 2048)
HEAD = 128
CALLS = {2048: 20, 8192: 10, 32768: 2}
TIMINGS = 7
TORCH_TIMES = 1.03  # largest allowed ratio to torch's time
SHARED = 32768  # rows that are sharded over two GPUs
ROUNDS = 3  # number of rounds, and of timed calls per round; each round copies the arrays to the GPUs again
SPEEDUP = 1.7  # smallest allowed speed-up of two GPUs over one GPU, in zigzag

Attend = Callable[[], Any]


def main() -> None:
    print_machine()
    import torch

    torch.cuda.set_device(0)
    print(f"{torch.cuda.get_device_name(0)}, cuDNN {torch.backends.cudnn.version()}, heads of {HEAD}", flush=True)
    alone = {heads: [hw.compile(made(*heads), target="cuda") for made in (attention_of, gradients_of, with_lse_of)] for heads in HEADS}
    shared = fusions_over_ranks() if len(gpus()) > 1 else {}
    several = {name: (fusion, hw.compile(fusion, target="cuda")) for name, fusion in shared.items()}
    programs = [program for made in alone.values() for program in made]
    with ThreadPoolExecutor() as pool:
        list(pool.map(hw.Program.build, [*programs, *(program for _, program in several.values())]))
    group = hw.init()
    for rows in ROWS:
        for heads in HEADS:
            compare(rows, *heads, alone[heads], group)
    for program in programs:
        program.close()
    group.close()
    torch.cuda.empty_cache()
    if several:
        over_gpus(several)


def compare(rows: int, heads: int, groups: int, programs: list[hw.Program], group: hw.Group) -> None:
    import torch

    forward, backward, with_lse = programs
    q, k, v, dy = (torch.randn(rows, 1, count, HEAD, device="cuda", dtype=torch.bfloat16) for count in (heads, groups, groups, heads))
    out, lse = torch.empty(rows, 1, heads * HEAD, device="cuda", dtype=torch.bfloat16), torch.empty(1, heads, rows, device="cuda")
    y, *gradients = (torch.empty_like(x) for x in (q, q, k, v))
    with_lse(q, k, v, out=(y, lse), group=group)
    ours = (
        (lambda: forward(q, k, v, out=out, group=group), [out], 2),
        (lambda: backward(q, k, v, y, dy, lse, out=tuple(gradients), group=group), gradients, 5),
    )
    for name, (call, results, flops), theirs in zip(("forward", "backward"), ours, _of_torch(q, k, v, dy), strict=True):
        call()
        wanted = theirs()
        for got, want in zip(results, wanted if name == "backward" else (wanted,), strict=True):
            repeated = want.numel() // got.numel()  # repetitions of each head of k and v
            want = want.permute(2, 0, 1, 3).unflatten(2, (-1, repeated)).sum(3).reshape(got.shape)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
        timed = _times((call, theirs), CALLS[rows])
        ms, torchs = map(statistics.median, timed)
        print(
            f"{rows:6} rows, {heads:2} heads of {groups} groups, {name:8}: {spread(timed[0])} ms, "
            f"{flops * heads * rows * rows * HEAD / ms / 1e9:4.0f} TFLOP/s, {ms / torchs:5.3f} times torch's cuDNN, "
            f"{spread(timed[1])} ms{'  MISSED' if ms / torchs > TORCH_TIMES else ''}",
            flush=True,
        )


def over_gpus(programs: dict[str, tuple[hw.Fusion, hw.Program]]) -> None:
    """Prints times of forward and backward passes over a sequence, measured alternately on two GPUs and on one. On two GPUs, the time of
    the slower GPU counts."""
    arrays = {name: _drawn(fusion) for name, (fusion, _) in programs.items()}
    found: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, (_, program) in programs.items():
            times = program.measure(warmups=1, repetitions=ROUNDS, **arrays[name])
            found[name] += (max(rank[i].total_ms for rank in times) for i in range(ROUNDS))
    ms = {name: statistics.median(each) for name, each in found.items()}
    for name, (fusion, program) in programs.items():
        program.close()
        if fusion.mesh.size > 1:
            alone = spread(found[name.split(",")[0]])
            times_as_fast = ms[name.split(",")[0]] / ms[name]
            print(
                f"{SHARED} rows, 32 heads of 8 groups, {name}: {alone} ms on one GPU, {spread(found[name])} ms on two, "
                f"{times_as_fast:.2f} times as fast{'  MISSED' if 'zigzag' in name and times_as_fast < SPEEDUP else ''}",
                flush=True,
            )


def _drawn(fusion: hw.Fusion) -> dict[str, Any]:
    """Random inputs. Only the first 4096 rows are random; all other rows repeat these rows."""
    random, arrays = np.random.default_rng(0), {}
    for value in fusion.inputs:
        rows, *row = map(int, value.type.shape)
        drawn = random.standard_normal((min(rows, 4096), *row), np.float32).astype(numpy_dtype(value.type.dtype))
        arrays[value.name] = np.tile(drawn, (rows // drawn.shape[0], *(1 for _ in row)))
    return arrays


def fusions_over_ranks() -> dict[str, hw.Fusion]:
    """Attention forward and backward, on one GPU, and on two GPUs with rows in order and in zigzag."""
    made = {}
    for name, pass_ in (("forward", _forward_of), ("backward", _backward_of)):
        made[name] = pass_(1, "cp")
        made |= {f"{name}, {how}": pass_(2, axes) for how, axes in (("zigzag", "zigzag(cp)"), ("in order", "cp"))}
    return made


def _of_shared(ranks: int, axes: str, names: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    return {"mesh": hw.Mesh(cp=ranks)} | {name: hw.bf16[f"{SHARED}@{axes}", count, HEAD] for name, count in names}


def _forward_of(ranks: int, axes: str) -> hw.Fusion:
    @hw.fusion(**_of_shared(ranks, axes, (("q", 32), ("k", 8), ("v", 8))))
    def forward(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        return _by_rows(hw.attention(*map(_by_rows, (q, k, v)), "top_left", enable_gqa=True)[0])

    return forward


def _backward_of(ranks: int, axes: str) -> hw.Fusion:
    @hw.fusion(**_of_shared(ranks, axes, (("q", 32), ("k", 8), ("v", 8), ("y", 32), ("dy", 32))), lse=hw.f32[f"{SHARED}@{axes}", 32])
    def backward(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor, y: hw.Tensor, dy: hw.Tensor, lse: hw.Tensor) -> tuple[hw.Tensor, ...]:
        gradients = hw.attention_backward(*map(_by_rows, (q, k, v, y, dy)), lse.T, "top_left", enable_gqa=True)
        return tuple(hw.reshard(_by_rows(x), f"{SHARED}@{axes}", *x.shape[::2]) for x in gradients)

    return backward


def _by_rows(x: hw.Tensor) -> hw.Tensor:
    return hw.permute_dims(x, (1, 0, 2))


def attention_of(heads: int, groups: int) -> hw.Fusion:
    """Causal attention that returns one row of all heads per position."""

    @hw.fusion(q=hw.bf16["S", "B", heads, HEAD], k=hw.bf16["S", "B", groups, HEAD], v=hw.bf16["S", "B", groups, HEAD])
    def attention(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        attended = hw.scaled_dot_product_attention(*map(_turned, (q, k, v)), is_causal=True, enable_gqa=True)
        return hw.reshape(_back(attended), "S", "B", heads * HEAD)

    return attention


def with_lse_of(heads: int, groups: int) -> hw.Fusion:
    """Causal attention that also returns the log-sum-exp of each row."""

    @hw.fusion(q=hw.bf16["S", "B", heads, HEAD], k=hw.bf16["S", "B", groups, HEAD], v=hw.bf16["S", "B", groups, HEAD])
    def with_lse(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        y, lse = hw.attention(*map(_turned, (q, k, v)), "top_left", enable_gqa=True)
        return _back(y), lse

    return with_lse


def gradients_of(heads: int, groups: int) -> hw.Fusion:
    """Gradients of `attention_of`."""

    @hw.fusion(
        q=hw.bf16["S", "B", heads, HEAD],
        k=hw.bf16["S", "B", groups, HEAD],
        v=hw.bf16["S", "B", groups, HEAD],
        y=hw.bf16["S", "B", heads, HEAD],
        dy=hw.bf16["S", "B", heads, HEAD],
        lse=hw.f32["B", heads, "S"],
    )
    def backward(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor, y: hw.Tensor, dy: hw.Tensor, lse: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return tuple(map(_back, hw.attention_backward(*map(_turned, (q, k, v, y, dy)), lse, "top_left", enable_gqa=True)))

    return backward


def _turned(x: hw.Tensor) -> hw.Tensor:
    return hw.permute_dims(x, (1, 2, 0, 3))


def _back(x: hw.Tensor) -> hw.Tensor:
    return hw.permute_dims(x, (2, 0, 1, 3))


def _of_torch(q: Any, k: Any, v: Any, dy: Any) -> tuple[Attend, Attend]:
    """Forward and backward pass by torch with cuDNN. Repeats the heads of k and v beforehand if torch refuses grouped heads."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, dy = (x.permute(1, 2, 0, 3) for x in (q, k, v, dy))

    def attend(*qkv: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

    def both(*qkv: Any) -> tuple[Attend, Attend]:
        needed = [x.detach().requires_grad_() for x in qkv]
        y = attend(*needed)
        return lambda: attend(*qkv), lambda: torch.autograd.grad(y, needed, dy, retain_graph=True)

    try:
        return both(q, k, v)
    except RuntimeError:
        return both(q, *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)))


def _times(calls: tuple[Attend, ...], count: int) -> list[list[float]]:
    """Milliseconds per call on the GPU, from alternating measurements of `count` calls. A spinning kernel runs while the calls are
    enqueued."""
    import torch

    timings: list[list[float]] = [[] for _ in calls]
    for _ in range(TIMINGS + 1):
        for call, ms in zip(calls, timings, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(10_000_000)
            begin.record()
            for _ in range(count):
                call()
            end.record()
            end.synchronize()
            ms.append(begin.elapsed_time(end) / count)
    return [ms[1:] for ms in timings]


if __name__ == "__main__":
    main()
