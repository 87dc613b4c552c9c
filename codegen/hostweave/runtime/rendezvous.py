"""Rendezvous: the ranks of a group find each other, at the start and after a failure.

Each rank posts an entry with a random token. Rank 0 removes the entries, so that none is used twice, and answers each rank under a key with
the rank's token. The answer has the ranks, and the epoch, which is part of all later keys.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hostweave.base.errors import ExecutionError
from hostweave.runtime.stores import Store

_PAUSE = 0.02  # seconds between checks for a new entry
_REMOVED, _GAVE_UP = b"", b"gave up"  # values that replace an entry


@dataclass(frozen=True)
class JoinedRank:
    """Request of a rank to join."""

    token: str
    rank: int
    count: int  # number of ranks that this rank expects
    host: str  # host name, boot id and pid namespace


@dataclass(frozen=True)
class World:
    """The ranks of a group after the rendezvous."""

    prefix: str  # begins the group's keys; groups of the same name have different prefixes
    epoch: str
    entries: tuple[JoinedRank, ...]  # by rank

    @property
    def hosts(self) -> int:
        return len({entry.host for entry in self.entries})

    def local_rank(self, rank: int) -> int:
        """Index of a rank among the ranks on its host."""
        return sum(other.host == self.entries[rank].host for other in self.entries[:rank])


def meet(store: Store, group: str, rank: int, count: int, timeout: float) -> World:
    """Waits until rank 0 has met all ranks. Raises ExecutionError after `timeout` seconds, or if the ranks expect different numbers of
    ranks."""
    prefix = f"hostweave/{quote(group, safe='')}"
    entry = JoinedRank(uuid.uuid4().hex, rank, count, this_host())
    deadline = time.monotonic() + timeout
    store.set(f"{prefix}/entry/{rank}", json.dumps(asdict(entry)).encode())
    try:
        if rank == 0:
            _answer(store, prefix, [_await_entry(store, prefix, other, deadline) for other in range(count)])
        answer = json.loads(store.get(f"{prefix}/world/{entry.token}", max(0.0, deadline - time.monotonic())))
    except TimeoutError:
        missing = _missing(store, prefix, rank, count, timeout)
        raise ExecutionError(f"hw.init: group {group!r}, rank {rank} of {count}: {missing}") from None
    finally:
        if _peek(store, prefix, rank) == entry:
            store.set(f"{prefix}/entry/{rank}", _GAVE_UP)
    if "refused" in answer:
        raise ExecutionError(f"hw.init: group {group!r}: {answer['refused']}; start all ranks with the same world size")
    return World(f"{prefix}/{answer['epoch']}", answer["epoch"], tuple(JoinedRank(**one) for one in answer["entries"]))


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 2, 5", or "ranks 1 to 3"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def timed_out(timeout: float, ranks: Sequence[int]) -> str:
    return f"timed out after {timeout:g} s waiting for {ranks_text(ranks)}"


def _answer(store: Store, prefix: str, entries: list[JoinedRank]) -> None:
    answer: dict[str, Any] = {"epoch": entries[0].token, "entries": [asdict(entry) for entry in entries]}
    others = [entry for entry in entries if entry.count != entries[0].count]
    if others:
        answer = {"refused": f"rank {others[0].rank} is in a world of {others[0].count} ranks, rank 0 in one of {entries[0].count}"}
        more = range(len(entries), max(entry.count for entry in others))
        entries = entries + [entry for rank in more if isinstance(entry := _peek(store, prefix, rank), JoinedRank)]
    for entry in entries:
        store.set(f"{prefix}/entry/{entry.rank}", _REMOVED)
        store.set(f"{prefix}/world/{entry.token}", json.dumps(answer).encode())


def _await_entry(store: Store, prefix: str, rank: int, deadline: float) -> JoinedRank:
    while not isinstance(entry := _peek(store, prefix, rank), JoinedRank):
        store.get(f"{prefix}/entry/{rank}", max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            raise TimeoutError
        time.sleep(_PAUSE)
    return entry


def _peek(store: Store, prefix: str, rank: int) -> JoinedRank | bytes:
    """Entry of a rank, `_GAVE_UP`, or `_REMOVED` if there is no entry."""
    try:
        text = store.get(f"{prefix}/entry/{rank}", 0)
    except TimeoutError:
        return _REMOVED
    return text if text in (_REMOVED, _GAVE_UP) else JoinedRank(**json.loads(text))


def _missing(store: Store, prefix: str, rank: int, count: int, timeout: float) -> str:
    others = {other: _peek(store, prefix, other) for other in range(count) if other != rank}
    if absent := [other for other, found in others.items() if found == _REMOVED]:
        return timed_out(timeout, absent)
    if gave_up := [other for other, found in others.items() if found == _GAVE_UP]:
        return f"{timed_out(timeout, gave_up)}, which gave up"
    return f"{timed_out(timeout, [0])} to answer (is there another process of this rank?)"


def this_host() -> str:
    """Host name, boot id and pid namespace. Ranks with equal results can map each other's memory."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    texts = (boot.read_text().strip() if boot.exists() else "", os.readlink(namespace) if namespace.is_symlink() else "")
    return " ".join((socket.gethostname(), *texts))
