"""Gives results of decomposition rules the strides of torch's ops, so that as_strided reads the same elements."""

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree

from hostweave.torch.ops import ops

aten = torch.ops.aten


def _by_stride(sizes: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Order of dims in which the elements are contiguous in memory, or None."""
    order, expected = sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim])), 1
    for dim in order:
        if sizes[dim] != 1 and strides[dim] != expected:
            return None
        expected *= sizes[dim]
    return order[::-1]


def of_storages(graph: Graph) -> None:
    """Makes each as_strided of a view read the tensor that owns the memory, because a decomposed view may be a copy."""
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        owner, size, stride, *offset = node.args
        begin = offset[0] if offset and offset[0] is not None else owner.meta["val"].storage_offset()
        while viewed := _viewed(owner):
            owner = viewed
        node.args = (owner, size, stride, begin)


def _viewed(node: Any) -> Node | None:
    """Operand whose memory a node shares. None for new memory, another dtype, or `hostweave.detach`."""
    operands = (node.args[0] if node.target is operator.getitem else node).all_input_nodes  # a getitem selects a result, as of unbind()
    shared = [one for one in operands if _memory(one) == _memory(node)]
    return shared[0] if shared and node.target != ops.detach.default else None


def _memory(node: Node) -> Any:
    value = node.meta.get("val")
    return (value.untyped_storage()._cdata, value.dtype) if isinstance(value, torch.Tensor) else node


def as_laid_out(op: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Rule whose results have the strides of the op's results if all sizes are ints. If `rule` returns a view of an operand, as for
    `unbind_copy`, the result is a copy."""
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):  # The call of `op` below would call this rule.
        return rule

    def call(*args: Any, **kwargs: Any) -> Any:
        made = rule(*args, **kwargs)
        if made is NotImplemented:
            return made
        with disable_proxy_modes_tracing():
            own = pytree.tree_leaves(op(*args, **kwargs))
        leaves, spec = pytree.tree_flatten(made)
        taken = [one.untyped_storage()._cdata for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        leaves = [one.clone() if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata in taken else one for one in leaves]
        return pytree.tree_unflatten([_with_strides(*both) for both in zip(leaves, own, strict=True)], spec)

    return call


def _with_strides(x: Any, like: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not all(isinstance(n, int) for one in (x, like) for n in (*one.shape, *one.stride())):
        return x
    order = _by_stride(like.shape, like.stride())
    if order is None or all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), like.stride(), strict=True)):
        return x
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])


def as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    """Reads elements of the memory of x, as a permuted view if each element of x occurs once. Returns NotImplemented if the memory of x has
    gaps, if elements of x share memory, or if a read element is outside of x."""
    held = _by_stride(x.shape, x.stride())
    if held is None:
        return NotImplemented
    flat = x.permute(held).reshape(-1)
    begin = 0 if offset is None else offset - x.storage_offset()
    last = begin + sum((n - 1) * each for n, each in zip(size, stride, strict=True))
    if prod(size) and not 0 <= begin <= last < x.numel():  # reads memory outside of x
        return NotImplemented
    order = _by_stride(size, stride)
    if order is not None and not begin and prod(size) == x.numel():
        return flat.view([size[dim] for dim in order]).permute([order.index(dim) for dim in range(len(size))])
    return flat[_positions(size, stride, begin, x.device)]


def _positions(size: Sequence[int], stride: Sequence[int], begin: Any, device: torch.device) -> Any:
    positions = torch.full((1,) * len(size), begin, dtype=torch.int64, device=device)
    for dim, (n, each) in enumerate(zip(size, stride, strict=True)):
        positions = positions + (torch.arange(n, device=device) * each).view(-1, *[1] * (len(size) - 1 - dim))
    return positions


def as_strided_scatter(x: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Any:
    if _by_stride(x.shape, x.stride()) != list(range(x.ndim)):
        return NotImplemented
    positions = _positions(size, stride, 0 if offset is None else offset - x.storage_offset(), x.device)
    return x.reshape(-1).index_put((positions.reshape(-1),), source.reshape(-1)).view(x.shape)
