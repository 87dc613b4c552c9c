"""Shortages of resources while a program is compiled, cached, loaded or run. The error has a reason and a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest

import hostweave as hw
from hostweave.base.errors import BuildError, ExecutionError
from hostweave.base.shortages import explains_shortages, remedy_of
from hostweave.build.make import run_together

SCRIPT = """
import os, resource, sys, threading
import numpy as np
import hostweave as hw
from hostweave.base.errors import HostweaveError

what, more, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]

@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
def doubled(x):
    return hw.reshard(x + x, "M", "K")

program, x = hw.compile(doubled), np.ones((4, 2), np.float32)
if when == "load":
    program.build()
held = {"NOFILE": len(os.listdir("/proc/self/fd")), "AS": int(open("/proc/self/statm").read().split()[0]) * 4096}.get(what, 0)
limit = getattr(resource, "RLIMIT_" + what)
resource.setrlimit(limit, (held + more, resource.getrlimit(limit)[1]))

def on_rank(rank):
    hw.init(threads)

try:
    if when == "ranks":
        threads = hw.Threads(64)
        threads.run(on_rank)
    else:
        program.run(x)
    said = "no shortage"
except HostweaveError as error:
    said = f"{error}"
print(said, flush=True)
os._exit(0)  # other libraries may need memory to end
"""
FILES, SIZE, MEMORY, THREADS, DISK = ("ulimit -n", "ulimit -f", "ulimit -v", "ulimit -u", "free space on that disk")


@pytest.mark.parametrize(
    ("what", "more", "when", "remedy"),
    [
        ("NOFILE", 0, "build", FILES),
        ("NOFILE", 3, "build", FILES),
        ("FSIZE", 2000, "build", SIZE),
        ("FSIZE", 20000, "build", SIZE),
        ("AS", 20 << 20, "build", MEMORY),
        ("AS", 1 << 20, "load", MEMORY),
        ("AS", 64 << 20, "ranks", MEMORY),
        ("AS", 0, "load", MEMORY),
        ("AS", 64 << 20, "build", MEMORY),
    ],
)
def test_limits_of_a_process(what: str, more: int, when: str, remedy: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOSTWEAVE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SCRIPT, what, str(more), when]
    done = forked.run(command, env=environment, timeout=120)
    (said,) = done.stdout.splitlines() or [done.stderr]
    assert remedy in said


def test_the_device_has_memory_for_one_of_its_threads(tmp_path: Path) -> None:
    """The CPU device can start one thread, but not two. The device must end the thread, which would otherwise wait forever."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("the device has one thread on a machine with one core")
    # Threads of Python have stacks of 1 MiB. Threads of the device have stacks of 128 MiB, the limit that prlimit sets.
    script = f"import threading\nthreading.stack_size(1 << 20)\n{SCRIPT}"
    environment = {**os.environ, "HOSTWEAVE_CACHE": str(tmp_path / "cache"), "MALLOC_ARENA_MAX": "1"}
    command = ["prlimit", f"--stack={128 << 20}:", sys.executable, "-c", script, "AS", str(200 << 20), "load"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert THREADS in done.stdout, done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k,mode=700", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("kilobytes", [12, 60, 200])
def test_a_full_disk(kilobytes: int, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", small_disk], check=True)
    monkeypatch.setenv("HOSTWEAVE_CACHE", str(small_disk / "cache"))
    with pytest.raises(BuildError, match=rf"No space left on device'?; {DISK}, or set HOSTWEAVE_CACHE and TMPDIR to other folders"):
        hw.compile(hw.fusion(x=hw.f32["M", 7])(lambda x: x * 3 + 1)).build()


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("echo 'cc1plus: out of memory allocating 65536 bytes'; exit 1", MEMORY),
        ("echo 'c++: fatal error: Killed signal terminated program cc1plus'; exit 1", MEMORY),
        ("echo 'collect2: fatal error: ld terminated with signal 7 [Bus error], core dumped'; exit 1", DISK),
        ("echo '/usr/bin/ld: final link failed: No space left on device'; echo 'collect2: error: ld returned 1 exit status'; exit 1", DISK),
        ("echo 'c++: fatal error: cannot execute: vfork: Resource temporarily unavailable'; exit 1", THREADS),
        ("kill -9 $$", MEMORY),
    ],
)
def test_messages_of_compilers(said: str, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=rf"^the compiler failed: .*; .*{remedy}"):
        run_together({"it": ["/bin/sh", "-c", said]}, tmp_path)


def test_other_errors_stay_as_they_are() -> None:
    assert remedy_of("error: no member named 'x'") is None
    with pytest.raises(KeyError):
        explains_shortages(lambda: {}["x"])()
    with pytest.raises(ExecutionError, match=r"^the machine has too few resources: MemoryError; free memory"):
        explains_shortages(lambda: (_ for _ in ()).throw(MemoryError()).__next__())()


@pytest.mark.extra("torch")
def test_arrays_of_pytorch_that_are_too_large() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    program = hw.compile(hw.fusion(x=hw.f32["M", "N"])(lambda x: x + 1))
    with pytest.raises(
        ExecutionError, match=r"no memory for a contiguous copy of torch.float32\[1048576, 1048576\] \(.*\); use smaller arrays"
    ):
        program.run(x=torch.ones(1).expand(2**20, 2**20))
