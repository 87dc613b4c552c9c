"""Meshes of some of the ranks in both IRs: text, allowed operations, and messages of the verifiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import host_text
import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError, ParseError, ProgramError
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.host_ir.verify import verify_host
from hostweave.types.mesh import Mesh, RankSizes
from hostweave.types.size import LocalSize, Size

GRID = Mesh(dp=2, tp=4)
LINE = Mesh(x=4)
FIRST, SECOND = LINE.ranks([0, 1]), LINE.ranks([2, 3])


# --- meshes and types -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (LINE.ranks([3, 1]), "mesh(x=2 of ranks 3, 1)"),
        (LINE.ranks([2]), "mesh(x=1 of ranks 2)"),
        (LINE.ranks(range(1, 4)), "mesh(x=3 of ranks 1..4)"),
        (LINE.ranks(range(4), dp=2, tp=2), "mesh(dp=2, tp=2 of ranks 0..4)"),
        (GRID.ranks([4, 5, 6, 7]), "mesh(tp=4 of ranks 4..8)"),
        (GRID.ranks([1, 5]), "mesh(dp=2 of ranks 1, 5)"),
        (GRID.ranks([1, 2, 5, 6]), "mesh(dp=2, tp=2 of ranks 1, 2, 5, 6)"),
        (GRID.ranks([6]), "mesh(of ranks 6)"),
        (GRID.ranks([1, 2, 5, 6]).ranks([2, 6]), "mesh(dp=2 of ranks 2, 6)"),
        (GRID.ranks([7, 0, 3], x=3), "mesh(x=3 of ranks 7, 0, 3)"),
    ],
)
def test_ranks_of_a_mesh(mesh: Mesh, text: str) -> None:
    assert str(mesh) == text
    assert (
        str(
            hw.Fusion.parse(f"fusion @f(%x: f32[M] on {text}) mesh(r=8) {{\n  %y: f32[M] on {text} = negative(%x)\n  return %y\n}}\n")
            .inputs[0]
            .type.mesh
        )
        == text
    )


def test_coordinates_in_a_mesh_of_some_ranks() -> None:
    mesh = LINE.ranks([3, 1, 0, 2], a=2, b=2)
    assert [mesh.coordinate(rank, "a") for rank in (3, 1, 0, 2)] == [0, 0, 1, 1]
    assert [mesh.rank_in_group(rank, ("b", "a")) for rank in (3, 1, 0, 2)] == [0, 2, 1, 3]
    assert mesh.process_group(2, ("a",)) == (1, 2)
    assert mesh.process_group(2, ("b", "a")) == (3, 0, 1, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LINE.ranks([1, 4]), "ranks: mesh(x=4) has no rank 4; its ranks: 0..4"),
        (lambda: FIRST.ranks([2]), "ranks: mesh(x=2 of ranks 0, 1) has no rank 2; its ranks: 0, 1"),
        (lambda: LINE.ranks([1, 1]), "ranks: [1, 1]: name at least one rank, and each once"),
        (lambda: LINE.ranks([]), "ranks: []: name at least one rank, and each once"),
        (lambda: LINE.ranks([0, 1], a=3), "ranks: 2 ranks do not form a mesh of a=3; give axes whose product is 2"),
        (
            lambda: GRID.ranks([0, 5]),
            "ranks: [0, 5] is not a row-major block of mesh(dp=2, tp=4), so its axes cannot be inferred; name them: .ranks([...], x=2)",
        ),
        (
            lambda: hw.f32["M@tp"].on(FIRST),
            "f32[M@tp] on mesh(x=2 of ranks 0, 1): there is no axis tp in mesh(x=2 of ranks 0, 1); its axes: x",
        ),
    ],
)
def test_error_of_a_mesh(make: Any, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        make()
    assert str(caught.value).partition(": ")[2] == message
    assert str(caught.value).startswith("test_meshes.py:")


def test_shards_of_a_mesh_of_some_ranks() -> None:
    spec, array = hw.f32["M@x", 2].on(LINE.ranks([3, 1])), np.arange(8).reshape(4, 2)
    np.testing.assert_array_equal(spec.shard(array, 1, LINE), array[2:])
    np.testing.assert_array_equal(spec.unshard([array[:2], array[2:]], LINE), array)
    with pytest.raises(
        ArgumentError, match=r"^shard: rank 0 holds no part of f32\[M@x, 2\] on mesh\(x=2 of ranks 3, 1\); choose a rank of its mesh$"
    ):
        spec.shard(array, 0, LINE)
    assert [spec.block((5, 2), rank, LINE) for rank in (3, 1)] == [(slice(0, 3), slice(0, 2)), (slice(3, 5), slice(0, 2))]
    for shape, rank, message in (
        ((4, 2), 0, "block: rank 0 holds no part of"),
        ((4, 3), 1, "block: array: dim 1 is 3; it must be 2"),
        ((4,), 1, r"an array of 1 dims does not fit f32\[M@x, 2\]"),
    ):
        with pytest.raises(ArgumentError, match=message):
            spec.block(shape, rank, LINE)


def test_places_with_too_few_ranks() -> None:
    with pytest.raises(ParseError, match=r"mesh\(x=3 of ranks 0, 1\) has 3 positions for 2 ranks; list every rank once$"):
        hw.Fusion.parse("fusion @f(%x: f32[M] on mesh(x=3 of ranks 0, 1)) mesh(x=4) {\n  %y: f32[M] = negative(%x)\n  return %y\n}\n")


# --- fusions ----------------------------------------------------------------------------------------------------------


def test_results_are_on_the_mesh_of_their_operands() -> None:
    @hw.fusion(mesh=LINE, x=hw.f32["M@x", "K"].on(FIRST))
    def f(x):
        h = hw.astype(hw.reshape(x, "M*K"), hw.i32) + hw.iota(hw.reshape(x, "M*K"), 0)
        return hw.reshard(h, "K*M@x", mesh=SECOND), hw.reshard(hw.reshard(h, "K*M", mesh=LINE), "K*M@x")

    meshes = {name: value.type.mesh for name, value in f.values().items()}
    assert {name for name, mesh in meshes.items() if mesh == FIRST} == {"x", "x_reshaped", "x_i32", "iota", "h"}
    assert (meshes["h_resharded"], meshes["h_resharded_2"], meshes["h_resharded_3"]) == (SECOND, None, None)
    assert hw.Fusion.parse(str(f)) == f


def test_all_ranks_in_other_axes() -> None:
    """The type of x names the mesh of x, which has different axes. The types of y and z name no mesh, because y and z are on LINE."""

    @hw.fusion(mesh=LINE, x=hw.f32["M@dp", "K@tp"].on(Mesh(dp=2, tp=2)), y=hw.f32["M@x"].on(LINE), z=hw.f32["M@x"].on(LINE.ranks(range(4))))
    def f(x, y, z):
        return x, y + z

    assert [str(value.type) for value in f.inputs] == ["f32[M@dp, K@tp] on mesh(dp=2, tp=2 of ranks 0..4)", "f32[M@x]", "f32[M@x]"]


def mixed(x: hw.Tensor, y: hw.Tensor) -> hw.Tensor:
    return x + y


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            hw.f32["M"].on(FIRST),
            hw.f32["M"].on(SECOND),
            "add: operands on different meshes: f32[M] on mesh(x=2 of ranks 0, 1) and f32[M] on mesh(x=2 of ranks 2, 3); "
            "move one with hw.reshard(t, ..., mesh=...)",
        ),
        (
            hw.f32["M"],
            hw.f32["M"].on(SECOND),
            "add: operands on different meshes: f32[M] on the program's mesh and f32[M] on mesh(x=2 of ranks 2, 3); "
            "move one with hw.reshard(t, ..., mesh=...)",
        ),
        (
            hw.f32["M"].on(Mesh(x=2)),
            hw.f32["M"],
            "f32[M] on mesh(x=2): mesh(x=2) is not part of mesh(x=4); use ranks of the program's mesh, as mesh.ranks([0, 1])",
        ),
        (
            hw.f32["M"].on(GRID.ranks([4, 5])),
            hw.f32["M"],
            "f32[M] on mesh(tp=2 of ranks 4, 5): mesh(x=4) has no rank 4; its ranks: 0..4",
        ),
    ],
)
def test_error_of_a_fusion(x: hw.TensorType, y: hw.TensorType, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        hw.fusion(mesh=LINE, x=x, y=y)(mixed)
    place, _, text = str(caught.value).partition(": ")
    assert place.startswith("test_meshes.py:")
    assert text == message


def test_a_block_is_on_the_mesh_of_its_parameters() -> None:
    @hw.block(h=hw.f32["M"].on(FIRST))
    def layer(h):
        return h + h

    with pytest.raises(ProgramError) as caught:
        hw.fusion(mesh=LINE, x=hw.f32["M"].on(SECOND))(lambda x: layer(x))
    why = "@layer takes f32[M] on mesh(x=2 of ranks 0, 1) as h, not f32[M] on mesh(x=2 of ranks 2, 3)"
    assert str(caught.value).partition(": ")[2] == f"call: {why}; move it with hw.reshard(t, ..., mesh=...)"


def test_the_verifier_looks_at_meshes() -> None:
    text = "fusion @f(%x: f32[M] on mesh(x=2 of ranks 0, 1)) mesh(x=4) {\n"
    text += "  %y: f32[M] on mesh(x=2 of ranks 2, 3) = negative(%x)\n  return %y\n}\n"
    with pytest.raises(ProgramError) as caught:
        hw.Fusion.parse(text)
    why = "%y is f32[M] on mesh(x=2 of ranks 2, 3), but its operands give f32[M] on mesh(x=2 of ranks 0, 1)"
    assert str(caught.value) == f"text:2: negative: {why}; correct its type"


def test_local_sizes_on_meshes_of_some_ranks() -> None:
    lines = {
        "local(M, x on ranks 1, 3)": hw.f32["M@x"].on(LINE.ranks([1, 3])),
        "local(M, x on ranks 1..4)": hw.f32["M@x"].on(LINE.ranks([1, 2, 3])),
        "local(M, b on mesh(a=2, b=2 of ranks 0..4))": hw.f32["M@b"].on(LINE.ranks([0, 1, 2, 3], a=2, b=2)),
        "local(M, b on mesh(a=2, b=2 of ranks 3, 1, 0, 2))": hw.f32["M@b"].on(LINE.ranks([3, 1, 0, 2], a=2, b=2)),
        "local(M, dp, tp on mesh(dp=2, tp=2))": replace(hw.f32["M@dp,tp"], mesh=hw.Mesh(dp=2, tp=2)),
    }
    for name, type in lines.items():
        (size,) = type.local_shape(LINE, ("M",))
        assert str(size) == name
        assert Size.of(name) == size
        (part,) = size.factors
        assert isinstance(part, LocalSize)
        assert part.mesh == type.mesh
        for rank in type.mesh_in(LINE).all_ranks:
            assert size.bind(RankSizes({"M": 10}, LINE, rank)) == len(type.shard(np.arange(10), rank, LINE))


# --- host programs ----------------------------------------------------------------------------------------------------

HEAD = "host @t(%x: f32[4, N] on mesh(x=2 of ranks 0, 1)) -> (%y: f32[4, N] on mesh(x=2 of ranks 2, 3)) mesh(x=4) {\n"
ON_FIRST, ON_SECOND = "on mesh(x=2 of ranks 0, 1) {\n", "on mesh(x=2 of ranks 2, 3) {\n"
SEND, RECV = ON_FIRST + "send %x to rank + 2 on x\n}\n", ON_SECOND + "recv %y from rank - 2 on x\n}\n"


def test_a_program_of_two_meshes() -> None:
    text = (
        HEAD
        + "  "
        + SEND.replace("\n", "\n  ").replace("  send", "    send")
        + RECV.replace("recv", "    recv").replace("\n}", "\n  }")
        + "}\n"
    )
    program = host_text.parse(text)
    assert str(program) == host_text.declared(text)
    check(program)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # the verifier
        (
            ON_FIRST + ON_SECOND + "}\n}\n",
            "text:3: @t: on mesh(x=2 of ranks 2, 3): on bodies cannot be nested: end the outer one first",
        ),
        ("on mesh(x=2 of ranks 3, 4) {\n}\n", "text:2: @t: on mesh(x=2 of ranks 3, 4): mesh(x=4) has no rank 4: name only its ranks"),
        (
            ON_FIRST + "%i = rank.tp\n}\n",
            "text:3: @t: %i = rank.tp: mesh(x=2 of ranks 0, 1) has no axis 'tp': its axes are x",
        ),
        (
            ON_FIRST + "%v = chunk %x[0: 0 of 2]\n}\n" + ON_FIRST + "send %v to rank + 2 on x\n}\n",
            "text:6: @t: send %v to rank + 2 on x: %v is used before its definition: define it above, in this body or around it",
        ),
        (
            "if rank == 1 {\n" + ON_FIRST + "all_reduce sum %x -> %y on x\n}\n}\n",
            "text:4: @t: all_reduce sum %x -> %y on x: a collective is not allowed under `if rank == 1`, which differs between ranks: "
            "use send and recv there",
        ),
        (
            "send_blocks %x in 2 by [0[2] -> 2[0]] on x\n",
            "text:2: @t: send_blocks %x in 2 by [0[2] -> 2[0]] on x: 0[2] -> 2[0]: there are 2 blocks, from 0 to 1",
        ),
        (
            "recv_blocks %y in 2 by [0[2] -> 7[0]] on x\n",
            "text:2: @t: recv_blocks %y in 2 by [0[2] -> 7[0]] on x: 0[2] -> 7[0]: mesh(x=4) has no rank 7: name only its ranks",
        ),
        (
            "send_blocks %x in 0 by [0[2] -> 2[0]] on x\n",
            "text:2: @t: send_blocks %x in 0 by [0[2] -> 2[0]] on x: a buffer has at least one block: cut it into 1 or more",
        ),
        (
            ON_FIRST + "send_blocks %x in 2 by [0[0] -> 1[0]] on x_of_ranks_0_1\n}\n",
            "text:3: @t: send_blocks %x in 2 by [0[0] -> 1[0]] on x_of_ranks_0_1: routes name ranks of the program: "
            "use a channel along all axes of mesh(x=4), in their order",
        ),
        (
            ON_FIRST + "send %x to 0 on x_of_ranks_2_3\n}\n" + ON_SECOND + "}\n",
            "text:3: @t: send %x to 0 on x_of_ranks_2_3: rank 0 executes this, but channel x_of_ranks_2_3 is on "
            "mesh(x=2 of ranks 2, 3): use a channel that includes the rank",
        ),
        (
            ON_FIRST + "%b = allocate f32[4, N]\nall_reduce sum %x -> %b on x\n}\n",
            "text:4: @t: all_reduce sum %x -> %b on x: all ranks of the channel, mesh(x=4), must execute a collective: "
            "use a channel on mesh(x=2 of ranks 0, 1)",
        ),
        # the static check
        (
            "send %x to rank on x\n",
            "text:2: rank 2, the caller's stream: send %x to rank on x: %x is not on this rank: use an `on` body of its mesh",
        ),
        (
            SEND,
            "text:3: rank 0, the caller's stream: send %x to rank + 2 on x: rank 2 posts no recv for it: add the recv, or drop this send",
        ),
        (
            RECV,
            "text:3: rank 2, the caller's stream: recv %y from rank - 2 on x: rank 0 posts no send for it: add the send, or drop this recv",
        ),
        (
            ON_FIRST + "send_blocks %x in 2 by [0[0] -> 2[0], 1[0] -> 3[0]] on x\n}\n" + RECV,
            "text:3: rank 0, the caller's stream: send %x to 2 on x: sends 8 f32, not the 16 f32 of the matching recv, "
            "rank 2, the caller's stream: recv %y from rank - 2 on x: make them equal",
        ),
        (
            ON_FIRST
            + "send_blocks %x in 2 by [0[1] -> 2[0], 1[0] -> 3[1]] on x\n}\n"
            + ON_SECOND
            + "recv_blocks %y in 2 by [0[1] -> 2[0], 1[0] -> 3[1]] on x\n}\n",
            "@t: rank 2: nothing writes bytes 32 to 64 of the output %y: write all of every output",
        ),
        (
            ON_SECOND + "%b = allocate f32[4, N]\n}\nsend_blocks %b in 1 by [0[0] -> 1[0]] on x\n",
            "text:5: rank 0, the caller's stream: send_blocks %b in 1 by [0[0] -> 1[0]] on x: %b is not on this rank: "
            "use an `on` body of its mesh",
        ),
    ],
)
def test_error_of_a_host_program(body: str, message: str) -> None:
    program = host_text.parse(HEAD + body + "}\n")

    def verified_and_checked() -> None:
        verify_host(program)
        check(program)

    with pytest.raises(ProgramError) as caught:
        verified_and_checked()
    assert str(caught.value) == message


def with_kernel(takes: str, gives: str) -> str:
    return f'user_kernel @k = k(in {takes}, out {gives}) grid(M) block(256) {{\n  "__global__ void k(const float* x, float* y) {{}}"\n}}\n'


@pytest.mark.parametrize(
    ("takes", "gives", "why"),
    [
        ("f32[M@q] on mesh(q=2 of ranks 7, 8)", "f32[M]", "has no rank 7|@k takes .* on mesh"),
        ("f32[M@r] on mesh(q=2 of ranks 0, 1)", "f32[M]", "no axis r in|@k takes .* on mesh"),
        ("f32[M] on mesh(q=2 of ranks 0, 1)", "f32[M]", "@k takes .* on mesh"),
        ("f32[M]", "f32[M@q] on mesh(q=2 of ranks 7, 8)", "has no rank 7|@k gives .*; remove .on mesh"),
        ("f32[M]", "f32[M] on mesh(q=2 of ranks 0, 1)", "@k gives .* on mesh"),
        ("f32[M@z]", "f32[M]", "no axis '?z'? in|has no axis 'z'"),
        ("f32[M]", "f32[M@z]", "no axis '?z'? in|has no axis 'z'"),
    ],
)
@pytest.mark.parametrize("kind", ["fusion", "host"])
def test_meshes_of_operands_and_results_of_a_kernel(kind: str, takes: str, gives: str, why: str) -> None:
    def verify(source: str) -> None:
        if kind == "fusion":
            text = "fusion @p(%x: f32[M]) mesh(x=4) {\n  %y: f32[M] = kernel @k(%x)\n  return %y\n}\n"
            verify_fusion(Fusion.parse(source + text))
        else:
            verify_host(host_text.parse(source + "host @p(%x: f32[M]) -> (%y: f32[M]) mesh(x=4) {\n  launch @k %x -> %y\n}\n"))

    verify(with_kernel("f32[M]", "f32[M]"))
    with pytest.raises(ProgramError, match=why):
        verify(with_kernel(takes, gives))
