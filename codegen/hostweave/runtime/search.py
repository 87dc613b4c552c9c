"""The search of `Options(overlap="search")`: runs the program with the best alternatives of each choice, and keeps the fastest.

Results are stored in the cache folder, by program, options and machine. Later compiles read the results.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.build.cache import key_of, root, write_atomically
from hostweave.fusion_ir.choice import IN_SEQUENCE, Alternative, Choice
from hostweave.host_ir.ir import HostProgram
from hostweave.runtime.group import current
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import TensorType

RANKED = 3  # best predicted alternatives to run per choice; the sequential program always runs
ROUNDS, WARMUPS, REPETITIONS = 2, 2, 5  # warm-up calls and timed calls are per round and alternative


class Searched(Protocol):
    """The part of `Program` that the search uses."""

    def measure(self, *arrays: Any, warmups: int, repetitions: int, **named: Any) -> list[list[Any]]: ...
    def close(self) -> None: ...


Make = Callable[[Mapping[str, str]], Searched]


def search(host: HostProgram, sizes: Mapping[str, int], key: Sequence[str], make: Make) -> tuple[Choice, ...]:
    """Choices of a program with measured times, fastest alternative first. Alternatives that did not run are omitted. `make` compiles the
    program with given alternatives. `key` identifies the options and the machine."""
    here = f'{host.name}: overlap="search"'
    if missing := [name for name in host.given_sizes() if name not in sizes]:
        raise ProgramError(f"{here} runs the program, but sizes are missing: {', '.join(missing)}; pass them as Options(sizes={{...}})")
    if not host.choices:
        return ()
    file = root() / "choices" / f"{host.name[:50]}-{key_of(host.code, *key)}.json"
    if (found := _read(file)) is not None:
        return found
    if (group := current()) and not group.in_process:
        why = f"runs all ranks in one process, and this one is rank {group.rank} of {group.count}"
        raise ProgramError(f'{here} {why}; compile it once in a single process, which caches the result, or use overlap="auto"')
    arrays = {p.name: random_array(p.type, sizes) for p in host.arguments}
    chosen: dict[str, str] = {choice.name: choice.chosen.name for choice in host.choices}
    measured = []
    for choice in host.choices:
        alternatives = _run(choice, chosen, make, arrays)
        chosen[choice.name] = alternatives[0].name
        measured.append(replace(choice, alternatives=alternatives, is_measured=True))
    rows = [{"value": c.value, "function": c.function, "alternatives": list(map(astuple, c.alternatives))} for c in measured]
    write_atomically(file, json.dumps(rows, indent=1) + "\n")
    return tuple(measured)


def _run(choice: Choice, chosen: Mapping[str, str], make: Make, arrays: Mapping[str, Any]) -> tuple[Alternative, ...]:
    """Runs the best alternatives of a choice. Returns these alternatives with the program's time in microseconds, fastest first."""
    by_time = sorted(choice.alternatives, key=lambda one: one.micros)
    wanted = [one for i, one in enumerate(by_time) if i < RANKED or one.algorithm == IN_SEQUENCE]
    programs = [make({**chosen, choice.name: one.name}) for one in wanted]
    times: list[list[float]] = [[] for _ in wanted]
    try:
        for _ in range(ROUNDS):
            for program, found in zip(programs, times, strict=True):
                per_rank = program.measure(warmups=WARMUPS, repetitions=REPETITIONS, **arrays)
                found.extend(max(time.total_ms for time in call) * 1e3 for call in zip(*per_rank, strict=True))
    finally:
        for program in programs:
            program.close()
    done = (replace(one, micros=round(statistics.median(found), 1)) for one, found in zip(wanted, times, strict=True))
    return tuple(sorted(done, key=lambda one: one.micros))


def random_array(type: TensorType, sizes: Mapping[str, int]) -> np.ndarray:
    """Global array for measurements. Floats are random, because matmuls of zeros are faster. Elements of other dtypes are 0,
    because they may be indices."""
    shape = tuple(size.bind(sizes) for size in type.shape)
    if type.dtype.kind != "float":
        return np.zeros(shape, numpy_dtype(type.dtype))
    few = np.random.default_rng(0).standard_normal(2**16 + 1, np.float32).astype(numpy_dtype(type.dtype))
    return np.resize(few, shape)


def _read(file: Path) -> tuple[Choice, ...] | None:
    try:
        rows = json.loads(file.read_text())
        return tuple(Choice(row["value"], row["function"], tuple(Alternative(*one) for one in row["alternatives"]), True) for row in rows)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise ArgumentError(f"{file}: contains no choices ({error}); remove it to search again") from None
