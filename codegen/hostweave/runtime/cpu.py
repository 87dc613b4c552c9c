"""Schedules of the CPU target: in parallel, or inside `seeded` one operation at a time in an order that a seed chooses."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hostweave.base.errors import ArgumentError

PICKERS = ("mixed", "uniform", "pct", "hosts")  # same order as hw_cpu_picker


@dataclass(frozen=True)
class CpuSchedule:
    """Schedule settings of hw_cpu_config."""

    seeded: bool = False
    seed: int = 0
    picker: int = 0
    ordered_launches: int = -1
    buffered_sends: int = -1
    check_dependencies: int = -1
    timeout_seconds: float = 120.0

    @property
    def is_special(self) -> bool:
        """True if settings differ from the default in a way that only ranks in one process support."""
        return self.seeded or self.buffered_sends == 1 or self.check_dependencies == 1


_schedule: ContextVar[CpuSchedule] = ContextVar("hostweave_schedule", default=CpuSchedule())  # noqa: B039  it is frozen


def schedule() -> CpuSchedule:
    """Schedule for calls from this context."""
    return _schedule.get()


def seeded(
    seed: int,
    picker: str = "mixed",
    *,
    ordered_launches: bool | None = None,
    buffered_sends: bool | None = None,
    check_dependencies: bool | None = None,
) -> AbstractContextManager[None]:
    """Runs programs of the CPU target one operation at a time, in an order that `seed` determines.

    `picker` chooses the next operation. `uniform` chooses at random. `pct` uses random priorities that change at a few random
    moments (probabilistic concurrency testing, Burckhardt et al., 2010). `hosts` prefers host threads to streams. `mixed` selects
    one of these by the seed, mostly pct.

    With `ordered_launches`, the operations of one communicator run in the order of their calls, across streams. With
    `buffered_sends`, a send may complete before its recv starts. If either is None, the seed decides. `check_dependencies`, on by
    default, reports conflicting accesses that are not ordered, even if this order hides the conflict. Raises ArgumentError for an
    unknown picker.

    Example: `with cpu.seeded(7): y = program.run(x, w)`.
    """
    if picker not in PICKERS:
        raise ArgumentError(f"seeded: no picker {picker!r}; the pickers are {', '.join(PICKERS)}")
    knobs = (-1 if knob is None else int(knob) for knob in (ordered_launches, buffered_sends, check_dependencies))
    return _using(CpuSchedule(True, seed, PICKERS.index(picker), *knobs))


def parallel(
    *, check_dependencies: bool = False, buffered_sends: bool = False, timeout_seconds: float = 120.0
) -> AbstractContextManager[None]:
    """Runs ready operations of the CPU target in parallel, which is the default. On both targets, `run` and similar calls raise with a
    report if no rank makes progress for `timeout_seconds`.
    """
    return _using(
        CpuSchedule(buffered_sends=int(buffered_sends), check_dependencies=int(check_dependencies), timeout_seconds=timeout_seconds)
    )


@contextmanager
def _using(wanted: CpuSchedule) -> Iterator[None]:
    token = _schedule.set(wanted)
    try:
        yield
    finally:
        _schedule.reset(token)
