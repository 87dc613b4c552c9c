"""Runs functions of torch on threads that are ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hostweave as hw


def on_ranks(function: Callable[[int], Any], ranks: int) -> list[Any]:
    """Results of a function without gradients on each rank of a new group of threads."""
    threads = hw.Threads(ranks)

    def rank_main(rank: int) -> Any:
        hw.init(threads)
        with torch.no_grad():
            return function(rank)

    return threads.run(rank_main)
