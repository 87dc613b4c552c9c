"""`hostweave demo`: compiles an example, runs it on all ranks, compares the result with NumPy and shows the generated code."""

import statistics
import textwrap
import time
from collections import Counter
from typing import Any

import numpy as np

import hostweave as hw
from hostweave.base.errors import HostweaveError
from hostweave.base.paths import EXAMPLES
from hostweave.cli.highlight import has_colours, show
from hostweave.cli.programs import load_file, programs_in
from hostweave.cli.tolerance import tolerance_of
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.targets.target import NAMES, find_target
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import block_of

MEASURED_SECONDS = 2.0
MAX_REPETITIONS = 20


def demo(name: str, ranks: int, target: str | None) -> int:
    """Runs a program of examples/seeds.py, and prints its fusion and C++. Returns 0 if the results match NumPy."""
    seeds = programs_in(load_file(EXAMPLES / "seeds.py", {"D": ranks}))
    if name not in seeds:
        raise HostweaveError(f"demo: there is no program {name!r}; use one of {', '.join(seeds)}")
    fusion = seeds[name]
    assert isinstance(fusion, Fusion)
    usable = [found for found in map(find_target, NAMES) if not found.why_not_here(ranks)]
    if target and (why := find_target(target).why_not_here(ranks)):
        raise HostweaveError(f"demo: {why}")
    chosen_target = find_target(target) if target else max(usable, key=lambda found: found.demo_size)
    program = hw.compile(fusion, target=chosen_target.name)
    print(f"{name} on {ranks} rank{'s' * (ranks != 1)}, target {chosen_target.name}")
    started = time.perf_counter()
    print("compiling ...", end=" ", flush=True)
    program.build()
    print(f"{time.perf_counter() - started:.1f} s")
    largest_error = _compare(program, fusion, chosen_target.demo_size)
    if chosen_target.is_simulated:
        print("  (ranks are simulated on this machine's cores: the time says nothing about GPUs)")
    print_title("what you write: math on global tensors, and its sharding")
    show(program.fusion_ir, "ir")
    print_title("what you get: what each rank runs, from the generated program.cpp")
    show(enqueued(program.source), "cpp")
    print(f"\nall generated files: {program.folder}")
    print(f"every stage: hostweave inspect seeds:{name} --after all")
    return 0 if largest_error <= 1 else 1


def enqueued(source: str) -> str:
    """The lines of the C++ function `enqueue` that enqueue work, without indentation."""
    body = source.partition("void Program::enqueue(")[2].partition("\n}\n")[0]
    lines = body.partition("arena_.begin_call(caller));\n")[2].rpartition("  HW_CHECK(arena_.end_call(")[0]
    return textwrap.dedent(lines)


def _compare(program: Any, fusion: Fusion, size: int) -> float:
    """Runs the program, and prints errors and times. Returns the largest error as a fraction of the tolerance."""
    names = {name for value in fusion.inputs for dim_size in value.type.shape for name in dim_size.symbols}
    sizes = dict.fromkeys(names, size * fusion.mesh.size)
    random = np.random.default_rng(0)
    arrays = {
        value.name: random.standard_normal([dim_size.bind(sizes) for dim_size in value.type.shape]).astype(numpy_dtype(value.type.dtype))
        for value in fusion.inputs
    }
    expected = run_reference(fusion, arrays)
    largest_error = 0.0
    started = time.perf_counter()
    results_of_ranks = program.run(**arrays, ranks=True)
    repetitions = repetitions_in(MEASURED_SECONDS, time.perf_counter() - started)
    matching: Counter[str] = Counter()
    for rank, results in enumerate(results_of_ranks):
        outputs = results if isinstance(results, tuple) else (results,)
        for name, actual, expected_value in zip(fusion.outputs, outputs, expected, strict=True):
            value, allowed = fusion.values()[name], tolerance_of(fusion, name, sizes)
            block = expected_value[block_of(value.type, fusion.mesh, rank, expected_value.shape)]
            errors = np.abs(actual.astype(np.float64) - block) / (allowed.atol + allowed.rtol * np.abs(block))
            error = float(np.max(errors, initial=0.0))  # NaN if the result has a NaN
            largest_error = max(largest_error, error) if error == error else float("inf")
            if error <= 1:
                matching[f"{name} {list(actual.shape)}"] += 1
            else:
                print(f"rank {rank}: {name} {list(actual.shape)} DIFFERS from NumPy (error {error:.2f} of the tolerance)")
    for what, count in matching.items():
        print(f"{what} matches NumPy on {count} rank{'s' * (count > 1)} (largest error {largest_error:.2f} of the tolerance)")
    times = program.measure(**arrays, warmups=1, repetitions=repetitions)
    enqueue = max(statistics.median(t.enqueue_us for t in rank) for rank in times)
    total = max(statistics.median(t.total_ms for t in rank) for rank in times)
    print(f"a call: {total:.3f} ms, {enqueue:.1f} us of host time (slowest rank, median of {len(times[0])})")
    return largest_error


def repetitions_in(seconds: float, seconds_of_a_call: float) -> int:
    """Number of calls that take about `seconds`, from 1 to MAX_REPETITIONS."""
    return max(1, min(MAX_REPETITIONS, int(seconds / seconds_of_a_call)))


def print_title(text: str) -> None:
    bold, plain = ("\033[1m", "\033[0m") if has_colours() else ("", "")
    print(f"\n{bold}{text}{plain}\n")
