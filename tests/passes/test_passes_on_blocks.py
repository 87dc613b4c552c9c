"""Passes on programs with blocks. Most passes treat each body as a separate program. Calls agree with the shardings of parameters and
results."""

from __future__ import annotations

import pytest

from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.calls import bodies, joined
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower

LOOP = """\
function @layer(%x: f32[M@x, E], %w: f32[E, E]) {
  %h: f32[M, E] stream(M, 2, ring) = matmul(%x, %w)
  %n: f32[M, E] = negative(%h)
  %y: f32[M@x, E] pinned = reshard(%n)
  return %y
}
"""


def stages(text: str) -> dict[str, str]:
    seen: dict[str, str] = {}
    lower(Fusion.parse(text), Options(), lambda name, stage: seen.update({name: str(stage)}))
    return seen


def body_of(text: str, head: str) -> list[str]:
    """Lines of the body whose first line starts with `head`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(head))
    return [line.strip() for line in lines[start + 1 : lines.index("}", start)]]


def test_an_argument_of_another_sharding_is_resharded_at_the_call() -> None:
    text = """\
function @layer(%x: f32[M@x, E], %w: f32[E, F@x]) {
  %g: f32[M, E] pinned = reshard(%x)
  %y: f32[M, F] = matmul(%g, %w)
  return %y
}
fusion @f(%x: f32[M, E@x], %w: f32[E, F]) mesh(x=4) {
  %h: f32[M, F] = call @layer(%x, %w)
  %y: f32[M, F] = negative(%h)
  return %y
}
"""
    seen = stages(text)
    assert body_of(seen["propagate_sharding"], "fusion") == [
        "%h: f32[M, F@x] = call @layer(%x, %w)",
        "%y: f32[M, F@x] = negative(%h)",
        "return %y",
    ]
    assert body_of(seen["choose_overlap"], "fusion") == [
        "%x_turned: f32[M@x, E] = all_to_all(%x, dim=1, to=0, axes=(x))",
        "%w_sliced: f32[E, F@x] = shard(%w, dim=1, axes=(x))",
        "%h: f32[M, F@x] = call @layer(%x_turned, %w_sliced)",
        "%y: f32[M, F@x] = negative(%h)",
        "return %y",
    ]


def test_a_reshard_of_a_result_with_a_stream_becomes_a_copy() -> None:
    """A reshard of a call's result to the same sharding is removed, and the call gets the name of the reshard. A reshard with a stream
    becomes a copy, because a call cannot have a stream."""
    text = """\
function @layer(%x: f32[M@x, E]) {
  %y: f32[M, E] = negative(%x)
  return %y
}
fusion @f(%x: f32[M@x, E]) mesh(x=2) {
  %a: f32[M, E] = call @layer(%x)
  %b: f32[M@x, E] pinned = reshard(%a)
  %c: f32[M, E] = call @layer(%b)
  %y: f32[M@x, E] pinned stream(E, 2) = reshard(%c)
  return %y
}
"""
    assert body_of(stages(text)["decompose_reshards"], "fusion") == [
        "%b: f32[M@x, E] pinned = call @layer(%x)",
        "%c: f32[M@x, E] = call @layer(%b)",
        "%y: f32[M@x, E] pinned stream(E, 2) = copy(%c)",
        "return %y",
    ]


def test_a_call_joins_no_loop() -> None:
    text = """\
function @layer(%x: f32[M@x, E]) {
  %y: f32[M, E] = negative(%x)
  return %y
}
fusion @f(%x: f32[M@x, E]) mesh(x=2) {
  %h: f32[M, E] = call @layer(%x)
  %y: f32[M, E] stream(M, 2) = negative(%h)
  return %y
}
"""
    assert body_of(stages(text)["choose_overlap"], "fusion") == [
        "%h: f32[M@x, E] = call @layer(%x)",
        "loop 2 chunks by_shard local_first {",
        "%h_gathered: f32[M, E] stream(M, p2p) = all_gather(%h, dim=0, axes=(x))",
        "%y: f32[M, E] stream(M) = negative(%h_gathered)",
        "}",
        "return %y",
    ]


def test_a_size_that_must_be_even_in_one_body_is_even_in_all_bodies() -> None:
    text = """\
function @total(%x: f32[M@x, E]) {
  %y: f32[M@x, E] = collective_permute(%x, axis=0, sources=(1, 0))
  return %y
}
fusion @f(%x: f32[M@x, E]) mesh(x=2) {
  %h: f32[M, E] = negative(%x)
  %y: f32[M@x, E] = call @total(%h)
  return %y
}
"""
    assert lower(Fusion.parse(text), Options()).uneven == ()
    assert lower(Fusion.parse(text.replace("collective_permute(%x, axis=0, sources=(1, 0))", "exp(%x)")), Options()).uneven == ("M",)


def test_each_body_has_separate_events() -> None:
    text = (
        LOOP
        + LOOP.replace("@layer", "@other").replace("negative", "exp")
        + (
            "fusion @f(%x: f32[M@x, E], %w: f32[E, E]) mesh(x=2) {\n"
            "  %a: f32[M, E] = call @layer(%x, %w)\n"
            "  %b: f32[M, E] = call @other(%a, %w)\n"
            "  %y: f32[M, E] stream(M, 2, ring) = matmul(%b, %w)\n"
            "  return %y\n}\n"
        )
    )
    host = lower(Fusion.parse(text), Options())
    assert [(pool.name, pool.count) for pool in host.events] == [("arrived", 1), ("arrived_2", 1), ("arrived_3", 1)]
    assert [pool.name for pool in host.streams] == ["loop"]
    assert HostProgram.parse(str(host)) == host


def test_a_block_has_a_channel_where_it_communicates() -> None:
    """On one rank, a ring sends nothing, and the program has no channel. On two ranks, the program has one channel."""
    text = """\
fusion @f(%x: f32[M@x, E], %w: f32[E, E]) mesh(x={}) {{
  %y: f32[M@x, E] = call @layer(%x, %w)
  return %y
}}
"""
    alone, pair = (stages(LOOP + text.format(count)) for count in (1, 2))
    assert " channels(" not in alone["lower_to_host"]
    assert " channels(x: x two_sided)" in pair["fold_conditions"]


def test_kernels_of_two_bodies_are_one_where_they_are_equal() -> None:
    text = """\
function @a(%x: f32[M, E]) {
  %y: f32[M, E] = negative(%x)
  return %y
}
function @b(%x: f32[M, E]) {
  %y: f32[M, E] = negative(%x)
  return %y
}
function @c(%x: f32[E, M]) {
  %y: f32[E, M] = negative(%x)
  return %y
}
fusion @f(%x: f32[M, E], %z: f32[E, M]) mesh(x=2) {
  %p: f32[M, E] = call @a(%x)
  %y: f32[M, E] = call @b(%p)
  %q: f32[E, M] = call @c(%z)
  return %y, %q
}
"""
    host = lower(Fusion.parse(text), Options())
    assert [kernel.name for kernel in host.kernels] == ["negative_y", "negative_y_2"]
    assert [body_of(str(host), f"function @{name}")[-1] for name in "abc"] == [
        "launch @negative_y %x -> %y",
        "launch @negative_y %x -> %y",
        "launch @negative_y_2 %x -> %y",
    ]


def test_a_join_stays_before_a_call() -> None:
    """The called block forks the streams of the loop before the call. The work of the block must follow the work of the loop, so the join
    before the call stays."""
    text = """\
function @layer(%x: f32[M, E]) {
  %y: f32[M, E] stream(M, 2) = negative(%x)
  return %y
}
fusion @f(%x: f32[M, E], %z: f32[M, E]) mesh(x=2) {
  %h: f32[M, E] stream(M, 2) = exp(%x)
  %a: f32[M, E] = call @layer(%z)
  %y: f32[M, E] = add(%h, %a)
  return %y
}
"""
    host = body_of(stages(text)["sink_waits"], "host")
    assert host.index("join loop") < host.index("call @layer %z -> %a")


def test_channels_are_ordered_in_each_body() -> None:
    """Each body orders its channels separately, because a body knows only the sizes of its parameters."""
    text = """\
function @layer(%x: f32[M@dp, K@tp], %w: f32[K@tp, N]) {
  %h: f32[M, N] = matmul(%x, %w)
  %y: f32[M, N] pinned stream(M, 3) = reshard(%h)
  return %y
}
fusion @f(%x: f32[M@dp, K@tp], %w: f32[K@tp, N], %z: f32[L@dp]) mesh(dp=2, tp=2) {
  %a: f32[M, N] = call @layer(%x, %w)
  %y: f32[M, N] = negative(%a)
  %b: f32[L] = negative(%z)
  return %y, %b
}
"""
    host = lower(Fusion.parse(text), Options())
    assert (host.uneven, [part.uneven for part in bodies(host)]) == (("K", "L"), [("K",), ("K", "L")])
    assert [pool.name for pool in host.events] == ["channels_idle"]
    check(host)


def test_channels_of_a_program_whose_block_has_events() -> None:
    """When a program with a block is split into bodies, the body that calls the block also declares the events of the block."""
    text = """\
function @layer(%x: f64[N, 6@b], %w: f64[6, N]) {
  %h: f64[N, N] = matmul(%x, %w)
  %y: f64[N@b, N] pinned stream(0, 3, ring) = reshard(%h)
  return %y
}
fusion @f(%x: f64[N, 6@a], %w: f64[6@b, N]) mesh(a=2, b=3) {
  %y: f64[N, N] = call @layer(%x, %w)
  return %y
}
"""
    program = lower(Fusion.parse(text), Options())
    check(program)
    assert [events.name for events in program.events] == ["arrived"]
    assert [[events.name for events in body.events] for body in bodies(program)] == [["arrived"], ["arrived"]]
    assert joined(bodies(program)) == program


def test_a_caller_ignores_the_channel_order_inside_a_block() -> None:
    text = """\
function @sums(%x: f32[M@dp, K@tp]) {
  %a: f32[M] async = sum(%x, axis=(1,))
  %b: f32[K] = sum(%x, axis=(0,))
  return %a, %b
}
fusion @f(%x: f32[M@dp, K@tp]) mesh(dp=2, tp=2) {
  %a: f32[M] = sum(%x, axis=(1,))
  %b: f32[K] = sum(%x, axis=(0,))
  %c: f32[M] = call @sums(%x)
  %d: f32[K] = output @sums(%c, index=1)
  return %a, %b, %c, %d
}
"""
    seen = stages(text)["serialize_channels"]
    turns = [line for line in body_of(seen, "function") if "channels_idle" in line]
    assert turns == ["record channels_idle[0]", "wait channels_idle[0]"]
    assert not [line for line in body_of(seen, "host") if "channels_idle" in line]
    check(HostProgram.parse(seen))


def test_a_block_takes_contiguous_arguments() -> None:
    text = """\
function @layer(%w: f32[E, F]) {
  %y: f32[E, F] = negative(%w)
  return %y
}
function @other(%w: f32[E, F]) {
  %y: f32[E, F] = exp(%w)
  return %y
}
fusion @f(%w: f32[F, E]) mesh(x=2) {
  %t: f32[E, F] = permute_dims(%w, axes=(1, 0))
  %a: f32[E, F] = call @layer(%t)
  %b: f32[E, F] = call @other(%t)
  %y: f32[E, F] = add(%a, %b)
  return %y
}
"""
    assert body_of(str(lower(Fusion.parse(text), Options())), "host")[:6] == [
        "%t = permute %w by [1, 0]",
        "%t_packed = allocate f32[E, F]",
        "copy %t -> %t_packed",
        "%a = reshape %y to [E, F]",
        "call @layer %t_packed -> %a",
        "%b = allocate f32[E, F]",
    ]


LAYER = """\
function @layer(%x: f32[M@x, E]) {
  %y: f32[M, E] = negative(%x)
  return %y
}
"""


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        ("%y: f32[E, M] = permute_dims(%h, axes=(1, 0))", ["%y_2 = permute %h by [1, 0]", "copy %y_2 -> %y"]),
        ("%y: f32[M, 2*E] = concat(%h, %x, axis=1)", ["launch @concat_y %h, %x -> %y"]),
        ("%y: f32[M, (E + 1)] = pad(%h, low=(0, 0), high=(0, 1), value=0.0)", ["launch @pad_y %h -> %y"]),
    ],
)
def test_a_block_writes_contiguous_memory(ops: str, expected: list[str]) -> None:
    text = f"{LAYER}fusion @f(%x: f32[M@x, E]) mesh(x=2) {{\n  %h: f32[M, E] = call @layer(%x)\n  {ops}\n  return %y\n}}\n"
    host = body_of(stages(text)["lower_to_host"], "host")
    assert host == ["%h = allocate f32[local(M, x), E]", "call @layer %x -> %h", *expected]


def test_a_call_gives_all_results_of_its_block() -> None:
    """Each result of a call has a separate sharding. Unused results also have memory."""
    text = """\
function @norm(%x: f32[M@x, E]) {
  %s: f32[M, 1] = sum(%x, axis=(1,), keepdims=true)
  %y: f32[M, E] = divide(%x, %s)
  %z: f32[E] = sum(%y, axis=(0,))
  return %y, %s, %z
}
fusion @f(%x: f32[M@x, E]) mesh(x=2) {
  %h: f32[M, E] = call @norm(%x)
  %z: f32[E] = output @norm(%h, index=2)
  %y: f32[M, E] = subtract(%h, %z)
  return %y
}
"""
    seen = stages(text)
    assert body_of(seen["choose_overlap"], "fusion") == [
        "%h: f32[M@x, E] = call @norm(%x)",
        "%z: f32[E] = output @norm(%h, index=2)",
        "%y: f32[M@x, E] = subtract(%h, %z)",
        "return %y",
    ]
    assert body_of(seen["lower_to_host"], "host") == [
        "%h = allocate f32[local(M, x), E]",
        "%h_unused = allocate f32[local(M, x), 1]",
        "%z = allocate f32[E]",
        "call @norm %x -> %h, %h_unused, %z",
        "launch @subtract_y %h, %z -> %y",
    ]
    check(HostProgram.parse(seen["fuse_kernels"]))


def test_slices_of_stacked_weights_are_passed_without_a_copy() -> None:
    text = LAYER + (
        "fusion @f(%x: f32[4, M@x, E]) mesh(x=2) {\n"
        "  %x_3: f32[M, E] = select(%x, axis=0, index=3)\n"
        "  %y: f32[M, E] = call @layer(%x_3)\n"
        "  return %y\n}\n"
    )
    assert body_of(stages(text)["lower_to_host"], "host") == ["%x_3 = select %x[0: 3]", "call @layer %x_3 -> %y"]


def test_asynchronous_communication_ends_before_a_block_that_communicates() -> None:
    """An asynchronous communication ends before a block that communicates, so that all ranks communicate in the same order. An
    asynchronous communication may overlap with a block that does not communicate."""
    text = """\
function @sums(%x: f32[M, K@x], %w: f32[K@x, N]) {
  %y: f32[M, N] async = matmul(%x, %w)
  return %y
}
function @layer(%x: f32[M, N]) {
  %y: f32[M, N] = negative(%x)
  return %y
}
fusion @f(%x: f32[M, K@x], %w: f32[K@x, N], %z: f32[M, N]) mesh(x=2) {
  %a: f32[M, N] async = matmul(%x, %w)
  %y: f32[M, N] = call @layer(%z)
  %b: f32[M, N] = call @sums(%x, %w)
  return %a, %y, %b
}
"""
    seen = stages(text)["serialize_channels"]
    calls = ("call", "all_reduce", "fork", "join")
    assert [line for line in body_of(seen, "host") if line.startswith(calls)] == [
        "fork comm",
        "all_reduce sum %a_partial -> %a on x",
        "call @layer %z -> %y",
        "join comm",
        "call @sums %x, %w -> %b",
    ]
    assert [line for line in body_of(seen, "function @sums") if line.startswith(calls)] == [
        "fork comm",
        "all_reduce sum %y_partial -> %y on x",
        "join comm",
    ]
    check(HostProgram.parse(seen))
