"""Ops whose results torch defines by a rule: types of numbers, hidden rows, patterns that look alike. Compared with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")
Case = tuple[Any, ...]  # a function and its arguments


class Several(nn.Module):
    """Calls functions with separate arguments, so that only one program is compiled."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, *given: Any) -> list[Any]:
        return [function(*own) for function, own in zip(self.functions, given, strict=True)]


def expect_as_torch(cases: dict[str, Case], training: bool = False) -> None:
    module = Several([function for function, *_ in cases.values()])
    given = tuple(tuple(arguments) for _, *arguments in cases.values())
    with torch.set_grad_enabled(training):
        want = module(*given)
        got = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, given, training=training)(*given)
    for name, one, other in zip(cases, got, want, strict=True):
        pairs = [(one, other)]
        if training:
            leaves = [leaf for leaf in cases[name][1:] if leaf.requires_grad]
            gradients = [torch.autograd.grad(made.float().sin().sum(), leaves, retain_graph=True) for made in (one, other)]
            pairs += zip(*gradients, strict=True)
        for mine, theirs in pairs:  # torch rounds some values of 16 bits twice
            bounds = {"rtol": 2e-2, "atol": 1e-2} if training and theirs.dtype == bf16 else {}
            torch.testing.assert_close(mine, theirs, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}", **bounds)


HIDDEN = torch.ones(4, 4, dtype=torch.bool).tril()
HIDDEN[0] = False


def of_mask(p: float) -> Callable[..., Any]:
    return lambda q, x, mask: F.scaled_dot_product_attention(q, x, x, attn_mask=mask, dropout_p=p)


@pytest.mark.usefixtures("interpreted")
def test_rows_of_attention_that_see_no_key_are_zero() -> None:
    """A probability of 1e-9 drops no weight, but needs attention with stored weights."""
    torch.manual_seed(0)
    q, x = torch.randn(1, 2, 4, 8, requires_grad=True), torch.randn(1, 2, 4, 8)
    added = torch.zeros(4, 4).masked_fill(~HIDDEN, -INF)
    narrow = q.detach().to(bf16).requires_grad_()
    cases: dict[str, Case] = {
        "bools, dropout": (of_mask(1e-9), q, x, HIDDEN),
        "floats, dropout": (of_mask(1e-9), q, x, added),
        "bools": (of_mask(0.0), q, x, HIDDEN),
        "floats of another dtype": (of_mask(0.0), narrow, x.to(bf16), added),
    }
    expect_as_torch(cases, training=True)
