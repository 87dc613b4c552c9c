"""Makes os.fork safe: registered locks are free and registered sockets closed in the child, and a fork waits for lazy imports and starts
of processes."""

import concurrent.futures.thread  # noqa: F401  # imported here, because a lazy import would register fork handlers while a fork waits
import os
import sys
import threading
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakSet

_T = TypeVar("_T")

_WAIT_TIMEOUT = 10.0  # seconds that a fork waits for each lock; limited, because an import may wait for the forking thread

importing = threading.RLock()  # held during lazy imports; a fork waits for this lock
# Held while a process starts. A fork waits for this lock, because the child would keep the pipe of the starting process open.
starting = threading.RLock()
_locks: WeakSet[Any] = WeakSet()
_sockets: WeakSet[Any] = WeakSet()
_held_locks = threading.local()


def reset_after_fork(lock: _T) -> _T:
    """Makes a lock free in the child after each fork. Returns the lock."""
    _locks.add(lock)
    return lock


def closed_after_fork(socket: _T) -> _T:
    """Closes a socket in the child after each fork, because the child may outlive this process. Returns the socket."""
    _sockets.add(socket)
    return socket


def _before() -> None:
    _held_locks.held = [lock for lock in (importing, starting) if lock.acquire(timeout=_WAIT_TIMEOUT)]


def _in_parent() -> None:
    for lock in _held_locks.held:
        lock.release()


def _in_child() -> None:
    for lock in (importing, starting, *_locks, *_locks_of_properties()):
        lock._at_fork_reinit()
    for socket in _sockets:
        socket.close()


def _locks_of_properties() -> list[Any]:
    """Locks of cached properties, in Python before 3.12."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("hostweave.")]
    classes = {one for module in modules for one in vars(module).values() if isinstance(one, type)}
    properties = (one for owner in classes for one in vars(owner).values() if isinstance(one, cached_property))
    return [one.lock for one in properties if hasattr(one, "lock")]


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
