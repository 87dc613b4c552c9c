"""`generate` of transformers with compiled programs."""

import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import Dim, ShapesCollection
from torch.utils import _pytree as pytree

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.runtime.group import Group
from hostweave.runtime.group import current as current_group
from hostweave.torch import caches
from hostweave.torch.compiled import CompiledModule, not_traced

_CACHE_WORDS = ("cache", "past_key_values", "cache_params")
_OF_TOKENS = ("input_ids", "position_ids", "inputs_embeds", "token_type_ids")  # dim of tokens: 1, or the last dim of position_ids
_ROUNDED = 64  # cache lengths are multiples of 64, so that prompts of similar lengths share a program
_own = weakref.WeakKeyDictionary[Any, bool]()  # cache of `generate` -> True if the host need not wait for each token
_patching = threading.Lock()  # ranks may be threads


def _defer_stops() -> None:
    """On CUDA, makes transformers check one step late whether all sequences have ended, for caches that are True in `_own`. Transformers
    then undoes the last step. By default, transformers checks late only on MPS."""
    from transformers.generation import utils

    check: Any = getattr(utils, "DeferredStopCheck", None)  # None for older versions, which wait for each token
    with _patching:
        if check is None or hasattr(check, "is_supported_by_transformers"):
            return
        check.is_supported_by_transformers = own = check.is_supported

        def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, **others: Any) -> bool:
            is_ours = device.type == "cuda" and not cache_is_returned and cache is not None and _own.get(cache, False)
            return is_ours or own(device, cache, cache_is_returned, **others)

        check.is_supported = staticmethod(is_supported)


def _prepare_cache(module: Any, config: Any, kwargs: dict[str, Any], *args: Any, **others: Any) -> Any:
    """Overrides a method of transformers that marks all given caches as the user's. Removes the mark from caches in `_own`."""
    found = super(type(module), module)._prepare_cache_for_generation(config, kwargs, *args, **others)
    for cache in (one for one in map(kwargs.get, _CACHE_WORDS) if one is not None and one in _own):
        cache._is_user_defined = False
    return found


class TokenGraph:
    """CUDA graph of a call for one token of each sequence. A launch uses the same cache, with new tokens and masks."""

    def __init__(self, program: CompiledModule, kwargs: Mapping[str, Any], word: str):
        """Runs and captures the call. `word` is the name of the cache argument."""
        self._word, cache = word, kwargs[word]
        given = {name: _clone(value) for name, value in {**kwargs, word: None}.items()}
        self._leaves, self._form = _flat(given)
        self._captured = program.capture(**{**given, word: cache})
        self._cache = caches.Snapshot(cache)

    def takes(self, kwargs: Mapping[str, Any]) -> bool:
        """True if a launch can compute a call with these arguments."""
        leaves, form = _flat({**kwargs, self._word: None})
        return form == self._form and all(map(_is_alike, leaves, self._leaves)) and self._cache.equals(kwargs[self._word])

    def __call__(self, kwargs: Mapping[str, Any]) -> Any:
        with self._captured:
            for own, leaf in zip(self._leaves, _flat({**kwargs, self._word: None})[0], strict=True):
                if isinstance(own, torch.Tensor):
                    own.copy_(leaf)
            self._captured()
            return self.result()

    def result(self) -> Any:
        """Copy of the last result, without the cache."""
        made = self._captured.outputs
        values = {name: value for name, value in made.items() if name != self._word}
        return type(made)(**{name: _clone(value) for name, value in values.items()})


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else pytree.tree_map_only(torch.Tensor, torch.clone, value)


def _flat(values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Leaves and structures of the values. Tensors, bools and None bypass pytree, which is slow, and have the structure None."""
    leaves, form = list[Any](), dict[str, Any]()
    for name, value in values.items():
        is_leaf = value is None or isinstance(value, torch.Tensor | bool)
        own, form[name] = ([value], None) if is_leaf else pytree.tree_flatten(value)
        leaves += own
    return leaves, form


class _Rank:
    """Cache memory and CUDA graph of a rank, for reuse by later sequences of the same sizes."""

    def __init__(self) -> None:
        self.kept: caches.Kept | None = None
        self.graph: TokenGraph | None = None
        self.is_first = True  # True from a prompt to the first call for a token


class Generation:
    """Programs of a module that generates sequences. A program is compiled at the first call that needs the program."""

    def __init__(self, module: Any, compile: Callable[..., CompiledModule]):
        """`compile` compiles the module for given keyword arguments and dynamic shapes."""
        self._module, self._compile, self.programs = module, compile, list[CompiledModule]()
        self._whole: dict[str, tuple[int, ...]] = {}  # cache tensor -> global sizes of sharded dims, 0 for dims that are not sharded
        self._ranks: dict[int, _Rank] = {}  # ranks may be threads
        self._requests: dict[object, caches.Requests] = {}  # (form of an empty cache, sizes) -> requests
        self._parameters = tuple(inspect.signature(module.forward).parameters)  # cached, because `signature` takes as long as five launches
        self._word = next((word for word in _CACHE_WORDS if word in self._parameters), "")
        self._lock = threading.Lock()  # ranks may be threads
        of, call = type(module), not_traced(lambda _, *args, **kwargs: self._call(*args, **kwargs))
        methods = {"__call__": call, "_prepare_cache_for_generation": _prepare_cache, "__module__": of.__module__}
        self._stand_in: Any = object.__new__(type(of.__name__, (of,), methods))
        self._stand_in.__dict__ = vars(module)

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        if not self._word:
            raise self._refused(f"forward has none of the arguments {', '.join(_CACHE_WORDS)}; call generate of the original module")
        if kwargs.get("use_cache") is False or kwargs.get("cache_implementation") not in (None, "static"):
            raise self._refused("programs write to a static cache; omit use_cache and cache_implementation")
        if self._word not in kwargs:
            cache = kwargs[self._word] = self._cache(self._length(inputs, kwargs))
            configs = kwargs.get("generation_config"), self._module.generation_config
            samples = kwargs.get("do_sample", any(one.do_sample for one in configs if one))
            _own[cache] = not samples  # a step that is undone must not draw random numbers
            _defer_stops()
        kwargs |= {"use_cache": True, "disable_compile": True}
        return self._stand_in.generate(inputs, **kwargs)

    def _refused(self, why: str) -> ArgumentError:
        return ArgumentError(f"{type(self._module).__name__}: generate: {why}")

    def _length(self, inputs: Any, kwargs: dict[str, Any]) -> int:
        """Upper bound of the number of tokens of a sequence, including the prompt."""
        first = next((one for one in (inputs, *map(kwargs.get, ("input_ids", "inputs_embeds"))) if one is not None), None)
        prompt = 1 if first is None else int(first.shape[1])
        config = kwargs.get("generation_config") or self._module.generation_config
        more = kwargs.get("max_new_tokens", None if "max_length" in kwargs else config.max_new_tokens)
        total = prompt + more if more else kwargs.get("max_length") or config.max_length or prompt + 20
        if not more and first is not None and not kwargs.get("max_length"):
            total = max(total, prompt + 20)  # default of transformers
        return -(-total // _ROUNDED) * _ROUNDED

    def _cache(self, length: int) -> Any:
        """Creates a static cache. Layers with a sliding window also store all positions; masks restrict attention to the window."""
        from transformers import StaticCache
        from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

        cache = StaticCache(config=self._module.config, max_cache_len=length)
        cache.layers = [StaticLayer(max_cache_len=length) if type(x) is StaticSlidingWindowLayer else x for x in cache.layers]
        return cache

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        if kwargs.get("return_dict") and "return_dict" not in self._parameters:
            del kwargs["return_dict"]  # the default, which torch.export does not accept as a keyword
        cache = kwargs.get(self._word)
        if cache is None or not hasattr(cache, "layers"):
            raise self._refused(f"the module was called without a cache of layers; omit {self._word}")
        if not cache.is_compileable:
            raise self._refused(f"the cache is a {type(cache).__name__}, which grows; pass a StaticCache, or omit it")
        group = current_group()
        made = self._plain(kwargs) if group is None else self._of_rank(kwargs, group)
        made[self._word] = cache  # the module returns the cache under the name `_word`
        return made

    def _of_rank(self, kwargs: dict[str, Any], group: Group) -> Any:
        """Runs a call of a rank. The first call for a token after a prompt launches the previous graph if all ranks can do so. Otherwise
        the call captures a graph. A program that checks values is not captured. Later calls launch the graph if their arguments fit."""
        own, cache = self._ranks.setdefault(group.rank, _Rank()), kwargs[self._word]
        if not own.is_first and own.graph and own.graph.takes(kwargs):
            return own.graph(kwargs)
        if own.kept and not caches.has_tensors(cache):
            own.kept.give(cache, _sizes(kwargs, self._word))
        rows = [kwargs.get(name) for name in ("input_ids", "inputs_embeds")]
        is_token = caches.has_tensors(cache) and any(isinstance(one, torch.Tensor) and one.shape[1] == 1 for one in rows)
        if not (is_token and own.is_first):
            own.is_first = not is_token
            return self._plain(kwargs, group)
        own.is_first = False
        is_taken = own.graph is not None and own.graph.takes(kwargs)
        all_take = group.can_coordinate and group.all_true(is_taken)  # collective: either all ranks launch a graph, or all capture one
        if own.graph and all_take:
            return own.graph(kwargs)
        program = self._program(kwargs, is_whole=False)
        if program.checks_values:
            return program(**kwargs)
        own.graph = TokenGraph(program, kwargs, self._word)
        return own.graph.result()

    def _plain(self, kwargs: dict[str, Any], group: Group | None = None) -> Any:
        """Calls a program. First allocates missing tensors of the cache at global sizes. In a group, a rank keeps only its blocks."""
        cache = kwargs[self._word]
        caches.register(kwargs)
        if is_new := not caches.has_tensors(cache):
            empty, sizes = caches.Form(cache), _sizes(kwargs, self._word)
            with self._lock:
                if (empty, sizes) not in self._requests:  # kept, because `requests` takes a second
                    asked = caches.requests(cache, lambda trial, fake: self._module(**{**fake(kwargs), self._word: trial}))
                    self._requests[empty, sizes] = asked
            caches.allocate(cache, self._requests[empty, sizes])
            allocated = caches.Form(cache)
        program = self._program(kwargs, is_whole=is_new or group is None)
        if group is not None and is_new:
            whole = caches.shapes(cache)
            caches.continued(kwargs, program.cut(kwargs, group.rank))
            for name, own in caches.shapes(cache).items():
                self._whole[name] = tuple(0 if size == has else size for size, has in zip(whole[name], own, strict=True))
            self._ranks[group.rank].kept = caches.Kept(cache, empty, allocated, sizes)
        return program(**kwargs)

    def _program(self, kwargs: dict[str, Any], is_whole: bool) -> CompiledModule:
        """Program for these arguments, compiled on first use. The cache has global sizes if `is_whole`."""
        with self._lock:
            program = next((one for one in self.programs if one.takes(**kwargs)), None)
            if program is None:
                whole = kwargs if is_whole else {**kwargs, self._word: caches.enlarged(kwargs[self._word], self._whole)}
                program = self._compiled(whole)
                self.programs.append(program)
        return program

    def _compiled(self, kwargs: dict[str, Any]) -> CompiledModule:
        """Compiles a program, if possible for several lengths of prompts and masks."""
        try:
            return self._compile(kwargs, self._free(kwargs))
        except ProgramError as error:
            program = self._compile(kwargs, None)
            why = f"each length of prompts and masks needs a separate program, because no program accepts several lengths: {error}"
            warnings.warn(str(self._refused(why)), stacklevel=2)
            return program

    def _free(self, kwargs: dict[str, Any]) -> ShapesCollection:
        """Makes the lengths of tokens and masks dynamic, except lengths of 1, because prompts differ in length."""
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


def _sizes(kwargs: Mapping[str, Any], word: str) -> tuple[object, ...]:
    """Key of the sizes of a cache: the number of sequences, and shapes of arguments other than tokens and masks."""
    tensors = {name: leaf for name, leaf in kwargs.items() if name != word and isinstance(leaf, torch.Tensor)}
    found = sorted(tensors.items())
    return tuple((name, leaf.shape[:1] if name in (*_OF_TOKENS, "attention_mask") else leaf.shape) for name, leaf in found)


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
