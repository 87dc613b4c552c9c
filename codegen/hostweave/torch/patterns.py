"""What several nodes of a graph compute together that is one op here."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

ATTENTION = "scaled_dot_product_attention.default"


def op_of(node: Node) -> str:
    """The name of the op, such as `add.Tensor`."""
    return str(node.target).removeprefix("aten.")


def word_of_mask(node: Node, argument: Node, mask: torch.Tensor) -> str | None:
    """What a constant mask of attention says in a word: "causal", "none", or nothing."""
    if op_of(node) != ATTENTION or argument not in node.args[3:4]:
        return None
    added = mask.dtype != torch.bool
    if added and not bool(((mask == 0) | (mask < -1e30)).all()):
        return None
    seen = mask == 0 if added else mask
    if bool(seen.all()):
        return "none"
    causal = torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device).tril()
    return "causal" if bool((seen == causal).all()) else None


def repeated(node: Any) -> Node | None:
    """The keys [B, G, S, E] of which a node has every head several times, as transformers' `repeat_kv` writes it."""
    chain = [node]
    for op in ("view.default", "clone.default", "expand.default", "unsqueeze.default"):
        if op == "clone.default" and op_of(chain[-1]) == "expand.default":
            continue  # of one group of heads the view needs no copy
        if op_of(chain[-1]) != op:
            return None
        chain.append(chain[-1].args[0])
    expanded, kept = chain[-3].meta["val"], chain[-1].meta["val"]
    is_repeated = chain[-2].args[1] == 2 and [*expanded.shape[:2]] == [*kept.shape[:2]]
    return chain[-1] if is_repeated and chain[0].meta["val"].ndim == 4 else None


def rotated(node: Any, fixed: Mapping[Any, Any]) -> tuple[Node, Node, Node] | None:
    """x and the tables of `x * cos + rotate_half(x) * sin`, as transformers writes rotary embeddings, with tables that have no gradient."""
    products: list[Any] = [argument for argument in node.args if isinstance(argument, Node) and op_of(argument) == "mul.Tensor"]
    if op_of(node) != "add.Tensor" or len(products) != 2 or node.kwargs:
        return None
    (x, cos), (turned, sin) = products[0].args, products[1].args
    tables = [fixed.get(table) for table in (cos, sin) if isinstance(table, Node)]
    if not isinstance(x, Node) or not isinstance(turned, Node) or op_of(turned) != "cat.default":
        return None
    value, joined = x.meta["val"], turned.args[0]
    pair: list[Any] = [*joined] if isinstance(joined, list | tuple) else []
    if len(pair) != 2:
        return None
    negative, first = pair
    last, half = value.ndim - 1, value.shape[-1] // 2
    if op_of(negative) != "neg.default" or turned.args[1] not in (-1, last):
        return None
    parts = [(op_of(part), part.args[:3]) for part in (first, negative.args[0])]
    if parts != [("slice.Tensor", (x, last, at)) for at in (0, half)] or len(tables) != 2:
        return None
    is_table = [isinstance(t, torch.Tensor) and t.dtype == value.dtype and t.shape[-1:] == value.shape[-1:] for t in tables]
    return (x, cos, sin) if all(is_table) else None
