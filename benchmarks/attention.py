"""Causal attention of bf16, forward and backward, beside torch's by cuDNN and by default: the heads of Llama 3, of one rank and of four;
and with the sequence over two GPUs, in pieces of which each rank has a part, so that both have as much to do.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import hostweave as hw
from hostweave.build.cuda import gpus

SHAPES = [(rows, heads, groups) for heads, groups in ((8, 1), (32, 8)) for rows in (2048, 8192, 32768)]
HEAD = 128
CALLS, TIMINGS = 10, 7
TORCH_TIMES = 1.03  # at most
PIECES = 8  # of a sequence over several GPUs
SPEEDUP = 1.7  # of two GPUs, at least


def main() -> None:
    import torch

    group = hw.init()
    torch.cuda.set_device(0)
    print(f"{torch.cuda.get_device_name(0)}, cuDNN {torch.backends.cudnn.version()}, heads of {HEAD}, [S, B, H, D] in and out of ours")
    for rows, heads, groups in SHAPES:
        compare(rows, heads, groups, group)
    group.close()
    if len(gpus()) > 1:
        over_gpus()


def compare(rows: int, heads: int, groups: int, group: hw.Group) -> None:
    import torch

    q, k, v, dy = (torch.randn(rows, 1, count, HEAD, device="cuda", dtype=torch.bfloat16) for count in (heads, groups, groups, heads))
    programs = forward, backward, with_lse = [hw.compile(made(heads, groups), target="cuda") for made in (_fusion, _backward, _with_lse)]
    out, lse = torch.empty(rows, 1, heads * HEAD, device="cuda", dtype=torch.bfloat16), torch.empty(1, heads, rows, device="cuda")
    y, *gradients = (torch.empty_like(x) for x in (q, q, k, v))
    with_lse(q, k, v, out=(y, lse), group=group)
    torchs = _of_torch(q, k, v, dy)
    ours = (
        (lambda: forward(q, k, v, out=out, group=group), [out], 2),
        (lambda: backward(q, k, v, y, dy, lse, out=tuple(gradients), group=group), gradients, 5),
    )
    for number, (call, results, flops) in enumerate(ours):
        calls = {"ours": call, **{name: both[number] for name, both in torchs.items()}}
        call()
        wanted = calls["torch"]()
        for got, want in zip(results, wanted if number else (wanted,), strict=True):
            want = want.permute(2, 0, 1, 3).reshape(got.shape)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
        ms = _times(calls)
        ratio = ms["ours"] / ms["cuDNN"]
        print(
            f"{rows:6} rows, {heads:2} heads of {groups} groups, {('forward', 'backward')[number]:8}: {ms['ours']:8.3f} ms, "
            f"{flops * heads * rows * rows * HEAD / ms['ours'] / 1e9:6.0f} TFLOP/s, {ratio:5.2f} times torch's cuDNN "
            f"{ms['cuDNN']:.3f} ms; default {ms['torch']:.3f}{'  MISSED' if ratio > TORCH_TIMES else ''}",
            flush=True,
        )
    for program in programs:
        program.close()


def over_gpus(rows: int = 32768, heads: int = 32, groups: int = 8) -> None:
    ms = {}
    for ranks in (1, 2):
        fusion = _in_pieces(rows, heads, groups, ranks, PIECES if ranks > 1 else 1)
        program = hw.compile(fusion, target="cuda")
        random = np.random.default_rng(0)
        shapes = {value.name: tuple(map(int, value.type.shape)) for value in fusion.inputs}
        arrays = {name: random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
        times = program.measure(warmups=3, repetitions=TIMINGS, **arrays)
        ms[ranks] = statistics.median(max(rank[i].total_ms for rank in times) for i in range(TIMINGS))
        program.close()
    speedup = ms[1] / ms[2]
    print(
        f"{rows:6} rows, {heads:2} heads of {groups} groups, forward: {ms[1]:.3f} ms on one GPU, {ms[2]:.3f} ms on two, "
        f"{speedup:.2f} times as fast{'  MISSED' if speedup < SPEEDUP else ''}",
        flush=True,
    )


def _in_pieces(rows: int, heads: int, groups: int, ranks: int, pieces: int) -> hw.Fusion:
    """Of each piece of the sequence a rank has its part: later pieces see more, on all ranks."""
    length, part = rows // pieces, f"{rows // pieces}@cp"

    @hw.fusion(
        mesh=hw.Mesh(cp=ranks),
        q=hw.bf16[pieces, part, heads, HEAD],
        k=hw.bf16[pieces, part, groups, HEAD],
        v=hw.bf16[pieces, part, groups, HEAD],
    )
    def in_pieces(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        keys, values = (hw.concat([hw.reshard(x[i], length, groups, HEAD) for i in range(pieces)]) for x in (k, v))
        attended = []
        for i in range(pieces):
            seen = (x[: (i + 1) * length] if i + 1 < pieces else x for x in (keys, values))
            result = hw.attention(*(hw.permute_dims(x, (1, 0, 2)) for x in (q[i], *seen)), "bottom_right", enable_gqa=True)[0]
            attended.append(hw.reshape(hw.permute_dims(result, (1, 0, 2)), 1, length, heads, HEAD))
        return hw.concat(attended)

    return in_pieces


def _fusion(heads: int, groups: int) -> hw.Fusion:
    @hw.fusion(q=hw.bf16["S", "B", heads, HEAD], k=hw.bf16["S", "B", groups, HEAD], v=hw.bf16["S", "B", groups, HEAD])
    def attention(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        attended = hw.scaled_dot_product_attention(*map(_turned, (q, k, v)), is_causal=True, enable_gqa=True)
        return hw.reshape(_back(attended), "S", "B", heads * HEAD)

    return attention


def _with_lse(heads: int, groups: int) -> hw.Fusion:
    @hw.fusion(q=hw.bf16["S", "B", heads, HEAD], k=hw.bf16["S", "B", groups, HEAD], v=hw.bf16["S", "B", groups, HEAD])
    def with_lse(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        y, lse = hw.attention(*map(_turned, (q, k, v)), "top_left", enable_gqa=True)
        return _back(y), lse

    return with_lse


def _backward(heads: int, groups: int) -> hw.Fusion:
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


def _of_torch(q: Any, k: Any, v: Any, dy: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Forward and backward; with heads of the keys repeated beforehand, where a backend does not take groups."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, dy = (x.permute(1, 2, 0, 3).contiguous().requires_grad_() for x in (q, k, v, dy))

    def attend(*qkv: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

    def by_cudnn(*qkv: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(*qkv)

    def both(attend: Callable[..., Any], *qkv: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        y = attend(*qkv)

        def forward() -> Any:
            with torch.no_grad():
                return attend(*qkv)

        return forward, lambda: torch.autograd.grad(y, qkv, dy, retain_graph=True)

    try:
        cudnn = both(by_cudnn, q, k, v)
    except RuntimeError:
        cudnn = both(by_cudnn, q, *(x.detach().repeat_interleave(q.shape[1] // k.shape[1], 1).requires_grad_() for x in (k, v)))
    return {"cuDNN": cudnn, "torch": both(attend, q, k, v)}


def _times(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of one call on the GPU, the median of timings that are taken in turn, enqueued behind a wait."""
    import torch

    timings: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TIMINGS + 2):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(20_000_000)
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            timings[name].append(begin.elapsed_time(end) / CALLS)
    return {name: statistics.median(ms[2:]) for name, ms in timings.items()}


if __name__ == "__main__":
    main()
