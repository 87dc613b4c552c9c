"""The cache of built programs and their objects: one folder an entry, which appears all at once by a rename.

`HOSTWEAVE_CACHE` moves it. Processes that want the same entry at the same time wait for the first of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hostweave.errors import BuildError


@dataclass(frozen=True)
class Entry:
    """Something in the cache, or a failed build that was kept."""

    path: Path
    bytes: int

    def __str__(self) -> str:
        return f"{self.bytes / 1e6:8.1f} MB  {self.path}"


def root() -> Path:
    """HOSTWEAVE_CACHE, else `hostweave` in the user's cache folder."""
    if named := os.environ.get("HOSTWEAVE_CACHE"):
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hostweave"


def key_of(*parts: str) -> str:
    """16 hex digits that change when any part changes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


@cache
def digest_of(*folders: Path) -> str:
    """A digest of the names and contents of every file below the folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for directory, names, files in os.walk(folder):
            names[:] = sorted(name for name in names if name != "__pycache__")
            for name in sorted(files):
                path = Path(directory, name)
                digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def lookup(name: str) -> Path | None:
    """The folder of entry `name`, where it is there."""
    entry = root() / name
    return entry if entry.is_dir() else None


def get_or_make(name: str, make: Callable[[Path], object]) -> Path:
    """The folder of entry `name`; where it is not there, `make` fills a new folder, which is then published whole.

    A BuildError of `make` keeps that folder below `failed` and says so.
    """
    entry = root() / name
    with _lock(entry):
        if entry.is_dir():
            return entry
        scratch = entry.parent / f".{entry.name}.{os.urandom(4).hex()}"
        scratch.mkdir()
        try:
            make(scratch)
        except BuildError as error:
            raise BuildError(f"{error}; sources and log are in {_keep_failed(scratch, name)}") from error
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        try:
            scratch.rename(entry)
        except OSError:  # another process published it meanwhile, where the file system has no locks
            shutil.rmtree(scratch, ignore_errors=True)
            if not entry.is_dir():
                raise
    return entry


def entries() -> tuple[Entry, ...]:
    """What the cache holds, failed builds included."""
    paths = [path for path in (*root().glob("*"), *root().glob("failed/*")) if path.is_dir() and path.name not in ("failed", "locks")]
    return tuple(Entry(path, sum(f.stat().st_size for f in path.rglob("*") if f.is_file())) for path in sorted(paths))


def clear() -> int:
    """Empties the cache. Returns how many entries it had."""
    count = len(entries())
    for path in root().glob("*"):
        shutil.rmtree(path, ignore_errors=True)
    return count


@contextlib.contextmanager
def _lock(entry: Path) -> Iterator[None]:
    locks = entry.parent / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with open(locks / entry.name, "w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: the rename alone keeps the entry whole
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _keep_failed(scratch: Path, name: str) -> Path:
    failed = root() / "failed" / name
    failed.parent.mkdir(exist_ok=True)
    shutil.rmtree(failed, ignore_errors=True)
    scratch.rename(failed)
    return failed
