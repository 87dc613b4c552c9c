"""Entries of torch's op database as functions of tensors, each with one sample of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass
class Entry:
    """An entry that takes tensors. A second call returns the same result, unless the entry is in NOT_COMPARED."""

    name: str
    function: Callable[..., list[torch.Tensor]]
    given: list[torch.Tensor]
    has_gradient: bool


class Several(nn.Module):
    """A module that evaluates several entries with separate arguments, so that only one program is compiled."""

    def __init__(self, entries: list[Entry]):
        super().__init__()
        self.entries = entries

    def forward(self, *given: torch.Tensor) -> tuple[list[torch.Tensor], ...]:
        tensors = iter(given)
        return tuple(entry.function(*(next(tensors) for _ in entry.given)) for entry in self.entries)


# Entries with elements that cannot be compared: results in uninitialised memory, and random numbers, which differ from torch's.
_NOT_COMPARED = """
empty empty_like empty_permuted empty_strided new_empty new_empty_strided
bernoulli cauchy exponential geometric log_normal normal normal.in_place uniform rand_like randint_like randn_like
nn.functional.multi_head_attention_forward nn.functional.rrelu
"""
NOT_COMPARED = set(_NOT_COMPARED.split())


def entries(number: int, of: int, dtype: torch.dtype = torch.float32) -> Iterator[Entry]:
    """Every `of`-th entry from entry `number` on, if the entry can be tested with `dtype`."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db[number::of]:
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        if dtype in info.dtypes and (entry := _entry(name, info, dtype)):
            yield entry


def _has_elements(sample: Any) -> bool:
    leaves = pytree.tree_leaves((sample.input, tuple(sample.args), dict(sample.kwargs)))
    return all(one.numel() for one in leaves if isinstance(one, torch.Tensor))


def _entry(name: str, info: Any, dtype: torch.dtype = torch.float32) -> Entry | None:
    torch.manual_seed(0)
    try:
        derives = info.supports_autograd and dtype.is_floating_point
        with patch("inspect.stack", list):  # The database looks for a unittest in the stack, which takes long.
            samples = list(islice(info.sample_inputs("cpu", dtype, requires_grad=derives), 20))
        sample = next((one for one in samples if _has_elements(one)), samples[0])
        leaves, spec = pytree.tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        op = info.get_op()

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            mine = dict(zip(places, tensors, strict=True))
            first, args, kwargs = pytree.tree_unflatten([mine.get(place, leaf) for place, leaf in enumerate(leaves)], spec)
            with patch.object(
                torch, "manual_seed", _SEED
            ):  # Hostweave refuses modules that call manual_seed, but entries with random numbers call it.
                results = pytree.tree_leaves(op(first, *args, **kwargs))
            made = [leaf for leaf in results if isinstance(leaf, torch.Tensor)]
            if info.name in _ANY_OF_EQUALS:
                place = _ANY_OF_EQUALS[info.name]
                made[-1] = _elements(first, made[-1], kwargs.get("dim", args[place] if len(args) > place else -1))
            return made

        given = [leaves[place] for place in places]
        made = [function(*fresh(given)) for _ in range(2)]
        if not given or not made[0] or any(one.layout is not torch.strided for one in (*given, *made[0])):
            return None
        pairs = [(one.detach().nan_to_num(), other.detach().nan_to_num()) for one, other in zip(*made, strict=True)]
        is_same = name in NOT_COMPARED or all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)
        return Entry(name, function, given, any(one.requires_grad for one in made[0])) if is_same else None
    except (
        AssertionError,
        RuntimeError,
        NotImplementedError,
        ValueError,
        IndexError,
        StopIteration,
        TypeError,
    ):  # This build of torch lacks a feature, or the entry has no samples.
        return None


_SEED = torch.manual_seed

# Ops that may return the index of any of several equal elements, and for each op, the position of the argument `dim`.
_ANY_OF_EQUALS = {"sort": 0, "argsort": 0, "topk": 1, "kthvalue": 1}


def _elements(x: torch.Tensor, places: torch.Tensor, dim: int) -> torch.Tensor:
    return x.gather(dim, places if places.ndim == x.ndim else places.unsqueeze(dim))


def fresh(given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one.detach().clone().requires_grad_(one.requires_grad) for one in given]
