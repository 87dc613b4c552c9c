"""Compares `hostweave.torch.compile` with PyTorch: parallelize_module or fully_shard, and torch.compile.

The module has 4 decoder layers of Llama 70B at per-rank shapes of TP 8, or 32 in `compile`. The input has 4096 tokens. Except in `fsdp`
and `compile`, the module is sequence-parallel over all GPUs of this machine. Except in `compile`, torch.compile is applied to each layer,
as in training frameworks. `forward`, `backward` and `step` also use torch.compile with async tensor parallelism. Data is random, in bf16.
One process per GPU runs Hostweave and a variant of torch alternately. GPU times are milliseconds of the slowest rank, as medians over
calls. All ranks start a call together. Arguments select the measurements; default: all.

- `forward`: the forward pass;
- `backward`: forward and backward pass, with gradients of parameters and input;
- `step`: a whole step of AdamW, with the mean square error as loss. torch uses its fused AdamW;
- `fsdp`: a whole step of AdamW for modules that `fully_shard` prepared, without tensor parallelism. Each rank has 4096 different tokens;
- `host`: the host time of forward passes on rank 0, captured and not captured. `host` also runs on one GPU;
- `compile`: the time to compile 32 layers with an empty cache.

With `tiny` all sizes are small, except in `compile`. `step tiny` and `fsdp tiny` run on 2 CPU processes if there is no GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from peers import report
from peers.torch_graphs import in_a_graph
from peers.torch_ranks import times_on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

import hostweave as hw
import hostweave.torch
from hostweave.build.cuda import gpus

TOKENS, HIDDEN, HEAD = 4096, 8192, 128
INNER, HEADS, KEYS = 28672 // 8, 64 // 8, 8 // 8  # per rank
REPETITIONS, WAIT, CALLS = 10, 4_000_000, 5
TINY = "HOSTWEAVE_BENCH_TINY"  # environment variable that selects small sizes in all processes
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"  # On CPUs, inductor would compile C++ for minutes.
TOLERANCE = 0.03  # relative to the largest element; both implementations round sums of thousands of terms to bf16
SHARDED = Shard(1)  # [batch, sequence, features]

LAYER_PLAN = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(SHARDED,), desired_input_layouts=(Replicate(),)),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=SHARDED),
    "mlp_norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(SHARDED,), desired_input_layouts=(Replicate(),)),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=SHARDED),
}


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, keys: int, head: int, tokens: int):
        super().__init__()
        self.head = head
        self.wq, self.wo = nn.Linear(hidden, heads * head, bias=False), nn.Linear(heads * head, hidden, bias=False)
        self.wk, self.wv = (nn.Linear(hidden, keys * head, bias=False) for _ in range(2))
        angles = torch.outer(torch.arange(tokens), 500000.0 ** -(torch.arange(0, head, 2) / head)).repeat(1, 2)
        self.register_buffer("cos", angles.cos().to(torch.bfloat16), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.bfloat16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).view(*x.shape[:2], -1, self.head).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        half = self.head // 2
        return x * self.cos + torch.cat((-x[..., half:], x[..., :half]), -1) * self.sin


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, ranks: int, tokens: int = TOKENS, hidden: int = HIDDEN, inner: int = INNER, head: int = HEAD):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden, 1e-5), nn.RMSNorm(hidden, 1e-5)
        self.attention = Attention(hidden, HEADS * ranks, KEYS * ranks, head, tokens)
        self.mlp = Mlp(hidden, inner * ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, layers: int, ranks: int, **sizes: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(ranks, **sizes) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def plan(layers: int) -> dict[str, Any]:
    """torch's sharding plan of the layers, with the shardings of the module's input and of each layer's output."""
    between = {"x": "-, tp, -"} | {f"layers.{number}": "-, tp, -" for number in range(layers)}
    return {f"layers.*.{name}": style for name, style in LAYER_PLAN.items()} | between


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean_square(self.model(x), target)


def mean_square(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).float().square().mean()


def main(*words: str) -> None:
    what = set(words) - {"tiny"} or {"forward", "backward", "step", "fsdp", "host", "compile"}
    if "tiny" in words:
        os.environ[TINY] = "1"
    ranks = len(gpus()) or 2 * ("tiny" in words)
    ways = {
        "forward": ("forward", _calls, WAIT),
        "backward": ("forward and backward", _training_calls, 4 * WAIT),
        "step": ("whole step", _step_calls, 4 * WAIT),
        "fsdp": ("whole step with FSDP", _fsdp_calls, 4 * WAIT),
        "host": ("captured forward", _host_times, 0),
    }
    for name, (passes, make, wait) in ways.items() if ranks > 0 else ():
        if name not in what or (ranks == 1 and name != "host"):
            continue
        layout = "sharded weights and rows" if name == "fsdp" else "sequence-parallel"
        print(f"4 layers of Llama 70B at TP8 shapes, {_sizes()['tokens']} tokens, {ranks} ranks, {layout}, {passes}", flush=True)
        for times in times_on_ranks(make, ranks, REPETITIONS, wait):
            ours = [name for name in times if not name.startswith("torch")]
            print(f"{passes}: {report.line(times, ours)}", flush=True)
    if "compile" in what:
        _compile_32_layers()


# --- the forward pass -------------------------------------------------------------------------------------------------


def _weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """Sets the weights, equally on all ranks. Matrices are random, and scaled so that the outputs of all layers have magnitudes near 1."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5 / parameter.shape[-1] ** 0.5) if parameter.ndim > 1 else parameter.fill_(1)
    return model


def _sizes() -> dict[str, int]:
    if os.environ.get(TINY):
        return {"tokens": 16, "hidden": 64, "inner": 32, "head": 8}
    return {"tokens": TOKENS, "hidden": HIDDEN, "inner": INNER, "head": HEAD}


def _model(ranks: int, layers: int = 4) -> nn.Module:
    with torch.device(DEVICE):
        return _weights(Llama(layers, ranks, **_sizes()).to(torch.bfloat16))


def _input(seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(1, _sizes()["tokens"], _sizes()["hidden"], device=DEVICE).bfloat16()


def _parallel(module: nn.Module, mesh: Any) -> nn.Module:
    for layer in module.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, LAYER_PLAN)
    return module


def _calls(rank: int, ranks: int) -> Iterator[dict[str, Callable[[], Any]]]:
    group, mesh = hw.init(), torch.distributed.init_device_mesh("cuda", (ranks,), mesh_dim_names=("tp",))
    x = _input()
    local = x.chunk(ranks, 1)[rank].contiguous()
    with torch.no_grad():  # parallelize_module does not work in inference_mode.
        module = _model(ranks).eval()
        started = time.perf_counter()
        ours = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan(4), (x,))
        y = ours(local)
        torch.cuda.synchronize()
        _say(rank, f"compiled 4 layers in {time.perf_counter() - started:.1f} s")
        parallel = _parallel(_model(ranks).eval(), mesh)
        _expect_same(rank, "results", y, parallel(local))
        yield {"hostweave": partial(ours, local), "torch eager": partial(parallel, local)}
        for name, is_async in (("torch.compile", False), ("torch.compile with async TP", True)):
            compiled = _compiled(parallel, mesh, is_async)
            started = time.perf_counter()
            _expect_same(rank, "results", y, compiled(local))
            _say(rank, f"{name}: compiled in {time.perf_counter() - started:.1f} s")
            yield {"hostweave": partial(ours, local), name: partial(compiled, local)}
    group.close()


def _host_times(rank: int, ranks: int) -> Iterator[dict[str, Callable[[], Any]]]:
    """Prints the host time of forward passes while the GPU is busy, and yields the captured passes. Each graph is launched several times in
    a row. A wait before the first launch evicts data from the CPU caches. A pass without a graph is called once per wait, so that the queue
    does not fill. For comparison, torch captures the compiled module, and one addition."""
    group, mesh = hw.init(), torch.distributed.init_device_mesh("cuda", (ranks,), mesh_dim_names=("tp",))
    x = _input()
    local = x.chunk(ranks, 1)[rank].contiguous()
    with torch.no_grad():
        ours = hostweave.torch.compile(_model(ranks).eval(), hw.Mesh(tp=ranks), plan(4), (x,))
        y = ours(local)
        module = _model(ranks).eval()
        theirs = _compiled(_parallel(module, mesh) if ranks > 1 else module, mesh, is_async=False)
        captured, theirs_captured = ours.capture(local), in_a_graph(partial(theirs, local))
        _expect_same(rank, "results", y, theirs_captured())
        graphs = {"hostweave, captured": captured, "torch.compile, captured by torch": theirs_captured}
        one_kernel = {"one addition, captured by torch": in_a_graph(partial(torch.add, local, 1))}
        firsts, others, alone = dict[str, list[float]](), dict[str, list[float]](), list[float]()
        for _ in range(4 * REPETITIONS):
            for name, call in (graphs | one_kernel).items():
                first, *following = microseconds_of(call, CALLS)
                firsts.setdefault(name, []).append(first)
                others.setdefault(name, []).extend(following)
            alone += microseconds_of(partial(ours, local), 1)
        for name, one in others.items():
            first = statistics.median(firsts[name])
            low, _, _, high = statistics.quantiles(one, n=5)
            _say(rank, f"host time, {name}: {statistics.median(one):.1f} us, {low:.1f} to {high:.1f}; the first after a wait {first:.1f}")
        _say(rank, f"host time, hostweave: {statistics.median(alone):.1f} us after a wait")
        yield graphs
    group.close()


def microseconds_of(call: Callable[[], Any], calls: int) -> list[float]:
    """Host microseconds of each call. A kernel blocks the GPU until all calls are enqueued."""
    torch.cuda.synchronize()
    torch.cuda._sleep(40_000_000)
    times = [time.perf_counter()]
    for _ in range(calls):
        call()
        times.append(time.perf_counter())
    return [(end - begin) * 1e6 for begin, end in pairwise(times)]


def _training_calls(rank: int, ranks: int) -> Iterator[dict[str, Callable[[], Any]]]:
    """Yields calls that compute gradients of all parameters and of the input. All calls use one module with DTensor parameters."""
    group, mesh = hw.init(), torch.distributed.init_device_mesh("cuda", (ranks,), mesh_dim_names=("tp",))
    x = _input().requires_grad_()
    local, tangent = (t.detach().chunk(ranks, 1)[rank].contiguous() for t in (x, x.flip(1)))
    module = _parallel(_model(ranks).train(), mesh)

    def step(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        module.zero_grad()
        given = local.detach().requires_grad_()
        y = call(given)
        y.backward(tangent)  # type: ignore[no-untyped-call]
        return [y.detach(), given.grad]  # type: ignore[list-item]

    def gradients() -> list[torch.Tensor]:
        return [one.grad.full_tensor() for one in module.parameters()]  # type: ignore[union-attr]

    started = time.perf_counter()
    ours = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan(4), (x,), training=True)
    made = [*step(ours), *gradients()]
    graphs = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan(4), (x,), training=True, options=hw.Options(graph="auto"))
    for mine, again in zip(made, [*step(graphs), *gradients()], strict=True):
        _expect_same(rank, f"{tuple(mine.shape)}", mine, again)
    torch.cuda.synchronize()
    _say(rank, f"compiled 4 layers in {time.perf_counter() - started:.1f} s")
    for name, is_async in (("torch.compile", False), ("torch.compile with async TP", True)):
        compiled = _compiled(module, mesh, is_async)
        started = time.perf_counter()
        for mine, theirs in zip(made, [*step(compiled), *gradients()], strict=True):
            _expect_same(rank, f"{tuple(mine.shape)}", mine, theirs)
        _say(rank, f"{name}: compiled in {time.perf_counter() - started:.1f} s")
        yield {"hostweave": partial(step, ours), 'hostweave with graph="auto"': partial(step, graphs), name: partial(step, compiled)}
    group.close()


# --- a whole step -----------------------------------------------------------------------------------------------------


def _step_calls(rank: int, ranks: int) -> Iterator[dict[str, Callable[[], Any]]]:
    group, mesh = hw.init(), torch.distributed.init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("tp",))
    given = _input(1), _input(2)
    local = tuple(t.chunk(ranks, 1)[rank].contiguous() for t in given)
    module = WithLoss(_parallel(_model(ranks).train(), mesh))
    shardings = plan(4) | {"target": "-, tp, -"}
    compile_ = partial(hostweave.torch.compile, module, hw.Mesh(tp=ranks), shardings, given)
    ours = {"hostweave": compile_(optimizer=_adamw(module))}
    first = _losses(rank, "hostweave", partial(ours["hostweave"], *local))
    if DEVICE == "cuda":  # The second program trains the same parameters further.
        ours['hostweave with graph="auto"'] = compile_(optimizer=_adamw(module), options=hw.Options(graph="auto"))
    for is_async in (False, True)[: 2 if DEVICE == "cuda" else 1]:  # Async TP needs GPUs.
        name = f"torch.compile{' with async TP' * is_async}"
        parallel = _parallel(_model(ranks).train(), mesh)
        step = _torch_step(parallel, _compiled(parallel, mesh, is_async), *local, 1 / ranks)
        _expect_same(rank, f"losses of {name}", first, _losses(rank, name, step))
        yield {**{own: partial(call, *local) for own, call in ours.items()}, name: step}
    group.close()


def _fsdp_calls(rank: int, ranks: int) -> Iterator[dict[str, Callable[[], Any]]]:
    """Yields steps of modules that `fully_shard` shards. With torch.compile, each layer is compiled before it is sharded, as in
    torchtitan."""
    group, mesh = hw.init(), torch.distributed.init_device_mesh(DEVICE, (ranks,), mesh_dim_names=("dp",))
    local = _input(1 + rank), _input(1 + ranks + rank)
    module = WithLoss(_fully_sharded(_model(1).train(), mesh))
    ours = hostweave.torch.compile(module, mesh, example_inputs=local, optimizer=_adamw(module))
    first = _losses(rank, "hostweave", partial(ours, *local))
    for name in ("torch FSDP2, eager", "torch FSDP2 with torch.compile"):
        sharded: Any = _model(1).train()
        if name.endswith("compile"):
            for number, layer in enumerate(sharded.layers):
                sharded.layers[number] = torch.compile(layer, fullgraph=True, dynamic=False, backend=BACKEND)
        sharded = _fully_sharded(sharded, mesh)
        step = _torch_step(sharded, sharded, *local)
        _expect_same(rank, f"losses of {name}", first, _losses(rank, name, step))
        yield {"hostweave": partial(ours, *local), name: step}
    group.close()


def _fully_sharded(module: Any, mesh: Any) -> nn.Module:
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def _torch_step(
    module: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, target: torch.Tensor, share: float = 1
) -> Any:
    """A training step of torch. The gradients are those of a rank's loss times `share`. For the mean over ranks, `share` is 1 / ranks.
    After `fully_shard`, `share` is 1, because `fully_shard` averages gradients."""
    adamw, loss_of = _adamw(module), torch.compile(mean_square, dynamic=False, backend=BACKEND)

    def step() -> torch.Tensor:
        loss = loss_of(call(x), target)
        (loss * share).backward()  # type: ignore[no-untyped-call]
        adamw.step()
        adamw.zero_grad()
        return loss.detach()

    return step


def _losses(rank: int, name: str, step: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Runs the first three steps. Returns the loss of each step before its update, averaged over all ranks."""
    started, found = time.perf_counter(), []
    for _ in range(3):
        loss = step().detach().clone()
        torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.SUM)
        found.append(loss / torch.distributed.get_world_size())
    losses = torch.stack(found)
    _say(rank, f"{name}: {time.perf_counter() - started:.1f} s for the first steps, losses {losses.tolist()}")
    return losses


def _compiled(parallel: nn.Module, mesh: Any, is_async: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    if is_async:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.get_group().group_name)
        torch._dynamo.reset()
    layers = [torch.compile(layer, fullgraph=True, dynamic=False, backend=BACKEND) for layer in parallel.layers]  # type: ignore[union-attr]

    def call(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    return call


def _expect_same(rank: int, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    _say(rank, f"{what}: largest difference {difference:.4f}")
    assert difference <= TOLERANCE, what


def _say(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


# --- the time to compile ----------------------------------------------------------------------------------------------


def _without_memory(model: nn.Module) -> nn.Module:
    """The model with parameters that need no memory, because they are expanded from single elements."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.ones(1, dtype=torch.bfloat16).expand(parameter.shape), requires_grad=False))
    return model


def _compile_32_layers() -> None:
    """Prints the time to compile 32 layers. A program of one layer is compiled first, so that the runtime libraries are already built.

    Hostweave compiles for 8 ranks. torch.compile compiles layers of one rank's sizes, without communication.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOSTWEAVE_CACHE"], os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/hostweave", f"{folder}/inductor"
        _compiled_by_us(1, training=True)
        for training in (False, True):
            what = "forward and backward" if training else "forward"
            lowered, ours = _compiled_by_us(32, training)
            print(f"compile 32 layers, {what}: {ours:.1f} s, {lowered:.1f} of them before the C++ compiler", flush=True)
            if gpus():
                theirs = _compiled_by_torch(32, training)
                print(f"torch.compile of the 32 layers of one rank, {what}: {theirs:.1f} s ({theirs / ours:.2f} times ours)", flush=True)


def _compiled_by_us(layers: int, training: bool) -> tuple[float, float]:
    """Seconds until the programs are lowered, and until their C++ is generated and compiled. Both count from the start."""
    x = torch.empty(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=training)
    with torch.device("meta"):
        whole = Llama(layers, 8).to(torch.bfloat16).train(training)
    _with_tables(whole)
    whole = _without_memory(whole).requires_grad_(training)
    started = time.perf_counter()
    model = hostweave.torch.compile(whole, hw.Mesh(tp=8), plan(layers), (x,), target="cuda", training=training)
    lowered = time.perf_counter() - started
    for program in (model.program, *([model.backward] if training else [])):  # type: ignore[attr-defined]
        program.build()
    return lowered, time.perf_counter() - started


def _compiled_by_torch(layers: int, training: bool) -> float:
    """Seconds of the first call, and of its backward pass if `training`."""
    torch._dynamo.reset()
    with torch.device("cuda"):
        alone = _weights(Llama(layers, 1).to(torch.bfloat16)).train(training)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=training)
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.set_grad_enabled(training):
        y = torch.compile(alone, fullgraph=True, dynamic=False)(x)
        if training:
            y.sum().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _with_tables(model: nn.Module) -> None:
    """Sets the constants of a model that was created without memory."""
    tables = Attention(1, 1, 1, HEAD, TOKENS)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.attention.cos, layer.attention.sin = tables.cos, tables.sin


if __name__ == "__main__":
    main(*sys.argv[1:])
