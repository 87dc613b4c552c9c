"""Model of the protocol of packets and flags in hostweave/terms.h. Tests every order of events."""

from __future__ import annotations

from collections import deque


def lost(ranks: int, slots: int, exchanges: int, waits: bool = True, flags: bool = False) -> bool:
    """True if, in some order of events, a packet is overwritten while its receiver may still read it. A receiver has `slots` places per
    sender.

    The kernels of a rank run one after another. A kernel sends a packet to each peer, and receives a packet from each peer, in any order. A
    kernel ends when it has sent and received all packets. Before its end, the kernel may read received packets again. A packet contains the
    number of its exchange. Without `waits`, a kernel does not wait for packets of its peers. With `flags`, ranks send blocks without
    numbers instead of packets. One flag per sender and receiver has the number of the last block.
    """
    sends = [(rank, peer) for rank in range(ranks) for peer in range(ranks) if peer != rank]
    start = (0,) * ranks, (0,) * len(sends), (0,) * len(sends), (0,) * (len(sends) * slots)
    seen, ahead = {start}, deque([start])
    while ahead:
        done, sent, got, landing = ahead.popleft()
        following = []
        for k, (rank, peer) in enumerate(sends):
            number = done[rank] + 1
            place = k * slots + number % slots
            if number <= exchanges and sent[k] < number:
                if got[k] < landing[place] or (landing[place] and done[peer] < landing[place]):
                    return True  # The peer has not read the old packet yet, or may read it again.
                following.append((done, _with(sent, k, number), got, _with(landing, place, number)))
            number = done[peer] + 1
            is_there = sent[k] >= number if flags else landing[k * slots + number % slots] == number
            if number <= exchanges and got[k] < number and (is_there or not waits):
                following.append((done, sent, _with(got, k, number), landing))
        for rank in range(ranks):
            number = done[rank] + 1
            own = [k for k, pair in enumerate(sends) if rank in pair]
            if number <= exchanges and all((sent if sends[k][0] == rank else got)[k] == number for k in own):
                following.append((_with(done, rank, number), sent, got, landing))
        for state in following:
            if state not in seen:
                seen.add(state)
                ahead.append(state)
    assert any(done == (exchanges,) * ranks for done, *_ in seen), "no order of events ends"
    return False


def _with(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def test_two_slots_are_enough_and_needed() -> None:
    assert not lost(2, slots=2, exchanges=6)
    assert not lost(3, slots=2, exchanges=3)
    assert lost(2, slots=1, exchanges=2)
    assert lost(3, slots=1, exchanges=2)
    assert lost(2, slots=2, exchanges=3, waits=False)
    assert not lost(2, slots=2, exchanges=6, flags=True)
    assert not lost(3, slots=2, exchanges=3, flags=True)
    assert lost(2, slots=1, exchanges=2, flags=True)
