"""Layers that repeat are differentiated once: AOTAutograd sees the first, and an op in place of each other one and of its derivative.

A layer is like the first where it computes the same, and the same of its arguments require grad. The nodes of the first and of its
derivative are copied for the others once both are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph as FxGraph

from hostweave.torch.graph import Graph
from hostweave.torch.layers import Layer, repeated_layers
from hostweave.torch.ops import ops
from hostweave.torch.repeats import laid_out, numbers, results_of, write_out


@dataclass(eq=False)
class _First:
    """A layer that is traced, the number of it and that of its derivative."""

    path: str
    number: int
    derivative: int
    differentiable: list[int]  # the places of the results that have gradients
    reached: list[int]  # the places of the arguments that these depend on by what has gradients


class Derivatives:
    def __init__(self, outer: Graph):
        layers = (layer for layer in repeated_layers(outer) if all(map(_is_tensor, (*layer.arguments, *layer.results))))
        self.layers = {layer.nodes[0]: layer for layer in layers}
        self._firsts: dict[object, _First] = {}

    def restart(self) -> None:
        """Before the graph is traced: AOTAutograd does it twice."""
        self.close()
        self._firsts = {}

    def results(self, layer: Layer, taken: Sequence[torch.Tensor], compute: Callable[..., list[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """What a layer gives for these arguments, with gradients."""
        key = id(layer.like), tuple(one.requires_grad for one in taken)
        if key in self._firsts:
            made: Sequence[torch.Tensor] = _StandIn.apply(self._firsts[key], layer.path, *taken)  # type: ignore[no-untyped-call]
            return made
        first = self._firsts[key] = _First(layer.path, next(numbers), next(numbers), [], [])
        begun = _Begin.apply(first, *taken)  # type: ignore[no-untyped-call]
        results = compute(*begun)
        first.differentiable = [place for place, one in enumerate(results) if one.requires_grad]
        first.reached = _reached(results, begun)
        results_of[first.number] = list(map(laid_out, results))
        results_of[first.derivative] = [laid_out(taken[place]) for place in first.reached]
        made = _End.apply(first, *results)  # type: ignore[no-untyped-call]
        return made

    def write_out(self, graph: FxGraph) -> None:
        """Copies the nodes of firsts, and of their derivatives, for the others."""
        firsts = self._firsts.values()
        path_of = {number: first.path for first in firsts for number in (first.number, first.derivative)}
        write_out(graph, path_of, {first.derivative: first.number for first in firsts})

    def close(self) -> None:
        for first in self._firsts.values():
            results_of.pop(first.number)
            results_of.pop(first.derivative)


def _is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _reached(results: Sequence[torch.Tensor], begun: Sequence[torch.Tensor]) -> list[int]:
    """The places of the values that results depend on by functions with derivatives."""
    begin = next((one.grad_fn for one in begun if one.requires_grad), None)
    functions = list(dict.fromkeys(one.grad_fn for one in results if one.grad_fn is not None))
    seen, found = set(functions), set()
    for function in functions:  # grows while it is walked
        for before, place in function.next_functions:
            if before is begin:
                found.add(place)
            elif before is not None and before not in seen:
                seen.add(before)
                functions.append(before)
    return sorted(found)


def _at(places: Sequence[int], values: Sequence[Any], count: int) -> list[Any]:
    of = dict(zip(places, values, strict=True))
    return [of.get(place) for place in range(count)]


class _Begin(torch.autograd.Function):
    """The arguments of a layer, and the end of its derivative."""

    @staticmethod
    def forward(ctx: Any, first: _First, *taken: torch.Tensor) -> Any:
        ctx.first, ctx.count = first, len(taken)
        made = tuple(ops.layer_begins(list(taken), [], first.number))
        ctx.mark_non_differentiable(*(one for one, of in zip(made, taken, strict=True) if not of.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        first = ctx.first
        made = ops.layer_ends([gradients[place] for place in first.reached], first.derivative)
        return None, *_at(first.reached, made, ctx.count)


class _End(torch.autograd.Function):
    """The results of a layer, and the beginning of its derivative."""

    @staticmethod
    def forward(ctx: Any, first: _First, *results: torch.Tensor) -> Any:
        ctx.first, ctx.count = first, len(results)
        made = tuple(ops.layer_ends(list(results), first.number))
        ctx.mark_non_differentiable(*(one for place, one in enumerate(made) if place not in first.differentiable))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        first = ctx.first
        made = ops.layer_begins([gradients[place] for place in first.differentiable], [], first.derivative)
        return None, *_at(first.differentiable, made, ctx.count)


class _StandIn(torch.autograd.Function):
    """A layer that computes the same as the first, and its derivative."""

    @staticmethod
    def forward(ctx: Any, first: _First, path: str, *taken: torch.Tensor) -> Any:
        ctx.first, ctx.path, ctx.count = first, path, len(taken)
        made = tuple(ops.layer(list(taken), [], first.number, path))
        ctx.mark_non_differentiable(*(one for place, one in enumerate(made) if place not in first.differentiable))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        first = ctx.first
        given = [gradients[place] for place in first.differentiable]
        made = ops.layer(given, [], first.derivative, ctx.path)
        return None, None, *_at(first.reached, made, ctx.count)
