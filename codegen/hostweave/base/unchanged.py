"""Reuses objects instead of equal copies. Facts cached in an object then stay, and comparisons are fast."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, TypeVar

T = TypeVar("T")


class _Facts(dict[object, tuple[object, Any]]):
    """Cached facts of an object. Copies and pickles of the object begin without facts."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Facts, ()


def is_same(old: Any, new: Any) -> bool:
    """True for the same object, and for a tuple and a sequence of the same objects."""
    return old is new or (isinstance(old, tuple) and isinstance(new, Sequence) and len(old) == len(new) and all(map(is_, old, new)))


def fact(node: object, key: object, given: object, compute: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Returns `compute(*args, **kwargs)`, a fact about an immutable object. Computes the fact again only if `given` has changed."""
    known = node.__dict__.get("_facts") or node.__dict__.setdefault("_facts", _Facts())
    found: tuple[object, T] | None = known.get(key)
    if found is None or found[0] != given:
        found = known[key] = given, compute(*args, **kwargs)
    return found[1]


def replaced(node: T, **fields: Any) -> T:
    """Like `dataclasses.replace`, but returns `node` itself if no field changes."""
    is_changed = any(not is_same(getattr(node, name), value) for name, value in fields.items())
    return replace(node, **fields) if is_changed else node  # type: ignore[type-var]
