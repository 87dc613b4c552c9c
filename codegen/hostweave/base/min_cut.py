"""The cheapest way to part a graph, by augmenting paths (Edmonds and Karp, 1972)."""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import TypeVar

N = TypeVar("N", bound=Hashable)

INFINITE = 1 << 200  # more than any sum of capacities


def min_cut(edges: Iterable[tuple[N, N, int]], source: N, sink: N) -> set[N]:
    """The nodes on the side of `source` of a cut of the least capacity; of several such cuts the fewest nodes.

    An edge `(a, b, capacity)` is cut where `a` is on the side of the source and `b` is not.
    """
    left: defaultdict[N, dict[N, int]] = defaultdict(dict)
    for a, b, capacity in edges:
        left[a][b] = left[a].get(b, 0) + capacity
        left[b].setdefault(a, 0)
    while sink in (before := _reached(left, source)):
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        steps = [(a, b) for b, a in pairwise(path)]
        flow = min(left[a][b] for a, b in steps)
        for a, b in steps:
            left[a][b] -= flow
            left[b][a] += flow
    return set(before)


def _reached(left: dict[N, dict[N, int]], source: N) -> dict[N, N]:
    """Every node that a path with capacity left leads to, with the one before it on a shortest one."""
    before, queue = {source: source}, deque([source])
    while queue:
        a = queue.popleft()
        for b, capacity in left[a].items():
            if capacity and b not in before:
                before[b] = a
                queue.append(b)
    return before
