"""Comments in `prepare` and `*_memory` list buffers that may share bytes. The test compares the lists with the recorded live ranges."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from parts_of_transformers import PROGRAMS

import hostweave as hw
from hostweave.emit import render
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.tensor import DType

PLANS = re.compile(r"^\w+ Program::(?:prepare|\w+_memory)\(.*?^}", re.M | re.S)


def groups(plan: str) -> list[list[str]]:
    """Groups of buffers in the comment. A long item continues on the next line."""
    comment = re.search(r"so they may share bytes:\n((?: *// .*\n)*)", plan)
    lines = re.sub(r"\n *// (?!- )", " ", "\n" + comment[1]) if comment else ""
    return [re.findall(r"\w+", item) for item in lines.split("// - ")[1:]]


def in_use(plan: str) -> list[set[str]]:
    """Returns the set of live buffers after each call of `allocate`, `free` or `join`."""
    used: dict[str, str] = {}  # for each live buffer, the pool of streams of its allocation, or ""
    after = []
    for call, arguments in re.findall(r"memory\.(allocate|free|join)\((.*)\);", plan):
        member, *rest = arguments.split(", ")
        if call == "allocate":
            used[member] = rest[-1] if len(rest) > 1 and rest[-1].endswith("_") else ""
        elif call == "join":
            used = {name: pool for name, pool in used.items() if pool != member}
        elif not used[member]:
            del used[member]
        after.append(set(used))
    return after


@pytest.mark.parametrize("make", PROGRAMS)
def test_buffers_that_share_bytes_have_disjoint_live_ranges(make: Callable[[int, DType], Fusion]) -> None:
    plans = PLANS.findall(render(lower(make(2, hw.f32), Options()))["program.cpp"])
    shared = [group for plan in plans for group in groups(plan)]
    assert shared or make.__name__ == "attention"  # Attention is a single call, without temporaries that could share bytes.
    assert len({buffer for group in shared for buffer in group}) == sum(map(len, shared)), "a buffer is in two groups"
    for plan in plans:
        for group in groups(plan):
            assert set(group) <= set().union(*in_use(plan))
            assert all(len(used & set(group)) < 2 for used in in_use(plan))
