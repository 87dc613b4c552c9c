"""Forward pass of a sequence-parallel Llama 3 70B layer on all GPUs of this machine, at per-rank shapes of TP 8, compared with torch.

The layer has norms, rotary embedding, causal attention by cuDNN, and SwiGLU, in bf16. In all variants, q, k and v share one weight, and
gate and up share one weight. torch has four variants: eager, in a CUDA graph, with fused gathers and reductions (async TP), and with
torch.compile. The script first prints the memory that Hostweave plans for 32,768 tokens. Then it prints the compiler's choices and the
times, for each number of tokens. Printed times are milliseconds of the slowest rank, as medians over alternating calls on the same arrays.
All ranks start a call together.

`sequence_parallel.py profile FILE.json` writes the kernels that torch.profiler records in one call of each variant on rank 0. The picture
in the README shows two of the variants.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from peers import report
from peers.report import machine
from peers.torch_graphs import in_a_graph
from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.cli.memory_plan import MemoryPlan, memory_plan
from hostweave.pipeline import lower

HIDDEN, INNER, HEADS, HEAD = 8192, 3584, 8, 128  # INNER, HEADS: per rank; all query heads of a rank share one key head
GOALS = {8192: 1.25, 2048: 1.2}  # speedup over torch's best, by tokens
LONG = 32768  # tokens for the memory plan
REPETITIONS = 15
WAIT = 4_000_000  # cycles that a kernel spins before each call, to hide host time, as in a model of many layers
TOLERANCE = 0.03  # relative to the largest element; both implementations round sums of thousands of terms to bf16

Calls = dict[str, Callable[[], Any]]


def main(words: Sequence[str]) -> None:
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    ranks = len(gpus())
    if words[:1] == ["profile"]:
        for _ in times_on_ranks(partial(_profile, words[1]), ranks, REPETITIONS, WAIT):
            pass
        return
    short, long = (_planned(tokens, ranks) for tokens in (LONG, 2 * LONG))
    print(
        f"{LONG} tokens: {short.peak / 2**20:.0f} MiB of temporaries, {short.peak / short.bound:.2f} times the most in use at one time;"
        f" twice the tokens take {long.peak / short.peak:.2f} times as much",
        flush=True,
    )
    for tokens, times in zip(GOALS, times_on_ranks(_calls, ranks, REPETITIONS, WAIT), strict=True):
        print(f"{tokens} tokens, {ranks} GPUs, goal {GOALS[tokens]}: {report.line(times, ['ours'])}", flush=True)


def fusion_of(ranks: int) -> hw.Fusion:
    heads, inner = f"{HEADS * ranks * HEAD}@tp", f"{INNER * ranks}@tp"
    weights = {
        "wqkv": hw.bf16["E", f"{ranks}@tp", HEADS + 2, HEAD],  # by group: query heads, key, value
        "wo": hw.bf16[heads, "E"],
        "wgu": hw.bf16["E", f"{ranks}@tp", 2, INNER],
        "wd": hw.bf16[inner, "E"],
    }
    norms, tables = dict.fromkeys(("n1", "n2"), hw.bf16["E"]), dict.fromkeys(("cos", "sin"), hw.f32["S", HEAD // 2])
    return hw.fusion(mesh=hw.Mesh(tp=ranks), x=hw.bf16["S@tp", "B", "E"], **weights, **norms, **tables)(layer)


def layer(x: Any, wqkv: Any, wo: Any, wgu: Any, wd: Any, n1: Any, n2: Any, cos: Any, sin: Any) -> Any:
    h = x + hw.matmul(_attended(_multiplied(hw.rms_norm(x, n1), wqkv), cos, sin), wo)
    gate_up = _multiplied(hw.rms_norm(h, n2), wgu)
    gated = hw.silu(gate_up[:, :, :, 0]) * gate_up[:, :, :, 1]
    return h + hw.matmul(hw.reshape(gated, "S", "B", wd.shape[0]), wd)


def _attended(qkv: Any, cos: Any, sin: Any) -> Any:
    """Attention. `qkv` is [S, B, groups, HEADS + 2, HEAD]: the heads of queries, and the key and the value of a group."""
    by_group = hw.permute_dims(qkv, (1, 2, 3, 0, 4))
    rotated, groups = hw.rotary_embedding(by_group[:, :, : HEADS + 1], cos, sin), qkv.shape[2]
    q = hw.reshape(rotated[:, :, :HEADS], "B", groups * HEADS, "S", HEAD)
    k, v = (hw.reshape(one, "B", groups, "S", HEAD) for one in (rotated[:, :, HEADS:], by_group[:, :, HEADS + 1 :]))
    attended = hw.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return hw.reshape(hw.permute_dims(attended, (2, 0, 1, 3)), "S", "B", groups * HEADS * HEAD)


def _multiplied(x: Any, weights: Any) -> Any:
    """Matmul with weights of [E, blocks, parts of a block, columns of a part]."""
    blocks, parts, columns = weights.shape[1:]
    y = hw.matmul(x, hw.reshape(weights, "E", blocks * parts * columns))
    return hw.reshape(y, "S", "B", blocks, parts, columns)


def _planned(tokens: int, ranks: int) -> MemoryPlan:
    sizes = sizes_of(tokens)
    return memory_plan(lower(fusion_of(ranks), hw.Options(sizes=sizes, overlap="off")), sizes)


def sizes_of(tokens: int) -> dict[str, int]:
    return {"S": tokens, "B": 1, "E": HIDDEN}


def _calls(rank: int, ranks: int) -> Iterator[Calls]:
    """Yields, for each number of tokens, a call of each variant. Omits a variant that raises RuntimeError, as torch's fused
    operators do without symmetric memory. Raises AssertionError if results differ."""
    import torch

    group = hw.init()
    torch.manual_seed(rank)
    for kernels in ("flash", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{kernels}_sdp")(False)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[0] ** -0.5

    wqkv, wo = random(HIDDEN, (HEADS + 2) * HEAD), random(HEADS * HEAD, HIDDEN)
    wgu, wd, (n1, n2) = random(HIDDEN, 2 * INNER), random(INNER, HIDDEN), torch.ones(2, HIDDEN, device="cuda", dtype=torch.bfloat16)
    blocks = wqkv.view(HIDDEN, 1, HEADS + 2, HEAD), wo, wgu.view(HIDDEN, 1, 2, INNER), wd
    for tokens in GOALS:
        x = torch.randn(tokens // ranks, HIDDEN, device="cuda", dtype=torch.bfloat16)
        angles = torch.arange(tokens, device="cuda")[:, None] * 500000.0 ** -(torch.arange(0, HEAD, 2, device="cuda") / HEAD)
        cos, sin = angles.cos(), angles.sin()
        program = hw.compile(fusion_of(ranks), target="cuda", options=hw.Options(sizes=sizes_of(tokens)))
        if rank == 0:
            print(program.explain(), flush=True)
        y = torch.empty(tokens // ranks, 1, HIDDEN, device="cuda", dtype=torch.bfloat16)
        weights = x, n1, n2, wqkv, wo, wgu, wd, cos, sin
        eager = partial(_torch_layer(ranks, is_fused=False), *weights)
        calls: Calls = {"ours": partial(program, x[:, None], *blocks, n1, n2, cos, sin, group=group, out=y), "torch eager": eager}
        calls["torch in a CUDA graph"] = in_a_graph(eager)
        calls["torch async TP"] = partial(_torch_layer(ranks, is_fused=True), *weights)
        compiled = torch.compile(_torch_layer(ranks, is_fused=False), dynamic=False)
        calls["torch.compile"] = partial(compiled, *weights)
        wanted = eager()
        for name, call in list(calls.items()):
            try:
                got = call() if name != "ours" else (call(), y[:, 0])[1]
            except RuntimeError as error:  # torch's fused operators raise RuntimeError if there is no symmetric memory.
                print(f"{name} is left out: {error}", flush=True)
                del calls[name]
                continue
            assert float((got - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max()), name
        del wanted, got
        yield calls
        program.close()


def _profile(file: str, rank: int, ranks: int) -> Iterator[Calls]:
    """Writes the kernels and copies of one call of each variant on rank 0: stream, name, and begin and end in microseconds."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    calls, together = next(_calls(rank, ranks)), torch.zeros(1, device="cuda")
    found: dict[str, list[tuple[int, str, float, float]]] = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            torch.cuda._sleep(WAIT)
            dist.all_reduce(together)  # All ranks start the call together.
            call()
            torch.cuda.synchronize()
        events = [e for e in profiled.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
        begin = min(e.start_ns() + e.duration_ns() for e in events if "AllReduce" in e.name())
        found[name] = [
            (e.device_resource_id(), e.name(), (e.start_ns() - begin) / 1e3, (e.start_ns() + e.duration_ns() - begin) / 1e3)
            for e in sorted(events, key=lambda e: e.start_ns())
            if e.start_ns() >= begin
        ]
    if rank == 0:
        Path(file).write_text(json.dumps({"machine": machine(), "tokens": next(iter(GOALS)), "calls": found}, indent=1) + "\n")
    yield {"ours": calls["ours"]}


def _torch_layer(ranks: int, is_fused: bool) -> Callable[..., Any]:
    """The layer in torch, with collectives before and after matmuls, or fused with matmuls."""
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed import _symmetric_memory as symmetric

    name = dist.group.WORLD.group_name
    if is_fused:
        symmetric.enable_symm_mem_for_group(name)

    def gathered(x: Any, w: Any) -> Any:
        if is_fused:
            return torch.ops.symm_mem.fused_all_gather_matmul(x, [w], gather_dim=0, group_name=name)[1][0]
        return collectives.all_gather_tensor(x, 0, name) @ w

    def scattered(x: Any, w: Any) -> Any:
        if is_fused:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w, "sum", scatter_dim=0, group_name=name)
        return collectives.reduce_scatter_tensor(x @ w, "sum", 0, name)

    def rotated(x: Any, cos: Any, sin: Any) -> Any:
        """Rotary embedding of [S, heads, HEAD], in f32."""
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def layer(x: Any, n1: Any, n2: Any, wqkv: Any, wo: Any, wgu: Any, wd: Any, cos: Any, sin: Any) -> Any:
        n = torch.nn.functional.rms_norm(x, (HIDDEN,), n1, 1e-6)
        q, k, v = gathered(n, wqkv).unflatten(1, (-1, HEAD)).split([HEADS, 1, 1], 1)
        q, k = (rotated(x, cos[:, None], sin[:, None]) for x in (q, k))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        h = x + scattered(attended[0].transpose(0, 1).reshape(-1, HEADS * HEAD), wo)
        n = torch.nn.functional.rms_norm(h, (HIDDEN,), n2, 1e-6)
        gate, up = gathered(n, wgu).chunk(2, -1)
        return h + scattered(torch.nn.functional.silu(gate) * up, wd)

    return layer


if __name__ == "__main__":
    main(sys.argv[1:])
