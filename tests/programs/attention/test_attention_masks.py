"""Masks of attention other than causal masks: a bias of the scores, and packed sequences. Forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from attention_cases import as_torch, by_torch, grouped, refusal_of_gradients
from compiled_fusions import compiled, expect, expect_every_way, lowered, random_arrays, reference

import hostweave as hw
from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.types.tensor import DType


@cache
def masked(ranks: int, t: DType) -> Fusion:
    """Attention with biases of several shapes, with sharded keys or rows, and with packed sequences in several layouts."""

    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        **grouped(ranks, t),
        bias=t[f"{4 * ranks}@x", "S", "T"],
        of_columns=t["B", 1, 1, "T"],
        n=hw.i32["B"],
        some=t["B", 4, 7, 16],
        cache=t["B", 2, "U@x", 16],
        near=t[1, 7, "U@x"],
        rows=t[4, "U@x", 16],
        keys=t[2, "U", 16],
        of_rows=t["U@x", "U"],
        p=t["W", "B@x", 4, 16],
        r=t["W", "B@x", 2, 16],
        begins=hw.i32["B@x", 5],
        one=t[f"{2 * ranks}@x", "V", 16],
        alone=hw.i32["N"],
    )
    def masked(q, k, v, bias, of_columns, n, some, cache, near, rows, keys, of_rows, p, r, begins, one, alone):  # type: ignore[no-untyped-def]
        def both(q, k, v, **how):  # type: ignore[no-untyped-def]
            y, lse = hw.attention(q, k, v, enable_gqa=True, **how)
            return y, lse, *hw.attention_backward(q, k, v, y, y, lse, enable_gqa=True, **how)

        tokens, packed = (hw.permute_dims(x, (1, 2, 0, 3)) for x in (p, r))
        return (
            *both(q, k, v, bias=bias),
            *both(q, k, v, bias=of_columns, lengths=n, causal="bottom_right", window=5),
            hw.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True),
            hw.scaled_dot_product_attention(q, k, v, of_columns > 0, enable_gqa=True, lengths=n),
            *hw.attention(some, cache, cache, "bottom_right", enable_gqa=True, bias=near),
            *both(rows, keys, keys, causal="top_left", bias=of_rows),
            *both(tokens, packed, packed, offsets=begins),
            *both(tokens, packed, packed, offsets=begins, causal="bottom_right", window=3),
            *both(one, one, one, offsets=alone, causal="top_left", scale=0.3),
        )

    return masked


def wanted(arrays: dict[str, Any]) -> tuple[Any, ...]:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    q, k, v, bias, of_columns, n, some, cached, near, rows, keys, of_rows, p, r, begins, one, alone = as_torch(arrays)
    tokens, packed = (x.permute(1, 2, 0, 3) for x in (p, r))
    hidden = torch.where(of_columns > 0, 0.0, -torch.inf)
    results = (
        *by_torch(q, k, v, bias=bias),
        *by_torch(q, k, v, "bottom_right", 5, lengths=n, bias=of_columns),
        by_torch(q, k, v, bias=bias)[0],
        by_torch(q, k, v, bias=hidden, lengths=n)[0],
        *by_torch(some, cached, cached, "bottom_right", bias=near)[:2],
        *by_torch(rows, keys, keys, "top_left", bias=of_rows),
        *by_torch(tokens, packed, packed, offsets=begins),
        *by_torch(tokens, packed, packed, "top_left", 3, offsets=begins),
        *by_torch(one, one, one, "top_left", scale=0.3, offsets=alone),
    )
    return tuple(result.numpy() for result in results)


def arrays_of(fusion: Fusion, ranks: int) -> dict[str, Any]:
    """Random inputs. The bias masks random scores, and all scores of one row of a head. Some sequences are empty, and some
    tokens are in no sequence."""
    arrays = random_arrays(fusion, {"B": 3, "S": 9, "T": 13, "U": 70, "V": 300, "W": 80, "N": 4}, seed=ranks)
    hidden = np.random.default_rng(ranks).random(arrays["bias"].shape) < 0.3
    arrays["bias"][hidden] = -np.inf
    arrays["bias"][1, 2] = -np.inf
    arrays["of_columns"][1] = -1
    arrays["n"] = np.array([13, 7, 1], np.int32)
    # Inputs are small, because gradients of a nearly one-hot softmax amplify rounding errors.
    arrays = {name: x if x.dtype == np.int32 else x / x.dtype.type(4) for name, x in arrays.items()}
    arrays["begins"] = np.array([[0, 20, 20, 77, 80], [3, 8, 66, 67, 75], [20, 20, 20, 20, 20]], np.int32)
    arrays["alone"] = np.array([0, 64, 65, 299], np.int32)
    return arrays


@pytest.mark.extra("torch")
@pytest.mark.parametrize(("ranks", "dtype"), [(1, hw.f32), (2, hw.bf16), (3, hw.f16), (4, hw.f16)], ids=str)
def test_matches_torch(ranks: int, dtype: DType) -> None:
    fusion = masked(ranks, dtype)
    assert not any(isinstance(i, ir.Matmul) for i in tree.walk(lowered(fusion).body))
    arrays = arrays_of(fusion, ranks)
    expect_every_way(fusion, arrays, wanted(arrays), ranks)


@pytest.mark.gpu
@pytest.mark.parametrize(("ranks", "dtype"), [(1, hw.f32), (1, hw.f16), (1, hw.bf16), (2, hw.f16)], ids=str)
def test_on_gpus(ranks: int, dtype: DType) -> None:
    if len(gpus()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    fusion = masked(ranks, dtype)
    arrays = arrays_of(fusion, ranks)
    expect(fusion, arrays, compiled(fusion, "cuda").run(**arrays, ranks=True))


@pytest.mark.extra("torch")
def test_gradients_of_biases_that_are_composed() -> None:
    """Attention in f64 is composed of other ops. Heads are grouped. A bias has all dims, some dims, or dims that are broadcast."""
    shapes = {"q": (2, 6, 5, 12), "k": (2, 3, 7, 12), "whole": (2, 6, 5, 7), "once": (1, 6, 1, 7), "few": (5, 7)}

    @hw.fusion(**{name: hw.f64[shape] for name, shape in shapes.items()})
    def composed(q, k, **biases):  # type: ignore[no-untyped-def]
        results = []
        for bias in biases.values():
            y, lse = hw.attention(q, k, k, "bottom_right", enable_gqa=True, bias=bias)
            results += [y, lse, *hw.attention_backward(q, k, k, y, y, lse, "bottom_right", enable_gqa=True, bias=bias)]
        return tuple(results)

    assert "attention(" not in str(composed)
    arrays = random_arrays(composed, {}, seed=0)
    q, k, *biases = as_torch(arrays)
    want = [result for bias in biases for result in by_torch(q, k, k, "bottom_right", bias=bias)]
    for index, (got, expected) in enumerate(zip(reference(composed, arrays), want, strict=True)):
        np.testing.assert_allclose(got, expected, 1e-6, 1e-6, err_msg=f"result {index}")  # A log-sum-exp is rounded to f32.


def test_a_program_has_the_kernels_that_it_may_need() -> None:
    """A program links attention kernels of this package only if it may need features that cuDNN lacks."""

    def libraries(t: DType, size: int, **how: Any) -> set[str]:
        @hw.fusion(mesh=hw.Mesh(x=2), q=t[4, "S@x", size], k=t[4, "S", size], bias=t["S@x", "S"], o=hw.i32["N"])
        def attended(q, k, bias, o):  # type: ignore[no-untyped-def]
            masks = {"bias": bias} if how.get("bias") else {"offsets": o} if how.get("packed") else {}
            q = k if masks.get("offsets") is not None else q
            y, lse = hw.attention(q, k, k, how.get("causal"), **masks)
            if how.get("forward"):
                return y
            return hw.attention_backward(q, k, k, y, y, lse, how.get("causal"), **masks)[how.get("first", 0) :]

        return set(lowered(attended).libraries) - {"attention"}

    assert libraries(hw.bf16, 128, causal="top_left") == libraries(hw.f16, 16, causal="bottom_right") == set()
    assert libraries(hw.bf16, 64, bias=True, forward=True) == libraries(hw.bf16, 64, packed=True) == set()
    assert libraries(hw.f32, 20) == {"attention_f32_64"}
    assert libraries(hw.bf16, 96, packed=True) == set()
    assert libraries(hw.bf16, 72, packed=True) == {"attention_bf16_128"}
    assert libraries(hw.f16, 64, bias=True) == {"attention_f16_64"}  # The gradient of a bias needs the kernels.
    assert libraries(hw.bf16, 200, bias=True, causal="bottom_right", forward=True) == {"attention_bf16_256"}


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "bias of another dtype": (lambda q, k, n: hw.attention(q, k, k, bias=n), r"a bias of i32\[B, 3\] is not bf16\[B, 4, S, T\]"),
    "bias of another shape": (
        lambda q, k, n: hw.attention(q, k, k, bias=q),
        r"a bias of bf16\[B, 4, S, 16\] is not bf16\[B, 4, S, T\], whose dims before the last one may be 1; cast it",
    ),
    "bias of a number": (lambda q, k, n: hw.attention(q, k, k, bias=k[..., :1]), r"a bias of bf16\[B, 4, T, 1\] is not"),
    "bias of a row": (lambda q, k, n: hw.attention_backward(q, k, k, q, q, hw.sum(q, -1), bias=q[0, 0, 0]), "output|lse is"),
    "packed keys": (
        lambda q, k, n: hw.attention(q, k, k, offsets=n),
        r"packed sequences need as many queries as keys, but queries are bf16\[B, 4, S, 16\] and keys bf16\[B, 4, T, 16\]; pad them",
    ),
    "offsets": (
        lambda q, k, n: hw.attention(q, q, q, offsets=n[0]),
        r"offsets of i32\[3\] are not i32\[B, N \+ 1\], the starts of N sequences and the end of the last one",
    ),
    "offsets and lengths": (
        lambda q, k, n: hw.attention(q, q, q, offsets=n, lengths=n[:, 0]),
        "packed sequences support no lengths, bias or blocks; leave one of them out",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    compute, why = MISTAKES[name]
    with pytest.raises(ProgramError, match=rf"test_attention_masks.py:\d+: attention(_backward)?: .*({why})"):
        hw.fusion(q=hw.bf16["B", 4, "S", 16], k=hw.bf16["B", 4, "T", 16], n=hw.i32["B", 3])(compute)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("%q, %q, %q, scale=1.0, bias=true", "takes 4 operands with a bias, and optionally lengths, not 3"),
        ("%q, %q, %q, %q, scale=1.0, bias=true", "a bias of bf16[2, 4, S, 8] is not bf16[2, 4, S, S]"),
        ("%q, %q, %q, %b, %o, scale=1.0, bias=true, packed=true", "packed sequences support no lengths, bias or blocks; leave one"),
        ("%q, %q, %q, %b, scale=1.0, packed=true", "offsets of bf16[2, 4, S, S] are not i32[2, N + 1], the starts of N sequences"),
    ],
)
def test_mistakes_in_fusion_ir(text: str, why: str) -> None:
    inputs = "%q: bf16[2, 4, S, 8], %b: bf16[2, 4, S, S], %o: i32[2, 5]"
    with pytest.raises(ProgramError) as error:
        Fusion.parse(f"fusion @f({inputs}) {{\n  %y: bf16[2, 4, S, 8] = attention({text})\n  return %y\n}}\n")
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bias %q", "%q: a bias of bf16[2, 4, S, 8] is not bf16[2, 4, S, S], whose dims before the last one may be 1"),
        ("bias %b, %b", "bias is one buffer: name one"),
        ("bias %t", "the elements of a row of %t are not contiguous: copy it to a contiguous buffer first"),
        ("offsets %b", "%b: offsets of bf16[2, 4, S, S] are not i32[2, N + 1], the starts of N sequences"),
        ("offsets %o, %o", "offsets are one buffer: name one"),
        ("bias %b offsets %o", "packed sequences support neither lengths nor a bias: remove one of them"),
    ],
)
def test_mistakes_in_host_ir(text: str, why: str) -> None:
    head = "host @f(%q: bf16[2, 4, S, 8], %b: bf16[2, 4, S, S], %o: i32[2, 5]) -> (%y: bf16[2, 4, S, 8]) mesh(x=1)"
    body = f"  %t = permute %b by [0, 1, 3, 2]\n  attention %q, %q, %q scaled 1.0 {text} -> %y\n"
    with pytest.raises(ProgramError) as error:
        verify_host(HostProgram.parse(f"{head} {{\n{body}}}\n"))
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "bias %b -> %x, %y, %z dbias %u",
            "%u is bf16[2, 4, S, 8], and %b bf16[2, 4, S, S]: a gradient must have the shape of its operand",
        ),
        ("-> %x, %y, %z dbias %w", "dbias needs one bias and one result: name one of each"),
        ("bias %b -> %x, %y, %z dbias %w, %v", "dbias needs one bias and one result: name one of each"),
        ("kernels f32_64 -> %x, %y, %z", "kernels f32_64: these operands need bf16_64 or bf16_128 or bf16_256"),
    ],
)
def test_mistakes_of_gradients_in_host_ir(text: str, why: str) -> None:
    results = ", ".join(f"%{name}: bf16[2, 4, S, {'S' if name in 'vw' else 8}]" for name in "xyzuvw")
    inputs = "%q: bf16[2, 4, S, 8], %b: bf16[2, 4, S, S], %l: f32[2, 4, S]"
    assert why in refusal_of_gradients(inputs, results, f"%q, %q, %q, %q, %q, %l scaled 1.0 {text}")


def test_without_a_bias_there_is_no_gradient_of_a_bias() -> None:
    operands = "%q, %q, %q, %q, %q, %l, scale=1.0"
    text = f"fusion @f(%q: bf16[4, S, 8], %l: f32[4, S]) {{\n  %y: bf16[S, S] = attention_bias_gradient({operands})\n  return %y\n}}\n"
    with pytest.raises(ProgramError, match="is the gradient of a bias, but there is no bias; add a bias, and bias=true"):
        Fusion.parse(text)


def test_explain_names_the_kernels() -> None:
    """cuDNN computes the first four calls. cuDNN lacks the masks, head sizes or dtypes of the remaining calls."""

    @hw.fusion(
        mesh=hw.Mesh(x=2),
        q=hw.bf16[4, "S", 64],
        k=hw.bf16[4, "T", 64],
        bias=hw.bf16["S", "T"],
        o=hw.i32["N"],
        rows=hw.bf16[4, "U@x", 64],
        n=hw.i32[()],
        wide=hw.f32[4, "S", 64],
    )
    def several(q, k, bias, o, rows, n, wide):  # type: ignore[no-untyped-def]
        return (
            hw.attention(q, k, k, bias=bias)[0],
            hw.attention(q, k, k, "top_left", bias=bias)[0],
            hw.attention(q, q, q, offsets=o)[0],
            hw.attention(q, k, k, "bottom_right", lengths=n)[0],
            hw.attention(q, k, k, "bottom_right", bias=bias)[0],
            hw.attention(q, k, k, "top_left", 4, bias=bias)[0],
            hw.attention(rows, k, k, "bottom_right", lengths=n)[0],
            hw.attention(q[..., :16], q[..., :16], q[..., :16], offsets=o)[0],
            hw.attention(wide, wide, wide)[0],
        )

    said = [line.split(": ")[1] for line in hw.compile(several).explain().splitlines() if " = attention" in line]
    by_kernel = [line.startswith("a kernel of this package") for line in said]
    assert by_kernel == [False] * 4 + [True] * 5
    assert [", without tensor cores" in line for line in said] == [False] * 8 + [True]


def test_a_tensor_without_offsets_is_refused() -> None:
    @hw.fusion(q=hw.bf16[4, "S", 16], o=hw.i32["N"])
    def packed(q, o):  # type: ignore[no-untyped-def]
        return hw.attention(q, q, q, offsets=o)[0]

    arrays = random_arrays(packed, {"S": 3, "N": 0}, seed=0)
    with pytest.raises(ExecutionError, match=r"attention: the tensor of offsets is empty: pass n \+ 1 offsets for n packed sequences"):
        compiled(packed).run(**arrays)
    assert not compiled(packed).run(arrays["q"], np.zeros(1, np.int32)).any()


def test_rows_that_are_not_aligned_are_copied() -> None:
    """Rows that are not aligned to 16 bytes are copied for cuDNN. Aligned rows, and rows of f32, are read in place."""

    def copies(t: DType, size: int) -> int:
        @hw.fusion(x=t[4, "S", size])
        def sliced(x):  # type: ignore[no-untyped-def]
            return hw.scaled_dot_product_attention(x[..., :16], x[..., :16], x[..., :16])

        arrays = random_arrays(sliced, {"S": 9}, seed=0)
        expect(sliced, arrays, compiled(sliced).run(**arrays, ranks=True))
        return sum(isinstance(i, ir.Copy) for i in tree.walk(lowered(sliced).body))

    assert copies(hw.bf16, 18) > 0
    assert copies(hw.bf16, 24) == copies(hw.f32, 18) == 0
