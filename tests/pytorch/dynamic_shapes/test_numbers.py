"""Numbers that are known only at a call: sizes in arithmetic, and elements of tensors as indices."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402

WINDOW = 8
N = {1: torch.export.Dim("n", min=2, max=64)}


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.key = function, nn.Linear(4, 4)

    def forward(self, x: Any, *others: Any) -> Any:
        return self.function(self.key(x), *others)


class Ring(nn.Module):
    """A cache of the last WINDOW positions. Each call writes to position `at` and to a part of the next position. Each call also adds to
    three positions."""

    keys: Any
    places: Any

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(2, WINDOW, 4))
        self.register_buffer("places", torch.zeros(WINDOW, dtype=torch.int64))

    def forward(self, x: Any, at: Any) -> Any:
        keys = self.key(x)
        self.keys[:, at % WINDOW] = keys[:, 0]
        self.places[at.item() % WINDOW] = at
        self.keys[..., (at + 1) % WINDOW, 1:3] = x[:, 1, :2]
        several = (at + torch.arange(3)) % WINDOW
        self.keys[:, several] += keys
        return self.keys.sum(1), self.keys[:, at % WINDOW], self.places + 0


class Doubled(torch.autograd.Function):
    """Reads numbers of a tensor in Python, which a trace cannot record."""

    @staticmethod
    def forward(_: Any, x: Any) -> Any:
        return x.new_tensor([2 * one for one in x.tolist()])

    @staticmethod
    def backward(_: Any, gradient: Any) -> Any:
        return gradient * 2


def of_sizes(x: Any) -> Any:
    n = x.shape[1]
    logs = x * math.log(n) / math.sqrt(n) + math.log(n, 4) + math.log2(n) - math.exp(-n / 8) + x * n**-0.5
    logs += torch.log(torch.tensor(n)) + torch.full((), n) + n // 2 * 0.5 + n % 3 + max(n, 2) + math.ceil(n / 2)
    rows = torch.arange(n - 1, -1, -1) + torch.arange(0, 2 * n, 2) + torch.linspace(-1, 1, n) + torch.linspace(0, n, steps=n)
    return logs + rows[:, None] + torch.arange(n)[:, None] / n, logs.clamp(max=n / 4), torch.where(logs > n, n, 0)


def of_elements(x: Any, at: Any) -> Any:
    y, number = x.clone(), at.item()
    y[:, at] += 1
    y[0, at, 1:3] = x[1, at - 1, :2]
    y[..., at].mul_(2)
    y[at - 2, at - 1].sub_(3)
    y[:, number, torch.tensor([0, 2])] = 7.0
    y[at - 2, y[at - 2] > 1] = 0
    read = x[:, at, 1:3], x[torch.tensor(-1), : torch.tensor(3)], x[..., at], x[at[None] * 0, at], x[1][at - 1][-at], x[:, number]
    return y, read, x * number - number / 2, torch.where(torch.arange(4) < number, x, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_numbers_of_sizes(ranks: int) -> None:
    module = Of(of_sizes)
    plan = {"key.weight": "tp, -"} if ranks > 1 else {}
    model = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan, (torch.randn(2, 5, 4),), dynamic_shapes=(N,))
    with torch.no_grad():
        for n in (2, 7, 33):
            x = torch.randn(2, n, 4)
            torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_elements(ranks: int) -> None:
    module = Of(of_elements)
    x = torch.randn(2, 5, 4)
    model = hostweave.torch.compile(module, hw.Mesh(tp=ranks), {"key.weight": "tp, -"} if ranks > 1 else {}, (x, torch.tensor(2)))
    with torch.no_grad():
        for at in (2, 3):
            torch.testing.assert_close(model(x, torch.tensor(at)), module(x, torch.tensor(at)))


def test_gradients_through_elements() -> None:
    module = Of(lambda x, at: (x[:, at] * at.item()).exp().sum() + of_elements(x, at)[0].square().sum())
    x, found = torch.randn(2, 5, 4, requires_grad=True), []
    for call in (hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x, torch.tensor(2)), training=True), module):
        found.append(torch.autograd.grad(call(x, torch.tensor(3)), (x, *module.parameters())))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_ring(ranks: int) -> None:
    torch.manual_seed(0)
    module = Ring()
    want, x = copy.deepcopy(module), torch.randn(2, 3, 4)
    model = hostweave.torch.compile(module, hw.Mesh(tp=ranks), {"key.weight": "tp, -"} if ranks > 1 else {}, (x, torch.tensor(0)))
    with torch.no_grad():
        for at in (0, 3, 7, 22):
            torch.testing.assert_close(model(x, torch.tensor(at)), want(x, torch.tensor(at)))
    torch.testing.assert_close(module.state_dict(), want.state_dict())
    assert str(model.program.host).count("kernel @scatter") == 1  # Only the write to several positions passes over the whole cache.


def test_another_thread_computes_as_usual_during_a_trace() -> None:
    """In a thread that traces, indexing with a tensor without dims returns a view. Seeds, hooks, and slices that end at a tensor are
    refused there. Another thread computes as usual."""

    def compute() -> tuple[Any, ...]:
        torch.manual_seed(3)
        y = torch.arange(4.0, requires_grad=True)
        y.register_hook(lambda gradient: gradient * 2)
        row = y.detach().clone()
        row[torch.tensor(1)] = 7
        (gradient,) = torch.autograd.grad(Doubled.apply(y).square().sum(), y)
        logs = logging.getLogger("torch._subclasses.fake_tensor").isEnabledFor(logging.ERROR)
        return row[: torch.tensor(2)], gradient, torch.empty(3).random_(), math.exp(1), logs

    found = []

    def traced(x: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            found.append(other.submit(compute).result())
        return x * 2

    hostweave.torch.compile(Of(traced), hw.Mesh(tp=1), {}, (torch.randn(2, 5, 4),), training=True)
    assert found
    for one in found:
        torch.testing.assert_close(one, compute())


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a slice to an element": (lambda x, at: x[:, :at], r"test_numbers.py:\d+: a slice begins or ends at a value of a tensor.*arange\(n\)"),
    "a part from an item": (
        lambda x, at: x.narrow(1, at.item(), 2),
        r"test_numbers.py:\d+: narrow begins .*value of a tensor.*arange\(n\)",
    ),
    "a part from an element": (lambda x, at: torch.narrow(x, 1, at, length=2), r"test_numbers.py:\d+: narrow begins .*arange\(n\)"),
    "a number as result": (lambda x, at: (x, at.item()), r"the module returns a number that is known only at a call.*torch.full"),
    "a comparison": (lambda x, at: x if x.shape[1] == 5 else -x, r"test_numbers.py:\d+: Of: a dynamic size is fixed by a comparison"),
    "float": (lambda x, at: x * float(x.shape[1]), r"test_numbers.py:\d+: Of: a dynamic size is fixed by .*, by int\(\) or float\(\)"),
}


@pytest.mark.parametrize(("function", "message"), REFUSED.values(), ids=REFUSED)
def test_uses_of_numbers_that_are_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        hostweave.torch.compile(Of(function), hw.Mesh(tp=1), {}, (torch.randn(2, 5, 4), torch.tensor(2)), dynamic_shapes=(N, (None,)))
