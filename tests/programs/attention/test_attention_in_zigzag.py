"""Causal attention of a sequence in zigzag, forward and backward: results, work per rank, and errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compiled_fusions import compiled, expect, expect_every_way, lowered, random_arrays
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.build.cuda import gpus
from hostweave.check.run import compiled as evaluated
from hostweave.check.run import coordinates
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.pipeline import lower
from hostweave.types.tensor import DType

MESHES = [hw.Mesh(tp=tp, cp=cp) for tp, cp in ((1, 1), (1, 2), (1, 3), (2, 2), (1, 4), (2, 4), (1, 8))]
DTYPES = [hw.bf16, hw.f16, hw.f32, hw.bf16, hw.f32, hw.f16, hw.bf16]
SIZES = ({"B": 2, "S": 48}, {"B": 1, "S": 24}, {"B": 3, "S": 112})


@cache
def in_zigzag(mesh: hw.Mesh, t: DType) -> Fusion:
    """Attention to keys in zigzag: with and without a batch, with gradients, with a window, and without a mask. Most rows are in zigzag
    too. Some are replicated, or sharded in order."""
    heads, groups, s = f"{4 * mesh.axis_size('tp')}@tp", f"{2 * mesh.axis_size('tp')}@tp", "S@zigzag(cp)"

    @hw.fusion(
        mesh=mesh,
        q=t["B", heads, s, 16],
        k=t["B", groups, s, 16],
        v=t["B", groups, s, 24],
        dy=t["B", heads, s, 24],
        rows=t[s, heads, 16],
        keys=t[s, groups, 16],
        given=t["S", heads, 16],
        some=t["B", heads, 3, 16],
        ordered=t["B", heads, "S@cp", 16],
    )
    def in_zigzag(q, k, v, dy, rows, keys, given, some, ordered):  # type: ignore[no-untyped-def]
        y, lse = hw.attention(q, k, v, "top_left", enable_gqa=True)
        dq, dk, dv = hw.attention_backward(q, k, v, y, dy, lse, "top_left", enable_gqa=True)
        near = hw.attention(q, k, v, "bottom_right", 5, enable_gqa=True)
        turned = [hw.permute_dims(x, (1, 0, 2)) for x in (rows, keys, given)]
        z, sums = hw.attention(turned[0], turned[1], turned[1], "top_left", enable_gqa=True)
        back = hw.attention_backward(turned[0], turned[1], turned[1], z, turned[2], sums, "top_left", enable_gqa=True)
        shares = [hw.reshard(x, "B", groups, s, x.shape[-1]) for x in (dk, dv)]
        all_of_them = [hw.permute_dims(x, (1, 0, 2)) for x in (z, *back)]
        others = [hw.attention(x, k, v, "bottom_right", enable_gqa=True)[0] for x in (some, ordered)]
        return (y, lse, dq, *shares, *near, *all_of_them, hw.scaled_dot_product_attention(q, k, v, enable_gqa=True), *others)

    return in_zigzag


def by_torch(arrays: dict[str, Any]) -> tuple[Any, ...]:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    q, k, v, dy, rows, keys, given, some, ordered = (torch.from_numpy(array.astype(np.float64)) for array in arrays.values())

    def attend(q, k, v, causal=True, window=1 << 30):  # type: ignore[no-untyped-def]
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        columns = k.shape[-2]
        distance = torch.arange(columns - q.shape[-2], columns)[:, None] - torch.arange(columns)
        seen = (distance >= 0) & (distance < window) if causal else distance == distance
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    q, k, v = (x.requires_grad_() for x in (q, k, v))
    y, lse = attend(q, k, v)
    turned, columns, values = (x.transpose(0, 1).detach().requires_grad_() for x in (rows, keys, keys))
    z, _ = attend(turned, columns, values)
    back = torch.autograd.grad(z, (turned, columns, values), given.transpose(0, 1))
    results = (
        *(y, lse, *torch.autograd.grad(y, (q, k, v), dy), *attend(q, k, v, window=5)),
        *(x.transpose(0, 1) for x in (z, *back)),
        *(attend(q, k, v, causal=False)[0], attend(some, k, v)[0], attend(ordered, k, v)[0]),
    )
    return tuple(result.detach().numpy() for result in results)


@pytest.mark.extra("torch")
@pytest.mark.parametrize(("mesh", "dtype"), list(zip(MESHES, DTYPES, strict=True)), ids=str)
def test_matches_torch(mesh: hw.Mesh, dtype: DType) -> None:
    fusion = in_zigzag(mesh, dtype)
    arrays = random_arrays(fusion, SIZES[mesh.size % len(SIZES)], seed=mesh.size)
    expect_every_way(fusion, arrays, by_torch(arrays), mesh.size)


@pytest.mark.gpu
@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", [hw.bf16, hw.f16, hw.f32], ids=str)
def test_on_gpus(dtype: DType) -> None:
    fusion = in_zigzag(MESHES[1], dtype)
    for size in (24, 4, *((1024,) if dtype != hw.f32 else ())):  # The error of long f32 sums would exceed the tolerance.
        arrays = random_arrays(fusion, {"B": 2, "S": size}, seed=size)
        expect(fusion, arrays, compiled(fusion, "cuda").run(**arrays, ranks=True))


@pytest.mark.parametrize("positions", ["S", "S@zigzag(cp)"])
def test_layers(positions: str) -> None:
    """Layers with heads over tp and rows over cp. Tables of rotary embeddings are replicated, or sharded like the rows."""
    mesh, x, wq, wk = hw.Mesh(cp=2, tp=2), hw.f32["S@zigzag(cp)", "E"], hw.f32["E", "4@tp", 16], hw.f32["E", "2@tp", 16]
    types = {"x": x, "wq": wq, "wk": wk, "wo": hw.f32["4@tp", 16, "E"], "g": hw.f32["E"], "cos": hw.f32[positions, 8]}

    @hw.block(**types)
    def layer(x, wq, wk, wo, g, cos):  # type: ignore[no-untyped-def]
        h = hw.rms_norm(x, g)
        q, k = (hw.permute_dims(hw.einsum("se,ehd->shd", h, w), (1, 0, 2)) for w in (wq, wk))
        q, k = (hw.rotary_embedding(t, cos, 1 - cos) for t in (q, k))
        y = hw.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        return x + hw.einsum("hsd,hde->se", y, wo)

    @hw.fusion(mesh=mesh, **types)
    def model(x, wq, wk, wo, g, cos):  # type: ignore[no-untyped-def]
        x = layer(x, wq, wk, wo, g, cos)
        return layer(x, wq, wk, wo, g, cos)

    assert [str(p.type) for p in lowered(model).outputs] == ["f32[S@zigzag(cp), E]"]
    arrays = random_arrays(model, {"S": 24, "E": 8}, seed=0)
    expect(model, arrays, compiled(model).run(**arrays, ranks=True))
    compiled(model).check()


def causal(axes: str, ranks: int, size: str = "S") -> Fusion:
    spec = hw.bf16[f"{size}@{axes}", 8, 64]

    @hw.fusion(mesh=hw.Mesh(cp=ranks), q=spec, k=spec, v=spec)
    def causal(q, k, v):  # type: ignore[no-untyped-def]
        q, k, v = (hw.permute_dims(x, (1, 0, 2)) for x in (q, k, v))
        return hw.permute_dims(hw.attention(q, k, v, "top_left")[0], (1, 0, 2))

    return causal


def scores(host: HostProgram, rank: int) -> int:
    """Number of scores per head that a rank computes, derived from the diagonals of the instructions."""
    types = {p.name: host.local_type(p) for p in (*host.inputs, *host.outputs)}
    total = 0
    for i in tree.walk(host.body):
        types |= i.defined(types)
        if isinstance(i, ir.Attention):
            rows, columns = (int(types[name].shape[-2]) for name in (i.q, i.k))
            assert i.diagonal is not None
            diagonal = evaluated(i.diagonal, {})(coordinates(host.mesh, rank))
            total += sum(min(columns, row + diagonal + 1) for row in range(rows))
    return total


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_rank_has_equal_work(ranks: int) -> None:
    """All ranks compute the same number of scores. Keys and values are each sent once, and reordered by one launch each. The result is
    written directly to the output."""
    size = 16 * ranks
    host = lower(causal("zigzag(cp)", ranks, str(size)), hw.Options())
    work = [scores(host, rank) for rank in range(ranks)]
    assert set(work) == {size * (size + 1) // 2 // ranks}
    in_order = lower(causal("cp", ranks, str(size)), hw.Options())
    assert scores(in_order, ranks - 1) > 1.4 * work[-1]
    kinds = [type(i).__name__ for i in tree.walk(host.body)]
    assert kinds.count("AllGather") + kinds.count("LaunchAllGather") == 2
    assert (kinds.count("Copy"), kinds.count("Launch")) == (0, 2)
    assert kinds.count("Attention") == 2


@pytest.mark.parametrize(
    ("fact", "other"),
    [
        ("diagonal (1 - rank.cp) * 4 + 8", "diagonal rank.cp * 4 + 8"),  # The second piece of a rank has the other rank's diagonal.
        ("axis=1, halves=0", "axis=0, halves=1"),  # The pieces of the keys are in a wrong order.
    ],
)
def test_positions_of_rows_in_the_program(fact: str, other: str) -> None:
    fusion = causal("zigzag(cp)", 2, "16")
    text = str(lower(fusion, hw.Options()))
    assert fact in text
    arrays = random_arrays(fusion, {}, seed=0)
    right, wrong = (interpret(HostProgram.parse(program), arrays) for program in (text, text.replace(fact, other)))
    expect(fusion, arrays, [tuple(rank.values()) for rank in right])
    with pytest.raises(AssertionError):
        expect(fusion, arrays, [tuple(rank.values()) for rank in wrong])


def test_arguments_that_zigzag_does_not_support() -> None:
    spec = hw.bf16["B", 4, "S@zigzag(cp)", 64]
    mesh = hw.Mesh(cp=2)

    @hw.fusion(mesh=mesh, q=spec, k=spec, v=spec, n=hw.i32["B"])
    def of_lengths(q, k, v, n):  # type: ignore[no-untyped-def]
        return hw.attention(q, k, v, "top_left", lengths=n)[0]

    @hw.fusion(mesh=mesh, q=spec, k=hw.bf16["B", 4, "T", 64], v=hw.bf16["B", 4, "T", 64])
    def of_others(q, k, v):  # type: ignore[no-untyped-def]
        return hw.attention(q, k, v, "top_left")[0]

    place = r"test_attention_in_zigzag.py:\d+: attention: rows of .* are in zigzag"
    with pytest.raises(
        ProgramError, match=f"{place}, which supports no lengths or bias together with a causal mask; shard the rows in order, as S@cp"
    ):
        lower(of_lengths, hw.Options())
    with pytest.raises(ProgramError, match=f"{place}, but there are T keys for S rows; shard the rows in order, as S@cp"):
        lower(of_others, hw.Options())
    with pytest.raises(ArgumentError, match=r"\(S = 6\) cannot be divided evenly by 2 ranks along cp in two pieces each; pad it to 8"):
        compiled(causal("zigzag(cp)", 2)).run(*(np.zeros((6, 8, 64), ml_dtypes.bfloat16) for _ in range(3)))
