"""Fusions that are written with functions of torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled_fusions import lowered

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import torch.nn.functional as F  # noqa: E402

import hostweave as hw  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402
from hostweave.fusion_ir.reference import run_reference  # noqa: E402
from hostweave.torch.aten import DTYPES  # noqa: E402

torch.manual_seed(0)
X, W = torch.randn(6, 8), torch.randn(8, 12)

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda x, w: torch.relu(x),
    "silu": lambda x, w: F.silu(x),
    "a module without parameters": lambda x, w: torch.nn.SiLU()(x),
    "matmul": lambda x, w: torch.matmul(x, w),
    "linear": lambda x, w: F.linear(x, w.T),
    "softmax": lambda x, w: F.softmax(x, dim=-1),
    "cat": lambda x, w: torch.cat([x, x * 2], 1),
    "several results": lambda x, w: torch.max(x, 1),
    "keepdim": lambda x, w: torch.sum(x, dim=1, keepdim=True),
    "of all": lambda x, w: torch.mean(x),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,)),
    "gelu": lambda x, w: F.gelu(x, approximate="tanh"),
    "a constructor": lambda x, w: torch.where(x > 0, x, torch.zeros_like(x)),
    "decomposed": lambda x, w: F.mish(F.hardswish(x)),
    "composite": lambda x, w: torch.logsumexp(F.normalize(x, dim=1), 1),
    "einsum": lambda x, w: torch.einsum("mk,kn->nm", x, w),
    "flatten": lambda x, w: torch.flatten(torch.transpose(x, 0, 1)),
    "reshape": lambda x, w: torch.reshape(x, (-1, 4)),
    "std": lambda x, w: torch.std(x, dim=1),
    "alpha": lambda x, w: torch.add(x, x, alpha=2),
    "split": lambda x, w: torch.split(x, 4, dim=1)[1],
    "outer": lambda x, w: torch.outer(torch.sum(x, 1), torch.sum(x, 1)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True),
    "of ints": lambda x, w: torch.floor_divide(torch.argmax(x, 1), 2),
    "from the end": lambda x, w: torch.narrow(x, 0, -3, 3),
    "to the end": lambda x, w: torch.select(x, 0, -2),
    "einsum of three": lambda x, w: torch.einsum("mk,nk,nl->ml", x, x, x),
    "a step around the end": lambda x, w: torch.roll(x, 1, 0),
    "a size as a number": lambda x, w: F.kl_div(x, torch.abs(x), reduction="batchmean"),
    "promoted": lambda x, w: torch.mul(torch.argmax(x, 1), 0.5),
}


def results(made: Any) -> tuple[Any, ...]:
    return tuple(made) if isinstance(made, tuple) else (made,)


def fused(function: Callable[[Any, Any], Any], ranks: int = 2) -> hw.Fusion:
    def program(x, w):  # type: ignore[no-untyped-def]
        return results(function(x, w))

    return hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", 8], w=hw.f32[8, 12])(program)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function(function: Callable[[Any, Any], Any]) -> None:
    """The size M is symbolic."""
    fusion = fused(function)
    got = run_reference(fusion, {"x": X.numpy(), "w": W.numpy()})
    for one, output, want in zip(got, lowered(fusion).outputs, results(function(X, W)), strict=True):
        assert output.type.dtype == DTYPES[want.dtype]
        np.testing.assert_allclose(one, want.numpy(), rtol=1e-5, atol=1e-5)


def gated(x: Any, w: Any) -> Any:
    gate, up = torch.split(torch.matmul(x, w), 6, dim=1)
    return torch.sum(F.silu(gate) * up, dim=1), F.softmax(torch.relu(x @ w), dim=-1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_on_ranks(ranks: int) -> None:
    x = torch.randn(12, 8)
    for got, want in zip(hw.compile(fused(gated, ranks)).run(x=x, w=W), gated(x, W), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "an op that is missing": (lambda x, w: torch.fft.fft(x), "torch.fft_fft: aten._fft_r2c.default has no equivalent in a fusion"),
    "in place": (lambda x, w: torch.relu_(x), "torch.relu_: aten.relu_.default has no equivalent in a fusion; did you mean relu?"),
    "another word": (lambda x, w: torch.index_add(x, 0, w, x), "torch.index_add: .*; use hw.scatter_add"),
    "a constant": (
        lambda x, w: torch.add(x, torch.ones(8)),
        r"torch.add: a torch.Tensor of shape \(8,\) is not a tensor of the fusion; make",
    ),
    "an operator": (
        lambda x, w: torch.ones(8) + x,
        r"torch.add: a torch.Tensor of shape \(8,\) is not a tensor of the fusion",
    ),
    "dropout": (lambda x, w: F.dropout(x), r"dropout with p=0.5 of a tensor of a fusion has no seed; use hw.dropout\(x, 0.5, seed\)"),
    "attention with dropout": (
        lambda x, w: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        "attention with dropout_p=0.5 of tensors of a fusion has no seed; use hw.scaled_dot_product_attention",
    ),
    "shapes": (lambda x, w: torch.matmul(w, x), r"torch.matmul: .* got \[8, 12\] X \[M, 8\]; use hw.matmul"),
    "a diagonal": (lambda x, w: torch.diagonal(x @ x.T), "torch.diagonal: computes with a size that is known only at a call"),
    "each row": (lambda x, w: torch.unbind(x), "torch.unbind: the number of results depends on a size that is known only at a call; use x"),
    "groups of rows": (lambda x, w: torch.split(x, 4)[0], "torch.split: the number of results depends on a size"),
    "the number of elements": (lambda x, w: x * torch.numel(x), "torch.numel: computes with a size that is known only at a call"),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_functions_that_are_refused(function: Callable[[Any, Any], Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        fused(function)
    assert str(caught.value).startswith(Path(__file__).name), caught.value


def test_a_branch_on_two_unknown_sizes_is_refused() -> None:
    def smaller(x: Any, y: Any) -> Any:
        return F.relu(x) if x.shape[0] < y.shape[0] else F.gelu(x)

    def program(x, y):  # type: ignore[no-untyped-def]
        return torch.overrides.handle_torch_function(smaller, (x, y), x, y)

    with pytest.raises(ProgramError, match="smaller: computes with a size that is known only at a call"):
        hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", 8], y=hw.f32["N@x", 8])(program)
