"""Instantiation of a program for the check: byte layouts of views, operations of each rank in order, and sizes to check."""

from __future__ import annotations

import random
from itertools import permutations, product

import host_text
import numpy as np
import pytest
from lowered_fusions import NAMES, evaluate, program

from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.check.memory import starts_of_runs
from hostweave.check.operations import layout
from hostweave.check.simulate import instantiate
from hostweave.check.sizes import minimal_sizes, sizes_to_check
from hostweave.host_ir.expr import Binary, Const, Coordinate, Expr, Symbol, Var
from hostweave.types.tensor import bf16, f32, i8


def test_contiguous_dims_are_one_run() -> None:
    assert layout(bf16, (3, 4, 5), (20, 5, 1)).rows == ()
    assert layout(bf16, (3, 4, 5), (20, 5, 1)).run == 120


def test_columns_are_one_run_per_row() -> None:
    columns = layout(f32, (6, 2), (8, 1))
    assert (columns.rows, columns.run) == (((6, 32),), 8)
    assert starts_of_runs(0, columns.rows, columns.run, np.dtype(int)).tolist() == [0, 32, 64, 96, 128, 160]


def test_the_order_of_dims_does_not_matter() -> None:
    assert layout(f32, (4, 3), (1, 4)).run == 48


def test_an_empty_view_has_no_bytes() -> None:
    empty = layout(f32, (4, 0), (0, 1))
    assert starts_of_runs(0, empty.rows, empty.run, np.dtype(int)).tolist() == []


@pytest.mark.parametrize("seed", range(100))
def test_byte_layouts_match_numpy(seed: int) -> None:
    draw = random.Random(seed)
    whole = np.arange(4 * 6 * 5, dtype=np.int8).reshape(4, 6, 5)
    view = whole[tuple(slice(draw.randrange(2), draw.randrange(2, 5)) for _ in range(3))]
    view = view.transpose(draw.sample(range(3), 3))
    covered = layout(i8, view.shape, view.strides)
    first = int(view.min())
    assert sorted(
        start + i for start in starts_of_runs(first, covered.rows, covered.run, np.dtype(int)) for i in range(covered.run)
    ) == sorted(view.ravel().tolist())


def test_operations_of_each_rank() -> None:
    instances = instantiate(program("allgather_p2p", 2), {"N": 3})
    assert [str(operation) for operation in instances.ranks[1] if operation.accesses or operation.members] == [
        "rank 1, loop[0], %i = 0: copy %x_i -> %y_i",
        "rank 1, loop[1], %i = 1: group",
    ]
    group = instances.ranks[1][-2]
    recv, send = group.members
    (written,), (read,) = recv.accesses, send.accesses
    assert (recv.peer, send.peer, recv.process_group) == (0, 0, (0, 1))
    assert (written.name, written.region.root, written.region.offset, written.region.layout.run, written.writes) == ("y_i", "y", 0, 6, True)
    assert (read.name, read.region.root, read.region.offset, read.region.layout.run, read.reads) == ("x_i", "x", 0, 6, True)


def test_process_groups_and_peers_on_a_mesh_of_two_axes() -> None:
    posts = "    send %x to (rank.tp + 1) % 3 on tp\n    recv %y from (rank.tp - 1) % 3 on tp\n"
    text = f"host @t(%x: f32[4]) -> (%y: f32[4]) mesh(dp=2, tp=3) {{\n  group {{\n{posts}  }}\n}}\n"
    members = [operations[0].members for operations in instantiate(host_text.parse(text), {}).ranks]
    assert [send.process_group for send, _ in members] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
    assert [send.peer for send, _ in members] == [1, 2, 0, 4, 5, 3]
    assert [recv.peer for _, recv in members] == [2, 0, 1, 5, 3, 4]


def test_an_allocate_in_a_loop_is_one_buffer_with_generations() -> None:
    text = "host @t(%x: f32[4]) -> () mesh(x=1) {\n  for %i in 0..3 {\n    %b = allocate f32[4]\n    copy %x -> %b\n  }\n}\n"
    (operations,) = instantiate(host_text.parse(text), {}).ranks
    regions = [operation.accesses[1].region for operation in operations if len(operation.accesses) > 1]
    assert [(region.root, region.generation) for region in regions] == [("b", 0), ("b", 1), ("b", 2)]


def test_sibling_bodies_with_one_name_have_two_buffers() -> None:
    loop = "  for %{0} in 0..1 {{\n    %b = allocate f32[{1}]\n    fill %b with 0.0\n  }}\n"
    text = "host @t() -> () mesh(x=1) {\n" + loop.format("i", 4) + loop.format("j", 8) + "}\n"
    instances = instantiate(host_text.parse(text), {})
    assert {name: root.size for name, root in instances.roots[0].items()} == {"b": 16, "b'": 32}


def test_minimal_sizes() -> None:
    assert minimal_sizes(program("ag_matmul_flat_across")) == {"M": 12, "K": 2, "N": 2}
    assert minimal_sizes(program("allreduce_rows")) == {"R": 4, "N": 3}
    # For B, there are two iterations per stream, and one more.
    assert minimal_sizes(program("matmul_batch")) == {"B": 9, "M": 2, "K": 2, "N": 2}
    text = "host @t(%x: f32[A, B]) -> () mesh(x=1) {\n  %v = reshape %x to [6, A*B/6]\n}\n"
    assert minimal_sizes(host_text.parse(text)) == {"A": 6, "B": 2}


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_minimal_sizes_are_legal(name: str, ranks: int) -> None:
    host = program(name, ranks)
    instantiate(host, minimal_sizes(host))


@pytest.mark.parametrize("seed", range(100))
def test_compiled_expressions(seed: int) -> None:
    from hostweave.check.sizes import compiled

    draw = random.Random(seed)

    def expr(depth: int) -> Expr:
        if not depth:
            return draw.choice([Const(draw.randrange(9)), Var("i"), Coordinate("x"), Symbol("M")])
        op = draw.choice(["+", "-", "*", "/", "%", "==", "<"])
        return Binary(op, expr(depth - 1), Const(draw.randrange(1, 5)) if op in "/%" else expr(depth - 1))

    built = expr(3)
    run = compiled(built, {"M": 12})
    for i, x in product(range(3), range(2)):
        assert run({"i": i, "rank.x": x}) == evaluate(built, {"i": i}, {"x": x}, {"M": 12})


def test_sizes_leave_room() -> None:
    host = host_text.parse("host @t(%x: f32[M]) -> (%y: f32[(M - 2)]) mesh(x=1) {\n%v = slice %x[0: (M - 2) from 1]\ncopy %v -> %y\n}\n")
    with pytest.raises(ProgramError) as caught:
        instantiate(host, {"M": 1})
    assert str(caught.value) == "@t: (M - 2) is -1: choose larger sizes"


def test_sizes_where_a_sum_must_divide() -> None:
    """The chunk needs an even M + 1. So the check uses only odd sizes M, and odd sizes are uneven on 2 ranks."""
    text = "host @t(%x: f32[M@x]) -> (%y: f32[(M + 1)]) mesh(x=2) uneven(M) {\n  %v = chunk %y[0: 1 of 2]\n}\n"
    program = host_text.parse(text)
    assert minimal_sizes(program) == {"M": 3}
    assert list(sizes_to_check(program)) == [{"M": 9}, {"M": 11}]


@pytest.mark.parametrize("conditions", list(permutations(("M * N * K <= 16384", "N * K <= 16384", "M * N <= 256"))))
def test_few_sizes_are_large(conditions: tuple[str, ...]) -> None:
    """Only the size that decides all conditions is large, which saves memory."""
    branches = "\n".join(f"if {condition} {{\ncopy %x -> %y\n}} else {{\ncopy %x -> %y\n}}" for condition in conditions)
    program = host_text.parse(f"host @t(%x: f32[M, N, K]) -> (%y: f32[M, N, K]) mesh(x=1) {{\n{branches}\n}}\n")
    assert list(sizes_to_check(program)) == [{"M": 2, "N": 2, "K": 2}, {"M": 2, "N": 2**14, "K": 2}]


def test_a_branch_at_sizes_with_many_iterations() -> None:
    """At M > 65536, the loop has too many iterations. So the check runs the else branch at a small M."""
    text = """host @t(%x: f32[M]) -> (%y: f32[M]) mesh(x=1) streams(s[1]) {
  fork s
  for %i in 0..M {
    stream s[0] {
      %x_i = select %x[0: %i]
      %y_i = select %y[0: %i]
      copy %x_i -> %y_i
    }
  }
  join s
  if M <= 65536 {
    copy %x -> %y
  } else {
    %t = allocate f32[M]
    copy OTHER -> %y
    deallocate %t
  }
}
"""
    program = host_text.parse(text.replace("OTHER", "%x"))
    assert [sizes["M"] < 100 for sizes in sizes_to_check(program)] == [True]
    check(program)
    with pytest.raises(ProgramError, match=r"reads %t before bytes 0 to \d+ of %t are written"):
        check(host_text.parse(text.replace("OTHER", "%t")))


SUMS = """host @sums(%x: f32[M@x], %w: f32[N]) -> (%y: f32[(M - 1)@x], %z: f32[(N - 2)@x]) mesh(x=4) uneven(M) {
  %m = allocate f32[local(M, x), (N - 2)]
  %p = allocate f32[local(M, x)*(N - 2)]
  %a = allocate f32[(M - 1)/4]
  %b = allocate f32[(N - 2)/4]
}"""


def test_sums_of_several_sizes_that_must_divide() -> None:
    """M - 1 and N - 2 must be multiples of 4. The constraint on one sum does not affect the other sum."""
    sizes = minimal_sizes(host_text.parse(SUMS))
    assert (sizes["M"] % 4, sizes["N"] % 4) == (1, 2)


def test_a_search_without_a_solution_ends() -> None:
    text = "host @t(%x: f32[A, B, C], %w: f32[D]) -> (%y: f32[(2*A + 2*B + 2*C - 2*D + 1)/2]) mesh(x=1) {\n}"
    assert set(minimal_sizes(host_text.parse(text))) == set("ABCD")


@pytest.mark.parametrize("body", ["copy %x -> %y", "%p = %i % 2", "for %j in 0..4294967296 {\n  copy %x -> %y\n}"])
@pytest.mark.parametrize("count", [2**32, 2**17])
def test_a_loop_of_more_steps_than_can_be_checked(count: int, body: str) -> None:
    program = host_text.parse(f"host @t(%x: f32[M]) -> (%y: f32[M]) mesh(x=2) {{\n  for %i in 0..{count} {{\n    {body}\n  }}\n}}\n")
    why = "the loops of the rank have more than 65536 iterations, the most that can be checked; use fewer"
    with pytest.raises(ProgramError, match=rf"^text:2: rank 0, .* for %i in 0\.\.{count}: {why}"):
        instantiate(program, {"M": 4})
