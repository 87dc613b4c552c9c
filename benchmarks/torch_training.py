"""Training on one GPU with hostweave.torch, compared with eager PyTorch and torch.compile.

`python benchmarks/torch_training.py` times the forward and backward pass of 2 Llama layers with a loss, for 4096 tokens. The layers have
the per-rank shapes of Llama 70B at TP 8. `--model gpt2` uses GPT-2 medium with 4 sequences of 1024 tokens. `--step` times a whole
training step: one program of Hostweave, compared with PyTorch's forward and backward pass and fused AdamW. Variants alternate in one
process, each on a copy of the module with random bf16 weights. On a GPU, times are GPU times. `--tiny` runs small sizes, also on CPUs.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peers import report
from torch import nn

import hostweave as hw
import hostweave.torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Way = tuple[Callable[[], Any], nn.Module]


def llama(layers: int, is_tiny: bool) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 64} if is_tiny else {"hidden_size": 8192, "intermediate_size": 3584}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8 if is_tiny else 128}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(
        vocab_size=1024, **sizes, **heads, **ends, num_hidden_layers=layers, max_position_embeddings=8192, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(layers: int, is_tiny: bool) -> Any:
    """GPT-2 without dropout, because the variants would use different random numbers."""
    sizes = {"n_embd": 64, "n_head": 4, "vocab_size": 1024} if is_tiny else {"n_embd": 1024, "n_head": 16}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers, n_positions=1024, use_cache=False, **sizes, **off))


MODELS = {"llama": (llama, 2, (1, 4096)), "gpt2": (gpt2, 24, (4, 1024))}


def ways(module: nn.Module, inputs: dict[str, Any], whole: bool) -> dict[str, Callable[[], Way]]:
    """Functions that create the variants, by name. A function returns a call, and the module that the call trains. The call computes a loss
    and the gradients, or trains a whole step."""

    def hostweave_() -> Way:
        own = copy.deepcopy(module)
        adamw = torch.optim.AdamW(own.parameters(), lr=1e-5) if whole else None
        model = hostweave.torch.compile(own, hw.Mesh(tp=1), {}, inputs, training=True, optimizer=adamw)
        return (lambda: model(**inputs).loss) if whole else (lambda: backward(model)), own

    def torchs(wrapped: Callable[[nn.Module], Any]) -> Callable[[], Way]:
        def make() -> Way:
            own = copy.deepcopy(module)
            model, adamw = wrapped(own), torch.optim.AdamW(own.parameters(), lr=1e-5, fused=True)

            def step() -> Any:
                loss = backward(model)
                adamw.step()
                adamw.zero_grad()
                return loss

            return step if whole else lambda: backward(model), own

        return make

    def backward(model: Any) -> Any:
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    return {
        "hostweave": hostweave_,
        "eager": torchs(lambda own: own),
        "torch.compile": torchs(lambda own: torch.compile(own, dynamic=False)),
    }


def milliseconds(way: Way) -> float:
    call, module = way
    for parameter in module.parameters():
        parameter.grad = None
    if DEVICE == "cpu":
        begin = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # The GPU spins while the host enqueues the call.
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--ways", default="hostweave,eager,torch.compile")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    hw.init(hw.Threads(1))
    make, layers, (rows, tokens) = MODELS[options.model]
    layers, tokens = options.layers or layers, options.tokens or (16 if options.tiny else tokens)
    module = make(layers, options.tiny).to(DEVICE, torch.bfloat16).train()
    ids = torch.randint(0, 1024, (rows, tokens), device=DEVICE)
    report.print_machine()
    made: dict[str, Way] = {}
    losses: dict[str, float] = {}
    makes = ways(module, {"input_ids": ids, "labels": ids}, options.step)
    for name in options.ways.split(","):
        begin = time.perf_counter()
        made[name] = makes[name]()
        losses[name] = float(made[name][0]())
        print(f"{name}: {time.perf_counter() - begin:.1f} s to compile and first call, loss {losses[name]:.4f}", flush=True)
    first = next(iter(losses.values()))
    assert all(abs(loss / first - 1) < 0.02 for loss in losses.values()), losses
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.turns):
        for name, way in made.items():
            times[name].append(milliseconds(way))
    what = "whole step" if options.step else "forward and backward"
    print(f"{options.model}, {layers} layers, {rows} x {tokens} tokens, {what}: {report.line(times, ['hostweave'])}", flush=True)


if __name__ == "__main__":
    main()
