"""Known communication defects of other systems, each with the tests that would detect the defect in Hostweave.

| defect | tests |
|---|---|
| the count of an all_gather is the size of the result, n times the correct count | test_collectives, every dtype and number of ranks |
| bf16 is sent as another type | test_collectives |
| integers are compared as unsigned; the maximum of negative floats starts at the smallest positive float | test_signs |
| a send or recv outside a group is refused | test_raw_sends |
| the stated order of a process group is lost | test_the_order_of_a_process_group, test_reshards (`A@tp,dp`) |
| the process group is always the whole mesh, or the last axis of the mesh | test_one_axis_of_a_mesh, test_reshards |
| a rank that takes no part in a communication fails | test_ranks_that_take_no_part |
| an error in a group leaves the group open, and the next collective hangs | test_rank_faults: test_a_rank_that_fails_in_the_middle |
| counts and dtypes are not compared with the buffers | test_host_verify (counts, dtypes), test_check (matching) |
| an all_to_all rounds a size down if the ranks do not divide the size | test_host_verify (all_to_all) |
| two groups of ranks share one channel | test_init: test_groups_of_different_names_do_not_mix |
| channels are made at every call, or never freed | test_init: test_channels_are_made_once_and_freed |
| a channel is on the current device, or the index of the device is used as rank | test_launchers; test_providers |
| a collective inside a condition on the rank compiles, and hangs | test_host_verify (`if`, loops) |
| an unused communication is not removed, or is removed only on some ranks | test_unused_communication_is_removed, test_decompose_reshards |
| communications of two channels have different orders on different ranks | test_serialize_channels, test_check |
| a later call overtakes an earlier call | test_numerics (calls in flight), test_mutations |
| communication cannot be in place; an all_reduce first copies its operand | test_in_place; tests/golden (matmul_ar_unstreamed) |
| local data is sent to the same rank by a scatter | test_decompose_reshards (`shard`) |
| one tensor is gathered twice for two consumers | test_insert_reshards, test_decompose_reshards |
| averages, and reductions of integers to one rank, are missing | test_collectives (avg, reduce) |
| a permute leaves ranks without a source unchanged | test_one_axis_of_a_mesh, test_collectives (collective_permute) |
| zero elements, one element or uneven shards fail | test_collectives (0 and 1), test_reshards |
| ranks wait forever for a rank that has ended | test_rank_faults, test_leaving_ranks |
"""

from __future__ import annotations

from functools import cache
from typing import Any

import host_text
import ml_dtypes  # noqa: F401  the import registers bf16 with NumPy
import numpy as np
import pytest
from interpret import interpret
from numpy.typing import NDArray

import hostweave as hw
from hostweave.types.numpy_dtypes import numpy_dtype

Array = NDArray[Any]
N = 5
four = pytest.mark.parametrize("ranks", [4])
SIGNED = (hw.i8, hw.i32, hw.i64, hw.f16, hw.bf16, hw.f32, hw.f64)
UNSIGNED = (hw.u8, hw.u32)

# Instructions that compute %{name}, [4@dp,tp, N], from %x. The rank at (dp, tp) has number 2 dp + tp.
RANKS = {
    "whole_mesh": "all_gather %x -> %big_1 on dp_tp\n%c_1 = select %big_1[0: 1]\n%r_1 = reshape %c_1 to [1, N]\ncopy %r_1 -> %whole_mesh",
    "turned_axes": "all_gather %x -> %big_2 on tp_dp\n%c2 = select %big_2[0: 1]\n%r2 = reshape %c2 to [1, N]\ncopy %r2 -> %turned_axes",
    "sums_of_rows": "all_reduce sum %x -> %sums_of_rows on tp",
    "sums_of_columns": "all_reduce sum %x -> %sums_of_columns on dp",
    "swapped_in_rows": "collective_permute %x -> %swapped_in_rows from [1, 0] on tp",
    "swapped_in_columns": "collective_permute %x -> %swapped_in_columns from [1, 0] on dp",
    "passed_on": "fill %passed_on with 7.0\ncollective_permute %x -> %passed_on from [none, 0] on tp",
    "sent": "if rank.tp == 0 {\n copy %x -> %sent\n send %x to 1 on tp\n} else {\n recv %sent from 0 on tp\n}",
    "sent_in_one_row": (
        "if rank.dp == 0 {\n if rank.tp == 0 {\n  send %x to 1 on tp\n  copy %x -> %sent_in_one_row\n } else {\n"
        "  recv %sent_in_one_row from 0 on tp\n }\n} else {\n copy %x -> %sent_in_one_row\n}"
    ),
    "reduced_in_place": "copy %x -> %reduced_in_place\nall_reduce sum %reduced_in_place -> %reduced_in_place on dp_tp",
    "broadcast_in_place": "copy %x -> %broadcast_in_place\nbroadcast %broadcast_in_place -> %broadcast_in_place from 3 on dp_tp",
    "gathered_in_place": (
        "%place = rank.dp * 2 + rank.tp\n%own = chunk %big_3[0: %place of 4]\ncopy %x -> %own\nall_gather %own -> %big_3 on dp_tp\n"
        "reduce_scatter max %big_3 -> %own on dp_tp\ncopy %own -> %gathered_in_place"
    ),
}
WANTED = {  # For each rank, the ranks whose blocks are added. A result of no ranks is zeros.
    "whole_mesh": [[1]] * 4,
    "turned_axes": [[2]] * 4,
    "sums_of_rows": [[0, 1], [0, 1], [2, 3], [2, 3]],
    "sums_of_columns": [[0, 2], [1, 3], [0, 2], [1, 3]],
    "swapped_in_rows": [[1], [0], [3], [2]],
    "swapped_in_columns": [[2], [3], [0], [1]],
    "passed_on": [[], [0], [], [2]],
    "sent": [[0], [0], [2], [2]],
    "sent_in_one_row": [[0], [0], [2], [3]],
    "reduced_in_place": [[0, 1, 2, 3]] * 4,
    "broadcast_in_place": [[3]] * 4,
    "gathered_in_place": [[0], [1], [2], [3]],
}


def ranks_program() -> hw.HostProgram:
    outputs = ", ".join(f"%{name}: f32[4@dp,tp, N]" for name in RANKS)
    memory = "".join(f"%big_{i} = allocate f32[4, N]\n" for i in (1, 2, 3))
    body = memory + "\n".join(RANKS.values())
    return host_text.parse(f"host @ranks(%x: f32[4@dp,tp, N]) -> ({outputs}) mesh(dp=2, tp=2) {{\n{body}\n}}\n")


@cache
def results(target: str) -> tuple[Array, list[list[dict[str, Array]]]]:
    """The input, and the results of every rank by the interpreter and on the target."""
    program = ranks_program()
    x = np.random.default_rng(0).integers(-9, 9, (4, N)).astype(np.float32)
    compiled = hw.compile(program, target=target)
    local = [dict(zip(RANKS, outputs, strict=True)) for outputs in compiled.run(x=x, ranks=True)]
    compiled.close()
    return x, [list(interpret(program, {"x": x})), local]


def check(target: str, *names: str) -> None:
    x, runs = results(target)
    for name in names:
        for rank, sources in enumerate(WANTED[name]):
            want = x[sources].sum(0, keepdims=True)
            for ranks in runs:
                np.testing.assert_array_equal(ranks[rank][name], want, err_msg=f"{name} on rank {rank}")


@four
def test_the_order_of_a_process_group(ranks: int, target: str) -> None:
    check(target, "whole_mesh", "turned_axes")


@four
def test_one_axis_of_a_mesh(ranks: int, target: str) -> None:
    check(target, "sums_of_rows", "sums_of_columns", "swapped_in_rows", "swapped_in_columns", "passed_on")


@four
def test_raw_sends(ranks: int, target: str) -> None:
    check(target, "sent")


@four
def test_ranks_that_take_no_part(ranks: int, target: str) -> None:
    check(target, "sent_in_one_row")


@four
def test_in_place(ranks: int, target: str) -> None:
    check(target, "reduced_in_place", "broadcast_in_place", "gathered_in_place")


@pytest.mark.parametrize("ranks", [3])
def test_signs(ranks: int, target: str) -> None:
    """The unsigned numbers include numbers above 127."""
    dtypes = (*SIGNED, *UNSIGNED)
    inputs = ", ".join(f"%x_{d}: {d}[3@x, N]" for d in dtypes)
    names = [f"{op}_{d}" for d in dtypes for op in ("min", "max", "to_one")]
    body = "\n".join(
        f"all_reduce min %x_{d} -> %min_{d} on x\nall_reduce max %x_{d} -> %max_{d} on x\n"
        f"fill %to_one_{d} with 0.0\nreduce max %x_{d} -> %to_one_{d} to 2 on x"
        for d in dtypes
    )
    outputs = ", ".join(f"%{name}: {name.rpartition('_')[2]}[3@x, N]" for name in names)
    program = host_text.parse(f"host @signs({inputs}) -> ({outputs}) mesh(x=3) {{\n{body}\n}}\n")
    random = np.random.default_rng(1)
    given = {f"x_{d}": random.integers(-100, -1, (3, N)).astype(numpy_dtype(d)) for d in SIGNED}
    given |= {f"x_{d}": (random.integers(1, 100, (3, N)) + np.array([[0], [150], [0]])).astype(numpy_dtype(d)) for d in UNSIGNED}
    compiled = hw.compile(program, target=target)
    local = [dict(zip(names, outputs, strict=True)) for outputs in compiled.run(ranks=True, **given)]
    compiled.close()
    for ranks in (list(interpret(program, given)), local):
        for name in names:
            op, _, dtype = name.rpartition("_")
            x = given[f"x_{dtype}"].astype(np.float64)
            for rank, outputs in enumerate(ranks):
                want = x.min(0) if op == "min" else x.max(0) * (op == "max" or rank == 2)
                np.testing.assert_array_equal(outputs[name][0].astype(np.float64), want, err_msg=f"{name} on rank {rank}")


@pytest.mark.parametrize("streamed", [False, True])
def test_unused_communication_is_removed(streamed: bool) -> None:
    """The channel of the unused communication is also removed, on all ranks."""

    @hw.fusion(mesh=hw.Mesh(dp=2, tp=2), x=hw.f32["M@dp", "K@tp"])
    def needs_one(x):
        unused = hw.reshard(x, "M", "K@tp")
        _ = hw.sum(unused.stream("M", chunks=2) if streamed else unused, axis="M")
        return hw.sum(x, axis="K")

    program = hw.compile(needs_one)
    assert program.host_ir.count(" on ") == 1
    assert "all_reduce sum %y_partial -> %y on tp" in program.host_ir
    assert [line.count("rank.channel(") for line in program.sources["program.cpp"].splitlines() if "channel(" in line] == [1]
    assert "channel_dp" not in "".join(program.sources.values())
