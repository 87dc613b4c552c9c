"""Predicted timelines are close to measurements, and follow the order of the program."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from time import process_time
from typing import Any

import pytest
from fusions_from_files import all_fusions, exchange_fusions, more_fusions, one_sided_fusions, pipelines
from measured_on_h200 import GATHER, GATHER_OF_TWO, LAYER, PIPELINE, REDUCE, SCATTER, SCATTER_OF_TWO, WEIGHTS

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.base.paths import BENCHMARKS
from hostweave.cli.programs import load_file, load_program
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.timeline.cost import FIRST_ARRIVAL
from hostweave.timeline.events import COMMUNICATION, COMPUTE, Timeline, length, union, without
from hostweave.types.machine import H200, Machine, Network

Shape = tuple[int, int, int]
EXAMPLES: dict[str, Fusion] = {
    **all_fusions(4),
    **more_fusions(4),
    **one_sided_fusions(4),
    **exchange_fusions(4),
    **pipelines(4),
}


def product(ranks: int, result: tuple[str, str], is_gathered: bool = False, **stream: Any) -> Fusion:
    """Program of a matmul whose rows are gathered, or whose inner dim is sharded."""
    x, w = (hw.bf16["M@x", "K"], hw.bf16["K", "N"]) if is_gathered else (hw.bf16["M", "K@x"], hw.bf16["K@x", "N"])

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=x, w=w)
    def product(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        y = hw.matmul(x if stream or not is_gathered else hw.reshard(x, "M", "K"), w)
        return y.stream("M", **stream) if stream else hw.reshard(y, *result)

    return product


def predicted(fusion: Fusion, sizes: dict[str, int], **options: Any) -> Timeline:
    return hw.compile(fusion, options=hw.Options(machine=H200, check=False, sizes=sizes, **options)).predict(sizes).predicted


# --- measurements -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "measured"), GATHER.items())
def test_predicted_time_of_a_gather_and_a_product(shape: Shape, measured: float) -> None:
    sizes = dict(zip("MKN", shape, strict=True))
    found = predicted(product(8, ("M", "N"), is_gathered=True), sizes, overlap="off")
    assert found.micros / 1e3 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("shape", "measured"), SCATTER.items())
def test_predicted_time_of_a_product_and_a_reduce_scatter(shape: Shape, measured: float) -> None:
    rows, inner, columns = shape
    found = predicted(product(8, ("M@x", "N")), {"M": rows, "K": 8 * inner, "N": columns}, overlap="off")
    assert found.micros / 1e3 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("shape", "measured"), REDUCE.items())
def test_predicted_time_of_a_product_and_an_all_reduce(shape: Shape, measured: float) -> None:
    rows, inner, columns = shape
    found = predicted(product(8, ("M", "N")), {"M": rows, "K": 8 * inner, "N": columns}, overlap="off")
    assert found.micros / 1e3 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("ranks", "measured"), PIPELINE.items())
def test_predicted_time_of_a_pipeline_of_sends(ranks: int, measured: float) -> None:
    fusion = product(ranks, ("M", "N"), is_gathered=True, chunks=ranks, algorithm="p2p")
    found = predicted(fusion, {"M": 8192, "K": 8192, "N": 7168})
    assert found.micros / 1e3 == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("shape", "times"), GATHER_OF_TWO.items())
def test_gathers_of_two_gpus(shape: Shape, times: tuple[int, float, float]) -> None:
    chunks, measured, in_sequence = times
    sizes = dict(zip("MKN", shape, strict=True))
    alone = predicted(product(2, ("M", "N"), is_gathered=True), sizes, overlap="off")
    assert alone.micros / 1e3 == pytest.approx(in_sequence, rel=0.1)
    if chunks:
        loop = predicted(product(2, ("M", "N"), is_gathered=True, chunks=chunks, algorithm="put"), sizes)
        assert loop.micros / 1e3 == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("shape", "times"), SCATTER_OF_TWO.items())
def test_reduce_scatters_of_two_gpus(shape: Shape, times: tuple[int, float, float]) -> None:
    chunks, measured, in_sequence = times
    sizes = {"M": shape[0], "K": 2 * shape[1], "N": shape[2]}
    assert predicted(product(2, ("M@x", "N")), sizes, overlap="off").micros / 1e3 == pytest.approx(in_sequence, rel=0.1)
    if chunks:
        loop = predicted(product(2, ("M@x", "N")), sizes, choices={"@product %y": f"put({chunks})"})
        assert loop.micros / 1e3 == pytest.approx(measured, rel=0.1)


@pytest.mark.extra("torch")
@pytest.mark.parametrize(("tokens", "measured"), LAYER.items())
def test_a_layer_of_two_gpus(tokens: int, measured: float) -> None:
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    benchmark: Any = load_file(BENCHMARKS / "sequence_parallel.py")
    sizes = benchmark.sizes_of(tokens)
    assert predicted(benchmark.fusion_of(2), sizes).micros / 1e3 == pytest.approx(measured, rel=0.1)


@pytest.mark.extra("torch")
def test_sharded_weights_of_two_gpus() -> None:
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    benchmark: Any = load_file(BENCHMARKS / "fsdp.py")
    figures = {"machine": H200, "check": False}
    chosen = benchmark.compiled_for(2, "rows", **figures)

    def by(chunks: int) -> hw.Program:
        choices = {choice.name: one.name for choice in chosen.choices for one in choice.alternatives if one.chunks == chunks}
        program: hw.Program = benchmark.compiled_for(2, "rows", choices=choices, **figures)
        return program

    programs = {
        "layers": benchmark.compiled_for(2, "", **figures),
        "in sequence": benchmark.compiled_for(2, "rows", overlap="off", **figures),
        "by kernels": by(0),
        "by copies": by(1),
    }
    found = {name: program.predict({"M": 2 * benchmark.ROWS}).predicted.micros / 1e3 for name, program in programs.items()}
    assert found == pytest.approx(WEIGHTS, rel=0.1)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("result", [("M@x", "N"), ("M", "N")])
def test_the_timeline_agrees_with_the_cost_model(ranks: int, result: tuple[str, str]) -> None:
    """The cost model simulates the matmuls and transfers of one loop. The timeline simulates all operations."""
    sizes = {"M": 8192, "K": 3584 * ranks, "N": 8192}
    made = hw.compile(product(ranks, result), options=hw.Options(machine=H200, check=False, sizes=sizes))
    assert made.predict(sizes).predicted.micros == pytest.approx(made.choices[0].chosen.micros, rel=0.05)


# --- the order of the program -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_event_starts_before_its_dependencies_end(name: str) -> None:
    found = hw.compile(EXAMPLES[name], options=hw.Options(check=False)).predict().predicted
    events = found.events
    for event in events:
        assert 0 <= event.start <= event.end <= found.micros
        assert all(events[earlier].end <= event.start + 1e-6 or event.kind == "waiting" for earlier in event.after)
        assert all(events[other].start <= event.end for other in event.meets)
    by_stream: dict[tuple[int, str], list[Any]] = {}
    for event in events:
        by_stream.setdefault((event.rank, event.stream), []).append(event)
    for one_stream in by_stream.values():
        assert all(one.end <= then.start + 1e-6 for one, then in pairwise(one_stream))
    for total in found.totals:
        assert total.busy + total.exposed + total.idle == pytest.approx(found.micros)
        assert min(total.busy, total.exposed, total.idle + 1e-6, total.communication - total.exposed + 1e-6) >= 0
    path = [events[number] for number in found.critical_path]
    assert path[-1].end == found.micros
    assert all(one.end <= then.end for one, then in pairwise(path))


def test_all_bytes_that_are_sent_are_counted() -> None:
    sizes = {"M": 1024, "K": 2048, "N": 512}
    whole = 2 * 1024 * 2048
    gathered = predicted(product(8, ("M", "N"), is_gathered=True), sizes, overlap="off")
    assert {total.sent for total in gathered.totals} == {whole * 7 // 8}
    swapped = predicted(product(8, ("M", "N"), is_gathered=True, chunks=8, algorithm="p2p"), sizes)
    assert {total.sent for total in swapped.totals} == {whole * 7 // 8}
    put = predicted(product(8, ("M", "N"), is_gathered=True, chunks=8, algorithm="put"), sizes)
    assert {total.sent for total in put.totals} == {whole * 7 // 8}


def test_communication_is_exposed_where_nothing_computes() -> None:
    sizes = {"M": 8192, "K": 8192, "N": 7168}
    alone = predicted(product(2, ("M", "N"), is_gathered=True), sizes, overlap="off").totals[0]
    assert alone.exposed == alone.communication > 100
    hidden = predicted(product(2, ("M", "N"), is_gathered=True, chunks=2, algorithm="put"), sizes).totals[0]
    assert hidden.exposed < 0.1 * hidden.communication


def test_matmuls_during_communication_kernels_take_longer() -> None:
    sizes = {"M": 8192, "K": 8192, "N": 7168}
    found = predicted(product(8, ("M", "N"), is_gathered=True, chunks=8, algorithm="p2p"), sizes)
    times = [event.micros for event in found.of_rank(0) if event.kind == COMPUTE]
    assert times[0] > 1.5 * times[-1]  # Nothing overlaps with the last matmul.


def test_names_are_the_users() -> None:
    found = predicted(product(2, ("M", "N"), is_gathered=True), {"M": 64, "K": 64, "N": 64}, overlap="off")
    assert [(event.name, event.kind) for event in found.of_rank(0)] == [("all_gather x_gathered", COMMUNICATION), ("matmul y", COMPUTE)]
    assert all(event.source.startswith("test_predict.py:") for event in found.events)


def test_memory_is_in_use_from_allocate_to_deallocate() -> None:
    """x and y have 4 MiB each. The 4 MiB of a are needed until b is computed."""
    host = """host @f(%x: f32[M, M]) -> (%y: f32[M, M]) mesh() {
  %a = allocate f32[M, M]
  copy %x -> %a
  %b = allocate f32[M, M]
  copy %a -> %b
  deallocate %a
  copy %b -> %y
  deallocate %b
}
"""
    found = hw.compile(HostProgram.parse(host), options=hw.Options(machine=H200)).predict({"M": 1024}).predicted
    copies = [event.start for event in found.events]
    mb = 4 * 1024 * 1024
    assert found.memory[0] == (0.0, 2 * mb)
    assert [held // mb for _, held in found.memory] == [2, 3, 4, 3, 2]
    assert [at for at, _ in found.memory[1:]] == [*copies, found.micros]
    assert found.peak_bytes == 4 * mb
    assert f"memory of rank 0: {4 * mb:,} bytes at most" in str(found)


def test_memory_of_a_rank_without_the_output() -> None:
    mesh = hw.Mesh(x=4)
    first, second = mesh.ranks([0, 1], x=2), mesh.ranks([2, 3], x=2)
    fusion = hw.fusion(mesh=mesh, x=hw.f32["M"].on(first))(lambda x: hw.reshard(x * 2, "M", mesh=second))
    found = hw.compile(fusion, options=hw.Options(machine=H200, check=False)).predict({"M": 1024}).predicted
    assert found.peak_bytes == 2 * 4 * 1024  # x and x * 2


def test_spans() -> None:
    assert without([(0, 10), (20, 30)], [(2, 3), (8, 22), (29, 40)]) == [(0, 2), (3, 8), (22, 29)]
    assert length([(0, 2), (3, 8)]) == 7
    assert union(()) == []


def times_of(fusion: Fusion, sizes: dict[str, int]) -> dict[str, float]:
    return {event.name: event.micros for event in predicted(fusion, sizes).of_rank(0)}


def test_the_time_of_a_sort_is_that_of_its_steps() -> None:
    """One thread block sorts 2048 elements in 66 steps, which took 32 us on H200. Other kernels can use all multiprocessors except one."""

    @hw.fusion(mesh=hw.Mesh(x=2), i=hw.i32["M"], x=hw.bf16["N@x", "N"])
    def sorted_beside(i: hw.Tensor, x: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return hw.argsort(i), hw.reshard(x, "N", "N")

    sizes = {"M": 2048, "N": 4096}
    (alone,) = times_of(hw.fusion(i=hw.i32["M"])(lambda i: hw.argsort(i)), {"M": 2048}).values()
    assert alone == pytest.approx(32, rel=0.1)
    assert any(micros == pytest.approx(alone, rel=0.1) for micros in times_of(sorted_beside, sizes).values())


def test_repeated_rows_beyond_the_cache_are_read_again() -> None:
    """If a table exceeds the cache, a row that is read repeatedly is read from memory each time. On H200, 65536 reads of the 8192 rows of a
    117 MB table take 381 us."""
    take = hw.fusion(x=hw.bf16["T", 7168], i=hw.i64["I"])(lambda x, i: hw.take(x, i, axis=0))
    (micros,) = times_of(take, {"T": 8192, "I": 65536}).values()
    assert micros == pytest.approx(381, rel=0.1)
    (once,) = times_of(take, {"T": 256, "I": 65536}).values()
    assert once == pytest.approx(1e6 * (2 * 7168 * 65536 + 2 * 7168 * 256 + 8 * 65536) / H200.memory, rel=0.05)


def test_grouped_matmuls_run_at_the_speed_of_their_kernels() -> None:
    """On H200, 8 groups of 1024 rows at Mixtral's shapes take 1.36 to 1.48 ms. The gradient of the matrices takes 1.57 to 1.80 ms."""
    types = {"x": hw.bf16["T", "K"], "w": hw.bf16[8, "K", "N"], "e": hw.i32[8]}
    product = hw.fusion(**types)(lambda x, w, e: hw.grouped_matmul(x, w, e))
    gradient = hw.fusion(x=hw.bf16["T", "K"], y=hw.bf16["T", "N"], e=hw.i32[8])(lambda x, y, e: hw.grouped_matmul(x.T, y, e))
    sizes = {"T": 8192, "K": 14336, "N": 4096}
    assert max(times_of(product, sizes).values()) / 1e3 == pytest.approx(1.42, rel=0.05)
    assert max(times_of(gradient, sizes).values()) / 1e3 == pytest.approx(1.69, rel=0.07)


def test_parts_of_a_product_of_few_columns_are_added_after_it() -> None:
    """If a product has few tiles, its inner dim is split, and a kernel adds the parts. On H200, 128 x 14336 x 4096 takes 38 us."""
    product = hw.fusion(x=hw.bf16["M", "K"], w=hw.bf16["K", "N"])(lambda x, w: hw.matmul(x, w))
    (micros,) = times_of(product, {"M": 128, "K": 14336, "N": 4096}).values()
    assert micros == pytest.approx(38, rel=0.1)


# --- other machines and meshes ----------------------------------------------------------------------------------------


def test_a_slower_machine_takes_longer() -> None:
    made = hw.compile(product(2, ("M", "N")), options=hw.Options(check=False, machine=H200))
    sizes = {"M": 4096, "K": 4096, "N": 4096}
    slow = replace(H200, name="slow", flops=H200.flops / 2)
    report = made.predict(sizes, machine=slow)
    assert report.predicted.micros > 1.2 * made.predict(sizes).predicted.micros
    assert "from the figures of slow" in str(report)


def test_another_number_of_ranks() -> None:
    made = hw.compile(product(2, ("M", "N")), options=hw.Options(check=False, machine=H200))
    sizes = {"M": 4096, "K": 4096, "N": 4096}
    assert made.predict(sizes, ranks=8).predicted.ranks == tuple(range(8))
    assert made.predict(sizes, ranks={"x": 4}).predicted.mesh == "mesh(x=4)"
    with pytest.raises(ProgramError, match="has no axis dp; its axes: x"):
        made.predict(sizes, ranks={"dp": 4})


def test_ranks_of_a_mesh_of_two_axes_need_names() -> None:
    fusion = hw.fusion(mesh=hw.Mesh(dp=2, tp=2), x=hw.f32["M@dp", "N@tp"])(lambda x: -x)
    made = hw.compile(fusion, options=hw.Options(check=False))
    with pytest.raises(ProgramError, match=r"has 2 axes; give the size of each by name, as in ranks=\{'dp': 2, 'tp': 2\}"):
        made.predict(ranks=8)
    assert len(made.predict(ranks={"dp": 4}).predicted.ranks) == 8


def test_sizes_that_the_program_does_not_have() -> None:
    made = hw.compile(product(2, ("M", "N")), options=hw.Options(check=False))
    with pytest.raises(ArgumentError, match="predict: there is no size named Q; the sizes of the program: M, K, N"):
        made.predict({"Q": 8})


def test_a_program_on_some_ranks_stays_on_its_mesh() -> None:
    name, fusion = next(iter(pipelines(4).items()))
    with pytest.raises(ProgramError, match=f"{name}: cannot be on mesh"):
        hw.compile(fusion, options=hw.Options(check=False)).predict(ranks={fusion.mesh.axes[0][0]: 8})


# --- hosts ------------------------------------------------------------------------------------------------------------

NETWORK = Network(bandwidth=45e9, latency=5e-6, source="8 ports of 400 Gb/s a host")
HOSTS = replace(H200, network=NETWORK)
SMALL_HOSTS = replace(H200, network=Network(bandwidth=1e9, latency=5e-6, source="a slow network", ranks=4))


def test_hosts_are_joined_by_their_network() -> None:
    """16 ranks are on two hosts. Each host receives half of the tensor from the other host, through 8 network ports."""
    size, sizes = 2 * 65536 * 8192, {"M": 65536, "K": 8192, "N": 64}
    found = predicted_on(16, sizes, HOSTS)
    crossing, inside = 5e-6 + size / 2 / 8 / 45e9, H200.link("collective", 8).seconds(size * 15 / 16)
    assert gather(found) == pytest.approx(1e6 * (FIRST_ARRIVAL + max(crossing, inside)))
    slow = replace(H200, network=replace(NETWORK, bandwidth=4.5e9))
    assert gather(predicted_on(16, sizes, slow)) == pytest.approx(1e6 * (FIRST_ARRIVAL + 5e-6 + size / 2 / 8 / 4.5e9))
    assert "and 4.5 GB/s between hosts (8 ports of 400 Gb/s a host)" in predicted_on(16, sizes, slow).basis
    assert gather(predicted_on(8, sizes, slow)) == gather(predicted_on(8, sizes, H200))  # The ranks are on one host.


def gather(timeline: Timeline) -> float:
    return next(event.micros for event in timeline.events if event.kind == COMMUNICATION)


def predicted_on(ranks: int, sizes: dict[str, int], machine: Machine) -> Timeline:
    made = hw.compile(product(2, ("M", "N"), is_gathered=True), options=hw.Options(check=False, overlap="off"))
    return made.predict(sizes, ranks=ranks, machine=machine).predicted


def test_an_axis_within_hosts_does_not_use_the_network() -> None:
    """The 8 ranks along `tp` are on one host. The 2 ranks along `dp` are on different hosts."""
    x = hw.bf16["M@dp", "N@tp"]
    sizes = {"M": 8192, "N": 8192}
    slow = replace(H200, network=replace(NETWORK, bandwidth=1e9))
    times = {}
    for axis, result in (("tp", ("M@dp", "N")), ("dp", ("M", "N@tp"))):
        fusion = hw.fusion(mesh=hw.Mesh(dp=2, tp=8), x=x)(lambda x, result=result: hw.reshard(x, *result))
        made = hw.compile(fusion, options=hw.Options(check=False, machine=slow))
        times[axis] = gather(made.predict(sizes).predicted)
    assert times["tp"] == gather(predicted_gather(8, sizes))
    assert times["dp"] == pytest.approx(1e6 * (FIRST_ARRIVAL + 5e-6 + 8192 * 8192 * 2 / 8 / 2 / 1e9))


def predicted_gather(ranks: int, sizes: dict[str, int]) -> Timeline:
    fusion = hw.fusion(mesh=hw.Mesh(tp=ranks), x=hw.bf16["M", "N@tp"])(lambda x: hw.reshard(x, "M", "N"))
    return hw.compile(fusion, options=hw.Options(check=False, machine=H200)).predict({**sizes, "M": sizes["M"] // 2}).predicted


def test_more_ranks_than_a_host_has_need_a_network() -> None:
    made = hw.compile(product(2, ("M", "N")), options=hw.Options(check=False, machine=H200))
    with pytest.raises(
        ProgramError, match=r"mesh\(x=16\) has more ranks than one host has GPUs, and the figures of NVIDIA H200 have no network"
    ):
        made.predict(ranks=16)
    with pytest.raises(ProgramError, match=r"Network: bandwidth=0\.0 is not a number above 0"):
        Network(0.0, 1e-6, "none")


def test_nothing_is_put_to_another_host() -> None:
    sizes = {"M": 8192, "K": 65536, "N": 8192}
    made = hw.compile(product(8, ("M@x", "N")), options=hw.Options(check=False, machine=H200, sizes=sizes))
    assert any(event.name.startswith("put") for event in made.predict(sizes).predicted.events)
    assert not any(event.name.startswith("put") for event in made.predict(sizes, ranks=16, machine=HOSTS).predicted.events)
    assert not any(event.name.startswith("put") for event in made.predict(sizes, machine=SMALL_HOSTS).predicted.events)
    own = hw.compile(product(8, ("M@x", "N")), options=hw.Options(check=False, machine=SMALL_HOSTS, sizes=sizes))
    assert "only two-sided transport: the ranks are on several hosts" in own.explain()
    stated = hw.compile(product(8, ("M", "N"), True, chunks=8, algorithm="put"), options=hw.Options(check=False, machine=H200))
    with pytest.raises(ProgramError, match="predict: ranks 0 and 7 are on different hosts, and cannot access each other's memory"):
        stated.predict(sizes, machine=SMALL_HOSTS)
    doubled = hw.fusion(mesh=hw.Mesh(x=8), x=hw.bf16["M", "K@x"])(lambda x: 2 * hw.sum(x, 1))
    small = hw.compile(doubled, options=hw.Options(check=False, machine=H200))
    assert any(kernel.exchanges for kernel in small.host.kernels)
    with pytest.raises(ProgramError, match="predict: ranks 0 and 7 are on different hosts"):
        hw.compile(small.host, options=hw.Options(check=False)).predict({"M": 8, "K": 8}, machine=SMALL_HOSTS)


def test_choices_depend_on_the_network() -> None:
    """The times of `explain` are those of the timeline, also for a gather along an axis that spans hosts."""
    sizes = {"M": 65536, "K": 8192, "N": 8192}
    made = hw.compile(product(8, ("M", "N"), True), options=hw.Options(check=False, machine=SMALL_HOSTS, sizes=sizes))
    (choice,) = made.choices
    assert choice.chosen.name == "none"
    assert made.predict().predicted.micros == pytest.approx(choice.chosen.micros, rel=0.01)
    assert choice.chosen.micros > 1e6 * 2 * 65536 * 8192 / 2 / 4 / 1e9


def test_a_choice_of_no_loop_holds_on_other_ranks() -> None:
    sizes = {"M": 8192, "K": 65536, "N": 8192}
    fusion = product(8, ("M@x", "N"))
    (choice,) = hw.compile(fusion, options=hw.Options(check=False, machine=H200, sizes=sizes)).choices
    made = hw.compile(fusion, options=hw.Options(check=False, machine=H200, sizes=sizes, choices={choice.name: "none"}))
    assert choice.chosen.name != "none"
    for ranks in (1, 4, 8):
        assert not any(event.name.startswith("put") for event in made.predict(ranks=ranks).predicted.events)


def test_a_network_is_kept_with_the_figures() -> None:
    assert Machine.from_json(HOSTS.to_json(), "figures") == replace(HOSTS, refused=())


def test_1024_ranks_take_less_than_30_seconds_of_cpu_time() -> None:
    llama = load_program("transformer:llama_sp")
    made = hw.compile(llama, options=hw.Options(check=False, machine=H200))
    begin = process_time()
    report = made.predict({"B": 1024, "S": 2048, "E": 8192, "F": 28672}, ranks={"dp": 128, "tp": 8}, machine=HOSTS)
    assert len(report.html()) > 10_000
    assert len(str(report).splitlines()) == 20
    assert process_time() - begin < 30
    assert len(report.predicted.ranks) == 1024
    assert len({total.busy for total in report.predicted.totals}) == 1  # All ranks have equal work.


def test_a_group_of_1024_ranks_takes_less_than_10_seconds_of_cpu_time() -> None:
    """In the reduce-scatter, each rank receives from all other ranks."""
    made = hw.compile(product(2, ("M@x", "N"), is_gathered=False), options=hw.Options(check=False, machine=H200))
    begin = process_time()
    found = made.predict({"M": 2**19, "K": 2**13, "N": 2**13}, ranks=1024, machine=HOSTS).predicted
    assert process_time() - begin < 10
    assert {total.sent for total in found.totals} == {2 * 2**19 * 2**13 * 1023 // 1024}
