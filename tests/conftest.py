"""Options, marks and environment of all tests."""

from __future__ import annotations

import gc
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import cache
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from compiler import KERNELS, LIBRARY, PROGRAM, toolchains, with_precompiled_headers
from cuda_here import compiles, quick_options
from turns import FOLDER as OBJECTS
from turns import with_others
from xdist.scheduler import LoadGroupScheduling

from hostweave.base.errors import BuildError
from hostweave.base.paths import BUILDER, RUNTIME
from hostweave.build import make, nvrtc
from hostweave.build.cache import key_of, root, stamp_of
from hostweave.build.cuda import gpus
from hostweave.build.nvrtc import Unit
from hostweave.build.toolchain import ONLY_ENQUEUE, Toolchain
from hostweave.targets.target import find_target

COMPILERS = {"optimising-c++": (PROGRAM, KERNELS, LIBRARY) if gpus() else (KERNELS,), "c++": ()}
WORKERS = 8  # largest number of workers without GPUs
WAITING = {"hangs", "interrupts", "launchers", "lost_ranks", "prepare", "rank_faults"}  # Tests in these folders mostly wait.
GPU_TESTS = 6  # number of consecutive GPU tests of a file that run on one worker, because the tests may share programs
# Marks that the text of a module must mention, and what mentions them.
MENTIONS = {"extra": r"\bextra\(|importorskip|needs_cuda", "more": r"\bmark\.more\b|\bseed_ranges\("}
OPTIMISING = "HOSTWEAVE_TESTS_OPTIMISING_CXX"  # environment variable with the path of the optimising compiler

# Long tests start first. Otherwise, one worker might still run a long test when all other workers are done.
LONGEST = (
    "test_leaving_ranks.py",
    "test_killed_ranks.py",
    "test_launchers.py",
    "test_a_launch_by_the_application_names_its_line",
    "test_a_rank_that_never",
    "test_ctrl_c_reports_the_positions_of_ranks",
    "test_interrupts.py",
    "test_export.py",
    "test_exported_library.py",
    "test_programs_of_unusual_names",
    "test_cpu_device.py",
    "test_all_ops_compile_for_cuda",
    "test_build.py",
    "test_llama.py",
    "test_one_sided_mutations.py",
    "test_faults.py",
    "test_every_op_compiles_for_cuda",
    "test_hangs.py",
    "test_scripts.py",
    "test_kernels_compute_what_numpy_does",
    "tests/conformance",
    "test_inference.py",
    "test_inspect_shows_one_function",
    "test_random_blocks.py",
    "test_docs.py",
    "tests/pytorch",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite files that tests compare, such as tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    """Sets a cache folder that all workers share. The cache of the user is not used.

    With GPUs, programs are compiled with the default flags. Without GPUs, C++ of programs and runtimes is not optimised, except kernels in
    tests with the fixture `optimised_kernels`. Tests that unset CXX compile with the default flags and without precompiled headers.
    """
    gc.disable()  # Imports create no garbage, so collections would only take time.
    is_worker = hasattr(config, "workerinput")
    if is_worker or not gpus():
        make.CORES = 1  # Other cores run other workers. This setting also merges all files of a runtime into one translation unit.
    if not gpus():
        nvrtc.OPTIONS += quick_options()
        # On one core, the kernel files of the runtime compile faster as a whole than in parts.
        pytest.MonkeyPatch().setattr("hostweave.build.make.units_of_runtime", lambda name, text: [Unit(name, 1, "", text)])
        for library in ("OMP", "OPENBLAS"):  # Threads of torch and NumPy would spin on the cores of other workers.
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    if not is_worker:
        folder = kept_folder()
        os.environ["HOSTWEAVE_CACHE"] = str(folder / "cache")
        os.environ.setdefault("HOSTWEAVE_CACHE_LIMIT", "3 GB")
        os.environ.setdefault(OBJECTS, str(folder / "objects"))
        Path(os.environ[OBJECTS]).mkdir(exist_ok=True)
        optimising, quick = (with_precompiled_headers(folder, *named) for named in COMPILERS.items())
        os.environ[OPTIMISING], os.environ["CXX"] = str(optimising), str(optimising if gpus() else quick)
        if gpus():
            building = Thread(target=build_runtime)
            building.start()
            config.add_cleanup(building.join)
    if not gpus():
        pytest.MonkeyPatch().setattr("hostweave.targets.cpu.Toolchain", with_kernels)


def kept_folder() -> Path:
    """Folder of compiled programs, which later sessions reuse. Removes folders for other versions of the runtime or the compilers. Keeps
    folders of sessions that began in the last hour, because these sessions may still run."""
    checkout = key_of(str(Path(__file__).parent), sys.prefix)
    stamps = *(toolchain.stamp for toolchain in toolchains().values()), *map(stamp_of, (BUILDER, RUNTIME))
    version = key_of(*stamps, *nvrtc.OPTIONS, Path(__file__).with_name("compiler.py").read_text())
    folders = root().with_name("hostweave-tests")
    kept = folders / f"{checkout}-{version}"
    for folder in (folders, kept):
        folder.mkdir(0o700, parents=True, exist_ok=True)
    kept.touch()
    for folder in folders.glob(f"{checkout}-*"):
        if folder.stat().st_mtime < time.time() - 3600:
            shutil.rmtree(folder, ignore_errors=True)
    return kept


def build_runtime() -> None:
    """Builds the CUDA runtime with all cores while workers collect tests. Otherwise, one worker would build the runtime, and all other
    workers would wait."""
    with suppress(BuildError):  # A test that needs the runtime raises the error again.
        target = find_target("cuda")
        for library in target.runtime_libraries(target.toolchain(), frozenset()):
            library.make()


def with_kernels(target: str, compiler: Path, *given: tuple[Path, ...]) -> Toolchain:
    """Toolchain in which the quick compiler compiles kernels with the rest of a program. A second start of the compiler would take
    longer."""
    is_quick = compiler == Path(os.environ[OPTIMISING]).with_name("c++")
    return Toolchain(target, compiler, *given, together=(*ONLY_ENQUEUE, *((KERNELS,) if is_quick else ())))


@pytest.fixture
def optimised_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles kernels with the default flags, for tests of the results of kernels."""
    monkeypatch.setenv("CXX", os.environ[OPTIMISING])


@pytest.fixture
def kernels_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes NVRTC compile all kernels of a program as one unit. For a program with many kernels, a single unit halves the time."""
    monkeypatch.setattr("hostweave.build.make.units_of", lambda text: [Unit("kernels", 1, "", text)])


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Number of workers. With GPUs, three quarters of the number of cores. Without GPUs, the number of cores plus 1, but at most WORKERS.
    The additional worker runs while tests wait for processes, time-outs and locks. Sessions of only folders in WAITING have 3 additional
    workers."""
    cores = len(os.sched_getaffinity(0))
    additional = 3 if {Path(given.partition("::")[0]).name for given in config.args} <= WAITING else 1
    return max(1, cores * 3 // 4) if gpus() else min(cores + additional, WORKERS)


class Scheduling(LoadGroupScheduling):
    """Forgets finished groups of tests. After each test, xdist counts all groups of a worker, so the time would be quadratic in the number
    of tests."""

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        groups = self.assigned_work[node]
        self.assigned_work[node] = {name: group for name, group in groups.items() if not all(group.values())}


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    return Scheduling(config, log) if config.option.dist == "loadgroup" else None


def pytest_collection_finish() -> None:
    """Freezes all existing objects. Garbage collections that visit these objects would take longer than most tests."""
    gc.freeze()
    gc.set_threshold(400_000)  # Tests create few reference cycles.
    gc.enable()


@cache
def why_missing(extra: str) -> str | None:
    """Reason to skip a test that needs an extra, or None if the extra is installed."""
    if extra == "cuda":
        return None if compiles() else "needs CUDA's headers and libraries: pip install '.[cuda13]'"
    for program, remedy in {"mpirun": "pip install mpich", "chromium": "apt-get install chromium"}.items():
        if extra == program:
            return None if shutil.which(extra) else f"needs {extra}: {remedy}"
    return None if find_spec(extra) else f"needs {extra}: pip install {extra}"


@cache
def names_mark(mark: str, module: Path) -> bool:
    """True if the text of a test module mentions `mark`, or a function or variable that adds the mark."""
    return bool(re.search(MENTIONS[mark], module.read_text()))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores tests/gpu if there is no GPU. With `-m extra`, `-m more` and `-m "extra or more"`, also ignores modules without such tests,
    because each worker would trace the programs of these modules for seconds."""
    if collection_path.parts[-2:] == ("tests", "gpu") and not gpus():
        return True
    is_module = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    marks = config.option.markexpr.split(" or ")
    only_some = is_module and MENTIONS.keys() >= {*marks}
    return True if only_some and not any(names_mark(mark, collection_path) for mark in marks) else None


@cache
def imports_or_skips(module: Path) -> bool:
    """True if a test module calls importorskip outside of functions. Then all tests of the module need extras."""
    return bool(re.search(r"^(\w+ = )?pytest\.importorskip\(", module.read_text(), re.M))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fails a test that calls importorskip but is not marked `extra` or `gpu`. CI runs tests marked `extra` in an environment with the
    extras, and all other tests in an environment without extras. A lock separates GPU tests from tests that must run alone."""
    with pytest.MonkeyPatch.context() as patch, with_others() if item.get_closest_marker("gpu") else nullcontext():
        if not (item.get_closest_marker("extra") or item.get_closest_marker("gpu")):
            patch.setattr(pytest, "importorskip", lambda name, **_: pytest.fail(f'mark this test: @pytest.mark.extra("{name}")'))
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the longest tests first, groups the GPU tests of a file, and skips tests with a missing extra. Deselects GPU tests if there is
    no GPU, and slow tests and `more` tests by default. `-m gpu` also selects GPU tests that are marked `more`."""
    counts: Counter[Path] = Counter()
    items.sort(key=lambda item: next((at for at, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))
    for item in items:
        if imports_or_skips(item.path):
            item.add_marker("extra")
        for mark in MENTIONS:
            if item.get_closest_marker(mark) and not names_mark(mark, item.path):
                raise pytest.UsageError(f"{item.nodeid}: write pytest.mark.{mark} in {item.path.name}, where `-m {mark}` looks for it")
        for reason in {why_missing(name) for mark in item.iter_markers("extra") for name in mark.args} - {None}:
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group(f"gpu {item.path.name} {counts[item.path] // GPU_TESTS}"))
            counts[item.path] += 1
    unwanted = {mark for mark in ("slow", "more") if mark not in config.option.markexpr} | ({"gpu"} if not gpus() else set())
    if config.option.markexpr == "gpu":
        unwanted -= {"more"}
    is_out = [any(item.get_closest_marker(mark) for mark in unwanted) for item in items]
    if any(is_out):
        config.hook.pytest_deselected(items=[*compress(items, is_out)])
        items[:] = [item for item, out in zip(items, is_out, strict=True) if not out]
