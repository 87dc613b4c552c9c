"""Cache of built programs and their objects. An entry is a folder, published by an atomic rename.

If several processes need the same entry, one process makes the entry, and the other processes wait. The wait needs a file system with
locks. Cached code runs with the user's rights, so the cache refuses folders that other users can write, and files that changed after they
were published.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from hostweave import base
from hostweave.base.errors import BuildError
from hostweave.base.interrupts import POLL_SECONDS, expect_not_interrupted
from hostweave.base.shortages import remedy_of

SUMS = "SHA256SUMS"  # digests of an entry's files; the file's modification time is the time of the entry's last use
_EVICTED = "evicted"  # file whose modification time is the time of the last eviction
_FOLDERS = ("", "objects", "failed")  # folders that contain entries
_MAX_PREFIX = 50  # characters of the readable prefix
_MIN_UNUSED_SECONDS = 3600.0  # an eviction keeps entries this long after their last use, because a build may be about to link them
EVICTION_PERIOD = 600.0  # minimum number of seconds between evictions by builds
_MAX_LINKS = 40  # maximum number of symbolic links in a path, as in Linux
_MAX_CLOCK_SKEW = 10**10  # nanoseconds by which a file server's clock may be ahead
_LIMIT = "10 GB"
_SCRATCH = re.compile(r"\.(.+)\.[0-9a-f]{8}")  # name of a folder in which an entry is made or removed
KINDS = ("program", "object", "library", "failed build", "unfinished build")


@dataclass(frozen=True)
class CacheEntry:
    """An entry of the cache, or a failed or unfinished build."""

    path: Path
    bytes: int
    used: float  # time of the last use, in seconds since the epoch

    @property
    def kind(self) -> str:
        if _SCRATCH.fullmatch(self.path.name):
            return "unfinished build"
        kind = "library" if self.path.name.startswith("runtime_") else "program"
        return {"objects": "object", "failed": "failed build"}.get(self.path.parent.name, kind)

    @property
    def name(self) -> str:
        found = _SCRATCH.fullmatch(self.path.name)
        return re.sub("-[0-9a-f]{16}$", "", found[1] if found else self.path.name)

    def __str__(self) -> str:
        return f"{size_text(self.bytes)}  {_age(time.time() - self.used):>8}  {self.path}"


def size_text(count: int) -> str:
    """Formats a number of bytes in at least nine columns, such as `   1.2 MB`."""
    return f"{count / 1e6:6.1f} MB" if count >= 1e5 else f"{count / 1e3:6.1f} kB"


def _age(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "now"


def root() -> Path:
    """Folder of the cache: HOSTWEAVE_CACHE, or `hostweave` in the user's cache folder."""
    if folder_name := os.environ.get("HOSTWEAVE_CACHE"):
        return Path(folder_name).absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "hostweave"
    except RuntimeError as error:
        raise BuildError(f"no folder for compiled programs: {error}; set HOSTWEAVE_CACHE to a folder that you own") from error


def limit() -> int:
    """Size in bytes to which an eviction reduces the cache: HOSTWEAVE_CACHE_LIMIT, or 10 GB."""
    text = os.environ.get("HOSTWEAVE_CACHE_LIMIT") or _LIMIT
    number = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kMGT]?)B)?", text.strip(), re.ASCII)
    if not number:
        raise BuildError(f"HOSTWEAVE_CACHE_LIMIT={text} is not a size; write a size such as 500 MB or {_LIMIT}")
    return int(float(number[1]) * 1000 ** " kMGT".index(number[2] or " "))


class _FailedBuildError(BuildError):
    """A failed build. Builds that depend on the failed build raise the same error."""


def key_of(*texts: str) -> str:
    return hashlib.sha256("".join(f"{text}\0" for text in texts).encode()).hexdigest()[:16]


def name_of(name: str, *texts: str) -> str:
    return f"{name[:_MAX_PREFIX]}-{key_of(name, *texts)}"


@cache
def stamp_of(folder: Path) -> str:
    """Stamp of the paths, sizes and times of the files below the folder. If a file was edited after this process began to
    import the package, the stamp is random, because the process may run old code."""
    files = [(path, os.stat(path)) for path in _files(folder)]
    latest = time.time_ns() + _MAX_CLOCK_SKEW  # files with later times were written before the clock was set back
    is_edited = any(base.imported_at <= status.st_ctime_ns <= latest for _, status in files)
    stamps = (f"{path} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}" for path, status in files)
    return key_of(*stamps, os.urandom(16).hex() if is_edited else "")


def lookup(name: str) -> Path | None:
    """Folder of entry `name`, or None if the entry is missing, incomplete or changed."""
    entry = root() / name
    with _as_build_error():
        try:
            _expect_own_above(root())
            for folder in (root(), entry.parent, entry):
                _expect_own(folder)
            if (entry / SUMS).read_text() != _sums(entry):
                return None
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return None
    with contextlib.suppress(OSError):  # the cache may be read-only
        os.utime(entry / SUMS)
    return entry


def get_or_make(name: str, make: Callable[[Path], object], replaces: bool = False) -> Path:
    """Returns the folder of entry `name`. If there is no valid entry, `make` fills a new folder, which is then published. If `make` raises
    BuildError, the folder moves to `failed`, and the error names the new path. Errors of nested builds stay unchanged.

    With `replaces`, the new folder replaces an earlier entry. `make` can read the earlier entry, and no other process makes the entry
    meanwhile."""
    if not replaces and (found := lookup(name)):
        return found
    entry = root() / name
    with _as_build_error(), _lock(name):
        if not replaces and (found := lookup(name)):
            return found
        scratch = _scratch_path(_own(entry.parent) / entry.name)
        try:
            scratch.mkdir(0o700)
            (scratch / SUMS).touch()
            make(scratch)
            for file in map(Path, _files(scratch)):
                file.chmod(file.stat().st_mode & ~0o022)
            (scratch / SUMS).write_text(_sums(scratch))
        except BaseException as error:
            if not isinstance(error, BuildError) or isinstance(error, _FailedBuildError):
                shutil.rmtree(scratch, ignore_errors=True)
                raise
            failed = _own(root() / "failed") / entry.name
            _remove(failed)
            scratch.rename(failed)
            raise _FailedBuildError(f"{error}; sources and log are in {failed}") from error
        try:
            scratch.rename(entry)
        except OSError:  # the path already exists
            if not replaces and lookup(name):  # another process has published the entry, on a file system without locks
                _remove(scratch)
            else:
                _remove(entry)
                scratch.rename(entry)
    return entry


def entries() -> tuple[CacheEntry, ...]:
    with _as_build_error(), contextlib.suppress(FileNotFoundError):
        _expect_own(root())
        sum_files = [sum_file for folder in _FOLDERS for sum_file in (root() / folder).glob(f"*/{SUMS}")]
        return tuple(filter(None, map(_entry, sorted(sum_files))))
    return ()


def summary() -> str:
    found = entries()
    return f"{root()}: {len(found)} entries, {sum(entry.bytes for entry in found) / 1e6:.1f} MB of at most {limit() / 1e6:g} MB"


def clear() -> int:
    """Removes all entries, but no other files. Returns the number of removed entries."""
    found = entries()
    with _as_build_error():
        for entry in found:
            _remove(entry.path)
    return len(found)


def remove_leftovers() -> int:
    """Removes unfinished builds that no process continues. Returns the number of removed folders."""
    count = 0
    for entry in entries():
        if found := _SCRATCH.fullmatch(entry.path.name):
            name = str((entry.path.parent / found[1]).relative_to(root()))
            with _as_build_error(), _lock(name, waits=False) as is_free:
                if is_free:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    count += 1
    return count


def evict(period: float = 0.0) -> None:
    """Removes the least recently used entries, except entries used in the last hour, until the cache is within its limit. Does nothing if
    the last eviction was less than `period` seconds ago, because an eviction reads all entries."""
    max_bytes, total = limit(), 0
    mark = root() / _EVICTED
    with contextlib.suppress(OSError):  # no eviction yet
        if abs(time.time() - mark.stat().st_mtime) < period:
            return
    with contextlib.suppress(OSError):  # the cache may be read-only
        mark.touch()
    for entry in sorted(entries(), key=lambda entry: entry.used, reverse=True):
        total += entry.bytes
        unused = abs(time.time() - entry.used)  # abs, because a clock that was set back leaves future times
        if total > max_bytes and unused > _MIN_UNUSED_SECONDS:
            with contextlib.suppress(OSError):  # the cache may be read-only, or another process may be removing the entry
                _remove(entry.path)


def _entry(sum_file: Path) -> CacheEntry | None:
    """Entry with the list of files `sum_file`, or None if another process has removed the entry."""
    try:
        size = sum(map(os.path.getsize, _files(sum_file.parent))) - sum_file.stat().st_size
        return CacheEntry(sum_file.parent, size, sum_file.stat().st_mtime)
    except FileNotFoundError:
        return None


def _files(folder: Path) -> Iterator[str]:
    for directory, names, files in os.walk(folder):
        names[:] = sorted(name for name in names if name != "__pycache__")
        yield from (f"{directory}/{name}" for name in sorted(files) if not name.startswith("."))


def _sums(folder: Path) -> str:
    names = [path.removeprefix(f"{folder}/") for path in _files(folder)]
    return "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names if name != SUMS)


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = _scratch_path(path)
    scratch.write_text(text)
    scratch.rename(path)


@contextlib.contextmanager
def _as_build_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        remedy = remedy_of(error.strerror or "") or "set HOSTWEAVE_CACHE to a folder that you own, with enough space"
        raise BuildError(f"the cache cannot be used: {where}{error.strerror}; {remedy}") from error


def _own(folder: Path) -> Path:
    """Creates a missing folder, for this user only. Raises BuildError if other users can write to the folder or replace the cache."""
    if folder != root():
        _own(root())
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder == root():
        _expect_own_above(folder)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    _expect_own(folder)
    return folder


def _expect_own(folder: Path) -> None:
    for status in (folder.lstat(), folder.stat()):
        if status.st_uid not in (0, os.geteuid()):
            raise BuildError(
                f"{folder} belongs to another user (uid {status.st_uid}), whose code would run as yours; "
                "set HOSTWEAVE_CACHE to a folder that you own"
            )
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if status.st_mode & 0o022:
        raise BuildError(
            f"{folder} can be written by other users (mode {stat.S_IMODE(status.st_mode):o}), whose code would run as yours; "
            "remove it, or set HOSTWEAVE_CACHE to a folder that you own"
        )


def _expect_own_above(folder: Path) -> None:
    """Raises BuildError if another user can replace the folder, or one of its parents."""
    for at in _path_components(folder):
        status = at.lstat()
        is_of_others = status.st_uid not in (0, os.geteuid())
        if is_of_others or (stat.S_ISDIR(status.st_mode) and status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX):
            remedy = "" if is_of_others else f" with mode {stat.S_IMODE(status.st_mode):o}; change the mode to 755, or"
            raise BuildError(
                f"{folder} can be replaced by other users, whose code would run as yours: {at} belongs to uid {status.st_uid}"
                f"{remedy or ';'} set HOSTWEAVE_CACHE to a folder that you own"
            )


def _path_components(folder: Path) -> Iterator[Path]:
    """Folders and symbolic links through which an absolute path is resolved."""
    at, names, links = Path(folder.anchor), [*reversed(folder.parts[1:])], 0
    while names:
        yield at
        name = names.pop()
        child = at.parent if name == ".." else at / name
        if child.is_symlink():
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            yield child
            target = Path(os.readlink(child))
            names += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path(target.anchor or at)
        else:
            at = child


@contextlib.contextmanager
def opened(path: Path) -> Iterator[str]:
    """Opens a cached file, and yields a path of the open file, so that nobody can replace the file before it is read. Raises BuildError for
    a file that other users can write, or that is not the published file."""
    with _as_build_error():
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise BuildError(f"{path} can be written by other users, whose code would run as yours; remove its folder")
        with open(file, "rb", closefd=False) as data, _as_build_error():
            line = f"{hashlib.file_digest(data, 'sha256').hexdigest()}  {path.name}\n"
            if line not in (path.parent / SUMS).read_text():
                raise BuildError(f"{path} is not the file that was built; remove its folder to build it again")
        # The loader assumes that equal paths name one library, but file descriptors are reused. So each path is spelled differently.
        folders = ("../fd/" if digit == "1" else "./" for digit in f"{next(_opened):b}")
        yield f"/proc/self/fd/{''.join(folders)}{file}"
    finally:
        os.close(file)


_opened = itertools.count(1)


@contextlib.contextmanager
def _lock(name: str, waits: bool = True) -> Iterator[bool]:
    """Holds the lock of an entry. Yields False if another process holds the lock and `waits` is False."""
    lock = FileLock(_own(root() / "locks") / name.replace("/", "-"), mode=0o600)
    try:
        lock.acquire(timeout=-1 if waits else 0, poll_interval=POLL_SECONDS, cancel_check=_is_cancelled)
    except Timeout:
        yield False
        return
    except OSError as error:
        if error.filename:
            raise
        # the file system has no locks, and the atomic rename protects the entry
    try:
        yield True
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)  # before the release: FileLock does not take the lock of a removed file
        lock.release()


def _is_cancelled() -> bool:
    expect_not_interrupted()
    return False


def _scratch_path(entry: Path) -> Path:
    return entry.parent / f".{entry.name}.{os.urandom(4).hex()}"


def _remove(entry: Path) -> None:
    """Removes an entry, or a file with the path of an entry, atomically."""
    removed = _scratch_path(entry)
    try:
        entry.rename(removed)
    except FileNotFoundError:
        return
    if removed.is_dir() and not removed.is_symlink():
        shutil.rmtree(removed)
    else:
        removed.unlink()
