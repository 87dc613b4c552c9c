"""Mixtures of experts: grouped products, dispatch and combine, and a layer, compared with torch.

- products: `hw.grouped_matmul` and the gradient of its matrices, on one GPU, compared with torch._grouped_mm. Cases have 8, 64 or 128
  experts, 16 to 4096 tokens per expert, at most 131072 tokens, and even or skewed routing.
- dispatch: each GPU has 128 or 4096 tokens of 7168 elements. Each token is sent to the ranks of 8 of 64 experts, and rows are sent back.
  Hostweave sends a token at most once to each rank, and each rank returns a sum, in f32 or in bf16. One baseline is torch's
  all_to_all_single, with counts that the host knows in advance. The second baseline is the predicted time of a copy engine that sends one
  row per token and expert of another rank, in each direction.
- layer: a Mixtral layer at 8B shapes on one GPU: the forward pass alone, and both passes. The peer is the same layer in torch with
  _grouped_mm, eager and compiled.
- layers: the same layer on all GPUs, with sharded experts. torch sends rows by all_to_all_single, and the host knows all counts.
- bounds: the six products of the layer's forward and backward pass, each alone, and then one after another. The variants are Hostweave,
  torch._grouped_mm, and one cuBLAS matmul per expert; for cuBLAS, the host knows all counts. The benchmark also times a copy of as many
  bytes as all kernels of the layer except the products read and write. The printed bounds are the time of the products, without and with
  the copy.
- chain: dispatch and combine of 128 tokens, and of one token of 8 elements. The single token needs the same kernels and signals, but almost
  no bytes are sent. The baseline is a gather and a reduce-scatter, in two kernels: a dispatch and combine needs at least these two
  exchanges.

Data is random. One process per GPU runs the variants of a row alternately. Printed times are milliseconds of the slowest rank, as medians
over calls. All ranks start a call together. Arguments are names of the list above; default: all. `dispatch`, `layers` and `chain` need at
least two GPUs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, product
from typing import Any

from peers import report
from peers.torch_ranks import times_on_ranks

import hostweave as hw
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.programs import load_file
from hostweave.fusion_ir.ir import Fusion
from hostweave.types.machine import H200

REPETITIONS = 15
WAIT = 2_000_000  # cycles that a kernel spins before each call, to hide host time
SHAPES = {8: (4096, 14336), 64: (7168, 2048), 128: (2048, 1536)}  # by number of experts; Mixtral, DeepSeek-V3, Qwen3-MoE
TOKENS = (16, 128, 1024, 4096)  # tokens per expert
MOST_ROWS = 131072
HIDDEN, EXPERTS, CHOICES = 7168, 64, 8  # sizes for dispatch
LAYER = {"experts": 8, "top": 2, "hidden": 4096, "inner": 14336, "tokens": 4096}
TOLERANCE = 0.02  # relative to the largest element; sums of thousands of terms are rounded to bf16

Calls = dict[str, Callable[[], Any]]


def main(names: Sequence[str]) -> None:
    on_one = {"products": _products, "layer": _layers, "bounds": _bounds}
    on_all = {"dispatch": _dispatched, "layers": _layers, "chain": _chain}
    for name, calls in (on_one | on_all).items():
        if name not in names and names:
            continue
        ranks = 1 if name in on_one else len(gpus())
        if name in on_all and ranks < 2:
            print(f"{name}: needs two GPUs, and this machine has one")
            continue
        medians: dict[str, float] = {}
        for times in times_on_ranks(calls, ranks, REPETITIONS, WAIT):
            print(f"{name}: {report.line(times, [next(iter(times))])}", flush=True)  # The first variant is Hostweave's.
            medians |= {variant: statistics.median(ms) for variant, ms in times.items()}
        if calls is _bounds:
            print(_bound(medians), flush=True)


def _expect_near(got: Any, wanted: Any) -> None:
    assert float((got - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max())


# --- products ---------------------------------------------------------------------------------------------------------


def product_of(experts: int, k: int, n: int, is_gradient: bool, is_turned: bool = True) -> hw.Program:
    """Grouped matmul with matrices [k, n], or [n, k] if `is_turned`. If `is_gradient`: the gradient of the matrices."""
    if is_gradient:

        @hw.fusion(x=hw.bf16["T", k], dy=hw.bf16["T", n], ends=hw.i32[experts])
        def gradient(x: hw.Tensor, dy: hw.Tensor, ends: hw.Tensor) -> hw.Tensor:
            return hw.grouped_matmul(x.T, dy, ends)

        return hw.compile(gradient, target="cuda")

    @hw.fusion(x=hw.bf16["T", k], w=hw.bf16[experts, n, k] if is_turned else hw.bf16[experts, k, n], ends=hw.i32[experts])
    def product(x: hw.Tensor, w: hw.Tensor, ends: hw.Tensor) -> hw.Tensor:
        return hw.grouped_matmul(x, hw.permute_dims(w, (0, 2, 1)) if is_turned else w, ends)

    return hw.compile(product, target="cuda")


def _ends(experts: int, tokens: int, is_skewed: bool) -> Any:
    """Ends of groups with `tokens` rows on average. If skewed, the numbers of rows follow Zipf's law."""
    import torch

    shares = 1 / torch.arange(1, experts + 1) if is_skewed else torch.ones(experts)
    ends = (shares.cumsum(0) / shares.sum() * experts * tokens).round().int()
    return ends.cuda()


def _products(rank: int, ranks: int) -> Iterator[Calls]:
    """Yields a call of Hostweave and a call of torch for each case. Raises AssertionError if results differ."""
    import torch

    group = hw.init()
    for experts, (k, n) in SHAPES.items():
        w = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        for is_gradient in (False, True):
            program = product_of(experts, k, n, is_gradient)
            for tokens in TOKENS:
                rows = experts * tokens
                if rows > MOST_ROWS:
                    continue
                x, dy = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for size in (k, n))
                for is_skewed in (False, True):
                    ends = _ends(experts, tokens, is_skewed)
                    ours = program.capture(*((x, dy, ends) if is_gradient else (x, w, ends)), group=group)
                    operands = (x.t(), dy) if is_gradient else (x, w.transpose(1, 2))
                    of_torch = partial(torch._grouped_mm, *operands, offs=ends)
                    _expect_near(ours(), of_torch())
                    what = f"{experts} experts, {tokens} tokens each, {'skewed' if is_skewed else 'even'}, {k} x {n}"
                    yield {f"{what}{', gradient of weights' * is_gradient}": ours, "torch._grouped_mm": of_torch}
            program.close()


# --- dispatch and combine ---------------------------------------------------------------------------------------------


def dispatched_and_combined(ranks: int, hidden: int = HIDDEN, sent: Any = None) -> Fusion:
    """Sends rows to the ranks of their experts, and adds the weighted rows on the ranks of their tokens."""

    @hw.fusion(
        mesh=hw.Mesh(ep=ranks),
        **{"x": hw.bf16["T@ep", hidden], "ids": hw.i64["T@ep", CHOICES], "weights": hw.f32["T@ep", CHOICES]},
    )
    def dispatch_and_combine(x: hw.Tensor, ids: hw.Tensor, weights: hw.Tensor) -> hw.Tensor:
        routing = hw.moe_routing(ids, EXPERTS, axes="ep")
        return hw.moe_combine(hw.moe_dispatch(x, routing), routing, weights, sent)

    return dispatch_and_combine


def _dispatched(rank: int, ranks: int) -> Iterator[Calls]:
    """Yields calls that send rows to the ranks of their experts and back, without products.

    Each case has a separate program. The cost model chooses the transport of each program.
    """
    import torch

    group = hw.init()
    for tokens, sums in product((128, 4096), (None, hw.bf16)):
        program = hw.compile(dispatched_and_combined(ranks, sent=sums), target="cuda", options=hw.Options(sizes={"T": tokens * ranks}))
        torch.manual_seed(rank)
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :CHOICES].contiguous()
        weights = torch.rand(tokens, CHOICES, device="cuda")
        ours, of_torch = program.capture(x, ids, weights, group=group), _torch_dispatch(x, ids, weights, ranks)
        _expect_near(ours(), of_torch())
        sent = tokens * CHOICES * (ranks - 1) // ranks * HIDDEN * 2  # bytes that leave a GPU in each direction
        if rank == 0 and not sums:
            print(f"{tokens} tokens: {sent / 1e6:.1f} MB each way, by a copy engine {2e3 * H200.link('put', ranks).seconds(sent):.3f} ms")
        what = f"{tokens} tokens of {HIDDEN}, top {CHOICES} of {EXPERTS}, sums sent in {sums or hw.f32}, {ranks} GPUs"
        yield {what: ours, "torch all_to_all, known counts": of_torch}
        program.close()


def exchanges_alone(ranks: int, tokens: int, hidden: int) -> Fusion:
    """A gather of rows, and a reduce-scatter of sums in f32. Dispatch and combine need at least these two exchanges."""
    shard = f"{tokens * ranks}@ep"

    @hw.fusion(mesh=hw.Mesh(ep=ranks), x=hw.bf16[shard, hidden], scale=hw.f32[f"{ranks}@ep", 1, 1])
    def two_exchanges(x: hw.Tensor, scale: hw.Tensor) -> hw.Tensor:
        rows = hw.astype(hw.reshard(x, tokens * ranks, hidden), hw.f32)
        return hw.astype(hw.reshard(hw.sum(rows * scale, axis=0), shard, hidden), hw.bf16)

    return two_exchanges


def _chain(rank: int, ranks: int) -> Iterator[Calls]:
    """Dispatch and combine, and two exchanges alone, of 128 tokens and of one token of 8 elements.

    The time for one token is mostly launches of kernels, and signals.
    """
    import torch

    group = hw.init()
    calls: Calls = {}
    for tokens, hidden in ((128, HIDDEN), (1, 8)):
        program = hw.compile(dispatched_and_combined(ranks, hidden), target="cuda", options=hw.Options(sizes={"T": tokens * ranks}))
        alone = hw.compile(exchanges_alone(ranks, tokens, hidden), target="cuda")
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :CHOICES].contiguous()
        weights = torch.rand(tokens, CHOICES, device="cuda")
        what = f"{tokens} tokens of {hidden} elements, {ranks} GPUs"
        calls[what] = program.capture(x, ids, weights, group=group)
        calls[f"two exchanges, {what}"] = alone.capture(x, torch.ones(1, 1, 1, device="cuda"), group=group)
    yield calls


def _torch_dispatch(x: Any, ids: Any, weights: Any, ranks: int) -> Callable[[], Any]:
    """Call that sends rows, sorted by expert, to the ranks of the experts and back by all_to_all_single. The host knows the counts before
    the call."""
    import torch
    import torch.distributed as dist

    target = (ids // (EXPERTS // ranks)).reshape(-1)
    sent = torch.bincount(target, minlength=ranks)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    out_of, into = sent.tolist(), received.tolist()
    there, back = x.new_empty(sum(into), HIDDEN), x.new_empty(sum(out_of), HIDDEN)

    def call() -> Any:
        order = ids.reshape(-1).argsort(stable=True)
        dist.all_to_all_single(there, x[order // CHOICES], into, out_of)
        dist.all_to_all_single(back, there, out_of, into)
        rows = torch.empty_like(back)
        rows[order] = back
        return (rows.view(len(x), CHOICES, HIDDEN) * weights[..., None]).sum(1).to(x.dtype)

    return call


# --- a layer ----------------------------------------------------------------------------------------------------------


def layer_of(name: str, ranks: int = 1, **options: Any) -> hw.Program:
    """The program `moe` (forward) or `moe_training` (forward and backward) of examples/moe.py. Experts and tokens are sharded over the
    ranks."""
    example: Any = load_file(EXAMPLES / "moe.py", {"mesh": hw.Mesh(ep=ranks), "EXPERTS": LAYER["experts"], "TOP": LAYER["top"]})
    sizes = {"T": ranks * LAYER["tokens"], "H": LAYER["hidden"], "I": LAYER["inner"]}
    return hw.compile(getattr(example, name), target="cuda", options=hw.Options(sizes=sizes, **options))


def _layers(rank: int, ranks: int) -> Iterator[Calls]:
    """Yields calls of the layer of examples/moe.py, and of the same layer in torch: forward, then forward and backward."""
    import torch
    import torch.distributed as dist

    group = hw.init()
    hidden, inner, experts, tokens = (LAYER[name] for name in ("hidden", "inner", "experts", "tokens"))
    shapes = {"x": (tokens, hidden), "dy": (tokens, hidden), "router": (hidden, experts)}
    shapes |= {"w1": (experts // ranks, hidden, 2, inner), "w2": (experts // ranks, inner, hidden)}
    torch.manual_seed(rank)
    given = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for name, shape in shapes.items()}
    x, dy, router, w1, w2 = given.values()
    dist.broadcast(router, 0)
    bias = torch.zeros(experts, device="cuda")
    programs = [layer_of(name, ranks) for name in ("moe", "moe_training")]
    forward = programs[0].capture(x, router, bias, w1, w2, group=group)
    both = programs[1].capture(x, dy, router, bias, w1, w2, group=group)
    inputs = [tensor.clone().requires_grad_() for tensor in (x, router, w1, w2)]
    layer = _torch_layer if ranks == 1 else partial(_torch_layer_of_ranks, **_known(x, router, ranks))
    compiled = torch.compile(layer, dynamic=False)

    def of_torch(layer: Callable[..., Any]) -> Any:
        y = layer(*inputs)
        gradients = torch.autograd.grad(y, inputs, dy)
        if ranks > 1:
            dist.all_reduce(gradients[1])
        return y, *gradients

    with torch.no_grad():
        _expect_near(forward(), layer(*inputs))
    for got, wanted in zip(both(), of_torch(layer), strict=True):
        _expect_near(got, wanted)
    what = f"Mixtral of 8B shapes, {tokens} tokens per GPU, {ranks} GPUs"
    yield {f"{what}, forward": forward, "torch eager": partial(layer, *inputs), "torch.compile": partial(compiled, *inputs)}

    yield {
        f"{what}, forward and backward": both,
        "torch eager": partial(of_torch, layer),
        "torch.compile": partial(of_torch, compiled),
    }
    for program in programs:
        program.close()


OURS, OF_TORCH, CUBLAS, COPY = "ours", "torch._grouped_mm", "cuBLAS for each expert, counts known", "a copy of the bytes of other kernels"
# Elements of bf16 per choice that all kernels of the layer except the products read and write. A choice is a token and one of its two
# experts. The `hidden` term is for the gathers of x and dy, the gradients of the weights of choices, and the sums of y and dx. The `inner`
# term is for SwiGLU and its gradient. Both choices of a token share rows of x, y and gradients.
REST = LAYER["hidden"] * (3 + 1.5 + 3) + LAYER["inner"] * (3 + 5)


def _bounds(rank: int, ranks: int) -> Iterator[Calls]:
    """Yields calls. The first calls are each product of the layer alone, and all six products one after another. Then follow a copy of the
    bytes of all kernels except the products, and the layer, forward and backward."""
    import torch

    group = hw.init()
    hidden, inner, experts, tokens = (LAYER[name] for name in ("hidden", "inner", "experts", "tokens"))
    rows = tokens * LAYER["top"]
    shapes = [(rows, hidden), (rows, hidden), (rows, inner), (rows, 2 * inner), (experts, hidden, 2 * inner), (experts, inner, hidden)]
    x, dy, h, dg, w1, w2 = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02 for shape in shapes)
    _, ids = _chosen(x[:tokens], w2[0, :hidden, :experts])
    ends = ids.reshape(-1).bincount(minlength=experts).cumsum(0).int()
    products = {"x w1": (x, w1), "h w2": (h, w2), "dy w2'": (dy, w2.mT), "dg w1'": (dg, w1.mT), "h' dy": (h.T, dy), "x' dg": (x.T, dg)}
    in_order: dict[str, list[Callable[[], Any]]] = {OURS: [], OF_TORCH: [], CUBLAS: []}
    programs = []
    for name, (a, b) in products.items():
        is_gradient, is_turned = b.ndim == 2, not b.is_contiguous()
        k, n = (a.shape[0], b.shape[1]) if is_gradient else b.shape[1:]
        program = product_of(experts, k, n, is_gradient, is_turned)
        programs.append(program)
        given = (a.T if is_gradient else a, b.mT if is_turned else b, ends)
        ours, of_torch = program.capture(*given, group=group), partial(torch._grouped_mm, a, b, offs=ends)
        calls: Calls = {OURS: ours, OF_TORCH: of_torch, CUBLAS: _by_expert(a, b, ends)}
        for variant in (OURS, CUBLAS):
            _expect_near(calls[variant](), of_torch())
        for variant, call in calls.items():
            in_order[variant].append(call)
        yield {f"{name}: {variant}": call for variant, call in calls.items()}
    yield {f"six one after another: {variant}": partial(_each, calls) for variant, calls in in_order.items()}
    for program in programs:
        program.close()
    one = torch.empty(int(rows * REST), device="cuda", dtype=torch.bfloat16)  # A copy reads half of the bytes, and writes the other half.
    yield {COPY: partial(one[: len(one) // 2].copy_, one[len(one) // 2 :])}
    del x, dy, h, dg, w1, w2, one, in_order, products, given, calls, ours, of_torch, a, b
    yield from islice(_layers(rank, ranks), 1, 2)


def _each(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _by_expert(a: Any, b: Any, ends: Any) -> Callable[[], Any]:
    """Call that computes one cuBLAS matmul per expert. The host knows the ends of the groups."""
    import torch

    bounds = [0, *ends.tolist()]
    groups = [slice(*bounds[i : i + 2]) for i in range(len(ends))]
    if b.ndim == 2:
        result = a.new_empty(len(ends), len(a), b.shape[1])
        terms = [(a[:, rows], b[rows], result[i]) for i, rows in enumerate(groups)]
    else:
        result = a.new_empty(len(a), b.shape[2])
        terms = [(a[rows], b[i], result[rows]) for i, rows in enumerate(groups)]

    def call() -> Any:
        for x, y, out in terms:
            torch.mm(x, y, out=out)
        return result

    return call


def _bound(medians: Mapping[str, float]) -> str:
    """Text with bounds of the layer's time, and the speedups over torch.compile at these bounds. Both follow from the medians of
    `_bounds`."""
    alone = {name.split(": ")[0] for name in medians if name.endswith(CUBLAS)} - {"six one after another"}
    fastest = sum(min(medians[f"{name}: {variant}"] for variant in (OURS, OF_TORCH, CUBLAS)) for name in alone)
    in_order = min(medians[f"six one after another: {variant}"] for variant in (OURS, OF_TORCH, CUBLAS))
    peer, copy = medians["torch.compile"], medians[COPY]
    texts = [
        f"{what} {ms:.3f} ms, {peer / ms:.3f} x torch.compile; with the copy {ms + copy:.3f} ms, {peer / (ms + copy):.3f} x"
        for what, ms in (("fastest products, each alone", fastest), ("fastest six one after another", in_order))
    ]
    return "bounds: " + "; ".join(texts)


def _chosen(x: Any, router: Any) -> tuple[Any, Any]:
    chosen, ids = (x @ router).float().softmax(-1).topk(LAYER["top"])
    return chosen, ids


def _experts_of(rows: Any, w1: Any, w2: Any, ends: Any) -> Any:
    import torch

    gate, up = torch._grouped_mm(rows, w1.flatten(2), offs=ends).chunk(2, -1)
    return torch._grouped_mm(torch.nn.functional.silu(gate) * up, w2, offs=ends)


def _weighted(y: Any, order: Any, chosen: Any) -> Any:
    """Weighted sum of the rows of each token. Row i of y is the result for choice order[i], which is a token and one of its experts."""
    import torch

    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    weights = (chosen / chosen.sum(-1, keepdim=True)).to(y.dtype)
    return (y[back].view(*chosen.shape, -1) * weights[..., None]).sum(1)


def _torch_layer(x: Any, router: Any, w1: Any, w2: Any) -> Any:
    import torch

    experts = LAYER["experts"]
    chosen, ids = _chosen(x, router)
    order = ids.reshape(-1).argsort(stable=True)
    ends = torch.histc(ids.int(), bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
    return _weighted(_experts_of(x[order // LAYER["top"]], w1, w2, ends), order, chosen)


def _known(x: Any, router: Any, ranks: int) -> dict[str, Any]:
    """Routing that is known in advance: numbers of rows to and from each rank, and the ends of the groups of experts. Also returns the
    order of received rows by expert, and the inverse of this order."""
    import torch
    import torch.distributed as dist

    rank, sent = dist.get_rank(), torch.bincount(_chosen(x, router)[1].reshape(-1), minlength=LAYER["experts"])
    of_ranks = sent.new_empty(ranks * len(sent))
    dist.all_gather_into_tensor(of_ranks, sent)
    counts = of_ranks.view(ranks, ranks, -1)  # by sender, receiver and expert
    received = counts[:, rank]
    expert = torch.arange(received.shape[1], device=x.device).repeat(ranks).repeat_interleave(received.reshape(-1))
    order = expert.argsort(stable=True)
    return {
        "out_of": counts[rank].sum(-1).tolist(),
        "into": received.sum(-1).tolist(),
        "by_expert": order,
        "by_sender": order.argsort(),
        "ends": received.sum(0).cumsum(0).int(),
    }


def _torch_layer_of_ranks(
    x: Any, router: Any, w1: Any, w2: Any, *, out_of: list[int], into: list[int], by_expert: Any, by_sender: Any, ends: Any
) -> Any:
    """The layer in torch on several ranks. all_to_all_single sends rows, sorted by expert, to the ranks of the experts and back."""
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    chosen, ids = _chosen(x, router)
    order = ids.reshape(-1).argsort(stable=True)
    world: Any = dist.group.WORLD
    there = all_to_all_single_autograd(x[order // LAYER["top"]], into, out_of, world)
    y = _experts_of(there[by_expert], w1, w2, ends)[by_sender]
    return _weighted(all_to_all_single_autograd(y, out_of, into, world), order, chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
