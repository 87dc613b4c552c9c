"""`generate` of transformers on compiled programs: one for prompts, and one for the next token of each sequence."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.export import Dim, ShapesCollection
from torch.utils import _pytree as pytree

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.runtime.group import current as current_group
from hostweave.torch import caches
from hostweave.torch.compiled import CompiledModule, not_traced

_CACHE_WORDS = ("cache", "past_key_values", "cache_params")
_OF_TOKENS = ("input_ids", "position_ids", "inputs_embeds", "token_type_ids")  # arguments whose dim of tokens is dim 1 or the last one
_ROUNDED = 64  # lengths of caches are multiples of it, so that prompts of similar length share a program


class Replayed:
    """A call with a cache as a graph, which later calls replay. It has its own copies of the other arguments."""

    def __init__(self, program: CompiledModule, kwargs: dict[str, Any], word: str):
        """Makes the call, and captures it. `word` names the cache."""
        self._word = word
        self._leaves, self._spec = pytree.tree_flatten(self._others(kwargs))
        self._leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        self._launch = program.capture(**pytree.tree_unflatten(self._leaves, self._spec), **{word: kwargs[word]})

    def takes(self, kwargs: dict[str, Any]) -> bool:
        """True if a call differs from the captured one in values of tensors alone."""
        leaves, spec = pytree.tree_flatten(self._others(kwargs))
        return bool(spec == self._spec) and all(map(_alike, leaves, self._leaves))

    def __call__(self, kwargs: dict[str, Any]) -> Any:
        """Replays the call with the values of these arguments."""
        for own, leaf in zip(self._leaves, pytree.tree_leaves(self._others(kwargs)), strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(leaf)
        self._launch()
        return self.results(kwargs[self._word])

    def results(self, cache: Any) -> Any:
        """Copies of the results of the last call, and the cache."""
        made = self._launch.outputs
        copies = {name: cache if name == self._word else pytree.tree_map_only(torch.Tensor, torch.clone, made[name]) for name in made}
        return type(made)(**copies)

    def _others(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in kwargs.items() if name != self._word}


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


class Generation:
    """Programs of a module that generates, by their arguments. Each is compiled on its first call."""

    def __init__(self, module: Any, compile: Callable[..., CompiledModule]):
        """`compile` compiles the module for keyword arguments and dynamic shapes."""
        self._module, self._compile, self.programs = module, compile, list[CompiledModule]()
        self._whole: dict[str, tuple[int, ...]] = {}  # global sizes of dims of caches that the plan shards, by name; 0 for other dims
        parameters = inspect.signature(module.forward).parameters
        self._word = next((word for word in _CACHE_WORDS if word in parameters), "")
        self._lock = threading.Lock()  # ranks may be threads
        self._last: WeakKeyDictionary[Any, CompiledModule | Replayed] = WeakKeyDictionary()  # by cache
        of, call = type(module), not_traced(lambda _, *args, **kwargs: self._call(*args, **kwargs))
        self._stand_in: Any = object.__new__(type(of.__name__, (of,), {"__call__": call, "__module__": of.__module__}))
        self._stand_in.__dict__ = vars(module)

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        """Generates sequences like transformers, with a static cache. Raises ArgumentError if a static cache is not possible."""
        if not self._word:
            raise ArgumentError(
                f"{self._name}: generate: its forward has no argument {', '.join(_CACHE_WORDS)}; call generate of the module"
            )
        if kwargs.get("use_cache") is False or kwargs.get("cache_implementation") not in (None, "static"):
            raise ArgumentError(f"{self._name}: generate: programs write to a static cache; leave use_cache and cache_implementation out")
        if self._word not in kwargs:
            kwargs[self._word] = self._cache(self._length(inputs, kwargs))
        self._last.pop(kwargs[self._word], None)  # parameters may have been replaced since the last call
        kwargs |= {"use_cache": True, "disable_compile": True}
        return self._stand_in.generate(inputs, **kwargs)

    @property
    def _name(self) -> str:
        return type(self._module).__name__

    def _length(self, inputs: Any, kwargs: dict[str, Any]) -> int:
        """Upper bound of the number of tokens of a sequence, including the prompt."""
        first = next((one for one in (inputs, *map(kwargs.get, ("input_ids", "inputs_embeds"))) if one is not None), None)
        prompt = 1 if first is None else int(first.shape[1])
        config = kwargs.get("generation_config") or self._module.generation_config
        more = kwargs.get("max_new_tokens", None if "max_length" in kwargs else config.max_new_tokens)
        total = prompt + more if more else kwargs.get("max_length") or config.max_length or prompt + 20
        if not more and first is not None and not kwargs.get("max_length"):
            total = max(total, prompt + 20)  # the default of transformers counts new tokens
        return -(-total // _ROUNDED) * _ROUNDED

    def _cache(self, length: int) -> Any:
        """A static cache. Windows are applied by masks, so a layer with a sliding window has all positions, too."""
        from transformers import StaticCache
        from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

        cache = StaticCache(config=self._module.config, max_cache_len=length)
        cache.layers = [StaticLayer(max_cache_len=length) if type(x) is StaticSlidingWindowLayer else x for x in cache.layers]
        return cache

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module for a prompt or a token. The cache is written in place."""
        if args:
            kwargs = {**dict(zip(inspect.signature(self._module.forward).parameters, args, strict=False)), **kwargs}
        if kwargs.get("return_dict") and "return_dict" not in inspect.signature(self._module.forward).parameters:
            del kwargs["return_dict"]  # the default, which torch.export does not take among other keywords
        cache = kwargs.get(self._word)
        if cache is None or not hasattr(cache, "layers"):
            raise ArgumentError(f"{self._name}: generate: there is no cache; leave use_cache=False out")
        if not cache.is_compileable:
            raise ArgumentError(
                f"{self._name}: generate: the cache is a {type(cache).__name__}, which grows; pass a StaticCache, or leave it out"
            )
        last = self._last.get(cache)
        if isinstance(last, Replayed) and last.takes(kwargs):
            return last(kwargs)
        is_new = not any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in pytree.tree_leaves([vars(x) for x in cache.layers]))
        group = current_group()
        caches.register(kwargs)
        with self._lock:
            if is_new:
                caches.allocate(cache, lambda trial, fake: self._module(**{**fake(kwargs), self._word: trial}))
            program = next((one for one in self.programs if one.takes(**kwargs)), None)
            if program is None:
                is_whole = is_new or group is None
                program = self._compiled(kwargs if is_whole else {**kwargs, self._word: caches.enlarged(cache, self._whole)})
                self.programs.append(program)
        if is_new and group is not None:
            whole = caches.shapes(cache)
            caches.continued(kwargs, program.cut(kwargs, group.rank))
            self._whole |= {name: tuple(map(_if_other, whole[name], own)) for name, own in caches.shapes(cache).items()}
        if program is last:
            self._last[cache] = again = Replayed(program, kwargs, self._word)
            return again.results(cache)
        made = program(**kwargs)
        if group is not None and program.may_be_replayed and isinstance(made, dict) and self._word in made:
            self._last[cache], made[self._word] = program, cache  # one object in all calls
        return made

    def _compiled(self, kwargs: dict[str, Any]) -> CompiledModule:
        """A program for these arguments, and for other lengths if the module computes the same for them."""
        try:
            return self._compile(kwargs, self._free(kwargs))
        except ProgramError as error:
            program = self._compile(kwargs, None)
            why = f"each length of prompts and masks has a program of its own, as no program takes several: {error}"
            warnings.warn(f"{self._name}: generate: {why}", stacklevel=2)
            return program

    def _free(self, kwargs: dict[str, Any]) -> ShapesCollection:
        """The sizes of tokens and masks, which differ between calls, if the module computes the same for all sizes."""
        shapes = ShapesCollection()  # type: ignore[no-untyped-call]
        for name in _OF_TOKENS:
            one = kwargs.get(name)
            if isinstance(one, torch.Tensor) and one.ndim > 1:
                dim = one.ndim - 1 if name == "position_ids" else 1
                if one.shape[dim] > 1:
                    shapes[one] = {dim: Dim.AUTO}
        for mask in pytree.tree_leaves(kwargs.get("attention_mask")):
            dim = 2 if isinstance(mask, torch.Tensor) and mask.ndim == 4 else 1
            if isinstance(mask, torch.Tensor) and mask.shape[dim] > 1:
                shapes[mask] = {dim: Dim.AUTO}
        return shapes


def _if_other(size: int, own: int) -> int:
    return 0 if size == own else size
