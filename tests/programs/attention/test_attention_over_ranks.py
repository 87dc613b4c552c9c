"""Attention with sharded keys, and with sharded queries and keys. The results of blocks of keys are combined. Heads may be sharded too."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled, expect, expect_every_way, lowered, random_arrays
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.types.tensor import DType

MESHES = [hw.Mesh(tp=1, cp=1), hw.Mesh(tp=1, cp=2), hw.Mesh(tp=1, cp=3), hw.Mesh(tp=2, cp=2), hw.Mesh(tp=2, cp=4)]

DTYPES = [hw.bf16, hw.f16, hw.bf16, hw.bf16, hw.f16]


@cache
def over_ranks(mesh: hw.Mesh, t: DType) -> Fusion:
    """Attention of one or 7 queries per head to sharded keys. Attention of sharded queries to sharded keys, with gradients."""
    heads, groups = f"{4 * mesh.axis_size('tp')}@tp", f"{2 * mesh.axis_size('tp')}@tp"

    @hw.fusion(
        mesh=mesh,
        one=t["B", heads, 1, 16],
        some=t["B", heads, 7, 16],
        k=t["B", groups, "T@cp", 16],
        v=t["B", groups, "T@cp", 24],
        n=hw.i32["B"],
        q=t[heads, "U@cp", 16],
        keys=t[groups, "U@cp", 16],
        values=t[groups, "U@cp", 16],
        dq=t[heads, "U@cp", 16],
    )
    def over_ranks(one, some, k, v, n, q, keys, values, dq):  # type: ignore[no-untyped-def]
        def attend(q, *how, **more):  # type: ignore[no-untyped-def]
            return hw.attention(q, k, v, *how, enable_gqa=True, **more)

        token, rows = attend(one, "bottom_right", lengths=n), attend(some, "bottom_right")
        near, first = attend(some, "bottom_right", 3), attend(some, "top_left", scale=0.3)
        gathered = attend(some, "bottom_right", lengths=n)[0]
        padded = attend(some, lengths=n)[0]
        y, lse = hw.attention(q, keys, values, "top_left", enable_gqa=True)
        return (
            *(*token, *rows, *near, *first, gathered, padded, attend(one)[1]),
            *(y, lse, *hw.attention_backward(q, keys, values, y, dq, lse, "top_left", enable_gqa=True)),
        )

    return over_ranks


def by_torch(arrays: dict[str, Any]) -> tuple[Any, ...]:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    one, some, k, v, n, q, keys, values, dq = (torch.from_numpy(array.astype(np.float64)) for array in arrays.values())

    def attend(q, k, v, causal="", window=1 << 30, scale=None, ends=None):  # type: ignore[no-untyped-def]
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        length = torch.tensor(k.shape[-2]) if ends is None else ends[:, None, None, None]
        distance = rows - columns + (length - q.shape[-2] if causal == "bottom_right" else 0)
        seen = (columns < length) & ((distance >= 0) & (distance < window) if causal else True)
        scores = (q @ k.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~seen, -torch.inf)
        return torch.nan_to_num(scores.softmax(-1)) @ v, scores.logsumexp(-1)

    q, keys, values = (x.requires_grad_() for x in (q, keys, values))
    y, lse = attend(q, keys, values, "top_left")
    results = (
        *attend(one, k, v, "bottom_right", ends=n),
        *attend(some, k, v, "bottom_right"),
        *attend(some, k, v, "bottom_right", 3),
        *attend(some, k, v, "top_left", scale=0.3),
        attend(some, k, v, "bottom_right", ends=n)[0],
        attend(some, k, v, ends=n)[0],
        attend(one, k, v)[1],
        *(y, lse, *torch.autograd.grad(y, (q, keys, values), dq)),
    )
    return tuple(result.detach().numpy() for result in results)


@pytest.mark.extra("torch")
@pytest.mark.parametrize(("mesh", "dtype"), list(zip(MESHES, DTYPES, strict=True)), ids=str)
def test_matches_torch(mesh: hw.Mesh, dtype: DType) -> None:
    """On some meshes, ranks have unequal numbers of keys, no keys, or no valid keys."""
    fusion = over_ranks(mesh, dtype)
    for sizes in ({"B": 3, "T": 29, "U": 70}, {"B": 2, "T": 9, "U": 2}):
        arrays = random_arrays(fusion, sizes, seed=mesh.size)
        arrays["n"] = np.array([sizes["T"], 7, 8][: sizes["B"]], np.int32)
        expect_every_way(fusion, arrays, by_torch(arrays), mesh.size)


@pytest.mark.gpu
@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sizes", [{"B": 3, "T": 29, "U": 70}, {"B": 2, "T": 9, "U": 2}, {"B": 2, "T": 2100, "U": 1500}], ids=str)
def test_on_gpus(sizes: dict[str, int]) -> None:
    fusion = over_ranks(MESHES[1], hw.f16)
    arrays = random_arrays(fusion, sizes, seed=0)
    arrays["n"] = np.array([sizes["T"], 7, 8][: sizes["B"]], np.int32)
    expect(fusion, arrays, compiled(fusion, "cuda").run(**arrays, ranks=True))


def test_keys_are_not_sent() -> None:
    """Keys are sent only if queries are sharded, or if several queries have a window, or lengths and a causal mask.

    Otherwise, ranks send one number and one result per query.
    """
    cached = hw.bf16[2, 4, "T@cp", 16]

    def gathered(compute, **inputs):  # type: ignore[no-untyped-def]
        fusion = hw.fusion(mesh=hw.Mesh(cp=2), k=cached, n=hw.i32[2], **inputs)(compute)
        instructions = list(tree.walk(lowered(fusion).body))
        assert sum(isinstance(i, ir.Attention) for i in instructions) == 1
        travels = (i for i in instructions if isinstance(i, ir.AllGather | ir.AllReduce | ir.LaunchExchange))
        return [(tree.names(i, "read")[0], not isinstance(i, ir.AllGather | ir.LaunchAllGather)) for i in travels]

    def token(q, k, n):  # type: ignore[no-untyped-def]
        return hw.scaled_dot_product_attention(q, k, k, is_causal=True, lengths=n)

    def of_rows(q, k, n):  # type: ignore[no-untyped-def]
        return hw.attention(q, k, k, "bottom_right")

    def near(q, k, n):  # type: ignore[no-untyped-def]
        return hw.attention(q, k, k, "bottom_right", 2)

    assert [is_sum for _, is_sum in gathered(token, q=hw.bf16[2, 4, 1, 16])] == [False, True]
    assert [is_sum for _, is_sum in gathered(of_rows, q=hw.bf16[2, 4, 5, 16])] == [False, True]
    for compute, rows in ((token, "S"), (of_rows, "S@cp"), (near, 5)):
        travels = gathered(compute, q=hw.bf16[2, 4, rows, 16])
        assert travels
        assert all("k" in name and not is_sum for name, is_sum in travels)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("attention(%q, %q, %q, scale=1.0, blocks=-2)", "blocks=-2 is not a number of blocks of keys"),
        (
            "attention(%q, %q, %q, %n, scale=1.0, causal=top_left, blocks=2)",
            "lengths and a causal mask exclude each other for blocks of keys",
        ),
        ("attention(%q, %q, %q, %m, scale=1.0, blocks=2)", "lengths of i32[2] are not i32[2, 2], the number of valid keys"),
    ],
)
def test_mistakes_in_fusion_ir(text: str, why: str) -> None:
    inputs = "%q: bf16[2, 4, S, 8], %n: i32[2, 2], %m: i32[2]"
    with pytest.raises(ProgramError) as error:
        Fusion.parse(f"fusion @f({inputs}) {{\n  %y: bf16[2, 2, 4, S, 8] = {text}\n  return %y\n}}\n")
    assert why in str(error.value)


def test_mistake_in_host_ir() -> None:
    from hostweave.host_ir.verify import verify_host

    head = "host @f(%q: bf16[2, 4, S, 8]) -> (%y: bf16[2, 4, S, 8]) mesh(x=1)"
    with pytest.raises(ProgramError, match="blind ones: write blind zeros, or remove it"):
        verify_host(HostProgram.parse(f"{head} {{\n  attention %q, %q, %q scaled 1.0 blind ones -> %y\n}}\n"))


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("keys", [1, 3, 9])
def test_an_int_number_of_keys_that_ranks_do_not_divide(keys: int, ranks: int) -> None:
    """The last ranks may have fewer keys, or none."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), q=hw.f32[2, 4, 8], k=hw.f32[2, f"{keys}@x", 8], v=hw.f32[2, f"{keys}@x", 8])
    def attended(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return *hw.attention(q, k, v), hw.attention(q[:, :1], k, v, "bottom_right")[0]

    arrays = random_arrays(attended, {}, seed=keys)
    expect(attended, arrays, compiled(attended).run(**arrays, ranks=True))


def expect_results(fusion: Fusion, arrays: dict[str, Any]) -> None:
    compiled(fusion).check()
    expect(fusion, arrays, [tuple(rank.values()) for rank in interpret(lowered(fusion), arrays)])


@pytest.mark.parametrize("keys", ["S@tp", "S@cp,tp", "S@zigzag(tp)"])
def test_causal_rows_in_zigzag_attend_to_gathered_keys(keys: str) -> None:
    rows, keys_type = hw.f32[2, "S@zigzag(cp)", 8], hw.f32[2, keys, 8]

    @hw.fusion(mesh=hw.Mesh(cp=2, tp=2), q=rows, k=keys_type, v=keys_type, dy=rows)
    def causal(q, k, v, dy):  # type: ignore[no-untyped-def]
        y, lse = hw.attention(q, k, v, "top_left")
        return (y, lse, *hw.attention_backward(q, k, v, y, dy, lse, "top_left"))

    expect_results(causal, random_arrays(causal, {"S": 16}, seed=0))


def test_keys_on_axes_of_different_sizes_with_the_same_lengths() -> None:
    @hw.fusion(mesh=hw.Mesh(a=2, b=3), q=hw.f32[2, "S", 8], k=hw.f32[2, "T@a", 8], other=hw.f32[2, "T@b", 8], n=hw.i32[()])
    def twice(q, k, other, n):  # type: ignore[no-untyped-def]
        return tuple(hw.scaled_dot_product_attention(q, keys, keys, lengths=n) for keys in (k, other))

    expect_results(twice, {**random_arrays(twice, {"S": 3, "T": 12}, seed=0), "n": np.array(7, np.int32)})
