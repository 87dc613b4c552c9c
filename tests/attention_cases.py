"""Attention programs that several test files use, and float64 references by torch."""

from __future__ import annotations

from typing import Any

import pytest

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.types.tensor import DType


def grouped(ranks: int, t: DType) -> dict[str, Any]:
    """Inputs of attention with sharded heads: twice as many query heads as key heads, and value heads that are larger than key heads."""
    sizes = {"q": (4, "S", 16), "k": (2, "T", 16), "v": (2, "T", 24)}
    return {name: t["B", f"{heads * ranks}@x", rows, size] for name, (heads, rows, size) in sizes.items()}


def in_zigzag(ranks: int, t: DType) -> hw.Fusion:
    rows, keys = t[4, "S@zigzag(cp)", 64], t[2, "S@zigzag(cp)", 64]

    @hw.fusion(mesh=hw.Mesh(cp=ranks), q=rows, k=keys, v=keys)
    def in_zigzag(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        return hw.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return in_zigzag


def trained_in_zigzag(ranks: int, t: DType) -> hw.Fusion:
    """`in_zigzag` with gradients. The gradients of keys and values are also in zigzag."""
    rows, keys = t[4, "S@zigzag(cp)", 64], t[2, "S@zigzag(cp)", 64]

    @hw.fusion(mesh=hw.Mesh(cp=ranks), q=rows, k=keys, v=keys, dy=rows)
    def trained_in_zigzag(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor, dy: hw.Tensor) -> tuple[hw.Tensor, ...]:
        y, lse = hw.attention(q, k, v, "top_left", enable_gqa=True)
        dq, dk, dv = hw.attention_backward(q, k, v, y, dy, lse, "top_left", enable_gqa=True)
        return y, dq, *(hw.reshard(x, 2, "S@zigzag(cp)", 64) for x in (dk, dv))

    return trained_in_zigzag


def keys_in_a_loop(ranks: int, algorithm: str, t: DType, head: int = 8) -> hw.Fusion:
    """Causal attention in a chunk loop that the program states. Iterations receive blocks of keys and values."""
    rows = t[2, "S@x", head]

    @hw.fusion(mesh=hw.Mesh(x=ranks), q=rows, k=rows, v=rows)
    def keys_in_a_loop(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        keys, values = (hw.reshard(x, 2, "S", head).stream("S", chunks=ranks, algorithm=algorithm) for x in (k, v))
        return hw.scaled_dot_product_attention(q, keys, values, is_causal=True)

    return keys_in_a_loop


def as_torch(arrays: dict[str, Any]) -> tuple[Any, ...]:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    return tuple(torch.from_numpy(array if array.dtype.kind == "i" else array.astype("float64")) for array in arrays.values())


def by_torch(
    q: Any,
    k: Any,
    v: Any,
    causal: str = "",
    window: int = 1 << 30,
    scale: float | None = None,
    *,
    given: Any = None,
    lengths: Any = None,
    bias: Any = None,
    offsets: Any = None,
) -> tuple[Any, ...]:
    """Result, log-sum-exp, and the gradients of q, k, v and the bias.

    `given` is the gradient of the result. By default, this gradient equals the result.
    """
    import torch

    q, k, v, *biases = (x.clone().requires_grad_() for x in (q, k, v, *([] if bias is None else [bias])))
    keys, values = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    length = torch.tensor(k.shape[-2]) if lengths is None else lengths[:, None, None, None]
    distance = rows - columns + (length - q.shape[-2] if causal == "bottom_right" else 0)
    seen = (columns < length) & ((distance >= 0) & (distance < window) if causal else True)
    if offsets is not None:
        sequence = (columns[:, None] >= offsets[..., None, :]).sum(-1)
        inside = (sequence > 0) & (sequence < offsets.shape[-1])
        seen = seen & (sequence[..., None, :, None] == sequence[..., None, None, :]) & inside[..., None, :, None]
    scores = sum(biases, q @ keys.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1).detach()
    weights = torch.exp(scores - lse.clamp(min=-1e30)[..., None])  # 0 if a row attends to no column
    y = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ values
    return y.detach(), lse, *torch.autograd.grad(y, (q, k, v, *biases), y.detach() if given is None else given)


def refusal_of_gradients(inputs: str, outputs: str, gradients: str) -> str:
    """The error of a program with an attention_backward whose operands are `gradients`."""
    text = f"host @f({inputs}) -> ({outputs}) mesh(x=1) {{\n  attention_backward {gradients}\n}}\n"
    with pytest.raises(ProgramError) as error:
        verify_host(HostProgram.parse(text))
    return str(error.value)
