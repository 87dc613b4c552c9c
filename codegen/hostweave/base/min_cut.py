"""Minimum s-t cut by augmenting paths (Edmonds and Karp, 1972)."""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import TypeVar

N = TypeVar("N", bound=Hashable)

INFINITE = 1 << 200  # more than any sum of capacities


def min_cut(edges: Iterable[tuple[N, N, int]], source: N, sink: N) -> set[N]:
    """Returns the nodes on the source side of a minimum cut. If there are several minimum cuts, returns the cut with the fewest such nodes.

    The cut pays for an edge `(a, b, capacity)` if `a` is on the source side and `b` is not.
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
    """Maps each node that is reachable through residual capacity to its predecessor on a shortest path."""
    before, queue = {source: source}, deque([source])
    while queue:
        a = queue.popleft()
        for b, capacity in left[a].items():
            if capacity and b not in before:
                before[b] = a
                queue.append(b)
    return before
