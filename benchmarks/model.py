"""Prefill and decode of layers of Llama 3 8B, as in `examples/llama.py`, compared with transformers.

The model has 8 of the 32 layers, the full vocabulary, and random bf16 weights. The model runs on one GPU, and tensor-parallel on two GPUs
if there are two. transformers uses a static cache. Decode steps of transformers use torch.compile and CUDA graphs; the prefill runs eager,
and compiled. Both Hostweave and transformers select the most probable token. This script shards the projections of transformers' model,
because the sharding plan of transformers supports only checkpoints. Prompts have 4096 tokens. A decode call is a series of 16 steps. The
host enqueues the steps one by one, so host time is included. Printed times are milliseconds of the slowest rank, as medians of alternating
calls. Each row is printed immediately. `model.py 2 ours` measures only Hostweave on 2 GPUs, in less than a minute. `model.py 2
transformers` measures only transformers.

`model.py parts` measures lower bounds for the time of a decode step on one GPU. The script times the matmuls of a step, the matmuls with
attention, the matmuls by torch, and a copy. Each printed time is for 16 repetitions. The reads and writes of the copy together have as many
bytes as the weights and the cache. Shapes are those of the whole model, and of one of two ranks. Each time t is printed with the quotient
of the copy's time and t.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

from peers import report
from peers.torch_graphs import in_a_graph
from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus

sys.path.insert(0, str(EXAMPLES))
import llama
from checkpoint import Config, frequencies

LAYERS = 8
PROMPT = 4096
ROW = 16  # steps per decode call
REPETITIONS = 5  # number of measured calls, after as many warm-up calls
LENGTH = PROMPT + 512  # cache length, enough for all calls

Calls = dict[str, Callable[[], Any]]


OURS, THEIRS = SIDES = ("ours", "transformers")
PARTS, COPY = "parts", "copy"
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CACHES = ("keys", "values")


def main(arguments: Sequence[str]) -> None:
    if PARTS in arguments:
        for shards in (1, 2):
            for times in times_on_ranks(partial(_parts, shards), 1, REPETITIONS):
                copied = statistics.median(times[COPY])
                each = ", ".join(f"{of} {report.spread(ms)} ms, {copied / statistics.median(ms):.2f}" for of, ms in times.items())
                print(f"decode, batch 1, {LAYERS} layers, one of {shards} ranks, time, and copy's time / time: {each}", flush=True)
        return
    sides = [side for side in SIDES if side in arguments] or SIDES
    for ranks in [int(word) for word in arguments if word.isdecimal()] or range(1, 1 + min(len(gpus()), 2)):
        names = ["decode, batch 1", "prefill, batch 1", "decode, batch 16"]
        tokens = [ROW, PROMPT, ROW * 16]
        rows = times_on_ranks(partial(_calls, sides), ranks, REPETITIONS)
        for name, count, times in zip(names, tokens, rows, strict=True):
            medians = {of: statistics.median(ms) for of, ms in times.items()}
            each = ", ".join(f"{of} {report.spread(ms)} ms, {count / medians[of] * 1e3:.0f} tokens/s" for of, ms in times.items())
            best = min((ms for of, ms in medians.items() if of != OURS), default=0.0)
            ratio = f"; ours is {best / medians[OURS]:.2f} times as fast as the best of transformers" if best and OURS in medians else ""
            print(f"{name}, {LAYERS} layers, {ranks} GPUs: {each}{ratio}", flush=True)


def _calls(sides: Sequence[str], rank: int, ranks: int) -> Iterator[Calls]:
    """Yields three groups of calls: decode with batch 1, prefill with batch 1, and decode with batch 16."""
    import torch

    hw.init()
    torch.manual_seed(rank)
    c = Config(num_hidden_layers=LAYERS)
    programs = llama.compiled(c, ranks, "cuda") if OURS in sides else []
    weights = _weights(c, rank, programs[0].mesh) if programs else {}
    theirs = _transformers(c, rank, ranks) if THEIRS in sides else None
    for batch in (1, 16):
        prompts = torch.randint(0, c.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(0))
        decode: Calls = {}
        prefill: Calls = {}
        if programs:
            model = llama.Llama(c, programs, weights, frequencies(c.head_dim, 500000.0), batch, LENGTH)
            model.start(prompts.tolist())
            filled, position = prompts.T.contiguous().int().cuda(), torch.full((batch,), PROMPT, dtype=torch.int32, device="cuda")
            out = (torch.empty_like(model.ids), model.logits, *(None for _ in model.cache))
            decode[OURS] = partial(_row, model.advance)
            prefill[OURS] = partial(model.prefill, filled, position, **model.cache, out=out)
        if theirs:
            decode[f"{THEIRS}, torch.compile"] = partial(_row, _step(theirs, prompts.cuda()))
        yield decode
        decode.clear()
        torch.compiler.reset()
        if batch == 1:
            yield prefill | (_prefills(theirs, prompts.cuda()) if theirs else {})
            torch.compiler.reset()
    for program in programs:
        program.close()


def _weights(c: Config, rank: int, mesh: hw.Mesh) -> dict[str, Any]:
    types = {llama.short(name): type for name, type in llama.other_weights(c).items()}
    types |= {f"{llama.short(name)}_{i}": type for i in range(LAYERS) for name, type in llama.layer_weights(c).items()}
    return {name: _random(type, rank, mesh) for name, type in types.items()}


def _random(type_: Any, rank: int, mesh: hw.Mesh) -> Any:
    import torch

    shape = [int(size) for size in type_.shape]
    local = [part.stop - part.start for part in type_.block(shape, rank, mesh)]
    like = {"device": "cuda", "dtype": torch.bfloat16}
    return torch.ones(local, **like) if len(local) == 1 else torch.randn(local, **like).mul_(shape[1] ** -0.5)


def _row(step: Callable[[], Any]) -> None:
    for _ in range(ROW):
        step()


def _parts(shards: int, rank: int, ranks: int) -> Iterator[Calls]:
    """Yields calls that repeat parts of a decode step at the shapes of one of `shards` ranks: the matmuls, the matmuls with attention, the
    matmuls by torch, and a copy."""
    import torch

    hw.init()
    torch.manual_seed(0)
    whole = Config(num_hidden_layers=LAYERS)
    sharded = ("vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    c = replace(whole, **{name: getattr(whole, name) // shards for name in sharded})
    mesh = hw.Mesh(tp=1)
    given = [inputs_of_parts(c, attends) for attends in (False, True)]
    programs = [parts_of_decode(c, types) for types in given]
    data = {name: _random(type, 0, mesh) for name, type in given[1].items() if name != "lengths"}
    read, written = torch.empty(2, sum(array.nbytes for array in data.values()) // 2, dtype=torch.uint8, device="cuda")
    data["lengths"] = torch.full((1,), PROMPT, dtype=torch.int32, device="cuda")
    matmuls, both = (program.capture(**{name: data[name] for name in types}) for program, types in zip(programs, given, strict=True))
    layers = [[data[f"{name}_{i}"] for name in MATRICES] for i in range(LAYERS)]
    by_torch = in_a_graph(partial(_torch_matmuls, data["x"], data["lm_head"], layers))
    calls = {"matmuls": matmuls, "matmuls and attention": both, "matmuls by torch": by_torch, COPY: partial(written.copy_, read)}
    yield {name: partial(_row, call) for name, call in calls.items()}
    for program in programs:
        program.close()


def inputs_of_parts(c: Config, attends: bool) -> dict[str, Any]:
    """Inputs of `parts_of_decode`. Includes inputs of the attention if `attends`."""
    types = {llama.short(name): type for name, type in llama.layer_weights(c).items()}
    of_layer = {name: types[name] for name in MATRICES}
    if attends:
        of_layer |= dict.fromkeys(CACHES, c.dtype[1, c.num_key_value_heads, PROMPT, c.head_dim])
    others = {"x": c.dtype[1, 1, c.hidden_size], "lm_head": c.dtype[c.vocab_size, c.hidden_size]}
    if attends:
        others["lengths"] = hw.i32[1]
    return others | {f"{name}_{i}": type for i in range(LAYERS) for name, type in of_layer.items()}


def parts_of_decode(c: Config, types: dict[str, Any]) -> hw.Program:
    """Program of the matmuls of a step. Includes the attention if `types` has the inputs `lengths`, keys and values."""

    @hw.fusion(mesh=hw.Mesh(tp=1), **types)
    def parts(x: hw.Tensor, lm_head: hw.Tensor, **rest: hw.Tensor) -> tuple[hw.Tensor, ...]:
        stored = []
        for i in range(LAYERS):
            q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj = (rest[f"{name}_{i}"] for name in MATRICES)
            q, k, v = (hw.linear(x, weight) for weight in (q_proj, k_proj, v_proj))
            stored += [k, v]
            if "lengths" in rest:
                heads = hw.reshape(q, 1, c.num_attention_heads, 1, c.head_dim)
                keys, values = (rest[f"{name}_{i}"] for name in CACHES)
                attended = hw.scaled_dot_product_attention(heads, keys, values, enable_gqa=True, lengths=rest["lengths"])
                q = hw.reshape(attended, 1, 1, c.num_attention_heads * c.head_dim)
            x = hw.linear(q, o_proj)
            x = hw.linear(hw.silu(hw.linear(x, gate_proj)) * hw.linear(x, up_proj), down_proj)
        return hw.linear(x, lm_head), *stored

    return hw.compile(parts, "cuda")


def _torch_matmuls(x: Any, lm_head: Any, layers: Sequence[Sequence[Any]]) -> Any:
    from torch.nn.functional import linear

    for q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj in layers:
        q, _, _ = (linear(x, w) for w in (q_proj, k_proj, v_proj))
        x = linear(q, o_proj)
        gate, _ = linear(x, gate_proj), linear(x, up_proj)
        x = linear(gate, down_proj)
    return linear(x, lm_head)


def _transformers(c: Config, rank: int, ranks: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {name: value for name, value in vars(c).items() if name != "dtype"}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None, max_position_embeddings=8192)).eval()
    torch.set_default_dtype(torch.float32)
    if ranks > 1:
        _shard(model, rank, ranks)
    return model


def _shard(model: Any, rank: int, ranks: int) -> None:
    """Shards the projections of a model. Projections to heads, inner dim and vocabulary are sharded by output columns. Projections back to
    the hidden dim are sharded by rows; an all-reduce follows."""
    import torch
    from torch.distributed import group
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

    everyone = group.WORLD.group_name

    def keep(linear: Any, dim: int) -> None:
        linear.weight = torch.nn.Parameter(linear.weight.detach().chunk(ranks, dim)[rank].clone(), requires_grad=False)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            keep(linear, 0)
        for linear in (attention.o_proj, mlp.down_proj):
            keep(linear, 1)
            linear.register_forward_hook(lambda _module, _inputs, term: all_reduce(term, "sum", everyone))
    keep(model.lm_head, 0)
    model.lm_head.register_forward_hook(lambda _module, _inputs, part: torch.cat(all_gather_tensor(part, 0, everyone).chunk(ranks), -1))


def _cache(model: Any) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=LENGTH)


def _prefills(model: Any, prompts: Any) -> Calls:
    """Calls for the prefill of the prompts: eager, and compiled."""
    import torch

    cache = _cache(model)

    def prefill(forward: Callable[..., Any]) -> None:
        cache.reset()
        with torch.no_grad():
            forward(prompts, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

    prefill(model)  # The prefill allocates the cache.
    compiled = torch.compile(model.forward, fullgraph=True)
    return {"transformers": partial(prefill, model), "transformers, torch.compile": partial(prefill, compiled)}


def _step(model: Any, prompts: Any) -> Callable[[], Any]:
    """Decode step with a cache that contains the prompts."""
    import torch

    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    cache = _cache(model)
    with torch.no_grad():
        token = model(prompts, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
    position = torch.full((1, 1), PROMPT, device=prompts.device)
    at = {"cache_position": position[0]} if "cache_position" in signature(model.forward).parameters else {}  # transformers 4

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            logits = compiled(token, past_key_values=cache, position_ids=position, **at, logits_to_keep=1).logits
            token.copy_(logits.argmax(-1))
            position.add_(1)

    return step


if __name__ == "__main__":
    main(sys.argv[1:])
