"""The pass reduce_in_kernels: a small all-reduce, all-gather or reduce-scatter becomes part of the kernel that reads the result."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from stages_of_passes import changes

import hostweave as hw
from hostweave.passes.host.reduce_in_kernels import reduce_in_kernels
from hostweave.types.machine import H200


def reduced(rows: int) -> hw.Fusion:
    @hw.fusion(mesh=hw.Mesh(x=2), p=hw.f32["2@x", rows, 64])
    def reduced(p: Any) -> Any:
        return hw.maximum(hw.sum(p, 0), 0)

    return reduced


def test_a_small_all_reduce_is_fused_with_its_consumer() -> None:
    assert (
        changes(reduce_in_kernels, reduced(4))
        == """\
- kernel @maximum_y(%sum_p: f32[4, 64]) {
+ kernel @maximum_y_of_terms(%p: f32[4, 64]) {
+ %sum_p: f32[4, 64] = all_reduce(%p, axes=(x), reduction=sum)
- %sum_p = allocate f32[4, 64]
- all_reduce sum %sum_p_partial -> %sum_p on x
- launch @maximum_y %sum_p -> %y
+ launch_all_reduce @maximum_y_of_terms %sum_p_partial -> %y on x
"""
    )


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1 << 20, hw.Options()),
        (4, hw.Options(transport="two_sided")),
        (4, hw.Options(machine=replace(H200, no_peers="the ranks are on several hosts"))),
    ],
    ids=["large", "two-sided", "no peer memory"],
)
def test_all_reduces_that_stay_separate(rows: int, options: hw.Options) -> None:
    assert changes(reduce_in_kernels, reduced(rows), options) == ""


@pytest.mark.parametrize(
    ("width", "row", "grid"),
    [
        (8192, "hw::Row<8192, 256, 8, 4>", "hw::Grid{4 * T, 256, 4}"),
        (7168, "hw::Row<7168, 224, 8, 4>", "hw::Grid{4 * T, 224, 4}"),
        (2048, "hw::Row<2048, 256, 8>", "hw::Grid{T, 256}"),
        (3840, "hw::Row<3840, 160, 8>", "hw::Grid{T, 160}"),  # 2, 4 or 8 blocks of whole warps cannot share the row evenly.
    ],
)
def test_the_blocks_of_a_cluster_share_a_long_row(width: int, row: str, grid: str) -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), p=hw.bf16["2@x", "T", width], w=hw.bf16[width], q=hw.bf16["T", width])
    def normed(p: Any, w: Any, q: Any) -> Any:
        return hw.rms_norm(hw.sum(p, 0), w) * q

    sources = hw.compile(normed, target="cuda", options=hw.Options(machine=H200)).sources
    kernel = sources["kernels.cu"].split("_of_terms(")[1]
    assert f"compute({row}())" in kernel
    assert grid in sources["program.cpp"]
    assert kernel.index("q_ij = row.load(q") < kernel.index("row.reduce")  # The load does not wait for the reduction.

    alone = hw.compile(normed, target="cuda", options=hw.Options(machine=replace(H200, cluster_blocks=1))).sources
    assert not re.search(r"hw::Grid\{[^}]*, [248]\}", alone["program.cpp"])


def test_a_consumer_that_reads_the_block_is_not_fused() -> None:
    """A kernel that gathers its input reads only the gathered blocks. So an op that reads the rank's own block stays outside the kernel."""

    @hw.fusion(mesh=hw.Mesh(x=2), n=hw.f32["2@x", 4])
    def beside(n: Any) -> Any:
        own = hw.exp(n)
        return hw.reshard(own, 2, 4) + hw.reshard(own, 2, 4), own

    lines = changes(reduce_in_kernels, beside)
    assert "launch_all_gather @add_" in lines

    @hw.fusion(mesh=hw.Mesh(x=2), n=hw.f32["2@x", 4])
    def reads(n: Any) -> Any:
        own = hw.exp(n)
        return hw.reshard(hw.max(hw.reshard(own, 2, 4), 0, keepdims=True) - own, "2@x", 4)

    lines = changes(reduce_in_kernels, reads)
    assert "launch_all_gather @all_gather_" in lines


def test_the_kernel_before_a_reduce_scatter_sends_its_result() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), p=hw.f32["2@x", 6, 64])
    def scattered(p: Any) -> Any:
        return hw.maximum(hw.reshard(hw.sum(p * p, 0), "6@x", 64), 0)

    assert (
        changes(reduce_in_kernels, scattered)
        == """\
- kernel @maximum_y(%sum_p_scattered: f32[3, 64]) {
+ kernel @maximum_y_of_terms(%multiply_p: f32[3, 64]) {
+ %sum_p_scattered: f32[3, 64] = reduce_scatter(%multiply_p, dim=0, axes=(x), reduction=sum)
- launch @multiply_p_kernel %p -> %multiply_p
- %sum_p_scattered = allocate f32[3, 64]
- reduce_scatter sum %sum_p -> %sum_p_scattered on x
- launch @maximum_y %sum_p_scattered -> %y
+ launch @multiply_p_kernel %p -> %multiply_p sent on x
+ launch_reduce_scatter @maximum_y_of_terms %sum_p -> %y on x
"""
    )


def test_a_kernel_that_gathers_does_not_also_send() -> None:
    """The kernel between a gather and a reduce-scatter does only one of the two exchanges. With both, nothing would gather the rows
    that the kernel reads."""

    @hw.fusion(mesh=hw.Mesh(x=2), n=hw.f32["6@x", 64], scale=hw.f32["2@x", 1, 1])
    def exchanges(n: Any, scale: Any) -> Any:
        return hw.maximum(hw.reshard(hw.sum(hw.reshard(n, 6, 64) * scale, 0), "6@x", 64), 0)

    lines = changes(reduce_in_kernels, exchanges)
    assert "launch_all_gather @" in lines
    assert "launch_reduce_scatter @" in lines
    assert "sent on" not in lines
