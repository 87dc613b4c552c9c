"""Milliseconds per decoding step of `generate` at Llama 3 8B shapes, compared with transformers. A step adds a token to every sequence.

`torchrun --nproc-per-node 2 benchmarks/generate.py` runs batches of 1 and 16 with random bf16 weights. Hostweave is tensor-parallel on the
GPUs of all processes, and launches one CUDA graph per step. With the library transformers, each process runs a replica on its GPU, with a
static cache and a decoder that torch compiles. The time of a step is (time of 64 new tokens - time of 16) / 48. The difference excludes the
prompt and compilation. For each batch, the benchmark first prints the time of each variant's first call. Then variants alternate. `--tiny`
runs small layers, also on CPUs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peers import report

import hostweave as hw
import hostweave.torch

COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), ("o_proj", "down_proj")
PLAN = {**{f"{name}.weight": "tp, -" for name in COLUMNS}, **{f"{name}.weight": "-, tp" for name in ROWS}}
PROMPT, FEW, MANY = 128, 16, 64  # `generate` rounds the length of the cache up to 192, both for FEW and for MANY.


def llama(is_tiny: bool, layers: int, device: str) -> Any:
    sizes = (
        {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256}
        if is_tiny
        else {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    )
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
    with torch.device(device):
        module = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    module.generation_config.eos_token_id = None  # No sequence ends early.
    return module


def seconds(generate: Callable[[int], Any], tokens: int) -> float:
    """Seconds of a call on this rank. All ranks start together."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    generate(tokens)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def compare(module: Any, ours: Any, batch: int, turns: int, few: int, many: int, says: bool) -> dict[str, list[float]]:
    """Milliseconds per decoding step of each variant in each repetition."""
    ids = torch.randint(0, module.config.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).to(module.device)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    ways: dict[str, Callable[[int], Any]] = {
        "hostweave": lambda tokens: ours.generate(ids, **given, max_new_tokens=tokens),
        "transformers, compiled static cache": lambda tokens: module.generate(
            ids, **given, max_new_tokens=tokens, cache_implementation="static"
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}

    def turn(name: str) -> float:
        return (seconds(ways[name], many) - seconds(ways[name], few)) / (many - few) * 1000

    with torch.no_grad():
        for name, call in ways.items():
            compiled = seconds(call, many)
            call(few)
            each = turn(name)
            if says:
                print(f"batch {batch}: {name}: first call {compiled:.1f} s; then {each:.3f} ms per token", flush=True)
        for _ in range(turns):
            for name in ways:
                times[name].append(turn(name))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs=2,
        default=[FEW, MANY],
        help="two numbers of new tokens, from whose times the time per token is computed",
    )
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    on_gpus = torch.cuda.is_available()
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
        group = hw.init(hw.TorchStore())
    else:
        group = hw.init()
    device = f"cuda:{group.local_rank}" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    module = llama(arguments.tiny, arguments.layers, device)
    if on_gpus and group.rank == 0:
        report.print_machine()
    started = time.perf_counter()
    example = {"input_ids": torch.ones(1, PROMPT, dtype=torch.long, device=device), "use_cache": False}
    options = hw.Options(graph="auto") if on_gpus else None
    ours = hostweave.torch.compile(module, hw.Mesh(tp=group.count), PLAN if group.count > 1 else {}, example, options=options)
    if group.rank == 0:
        print(f"compiled for logits in {time.perf_counter() - started:.1f} s", flush=True)
    for batch in arguments.batches:
        times = compare(module, ours, batch, arguments.turns, *arguments.tokens, group.rank == 0)
        if group.rank == 0:
            print(f"batch {batch}, {arguments.layers} layers, {group.count} ranks: {report.line(times, ['hostweave'])}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
