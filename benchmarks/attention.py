"""Causal attention of bf16 on one GPU, forward, beside torch's by cuDNN and by default: the heads of Llama 3, of one rank and of four."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import hostweave as hw

SHAPES = [(rows, heads, groups) for heads, groups in ((8, 1), (32, 8)) for rows in (2048, 8192, 32768)]
HEAD = 128
CALLS, TIMINGS = 10, 7
TORCH_TIMES = 1.03  # at most


def main() -> None:
    import torch

    group = hw.init()
    torch.cuda.set_device(0)
    print(f"{torch.cuda.get_device_name(0)}, cuDNN {torch.backends.cudnn.version()}, heads of {HEAD}, [S, B, H, D] in and out of ours")
    for rows, heads, groups in SHAPES:
        program = hw.compile(_fusion(heads, groups), target="cuda")
        q, k, v = (torch.randn(rows, 1, count, HEAD, device="cuda", dtype=torch.bfloat16) for count in (heads, groups, groups))
        out = torch.empty(rows, 1, heads * HEAD, device="cuda", dtype=torch.bfloat16)
        calls = {"ours": lambda q=q, k=k, v=v, out=out, program=program: program(q, k, v, out=out, group=group), **_of_torch(q, k, v)}
        want = calls["torch"]().permute(2, 0, 1, 3).flatten(2)
        calls["ours"]()
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        ms = _times(calls)
        flops = 2 * heads * rows * rows * HEAD  # half of the scores
        ratio = ms["ours"] / ms["cuDNN"]
        print(
            f"{rows:6} rows, {heads:2} heads of {groups} groups: {ms['ours']:8.3f} ms, {flops / ms['ours'] / 1e9:6.0f} TFLOP/s, "
            f"{ratio:5.2f} times torch's cuDNN {ms['cuDNN']:.3f} ms; default {ms['torch']:.3f}{'  MISSED' if ratio > TORCH_TIMES else ''}",
            flush=True,
        )
        program.close()


def _fusion(heads: int, groups: int) -> hw.Fusion:
    @hw.fusion(q=hw.bf16["S", "B", heads, HEAD], k=hw.bf16["S", "B", groups, HEAD], v=hw.bf16["S", "B", groups, HEAD])
    def attention(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        attended = hw.scaled_dot_product_attention(*(hw.permute_dims(x, (1, 2, 0, 3)) for x in (q, k, v)), is_causal=True, enable_gqa=True)
        return hw.reshape(hw.permute_dims(attended, (2, 0, 1, 3)), "S", "B", heads * HEAD)

    return attention


def _of_torch(q: Any, k: Any, v: Any) -> dict[str, Callable[[], Any]]:
    """With heads of the keys repeated beforehand, where a backend does not take groups."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.permute(1, 2, 0, 3).contiguous() for x in (q, k, v))
    repeated = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]

    def attend(*kv: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, *kv, is_causal=True, enable_gqa=True)

    def by_cudnn(*kv: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return attend(*kv)

    try:
        by_cudnn(k, v)
    except RuntimeError:
        return {"cuDNN": lambda: by_cudnn(*repeated), "torch": lambda: attend(k, v)}
    return {"cuDNN": lambda: by_cudnn(k, v), "torch": lambda: attend(k, v)}


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
