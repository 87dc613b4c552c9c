"""`Options(tune=True)`: the fastest algorithm of a matmul is measured, cached, and used on all ranks.

On the CPU device of these tests, all algorithms give the same results.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.base.paths import NATIVE
from hostweave.build.cache import get_or_make, lookup, name_of
from hostweave.runtime.algorithms import MeasuredAlgorithms
from hostweave.runtime.local import LocalProgram

pytestmark = pytest.mark.xdist_group("tuned")  # One worker runs these tests, because several tests use the same cache entry.

DEVICE = ctypes.CDLL(str(NATIVE / "libhostweave_cpu.so"))
DEVICE.hw_cpu_runs_of_algorithm.restype = ctypes.c_uint64
RANDOM = np.random.default_rng(0)
ENTRY = name_of("algorithms", "cpu", "0")


def runs() -> list[int]:
    """Number of runs of each algorithm since the last call of this function, or since the beginning of the test."""
    counts = [DEVICE.hw_cpu_runs_of_algorithm(i) for i in range(3)]
    DEVICE.hw_cpu_set_algorithms(3)
    return counts


@pytest.fixture(autouse=True)
def several_algorithms() -> Iterator[None]:
    """Gives the CPU device several algorithms. The last algorithm is the fastest. Removes the measurements of earlier sessions."""
    get_or_make(ENTRY, lambda made: (made / "algorithms.json").write_text("{}"), replaces=True)
    DEVICE.hw_cpu_set_algorithms(3)
    yield
    DEVICE.hw_cpu_set_algorithms(1)


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M", "K"], up=hw.f32["K", "N@x"], bias=hw.f32["N@x"], down=hw.f32["N@x", "K"])
def mlp(x: hw.Tensor, up: hw.Tensor, bias: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
    return hw.reshard(hw.matmul(hw.maximum(hw.matmul(x, up) + bias, 0), down), "M", "K")


def arrays(rows: int) -> dict[str, np.ndarray]:
    shapes = {"x": (rows, 48), "up": (48, 32), "bias": (32,), "down": (32, 48)}
    return {name: RANDOM.integers(-2, 3, shape).astype(np.float32) for name, shape in shapes.items()}


def wanted(x: np.ndarray, up: np.ndarray, bias: np.ndarray, down: np.ndarray) -> np.ndarray:
    return np.maximum(x @ up + bias, 0) @ down


def blocks(given: dict[str, np.ndarray], rank: int) -> list[np.ndarray]:
    axes = {"up": 1, "bias": 0, "down": 0}
    return [np.ascontiguousarray(np.split(a, 2, axes[n])[rank]) if n in axes else a for n, a in given.items()]


def known(program: hw.Program) -> dict[str, int]:
    """Index of the fastest algorithm for each problem that this process has measured or loaded."""
    return {problem: algorithm[0] for problem, algorithm in program.module.measured_algorithms().items()}


def test_the_fastest_algorithm_is_measured_cached_and_used() -> None:
    program, threads, given = hw.compile(mlp, options=hw.Options(tune=True)), hw.Threads(2), arrays(20)
    met = threading.Barrier(2)

    def on_rank(rank: int) -> list[list[int]]:
        hw.init(threads)
        mine, counts = blocks(given, rank), []
        for _ in range(2):
            np.testing.assert_array_equal(program(*mine), wanted(**given))
            met.wait()
            counts += [runs()] if rank == 0 else []
            met.wait()
        return counts

    before = set(known(program))
    first, second = threads.run(on_rank)[0]
    new = {problem: number for problem, number in known(program).items() if problem not in before}
    assert set(new.values()) == {2}
    assert len(new) == 2  # There are two matmuls, and one rank measures each.
    assert min(first[:2]) >= 2 * 8
    assert first[2] == first[0] + 4
    assert second == [0, 0, 4]

    folder = lookup(ENTRY)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    saved = json.loads((folder / "algorithms.json").read_text())
    assert {problem: bytes.fromhex(saved[problem])[0] for problem in new} == new

    saved.update(dict.fromkeys(new, "01" + "00" * 63))  # This simulates measurements of another process.
    get_or_make(ENTRY, lambda made: (made / "algorithms.json").write_text(json.dumps(saved)), replaces=True)
    again = hw.compile(mlp, options=hw.Options(tune=True, streams=3))
    runs()
    np.testing.assert_array_equal(again.run(**given), wanted(**given))
    assert runs() == [0, 4, 0]
    (lookup(ENTRY) / "algorithms.json").write_text("{}")  # type: ignore[operator]
    assert lookup(ENTRY) is None  # A modified entry is not used.


def test_algorithms_are_measured_only_on_request() -> None:
    given = arrays(21)
    np.testing.assert_array_equal(hw.compile(mlp).run(**given), wanted(**given))
    assert runs()[1:] == [0, 0]
    DEVICE.hw_cpu_set_algorithms(1)  # The default is one algorithm.
    program = hw.compile(mlp, options=hw.Options(tune=True))
    before = known(program)
    np.testing.assert_array_equal(program.run(**given), wanted(**given))
    assert known(program) == before


class Module:
    """Substitute for the module of a program, with the functions that MeasuredAlgorithms calls."""

    def __init__(self, **algorithms: int) -> None:
        self.algorithms = {problem: bytes([number]) * 64 for problem, number in algorithms.items()}

    def blas_version(self) -> int:
        return 7

    def measured_algorithms(self) -> dict[str, bytes]:
        return dict(self.algorithms)

    def set_measured_algorithms(self, algorithms: dict[str, bytes]) -> None:
        self.algorithms.update(algorithms)


def test_processes_use_the_algorithms_of_the_first_rank_that_has_them() -> None:
    modules = [Module(a=1), Module(a=2, b=2), Module(b=3, c=3)]
    measured = [MeasuredAlgorithms(module, "a GPU of no machine") for module in modules]  # type: ignore[arg-type]
    records: list[str] = []
    for one in measured:
        one.agree(lambda record: records.append(record) or [record])  # type: ignore[func-returns-value]
    for one in measured:
        one.agree(lambda _: records)
    assert [module.algorithms for module in modules] == [{name: bytes([n]) * 64 for name, n in zip("abc", (1, 2, 3), strict=True)}] * 3


def test_threads_save_measurements_at_the_same_time() -> None:
    module = Module()

    def on_rank(rank: int) -> None:
        for number in range(10):
            measured = MeasuredAlgorithms(module, "a GPU of threads")  # type: ignore[arg-type]
            module.algorithms[f"{rank} {number}"] = bytes([number]) * 64
            measured.save()

    hw.Threads(4).run(on_rank)
    again = Module()
    MeasuredAlgorithms(again, "a GPU of threads")  # type: ignore[arg-type]
    assert again.algorithms == module.algorithms
    assert len(module.algorithms) == 40


def test_ranks_that_cannot_agree() -> None:
    class Group:
        name, count, in_process, can_coordinate = "g", 2, False, False

        def expect_working(self) -> None:
            pass

    program = hw.compile(mlp, options=hw.Options(tune=True))
    message = r"^mlp: tune: the ranks of group 'g' have no store for messages; use a provider with a store, or omit the option$"
    with pytest.raises(ArgumentError, match=message):
        LocalProgram(program.host, program.target, lambda: program.module, program.compiled.options, Group(), 0)  # type: ignore[arg-type]
