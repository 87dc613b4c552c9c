"""The cache: entries that appear whole, once, whoever races for them; failed builds that stay to be read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostweave.build import cache
from hostweave.errors import BuildError


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_CACHE", str(tmp_path / "cache"))


def make_text(text: str):
    return lambda folder: (folder / "text").write_text(text)


def test_an_entry_is_made_once() -> None:
    assert cache.lookup("a") is None
    entry = cache.get_or_make("a", make_text("first"))
    assert cache.get_or_make("a", make_text("second")) == entry == cache.lookup("a")
    assert (entry / "text").read_text() == "first"


def test_a_failed_build_is_kept_and_named() -> None:
    def fail(folder: Path) -> None:
        (folder / "program.cpp").write_text("int x = ;")
        raise BuildError("the compiler failed: program.cpp:1:9: error")

    kept = cache.root() / "failed" / "a"
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


def test_clear() -> None:
    cache.get_or_make("a", make_text("a"))
    cache.get_or_make("b", make_text("bb"))
    assert [(entry.path.name, entry.bytes) for entry in cache.entries()] == [("a", 1), ("b", 2)]
    assert str(cache.entries()[0]) == f"     0.0 MB  {cache.root() / 'a'}"
    assert cache.clear() == 2
    assert cache.entries() == ()


def test_a_key_depends_on_every_part_and_where_it_ends() -> None:
    keys = {cache.key_of(*parts) for parts in (("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""))}
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
        "assert len(list(entry.iterdir())) == 20\n"
    )
    made = tmp_path / "made"
    environment = {**os.environ, "MADE": str(made)}
    processes = [subprocess.Popen([sys.executable, str(script)], env=environment) for _ in range(8)]
    assert [process.wait() for process in processes] == [0] * 8
    assert made.read_text() == "made\n"
    assert [entry.path.name for entry in cache.entries()] == ["a"]
