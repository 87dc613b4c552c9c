"""Programs in which ranks access each other's memory, on 1 to 9 ranks and in random schedules."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_fusions import ONE_SIDED, compiled, expect, fusion_of, integer_arrays, random_arrays, sizes_of, with_transports
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.check.sizes import minimal_sizes
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import seeded
from hostweave.types.tensor import block_of

WHOLLY = (
    "ag_matmul_ring",
    "matmul_rs_ring",
    "matmul_ar",
    "matmul_ar_ag",
    "ag_matmul_flat_chunked",
)  # With transport peer or one_sided, all communication of these programs uses windows.
RUNS = [("mlp_put", ranks) for ranks in (1, 2, 3, 4, 8)] + [
    ("ag_matmul_ring", 4),
    ("matmul_rs_ring", 3),
    ("matmul_ar", 2),
    ("ag_matmul_pull", 2),
    ("ag_matmul_pull", 3),
    ("columns_put", 4),
    ("residual_put", 3),
]


def options_of(name: str, transport: str = "peer") -> Options:
    """Options with the given transport. For programs that use peer by default, "auto" replaces "peer"."""
    return Options(transport=transport if name in WHOLLY or transport != "peer" else "auto")


@pytest.mark.parametrize(("name", "ranks", "transport"), with_transports(RUNS))
def test_matches_numpy(name: str, ranks: int, transport: str) -> None:
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    program = compiled(fusion, options=options_of(name, transport))
    for times in (1, 3, 2):  # The memory grows, and is reused.
        arrays = random_arrays(fusion, sizes_of(fusion, times), seed=times)
        expect(fusion, arrays, program.run(**arrays, ranks=True))
    calls = [integer_arrays(fusion, sizes_of(fusion, times=1), seed) for seed in range(3)]
    for seed in range(8 if ranks < 8 else 2):
        with seeded(seed, check_dependencies=True):
            for arrays, results in zip(calls, program.run_in_flight(calls, poison=True), strict=True):
                expect(fusion, arrays, results, exact=True)


def test_several_programs_on_one_channel() -> None:
    fusions = [fusion_of(name, 3, 3, hw.bf16) for name in ("mlp_put", "ag_matmul_pull")]
    for seed in range(3):
        for fusion in fusions:
            arrays = integer_arrays(fusion, sizes_of(fusion, times=1), seed)
            expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True), exact=True)


def test_other_programs_use_the_channel_of_a_closed_program() -> None:
    fusion = fusion_of("mlp_put", 2, 3, hw.bf16)
    arrays = integer_arrays(fusion, sizes_of(fusion, times=1), 0)
    for _ in range(2):
        program = hw.compile(fusion)
        expect(fusion, arrays, program.run(**arrays, ranks=True), exact=True)
        program.close()


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("name", [*ONE_SIDED, *WHOLLY])
def test_text_and_interpreter_of_one_sided_programs(name: str, ranks: int) -> None:
    fusion = fusion_of(name, ranks, 3, hw.bf16)
    host = lower(fusion, options_of(name))
    check(host)
    assert "two_sided" not in str(host) or name in ONE_SIDED
    assert HostProgram.parse(str(host)) == host
    arrays = integer_arrays(host, {size: 3 * least for size, least in minimal_sizes(host).items()}, seed=0)
    results = [tuple(rank.values()) for rank in interpret(host, arrays)]
    expect(fusion, arrays, [result if len(result) > 1 else result[0] for result in results], exact=True)


@pytest.mark.parametrize("ranks", [2, 4, 8, 9])
def test_one_kernel_adds_received_terms_and_computes_the_consumer(ranks: int) -> None:
    host = lower(fusion_of("residual_put", ranks, 3, hw.bf16), Options())
    launches = [i for i in tree.walk(host.body) if isinstance(i, ir.Launch)]
    assert len(launches) == (1 if ranks <= 8 else 2)  # If there are more than 8 terms, a separate kernel adds the terms.
    assert len(launches[0].srcs) == (ranks + 1 if ranks <= 8 else 2)


def test_blocks_are_sent_one_after_another() -> None:
    """Matmuls before a reduce-scatter are on one stream. Concurrent matmuls would end together, so the first block would be sent late."""
    host = str(lower(fusion_of("mlp_put", 4, 3, hw.bf16), Options()))
    assert [line.split()[1] for line in host.splitlines() if line.startswith("    stream loop")] == ["loop[%i]", "loop[0]"]
    assert (
        host.count("fork loop\n")
        == host.count("join loop\n")
        == host.count("fork loop first 1\n")
        == host.count("join loop first 1\n")
        == 1
    )
    assert "streams(loop[1], peer_copies[1])" in str(lower(fusion_of("matmul_rs_put", 4, 3, hw.bf16), Options()))


@pytest.mark.parametrize(("src", "other"), [("x", "u"), ("u", "x")])
def test_a_put_of_one_of_two_buffers(src: str, other: str) -> None:
    """NCCL's put needs a source in a window. %x is in no window."""
    host = HostProgram.parse(f"""\
host @t(%x: f32[M@x, 4]) -> (%y: f32[M@x, 4]) mesh(x=2) channels(x: x one_sided) {{
  %w = allocate_window f32[M/2, 4]
  %u = allocate_window f32[M/2, 4]
  copy %x -> %u
  %s = choose %{src} if rank.x == 0 else %{other}
  signal 0 at 1 - rank.x that %w is free on x
  wait_signal 0 from 1 - rank.x until %w is free on x
  put %s -> %w at 1 - rank.x signal 0 on x
  wait_signal 0 from 1 - rank.x until %w is written on x
  copy %w -> %y
}}
""")
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    np.testing.assert_array_equal(hw.compile(host).run(x=x), np.roll(x, 2, 0))


# --- errors -----------------------------------------------------------------------------------------------------------


def message_of(fusion: hw.Program | object, **options: object) -> str:
    with pytest.raises(ProgramError) as caught:
        hw.compile(fusion, options=Options(**options))  # type: ignore[arg-type]
    return str(caught.value)


def test_options() -> None:
    with pytest.raises(ProgramError) as caught:
        Options(transport="pigeon")
    assert str(caught.value) == "Options: there is no transport='pigeon'; use one of auto, one_sided, peer, two_sided"
    flat = fusion_of("ag_matmul_flat", 2, 3, hw.bf16)
    assert "x peer" not in hw.compile(flat).host_ir
    for transport in ("peer", "one_sided"):
        assert f"channels(x: x {transport})" in hw.compile(flat, options=Options(transport=transport)).host_ir
    assert message_of(fusion_of("ag_matmul_put", 2, 3, hw.bf16), transport="two_sided").endswith(
        "stream of %y: algorithm='put' is not possible here; the all_gather of %x_gathered can use p2p (by_shard), broadcast (by_shard), "
        "ring (by_shard), all_gather (across_shards); transport='two_sided' has no other algorithm, use transport=\"auto\""
    )
    assert message_of(fusion_of("two_stages_streamed", 4, 3, hw.bf16), transport="one_sided").endswith(
        "stream of %layer: transport='one_sided' is not possible here; the all_reduce of %layer cannot be divided into chunks; "
        "transport='one_sided' has no other algorithm, use transport=\"auto\""
    )
    assert message_of(fusion_of("ag_matmul_broadcast", 4, 3, hw.bf16), transport="one_sided").endswith(
        "stream of %y: algorithm='broadcast' is not possible here; the all_gather of %x_gathered can use put (by_shard), ring (by_shard), "
        "all_gather (across_shards); transport='one_sided' has no other algorithm, use transport=\"auto\""
    )


def test_sums_alone_are_put() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M", "K@x"])
    def largest(x):  # type: ignore[no-untyped-def]
        return hw.reshard(hw.max(x, axis=1), "M@x").stream("M", chunks=2, algorithm="put")

    assert "algorithm='put' is not possible here; the reduce_scatter of %y can use p2p (by_shard)" in message_of(largest)


def test_reference() -> None:
    one, other = (fusion_of(name, 2, 3, hw.bf16) for name in ("ag_matmul_put", "ag_matmul_flat"))
    arrays = integer_arrays(one, sizes_of(one), 0)
    np.testing.assert_array_equal(run_reference(one, arrays)[0], run_reference(other, arrays)[0])


def test_calls_of_each_rank_whose_memory_grows() -> None:
    """Each rank makes its calls separately. When the memory grows, all ranks register the new memory together."""
    fusion = fusion_of("mlp_put", 3, 3, hw.bf16)
    program, provider = compiled(fusion), hw.Threads(3)
    calls = [integer_arrays(fusion, sizes_of(fusion, times), seed=times) for times in (1, 4, 2)]
    want = [run_reference(fusion, arrays)[0] for arrays in calls]

    def call(rank: int) -> None:
        hw.init(provider)
        for arrays, whole in zip(calls, want, strict=True):
            blocks = {v.name: arrays[v.name][block_of(v.type, fusion.mesh, rank, arrays[v.name].shape)] for v in fusion.inputs}
            got = program(**{name: np.ascontiguousarray(block) for name, block in blocks.items()})
            rows = len(whole) // 3
            np.testing.assert_array_equal(np.asarray(got, "f4"), whole[rank * rows : (rank + 1) * rows])

    provider.run(call)
