"""Calls of PyTorch in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

WARMUPS = 3


def in_a_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that launches `call` as a graph that torch captured. The function returns the same tensors each time. It keeps a
    reference to `call`, because a graph does not keep the memory of its tensors alive."""
    import torch

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARMUPS):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = call(), call

    def replay() -> Any:
        graph.replay()
        return kept[0]

    return replay
