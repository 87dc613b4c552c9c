"""Numbers that are unknown at compile time, as tensors without dims: elements that `item` reads, and numbers computed from sizes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from hostweave.base.errors import Location, ProgramError
from hostweave.torch.nodes import OF_TORCH
from hostweave.torch.replaced import Replacement, replaced

aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default
_OPS: dict[str, Any] = {  # function of numbers -> op of tensors
    **{"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "truediv": aten.div.Tensor},
    **{"floordiv": aten.floor_divide.default, "mod": aten.remainder.Tensor, "pow": aten.pow.Tensor_Tensor},
    **{"max": aten.maximum.default, "min": aten.minimum.default, "int": aten.clone.default, "float": aten.clone.default},
    **{name: getattr(aten, name).default for name in ("neg", "ceil", "floor", "trunc", "sqrt")},
}
_BY_TENSORS = {aten.select.int: aten.index.Tensor, aten.select_scatter.default: aten.index_put.default}


def is_number(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), torch.SymInt | torch.SymFloat)


def as_tensors(graph: Graph) -> None:
    """Replaces numbers among operands, except sizes of results, by tensors. `select` by a number becomes `index` by a tensor."""
    made: dict[Node, Node] = {}

    def call(before: Node, op: Any, *args: Any, **kwargs: Any) -> Node:
        with graph.inserting_before(before):
            node = graph.call_function(op, args, kwargs)
        values = pytree.tree_map_only(Node, lambda one: 1 if is_number(one) else torch.ones_like(one.meta["val"], device="meta"), args)
        node.meta = {**before.meta, "val": op(*values, **kwargs)}
        return node

    def tensor(number: Any, before: Node) -> Node:
        if not isinstance(number, Node):
            return call(before, aten.scalar_tensor.default, number, dtype=torch.float64 if isinstance(number, float) else torch.int64)
        if number in made:
            return made[number]
        before, dtype = number.next, torch.int64 if isinstance(number.meta["val"], torch.SymInt) else torch.float64
        word = getattr(number.target, "__name__", str(number.target)).removeprefix("_").removeprefix("sym_")
        if number.target is aten._local_scalar_dense.default:
            value = call(before, aten.view.default, number.args[0], [])
        elif word in _OPS:
            value = call(before, _OPS[word], *(tensor(argument, before) for argument in number.args))
        elif number.op == "placeholder" or number.target is aten.sym_size.int:
            value = call(before, aten.scalar_tensor.default, number, dtype=dtype)
        else:
            raise ProgramError(f"{word} of a number that is known only at a call is not supported; compute with tensors")
        if value.meta["val"].dtype != dtype:
            value = call(before, convert, value, dtype)
        made[number] = value
        return value

    for node in list(graph.nodes):
        if node.op == "output" and any(map(is_number, node.all_input_nodes)):
            why = "the module returns a number that is known only at a call, such as a size"
            raise ProgramError(f"{why}; return it as a tensor, such as torch.full((), n)")
        if not isinstance(node.target, torch._ops.OpOverload) or is_number(node):
            continue
        if node.target in _BY_TENSORS and is_number(node.args[-1]):
            x, *source, dim, index = node.args
            positions = [*[None] * (dim % x.meta["val"].ndim), tensor(index, node)]
            node.target, node.args = _BY_TENSORS[node.target], (x, positions, *source)
        elif node.target in (aten.full.default, aten.scalar_tensor.default) and is_number(node.args[-1]):
            *size, number = node.args
            value = call(node, convert, tensor(number, node), node.meta["val"].dtype)
            node.target, node.args, node.kwargs = aten.expand.default, (value, *(size or [[]])), {}
        for position, argument in enumerate(node.target._schema.arguments):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if is_number(given) and "int" not in str(argument.type) and argument.name != "end":  # the end of `arange` is a size
                replaced = tensor(given, node)
                node.update_arg(position, replaced) if position < len(node.args) else node.update_kwarg(argument.name, replaced)
                node.target = getattr(node.target.overloadpacket, node.target._overloadname.replace("Scalar", "Tensor"), node.target)


def keeps_numbers(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Rule that decomposes an op only if no argument is a symbolic int."""
    return lambda *args, **kwargs: NotImplemented if any(isinstance(one, torch.SymInt) for one in args) else rule(*args, **kwargs)


@contextmanager
def symbolic() -> Iterator[list[Location | None]]:
    """Makes functions of torch and math accept symbolic sizes, and brackets accept tensors without dims as indices, in this thread. Yields
    a list, to which each line that fixes a size is added."""
    fixed: list[Location | None] = []

    def guard(own: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(node: SymNode, *where: Any) -> Any:
            was_free, value = node.expr.free_symbols, own(node, *where)
            if was_free and not node.expr.free_symbols:
                fixed.append(Location.of_caller(*OF_TORCH))
            return value

        return guarded

    def either(own: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_known = not any(isinstance(one, torch.SymInt | torch.SymFloat) for one in (*args, *kwargs.values()))
        return (own if is_known else function)(*args, **kwargs)

    def of_tensor(name: str) -> Callable[..., Any]:
        return lambda x, *base: getattr(torch, name)(torch.scalar_tensor(x)) / math.prod(map(math.log, base))

    functions: list[Replacement] = [
        *((torch, name, getattr(torch._refs, name)) for name in ("linspace", "logspace")),
        (math, "sqrt", torch.sym_sqrt),
        *((math, name, of_tensor(name)) for name in ("exp", "log", "log2", "log10", "sin", "cos")),
    ]
    with replaced(
        *((module, name, partial(either, getattr(module, name), function)) for module, name, function in functions),
        *((torch.Tensor, name, partial(_bracket, getattr(torch.Tensor, name))) for name in ("__getitem__", "__setitem__")),
        *((holder, "narrow", partial(_narrow, holder.narrow)) for holder in (torch, torch.Tensor)),
        *((SymNode, name, guard(getattr(SymNode, name))) for name in ("guard_int", "guard_float", "guard_bool")),
    ):
        yield fixed


def _bracket(own: Callable[..., Any], x: torch.Tensor, index: Any, *value: Any) -> Any:
    """Variant of `__getitem__` or `__setitem__` that treats integer tensors without dims as ints, and so selects views."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [slice(_read(one.start), _read(one.stop), one.step) if isinstance(one, slice) else one for one in items]
    if any(isinstance(one, slice) and any(map(_is_scalar, (one.start, one.stop))) for one in items):
        raise _error_of_slice("a slice begins or ends at a value of a tensor, so that its size is not known at compile time")
    if not any(map(_is_scalar, items)):
        return own(x, tuple(items) if isinstance(index, tuple) else items[0], *value)
    sizes = [0 if one is None or one is Ellipsis else one.ndim if _is_mask(one) else 1 for one in items]
    if (dots := next((position for position, one in enumerate(items) if one is Ellipsis), None)) is not None:
        items[dots : dots + 1] = [slice(None)] * (x.ndim - sum(sizes))
        sizes[dots : dots + 1] = [1] * (x.ndim - sum(sizes))
    dim, rest = 0, list[Any]()
    for item, size in zip(items, sizes, strict=True):
        if _is_scalar(item):
            position = _read(item if isinstance(item, torch.Tensor) else torch.scalar_tensor(item, dtype=torch.int64))
            if isinstance(position, torch.SymInt):  # with this check, torch traces a view; programs support negative indices too
                torch._check(position >= 0)  # type: ignore[no-untyped-call]
            x = x.select(dim, position)
        else:
            dim, rest = dim + size, [*rest, item]
    return own(x, tuple(rest), *value)


def _narrow(own: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Variant of `narrow` that refuses a slice that begins or ends at a value of a tensor."""
    if any(_is_scalar(_read(one)) for one in (*args, *kwargs.values())):
        raise _error_of_slice("narrow begins or ends at a value of a tensor, which is not known at compile time")
    return own(x, *args, **kwargs)


def _error_of_slice(why: str) -> ProgramError:
    return ProgramError(f"{why}; use indices, such as begin + torch.arange(n)", Location.of_caller(*OF_TORCH))


def _read(item: Any) -> Any:
    return item.item() if isinstance(item, torch.Tensor) and item.ndim == 0 else item


def _is_scalar(item: Any) -> bool:
    """True for an integer tensor without dims, or the symbolic int that `item()` reads from a tensor."""
    if isinstance(item, torch.SymInt):
        return bool(free_unbacked_symbols(item))
    return isinstance(item, torch.Tensor) and item.ndim == 0 and item.dtype != torch.bool and not item.dtype.is_floating_point


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
