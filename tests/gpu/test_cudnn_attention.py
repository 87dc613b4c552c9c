"""Attention by cuDNN on one GPU, compared with PyTorch in float32 or float64. Hostweave's kernels compute the cases that cuDNN lacks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from compiled_fusions import compiled

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.types.tensor import DType

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]
SIZES = [(1, 1), (1, 513), (3, 1000), (37, 91), (256, 256), (512, 1024), (2048, 2048)]
WINDOW = 100


@cache
def masks(t: DType, size: int, group: int) -> Fusion:
    """Attention without a mask, with both causal masks, and with a window. Queries are [B, H, S, D], keys [B, H, T, D], and
    values [T, B, H, D]."""

    @hw.fusion(q=t["B", 8, "S", size], k=t["B", 8 // group, "T", size], v=t["T", "B", 8 // group, size])
    def masks(q, k, v):  # type: ignore[no-untyped-def]
        value = hw.permute_dims(v, (1, 2, 0, 3))
        plain = hw.scaled_dot_product_attention(q, k, value, enable_gqa=True)
        merged = hw.reshape(hw.permute_dims(plain, (2, 0, 1, 3)), "S", "B", 8 * size)
        how = {"enable_gqa": True, "scale": 0.11}
        ends = [hw.attention(q, k, value, "bottom_right", window, **how) for window in (None, WINDOW)]
        return merged, *hw.attention(q, k, value, "top_left", **how), *ends[0], *ends[1]

    return masks


@hw.fusion(qkv=hw.bf16["S", "B", 1, 10, 128])
def merged_projections(qkv):  # type: ignore[no-untyped-def]
    """Attention with one projection. The projection contains 8 heads of queries, one head of keys and one head of values. The dim of key
    heads has size 1, so its stride may have any value."""
    by_group = hw.permute_dims(qkv, (1, 2, 3, 0, 4))
    q, k, v = (hw.reshape(by_group[:, :, a:b], "B", b - a, "S", 128) for a, b in ((0, 8), (8, 9), (9, 10)))
    return hw.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def expected(q: Any, k: Any, v: Any, size: int) -> tuple[Any, ...]:
    import torch

    q, k, v = (x.float() for x in (q, k, v.permute(1, 2, 0, 3)))
    k, v = (x.repeat_interleave(8 // k.shape[1], 1) for x in (k, v))
    rows, columns = q.shape[2], k.shape[2]

    def attend(scale: float, shift: int | None = None, window: int = 1 << 30) -> tuple[Any, Any]:
        scores = q @ k.mT * scale
        if shift is not None:
            distance = torch.arange(rows, device="cuda")[:, None] + shift - torch.arange(columns, device="cuda")
            scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    plain = attend(size**-0.5)[0].permute(2, 0, 1, 3).flatten(2)
    return plain, *attend(0.11, 0), *attend(0.11, columns - rows), *attend(0.11, columns - rows, WINDOW)


@pytest.mark.parametrize(
    ("dtype", "size", "group"), [(hw.bf16, 128, 8), (hw.bf16, 64, 1), (hw.f16, 128, 4), (hw.bf16, 256, 1), (hw.f16, 72, 2)]
)
def test_matches_torch(dtype: DType, size: int, group: int) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    kind, allowed = (torch.bfloat16, 2e-2) if dtype == hw.bf16 else (torch.float16, 3e-3)
    program = compiled(masks(dtype, size, group), "cuda")
    for rows, columns in SIZES:
        shapes = (2, 8, rows, size), (2, 8 // group, columns, size), (columns, 2, 8 // group, size)
        arrays = [torch.randn(shape, device="cuda").to(kind) for shape in shapes]
        for number, (got, want) in enumerate(zip(program.run(*arrays), expected(*arrays, size), strict=True)):
            message = f"{rows} rows, {columns} columns, result {number}"
            torch.testing.assert_close(got.float(), want, rtol=allowed, atol=allowed, msg=lambda text, m=message: f"{m}: {text}")


def test_operands_that_are_not_aligned() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    memory = torch.zeros(2 * 8 * 4 * 128 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(2, 8, 4, 128)
    value = torch.zeros(4, 2, 1, 128, dtype=torch.bfloat16, device="cuda")
    group = hw.init()
    with pytest.raises(ExecutionError, match="misaligned address"):  # `run` would copy the array to an aligned address.
        compiled(masks(hw.bf16, 128, 8), "cuda")(memory, memory[:, :1].clone(), value, group=group)
    group.close()


@cache
def cached(t: DType, rows: int, size: int) -> Fusion:
    @hw.fusion(q=t["B", 8, rows, size], k=t["T", "B", 2, size], n=hw.i32["B"])
    def cached(q, k, n):  # type: ignore[no-untyped-def]
        keys, how = hw.permute_dims(k, (1, 2, 0, 3)), {"enable_gqa": True, "lengths": n}
        ends = [hw.attention(q, keys, keys, "bottom_right", window, **how) for window in (None, 7)]
        return hw.scaled_dot_product_attention(q, keys, keys, **how), *ends[0], *ends[1], *hw.attention(q, keys, keys, "top_left", **how)

    return cached


@pytest.mark.parametrize(("rows", "dtype", "size"), [(1, hw.bf16, 128), (3, hw.f16, 64), (200, hw.bf16, 128)], ids=str)
def test_lengths(rows: int, dtype: DType, size: int) -> None:
    """Tokens attend to a partially filled cache. The result of a row that attends to no column is zeros."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    torch.manual_seed(0)
    kind, allowed = (torch.bfloat16, 2e-2) if dtype == hw.bf16 else (torch.float16, 3e-3)
    program = compiled(cached(dtype, rows, size), "cuda")
    for columns, lengths in ((1000, (1000, 1, 700, 200)), (256, (255, 256, 64, 3)), (4096, (4096, 4001, 2, 2048))):
        q, k = torch.randn(4, 8, rows, size, device="cuda").to(kind), torch.randn(columns, 4, 2, size, device="cuda").to(kind)
        results = program.run(q, k, torch.tensor(lengths, dtype=torch.int32, device="cuda"))
        for index, length in enumerate(lengths):
            keys = k[:length, index].float().permute(1, 0, 2).repeat_interleave(4, 0)
            scores = q[index].float() @ keys.mT * size**-0.5
            row, column = torch.arange(rows, device="cuda")[:, None], torch.arange(length, device="cuda")
            last = row + length - rows
            masks = (column >= 0) & (row >= 0), column <= last, (column <= last) & (column > last - 7), column <= row
            want = []
            for mask in masks:
                hidden = scores.masked_fill(~mask, -torch.inf)
                want += [torch.nan_to_num(hidden.softmax(-1)) @ keys, hidden.logsumexp(-1)]
            del want[1]
            for number, (got, expected) in enumerate(zip(results, want, strict=True)):
                message = f"{rows} rows, {columns} columns, length {length}, result {number}"
                got = got[index].float()
                torch.testing.assert_close(got, expected, rtol=allowed, atol=allowed, msg=lambda text, m=message: f"{m}: {text}")


@cache
def gradients(t: DType, size: int, group: int) -> Fusion:
    @hw.fusion(q=t["B", 8, "S", size], k=t["B", 8 // group, "T", size], v=t["T", "B", 8 // group, size], dy=t["S", "B", 8, size])
    def gradients(q, k, v, dy):  # type: ignore[no-untyped-def]
        value, given, how = hw.permute_dims(v, (1, 2, 0, 3)), hw.permute_dims(dy, (1, 2, 0, 3)), {"scale": 0.11, "enable_gqa": True}
        results = []
        for masks in ({}, {"causal": "top_left"}, {"causal": "bottom_right"}, {"causal": "bottom_right", "window": WINDOW}):
            y, lse = hw.attention(q, k, value, **masks, **how)
            results += hw.attention_backward(q, k, value, y, given, lse, **masks, **how)
        return tuple(results)

    return gradients


@pytest.mark.parametrize(
    ("dtype", "size", "group"), [(hw.bf16, 128, 8), (hw.bf16, 64, 1), (hw.f16, 128, 4), (hw.f16, 72, 2), (hw.bf16, 8, 1)]
)
def test_gradients(dtype: DType, size: int, group: int) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    kind, allowed = (torch.bfloat16, 3e-2) if dtype == hw.bf16 else (torch.float16, 5e-3)
    program = compiled(gradients(dtype, size, group), "cuda")
    for rows, columns in ((37, 91), (256, 256), (500, 1000), (1024, 1024)):
        shapes = (2, 8, rows, size), (2, 8 // group, columns, size), (columns, 2, 8 // group, size), (rows, 2, 8, size)
        arrays = [torch.randn(shape, device="cuda").to(kind) for shape in shapes]
        results = program.run(*arrays)
        q, k, v = (x.float().requires_grad_() for x in arrays[:3])
        distance = torch.arange(rows, device="cuda")[:, None] - torch.arange(columns, device="cuda")
        below = distance + columns - rows
        for index, mask in enumerate((distance == distance, distance >= 0, below >= 0, (below >= 0) & (below < WINDOW))):
            keys, values = (x.repeat_interleave(group, 1) for x in (k, v.permute(1, 2, 0, 3)))
            y = (q @ keys.mT * 0.11).masked_fill(~mask, -torch.inf).softmax(-1) @ values
            wanted = torch.autograd.grad(y, (q, k, v), arrays[3].float().permute(1, 2, 0, 3))
            for number, (got, want) in enumerate(zip(results[3 * index :], wanted, strict=False)):
                want = want.permute(1, 2, 0, 3) if number == 2 else want
                bound = allowed * float(want.abs().max())
                message = f"{rows} rows, {columns} columns, mask {index}, gradient {number}"
                torch.testing.assert_close(got.float(), want, rtol=allowed, atol=bound, msg=lambda text, m=message: f"{m}: {text}")


def test_gradients_with_lengths() -> None:
    """With lengths, gradients of invalid columns are zero."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    torch.manual_seed(0)

    @hw.fusion(q=hw.bf16["B", 8, "S", 64], k=hw.bf16["B", 2, "T", 64], dy=hw.bf16["B", 8, "S", 64], n=hw.i32["B"])
    def padded(q, k, dy, n):  # type: ignore[no-untyped-def]
        how = {"causal": "bottom_right", "enable_gqa": True, "lengths": n}
        y, lse = hw.attention(q, k, k, **how)
        return hw.attention_backward(q, k, k, y, dy, lse, **how)

    q, k, dy = (torch.randn(shape, device="cuda").bfloat16() for shape in ((3, 8, 100, 64), (3, 2, 700, 64), (3, 8, 100, 64)))
    lengths = (700, 333, 101)
    results = compiled(padded, "cuda").run(q, k, dy, torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    for index, length in enumerate(lengths):
        queries, keys, values = (x[index].float().requires_grad_() for x in (q, k, k))
        whole = [x[:, :length].repeat_interleave(4, 0) for x in (keys, values)]
        below = torch.arange(100, device="cuda")[:, None] + length - 100 >= torch.arange(length, device="cuda")
        y = (queries @ whole[0].mT / 8).masked_fill(~below, -torch.inf).softmax(-1) @ whole[1]
        for got, want in zip(results, torch.autograd.grad(y, (queries, keys, values), dy[index].float()), strict=True):
            torch.testing.assert_close(got[index].float(), want, rtol=3e-2, atol=3e-2 * float(want.abs().max()))


@pytest.mark.parametrize("diagonal", [22, 12, 8, 3, 0, -3, -9])
def test_shifted_diagonals(diagonal: int) -> None:
    """Causal diagonals of a rank with a shard of the rows or keys. In some cases, the first rows attend to no column, or no row attends to
    the last columns."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    torch.manual_seed(0)
    for rows, columns in ((7, 15), (7, 5), (300, 200)):
        q, k, given = (f"bf16[2, {heads}, {size}, 64]" for heads, size in ((8, rows), (2, columns), (8, rows)))
        is_differentiated = diagonal >= 0
        results = f"%y: {q}, %l: f32[2, 8, {rows}]" + (f", %dq: {q}, %dk: {k}, %dv: {k}" if is_differentiated else "")
        body = f"  attention %q, %k, %k scaled 0.1 diagonal {diagonal} blind zeros -> %y lse %l\n"
        if is_differentiated:
            body += f"  attention_backward %q, %k, %k, %y, %dy, %l scaled 0.1 diagonal {diagonal} kernels bf16_64 -> %dq, %dk, %dv\n"
        host = HostProgram.parse(f"host @f(%q: {q}, %k: {k}, %dy: {given}) -> ({results}) mesh(x=1) {{\n{body}}}\n")
        shapes = (2, 8, rows, 64), (2, 2, columns, 64), (2, 8, rows, 64)
        arrays = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
        y, lse, *gradients = compiled(host, "cuda").run(*arrays)
        queries, keys, values = (x.float().requires_grad_() for x in (arrays[0], arrays[1], arrays[1]))
        row, column = torch.arange(rows, device="cuda")[:, None], torch.arange(columns, device="cuda")
        scores = (queries @ keys.repeat_interleave(4, 1).mT * 0.1).masked_fill(row + diagonal < column, -torch.inf)
        sums = scores.logsumexp(-1).detach()
        weights = torch.exp(scores - sums.clamp(min=-1e30)[..., None])
        want = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ values.repeat_interleave(4, 1)
        torch.testing.assert_close(y.float(), want.detach(), rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.clamp(min=-1e30), sums.clamp(min=-1e30), rtol=2e-2, atol=2e-2)
        if gradients:
            wanted = torch.autograd.grad(want, (queries, keys, values), arrays[2].float())
            for got, expected in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(got.float(), expected, rtol=3e-2, atol=3e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("batch", [1, 2])
def test_parts_of_merged_projections(batch: int) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    qkv = torch.randn(300, batch, 1, 10, 128, device="cuda").bfloat16()
    q, k, v = qkv[:, :, 0].permute(1, 2, 0, 3).split([8, 1, 1], 1)
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
    got = compiled(merged_projections, "cuda").run(qkv)
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("type", "operand", "why"),
    [
        ("f32[2, 4, 9, 264]", "%x", "heads have at most 256 elements: use smaller heads"),
        ("bf16[2, 4, 9, 66]", "%s", "rows of an operand or result do not begin at multiples of 8 elements; copy or pad these rows"),
    ],
)
def test_errors(type: str, operand: str, why: str) -> None:
    """Only handwritten host IR can cause these errors, because lowering decomposes attention with unsupported heads and copies unsupported
    operands."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    size = 64 if operand == "%s" else int(type.rpartition(" ")[2][:-1])
    result = type.rpartition(",")[0] + f", {size}]"
    cut = "  %s = slice %x[3: 64 from 0]\n" if operand == "%s" else ""
    body = f"{cut}  attention {operand}, {operand}, {operand} scaled 0.1 -> %y\n"
    host = HostProgram.parse(f"host @f(%x: {type}) -> (%y: {result}) mesh(x=1) {{\n{body}}}\n")
    shape = tuple(map(int, type.partition("[")[2][:-1].split(",")))
    kind = torch.float32 if type.startswith("f32") else torch.bfloat16
    with pytest.raises(ExecutionError, match=f"attention: .*{why}"):
        compiled(host, "cuda").run(torch.zeros(shape, dtype=kind, device="cuda"))


def test_cases_that_cudnn_lacks() -> None:
    """cuDNN does not support lengths together with a shifted diagonal. Misaligned operands are copied, because cuDNN needs aligned
    operands."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    torch.manual_seed(0)
    q, k = "bf16[2, 8, 37, 64]", "bf16[2, 2, 300, 64]"
    body = "  attention %q, %k, %k scaled 0.1 diagonal -20 corner bottom_right lengths %n kernels bf16_64 -> %y lse %l\n"
    host = HostProgram.parse(f"host @f(%q: {q}, %k: {k}, %n: i32[2]) -> (%y: {q}, %l: f32[2, 8, 37]) mesh(x=1) {{\n{body}}}\n")
    queries, keys = (torch.randn(shape, device="cuda").bfloat16() for shape in ((2, 8, 37, 64), (2, 2, 300, 64)))
    lengths = torch.tensor([300, 31], dtype=torch.int32, device="cuda")
    y, lse = compiled(host, "cuda").run(queries, keys, lengths)
    row, column = torch.arange(37, device="cuda")[:, None], torch.arange(300, device="cuda")
    ends = lengths[:, None, None, None]
    whole = keys.double().repeat_interleave(4, 1)
    hidden = (column >= ends) | (column > row - 20 + ends)
    scores = (queries.double() @ whole.mT * 0.1).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(y.double(), scores.softmax(-1) @ whole, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)

    @hw.fusion(x=hw.bf16[4, 9, 66])
    def sliced(x):  # type: ignore[no-untyped-def]
        return hw.scaled_dot_product_attention(x[..., :64], x[..., 2:66], x[..., :64])

    x = torch.randn(4, 9, 66, device="cuda").bfloat16()
    want = torch.nn.functional.scaled_dot_product_attention(*(part.double() for part in (x[..., :64], x[..., 2:], x[..., :64])))
    torch.testing.assert_close(compiled(sliced, "cuda").run(x).double(), want, rtol=2e-2, atol=2e-2)


@cache
def packed(t: DType, order: tuple[int, ...], group: int, size: int, window: int | None) -> Fusion:
    """Attention of packed sequences, with gradients. `order` permutes the dims of operands and results to [B, H, S, D]."""
    back = tuple(order.index(dim) for dim in range(4))

    def laid(heads: int) -> Any:
        return t[tuple(("B", heads, "S", size)[dim] for dim in back)]

    @hw.fusion(q=laid(8), k=laid(8 // group), v=laid(8 // group), dy=laid(8), o=hw.i32["B", "N"])
    def packed(q, k, v, dy, o):  # type: ignore[no-untyped-def]
        q, k, v, dy = (hw.permute_dims(x, order) for x in (q, k, v, dy))
        how = {"causal": "top_left", "window": window, "enable_gqa": True, "offsets": o}
        y, lse = hw.attention(q, k, v, **how)
        return lse, *(hw.permute_dims(x, back) for x in (y, *hw.attention_backward(q, k, v, y, dy, lse, **how)))

    return packed


@pytest.mark.parametrize(
    ("dtype", "order", "group", "size", "window"),
    [
        (hw.bf16, (0, 2, 1, 3), 4, 64, None),
        (hw.f16, (1, 2, 0, 3), 2, 128, 40),
        (hw.bf16, (0, 1, 2, 3), 1, 64, None),
        (hw.bf16, (0, 1, 2, 3), 4, 64, None),
        (hw.bf16, (0, 2, 1, 3), 2, 96, None),
        (hw.bf16, (0, 2, 1, 3), 1, 256, 70),
        (hw.bf16, (0, 2, 1, 3), 1, 16, None),
        (hw.f16, (1, 2, 0, 3), 2, 72, 40),
    ],
)
def test_packed_sequences(dtype: DType, order: tuple[int, ...], group: int, size: int, window: int | None) -> None:
    """Packed sequences by cuDNN and by Hostweave's kernels. Some sequences are empty, and some tokens are in no sequence."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    torch.manual_seed(0)
    kind, allowed = (torch.bfloat16, 2e-2) if dtype == hw.bf16 else (torch.float16, 3e-3)
    program, back = compiled(packed(dtype, order, group, size, window), "cuda"), tuple(order.index(dim) for dim in range(4))
    for tokens in (37, 64, 1000):
        q, k, v, dy = (torch.randn(2, 8 // g, tokens, size, device="cuda").to(kind) for g in (1, group, group, 1))
        part = tokens // 5
        offsets = torch.tensor([[0, part, part, 3 * part, tokens], [part, 2 * part, 4 * part, 4 * part, 4 * part]], device="cuda").int()
        lse, *got = program.run(*(x.permute(back).contiguous() for x in (q, k, v, dy)), offsets)
        queries, keys, values = (x.double().requires_grad_() for x in (q, k, v))
        index = torch.arange(tokens, device="cuda")
        sequence = (index[:, None] >= offsets[:, None, :]).sum(-1)
        own = (sequence[:, :, None] == sequence[:, None, :]) & ((sequence > 0) & (sequence < 5))[:, :, None]
        distance = index[:, None] - index
        seen = own[:, None] & (distance >= 0) & (distance < (window or tokens))
        scores = (queries @ keys.repeat_interleave(group, 1).mT * size**-0.5).masked_fill(~seen, -torch.inf)
        sums = scores.logsumexp(-1).detach()
        weights = torch.exp(scores - sums.clamp(min=-1e30)[..., None])
        y = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ values.repeat_interleave(group, 1)
        wanted = y, *torch.autograd.grad(y, (queries, keys, values), dy.double())
        torch.testing.assert_close(lse.double().clamp(min=-1e30), sums.clamp(min=-1e30), rtol=1e-3, atol=1e-3)
        for number, (result, want) in enumerate(zip(got, wanted, strict=True)):
            bound = allowed * float(want.detach().abs().max())
            message = f"{tokens} tokens, result {number}"
            found = result.permute(order).double()
            torch.testing.assert_close(found, want, rtol=allowed, atol=bound, msg=lambda text, m=message: f"{m}: {text}")
