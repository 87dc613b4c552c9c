"""Lowering of reshards to another mesh: communications, blocks that are already on the right rank, and moves in chunk loops."""

from __future__ import annotations

from fractions import Fraction

import host_text
import numpy as np
import pytest
from fusion_text import check, fusion
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.resharding import plan
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.passes.fusion.choose_overlap import choose_overlap
from hostweave.passes.fusion.decompose_reshards import decompose_reshards
from hostweave.passes.fusion.propagate_sharding import propagate_sharding
from hostweave.passes.host.group_communications import group_communications
from hostweave.passes.host.serialize_channels import serialize_channels
from hostweave.passes.host.sink_waits import sink_waits
from hostweave.pipeline import lower
from hostweave.types.blocks import transfer
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Partial, TensorType
from hostweave.types.text import Reader

ALL = Mesh(x=4)
A, B = ALL.ranks([0, 1]), ALL.ranks([2, 3])
ON_A, ON_B = f"on {A}", f"on {B}"


# --- fusions ----------------------------------------------------------------------------------------------------------


def test_nothing_is_propagated_to_another_mesh() -> None:
    check(
        propagate_sharding,
        f"%x: f32[M, K] {ON_A}",
        f"%h: f32[M, K] {ON_A} = negative(%x)\n%y: f32[M@x, K] {ON_B} pinned = reshard(%h)",
        f"%h: f32[M, K] {ON_A} = negative(%x)\n%y: f32[M@x, K] {ON_B} pinned = reshard(%h)",
        mesh="x=4",
    )


def test_a_transfer_of_a_slice_reads_the_whole_tensor() -> None:
    check(
        decompose_reshards,
        f"%x: f32[M, K] {ON_A}",
        f"%s: f32[M@x, K] {ON_A} pinned = reshard(%x)\n%y: f32[M, K] {ON_B} pinned = reshard(%s)",
        f"%y: f32[M, K] {ON_B} pinned = transfer(%x, blocks=[(1, 1) to (1, 1): 0[0] -> 2[0], 1[0] -> 3[0]])",
        mesh="x=4",
    )


@pytest.mark.parametrize(
    ("target", "kinds"),
    [
        (hw.f32["M", "N"].on(B), ["reduce", "transfer"]),
        (hw.f32["M@x", "N"].on(B), ["reduce_scatter", "transfer"]),
        (hw.f32["M", "N"].on(ALL.ranks([1])), ["reduce"]),
        (hw.f32["M", "N"].on(ALL.ranks([3])), ["reduce", "transfer"]),
        (hw.f32["M", "N"].on(ALL.ranks([1, 0])), ["all_reduce", "transfer"]),  # After the all_reduce, each rank has the result.
        (hw.f32["M", "N@x"], ["reduce_scatter", "transfer"]),
    ],
)
def test_partial_sums_are_reduced_on_their_mesh(target: TensorType, kinds: list[str]) -> None:
    source = TensorType(hw.f32, hw.f32["M", "N"].dims, Partial("sum", ("x",)), A)
    assert [change.kind for change in plan(source, target, ALL, {}, None)] == kinds


def test_a_reduce_prefers_a_root_on_the_target_mesh() -> None:
    source = TensorType(hw.f32, hw.f32["M", "N"].dims, Partial("sum", ("x",)))
    (change,) = plan(source, hw.f32["M", "N"].on(ALL.ranks([2])), ALL, {}, None)
    assert (change.kind, change.root) == ("reduce", 2)


def test_routes_of_a_transfer() -> None:
    found = transfer(hw.f32["M@x", "N"].on(A), hw.f32["M", "N"].on(ALL.ranks([1, 2, 3])), ALL)
    assert list(map(str, found.routes)) == ["0[0] -> 1[0]", "1[0] -> 1[1]", "0[0] -> 2[0]", "1[0] -> 2[1]", "0[0] -> 3[0]", "1[0] -> 3[1]"]
    assert found.share(2) == Fraction(5, 2)
    in_turn = transfer(hw.f32["M"].on(A), hw.f32["M"].on(B), ALL)  # Each of the two ranks with the tensor sends it once.
    assert list(map(str, in_turn.routes)) == ["0[0] -> 2[0]", "1[0] -> 3[0]"]


WHOLE = "blocks=[(1, 1) to (1, 1): 0[0] -> 2[0], 1[0] -> 3[0]]"
STREAMED = f"""%h: f32[M, K] {ON_A} = negative(%x)
%t: f32[M, K] {ON_B} = transfer(%h, {WHOLE})
%y: f32[M, K] {ON_B} stream(M, 4) = negative(%t)"""


def test_a_transfer_of_whole_blocks_joins_the_loop_of_its_consumer() -> None:
    check(
        choose_overlap,
        f"%x: f32[M, K] {ON_A}",
        STREAMED,
        f"""loop 4 chunks across_shards {{
          %h: f32[M, K] {ON_A} stream(M) = negative(%x)
          %t: f32[M, K] {ON_B} stream(M, transfer) = transfer(%h, {WHOLE})
          %y: f32[M, K] {ON_B} stream(M) = negative(%t)
        }}""",
        mesh="x=4",
    )


@pytest.mark.parametrize("there", ["f32[M, K@x] on mesh(x=2 of ranks 2, 3)", "f32[M, K] on mesh(x=2 of ranks 1, 2)"])
def test_other_transfers_stay_outside(there: str) -> None:
    """A move is not in a loop if a block is only part of a local tensor, or if some ranks are on both meshes."""
    source, target = hw.f32["M", "K"].on(A), Reader(there).tensor_type()
    text = STREAMED.replace(WHOLE, f"blocks={transfer(source, target, ALL)}")
    before = text.replace(f"f32[M, K] {ON_B}", there)
    *others, last = before.replace("stream(M, 4)", "stream(M)").split("\n")
    check(choose_overlap, f"%x: f32[M, K] {ON_A}", before, "\n".join((*others, "loop 4 chunks across_shards {", last, "}")), mesh="x=4")


def test_a_transfer_that_cannot_be_streamed() -> None:
    blocks = transfer(hw.f32["M@x", "K"].on(A), hw.f32["M", "K"].on(B), ALL)
    program = fusion(
        f"%x: f32[M@x, K] {ON_A}",
        f"%y: f32[M, K] {ON_B} stream(M, 4) = transfer(%x, blocks={blocks})",
        mesh="x=4",
    )
    why = r"a chunk loop is not possible here; the transfer of %y cannot be divided into chunks; leave .stream out"
    with pytest.raises(ProgramError, match=f"^text:2: stream of %y: {why}$"):
        choose_overlap(program, Options())


# --- host programs ----------------------------------------------------------------------------------------------------


def lowered(text: str) -> str:
    return str(lower(Fusion.parse(text), Options())).partition(" {\n")[2].removesuffix("}\n")


def test_ranks_on_both_sides_post_in_one_group() -> None:
    c, d = ALL.ranks([1, 2]), ALL.ranks([2, 3])
    body = lowered(
        f"""fusion @f(%x: f32[M@x, K] on {c}) mesh(x=4) {{
          %y: f32[M@x, K] on {d} pinned = reshard(%x)
          return %y
        }}"""
    )
    assert (
        body
        == """\
  group {
    send_blocks %x in 1 by [1[0] -> 2[0], 2[0] -> 3[0]] on x
    recv_blocks %y in 1 by [1[0] -> 2[0], 2[0] -> 3[0]] on x
  }
"""
    )


def test_a_replicated_value_is_not_copied_to_a_mesh_of_its_ranks() -> None:
    """A replicated value that moves to a mesh of some of its ranks is not copied. If the new mesh shards the value, a shard is a view."""
    body = lowered(
        f"""fusion @f(%x: f32[M, K]) mesh(x=4) {{
          %t: f32[M@x, K] {ON_B} pinned = reshard(%x)
          %y: f32[M@x, K] {ON_B} = negative(%t)
          return %y
        }}"""
    )
    part = "%t = slice %x[0: local(M, x on ranks 2, 3) from rank.x * ceil(M/2)]"
    assert body.endswith(f"  on mesh(x=2 of ranks 2, 3) {{\n    {part}\n    launch @negative_y %t -> %y\n  }}\n")


def test_a_view_is_made_again_in_a_second_body_of_its_mesh() -> None:
    """Each of two `on` bodies makes the slice of %x, because the C++ scope of the first body has ended."""
    body = lowered(
        f"""fusion @f(%x: f32[M, K] {ON_A}) mesh(x=4) {{
          %s: f32[M@x, K] {ON_A} pinned = reshard(%x)
          %a: f32[M@x, K] {ON_A} = negative(%s)
          %b: f32[M@x, K] {ON_B} pinned = reshard(%a)
          %c: f32[M@x, K] {ON_B} = negative(%b)
          %d: f32[M@x, K] {ON_A} pinned = reshard(%c)
          %e: f32[M@x, K] {ON_A} = add(%s, %d)
          return %e
        }}"""
    )
    assert body.count("= slice %x[0: local(M, x on ranks 0, 1) from rank.x * ceil(M/2)]") == 2


def test_blocks_of_uneven_dims_end_at_shard_boundaries() -> None:
    """Uneven blocks are packed unless they are contiguous. If 2 ranks and then 3 ranks split a dim, each sender has a route to each
    receiver."""
    body = lowered(
        f"""fusion @f(%x: f32[M@x, K] {ON_A}, %v: f32[K, M@x] {ON_A}) mesh(x=4) {{
          %y: f32[M, K] {ON_B} pinned = reshard(%x)
          %z: f32[K, M] {ON_B} pinned = reshard(%v)
          return %y, %z
        }}"""
    )
    assert "if " not in body
    assert "recv_blocks %y in [2 of M, 1 of K] by [0[0] -> 2[0], 1[0] -> 2[1], 0[0] -> 3[0], 1[0] -> 3[1]] on x" in body
    assert "recv_blocks %z_packed in [1 of K, 2 of M] by" in body
    assert "unpack %z_packed -> %z in [1 of K, 2 of M]" in body
    three = lowered(
        f"""fusion @f(%x: f32[M@x, K] {ON_A}) mesh(x=5) {{
          %y: f32[M@x, K] on mesh(x=3 of ranks 2..5) pinned = reshard(%x)
          return %y
        }}"""
    )
    everyone = ", ".join(f"{sender}[{receiver}] -> {receiver + 2}[{sender}]" for receiver in range(3) for sender in range(2))
    assert f"send_blocks %x in [3 of local(M, x on ranks 0, 1), 1 of K] by [{everyone}] on x" in three
    assert f"recv_blocks %y in [2 of local(M, x on ranks 2..5), 1 of K] by [{everyone}] on x" in three


def test_a_block_for_several_ranks_is_sent_once() -> None:
    """A rank on both meshes copies locally. If as many ranks have a block as need the block, each rank that has it sends it to one rank."""
    there, first = ALL.ranks([0, 2, 3]), ALL.ranks([0])
    body = lowered(
        f"""fusion @f(%x: f32[M@x, K] on {first}) mesh(x=4) {{
          %y: f32[M, K] on {there} pinned = reshard(%x)
          return %y
        }}"""
    )
    assert (
        body
        == """\
  on mesh(copies=3 of ranks 0, 2, 3) {
    broadcast_to_others %x to %y from 0 on copies_of_ranks_0_2_3
  }
  on mesh(copies=1 of ranks 0) {
    copy %x -> %y
  }
"""
    )
    two = lowered(
        f"fusion @f(%x: f32[M, K] on {ALL.ranks([0])}) mesh(x=4) {{\n  %y: f32[M, K] {ON_B} pinned = reshard(%x)\n  return %y\n}}\n"
    )
    assert two.count("broadcast_to_others") == 1
    assert "send" not in two
    each = lowered(f"fusion @f(%x: f32[M, K] {ON_A}) mesh(x=4) {{\n  %y: f32[M, K] {ON_B} pinned = reshard(%x)\n  return %y\n}}\n")
    assert "broadcast_to_others" not in each


def test_a_partial_sum_is_reduced_to_one_rank_and_broadcast() -> None:
    body = lowered(
        f"""fusion @f(%x: f32[M@x, K] {ON_A}) mesh(x=5) {{
          %s: f32[K] {ON_A} partial(sum, x) = sum(%x, axis=(0,))
          %y: f32[K] on mesh(x=3 of ranks 2..5) pinned = reshard(%s)
          return %y
        }}""".replace("f32[K] on mesh(x=2 of ranks 0, 1) partial(sum, x)", "f32[K] partial(sum, x) on mesh(x=2 of ranks 0, 1)")
    )
    assert [word for word in ("all_reduce", "reduce sum", "broadcast_to_others", "send") if word in body] == [
        "reduce sum",
        "broadcast_to_others",
    ]


def test_equal_shards_are_sent_from_rank_to_rank() -> None:
    body = lowered(f"fusion @f(%x: f32[M@x, K] {ON_A}) mesh(x=4) {{\n  %y: f32[M@x, K] {ON_B} pinned = reshard(%x)\n  return %y\n}}\n")
    assert (
        body
        == f"""\
  {ON_A} {{
    send %x to rank + 2 on x
  }}
  {ON_B} {{
    recv %y from rank - 2 on x
  }}
"""
    )


def test_passes_look_into_on_bodies() -> None:
    host = host_text.parse(
        f"""host @f(%x: f32[4, N] {ON_A}) -> (%y: f32[4, N] {ON_A}, %z: f32[4, N] {ON_A}) mesh(x=4) streams(loop[2]) {{
          {ON_A} {{
            all_reduce sum %x -> %y on x
            all_reduce max %x -> %z on x
            %b = allocate f32[4, N]
            fork loop
            stream loop[0] {{
              copy %x -> %b
            }}
            join loop
            %c = allocate f32[4, N]
            copy %x -> %c
            copy %b -> %c
          }}
        }}"""
    )
    grouped = group_communications(host, Options())
    assert [len(i.body) for i in tree.walk(grouped.body) if isinstance(i, ir.Group)] == [2]
    (on,) = sink_waits(host, Options()).body
    assert isinstance(on, ir.OnMesh)
    assert [type(i).__name__ for i in on.body[-3:]] == ["Copy", "Join", "Copy"]


def test_channels_of_different_meshes_are_ordered_separately() -> None:
    host = host_text.parse(
        f"""host @f(%x: f32[4, N] {ON_A}) -> (%y: f32[4, N] {ON_B}) mesh(x=4) streams(loop[2]) {{
          {ON_A} {{
            %s = allocate f32[4, N]
          }}
          {ON_B} {{
            %t = allocate f32[4, N]
          }}
          fork loop
          for %i in 0..4 {{
            stream loop[%i] {{
              {ON_A} {{
                %x_i = chunk %x[0: %i of 4]
                %s_i = chunk %s[0: %i of 4]
                all_reduce sum %x_i -> %s_i on x_of_ranks_0_1
                send %s_i to rank + 2 on x
              }}
              {ON_B} {{
                %t_i = chunk %t[0: %i of 4]
                recv %t_i from rank - 2 on x
                %y_i = chunk %y[0: %i of 4]
                copy %t_i -> %y_i
              }}
            }}
          }}
          join loop
        }}"""
    )
    loop = next(i for i in serialize_channels(host, Options()).body if isinstance(i, ir.For))
    (stream,) = loop.body
    assert isinstance(stream, ir.OnStream)
    a, b = ([type(i).__name__ for i in tree.walk((on,)) if isinstance(i, (ir.Wait, ir.Record, ir.Communication))] for on in stream.body)
    assert a == ["Wait", "AllReduce", "Send", "Record"]
    assert b == ["Recv"]


def test_an_even_dim_is_received_whole_with_an_uneven_one() -> None:
    program = hw.Mesh(r=13)
    old, new = program.ranks(range(4), a=2, b=2), program.ranks(range(4, 13), c=3, d=3)
    host = lower(
        hw.Fusion.parse(
            f"""fusion @f(%x: f32[M@a, N@b] on {old}, %v: f32[N@r]) mesh(r=13) {{
              %w: f32[N] pinned stream(N, 13) = reshard(%v)
              %z: f32[N] stream(N, 13) = negative(%w)
              %y: f32[M@c, N@d] on {new} pinned = reshard(%x)
              return %y, %z
            }}"""
        ),
        Options(),
    )
    assert host.uneven == ("M",)  # N is not in the list, because `.stream` needs equal shards.
    x, v = np.arange(7 * 78, dtype=np.float32).reshape(7, 78), np.arange(78, dtype=np.float32)
    spec = hw.f32["M@c", "N@d"].on(new)
    for rank, outputs in enumerate(interpret(host, {"x": x, "v": v})):
        np.testing.assert_array_equal(outputs["z"], -v)
        if rank in new.all_ranks:
            np.testing.assert_array_equal(outputs["y"], spec.shard(x, rank, program))
