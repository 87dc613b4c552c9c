"""Ops that take or order elements by index, and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import hostweave as hw
from hostweave.torch.aten.table import Result, aten, refuse


@aten("embedding.default")
def _embedding(result: Result, weight: hw.Tensor, indices: hw.Tensor, *_: Any) -> hw.Tensor:
    return hw.embedding(indices, weight)


@aten("index_select.default")
def _index_select(result: Result, x: hw.Tensor, dim: int, index: hw.Tensor) -> hw.Tensor:
    return hw.take(x, index, dim)


@aten("gather.default")
def _gather(result: Result, x: hw.Tensor, dim: int, index: hw.Tensor, **_: Any) -> hw.Tensor:
    return hw.gather(x, dim % x.ndim, index)


@aten("index.Tensor")
def _index(result: Result, x: hw.Tensor, indices: Sequence[hw.Tensor | None]) -> hw.Tensor:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) == 1 and given[0][1].dtype != hw.bool_:
        return hw.take(x, given[0][1], given[0][0])
    dims, sizes = [dim for dim, _ in given], x.shape[: len(given)]
    if dims != list(range(len(given))) or any(i.dtype == hw.bool_ for _, i in given) or not all(isinstance(size, int) for size in sizes):
        raise refuse("aten.index by a mask, or not by the first dims, is not supported; use torch.gather, index_select or where")
    number = given[0][1]  # of the element in the first dims, flattened
    for size, (_, index) in zip(sizes[1:], given[1:], strict=True):
        number = number * int(size) + index
    return hw.take(hw.reshape(x, math.prod(map(int, sizes)), *x.shape[len(given) :]), number, 0)


@aten("topk.default")
def _topk(result: Result, x: hw.Tensor, k: int, dim: int = -1, largest: bool = True, *_: Any) -> tuple[hw.Tensor, hw.Tensor]:
    return hw.top_k(x, k, dim, largest)


@aten("sort.default")
def _sort(result: Result, x: hw.Tensor, dim: int = -1, descending: bool = False) -> tuple[hw.Tensor, hw.Tensor]:
    return hw.sort(x, dim, descending), hw.argsort(x, dim, descending)


@aten("argsort.default")
def _argsort(result: Result, x: hw.Tensor, dim: int = -1, descending: bool = False) -> hw.Tensor:
    return hw.argsort(x, dim, descending)


@aten("cross_entropy_loss.default")
def _cross_entropy(
    result: Result, logits: hw.Tensor, target: hw.Tensor, weight: Any = None, reduction: int = 1, ignore: int = -100, smoothing: float = 0.0
) -> hw.Tensor:
    if weight is not None or smoothing or logits.ndim != 2:
        raise refuse("cross_entropy with weights, label smoothing or more than 2 dims is not supported; flatten the logits")
    return hw.cross_entropy(logits, target, ignore, ("none", "mean", "sum")[reduction])


@aten("mse_loss.default")
def _mse_loss(result: Result, a: hw.Tensor, b: hw.Tensor, reduction: int = 1) -> hw.Tensor:
    squares = (a - b) * (a - b)
    return squares if reduction == 0 else hw.mean(squares) if reduction == 1 else hw.sum(squares)
