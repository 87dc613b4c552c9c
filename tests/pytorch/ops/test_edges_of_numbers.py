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


@pytest.mark.usefixtures("interpreted")
def test_numbers_beyond_the_range_of_a_dtype() -> None:
    """Python ints and tensors without dims wrap around."""
    cases: dict[str, Case] = {}
    for dtype, number in ((torch.uint8, 300), (torch.int8, -300), (torch.int32, 2**32 + 5)):
        x, scalar = torch.tensor([0, 44, 45, 100, 127], dtype=dtype), torch.tensor(number)
        functions: dict[str, Callable[..., Any]] = {
            "add": lambda x, n=number: x + n,
            "sub": lambda x, n=number: n - x,
            "mul": lambda x, n=scalar: x * n,
            "mod": lambda x, n=number: x % n,
            "floor": lambda x, n=number: x // n,
            "or": lambda x, n=number: x | n,
            "greater": lambda x, n=number: x > n,
            "equal": lambda x, n=scalar: x == n,
            "minimum": lambda x, n=scalar: torch.minimum(x, n),
            "where": lambda x, n=scalar: torch.where(x > 3, x, n),
        }
        cases |= {f"{name} of {dtype}": (function, x) for name, function in functions.items()}
    expect_as_torch(cases)


def halves(x: Any) -> Any:
    return torch.cat((-x[..., 2:], x[..., :2]), -1)


def every_other(x: Any) -> Any:
    return torch.cat((-x[..., 2:], x[..., 0:4:2]), -1)


def unequal(x: Any) -> Any:
    return torch.cat((-x[..., 2:3], x[..., :3]), -1)


class Turned(nn.Module):
    """The rotary embedding of transformers, or a function that resembles it."""

    def __init__(self, turn: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.turn = turn
        self.register_buffer("cos", torch.rand(shape))
        self.register_buffer("sin", torch.rand(shape))

    def forward(self, x: Any) -> Any:
        return x * self.cos + self.turn(x) * self.sin


def repeated(x: Any, *shape: int) -> Any:
    return x.unsqueeze(2).expand(2, 2, 3, 4, 8).reshape(shape)


@pytest.mark.usefixtures("interpreted")
def test_what_resembles_a_pattern() -> None:
    """Rotary embeddings with larger tables or other slices, masks of one row, and repeats that are not of heads."""
    torch.manual_seed(0)
    x, q, k = torch.randn(3, 4), torch.randn(1, 1, 4, 8), torch.randn(2, 2, 4, 8)
    ours = nn.ModuleList([Turned(halves, 1, 3, 4), Turned(halves, 2, 3, 4), Turned(every_other, 3, 4), Turned(unequal, 3, 4)])

    def attended(q: Any, k: Any, *shape: int, is_causal: bool = False) -> Any:
        return F.scaled_dot_product_attention(q, repeated(k, *shape), repeated(k, *shape), is_causal=is_causal)

    cases: dict[str, Case] = {
        **{f"rotary {number}": (module, x) for number, module in enumerate(ours)},
        "one row": (lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=(torch.arange(4) == 0)[None, :]), q),
        "repeated rows": (lambda q, k: attended(q, k, 2, 2, 12, 8, is_causal=True), torch.randn(2, 2, 8, 8), k),
        "other heads": (lambda q, k: attended(q, k, 4, 3, 4, 8), torch.randn(4, 3, 4, 8), k),
        "heads": (lambda q, k: attended(q, k, 2, 6, 4, 8), torch.randn(2, 6, 4, 8), k),
    }
    expect_as_torch(cases)


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, f16, bf16, f32, f64]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, bf16, f32])
def test_comparisons_with_tensors_without_dims(dtype: Any) -> None:
    """torch compares in the dtype of the operand that has dims, if both operands are of one kind."""
    x = torch.tensor([0.1, 50, 44]).to(dtype)
    others = [torch.tensor(0.1 if other.is_floating_point else 44 if other.itemsize == 1 else 300).to(other) for other in DTYPES]
    expect_as_torch({"all": (lambda x, *others: torch.stack([x >= other for other in others]), x, *others)})


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
def test_edges_of_ops() -> None:
    torch.manual_seed(0)
    x, square = torch.randn(8), torch.randn(2, 3, 3)
    bits, ints, bools = torch.tensor([1, 255], dtype=torch.uint8), torch.tensor([1, 2, 3]), torch.tensor([True, False])
    cases: dict[str, Case] = {
        **{f"rms_norm of {dtype}": (lambda x: F.rms_norm(x, (8,)), x.to(dtype) * 0.02) for dtype in (f16, bf16, f32)},
        "addmm": (lambda b, a: torch.addmm(b, a, a, beta=0), torch.full((3,), NAN), square[0]),
        "baddbmm": (lambda b, a: torch.baddbmm(b, a, a, beta=0, alpha=0.5), torch.full((2, 3, 3), NAN), square),
        "var": (lambda x: (x.var(0, correction=8), x.std(0, correction=9), x[:1].var(), (x * 0).var(0, correction=8)), x),
        "a number of bool": (lambda x, i: (i * torch.tensor(True), x * torch.tensor(True), x / torch.tensor(True)), x, ints),
        "a bool": (lambda b: (torch.ones((), dtype=torch.bool) + b, torch.ones((), dtype=torch.bool) * b), bools),
        "a wide constant": (lambda b: (b < torch.tensor([300]), b == torch.tensor(257)), bits),
        "constants of other dtypes": (lambda x: (x > torch.tensor([0.1]), x > torch.tensor(0.1)), torch.tensor([0.1, 1.0], dtype=bf16)),
    }
    expect_as_torch(cases)
