"""Programs of benchmarks can be lowered and emitted without a GPU. CI does not run the benchmarks. All programs except those of `comm` and
`overlap` are also checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from benchmark_files import benchmark

import hostweave as hw
from hostweave.base.paths import BENCHMARKS
from hostweave.types.machine import H200

RANKS = 2
ON_CPUS = {"compiler", "cpu_matmul", "host_time"}  # Parts of these benchmarks run without a GPU.


def compiled(fusion: Any, **options: Any) -> hw.Program:
    return hw.compile(fusion, target="cuda", options=hw.Options(machine=H200, **options))


def attention(module: Any) -> Iterator[hw.Program]:
    for made in (module.attention_of, module.gradients_of, module.with_lse_of):
        yield compiled(made(*module.HEADS[1]))
    yield from map(compiled, module.fusions_over_ranks().values())


def comm(module: Any) -> Iterator[hw.Program]:
    for name in module.COMMUNICATIONS:
        yield hw.compile(hw.HostProgram.parse(module.text_of(name, RANKS)), target="cuda", options=hw.Options(check=False))


def decode(module: Any) -> Iterator[hw.Program]:
    module.BLOCKS = 2
    yield module.program_of(module.TOGETHER, RANKS, machine=H200)


def few_rows(module: Any) -> Iterator[hw.Program]:
    for is_gated in (False, True):
        yield module.program_of(2, 64, 128, is_gated)


def fp8(module: Any) -> Iterator[hw.Program]:
    for scaling, (k, n) in {"tensor": ("K", "N"), "row": ("K", "N"), "block": (256, 512)}.items():
        yield module.product_of(scaling, k, n)
    for dtype in (module.OURS, module.BF16):
        yield compiled(module.layer(RANKS, 2048, dtype))
        yield compiled(module.decoding(16, dtype))


def fsdp(module: Any) -> Iterator[hw.Program]:
    module.LAYERS = 2
    yield module.compiled_for(RANKS, "rows", is_called=True, machine=H200)
    module.LAYERS = 1
    for layout in ("rows", "columns", "rows of transposes"):
        yield module.compiled_for(RANKS, layout, machine=H200)
    yield module.compiled_for(RANKS, "rows", multiplies=False, machine=H200)


def graph_progress(module: Any) -> Iterator[hw.Program]:
    module.decode.BLOCKS = module.small_all_reduce.STEPS = 2
    yield from (program for program, _ in islice(module.programs_of(RANKS), 1, None))


def kernels(module: Any) -> Iterator[hw.Program]:
    for case in module.CASES:
        yield compiled(module.fusion_of(case, *module.WIDTHS["8B"]))


def layer(module: Any) -> Iterator[hw.Program]:
    for case in module.TOGETHER[:4:2]:
        yield module.program_of(case, RANKS, "auto")
    yield module.program_of(module.ALONE[0], 1, "off")


def model(module: Any) -> Iterator[hw.Program]:
    module.LAYERS = 1
    c = module.Config(num_hidden_layers=1)
    for attends in (False, True):
        yield module.parts_of_decode(c, module.inputs_of_parts(c, attends))


def moe(module: Any) -> Iterator[hw.Program]:
    for is_gradient, is_turned in ((False, True), (False, False), (True, False)):
        yield module.product_of(8, 64, 128, is_gradient, is_turned)
    yield compiled(module.dispatched_and_combined(RANKS))
    yield compiled(module.dispatched_and_combined(RANKS, 8))
    yield compiled(module.exchanges_alone(RANKS, 1, 8))
    yield module.layer_of("moe_training", machine=H200)


def overlap(module: Any) -> Iterator[hw.Program]:
    for case in module.CASES[1], module.CASES[8]:
        programs = module.alternatives_of(case, RANKS, machine=H200, check=False)
        assert case.kind == "rs" or programs["put(1)"].choices[0].chosen.name == "put(1)"  # put(1) copies without a loop.
        yield from programs.values()


def sequence_parallel(module: Any) -> Iterator[hw.Program]:
    yield compiled(module.fusion_of(RANKS), sizes=module.sizes_of(8192))


def small_all_reduce(module: Any) -> Iterator[hw.Program]:
    module.STEPS = 2
    for transport in ("auto", "two_sided"):
        yield module.program_of(RANKS, transport)


def tune(module: Any) -> Iterator[hw.Program]:
    yield module.program_of(64, {"w_0": hw.bf16[64, 128], "w_1": hw.bf16[64, 128]}, tune=True)


PROGRAMS: dict[str, Callable[[Any], Iterator[hw.Program]]] = {
    one.__name__: one
    for one in (
        *(attention, comm, decode, few_rows, fp8, fsdp, graph_progress, kernels, layer, model, moe, overlap),
        *(sequence_parallel, small_all_reduce, tune),
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_emitted(name: str) -> None:
    for program in PROGRAMS[name](benchmark(name)):
        assert f"namespace programs::{program.name}" in program.sources["program.h"]


def test_every_benchmark_is_here() -> None:
    """PROGRAMS has all benchmarks that call `hw.compile` and need GPUs, except `predictions`, which runs programs of other benchmarks.
    Benchmarks that compile PyTorch modules are not in PROGRAMS, because they need PyTorch and take minutes."""
    compile_fusions = {path.stem for path in BENCHMARKS.glob("*.py") if re.search(r"\bhw\.compile\(", path.read_text())}
    assert compile_fusions - ON_CPUS - {"predictions"} == {*PROGRAMS}


def test_every_benchmark_prints_versions() -> None:
    """Each benchmark prints versions, or calls `times_on_ranks`, which prints versions."""
    prints = re.compile(r"\b(?:print_machine|print_tools|times_on_ranks)\(")
    assert [path.name for path in BENCHMARKS.glob("*.py") if not prints.search(path.read_text())] == []
