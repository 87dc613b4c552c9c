"""The part of a transformers cache that one layer of a model uses, and the layer's index in the cache.

While a layer is traced, `cache.layers` is replaced by a `_Layers`, which records uses of other cache layers. `layer_idx` is replaced by a
`LayerIndex`, which records uses of the index. Equal layers may have different indices.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partialmethod
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hostweave.torch.state import NUMBERS, is_same

INDEX = "layer_idx"  # attribute of modules of transformers: index of the layer in a cache


class LayerIndex:
    """Stands for an int, and records uses of the int."""

    __class__: type = int

    def __init__(self, value: int):
        self.value, self.is_read, self._compared = value, False, list[tuple[str, Any, Any]]()

    def read(self) -> int:
        self.is_read = True
        return self.value

    def equals(self, other: int) -> bool:
        """True if all recorded comparisons have the same result with `other`. After any other use, only the same int is equal."""
        if self.is_read:
            return self.value == other
        return all(getattr(operator, name)(other, operand) == made for name, operand, made in self._compared)

    def compare(self, name: str, operand: Any) -> Any:
        operand = operand.value if type(operand) is LayerIndex else operand
        made = getattr(operator, name)(self.value, operand)
        self._compared.append((name, operand, made))
        return made


def _reads(name: str) -> Callable[..., Any]:
    if hasattr(operator, name):
        return lambda index, *operands: getattr(operator, name)(index.read(), *operands)
    if hasattr(operator, f"__{name[3:]}"):  # the index is the second operand
        return lambda index, operand: getattr(operator, f"__{name[3:]}")(operand, index.read())
    return lambda index, *operands: getattr(index.read(), name)(*operands)


for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(LayerIndex, _name, partialmethod(LayerIndex.compare, _name))
for _name in {*dir(int)} - {*dir(object)} | {"__hash__", "__repr__", "__str__", "__format__", "__reduce_ex__"}:
    if callable(getattr(int, _name)):
        setattr(LayerIndex, _name, _reads(_name))


def is_cache(value: Any) -> bool:
    return hasattr(type(value), "update") and isinstance(getattr(value, "__dict__", {}).get("layers"), list)


class _Layers:
    """The layers of a cache. `others` becomes True if any layer except layer `own` may have been used."""

    def __init__(self, layers: list[Any], own: int | None):
        self._layers, self._own, self.others = layers, own, False

    def __getitem__(self, key: Any) -> Any:
        if type(key) is LayerIndex and key.value == self._own:
            return self._layers[self._own]
        self.others = True
        return self._layers[key]

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[Any]:
        self.others = True
        return iter(self._layers)

    def __getattr__(self, name: str) -> Any:
        self.others = True
        return getattr(self._layers, name)


class LayerState(NamedTuple):
    leaves: list[Any]
    spec: Any
    sources: list[int]  # for each tensor in `leaves`, index in [*tensors before the call, *results]
    written: dict[int, int]  # index of a tensor before the call -> index of the tensor's new contents in the results


class LayerCache:
    """State of a cache that a layer of a model may use: one cache layer, and attributes of the cache."""

    def __init__(self, cache: Any, layer: nn.Module):
        indices = {vars(submodule)[INDEX] for submodule in layer.modules() if type(vars(submodule).get(INDEX)) is int}
        self._cache, self._layers, (*few,) = cache, vars(cache)["layers"], indices
        self._own = few[0] if len(few) == 1 and few[0] < len(self._layers) else None
        self._state = {} if self._own is None else vars(self._layers[self._own])
        self._leaves, self._spec = flat(dict(self._state))
        self._attributes = self._others()
        self.tensors = tensors_in(self._leaves)
        self._watched = _Layers(self._layers, self._own)

    def _others(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._cache).items() if name != "layers"}

    def key(self) -> object | None:
        """Key of the types, shapes and plain values. None if the cache layer has a tensor twice, or an object that cannot be compared."""
        of = None if self._own is None else type(self._layers[self._own])
        leaves = described([*self._leaves, *self._attributes.values()])
        is_apart = len({id(tensor) for tensor in self.tensors}) == len(self.tensors)
        is_known = leaves is not None and is_apart
        return [type(self._cache), len(self._layers), of, self._spec, list(self._attributes), leaves] if is_known else None

    @contextmanager
    def lent(self, begun: list[torch.Tensor]) -> Iterator[None]:
        """Replaces the tensors of the state by `begun`, and watches uses of other cache layers. Restores the state after an error."""
        self._begun = [(tensor, tensor._version) for tensor in begun]
        self._state.update(with_tensors(self._leaves, self._spec, begun))
        vars(self._cache)["layers"] = self._watched
        try:
            yield
        except BaseException:
            self._state.update(pytree.tree_unflatten(self._leaves, self._spec))
            raise
        finally:
            vars(self._cache)["layers"] = self._layers

    def after(self, made: list[torch.Tensor]) -> tuple[LayerState, str]:
        """State after a call, and the reason why equal layers cannot reuse the trace, or "". Adds new and written tensors to `made`."""
        leaves, spec = flat(dict(self._state))
        before = {id(tensor): number for number, (tensor, _) in enumerate(self._begun)}
        written = {number: tensor for number, (tensor, version) in enumerate(self._begun) if tensor._version != version}
        memory = {tensor.untyped_storage()._cdata for tensor in written.values()}
        new = [leaf for leaf in tensors_in(leaves) if id(leaf) not in before]
        why = "it may use the cache of other layers" if self._watched.others else ""
        if described([*leaves, *self._others().values()]) is None or not is_same(self._attributes, self._others()):
            why = "it changes attributes of a cache, or writes objects to a cache"
        if any(tensor.untyped_storage()._cdata in memory for tensor in [*made, *new]):
            why = "it returns, or stores in its cache, memory of a cache tensor that it writes"
        following = count(len(self._begun) + len(made))
        sources = [before[id(tensor)] if id(tensor) in before else next(following) for tensor in tensors_in(leaves)]
        made += [*new, *written.values()]
        return LayerState(leaves, spec, sources, dict(zip(written, count(len(made) - len(written)), strict=False))), why

    def put(self, state: LayerState, made: Sequence[torch.Tensor]) -> None:
        """Changes the cache to the state after a call. Writes new contents of tensors in place."""
        for number, result in state.written.items():
            self.tensors[number].copy_(made[result])
        known = [*self.tensors, *made]
        self._state.clear()
        self._state.update(with_tensors(state.leaves, state.spec, [known[source] for source in state.sources]))


def flat(values: Any) -> tuple[list[Any], Any]:
    """Flattens only tuples, lists and dicts. Other objects may have state."""
    return pytree.tree_flatten(values, is_leaf=lambda value: type(value) not in (tuple, list, dict))


def with_tensors(leaves: Sequence[Any], spec: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Inverse of `flat`. `tensors` replaces the tensors in `leaves`."""
    given = iter(tensors)
    return pytree.tree_unflatten([next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def tensors_in(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def described(leaves: Sequence[Any]) -> list[object] | None:
    """Keys of the leaves: (shape, strides, dtype, device) of a tensor, (type, value) of a plain value. None if a leaf is neither."""
    found: list[object] = [_described(leaf) for leaf in leaves]
    return None if None in found else found


def _described(leaf: Any) -> tuple[object, ...] | None:
    if isinstance(leaf, torch.Tensor):
        return tuple(map(_size, leaf.shape)), tuple(map(_size, leaf.stride())), leaf.dtype, leaf.device
    if type(leaf) in (*NUMBERS, torch.SymInt):
        return type(leaf), _size(leaf)
    return None


def _size(size: Any) -> Any:
    """An int, or the expression of a symbolic size. Torch would add a guard if symbolic sizes were compared."""
    return size.node.expr if isinstance(size, torch.SymInt) else size
