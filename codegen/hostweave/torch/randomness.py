"""Ops that draw random numbers. Each op gets a seed from an additional argument of the program."""

import json
import operator
from collections import Counter
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.runtime.coordinator import CallSignature
from hostweave.runtime.group import Group
from hostweave.torch.nodes import modules_of, op_of
from hostweave.torch.ops import ops

SEEDS = "random_seeds"  # argument with one seed per op
OTHER_GENERATOR = "random numbers of another generator are not supported; omit generator="
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_DROPOUT = (torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default)
_DRAWN = {  # op -> distribution
    **dict.fromkeys(("rand.default", "rand_like.default"), "uniform"),
    **dict.fromkeys(("randn.default", "randn_like.default"), "normal"),
    **dict.fromkeys(("randint.default", "randint.low", "randint_like.default", "randint_like.low_dtype"), "integers"),
}


def new_seeds(name: str, count: int, group: Group | None) -> torch.Tensor:
    """Draws seeds for a call, as a u32 tensor on the CPU, equal on all ranks that can exchange messages. Collective. Raises ArgumentError
    if ranks that are processes draw different seeds.

    The seeds come from torch's CPU generator, so that torch.manual_seed makes them reproducible. Ranks that are threads share the
    generator, so rank 0 draws for all ranks.
    """
    draws = group is None or not group.in_process or group.rank == 0
    own: list[int] = torch.randint(2**31, (count,)).tolist() if draws else []
    if group is not None and group.count > 1 and group.can_coordinate:
        if group.in_process:
            own = json.loads(_gathered(name, own, group)[0])
        elif not _is_same(name, own, group):
            why = "ranks draw different random numbers, because their generators of torch are in different states"
            raise ArgumentError(f"{name}: {why}; call torch.manual_seed with the same seed in all processes")
    return torch.tensor(own, dtype=torch.uint32)


def _is_same(name: str, seeds: list[int], group: Group) -> bool:
    same = group.same_on_host(name, hash(tuple(seeds)), lambda: None, "")
    return len(set(_gathered(name, seeds, group))) == 1 if same is None else same


def _gathered(name: str, seeds: list[int], group: Group) -> list[str]:
    told = group.agree(CallSignature(f"{name}: random numbers", "", "", bound=json.dumps(seeds)), "", group.call_timeout)
    return [one.bound for one in told]


def with_seeds(graph: Graph) -> Node | None:
    """Gives each op that draws random numbers a seed. Returns the argument with the seeds, or None if no op draws random numbers."""
    drawn = [node for node in graph.nodes if _draws(node)]
    if not drawn:
        return None
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    of = next(
        value for node in (*placeholders, *drawn) for value in pytree.tree_leaves(node.meta["val"]) if isinstance(value, torch.Tensor)
    )
    with graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(drawn[0]):
        seeds = graph.placeholder(SEEDS)
    seeds.meta["val"] = of.new_empty(len(drawn), dtype=torch.uint32)
    last = seeds
    for number, node in enumerate(_by_position(drawn)):
        with graph.inserting_after(last):
            seed = graph.call_function(torch.ops.aten.select.int, (seeds, 0, number))
        seed.meta["val"], last = of.new_empty((), dtype=torch.uint32), seed
        _seed(graph, node, seed)
    return seeds


def _by_position(drawn: list[Node]) -> list[Node]:
    """Sorts ops by position in a layer, then by layer, so that repeated layers read consecutive seeds."""
    counts, positions = Counter[str](), dict[Node, tuple[str, int]]()
    for node in drawn:
        layer = next((path for path in modules_of(node) if path.rpartition(".")[2].isdigit()), "")
        positions[node] = layer.rpartition(".")[0], counts[layer]
        counts[layer] += 1
    order = list(dict.fromkeys(positions.values()))
    return sorted(drawn, key=lambda node: order.index(positions[node]))


def _draws(node: Node) -> bool:
    if node.op != "call_function":
        return False
    args: Any = node.args
    if node.target is _ATTENTION:
        return bool((args[4] if len(args) > 4 else 0.0) or node.kwargs.get("dropout_p"))
    if node.target in _DROPOUT:
        return bool(args[1]) and (args[2] if len(args) > 2 else node.kwargs.get("train")) is not False
    return op_of(node) in _DRAWN


def _seed(graph: Graph, node: Node, seed: Node) -> None:
    args: Any = node.args
    if node.target is _ATTENTION:
        node.kwargs = {**node.kwargs, "seed": seed}
    elif node.target in _DROPOUT:
        if node.target is _DROPOUT[1]:
            _take_result(graph, node)
        node.target, node.args, node.kwargs = ops.dropout.default, (args[0], seed, args[1]), {}
    else:
        node.target, node.args, node.kwargs = ops.random.default, _arguments(node, seed), {}


def _arguments(node: Node, seed: Node) -> tuple[Any, ...]:
    name, given = op_of(node), list(node.args)
    like = given.pop(0) if "_like" in name else None
    size: Any = given.pop() if like is None else []
    low, high = (0, 0) if not given else (0, given[0]) if len(given) == 1 else given
    for bound in (low, high):
        if not isinstance(bound, int):
            raise ProgramError(f"aten.{name}: the bound {bound} is not known at compile time; scale torch.rand")
    return seed, like, size, node.meta["val"].dtype, _DRAWN[name], low, high


def _take_result(graph: Graph, node: Node) -> None:
    """Makes a dropout node return only the result, without the mask."""
    for user in list(node.users):
        if user.target is operator.getitem and user.args[1] == 0:
            user.replace_all_uses_with(node)
            graph.erase_node(user)
        elif user.users:
            raise ProgramError("aten.native_dropout: its mask is used, but only its result is supported; use torch.nn.functional.dropout")
        else:
            graph.erase_node(user)
    node.meta["val"] = node.meta["val"][0]
