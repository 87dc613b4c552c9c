"""Schedules of the CPU target: in parallel, or, inside `seeded`, one operation at a time in an order by a seed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hostweave.base.errors import ArgumentError

PICKERS = ("mixed", "uniform", "pct", "hosts")  # in the order of hw_cpu_picker


@dataclass(frozen=True)
class Schedule:
    """What hw_cpu_config has to say about schedules."""

    seeded: bool = False
    seed: int = 0
    picker: int = 0
    ordered_launches: int = -1
    buffered_sends: int = -1
    check_dependencies: int = -1
    timeout_seconds: float = 120.0

    @property
    def is_special(self) -> bool:
        """Whether anything but the usual is asked for, which the ranks of one process can do."""
        return self.seeded or self.buffered_sends == 1 or self.check_dependencies == 1


_schedule: ContextVar[Schedule] = ContextVar("hostweave_schedule", default=Schedule())  # noqa: B039  it is frozen


def schedule() -> Schedule:
    """The schedule of the calls made here."""
    return _schedule.get()


def seeded(
    seed: int,
    picker: str = "mixed",
    *,
    ordered_launches: bool | None = None,
    buffered_sends: bool | None = None,
    check_dependencies: bool | None = None,
) -> AbstractContextManager[None]:
    """Inside, programs of the CPU target run one operation at a time, in an order chosen by `seed`: the same seed, the same order.

    `picker` says how the next operation is chosen: `uniform`, at random; `pct`, by random priorities that change at a few random moments
    (probabilistic concurrency testing, Burckhardt et al., 2010); `hosts`, host threads before streams; `mixed`, one of these by the
    seed, mostly pct. `ordered_launches` says whether the operations of one communicator run in the order of their calls, across
    streams; `buffered_sends` whether a send completes before its recv starts; the seed decides what is None.
    `check_dependencies`, on by default, reports conflicting accesses that nothing orders, also if this order hides them.
    Raises ArgumentError for another picker.

    Example: `with cpu.seeded(7): y = program.run(x, w)`.
    """
    if picker not in PICKERS:
        raise ArgumentError(f"seeded: no picker {picker!r}; the pickers are {', '.join(PICKERS)}")
    knobs = (-1 if knob is None else int(knob) for knob in (ordered_launches, buffered_sends, check_dependencies))
    return _using(Schedule(True, seed, PICKERS.index(picker), *knobs))


def parallel(
    *, check_dependencies: bool = False, buffered_sends: bool = False, timeout_seconds: float = 120.0
) -> AbstractContextManager[None]:
    """Inside, programs of the CPU target run at once what is ready, as by default.

    On both targets `run` and its like give up, with a report, where the ranks stand still for `timeout_seconds`.
    """
    return _using(Schedule(buffered_sends=int(buffered_sends), check_dependencies=int(check_dependencies), timeout_seconds=timeout_seconds))


@contextmanager
def _using(wanted: Schedule) -> Iterator[None]:
    token = _schedule.set(wanted)
    try:
        yield
    finally:
        _schedule.reset(token)
