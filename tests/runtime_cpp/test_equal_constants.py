"""Constants that the package and the runtime state separately have equal values."""

from __future__ import annotations

import re

import pytest

from hostweave.base.paths import RUNTIME
from hostweave.communication.put import PEER_COPIES
from hostweave.fusion_ir.ops.attention import MAX_HEAD
from hostweave.fusion_ir.ops.indexing import MAX_BLOCK_SORT
from hostweave.host_ir import ir
from hostweave.host_ir.instructions.windows import SIGNAL_COUNTERS
from hostweave.kernel_ir.distribute import TILE
from hostweave.kernel_ir.hold_rows import ROW_ACCESSES
from hostweave.kernel_ir.number_elements import SHORT
from hostweave.passes.lower.asynchronous import COMM
from hostweave.passes.lower.lower_to_host import LOOP
from hostweave.tune.cost import MAX_WEIGHT_ELEMENTS
from hostweave.types.machine import H200
from hostweave.types.tensor import MAX_DIMS

CONSTANTS = [  # Value in Python, C++ before the value, and the file in `runtime_cpp`.
    (H200.cluster_blocks, "kMostBlocks =", "include/hostweave/launch.h"),
    (ir.BLOCK_BYTES, "kBlockBytes =", "include/hostweave/terms.h"),
    (ir.EXCHANGE_BYTES, "kExchangeBytes =", "include/hostweave/terms.h"),
    (ir.EXCHANGE_RANKS, "kExchangeRanks =", "include/hostweave/terms.h"),
    (ir.FEW_ROWS, "kFewRows =", "include/hostweave/threads.h"),
    (ir.FEW_SCALED_ROWS, "kFewScaledRows =", "include/hostweave/threads.h"),
    (MAX_BLOCK_SORT, "kSorted =", "include/hostweave/threads.h"),
    (MAX_DIMS, "kMaxDims =", "include/hostweave/tensor.h"),
    (MAX_HEAD, "kMostHead =", "include/hostweave/attention_kernel.h"),
    (MAX_WEIGHT_ELEMENTS, "kMostWeights =", "src/matmul.cpp"),
    (ROW_ACCESSES, "kRowAccesses =", "include/hostweave/threads.h"),
    (SHORT, "fits_int32(int64_t n) { return n <=", "include/hostweave/kernel.h"),
    (SIGNAL_COUNTERS, "kNumbers =", "include/hostweave/peer.h"),
    (SIGNAL_COUNTERS, "kSignals =", "cpu/device/shared.h"),
    (TILE, "kTile =", "include/hostweave/threads.h"),
]


@pytest.mark.parametrize(("value", "name"), [(LOOP, "kLoopStreams"), (COMM, "kCommStreams"), (PEER_COPIES, "kPeerCopies")])
def test_python_and_cpp_name_pools_of_streams_alike(value: str, name: str) -> None:
    """Otherwise attention on several streams would share memory."""
    assert f'{name}[] = "{value}"' in (RUNTIME / "include" / "hostweave" / "rank.h").read_text()


@pytest.mark.parametrize(("value", "before", "file"), CONSTANTS)
def test_python_and_cpp_have_one_value(value: int, before: str, file: str) -> None:
    """The C++ value is a number or a shifted number, such as `int64_t{1} << 26`."""
    (found,) = re.findall(rf"\b{re.escape(before)} (?:int64_t\{{)?(\d+)\}}?(?: << (\d+))?;", (RUNTIME / file).read_text())
    number, shift = (int(digits or 0) for digits in found)
    assert number << shift == value
