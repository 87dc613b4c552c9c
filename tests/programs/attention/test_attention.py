"""Attention, mostly as one instruction: results, allocations, copies and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled, expect, expect_every_way, lowered, random_arrays
from cuda_here import needs_cuda
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import BuildError, ExecutionError, ProgramError
from hostweave.build import cuda
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.runtime.cpu import parallel
from hostweave.types.tensor import DType

SIZES = {"B": 3, "C": 5, "S": 9, "T": 13, "U": 70, "V": 300}


def attention(ranks: int, t: DType) -> Fusion:
    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        q=t["B", f"{4 * ranks}@x", "S", 16],
        k=t["B", f"{2 * ranks}@x", "T", 16],
        v=t["B", f"{2 * ranks}@x", "T", 24],
        p=t["S", "C@x", 4, 8],
        r=t["T", "C@x", 2, 8],
        a=t[2, "U@x", 16],
        b=t[2, "V@x", 16],
        one=t["B", f"{4 * ranks}@x", 1, 16],
    )
    def attention(q, k, v, p, r, a, b, one):  # type: ignore[no-untyped-def]
        def heads(x):  # type: ignore[no-untyped-def]
            return hw.permute_dims(x, (1, 2, 0, 3))

        y, lse = hw.attention(q, k, v, "top_left", enable_gqa=True)
        beside = hw.attention(q, k, v, "bottom_right", window=3, scale=0.5, enable_gqa=True)
        turned = hw.scaled_dot_product_attention(heads(p), heads(r), heads(r), enable_gqa=True)
        merged = hw.reshape(hw.permute_dims(turned, (2, 0, 1, 3)), "S", "C", 32)
        decoded = hw.attention(one, k, v, "bottom_right", enable_gqa=True)[0]
        rows = hw.attention(a, b, b, "bottom_right"), hw.attention(a, b, b, "top_left", window=40)
        return y, lse, *beside, merged, decoded, rows[0][0], *rows[1]

    return attention


def by_torch(arrays: dict[str, Any]) -> tuple[Any, ...]:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    q, k, v, p, r, a, b, one = (torch.from_numpy(array.astype(np.float64)) for array in arrays.values())

    def seen(rows: int, columns: int, shift: int, window: int | None = None) -> Any:
        distance = torch.arange(rows)[:, None] + shift - torch.arange(columns)
        return (distance >= 0) & (distance < (window or columns + rows + 1))

    def attend(q, k, v, mask=None, scale=None):  # type: ignore[no-untyped-def]
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
        scores = q @ k.repeat_interleave(q.shape[-3] // k.shape[-3], -3).mT * (scale or q.shape[-1] ** -0.5)
        return y, torch.logsumexp(scores if mask is None else scores.masked_fill(~mask, -torch.inf), -1)

    (s, t), (u, w) = (q.shape[-2], k.shape[-2]), (a.shape[-2], b.shape[-2])
    turned = attend(*(x.permute(1, 2, 0, 3) for x in (p, r, r)))[0]
    results = (
        *attend(q, k, v, seen(s, t, 0)),
        *attend(q, k, v, seen(s, t, t - s, 3), 0.5),
        turned.permute(2, 0, 1, 3).flatten(2),
        attend(one, k, v)[0],
        attend(a, b, b, seen(u, w, w - u))[0],
        *attend(a, b, b, seen(u, w, 0, 40)),
    )
    return tuple(result.numpy() for result in results)


def decode(ranks: int, t: DType) -> Fusion:
    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        q=t["B@x", 4, 1, 16],
        k=t["B@x", 2, "T", 16],
        n=hw.i32["B@x"],
        r=t["C", 2, "S@x", 16],
        w=t["C", 2, "V", 16],
        m=hw.i32["C"],
        h=t[f"{2 * ranks}@x", "S", 16],
        g=t[f"{ranks}@x", "T", 16],
        one=hw.i32[()],
    )
    def decode(q, k, n, r, w, m, h, g, one):  # type: ignore[no-untyped-def]
        token, lse = hw.attention(q, k, k, enable_gqa=True, lengths=n)
        rows = hw.attention(r, w, w, "bottom_right", lengths=m), hw.attention(r, w, w, "bottom_right", window=5, lengths=m)
        padded = hw.attention(r, w, w, "top_left", lengths=m)[0]
        return (
            token,
            lse,
            *rows[0],
            *rows[1],
            padded,
            hw.scaled_dot_product_attention(h, g, g, is_causal=True, enable_gqa=True, lengths=one),
        )

    return decode


def decoded_by_torch(arrays: dict[str, Any]) -> tuple[Any, ...]:
    """Computes each batch element separately, with only its valid keys."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    q, k, n, r, w, m, h, g, one = (torch.from_numpy(array.astype(np.float64)) for array in arrays.values())

    def attend(q, k, lengths, causal="", window=1 << 30):  # type: ignore[no-untyped-def]
        results = []
        for rows, keys, length in zip(q, k, map(int, lengths), strict=True):
            keys = keys[:, :length].repeat_interleave(rows.shape[0] // keys.shape[0], 0)
            scores = rows @ keys.mT * q.shape[-1] ** -0.5
            if causal:
                last = length - rows.shape[1] if causal == "bottom_right" else 0
                distance = torch.arange(rows.shape[1])[:, None] + last - torch.arange(length)
                scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
            results.append((torch.nan_to_num(scores.softmax(-1)) @ keys, scores.logsumexp(-1)))
        return tuple(torch.stack(parts) for parts in zip(*results, strict=True))

    results = (
        *attend(q, k, n),
        *attend(r, w, m, "bottom_right"),
        *attend(r, w, m, "bottom_right", 5),
        attend(r, w, m, "top_left")[0],
        attend(h[None], g[None], one[None], "bottom_right")[0][0],
    )
    return tuple(result.numpy() for result in results)


@pytest.mark.extra("torch")
@pytest.mark.parametrize(("ranks", "dtype"), [(1, hw.bf16), (2, hw.f16), (3, hw.f32), (4, hw.bf16)], ids=str)
def test_lengths(ranks: int, dtype: DType) -> None:
    """Keys beyond the length of a sequence are ignored. A row that sees no keys gives zeros."""
    fusion = decode(ranks, dtype)
    sizes = {"B": ranks + 1, "C": 3, "S": 9, "T": 13, "V": 300}
    arrays = random_arrays(fusion, sizes, seed=ranks)
    lengths = {"n": [13, 1, 5, 13, 2][: ranks + 1], "m": [300, 270, 4], "one": 11}
    arrays |= {name: np.array(length, np.int32) for name, length in lengths.items()}
    expect_every_way(fusion, arrays, decoded_by_torch(arrays), ranks, 1e-10)
    arrays["k"][1, :, lengths["n"][1] :] = np.nan
    arrays["w"][2, :, lengths["m"][2] :] = np.nan
    assert not any(np.isnan(result.astype(np.float32)).any() for result in compiled(fusion).run(**arrays))


@pytest.mark.extra("torch")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sequence_in_pieces(ranks: int) -> None:
    """The sequence is divided into pieces. Each rank has a part of each piece, which balances the work. Keys are gathered without a
    copy."""
    pieces, length = 4, 8

    @hw.fusion(mesh=hw.Mesh(cp=ranks), q=hw.f16[pieces, f"{length}@cp", 4, 16], k=hw.f16[pieces, f"{length}@cp", 2, 16])
    def in_pieces(q, k):  # type: ignore[no-untyped-def]
        keys, results = hw.concat([hw.reshard(k[i], length, 2, 16) for i in range(pieces)]), []
        for i in range(pieces):
            rows, seen = (hw.permute_dims(x, (1, 0, 2)) for x in (q[i], keys[: (i + 1) * length] if i + 1 < pieces else keys))
            results.append(hw.attention(rows, seen, seen, "bottom_right", enable_gqa=True)[0])
        return hw.concat(results, 1)

    instructions = list(tree.walk(lowered(in_pieces).body))
    assert sum(isinstance(i, ir.Attention) for i in instructions) == pieces
    assert not any(isinstance(i, ir.Copy) and "keys" in (i.src, i.dst) for i in instructions)
    arrays = random_arrays(in_pieces, {}, seed=ranks)
    with parallel(check_dependencies=True):
        expect(in_pieces, arrays, compiled(in_pieces).run(**arrays, ranks=True))
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    q, k = (torch.from_numpy(arrays[name].astype(np.float64)).flatten(0, 1).permute(1, 0, 2) for name in "qk")
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    np.testing.assert_allclose(run_reference(in_pieces, arrays)[0], want.numpy(), 1e-10, 1e-10)


@pytest.mark.extra("torch")
@pytest.mark.parametrize(("ranks", "dtype"), [(1, hw.f16), (2, hw.bf16), (3, hw.bf16), (4, hw.f16)], ids=str)
def test_matches_torch(ranks: int, dtype: DType) -> None:
    fusion = attention(ranks, dtype)
    for sizes in (SIZES, {**SIZES, "C": ranks - 1, "S": 1, "U": 1, "T": 1, "V": 2}):  # The last rank has no elements of C.
        arrays = random_arrays(fusion, sizes, seed=ranks)
        expect_every_way(fusion, arrays, by_torch(arrays), ranks, 1e-10, interprets=sizes != SIZES)


def test_the_scores_are_never_in_memory() -> None:
    """The program has no matmuls or generated kernels, and copies no input. Attention without sharding allocates nothing."""
    ranks = 2
    fusion = attention(ranks, hw.bf16)
    instructions = list(tree.walk(lowered(fusion).body))
    assert sum(isinstance(i, ir.Attention) for i in instructions) == 6  # One instruction computes a result and its log-sum-exps.
    assert not any(isinstance(i, ir.Launch | ir.Matmul) for i in instructions)
    copied = {p.name for p in lowered(fusion).inputs}
    assert not any(isinstance(i, ir.Copy) and i.src in copied for i in instructions)

    @hw.fusion(q=hw.bf16[1, 2, "S", 16], k=hw.bf16[1, 1, "S", 16])
    def long(q, k):  # type: ignore[no-untyped-def]
        return hw.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)

    assert not any(isinstance(i, ir.Allocate) for i in tree.walk(lowered(long).body))
    arrays = random_arrays(long, {"S": 4096}, seed=0)
    got = compiled(long).run(**arrays)
    q, k = (array.astype(np.float64) for array in arrays.values())
    for row in (0, 63, 64, 2049, 4095):
        scores = q[0, 1, row] @ k[0, 0, : row + 1].T / 4
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(got[0, 1, row].astype(np.float64), weights @ k[0, 0, : row + 1] / weights.sum(), 2e-2, 2e-2)


def test_the_instruction_supports_f32() -> None:
    host = HostProgram.parse(
        """host @f(%q: f32[2, 3, 5, 7], %k: f32[2, 1, 9, 7], %v: f32[2, 1, 9, 3]) -> (%y: f32[2, 3, 5, 3], %l: f32[2, 3, 5]) mesh(x=1) {
  attention %q, %k, %v scaled 0.3 diagonal 4 window 6 -> %y lse %l
}
"""
    )
    random = np.random.default_rng(0)
    arrays = {p.name: random.standard_normal(tuple(map(int, p.type.shape))).astype(np.float32) for p in host.inputs}
    (want,) = interpret(host, arrays)
    for got, name in zip(compiled(host).run(**arrays), ("y", "l"), strict=True):
        np.testing.assert_allclose(got, want[name], 1e-5, 1e-5)


@pytest.mark.extra("torch")
def test_attention_without_a_kernel_is_composed() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), q=hw.f64["B@x", 4, 6, 12], k=hw.f64["B@x", 2, 8, 12], w=hw.bf16[2, 2, 3, 4, 8], h=hw.bf16[2, 3, 4, 20])
    def composed(q, k, w, h):  # type: ignore[no-untyped-def]
        alike = hw.scaled_dot_product_attention(w, w, w), hw.scaled_dot_product_attention(h, h, h, is_causal=True)
        return *hw.attention(q, k, k, "bottom_right", window=3, enable_gqa=True), *alike

    assert "attention(" not in str(composed)
    assert "attention(" not in str(hw.fusion(q=hw.f64[2, "S", 8], k=hw.f64[2, "T", 8])(lambda q, k: hw.attention(q, k, k, "bottom_right")))
    arrays = random_arrays(composed, {"B": 4}, seed=0)
    expect(composed, arrays, compiled(composed).run(**arrays, ranks=True))
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    q, k = (torch.from_numpy(arrays[name]).double() for name in "qk")
    distance = torch.arange(6)[:, None] + 2 - torch.arange(8)
    mask = (distance >= 0) & (distance < 3)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
    np.testing.assert_allclose(run_reference(composed, arrays)[0], want.numpy(), 1e-10, 1e-10)


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "causal": (
        lambda q: hw.attention(q, q, q, "left"),
        r'causal=\'left\' is not one of None, "top_left" and "bottom_right"; write one of them',
    ),
    "window": (
        lambda q: hw.attention(q, q, q, window=4),
        r"window=4 must be an int of at least 1, together with causal=",
    ),
    "no window": (lambda q: hw.attention(q, q, q, "top_left", 0), "window=0 must be an int of at least 1"),
    "heads": (lambda q: hw.attention(q, q[:, :2], q[:, :2]), "differ in their numbers of heads; use enable_gqa=True if query heads share"),
    "lengths": (
        lambda q: hw.attention(q, q, q, lengths=hw.iota(q, "S")),
        r"lengths of i32\[S\] are not i32\[B\], the number of valid keys per batch; cast or reshape them",
    ),
    "lengths of another dtype": (
        lambda q: hw.scaled_dot_product_attention(q, q, q, lengths=hw.iota(q, "B", hw.i64)),
        r"lengths of i64\[B\] are not i32\[B\]",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    compute, why = MISTAKES[name]
    with pytest.raises(ProgramError, match=rf"test_attention.py:\d+: attention: .*{why}"):
        hw.fusion(q=hw.bf16["B", 4, "S", 16])(compute)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("attention(%q, %k, %q, scale=1.0)", "keys bf16[2, 2, T, 8] and values bf16[2, 4, S, 8] differ in more than their last dim"),
        ("attention(%q, %q, %k, scale=1.0)", "differ in more than their last dim"),
        ("attention(%k, %q, %q, scale=1.0)", "the 4 heads of keys bf16[2, 4, S, 8] do not divide the 2 heads of queries bf16[2, 2, T, 8]"),
        ("attention(%q, %k, %k, scale=1.0, causal=left)", "causal=left is neither top_left nor bottom_right"),
        ("attention(%q, %k, %k, scale=1.0, window=3)", "window=3 needs a causal mask; state causal"),
        ("attention(%q, %k, %k)", "attribute scale is missing; write scale=0.5"),
        ("attention(%q, %k, scale=1.0)", "takes 3 operands, and optionally lengths, not 2"),
        ("attention(%q, %k, %k, %q, scale=1.0)", "lengths of bf16[2, 4, S, 8] are not i32[2], the number of valid keys"),
    ],
)
def test_mistakes_in_fusion_ir(text: str, why: str) -> None:
    with pytest.raises(ProgramError, match=rf"attention: .*{why.replace('[', '.').replace('(', '.')}"):
        Fusion.parse(f"fusion @f(%q: bf16[2, 4, S, 8], %k: bf16[2, 2, T, 8]) {{\n  %y: bf16[2, 4, S, 8] = {text}\n  return %y\n}}\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("attention %q, %k, %q scaled 1.0 -> %y", "with or without B, and G a divisor of H: reshape them"),
        ("attention %q, %k, %k scaled 1.0 -> %z", "%z is bf16[2, 2, T, 8], not bf16[2, 4, S, 8]"),
        ("attention %q, %k, %k scaled 1.0 lengths %q -> %y", "%q is bf16[2, 4, S, 8], but lengths must be contiguous i32[2]"),
        ("attention %q, %k, %k scaled 1.0 diagonal 0 corner bottom_right -> %y", "write bottom_right with lengths and a diagonal"),
        ("attention %q, %k, %k scaled 1.0 window 4 -> %y", "window 4: write an int of at least 1, and a diagonal"),
        ("attention %q, %k, %k scaled 1.0 -> %y lse %z", "%z is bf16[2, 2, T, 8], but lse must be contiguous f32[2, 4, S]"),
        ("attention %q, %k, %k scaled 1.0 -> %y lse %z, %u", "lse is one buffer: name one"),
        ("attention %q, %k, %k scaled 1.0 lengths %q, %k -> %y", "lengths are one buffer: name one"),
        ("%t = permute %q by [0, 1, 3, 2]\n  attention %t, %t, %t scaled 1.0 -> %u", "a row of %t are not contiguous"),
    ],
)
def test_mistakes_in_host_ir(text: str, why: str) -> None:
    from hostweave.host_ir.verify import verify_host

    head = "host @f(%q: bf16[2, 4, S, 8], %k: bf16[2, 2, T, 8]) -> (%y: bf16[2, 4, S, 8], %z: bf16[2, 2, T, 8], %u: bf16[2, 4, 8, S])"
    with pytest.raises(ProgramError) as error:
        verify_host(HostProgram.parse(f"{head} mesh(x=1) {{\n  {text}\n}}\n"))
    assert why in str(error.value)


def test_a_row_without_visible_columns_is_an_error() -> None:
    @hw.fusion(q=hw.bf16["B", 4, "S", 16], k=hw.bf16["B", 4, "T", 16])
    def blind(q, k):  # type: ignore[no-untyped-def]
        return hw.attention(q, k, k, "bottom_right", window=4)

    for s, t in ((5, 4), (1, 0)):
        with pytest.raises(ExecutionError, match=f"with {s} rows of the query and {t} of the key, some row of the query sees no key"):
            compiled(blind).run(**random_arrays(blind, {"B": 1, "S": s, "T": t}, seed=0))
    assert compiled(blind).run(**random_arrays(blind, {"B": 0, "S": 5, "T": 4}, seed=0))[0].shape == (0, 4, 5, 16)


@needs_cuda
def test_compiles_and_links_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cuda.find_cuda()
    if all(part.path for part in found.cudnn):
        program = compiled(attention(2, hw.bf16), "cuda")
        assert program.module.name == "attention"
        assert program.source == compiled(attention(2, hw.bf16)).source
    without = replace(found, cudnn=tuple(replace(part, path=None) for part in found.cudnn))
    monkeypatch.setattr(cuda, "find_cuda", lambda: without)
    with pytest.raises(BuildError) as error:
        hw.compile(attention(2, hw.f16), "cuda").build()
    missing = "target cuda: attention needs cuDNN, and cudnn.h, libcudnn.so.9 not found; pip install nvidia-cudnn-cu13"
    assert str(error.value) == missing.replace("cu13", f"cu{found.major}")
