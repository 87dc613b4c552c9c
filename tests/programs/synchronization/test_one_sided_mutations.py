"""Each put, get, signal and wait is necessary, and so are its peer, position, signal number and count.

The check rejects each mutant that is not known to be correct. For two small programs, some schedule of the CPU device fails too. The
proof of order does not cover values, so no mutant changes the position from which a put or get reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from attention_cases import keys_in_a_loop
from compiled_fusions import compiled, fusion_of, integer_arrays
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.check.check import check
from hostweave.check.sizes import minimal_sizes
from hostweave.host_ir import ir, tree
from hostweave.host_ir.expr import Const
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import seeded
from hostweave.types.size import Size

SEEDS = 60


def changes_of(host: HostProgram, i: tree.Instruction) -> Iterator[tuple[str, tree.Instruction | tree.Body]]:
    if isinstance(i, ir.OneSided):
        yield "dropped", ()
        yield "twice", (i, i)
        yield "to another peer", replace(i, peer=(i.peer + 1) % host.channel(i.channel).size)  # type: ignore[call-arg]
    if isinstance(i, ir.Signalled):
        yield "under another number", replace(i, signal=63)  # type: ignore[call-arg]
    if isinstance(i, ir.Put | ir.Get):
        less = [ir.Slice(f"{name}_less", name, 0, Size(1), Const(0)) for name in (i.src, i.dst)]
        yield "of fewer elements", (*less, replace(i, src=f"{i.src}_less", dst=f"{i.dst}_less"))
    if isinstance(i, ir.Fork | ir.Join | ir.Record | ir.Wait):
        yield "dropped", ()


def mutants(host: HostProgram) -> Iterator[tuple[str, HostProgram]]:
    """Yields a description and a program for each mutant. One instruction of the one-sided communication is dropped, repeated or
    changed, or one synchronisation of streams is dropped."""
    walked = list(tree.walk(host.body))
    views = {name: number for number, i in enumerate(walked) for name in tree.names(i, "view")}
    for number, i in enumerate(walked):
        for what, new in changes_of(host, i):
            yield f"{i.lines()[0]}: {what}", replace(host, body=tree.edited(host.body, {number: new}))
        for name in (i.dst,) if isinstance(i, ir.Put | ir.Get) else ():
            while name in views:  # A put writes to a view on the peer, and a get to a view on this rank.
                view = walked[views[name]]
                where = "start" if isinstance(view, ir.Slice) else "index" if isinstance(view, ir.Select | ir.Chunk) else ""
                if where and getattr(view, where) != Const(0):
                    elsewhere = tree.edited(host.body, {views[name]: replace(view, **{where: Const(0)})})
                    yield f"{i.lines()[0]}: at another place", replace(host, body=elsewhere)
                (name, *_) = tree.names(view, "alias")


def sizes_for(host: HostProgram) -> dict[str, int]:
    """Sizes for which a block has several rows. If uneven shards are allowed, the last block has fewer rows."""
    return {name: 2 * least - (name in host.uneven) for name, least in minimal_sizes(host).items()}


def is_accepted(mutant: HostProgram) -> bool:
    try:
        check(mutant, sizes_for(mutant))
    except ProgramError:
        return False
    return True


def harmless(host: HostProgram, mutant: HostProgram) -> bool:
    """Returns True if the check accepts a mutant with right results. Fails if the check accepts a mutant with wrong results."""
    if not is_accepted(mutant):
        return False
    arrays = integer_arrays(host, sizes_for(host), seed=0)
    for want, got in zip(interpret(host, arrays), interpret(mutant, arrays), strict=True):
        for output in want:
            np.testing.assert_array_equal(got[output], want[output])
    return True


def is_needless(what: str) -> bool:
    """True if the mutant is correct. Other events order the streams, or the mutant only repeats a read."""
    needless = {f"{what}: dropped" for what in ("join peer_copies", "fork comm", "join comm")}
    return what in needless or (what.startswith("get ") and "twice" in what)


LOOPS = ("ag_matmul_put", "ag_pieces_put", "ag_matmul_pull", "matmul_rs_put", "mlp_put")
WHOLLY = ("ag_matmul_ring", "matmul_rs_ring", "matmul_ar", "two_layers", "stages")


SLOW = [pytest.param(name, (), marks=pytest.mark.slow) for name in ("exchanges", "uneven")]


@pytest.mark.parametrize(("name", "windows"), [*((name, ()) for name in (*LOOPS, *WHOLLY)), ("ag_matmul_put", ("x",)), *SLOW])
def test_every_instruction_is_needed(name: str, windows: tuple[str, ...]) -> None:
    """Every mutant is rejected, except mutants that are known to be correct. Also covers arrays in windows, which the caller may write
    before and after a call."""
    host = lower(fusion_of(name, 3, 3, hw.bf16), Options(streams=4, transport="auto" if name in LOOPS else "one_sided", windows=windows))
    assert host.windows == windows
    assert [what for what, mutant in mutants(host) if harmless(host, mutant) and not is_needless(what)] == []


def test_every_instruction_is_needed_for_keys_in_a_loop() -> None:
    """Causal attention skips the blocks of later ranks, so these blocks are not transferred."""
    host = lower(keys_in_a_loop(3, "put", hw.bf16), Options())
    (get,) = (i for i in tree.walk(host.body) if isinstance(i, ir.Get))
    assert any(str(i.condition) == "%p < rank.x" and get in i.body for i in tree.walk(host.body) if isinstance(i, ir.If))
    assert [what for what, mutant in mutants(host) if harmless(host, mutant) and not is_needless(what)] == []


def weights(is_computed: bool, sharded: hw.TensorType = hw.f32["K@dp", "K"]) -> hw.Fusion:
    @hw.fusion(mesh=hw.Mesh(dp=3), x=hw.f32["M@dp", "K"], w=hw.f32["K", "K"], v=sharded)
    def weights(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        v = hw.relu(v) if is_computed else v
        return hw.matmul(hw.matmul(x, w), hw.reshard(v, "K", "K").named("whole"))

    return weights


@pytest.mark.parametrize("alternative", ["put(1)", "get(1)"])
def test_every_instruction_is_needed_for_an_asynchronous_gather(alternative: str) -> None:
    host = lower(weights(alternative == "get(1)"), Options(sizes={"M": 3072, "K": 3072}, choices={"@weights %whole": alternative}))
    assert " peer" in str(host)
    assert [what for what, mutant in mutants(host) if harmless(host, mutant) and not is_needless(what)] == []


@pytest.mark.parametrize("alternative", ["put(3)", "get(3)", "all_gather(3)"])
def test_every_instruction_is_needed_for_products_by_shards(alternative: str) -> None:
    """Only the first iteration of the loop uses the local shard. Later iterations must wait for arriving shards."""
    transport = "two_sided" if alternative == "all_gather(3)" else "auto"
    options = Options(sizes={"M": 3072, "K": 3072}, choices={"@weights %whole": alternative}, transport=transport)
    host = lower(weights(alternative == "get(3)", hw.f32["K", "K@dp"]), options)
    assert any(isinstance(i, ir.Choose) for i in tree.walk(host.body))
    assert [what for what, mutant in mutants(host) if harmless(host, mutant) and not is_needless(what)] == []


def test_every_instruction_is_needed_for_consecutive_gathers() -> None:
    """The caller's stream copies the local shard during the transfer. Another gather follows."""

    @hw.fusion(mesh=hw.Mesh(dp=3), x=hw.f32["M@dp", "K"], u=hw.f32["K@dp", "K"], v=hw.f32["K@dp", "K"])
    def weights(x: hw.Tensor, u: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        first = hw.matmul(x, hw.reshard(u, "K", "K").named("first"))
        return hw.matmul(first, hw.reshard(v, "K", "K").named("whole"))

    choices = {"@weights %whole": "put(1)", "@weights %first": "put(1)"}
    host = lower(weights, Options(sizes={"M": 3072, "K": 3072}, choices=choices))
    assert "\n  copy %u -> " in str(host)
    assert [what for what, mutant in mutants(host) if harmless(host, mutant) and not is_needless(what)] == []


# --- by schedules of the CPU device -----------------------------------------------------------------------------------


HEAD = "host @exchange(%x: f32[M@x, 4]) -> (%y: f32[M@x, 4]) mesh(x=3) channels(x: x one_sided) streams(a[1]) "
BY = {
    "put": """{
  %w = allocate_window f32[M/3, 4]
  fork a
  stream a[0] {
    signal 0 at (rank.x + 1) % 3 that %w is free on x
    wait_signal 0 from (rank.x + 2) % 3 until %w is free on x
    put %x -> %w at (rank.x + 2) % 3 signal 1 on x
    wait_signal 1 from (rank.x + 1) % 3 until %w is free on x
    copy %w -> %y
  }
  join a
}
""",
    "get": """{
  %w = allocate_window f32[M/3, 4]
  copy %x -> %w
  fork a
  stream a[0] {
    signal 0 at (rank.x + 2) % 3 that %w is free on x
    wait_signal 0 from (rank.x + 1) % 3 until %w is free on x
    get %w at (rank.x + 1) % 3 -> %y on x
    signal 1 at (rank.x + 1) % 3 that %w is free on x
    wait_signal 1 from (rank.x + 2) % 3 until %w is free on x
  }
  join a
}
""",
}
CALLS = 3  # number of calls in flight


def fails(program: hw.Program, host: HostProgram, seed: int) -> bool:
    """True if the schedule of `seed` reveals an error: a deadlock, a missing dependency, or a wrong result."""
    calls = [integer_arrays(host, {"M": 6}, number) for number in range(CALLS)]
    with seeded(seed, check_dependencies=seed % 2 == 0):
        try:
            results = program.run_in_flight(calls, poison=True)
        except ExecutionError:
            return True
    want = [np.roll(arrays["x"], -len(arrays["x"]) // 3, 0) for arrays in calls]
    return not all(np.array_equal(np.concatenate(got), each) for got, each in zip(results, want, strict=True))


@pytest.mark.parametrize("by", ["put", pytest.param("get", marks=pytest.mark.slow)])
def test_mutants_that_the_check_rejects_fail_in_a_schedule(by: str) -> None:
    host = HostProgram.parse(HEAD + BY[by])
    check(host)
    assert not any(fails(compiled(host), host, seed) for seed in range(SEEDS))
    for what, mutant in mutants(host):
        if not is_accepted(mutant):
            program = hw.compile(mutant, options=Options(check=False))
            assert any(fails(program, host, seed) for seed in range(SEEDS)), what
            program.close()
