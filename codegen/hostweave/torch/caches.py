"""Caches of transformers as arguments of a compiled module. The tensors of a cache are inputs of the program. All other attributes of the
cache must have the same values as at compile time."""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from operator import is_
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from hostweave.torch.exported import tracing
from hostweave.torch.replaced import replaced


class Form:
    """A cache without its tensors. A program accepts only caches of equal form."""

    def __init__(self, cache: Any):
        self.classes: tuple[Any, ...] = (type(cache), *map(type, cache.layers))
        leaves, self.spec = pytree.tree_flatten(_held(cache))
        self.leaves = [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.classes)

    @property
    def _key(self) -> object:
        return self.classes, self.spec, self.leaves

    @property
    def names(self) -> list[str]:
        """Names of the tensors, such as `keys_3` for the keys of layer 3."""
        held = pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        of: dict[int, str] = {}
        for number, state in enumerate(held):
            for path, position in pytree.tree_flatten_with_path(state)[0]:
                words = [str(getattr(key, "key", getattr(key, "idx", ""))) for key in path]
                of[position] = "_".join([word for word in words if word != "0"] + [str(number - 1)] * (number > 0))
        return [of[position] for position, leaf in enumerate(self.leaves) if leaf is None]

    def cache(self, tensors: Any) -> Any:
        given = iter(tensors)
        held = pytree.tree_unflatten([next(given) if leaf is None else leaf[0] for leaf in self.leaves], self.spec)
        made, *layers = (object.__new__(of) for of in self.classes)
        for one, state in zip((made, *layers), held, strict=True):
            vars(one).update(state)
        made.layers = layers
        return made


def _held(cache: Any) -> list[dict[str, Any]]:
    own = {name: value for name, value in vars(cache).items() if name != "layers"}
    return [dict(sorted(_copied(state).items())) for state in (own, *map(vars, cache.layers))]


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}


def caches_in(given: Any) -> Iterator[Any]:
    if (of := getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)) is not None:
        for leaf in pytree.tree_leaves(given, is_leaf=lambda one: isinstance(one, of)):
            if isinstance(leaf, of):
                yield leaf


def register(given: Any) -> None:
    returned = getattr(sys.modules.get("transformers.cache_utils"), "DynamicCache", None)
    for of in {*map(type, caches_in(given)), *((returned,) if returned else ())}:
        if of not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                of,
                _flat,
                lambda tensors, form: form.cache(tensors),
                flatten_with_keys_fn=_with_keys,
                serialized_type_name=f"hostweave.{of.__module__}.{of.__qualname__}",
            )


def _flat(cache: Any) -> tuple[list[torch.Tensor], Form]:
    return [leaf for leaf in pytree.tree_leaves(_held(cache)) if isinstance(leaf, torch.Tensor)], Form(cache)


def _with_keys(cache: Any) -> Any:
    tensors, form = _flat(cache)
    return [(pytree.GetAttrKey(name), tensor) for name, tensor in zip(form.names, tensors, strict=True)], form


def has_tensors(cache: Any) -> bool:
    """True if the cache has allocated tensors. The first call of a module allocates the tensors."""
    return any(isinstance(leaf, torch.Tensor) and leaf.ndim > 0 for leaf in pytree.tree_leaves([vars(one) for one in cache.layers]))


def shapes(cache: Any) -> dict[str, tuple[int, ...]]:
    tensors, form = _flat(cache)
    return {name: tuple(tensor.shape) for name, tensor in zip(form.names, tensors, strict=True)}


def enlarged(cache: Any, whole: Mapping[str, tuple[int, ...]]) -> Any:
    """A cache of zeros with tensors of global sizes. `whole` has the global sizes of each tensor, with 0 for dims that are not sharded."""
    tensors, form = _flat(cache)
    sizes = [[size or own for size, own in zip(whole[name], t.shape, strict=True)] for name, t in zip(form.names, tensors, strict=True)]
    return form.cache([tensor.new_zeros(shape) for tensor, shape in zip(tensors, sizes, strict=True)])


class Snapshot:
    """Attributes of a cache and of its layers at one point in time, without the contents of tensors."""

    def __init__(self, cache: Any):
        self._held, self._last = _held(cache), list[dict[str, Any]]()

    def equals(self, cache: Any) -> bool:
        """True if the tensors have the same memory, shapes and dtypes, and all other attributes are unchanged."""
        states = [vars(cache), *map(vars, cache.layers)]
        if len(states) == len(self._last) and all(map(_is_identical, states, self._last)):  # fast path, in C
            return True
        if len(states) != len(self._held) or not all(map(_holds, states, self._held)):
            return False
        self._last = [_copied(state) for state in states]
        return True


def _is_identical(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return list(now) == list(before) and all(map(is_, now.values(), before.values()))


def _holds(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return all(name in now and _is_same(now[name], value) for name, value in before.items())


def _is_same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, dict) and isinstance(before, dict):
        return now.keys() == before.keys() and _holds(now, before)
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):  # a new tensor object may have the same memory
        return (now.data_ptr(), now.shape, now.dtype) == (before.data_ptr(), before.shape, before.dtype)
    return type(now) is type(before) and bool(now == before)


class Kept:
    """Keeps the tensors of a cache for the next cache of the same sizes, so that a CUDA graph with these tensors can be reused.

    `empty` and `allocated` are the forms of the cache before and after its tensors were allocated. `sizes` identifies the tensors' sizes.
    """

    def __init__(self, cache: Any, empty: Form, allocated: Form, sizes: object):
        self._owner, self._of = weakref.ref(cache), (empty, sizes)
        self._allocated, self._tensors = allocated, _flat(cache)[0]

    def give(self, cache: Any, sizes: object) -> bool:
        """Hands the tensors, filled with zeros, to a cache. Returns False if another cache uses the tensors, or if they do not fit."""
        if self._owner() is not None or self._of != (Form(cache), sizes):
            return False
        for tensor in self._tensors:
            tensor.zero_()
        for own, made in zip(cache.layers, self._allocated.cache(self._tensors).layers, strict=True):
            vars(own).update(vars(made))
        self._owner = weakref.ref(cache)
        return True


def continued(given: Any, returned: Any) -> None:
    """Copies the attributes of returned cache layers to the given caches, because the original module changes the caches in place."""
    before = list(caches_in(given))
    for after in caches_in(returned):
        for cache in before:
            if [type(one) for one in cache.layers] == [type(one) for one in after.layers]:
                for own, new in zip(cache.layers, after.layers, strict=True):
                    vars(own).update(vars(new))


Requests = list[tuple[int, tuple[Any, ...], dict[str, Any]]]  # (index of a layer, arguments of the layer's request for tensors)


def requests(cache: Any, run: Callable[[Any, Callable[[Any], Any]], Any]) -> Requests:
    """Records the calls of `lazy_initialization`, by which a module allocates the tensors of cache layers. `run(trial, fake)` calls the
    module with `trial`, a copy of the cache. `fake` replaces the tensors of the arguments, except the cache, by fake tensors."""
    trial, asked = deepcopy(cache), Requests()
    for number, layer in enumerate(trial.layers):

        def note(*args: Any, at: int = number, own: Callable[..., None] = layer.lazy_initialization, **kwargs: Any) -> None:
            asked.append((at, args, kwargs))
            own(*args, **kwargs)

        layer.lazy_initialization = note
    # If `is_compiling` is true, modules use ops that fake tensors support.
    with tracing, replaced((torch.compiler, "is_compiling", lambda: True)), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        run(trial, lambda given: pytree.tree_map_only(torch.Tensor, mode.from_tensor, given))
    return asked


def allocate(cache: Any, asked: Requests) -> None:
    for number, args, kwargs in asked:
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device), (args, kwargs))
        cache.layers[number].lazy_initialization(*args, **kwargs)
