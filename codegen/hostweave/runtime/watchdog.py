"""Watchdog of a group: detects failures while the rank waits in native code or only enqueues.

A failure is a call that exceeds its timeout, or a store that does not answer. Another rank that reports a failure, leaves early, or makes a
different call is a failure too. The watchdog then reports the position of every rank, and aborts the channels, which ends all waits. A
separate listener thread reads the reports of other ranks, because a store that does not answer would block the watchdog.
"""

import threading
import weakref
from contextlib import suppress

from hostweave.base.errors import ExecutionError
from hostweave.runtime.coordinator import Coordinator
from hostweave.runtime.failures import FallibleGroup
from hostweave.runtime.lifetime import Exiting, calls
from hostweave.runtime.standstill import print_report
from hostweave.runtime.stores import StoreClosed

_PERIOD, _LISTEN_SECONDS = 0.25, 0.5  # seconds between checks of this rank, and of the other ranks


class Watchdog:
    """Watchdog thread and listener thread of a group, and the failure that the listener has found."""

    def __init__(self, group: FallibleGroup):
        """The threads run until the group is closed, fails or is freed."""
        self.reason = ""  # failure that involves another rank
        self.store_error = ""  # error of a store that does not answer
        self.wake_up = threading.Event()
        self._waits_at_store = group.coordinator.blocks_on_failure
        watchdog, self._listener = (
            threading.Thread(target=work, args=(weakref.ref(group), self), name=f"hostweave {name} of {group.name}", daemon=True)
            for work, name in ((_watch, "watchdog"), (_listen, "listener"))
        )
        watchdog.start()
        self._listener.start()

    def end(self) -> None:
        """Tells the threads to end. Waits up to 0.5 seconds for a listener that polls a store, because a thread in C++ code of the store
        would abort the process when Python exits."""
        self.wake_up.set()
        if not self._waits_at_store and self._listener is not threading.current_thread():
            self._listener.join(_LISTEN_SECONDS)


# The threads may free the group and its device memory, but only inside `with calls`, where the interpreter does not exit.


def _listen(group_ref: weakref.ref[FallibleGroup], watchdog_state: Watchdog) -> None:
    while True:
        try:
            with calls:
                news = _check_peers(group_ref)
            if news is None:
                return
            coordinator, reason = news
            watchdog_state.reason = reason or coordinator.failure(_LISTEN_SECONDS if coordinator.blocks_on_failure else 0) or ""
            if not watchdog_state.reason and not coordinator.blocks_on_failure:
                watchdog_state.wake_up.wait(_LISTEN_SECONDS)
        except (StoreClosed, Exiting):
            return
        except ExecutionError as error:
            watchdog_state.store_error = str(error)
        if watchdog_state.reason or watchdog_state.store_error:
            return watchdog_state.wake_up.set()


def _check_peers(group_ref: weakref.ref[FallibleGroup]) -> tuple[Coordinator, str | None] | None:
    """The group's coordinator, and the reason, if any, why this rank cannot continue. None if the group is freed or unusable."""
    group = group_ref()
    return None if not group or group.failure else (group.coordinator, group.left_early() or group.diverged())


def _watch(group_ref: weakref.ref[FallibleGroup], watchdog_state: Watchdog) -> None:
    with suppress(Exiting):
        while True:
            with calls:
                if _is_done(group_ref, watchdog_state):
                    return
            watchdog_state.wake_up.wait(_PERIOD)


def _is_done(group_ref: weakref.ref[FallibleGroup], watchdog_state: Watchdog) -> bool:
    """Fails the group after a failure. Returns True if the group is freed or unusable."""
    group = group_ref()
    if not group or group.failure:
        return True
    if reason := watchdog_state.reason or group.overdue() or watchdog_state.store_error:  # the most detailed one first
        print_report(report := group.report(reason))
        group.abort(report)
    return bool(reason)
