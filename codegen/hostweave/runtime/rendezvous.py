"""How the ranks of a group find each other when it is made, for the first time or after a failure.

Each rank leaves a hello with a fresh token. Rank 0 takes the hellos away, so that none is used twice, and answers each by
its token: who is there, and the epoch, which is part of every key that the group uses from then on.
"""

from __future__ import annotations

import json
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

_PAUSE = 0.02  # seconds between looks at a hello that is not new
_TAKEN, _GAVE_UP = b"", b"gave up"  # in place of a hello


@dataclass(frozen=True)
class Hello:
    """One rank, as it comes."""

    token: str
    rank: int
    count: int  # how many ranks it expects
    host: str


@dataclass(frozen=True)
class World:
    """The ranks of a group that has been made."""

    prefix: str  # of its keys: no other group, and no earlier one of the same name, has it
    epoch: str
    hellos: tuple[Hello, ...]  # by rank

    @property
    def hosts(self) -> int:
        """On how many hosts the ranks are."""
        return len({hello.host for hello in self.hellos})

    def local_rank(self, rank: int) -> int:
        """The place of a rank among those of its host."""
        return sum(other.host == self.hellos[rank].host for other in self.hellos[:rank])


def meet(store: Store, group: str, rank: int, count: int, timeout: float) -> World:
    """Waits for all ranks of the group. Raises ExecutionError, on all of them, where some do not come or expect another world."""
    prefix = f"hostweave/{quote(group, safe='')}"
    hello = Hello(uuid.uuid4().hex, rank, count, this_host())
    deadline = time.monotonic() + timeout
    store.set(f"{prefix}/hello/{rank}", json.dumps(asdict(hello)).encode())
    try:
        if rank == 0:
            _answer(store, prefix, [_await_hello(store, prefix, other, deadline) for other in range(count)])
        answer = json.loads(store.get(f"{prefix}/world/{hello.token}", max(0.0, deadline - time.monotonic())))
    except TimeoutError:
        missing = _missing(store, prefix, rank, count, timeout)
        raise ExecutionError(f"hw.init: group {group!r}, rank {rank} of {count}: {missing}") from None
    finally:
        if _look(store, prefix, rank) == hello:
            store.set(f"{prefix}/hello/{rank}", _GAVE_UP)
    if "refused" in answer:
        raise ExecutionError(f"hw.init: group {group!r}: {answer['refused']}; start all with one size of world")
    return World(f"{prefix}/{answer['epoch']}", answer["epoch"], tuple(Hello(**one) for one in answer["hellos"]))


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 2, 5", or "ranks 1 to 3"."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def timed_out(timeout: float, ranks: Sequence[int]) -> str:
    return f"timed out after {timeout:g} s waiting for {ranks_text(ranks)}"


def _answer(store: Store, prefix: str, hellos: list[Hello]) -> None:
    """What rank 0 does when all have come."""
    answer: dict[str, Any] = {"epoch": hellos[0].token, "hellos": [asdict(hello) for hello in hellos]}
    others = [hello for hello in hellos if hello.count != hellos[0].count]
    if others:
        answer = {"refused": f"rank {others[0].rank} is in a world of {others[0].count} ranks, rank 0 in one of {hellos[0].count}"}
        more = range(len(hellos), max(hello.count for hello in others))
        hellos = hellos + [hello for rank in more if isinstance(hello := _look(store, prefix, rank), Hello)]
    for hello in hellos:
        store.set(f"{prefix}/hello/{hello.rank}", _TAKEN)
        store.set(f"{prefix}/world/{hello.token}", json.dumps(answer).encode())


def _await_hello(store: Store, prefix: str, rank: int, deadline: float) -> Hello:
    while not isinstance(hello := _look(store, prefix, rank), Hello):
        store.get(f"{prefix}/hello/{rank}", max(0.0, deadline - time.monotonic()))
        if time.monotonic() >= deadline:
            raise TimeoutError
        time.sleep(_PAUSE)
    return hello


def _look(store: Store, prefix: str, rank: int) -> Hello | bytes:
    """The hello of a rank, or what is there in its place: nothing, where it has not come or its hello was taken, or _GAVE_UP."""
    try:
        text = store.get(f"{prefix}/hello/{rank}", 0)
    except TimeoutError:
        return _TAKEN
    return text if text in (_TAKEN, _GAVE_UP) else Hello(**json.loads(text))


def _missing(store: Store, prefix: str, rank: int, count: int, timeout: float) -> str:
    others = {other: _look(store, prefix, other) for other in range(count) if other != rank}
    if absent := [other for other, found in others.items() if found == _TAKEN]:
        return timed_out(timeout, absent)
    if gone := [other for other, found in others.items() if found == _GAVE_UP]:
        return f"{ranks_text(gone)} gave up within {timeout:g} s"
    return f"{timed_out(timeout, [0])} to answer (is there another process of this rank?)"


def this_host() -> str:
    """Of this machine since it was started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
