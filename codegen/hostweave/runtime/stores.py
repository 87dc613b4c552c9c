"""Key-value stores of a group: ids of channels, signatures of calls, and progress."""

from __future__ import annotations

import threading
from typing import Protocol

from hostweave.base.errors import ExecutionError


class StoreClosed(ExecutionError):
    """The process that kept the store has ended, as it should."""


class Store(Protocol):
    """What a provider has to offer: a map that all ranks of a world see. Used by several threads at once."""

    def set(self, key: str, value: bytes) -> None:
        """Puts a value, in place of an earlier one."""

    def get(self, key: str, timeout: float) -> bytes:
        """The value, waiting up to `timeout` seconds for it; 0 only looks. Raises TimeoutError."""


class MemoryStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._failure: str | None = None
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values or self._failure, timeout):
                raise TimeoutError(key)
            if key not in self._values:
                raise ExecutionError(self._failure or "")
            return self._values[key]

    def fail(self, reason: str) -> None:
        """Ends the waiting for values that are not there: each `get` of one raises ExecutionError from now on."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()
