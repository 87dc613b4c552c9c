"""Attributes of modules, except parameters and buffers, that a forward pass reads. A call raises ArgumentError if one has changed.

Reads are recorded during the trace, including reads of a class, such as those of its functions. A call also compares hooks.
"""

import types
from collections.abc import Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.utils.hooks import RemovableHandle

_OF_TORCH = set(vars(nn.Module())) - {"training"}  # read by torch
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ABSENT = object()
CODE = type | nn.Module | torch.Tensor | types.ModuleType | types.FunctionType | types.MethodType | types.BuiltinFunctionType


class State:
    """The mode and submodules of a module, torch.autocast, and recorded values by the path of each module."""

    def __init__(self, module: nn.Module, reads: Mapping[str, set[str]], grad_mode: bool | None):
        """`reads` and `grad_mode` are those of `Exported`."""
        self._grad_mode = grad_mode
        self._module, self._training, self._autocast = module, module.training, autocast_dtypes()
        self._default = torch.get_default_dtype()
        self._children = [submodule._modules for submodule in module.modules()]
        self._children_before = [dict(children) for children in self._children]
        modules = {path: submodule for path, submodule in module.named_modules() if path in reads}
        self._names = {path: sorted(reads[path] - _OF_TORCH) for path in modules}
        self._held = {path: vars(submodule) for path, submodule in modules.items()}
        self._kinds = {path: type(submodule) for path, submodule in modules.items()}
        self._values = {path: {name: self._value(path, name) for name in names} for path, names in self._names.items()}
        of_instances = {path: [name for name in names if name in self._held[path]] for path, names in self._names.items()}
        self._fast: list[Any] = [(itemgetter(*names), self._held[path]) for path, names in of_instances.items() if names]
        of_kinds: dict[type, dict[str, None]] = {}
        for path, kind in self._kinds.items():
            names = [name for name in self._names[path] if name not in self._held[path] and _in_class(kind, name) is not _ABSENT]
            of_kinds.setdefault(kind, {}).update(dict.fromkeys(names))
        self._fast += [(attrgetter(*names), kind) for kind, names in of_kinds.items() if names]
        self._expected = [read(held) for read, held in self._fast]
        # getattr(submodule, name) would run properties. Properties, such as those of spectral_norm, may write to buffers.
        of_modules = ((self._kinds[path], held, name) for path, held in self._held.items() for name in self._names[path])
        found = [held.get(name, getattr(kind, name, None)) for kind, held, name in of_modules]
        self._contents = [(one, _contents(one), _contents(one).copy()) for one in _containers(found)]
        self._live, self._before = [live for _, live, _ in self._contents], [before for *_, before in self._contents]
        every = [(path, getattr(submodule, name)) for path, submodule in module.named_modules() for name in _HOOKS]
        every += [("every module", getattr(of_all_modules, f"_global{name}")) for name in _HOOKS]
        self._hooks = [(path, hooks, list(hooks)) for path, hooks in every]
        self._sized = [*self._held.values(), *(hooks for _, hooks, there in self._hooks if there)]
        self._note_counts()

    def _value(self, path: str, name: str) -> Any:
        held = self._held[path]
        return held[name] if name in held else _in_class(self._kinds[path], name)

    def _note_counts(self) -> None:
        self._sizes, self._handles = list(map(len, self._sized)), RemovableHandle.next_id

    def changed(self) -> str:
        """Describes a change since compile time and the remedy, or returns ""."""
        try:
            is_same = (
                [read(held) for read, held in self._fast] == self._expected
                and (self._module.training, autocast_dtypes()) == (self._training, self._autocast)
                and self._grad_mode in (None, torch.is_grad_enabled())
                and torch.get_default_dtype() == self._default
                and self._children == self._children_before
                and self._live == self._before
                and list(map(len, self._sized)) == self._sizes
                and RemovableHandle.next_id == self._handles  # no hook was added to any module
            )
        except Exception:  # a comparison of tensors, or a missing attribute
            is_same = False
        if is_same:
            return ""
        found = next(self._differences(), "")
        if not found:
            self._note_counts()
        return found

    def _differences(self) -> Iterator[str]:
        if (now := autocast_dtypes()) != self._autocast:
            why = f"torch.autocast is {_in_words(now)}, and was {_in_words(self._autocast)} at compile time"
            yield f"{why}; call it under the same autocast, or compile it within torch.autocast"
        if self._grad_mode not in (None, torch.is_grad_enabled()):
            why = f"forward calls torch.is_grad_enabled(), which returned {self._grad_mode} at compile time"
            yield f"{why}; call it in torch.{'enable' if self._grad_mode else 'no'}_grad()"
        if (default := torch.get_default_dtype()) != self._default:
            yield f"the default dtype is {default}, and was {self._default} at compile time; compile it again"
        yield from (f"{change}; compile it again" for change in self._changes())

    def _changes(self) -> Iterator[str]:
        for before, now in zip(self._children_before, self._children, strict=True):
            yield from (f"{name} was replaced after compilation" for name, child in before.items() if now.get(name) is not child)
        if self._module.training != self._training:
            yield f"the mode has changed from {'train' if self._training else 'eval'}()"
        for path, names in self._names.items():
            for name in names:
                before, now = self._values[path][name], self._value(path, name)
                if not is_same(before, now):
                    yield f"{path}.{name}".lstrip(".") + _written(before, now)
        for one, live, before in self._contents:
            if not is_same(before, live):
                yield _difference(one, before)
        for path, hooks, there in self._hooks:
            if list(hooks) != there:
                yield f"{path or 'the module'} has other hooks than at compile time"


def _in_class(kind: type, name: str) -> Any:
    """Number or function of a class. _ABSENT for other attributes, and for functions of nn.Module."""
    found = getattr(kind, name, _ABSENT)
    is_compared = isinstance(found, (*NUMBERS, types.FunctionType)) and found is not getattr(nn.Module, name, _ABSENT)
    return found if is_compared else _ABSENT


def _written(before: Any, now: Any) -> str:
    shown = bool | int | float | str | None
    if isinstance(before, shown) and isinstance(now, shown):
        return f" is {now!r}, and was {before!r} at compile time"
    return " was changed after compilation"


def _difference(one: Any, before: Any) -> str:
    if isinstance(before, dict):
        now, of = _contents(one), "a dict" if isinstance(one, dict) else type(one).__name__
        name = next((name for name in {**before, **now} if not is_same(before.get(name, _ABSENT), now.get(name, _ABSENT))), "")
        return f"{name!r} of {of} that forward reads was changed after compilation"
    return f"a {type(one).__name__} that forward reads was changed after compilation"


def _contents(one: Any) -> Any:
    return one if isinstance(one, dict | list | set) else one.__dict__


def _containers(found: list[Any]) -> list[Any]:
    """Mutable objects that are reachable from the values `found`. Modules and other objects of torch do not count."""
    seen: dict[int, Any] = {}
    following = list(found)
    while following:
        one = following.pop()
        is_constant = isinstance(one, tuple | frozenset)
        if id(one) in seen or isinstance(one, CODE) or not (is_constant or isinstance(one, dict | list | set) or hasattr(one, "__dict__")):
            continue
        if type(one).__module__.partition(".")[0] == "torch":
            continue
        seen[id(one)] = one
        content = one if is_constant else _contents(one)
        following += content.values() if isinstance(content, dict) else content
    return [one for one in seen.values() if not isinstance(one, tuple | frozenset)]


def is_same(one: Any, other: Any) -> bool:
    """True for the same object, equal values of a type in NUMBERS, and containers whose elements are the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, set):
        return bool(one == other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(is_same, one.values(), other.values()))
    return type(one) in NUMBERS and (one == other or (one != one and other != other))


NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """Dtypes of torch.autocast on the CPU and on GPUs, with None for a device on which autocast is off."""
    return tuple(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda"))


def _in_words(autocast: tuple[torch.dtype | None, ...]) -> str:
    return " and ".join(f"{dtype} of {device}" for device, dtype in zip(("cpu", "cuda"), autocast, strict=True) if dtype) or "off"
