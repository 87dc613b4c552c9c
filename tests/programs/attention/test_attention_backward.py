"""Backward pass of attention as one instruction. Masks, groups, layouts, lengths and shardings, compared with autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention_cases import as_torch, by_torch, grouped, refusal_of_gradients
from compiled_fusions import expect_every_way, lowered, random_arrays

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.types.tensor import DType

SIZES = {"B": 3, "C": 3, "S": 9, "T": 13, "U": 70, "V": 300}


def gradients(ranks: int, t: DType) -> Fusion:
    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        **grouped(ranks, t),
        dy=t["B", f"{4 * ranks}@x", "S", 24],
        p=t["S", "C@x", 4, 8],
        r=t["T", "C@x", 2, 8],
        n=hw.i32["C@x"],
        a=t[4, "U@x", 16],
        b=t[2, "V", 16],
        da=t[4, "U@x", 16],
    )
    def gradients(q, k, v, dy, p, r, n, a, b, da):  # type: ignore[no-untyped-def]
        def of(q, k, v, dy, **how):  # type: ignore[no-untyped-def]
            y, lse = hw.attention(q, k, v, enable_gqa=True, **how)
            return hw.attention_backward(q, k, v, y, dy, lse, enable_gqa=True, **how)

        turned, keys = (hw.permute_dims(x, (1, 2, 0, 3)) for x in (p, r))
        return (
            *of(q, k, v, dy, causal="top_left"),
            *of(q, k, v, dy, causal="bottom_right", window=3, scale=0.5),
            *of(turned, keys, keys, turned),
            *of(turned, keys, keys, turned, causal="bottom_right", lengths=n),
            *of(a, b, b, da, causal="bottom_right"),
            *of(a, b, b, da, causal="top_left", window=40),
        )

    return gradients


def wanted(arrays: dict[str, Any]) -> tuple[Any, ...]:
    q, k, v, dy, p, r, n, a, b, da = as_torch(arrays)

    def of(*operands: Any, **how: Any) -> tuple[Any, ...]:
        return by_torch(*operands, **how)[2:]

    turned, keys = (x.permute(1, 2, 0, 3) for x in (p, r))
    results = (
        *of(q, k, v, "top_left", given=dy),
        *of(q, k, v, "bottom_right", 3, 0.5, given=dy),
        *of(turned, keys, keys, given=turned),
        *of(turned, keys, keys, "bottom_right", given=turned, lengths=n),
        *of(a, b, b, "bottom_right", given=da),
        *of(a, b, b, "top_left", 40, given=da),
    )
    return tuple(result.numpy() for result in results)


@pytest.mark.extra("torch")
@pytest.mark.parametrize(("ranks", "dtype"), [(1, hw.f16), (2, hw.f32), (3, hw.bf16), (4, hw.f16)], ids=str)
def test_matches_torch(ranks: int, dtype: DType) -> None:
    fusion = gradients(ranks, dtype)
    for sizes in (SIZES, {**SIZES, "C": ranks, "S": 1, "U": 1, "T": 1, "V": 2}):  # Only the first rank has a row of U.
        arrays = random_arrays(fusion, sizes, seed=ranks)
        arrays["n"] = np.array([13, 5, 1, 4][: sizes["C"]], np.int32).clip(max=sizes["T"])
        expect_every_way(fusion, arrays, wanted(arrays), ranks, interprets=sizes != SIZES)


def test_three_gradients_are_one_instruction() -> None:
    """Each backward pass is one instruction, without matmuls. If only the gradient of the keys is used, it is written directly to the
    output."""
    instructions = list(tree.walk(lowered(gradients(2, hw.bf16)).body))
    assert sum(isinstance(i, ir.AttentionBackward) for i in instructions) == 6
    assert sum(isinstance(i, ir.Attention) for i in instructions) == 6
    assert not any(isinstance(i, ir.Matmul) for i in instructions)

    @hw.fusion(q=hw.bf16[2, "S", 16], k=hw.bf16[2, "T", 16], y=hw.bf16[2, "S", 16], lse=hw.f32[2, "S"])
    def keys_alone(q, k, y, lse):  # type: ignore[no-untyped-def]
        return hw.attention_backward(q, k, k, y, y, lse)[1]

    (made,) = (i for i in tree.walk(lowered(keys_alone).body) if isinstance(i, ir.AttentionBackward))
    assert made.dk == lowered(keys_alone).outputs[0].name


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "output": (lambda q, lse: hw.attention_backward(q, q, q, lse, q, lse), r"output is f32\[B, 4, S\], not bf16\[B, 4, S, 16\]"),
    "gradient": (
        lambda q, lse: hw.attention_backward(q, q, q, q, q[:1], lse),
        r"output_gradient is bf16\[1, 4, S, 16\], not bf16\[B, 4, S, 16\]; pass the result of attention, or its gradient",
    ),
    "lse": (lambda q, lse: hw.attention_backward(q, q, q, q, q, q), r"lse is bf16\[B, 4, S, 16\], not f32\[B, 4, S\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    compute, why = MISTAKES[name]
    with pytest.raises(ProgramError, match=rf"test_attention_backward.py:\d+: attention_backward: {why}"):
        hw.fusion(q=hw.bf16["B", 4, "S", 16], lse=hw.f32["B", 4, "S"])(compute)


@pytest.mark.parametrize(
    ("operands", "why"),
    [
        ("%q, %q, %q, %q, %q", "takes 6 operands, and optionally lengths, not 5"),
        ("%q, %q, %q, %q, %lse, %lse", "f32[2, 4, S] is not bf16[2, 4, S, 8], the type of attention's result and of its gradient"),
    ],
)
def test_mistakes_in_fusion_ir(operands: str, why: str) -> None:
    text = (
        f"fusion @f(%q: bf16[2, 4, S, 8], %lse: f32[2, 4, S]) {{\n  %y: bf16[2, 4, S, 8] = attention_key_gradient({operands}, scale=1.0)\n"
    )
    with pytest.raises(ProgramError) as error:
        Fusion.parse(text + "  return %y\n}\n")
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("operands", "why"),
    [
        (
            "%q, %q, %q, %q, %q, %l scaled 1.0 -> %k, %a, %b",
            "%k is bf16[2, 4, S, 8], and %q bf16[2, 2, S, 8]: a gradient must have the shape",
        ),
        ("%q, %q, %q, %q, %q, %m scaled 1.0 -> %a, %b, %c", "%m is f32[2, 4, S], but lse must be contiguous f32[2, 2, S]"),
    ],
)
def test_mistakes_in_host_ir(operands: str, why: str) -> None:
    results = ", ".join(f"%{name}: bf16[2, {4 if name == 'k' else 2}, S, 8]" for name in "abck")
    inputs = "%q: bf16[2, 2, S, 8], %l: f32[2, 2, S], %m: f32[2, 4, S]"
    assert why in refusal_of_gradients(inputs, results, operands)
