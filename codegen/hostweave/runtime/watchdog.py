"""The watchdog of a group: a thread that notices what a rank cannot that waits inside the runtime, or only enqueues.

When a call exceeds its time limit, or another rank reports a failure, has left, or passes other sizes, it writes the progress of every
rank into one report and aborts the channels, which ends whatever waits for them.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from hostweave.base.errors import ExecutionError
from hostweave.runtime.stores import StoreClosed

if TYPE_CHECKING:
    from hostweave.runtime.group import Group

_PERIOD = 0.5  # seconds between looks
_ANSWER = 5.0  # seconds for the other ranks to say how far they came


def watch(group: Group) -> None:
    """Begins to watch, until the group is closed, fails or is gone."""
    threading.Thread(target=_watch, args=(weakref.ref(group),), name=f"hostweave watchdog of {group.name}", daemon=True).start()


def _watch(watched: weakref.ref[Group]) -> None:
    looking = True  # for failures of others; not after the store was closed
    while (group := watched()) and not group.failure:
        reason = None
        try:
            reason = (group.meeting.failure() or group.deserted() or group.diverged()) if looking else None
        except StoreClosed:
            looking = False
        except ExecutionError as error:
            reason = str(error)
        if reason := reason or group.overdue():
            report = _report(group, reason)
            sys.stderr.write(f"hostweave: {report}\n")  # at once: print writes the end of the line by itself, and ranks share a terminal
            sys.stderr.flush()
            group.give_up(report)
            return
        del group
        time.sleep(_PERIOD)


def _report(group: Group, reason: str) -> str:
    """What is known of every rank."""
    lines = [f"group {group.name!r}: {reason}"]
    try:
        group.meeting.note(group.progress())
        group.meeting.fail(reason)
        deadline = time.monotonic() + _ANSWER
        while None in (notes := group.meeting.notes()) and time.monotonic() < deadline:
            time.sleep(_PERIOD / 2)
        lines += [f"  rank {rank}: {note or 'does not answer'}" for rank, note in enumerate(notes)]
    except ExecutionError as error:
        lines.append(f"  {error}")
    return "\n".join(lines)
