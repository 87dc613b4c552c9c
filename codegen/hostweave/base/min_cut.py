"""Minimum s-t cut by augmenting paths (Edmonds and Karp, 1972)."""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import TypeVar

N = TypeVar("N", bound=Hashable)

INFINITE = 1 << 200  # more than any sum of finite capacities


def min_cut(edges: Iterable[tuple[N, N, int]], source: N, sink: N) -> set[N]:
    """Returns the smallest source side of a minimum cut, as a set of nodes. The cut consists of the edges `(a, b, capacity)` that lead out
    of this set."""
    residual: defaultdict[N, dict[N, int]] = defaultdict(dict)
    for a, b, capacity in edges:
        residual[a][b] = residual[a].get(b, 0) + capacity
        residual[b].setdefault(a, 0)
    while sink in (predecessors := _shortest_paths(residual, source)):
        path = [sink]
        while path[-1] != source:
            path.append(predecessors[path[-1]])
        path_edges = [(a, b) for b, a in pairwise(path)]
        flow = min(residual[a][b] for a, b in path_edges)
        for a, b in path_edges:
            residual[a][b] -= flow
            residual[b][a] += flow
    return set(predecessors)


def _shortest_paths(residual: dict[N, dict[N, int]], source: N) -> dict[N, N]:
    """Maps each reachable node to its predecessor on a shortest path."""
    predecessors, queue = {source: source}, deque([source])
    while queue:
        a = queue.popleft()
        for b, capacity in residual[a].items():
            if capacity and b not in predecessors:
                predecessors[b] = a
                queue.append(b)
    return predecessors
