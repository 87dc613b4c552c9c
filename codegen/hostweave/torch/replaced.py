"""Replaces functions of torch and Python in one thread, while the thread traces."""

import builtins
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

Replacement = tuple[Any, str, Callable[..., Any]]  # (owner, name, function)


@contextmanager
def replaced(*replacements: Replacement) -> Iterator[None]:
    """Replaces `owner.name` by `function` in this thread. The owner may be a module that calls a builtin of this name."""
    thread = threading.get_ident()

    def either(own: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (function if threading.get_ident() == thread else own)(*args, **kwargs)

    with ExitStack() as stack:
        for owner, name, function in replacements:
            own = getattr(owner, name, None) or getattr(builtins, name, None)
            stack.enter_context(patch.object(owner, name, either(own, function), create=True))
        yield
