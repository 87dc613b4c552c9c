"""Replaces functions of torch and Python in one thread, while it traces."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Inside the `with` block, this thread calls `function` instead of `owner.name`. Other threads call the original function."""
    own, thread = getattr(owner, name), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else own)(*args, **kwargs)

    return patch.object(owner, name, call)
