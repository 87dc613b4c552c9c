"""The cache. An entry is created atomically and only once, despite races. Failed builds are kept. Code of other users is never loaded."""

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Forked

from hostweave import base
from hostweave.base.errors import BuildError
from hostweave.base.interrupts import within
from hostweave.base.paths import EXAMPLES, NATIVE, PACKAGE, RUNTIME, TEMPLATES
from hostweave.build import cache


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_CACHE", str(tmp_path / "cache"))


def make_text(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "text").write_text(text)


def test_an_entry_is_made_once() -> None:
    assert cache.lookup("a") is None
    entry = cache.get_or_make("a", make_text("first"))
    assert cache.get_or_make("a", make_text("second")) == entry == cache.lookup("a")
    assert (entry / "text").read_text() == "first"


def test_concurrent_replacements_keep_what_the_others_added() -> None:
    def add(word: str) -> Path:
        def make(folder: Path) -> None:
            earlier = cache.lookup("a")
            text = (earlier / "text").read_text() if earlier else ""
            (folder / "text").write_text(f"{text}{word}")

        return cache.get_or_make("a", make, replaces=True)

    with ThreadPoolExecutor(8) as pool:
        (entry,) = set(pool.map(add, "abcdefgh"))
    assert sorted((entry / "text").read_text()) == [*"abcdefgh"]


def test_a_failed_build_is_kept_and_named() -> None:
    def fail(folder: Path) -> None:
        (folder / "program.cpp").write_text("int x = ;")
        raise BuildError("the compiler failed: program.cpp:1:9: error")

    kept = cache.root() / "failed" / "a"
    for _ in range(2):
        with pytest.raises(BuildError) as error:
            cache.get_or_make("a", fail)
        assert str(error.value) == f"the compiler failed: program.cpp:1:9: error; sources and log are in {kept}"
    assert (kept / "program.cpp").exists()
    assert cache.lookup("a") is None
    assert [entry.path for entry in cache.entries()] == [kept]


def test_an_interrupted_build_leaves_nothing() -> None:
    def interrupt(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get_or_make("a", interrupt)
    assert cache.entries() == ()
    assert [path.name for path in cache.root().iterdir()] == ["locks"]
    assert not list((cache.root() / "locks").iterdir())


def test_clear_removes_only_entries() -> None:
    cache.get_or_make("a", make_text("a"))
    cache.get_or_make("objects/b", make_text("bb"))
    (cache.root() / "mine").mkdir()
    (cache.root() / "mine" / "letter").write_text("to whom it may concern")
    assert [(entry.path.name, entry.bytes) for entry in cache.entries()] == [("a", 1), ("b", 2)]
    assert str(cache.entries()[0]) == f"   0.0 kB       now  {cache.root() / 'a'}"
    assert cache.clear() == 2
    assert cache.entries() == ()
    assert (cache.root() / "mine" / "letter").exists()


def test_a_key_depends_on_all_parts_and_their_boundaries() -> None:
    keys = {cache.key_of(*texts) for texts in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""))}
    assert len(keys) == 4


def test_racing_processes_make_an_entry_once(tmp_path: Path) -> None:
    script = tmp_path / "race.py"
    script.write_text(
        "import os, time\n"
        "from hostweave.build import cache\n"
        "def make(folder):\n"
        "    with open(os.environ['MADE'], 'a') as file: file.write('made\\n')\n"
        "    for i in range(20): (folder / str(i)).write_text('x'); time.sleep(0.01)\n"
        "entry = cache.get_or_make('a', make)\n"
        "assert len(list(entry.glob('[0-9]*'))) == 20\n"
    )
    made = tmp_path / "made"
    environment = {**os.environ, "MADE": str(made)}
    processes = [Forked([sys.executable, str(script)], env=environment) for _ in range(8)]
    assert [process.wait() for process in processes] == [0] * 8
    assert made.read_text() == "made\n"
    assert [entry.path.name for entry in cache.entries()] == ["a"]


# --- stamp of the package


def installed(folder: Path) -> dict[str, str]:
    """Copies the package. Returns the environment of processes that run the copy."""
    for path in (TEMPLATES, RUNTIME, EXAMPLES, PACKAGE):
        copy = folder / "codegen" / path.name if path == PACKAGE else folder / path.name
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("__pycache__", NATIVE.name), copy_function=shutil.copy)
    (folder / "codegen" / PACKAGE.name / NATIVE.name).symlink_to(NATIVE)  # The native library finds BLAS relative to its own folder.
    return {**os.environ, "PYTHONPATH": str(folder / "codegen")}


def test_an_edited_op_runs_in_its_new_form(tmp_path: Path) -> None:
    environment = installed(tmp_path)
    script = (
        "import sys\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in type(finder).__module__]\n"
        "import numpy as np, hostweave as hw, hostweave.base.errors\n"
        "program = hw.compile(hw.fusion(x=hw.f32['M'])(lambda x: hw.reciprocal(x)))\n"
        "print(program.run(x=np.ones(1, np.float32))[0])\n"
    )

    def run(script: str) -> str:
        return subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True).stdout

    assert run(script) == "1.0\n"
    ops = tmp_path / "codegen" / "hostweave" / "fusion_ir" / "ops" / "pointwise.py"
    before = ops.read_text()
    after = before.replace('"{T:1} / {0}"', '"2 * ({T:1} / {0})"')
    assert after != before
    edit_when_loaded = (
        "import pathlib, sys\n"
        "def edit(event, names):\n"
        "    loaded = sys.modules.get('hostweave.fusion_ir.ops')\n"
        "    if event == 'import' and loaded and not loaded.__spec__._initializing and 'edited' not in globals():\n"
        f"        globals()['edited'] = pathlib.Path({str(ops)!r}).write_text({after!r})\n"
        "sys.addaudithook(edit)\n"
    )
    assert run(edit_when_loaded + script + "edited\n") == "1.0\n"
    assert run(script) == "2.0\n"


def test_a_file_with_the_timestamp_of_the_import_may_be_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems have timestamps with a resolution of some milliseconds. So an edited file may have the timestamp of the import. Each
    stamp of this edited file is different, so no cached program is reused."""
    begun = time.clock_gettime_ns(base.CLOCK_OF_FILES)
    (tmp_path / "file").write_text("edited")
    written = (tmp_path / "file").stat().st_ctime_ns
    assert begun <= written
    for imported_at, same in ((written, False), (written + 1, True)):
        monkeypatch.setattr("hostweave.base.imported_at", imported_at)
        assert (cache.stamp_of.__wrapped__(tmp_path) == cache.stamp_of.__wrapped__(tmp_path)) == same


def test_a_clock_behind_the_files_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file has a future timestamp if the clock was set back, or if a machine whose clock is ahead installed the
    file. A file that is an hour ahead does not count as just edited."""
    (tmp_path / "file").write_text("installed")
    now = (tmp_path / "file").stat().st_ctime_ns - 3600 * 10**9
    monkeypatch.setattr("hostweave.base.imported_at", now - 10**9)
    monkeypatch.setattr(cache, "time", SimpleNamespace(time_ns=lambda: now))
    assert cache.stamp_of.__wrapped__(tmp_path) == cache.stamp_of.__wrapped__(tmp_path)


def test_entries_with_future_times_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hours in (("later", 24), ("soon", 0.1), ("earlier", -24)):
        used = time.time() + 3600 * hours
        os.utime(cache.get_or_make(name, make_text(name * 1000)) / cache.SUMS, (used, used))
    monkeypatch.setenv("HOSTWEAVE_CACHE_LIMIT", "1 kB")
    cache.evict()
    assert [entry.path.name for entry in cache.entries()] == ["soon"]


def test_every_file_of_the_package_is_part_of_the_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("package", "templates", "runtime_cpp")]
    for folder, origin in zip(folders, (PACKAGE, TEMPLATES, RUNTIME), strict=True):
        shutil.copytree(origin, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr("hostweave.base.imported_at", time.time_ns() + 10**12)  # All files are older.
    stamps = set()
    for folder in folders:
        files = [path for path in folder.rglob("*") if path.is_file()]
        stamp = cache.stamp_of.__wrapped__(folder)
        assert cache.stamp_of.__wrapped__(folder) == stamp
        for path in files:
            status = path.stat()
            path.write_bytes(path.read_bytes()[::-1])  # Only the ctime and the contents change.
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            stamp = cache.stamp_of.__wrapped__(folder)
            assert stamp not in stamps
            stamps.add(stamp)
    assert len(stamps) > 250


# --- broken entries


@pytest.mark.parametrize("name", ["a", "objects/a"])
@pytest.mark.parametrize("harm", ["truncate", "zero", "lose", "truncate the list", "lose the list", "file in its place", "link"])
def test_a_damaged_entry_is_made_again(name: str, harm: str, tmp_path: Path) -> None:
    entry = cache.get_or_make(name, make_text("whole"))
    if harm == "truncate":
        os.truncate(entry / "text", 2)
    elif harm == "zero":
        (entry / "text").write_bytes(bytes(5))
    elif harm == "lose":
        (entry / "text").unlink()
    elif harm == "truncate the list":
        os.truncate(entry / "SHA256SUMS", 0)
    elif harm == "lose the list":
        (entry / "SHA256SUMS").unlink()
    else:
        shutil.rmtree(entry)
        if harm == "link":
            entry.symlink_to(tmp_path / "nowhere")
        else:
            entry.write_text("not a folder")
    assert cache.lookup(name) is None
    assert (cache.get_or_make(name, make_text("again")) / "text").read_text() == "again"
    assert [path for path in cache.root().rglob(".*") if path.is_dir()] == []


# --- permissions


def others(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Changes the owner of a file or folder to another user, or simulates the change if the process is not root. Returns the owner's id."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
        return 12345
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    return path.lstat().st_uid


def test_folders_are_the_users_alone() -> None:
    before = os.umask(0)
    try:
        cache.get_or_make("objects/a", make_text("a"))
        with pytest.raises(BuildError):
            cache.get_or_make("b", lambda folder: cache.lookup("x" * 300))
    finally:
        os.umask(before)
    folders = {path.relative_to(cache.root()).as_posix(): path.stat().st_mode & 0o777 for path in cache.root().rglob("*") if path.is_dir()}
    assert folders == dict.fromkeys(["objects", "objects/a", "locks", "failed", "failed/b"], 0o700)
    assert cache.root().stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("folder", ["", "a", "objects", "objects/b"])
def test_files_of_other_users_are_not_loaded(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get_or_make("a", make_text("a"))
    cache.get_or_make("objects/b", make_text("b"))
    name, planted = "objects/b" if "objects" in folder else "a", cache.root() / folder
    planted.chmod(0o777)
    with pytest.raises(BuildError) as error:
        cache.lookup(name)
    assert str(error.value) == (
        f"{planted} can be written by other users (mode 777), whose code would run as yours; "
        "remove it, or set HOSTWEAVE_CACHE to a folder that you own"
    )
    planted.chmod(0o700)
    uid = others(planted, monkeypatch)
    with pytest.raises(BuildError, match=rf"belongs to another user \(uid {uid}\), whose code would run as yours; set HOSTWEAVE_CACHE"):
        cache.get_or_make(name, make_text("again"))


def test_a_link_that_another_user_made_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    cache.root().symlink_to(tmp_path / "own")
    assert cache.get_or_make("a", make_text("a")) == cache.lookup("a")
    others(cache.root(), monkeypatch)
    with pytest.raises(BuildError, match=r"cache belongs to uid \d+; set HOSTWEAVE_CACHE"):
        cache.lookup("a")


def test_a_lock_does_not_follow_or_empty_links(tmp_path: Path) -> None:
    letter = tmp_path / "letter"
    letter.write_text("to whom it may concern")
    (cache.root() / "locks").mkdir(parents=True, mode=0o700)
    (cache.root() / "locks" / "a").symlink_to(letter)
    (cache.root() / "locks" / "b").hardlink_to(letter)
    with pytest.raises(BuildError, match=r"the cache cannot be used: .*locks/a: Too many levels of symbolic links; set HOSTWEAVE_CACHE"):
        cache.get_or_make("a", make_text("a"))
    cache.get_or_make("b", make_text("b"))
    assert letter.read_text() == "to whom it may concern"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.filterwarnings("ignore:flock not supported on this filesystem")
def test_a_file_system_without_locks(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert cache.get_or_make("a", make_text("a")) == cache.lookup("a")
    assert not list((cache.root() / "locks").iterdir())


def test_a_wait_for_a_lock_can_be_interrupted() -> None:
    started, finish = threading.Event(), threading.Event()

    def make(folder: Path) -> None:
        started.set()
        assert finish.wait(60)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(cache.get_or_make, "a", make)
        assert started.wait(60)
        with pytest.raises(TimeoutError):
            within(0.1, lambda: cache.get_or_make("a", make_text("a")))
        for thread in threading.enumerate():
            if thread.name == "hostweave task":
                thread.join(60)
                assert not thread.is_alive()
        finish.set()
        assert first.result() == cache.lookup("a")


# --- errors of the file system


def refuse(number: int) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        raise OSError(number, os.strerror(number), str(folder / "program.cpp"))

    return make


def test_an_unusable_cache_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "; set HOSTWEAVE_CACHE to a folder that you own, with enough space"
    with pytest.raises(BuildError, match=r"^the cache cannot be used: .*/program\.cpp: No space left on device; free space on that disk"):
        cache.get_or_make("a", refuse(errno.ENOSPC))
    assert cache.entries() == ()
    with pytest.raises(BuildError, match=rf"^the cache cannot be used: .*: File name too long{remedy}$"):
        cache.get_or_make("a" * 300, make_text("a"))
    for named, why in (("file", "Not a directory"), ("file/below", "File exists"), ("/proc/self/cache", "No such file or directory")):
        (tmp_path / "file").write_text("a file")
        monkeypatch.setenv("HOSTWEAVE_CACHE", str(tmp_path / named))
        with pytest.raises(BuildError, match=rf"^the cache cannot be used: .*: {why}{remedy}$"):
            cache.get_or_make("a", make_text("a"))
    monkeypatch.delenv("HOSTWEAVE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory.")))
    with pytest.raises(BuildError, match=r"^no folder for compiled programs: Could not determine home directory"):
        cache.lookup("a")


def test_names_are_cut_and_differ() -> None:
    names = {cache.name_of("é" * 300, "a"), cache.name_of("é" * 301, "a"), cache.name_of("é" * 300, "b")}
    assert len(names) == 3
    for name in names:
        assert cache.get_or_make(name, make_text("a")) == cache.lookup(name)


# --- size


def test_the_least_recently_used_entry_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = {"a": 5, "objects/b": 4, "c": 3, "objects/d": 2}
    for name in hours:
        cache.get_or_make(name, make_text("x" * 100))
    with pytest.raises(BuildError):
        cache.get_or_make("e", lambda folder: (_ for _ in ()).throw(BuildError("fails")))
    (cache.root() / ".f.0123").mkdir()  # A killed build leaves a folder with such a name.
    (cache.root() / ".f.0123" / "SHA256SUMS").touch()
    for name, ago in {**hours, ".f.0123": 6, "failed/e": 6}.items():
        os.utime(cache.root() / name / "SHA256SUMS", (time.time() - ago * 3600,) * 2)
    cache.lookup("a")  # This call marks entry a as used.

    monkeypatch.setenv("HOSTWEAVE_CACHE_LIMIT", "0.2kB")
    cache.evict()
    assert {entry.path.name for entry in cache.entries()} == {"a", "d"}
    monkeypatch.setenv("HOSTWEAVE_CACHE_LIMIT", "0")
    cache.evict(period=60)  # This call evicts nothing, because the last eviction was less than 60 seconds ago.
    assert {entry.path.name for entry in cache.entries()} == {"a", "d"}
    cache.evict()
    # Entry a was used within the last hour, so another build may be about to link it.
    assert {entry.path.name for entry in cache.entries()} == {"a"}


@pytest.mark.parametrize(("text", "size"), [("10 GB", 10**10), ("1.5MB", 1500000), ("700", 700), ("0 B", 0), ("", 10**10)])
def test_limits(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_CACHE_LIMIT", text)
    assert cache.limit() == size


@pytest.mark.parametrize("text", ["much", "-1", "1 EB", "1e9", "٣"])
def test_an_invalid_limit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_CACHE_LIMIT", text)
    with pytest.raises(BuildError, match=rf"^HOSTWEAVE_CACHE_LIMIT={re.escape(text)} is not a size; write a size such as 500 MB or 10 GB$"):
        cache.limit()


def test_a_folder_above_that_others_may_write_to(tmp_path: Path) -> None:
    cache.get_or_make("a", make_text("ours"))
    tmp_path.chmod(0o777)
    for use in (lambda: cache.lookup("a"), lambda: cache.get_or_make("b", make_text("new"))):
        with pytest.raises(
            BuildError,
            match=rf"can be replaced by other users, .*: {tmp_path} belongs to uid \d+ with mode 777; change the mode to 755, or set ",
        ):
            use()
    tmp_path.chmod(0o1777)  # This mode makes the folder sticky.
    assert cache.lookup("a")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("way", ["a folder", "a link", "a link to a link"])
def test_another_user_cannot_redirect_the_cache(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "public").mkdir()
    theirs = tmp_path / "public" / "link"
    theirs.symlink_to(tmp_path / "own")
    (tmp_path / "my").symlink_to(theirs)
    monkeypatch.setenv("HOSTWEAVE_CACHE", str(tmp_path / "my" if way == "a link to a link" else theirs / "cache"))
    assert cache.get_or_make("a", make_text("a")) == cache.lookup("a")
    uid = others(theirs.parent if way == "a folder" else theirs, monkeypatch)
    with pytest.raises(
        BuildError, match=rf"can be replaced by other users, .*: /\S+ belongs to uid {uid}; set HOSTWEAVE_CACHE to a folder"
    ):
        cache.lookup("a")


def test_links_in_a_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / "a" / "below"):
        monkeypatch.setenv("HOSTWEAVE_CACHE", str(path))
        with pytest.raises(BuildError, match=r"^the cache cannot be used: .*: Too many levels of symbolic links; set HOSTWEAVE_CACHE"):
            cache.get_or_make("a", make_text("a"))


def test_the_checked_file_is_loaded(tmp_path: Path) -> None:
    library = cache.get_or_make("a", make_text("ours")) / "text"
    seen = set()
    for _ in range(5):
        with cache.opened(library) as file:
            (tmp_path / "other").write_text("planted")
            library.rename(tmp_path / "kept")
            (tmp_path / "other").rename(library)
            assert Path(file).read_text() == "ours"
            (tmp_path / "kept").rename(library)
        seen.add(file)
    assert len(seen) == 5
    library.chmod(0o666)
    with pytest.raises(BuildError, match="can be written by other users"), cache.opened(library):
        pass
    library.chmod(0o600)
    library.write_text("planted")
    with pytest.raises(BuildError, match="is not the file that was built"), cache.opened(library):
        pass
