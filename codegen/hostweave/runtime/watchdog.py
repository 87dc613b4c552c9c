"""Watchdog of a group: threads that detect failures which a rank cannot detect while it waits in native code, or while it only enqueues.

The failures are: a call exceeds its timeout, or another rank reports a failure, leaves, or passes other sizes. The watchdog thread then
reports the position of every rank and aborts the channels, which ends all waits. A separate listener thread asks the store for news of
other ranks, because the store may not answer.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress

from hostweave.base.errors import ExecutionError
from hostweave.runtime.failures import FallibleGroup
from hostweave.runtime.lifetime import Exiting, calls
from hostweave.runtime.meeting import Meeting
from hostweave.runtime.standstill import say
from hostweave.runtime.stores import StoreClosed

_PERIOD, _LISTENS = 0.25, 0.5  # seconds between checks of this rank, and between checks of the others


class Watch:
    """The two threads, and the failure that the listener has found."""

    def __init__(self, group: FallibleGroup):
        """Starts the threads. They run until the group is closed, fails or is freed."""
        self.reason = ""  # reason why the group has failed, from another rank
        self.silence = ""  # error of a store that does not answer
        self.news = threading.Event()
        self._waits_at_store = group.meeting.waits_at_store
        watchdog, self._listener = (
            threading.Thread(target=work, args=(weakref.ref(group), self), name=f"hostweave {name} of {group.name}", daemon=True)
            for work, name in ((_watch, "watchdog"), (_listen, "listener"))
        )
        watchdog.start()
        self._listener.start()

    def end(self) -> None:
        """Ends the threads when the group is closed. If a thread were still in C++ code of the store when Python exits, the process would
        abort."""
        self.news.set()
        if not self._waits_at_store and self._listener is not threading.current_thread():
            self._listener.join(_LISTENS)


# A thread may be the one that frees the group, and thereby device memory. `with calls` keeps the interpreter from exiting meanwhile.


def _listen(watched: weakref.ref[FallibleGroup], heard: Watch) -> None:
    while True:
        try:
            with calls:
                seen = _hear(watched)
            if seen is None:
                return
            meeting, reason = seen
            heard.reason = reason or meeting.failure(_LISTENS if meeting.waits_at_store else 0) or ""
            if not heard.reason and not meeting.waits_at_store:
                heard.news.wait(_LISTENS)
        except (StoreClosed, Exiting):
            return
        except ExecutionError as error:
            heard.silence = str(error)
        if heard.reason or heard.silence:
            return heard.news.set()


def _hear(watched: weakref.ref[FallibleGroup]) -> tuple[Meeting, str | None] | None:
    """Returns the meeting of the group, and the reason why a rank cannot continue, if any. None if there is nothing to watch any more."""
    group = watched()
    return None if not group or group.failure else (group.meeting, group.deserted() or group.diverged())


def _watch(watched: weakref.ref[FallibleGroup], heard: Watch) -> None:
    with suppress(Exiting):
        while True:
            with calls:
                if _is_done(watched, heard):
                    return
            heard.news.wait(_PERIOD)


def _is_done(watched: weakref.ref[FallibleGroup], heard: Watch) -> bool:
    """Fails the group if something is wrong. Returns True if there is nothing to watch any more."""
    group = watched()
    if not group or group.failure:
        return True
    if reason := heard.reason or group.overdue() or heard.silence:  # an overdue call says more than a silent store
        say(report := group.report(reason))
        group.give_up(report)
    return bool(reason)
