"""Tests the CPU device with C++ programs that call the device as generated programs do."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_here import needs_cuda

from hostweave.base.paths import NATIVE, RUNTIME
from hostweave.build.cache import get_or_make, name_of, stamp_of
from hostweave.build.toolchain import require_native

CPU = RUNTIME / "cpu"
HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.xdist_group("cpu_device")  # One worker compiles the programs once.
FLAGS = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror"]


def run(command: list[str | Path], timeout: float = 100) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def compile_all(commands: list[list[str | Path]]) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))


class Device:
    """Installed library of the CPU device, and the flags to compile and link programs with this library."""

    def __init__(self, folder: Path) -> None:
        require_native()
        self.folder = folder
        self.link = [NATIVE / "libhostweave_cpu.so", f"-Wl,-rpath,{NATIVE}", "-pthread"]

    def build_command(self, name: str, sources: list[str], options: list[str] | None = None) -> list[str | Path]:
        files = [HERE / source for source in sources]
        return ["g++", *FLAGS, *(options or []), f"-I{HERE}", f"-I{CPU / 'include'}", *files, *self.link, "-o", self.folder / name]


RANKS = (1, 2, 3, 4, 8)
SUITES = ("test_streams", "test_graphs", "test_collectives", "test_matmul", "test_ranks", "test_plans", "test_straighten", "test_failures")


def suites_command(device: Device) -> list[str | Path]:
    """Command that builds all suites as one program, so that headers are parsed once.

    The program contains the CUDA target's versions of target-specific files. The library contains the CPU target's versions.
    """
    merged = device.folder / "suites.cpp"
    names = ("device_lease", "instance", "member", "signals_cuda", "staging", "target_cuda")
    driver = (RUNTIME / "src" / "driver_function_cuda.cpp", *(RUNTIME / "driver" / "src" / f"{name}.cpp" for name in names))
    sources = (*(HERE / f"{suite}.cpp" for suite in SUITES), *driver)
    main = "int main(int argc, char** argv) { return testing::main(argc, argv); }\n"
    merged.write_text("".join(f'#include "{path}"\n' for path in sources) + main)
    folders = [f"-I{RUNTIME / folder}" for folder in ("include", "attention", "driver/include", "driver/src")]
    return device.build_command("suites", [str(merged)], [*folders, "-Wno-subobject-linkage"])


def straighten_cuda_command(folder: Path) -> list[str | Path]:
    """Command that builds straighten_cuda.cpp with a fake CUDA runtime. Graphs of the fake are plain data, and may have nodes of unknown
    kinds."""
    sources = [f"{RUNTIME}/driver/src/{name}.cpp" for name in ("straighten", "straighten_cuda")]
    headers = [f"-I{path}" for path in (HERE / "fake_graphs", RUNTIME / "driver" / "include", RUNTIME / "include")]
    return ["g++", *FLAGS, *headers, HERE / "test_straighten_cuda.cpp", *sources, "-o", folder / "test_straighten_cuda"]


def build_all(folder: Path) -> None:
    device = Device(folder)
    example = device.build_command("ag_matmul", ["ag_matmul.cpp", "ag_matmul_p2p/program.cpp"])
    compile_all([suites_command(device), straighten_cuda_command(folder), example])


@pytest.fixture(scope="module")
def device() -> Device:
    """The device and its test programs, which are built once for the sources in this folder."""
    return Device(get_or_make(name_of("cpu_device", stamp_of(HERE)), build_all))


@pytest.mark.parametrize("suite", SUITES)
def test_suite(device: Device, suite: str) -> None:
    assert run([device.folder / "suites", f"{suite} "]).startswith(f"ok {suite} ")


def test_straightening_of_graphs_with_unknown_nodes(device: Device) -> None:
    run([device.folder / "test_straighten_cuda"])


def ag_matmul(device: Device, ranks: int, *arguments: str) -> tuple[dict[str, float], str]:
    words, _, report = run([device.folder / "ag_matmul", *arguments, f"ranks={ranks}"]).partition("\n")
    return {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)", words)}, report


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("picker", ["parallel", "uniform", "pct", "hosts", "mixed"])
def test_example_is_right_under_every_schedule(device: Device, ranks: int, picker: str) -> None:
    outcome, _ = ag_matmul(device, ranks, picker, "0", "20")
    assert (outcome["right"], outcome["same_schedule"]) == (20, 1)


DROPPED = [f"{what}={stream}" for what in ("fork", "join") for stream in range(4)] + ["next=1"]  # next: matmuls on the next stream


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("dropped", DROPPED)
def test_dropped_wait_gives_wrong_answers(device: Device, dropped: str, ordered: int) -> None:
    outcome, _ = ag_matmul(device, 4, "mixed", "0", "40", dropped, f"ordered={ordered}", "check=0")
    redundant = ordered == 1 and dropped in (
        "fork=2",
        "fork=3",
    )  # The communicator runs the ops on streams 2 and 3 after the ops on streams 0 and 1.
    assert (outcome["wrong"] > 0) != redundant


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("dropped", DROPPED)
def test_dropped_wait_is_reported_in_every_run(device: Device, dropped: str, ordered: int) -> None:
    outcome, report = ag_matmul(device, 4, "mixed", "0", "6", dropped, f"ordered={ordered}", "check=1")
    redundant = ordered == 1 and dropped in ("fork=2", "fork=3")
    assert outcome["right" if redundant else "reported"] == 6
    if not redundant:
        assert re.search(r"rank \d stream \d: .* \((program|ag_matmul|runtime)\.(cpp|h):\d+\), which (reads|writes)", report)


def real_include_folders() -> list[Path]:
    """Folders with the headers of CUDA, NCCL and cuBLASLt, from a toolkit or pip wheels. Returns [] if any header is missing."""
    toolkits = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    wheels = [Path(folder) / "nvidia" for folder in sys.path]
    candidates = toolkits + [found for wheel in wheels for pattern in ("*/include", "*/*/include") for found in wheel.glob(pattern)]
    folders = []
    for header in ("cuda_runtime_api.h", "nccl.h", "cublasLt.h"):
        found = [folder for folder in candidates if (folder / header).exists()]
        if not found:
            return []
        folders.append(found[0])
    return list(dict.fromkeys(folders))


@pytest.fixture(scope="module")
def real_headers() -> list[str]:
    folders = real_include_folders()
    assert folders
    return [option for folder in folders for option in ("-isystem", str(folder))]


@needs_cuda
def test_values_are_those_of_the_real_headers(tmp_path: Path, real_headers: list[str]) -> None:
    source = HERE / "header_values.cpp"
    ours, theirs = tmp_path / "our_values", tmp_path / "real_values"
    build = ["g++", "-std=c++20", "-O2", source]
    # In the real headers, the host functions that convert floats are also inline, so no library is needed.
    compile_all([[*build, f"-I{CPU / 'include'}", "-o", ours], [*build, *real_headers, "-o", theirs]])
    assert run([ours]) == run([theirs])


@needs_cuda
def test_object_compiled_against_the_real_headers_links_and_runs(tmp_path: Path, real_headers: list[str]) -> None:
    device, program = Device(tmp_path), tmp_path / "real_program.o"
    options = ["-std=c++20", "-O0", f"-I{HERE}"]
    driver = tmp_path / "real_driver.o"
    compile_all(
        [
            ["g++", *options, *real_headers, "-c", HERE / "ag_matmul_p2p" / "program.cpp", "-o", program],
            ["g++", *options, f"-I{CPU / 'include'}", "-c", HERE / "ag_matmul.cpp", "-o", driver],
        ]
    )
    run(["g++", program, driver, *device.link, "-o", tmp_path / "ag_matmul_real"])
    words = run([tmp_path / "ag_matmul_real", "mixed", "0", "10", "ranks=4"])
    assert words.startswith("right 10 ")
