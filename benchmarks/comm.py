"""Host time and bandwidth of the communications in COMMUNICATIONS. Each communication is a separate program, compared with direct NCCL
calls.

Both variants are compiled programs in this process. In the variant with direct calls, NCCL calls replace the generated body of `run`.
"""

from __future__ import annotations

import os
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from peers.report import print_machine, spread

import hostweave as hw
from hostweave.build.cuda import gpus

SIZES = {"1 KiB": 10, "64 KiB": 16, "1 MiB": 20, "16 MiB": 24, "256 MiB": 28, "1 GiB": 30}  # log2 of the bytes of the larger local buffer
ROUNDS = 5
MORE_US, OF_BANDWIDTH = 3.0, 0.99

WHOLE, BLOCK, EACH, BLOCKS = "u8[N]", "u8[N@x]", "u8[{ranks}@x, N]", "u8[{ranks}@x, {ranks}, N]"
LOOP = "for (int r = 0; r < {ranks}; ++r) {{ {body} }}"
SEND = "HW_CHECK(ncclSend(x + {at}, {count}, ncclUint8, {peer}, comm, caller));"
RECV = "HW_CHECK(ncclRecv(y + {at}, {count}, ncclUint8, {peer}, comm, caller));"


def _grouped(*calls: str) -> str:
    return " ".join(("HW_CHECK(ncclGroupStart());", *calls, "HW_CHECK(ncclGroupEnd());"))


def _each_peer(*calls: str, count: str = "N / {ranks}") -> str:
    return LOOP.replace("{body}", " ".join(call.format(at=f"r * ({count})", count=count, peer="r") for call in calls))


def _all_of(call: str, peer: str, count: str) -> str:
    return call.format(at="0", count=count, peer=peer)


# For each name: the types of x and y, the instruction, and the NCCL calls. N in the calls is N of the types.
COMMUNICATIONS = {
    "all_gather": (BLOCK, WHOLE, "all_gather %x -> %y on x", "HW_CHECK(ncclAllGather(x, y, N / {ranks}, ncclUint8, comm, caller));"),
    "all_reduce": (EACH, WHOLE, "all_reduce sum %x -> %y on x", "HW_CHECK(ncclAllReduce(x, y, N, ncclUint8, ncclSum, comm, caller));"),
    "reduce_scatter": (
        EACH,
        BLOCK,
        "reduce_scatter sum %x -> %y on x",
        "HW_CHECK(ncclReduceScatter(x, y, N / {ranks}, ncclUint8, ncclSum, comm, caller));",
    ),
    "broadcast": (EACH, WHOLE, "broadcast %x -> %y from 0 on x", "HW_CHECK(ncclBroadcast(x, y, N, ncclUint8, 0, comm, caller));"),
    "reduce": (EACH, EACH, "reduce sum %x -> %y to 0 on x", "HW_CHECK(ncclReduce(x, y, N, ncclUint8, ncclSum, 0, comm, caller));"),
    "gather": (
        BLOCK,
        EACH,
        "gather %x -> %y to 0 on x",
        _grouped(_all_of(SEND, "0", "N / {ranks}"), "if (rank_.index() == 0)", _each_peer(RECV)),
    ),
    "scatter": (
        EACH,
        BLOCK,
        "scatter %x -> %y from 0 on x",
        _grouped("if (rank_.index() == 0)", _each_peer(SEND), _all_of(RECV, "0", "N / {ranks}")),
    ),
    "all_to_all": (BLOCKS, BLOCKS, "all_to_all %x -> %y on x", _grouped(_each_peer(SEND, RECV, count="N"))),
    "send_recv": (
        EACH,
        EACH,
        "group {{ send %x to (rank.x + 1) % {ranks} on x  recv %y from (rank.x - 1) % {ranks} on x }}",
        _grouped(
            _all_of(SEND, "(rank_.index() + 1) % {ranks}", "N"),
            _all_of(RECV, "(rank_.index() + {ranks} - 1) % {ranks}", "N"),
        ),
    ),
}


def main() -> None:
    print_machine()
    ranks = len(gpus())
    print(f"{ranks} GPUs; added host time of a call in us (limit {MORE_US}), and share of NCCL's bandwidth (limit {OF_BANDWIDTH})")
    for name, (*_, calls) in COMMUNICATIONS.items():
        # The check is off, because it rejects programs that write the output of only one rank, as reduce and gather do.
        program = hw.compile(hw.HostProgram.parse(text_of(name, ranks)), target="cuda", options=hw.Options(check=False))
        bare = _bare(program, calls.replace("{ranks}", str(ranks)).replace("{{", "{").replace("}}", "}"))
        for size, log in SIZES.items():
            shape = {WHOLE: (1 << log,), BLOCK: (1 << log,), EACH: (ranks, 1 << log), BLOCKS: (ranks, ranks, (1 << log) // ranks)}
            x = np.zeros(shape[COMMUNICATIONS[name][0]], np.uint8)
            rounds = [(_times(program, x), _times(bare, x)) for _ in range(ROUNDS)]
            more = statistics.median(ours[0] - theirs[0] for ours, theirs in rounds)
            share = statistics.median(theirs[1] / ours[1] for ours, theirs in rounds)
            ms = spread([ours[1] for ours, _ in rounds])
            print(f"{name:15} {size:>8}: {more:+.2f} us, {share:.3f} of the bandwidth ({ms} ms)", flush=True)


def text_of(name: str, ranks: int) -> str:
    x_type, y_type, instruction = (text.format(ranks=ranks) for text in COMMUNICATIONS[name][:3])
    return f"host @{name}(%x: {x_type}) -> (%y: {y_type}) mesh(x={ranks}) channels(x: x two_sided) {{ {instruction} }}"


def _bare(program: Any, calls: str) -> Any:
    """A program whose `enqueue` contains only `calls`."""
    source = program.sources["program.cpp"]
    begin = source.index("void Program::enqueue(")
    body = f"""void Program::enqueue(const Inputs& in, const Outputs& out, cudaStream_t caller) {{
  const auto* x = in.x.as<uint8_t>();
  auto* y = out.y.as<uint8_t>();
  [[maybe_unused]] const int64_t N = prepared_->N;
  const ncclComm_t comm = channel_x_.comm();
  {calls}
}}
"""
    end = re.compile(r"^}\n", re.M).search(source, begin)
    assert end
    with tempfile.TemporaryDirectory() as folder:
        edited = Path(folder) / program.name
        edited.mkdir()
        for path, text in program.sources.items():
            (edited / path).write_text(text)
        (edited / "program.cpp").write_text(source[:begin] + body + source[end.end() :])
        os.environ["HOSTWEAVE_EDIT"] = folder
        try:
            bare = hw.compile(hw.HostProgram.parse(program.host_ir), target="cuda", options=hw.Options(check=False))
            bare.build()
        finally:
            del os.environ["HOSTWEAVE_EDIT"]
    return bare


def _times(program: Any, x: Any) -> tuple[float, float]:
    """Host microseconds and device milliseconds per call of the slowest rank. Both are medians over the repetitions."""
    times = program.measure(warmups=2, repetitions=9, x=x)
    host = max(statistics.median(t.enqueue_us for t in rank) for rank in times)
    return host, statistics.median(max(rank[i].total_ms for rank in times) for i in range(len(times[0])))


if __name__ == "__main__":
    main()
