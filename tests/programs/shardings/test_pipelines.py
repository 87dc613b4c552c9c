"""Pipelines of stages on separate meshes, on the CPU device: results of all ranks, and arguments of ranks outside of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled_fusions import PIPELINES, Array, compiled, expect, fusion_of, integer_arrays, lowered, random_arrays, sizes_of
from cuda_here import needs_cuda

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError, ProgramError
from hostweave.check.check import check
from hostweave.cli.memory_plan import memory_plan, memory_report
from hostweave.host_ir import ir, tree
from hostweave.runtime.arguments import BoundInputs
from hostweave.runtime.checked_call import Arguments
from hostweave.runtime.cpu import parallel, seeded
from hostweave.runtime.windows import Windows
from hostweave.targets.target import CPU_DEVICE, find_target
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import holds


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("name", PIPELINES)
def test_matches_numpy(name: str, ranks: int) -> None:
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    sizes, program = sizes_of(fusion), compiled(fusion)
    arrays = random_arrays(fusion, sizes, seed=1)
    expect(fusion, arrays, program.run(**arrays, ranks=True))
    calls = [integer_arrays(fusion, sizes, seed) for seed in range(3)]
    with parallel(check_dependencies=True):
        for arrays, results in zip(calls, program.run_in_flight(calls, poison=True), strict=True):
            expect(fusion, arrays, results, exact=True)
    for seed in range(4):
        with seeded(seed):
            for arrays, results in zip(calls, program.run_in_flight(calls, poison=True), strict=True):
                expect(fusion, arrays, results, exact=True)


def test_results_of_a_mesh_are_global_arrays() -> None:
    fusion = fusion_of("two_stages", 4, 3, hw.f32)
    arrays = integer_arrays(fusion, sizes_of(fusion), seed=0)
    whole = compiled(fusion).run(**arrays)
    np.testing.assert_array_equal(whole, np.maximum(arrays["x"] @ arrays["w1"], 0) @ arrays["w2"])


@pytest.mark.parametrize("rows", [1, 5, 10])
def test_rows_that_the_ranks_of_a_stage_share_unevenly(rows: int) -> None:
    fusion = fusion_of("two_stages", 8, 3, hw.f32)
    arrays = integer_arrays(fusion, {"M": rows, "K": 3, "N": 4}, seed=0)
    program = compiled(fusion)
    with seeded(0):
        expect(fusion, arrays, program.run(**arrays, ranks=True), exact=True)


def test_columns_that_the_ranks_of_a_stage_share_unevenly() -> None:
    fusion = fusion_of("two_stages_streamed", 8, 3, hw.f32)
    for columns in (1, 10):
        arrays = integer_arrays(fusion, {"M": 6, "K": 3, "N": columns}, seed=0)
        with seeded(1):
            expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True), exact=True)


LINE = Mesh(x=3)


@hw.fusion(mesh=LINE, x=hw.f32["M@x", "N"], v=hw.f8e4m3["K", "M@x"].on(LINE.ranks([0, 1])))
def uneven(x, v):
    """An all_to_all, a reduce_scatter, an all_gather of packed blocks, and a move between two meshes that both split M."""
    columns = hw.reshard(x, "M", "N@x")
    moved = hw.reshard(v, "K", "M@x", mesh=LINE.ranks([2, 1, 0]))
    return columns, hw.reshard(hw.sum(x, axis=0), "N@x"), hw.reshard(columns + 1, "M", "N"), moved


def test_shards_of_any_size_in_flight() -> None:
    program = compiled(uneven)
    for rows, columns in ((7, 5), (1, 2), (6, 9), (0, 4)):
        calls = [integer_arrays(uneven, {"M": rows, "N": columns, "K": 3}, seed) for seed in range(3)]
        for schedule in (parallel(check_dependencies=True), seeded(rows)):
            with schedule:
                for arrays, results in zip(calls, program.run_in_flight(calls, poison=True), strict=True):
                    expect(uneven, arrays, results, exact=True)


@needs_cuda
def test_shards_of_any_size_compile_for_cuda() -> None:
    program = compiled(uneven, target="cuda")
    assert "warning" not in (program.folder / "build.log").read_text()


def test_every_join_and_fork_is_needed() -> None:
    host = lowered(fusion_of("two_stages_streamed", 4, 3, hw.bf16))
    dropped = [i for i in tree.walk(host.body) if isinstance(i, ir.Fork | ir.Join | ir.Wait)]
    assert len(dropped) == 5
    for instruction in dropped:
        body = tree.rewrite(host.body, lambda i, dropped=instruction: () if i is dropped else None)
        with pytest.raises(ProgramError, match="nothing orders"):
            check(replace(host, body=body))


def test_stages_in_the_middle_receive_one_step_ahead() -> None:
    mesh, steps = hw.Mesh(x=6), 4
    stages = [mesh.ranks([2 * i, 2 * i + 1]) for i in range(3)]
    weights = {
        f"{name}{i}": type.on(on)
        for i, on in enumerate(stages)
        for name, type in (("up", hw.f32["K", "N@x"]), ("down", hw.f32["N@x", "K"]))
    }

    @hw.fusion(mesh=mesh, x=hw.f32["M", "K"].on(stages[0]), **weights)
    def three_stages(x, **weights):
        for i, on in enumerate(stages):
            if i:
                x = hw.reshard(x, "M", "K", mesh=on).named(f"arrived{i}").stream("M", chunks=steps)
            h = hw.relu(hw.matmul(x, weights[f"up{i}"]).stream("M", chunks=steps)).stream("M", chunks=steps)
            x = hw.reshard(hw.matmul(h, weights[f"down{i}"]), "M", "K").named(f"layer{i}").stream("M", chunks=steps)
        return x

    program = hw.compile(three_stages)
    first, *others = str(program.host_ir).split("  for %i in 0..4 {")
    assert (first.count("recv"), [each.count("if %i < 3") for each in others]) == (0, [0, 1, 1])
    assert [(each.count("recv"), each.count("send")) for each in others] == [(1, 1), (2, 1), (1, 0)]
    calls = [integer_arrays(three_stages, {"M": 8, "K": 3, "N": 4}, seed) for seed in range(3)]
    for seed in range(4):
        with seeded(seed):
            for arrays, results in zip(calls, program.run_in_flight(calls, poison=True), strict=True):
                expect(three_stages, arrays, results, exact=True)


@pytest.mark.parametrize("name", PIPELINES)
def test_memory_is_planned_for_the_ranks_of_each_stage(name: str) -> None:
    host = lowered(fusion_of(name, 4, 4, hw.bf16))
    plans = [memory_plan(host, {"M": 4096, "K": 4096, "N": 4096}, rank) for rank in range(4)]
    assert plans[0] == plans[1]
    assert plans[2] == plans[3]
    assert all(plan.peak == plan.bound for plan in plans)
    report = memory_report(host, {})
    assert [line.rpartition(", ")[2] for line in report.splitlines() if line.startswith("memory of")] == ["rank 0", "rank 2"]
    if name == "two_stages_streamed":  # Each stage has temporaries per stream.
        assert [row.name for row in plans[0].rows] == ["%h", "%matmul_down1"]
        assert [row.name for row in plans[2].rows] == ["%arrived", "%g"]
        many = memory_plan(lowered(fusion_of(name, 4, 16, hw.bf16)), {"M": 4096, "K": 4096, "N": 4096}, 2)
        assert 4 * many.peak == plans[2].peak  # Each of 4 streams has buffers for one of 16 micro-batches.


def test_layers_of_a_stage_are_calls_of_a_block() -> None:
    """A block is on the mesh of its parameters. All ranks call the function of the block, but only ranks of this mesh compute."""
    mesh = hw.Mesh(x=4)
    first, second = mesh.ranks([0, 1]), mesh.ranks([2, 3])

    weights = {"up": hw.f32["E", "F@x"], "down": hw.f32["F@x", "E"]}

    def layer_on(name: str, mesh: Mesh) -> Any:
        def mlp(h, up, down):
            return hw.reshard(hw.relu(h @ up) @ down, "M", "E")

        mlp.__name__ = name
        return hw.block(h=hw.f32["M", "E"].on(mesh), **{name: type.on(mesh) for name, type in weights.items()})(mlp)

    blocks = layer_on("stage_1", first), layer_on("stage_2", second)

    def on(mesh: Mesh, *numbers: int) -> dict[str, hw.TensorType]:
        return {f"{name}{i}": type.on(mesh) for i in numbers for name, type in weights.items()}

    @hw.fusion(mesh=mesh, x=hw.f32["M", "E"].on(first), **on(first, 1, 2), **on(second, 3))
    def three_layers(x, up1, down1, up2, down2, up3, down3):
        h = blocks[0](blocks[0](x, up1, down1), up2, down2)
        return blocks[1](hw.reshard(h, "M", "E", mesh=second), up3, down3)

    program = hw.compile(three_layers)
    assert program.source.count("  stage_1(") == 2  # Both calls are of one function.
    arrays = integer_arrays(three_layers, {"M": 3, "E": 4, "F": 6}, seed=0)
    expect(three_layers, arrays, program.run(**arrays, ranks=True), exact=True)


# --- ranks that a host application started ----------------------------------------------------------------------------

FUSION = fusion_of("two_stages", 4, 3, hw.f32)
STAGES = hw.compile(FUSION)
GIVEN = integer_arrays(FUSION, {"M": 6, "K": 5, "N": 4}, seed=0)


def local(rank: int) -> list[Array | None]:
    """Arguments of a rank. An argument is None if the rank is not on the mesh of the input."""
    parts = [v.type.shard(GIVEN[v.name], rank, FUSION.mesh) if holds(v.type, FUSION.mesh, rank) else None for v in FUSION.inputs]
    return [None if part is None else np.ascontiguousarray(part) for part in parts]


def on_ranks(function: Callable[[int], Any]) -> list[Any]:
    provider = hw.Threads(4)

    def call(rank: int) -> Any:
        hw.init(provider)
        try:
            return function(rank)
        except (ArgumentError, ExecutionError) as error:
            return str(error)

    return provider.run(call)


def test_arguments_on_other_ranks_are_none() -> None:
    want = np.maximum(GIVEN["x"] @ GIVEN["w1"], 0) @ GIVEN["w2"]

    def call(rank: int) -> tuple[Array | None, Array | None]:
        out = np.empty((3, 5), np.float32) if rank >= 2 else None
        assert STAGES(*local(rank), out=out) is out or rank < 2
        return STAGES(*local(rank)), out

    results = on_ranks(call)
    assert results[:2] == [(None, None)] * 2
    for rank, (own, out) in enumerate(results[2:]):
        np.testing.assert_array_equal(own, want[3 * rank : 3 * (rank + 1)])
        np.testing.assert_array_equal(own, out)


@pytest.mark.parametrize(
    ("rank", "place", "array", "error"),
    [
        (2, 1, np.empty((5, 4), np.float32), "two_stages: w1: rank 2 has no block of f32[K, N] on mesh(x=2 of ranks 0, 1); pass None"),
        (0, 0, None, "two_stages: x: is None, but rank 0 has a block of f32[M@x, K] on mesh(x=2 of ranks 0, 1); pass the block"),
        (
            1,
            0,
            np.empty((4, 5), np.float32),
            "two_stages: x: rank 1 passes [4, 5], and rank 0 [3, 5]; pass blocks of one array f32[M@x, K] on mesh(x=2 of ranks 0, 1)",
        ),
    ],
)
def test_arrays_of_another_rank(rank: int, place: int, array: Array | None, error: str) -> None:
    def call(own: int) -> Any:
        arrays = local(own)
        if own == rank:
            arrays[place] = array
        return STAGES(*arrays)

    assert error in on_ranks(call)[rank]


def test_sizes_that_local_arrays_do_not_determine() -> None:
    """A rank that is a process knows only the sizes of its arguments. The caller must state all other sizes."""
    host = lowered(FUSION)
    target = find_target("cpu")
    arguments = Arguments(host, target, rank=2, device=CPU_DEVICE, native_table=list, verifies_calls=False, windows=Windows())
    nothing = BoundInputs(host, target, {})
    with pytest.raises(ArgumentError, match=r"^two_stages: sizes=: the size M is missing; pass its global value$"):
        arguments.global_shapes(arguments.check_call(nothing, local(2), None, None, None))
    taken = arguments.check_call(nothing, local(2), None, None, {"M": 6})
    assert (taken.shapes, arguments.global_shapes(taken)) == (((), (), (4, 5)), ((6, 5), (5, 4), (4, 5)))
