"""Differentiates equal layers once. AOTAutograd traces the first layer. Each later layer is one op, and the derivative of this layer is
another op. Afterwards, a copy of the nodes of the first layer, or of the first layer's derivative, replaces each of these ops. Layers are
equal if they compute the same function, and if the same arguments require grad."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hostweave.torch.graph import Graph
from hostweave.torch.layers import Layer, repeated_layers
from hostweave.torch.ops import ops
from hostweave.torch.repeats import Traced


@dataclass(eq=False)
class _FirstDerivative:
    layer: Traced
    derivative: Traced
    differentiable: list[int] = field(default_factory=list)  # indices of results
    reached: list[int] = field(default_factory=list)  # indices of arguments on which the differentiable results depend


class Derivatives:
    """Repeated layers of a graph. `firsts` is cleared before each call of the traced function, because AOTAutograd calls it twice."""

    def __init__(self, outer: Graph):
        layers = (layer for layer in repeated_layers(outer) if all(map(_is_tensor, (*layer.arguments, *layer.results))))
        self.layers = {layer.nodes[0]: layer for layer in layers}
        self.firsts: dict[object, _FirstDerivative] = {}

    def results(self, layer: Layer, taken: Sequence[torch.Tensor], compute: Callable[..., list[torch.Tensor]]) -> Sequence[torch.Tensor]:
        """Results of a layer for the arguments `taken`. Records how to differentiate the results."""
        key = id(layer.like), tuple(one.requires_grad for one in taken)
        if first := self.firsts.get(key):

            def stand_in(given: list[Any], number: int) -> Any:
                return ops.layer(given, [], number, layer.path)

            return _OpOfLayer(stand_in, stand_in, first, first.differentiable, first.reached, first.differentiable).results(taken)
        traced = Traced(layer.path)
        first = self.firsts[key] = _FirstDerivative(traced, Traced(layer.path, layer=traced))
        begun = _OpOfLayer(_begin, ops.layer_ends, first, first.reached, first.reached, _with_gradients(taken)).results(taken)
        results = compute(*begun)
        first.differentiable += _with_gradients(results)
        first.reached += _reached(results, begun)
        first.layer.returns(results)
        first.derivative.returns([taken[position] for position in first.reached])
        return _OpOfLayer(ops.layer_ends, _begin, first, *[first.differentiable] * 3).results(results)


def _is_tensor(node: Any) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _reached(results: Sequence[torch.Tensor], begun: Sequence[torch.Tensor]) -> list[int]:
    begin = next((one.grad_fn for one in begun if one.requires_grad), None)
    functions = list(dict.fromkeys(one.grad_fn for one in results if one.grad_fn is not None))
    seen, found = set(functions), set()
    for function in functions:  # the list grows during the loop
        for before, position in function.next_functions:
            if before is begin:
                found.add(position)
            elif before is not None and before not in seen:
                seen.add(before)
                functions.append(before)
    return sorted(found)


def _with_gradients(values: Sequence[torch.Tensor]) -> list[int]:
    return [position for position, one in enumerate(values) if one.requires_grad]


def _begin(taken: list[Any], number: int) -> Any:
    return ops.layer_begins(taken, [], number)


@dataclass(eq=False)
class _OpOfLayer:
    """An op that replaces a layer, or marks its start or end. The op `derivative` computes gradients of arguments from those of results."""

    op: Callable[[list[Any], int], Any]  # (tensors, number of the traced layer)
    derivative: Callable[[list[Any], int], Any]
    first: _FirstDerivative
    given: list[int]  # indices of results whose gradients `derivative` reads
    made: list[int]  # indices of arguments whose gradients `derivative` returns
    differentiable: list[int]

    def results(self, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        made: Sequence[torch.Tensor] = _Applied.apply(self, *values)  # type: ignore[no-untyped-call]
        return made


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: _OpOfLayer, *values: torch.Tensor) -> Any:
        ctx.of, ctx.count = of, len(values)
        results = tuple(of.op(list(values), of.first.layer.number))
        ctx.mark_non_differentiable(*(one for position, one in enumerate(results) if position not in of.differentiable))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = ctx.of.derivative([gradients[position] for position in ctx.of.given], ctx.of.first.derivative.number)
        made = dict(zip(ctx.of.made, found, strict=True))
        return None, *(made.get(position) for position in range(ctx.count))
