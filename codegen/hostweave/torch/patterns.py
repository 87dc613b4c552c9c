"""Patterns: groups of nodes of a graph that become one op of the fusion."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from hostweave.torch.nodes import ATTENTION, op_of


def word_of_mask(node: Any, argument: Node, mask: torch.Tensor) -> str | None:
    """Recognises a constant mask of attention as "causal" or "none" (masks no element). Otherwise None."""
    if op_of(node) != ATTENTION or argument not in node.args[3:4]:
        return None
    added = mask.dtype != torch.bool
    if added and not bool(((mask == 0) | (mask < -1e30)).all()):
        return None
    seen, (queries, keys) = mask == 0 if added else mask, (one.meta["val"].shape[-2] for one in node.args[:2])
    if bool(seen.all()):
        return "none"
    if tuple(seen.shape[-2:]) != (queries, keys):
        return None
    causal = torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril()
    return "causal" if bool((seen == causal).all()) else None


def word_of_constant_mask(node: Any, constants: Mapping[Any, Any]) -> str | None:
    mask = constants.get(node.args[3]) if len(node.args) > 3 and isinstance(node.args[3], Node) else None
    return word_of_mask(node, node.args[3], mask) if isinstance(mask, torch.Tensor) else None


def consecutive(node: Any) -> tuple[Node, Node, Node, int] | None:
    """Recognises a write to a cache, `x.index_copy(dim, arange(n) + begin, update)`. Returns (x, update, begin, dim), or None."""
    if op_of(node) != "index_put.default" or (len(node.args) > 3 and node.args[3]):  # the trace of index_copy
        return None
    x, indices, update = node.args[:3]
    *before, index = indices
    if any(one is not None for one in before) or index is None or op_of(index) != "add.Tensor" or index.kwargs:
        return None
    begin = next((one for one in index.args if isinstance(one, Node) and one.meta["val"].ndim == 0), None)
    arange = next((one for one in index.args if isinstance(one, Node) and one is not begin), None)
    if begin is None or arange is None or (op_of(arange), arange.args[0]) != ("arange.start_step", 0) or arange.args[2:] not in ((), (1,)):
        return None
    old, new, dim = x.meta["val"].shape, update.meta["val"].shape, len(before)
    fits = len(new) == len(old) and all(a == b for i, (a, b) in enumerate(zip(old, new, strict=True)) if i != dim)
    return (x, update, begin, dim) if fits and new[dim] == index.meta["val"].shape[0] else None


def repeated(node: Any) -> Node | None:
    """Recognises repeated heads of keys or values (`repeat_kv` of transformers). Returns the tensor [B, G, S, E] before, or None."""
    chain = [node]
    for op in ("view.default", "clone.default", "expand.default", "unsqueeze.default"):
        if op == "clone.default" and op_of(chain[-1]) == "expand.default":
            continue  # no clone if G is 1
        if op_of(chain[-1]).removeprefix("_unsafe_") != op:
            return None
        chain.append(chain[-1].args[0])
    made, expanded, kept = (one.meta["val"].shape for one in (chain[0], chain[-3], chain[-1]))
    if len(kept) != 4 or chain[-2].args[1] != 2:
        return None
    b, g, *rest = kept
    is_repeated = [*expanded] == [b, g, expanded[2], *rest] and [*made] == [b, g * expanded[2], *rest]
    return chain[-1] if is_repeated else None


def rotated(node: Any, fixed: Mapping[Any, Any]) -> tuple[Node, Node, Node] | None:
    """Recognises the rotary embedding of transformers, `x * cos + rotate_half(x) * sin`. Returns (x, cos, sin), or None. cos and sin must
    be in `fixed`, with the dtype and the last dim of x."""
    products: list[Any] = [argument for argument in node.args if isinstance(argument, Node) and op_of(argument) == "mul.Tensor"]
    if op_of(node) != "add.Tensor" or len(products) != 2 or node.kwargs:
        return None
    (x, cos), (turned, sin) = products[0].args, products[1].args
    tables = [fixed.get(table) for table in (cos, sin) if isinstance(table, Node)]
    if not isinstance(x, Node) or not isinstance(turned, Node) or op_of(turned) != "cat.default":
        return None
    value, joined = x.meta["val"], turned.args[0]
    pair: list[Any] = [*joined] if isinstance(joined, list | tuple) else []
    if len(pair) != 2 or node.meta["val"].shape != value.shape:
        return None
    negative, first = pair
    last, half = value.ndim - 1, value.shape[-1] // 2
    if op_of(negative) != "neg.default" or turned.args[1] not in (-1, last):
        return None
    halves = [(op_of(node), node.args[:3], node.args[4:], node.meta["val"].shape[-1]) for node in (first, negative.args[0])]
    if halves != [("slice.Tensor", (x, last, at), (), half) for at in (0, half)] or len(tables) != 2:
        return None
    is_table = [isinstance(t, torch.Tensor) and t.dtype == value.dtype and t.shape[-1:] == value.shape[-1:] for t in tables]
    return (x, cos, sin) if all(is_table) else None
