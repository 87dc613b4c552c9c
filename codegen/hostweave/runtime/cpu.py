"""Schedules of the CPU target: in parallel, or one operation at a time in an order that a seed determines (`seeded`)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hostweave.base.errors import ArgumentError
from hostweave.base.signatures import checked

PICKERS = ("mixed", "uniform", "pct", "hosts")  # in the order of the enum hw_cpu_picker


@dataclass(frozen=True)
class CpuSchedule:
    """Settings of hw_cpu_config."""

    seeded: bool = False
    seed: int = 0
    picker: int = 0
    ordered_launches: int = -1
    buffered_sends: int = -1
    check_dependencies: int = -1
    timeout_seconds: float = 120.0

    @property
    def is_special(self) -> bool:
        """True if a setting needs all ranks in one process."""
        return self.seeded or self.buffered_sends == 1 or self.check_dependencies == 1


_schedule: ContextVar[CpuSchedule] = ContextVar("hostweave_schedule", default=CpuSchedule())  # noqa: B039  CpuSchedule is frozen


def schedule() -> CpuSchedule:
    """Schedule for calls that are made from the current context."""
    return _schedule.get()


@checked
def seeded(
    seed: int,
    picker: str = "mixed",
    *,
    ordered_launches: bool | None = None,
    buffered_sends: bool | None = None,
    check_dependencies: bool | None = None,
) -> AbstractContextManager[None]:
    """Runs programs of the CPU target one operation at a time, in an order that `seed` determines.

    `picker` is the strategy that chooses the next operation. `uniform` chooses at random. `pct` uses random priorities that may change at
    random times (probabilistic concurrency testing, Burckhardt et al., 2010). `hosts` prefers host threads to streams. With `mixed`, the
    seed selects the strategy, usually pct.

    With `ordered_launches`, operations of a communicator run in the order in which they were enqueued, even on different streams. With
    `buffered_sends`, a send may complete before its recv starts. If one of these two settings is None, the seed decides.
    `check_dependencies`, on by default, reports conflicting accesses that the program does not order, even if the accesses do not collide
    in this run. Raises ArgumentError for an invalid argument.

    Example: `with cpu.seeded(7): y = program.run(x, w)`.
    """
    if seed not in range(1 << 64):
        raise ArgumentError(f"seeded: seed={seed!r} is not an int from 0 to 2**64 - 1; pass such an int")
    if picker not in PICKERS:
        raise ArgumentError(f"seeded: there is no picker {picker!r}; the pickers are {', '.join(PICKERS)}")
    flags = (-1 if flag is None else int(flag) for flag in (ordered_launches, buffered_sends, check_dependencies))
    return _use_schedule(CpuSchedule(True, seed, PICKERS.index(picker), *flags))


@checked
def parallel(
    *, check_dependencies: bool = False, buffered_sends: bool = False, timeout_seconds: float = 120.0
) -> AbstractContextManager[None]:
    """Runs all ready operations of the CPU target in parallel. This schedule is the default.

    `check_dependencies` and `buffered_sends` are as in `seeded`, but off by default. If no rank makes progress for `timeout_seconds`, `run`
    and similar calls raise an error with a report. On the CUDA target, `timeout_seconds` limits the time per call instead. Raises
    ArgumentError if `timeout_seconds` is not a positive number.
    """
    if not isinstance(timeout_seconds, int | float) or not timeout_seconds > 0:
        raise ArgumentError(f"parallel: timeout_seconds={timeout_seconds!r} is not a positive number; pass a number of seconds such as 60")
    return _use_schedule(
        CpuSchedule(buffered_sends=int(buffered_sends), check_dependencies=int(check_dependencies), timeout_seconds=timeout_seconds)
    )


@contextmanager
def _use_schedule(new_schedule: CpuSchedule) -> Iterator[None]:
    token = _schedule.set(new_schedule)
    try:
        yield
    finally:
        _schedule.reset(token)
