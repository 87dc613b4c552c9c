"""Results that share memory with arguments, with tensors of the module or with each other, compared with torch on 1 and 2 ranks."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402


class Of(nn.Module):
    """Calls a function with this module, the result of `linear`, and x. The function may return a parameter, `buffer` or `plain`."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function, self.linear, self.plain = function, nn.Linear(4, 4), torch.ones(4)
        self.register_buffer("buffer", torch.ones(4))

    def forward(self, x: Any) -> Any:
        return self.function(self, self.linear(x), x)


def filled(_: Any, y: Any, x: Any) -> Any:
    zeros = torch.zeros(3, 4)
    return y, zeros, zeros[0], x


def written(_: Any, y: Any, x: Any) -> Any:
    z = y.clone()
    z[0].add_(1)
    return z, z[0], y, x.clone()


def copied(_: Any, y: Any, x: Any) -> Any:
    number = y[0, 0]
    return y, torch.empty_like(y).copy_(y), torch.narrow_copy(y, 0, 0, 2), torch.diff(y, 0), number, number.cumsum(0), number.cummax(0)[0]


def detached(_: Any, y: Any, x: Any) -> Any:
    z = y * 3
    before, part = z.detach(), z.detach()[0]
    z.mul_(2)
    return y, before + y, part * y[0], before


CASES: dict[str, Callable[..., Any]] = {
    "a view of a result": lambda _, y, x: (y, y.view(-1), y.T, y.diagonal(), y[:, None].expand(3, 2, 4)),
    "a view of an argument": lambda _, y, x: (x, x[0], y),
    "views of one value that is not returned": lambda _, y, x: (y[0], y.T, x.sum()),
    "parts": lambda _, y, x: (*y.chunk(2, -1), *x.split(2, -1), *(y * 2).unbind(0)),
    "tensors of the module": lambda m, y, x: (y, m.linear.weight.T, m.linear.bias, m.buffer[1:], m.buffer, m.plain.view(2, 2)),
    "a detached result": lambda _, y, x: (y, y.detach(), y.detach()[0]),
    "a value twice": lambda _, y, x: {"first": y, "second": [y, y.contiguous(), None, 3]},
    "constants": filled,
    "a view that was written to": written,
    "copies": copied,
    "a detached value whose source was written to": detached,
    "a reshape that copies": lambda _, y, x: (y, y.T.reshape(-1), x.T.reshape(-1)),
}


def made_by(call: Any, module: Any, x: Any, number: int) -> list[Any]:
    """Returns everything that must be as in torch, such as results, gradients, which tensors share memory, and values after a write.

    The write changes the argument if `number` is 0, and the last result if `number` is -1."""
    module.zero_grad()
    x = x.clone()
    results = [one for one in torch.utils._pytree.tree_leaves(call(x)) if isinstance(one, torch.Tensor)]
    values = [one.detach().clone() for one in results]
    everything = [x, *module.parameters(), module.buffer, module.plain, *results]
    memory = [one.untyped_storage().data_ptr() for one in everything]
    groups = [memory.index(one) for one in memory]
    ends = [one.data_ptr() - first if memory.count(first) > 1 else 0 for one, first in zip(everything, memory, strict=True)]
    if torch.is_grad_enabled():
        loss = sum((one * torch.linspace(0, 1, one.numel()).view(one.shape)).sum() for one in results if one.requires_grad)
        loss.backward()
    gradients = [one.grad for one in module.parameters()]
    with torch.no_grad():
        target = everything[number]
        before = target.clone()
        target.mul_(2)
        after = [one.detach().clone() for one in everything]
        target.copy_(before)
        again = [one.detach().clone() for one in torch.utils._pytree.tree_leaves(call(x)) if isinstance(one, torch.Tensor)]
    return [values, gradients, [one is x for one in results], groups, ends, after, again]


def compare(function: Callable[..., Any], ranks: int, training: bool, seed: int, number: int = 0) -> None:
    torch.manual_seed(seed)
    ours, x = Of(function), torch.randn(3, 4)
    theirs = copy.deepcopy(ours)
    model = hostweave.torch.compile(ours, hw.Mesh(tp=ranks), {}, (x,), training=training)
    with torch.set_grad_enabled(training):
        got, want = (made_by(call, of, x, number) for call, of in ((model, ours), (theirs, theirs)))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Any, y: Any) -> Any:
        return x + 2 * y + 3 * self.weight


@pytest.mark.usefixtures("interpreted")
def test_example_inputs_that_are_one_tensor() -> None:
    """A call may pass separate tensors for arguments that were one tensor at compile time, or a parameter."""
    module, x, y = Weighted(), torch.ones(3), torch.arange(3.0)
    for given in ((x, x), (x, module.weight)):
        model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, given, training=True)
        for one in ((x, y), (y, y)):
            torch.testing.assert_close(model(*one), module(*one))
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (twice := x.clone().requires_grad_(), twice), training=True)
    model(twice, twice).sum().backward()
    torch.testing.assert_close(twice.grad, 3 * x)


class Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: Any, y: Any, writes: bool) -> Any:
        (self.part if writes else x).add_(1)
        return x + y + self.whole.sum()


@pytest.mark.usefixtures("interpreted")
def test_example_inputs_of_one_memory_that_forward_writes_to() -> None:
    module, both = Adding(), torch.arange(6.0)
    for x, y in ((both[:3], both[3:]), (both[::2], both[1::2]), (both[:3], both[:3]), (both[:4], both[2:])):
        model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x, y, False))
        torch.testing.assert_close(model(x.clone(), y.clone(), False), module(x.clone(), y.clone(), False))
    why = r"forward writes to an argument or buffer that shares memory with another one; pass a clone\(\), or take the other one from it"
    with pytest.raises(ProgramError, match=why):
        hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (torch.ones(4), torch.ones(4), True))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_memory_is_shared_as_in_torch(name: str, training: bool) -> None:
    compare(CASES[name], 2, training, 0)


@pytest.mark.parametrize("training", [False, True])
def test_memory_of_compiled_programs_is_shared(training: bool) -> None:
    compare(CASES["a view of a result"], 1, training, 0)


def written_buffer(m: Any, y: Any, _: Any) -> Any:
    m.buffer.add_(1)
    return y, m.buffer[1:]


def written_argument(_: Any, y: Any, x: Any) -> Any:
    x.mul_(2)
    return y, x[1:]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("function", "training"), [(written_buffer, False), (written_buffer, True), (written_argument, False)])
def test_a_view_of_a_tensor_that_the_module_writes_to(function: Callable[..., Any], training: bool) -> None:
    compare(function, 1, training, 0, -1)


class Sized(nn.Module):
    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.view(rows.item(), -1)


def test_a_view_whose_size_depends_on_a_tensor_is_refused() -> None:
    """A captured call returns the same view each time. So the size of the view must not depend on values."""
    with pytest.raises(ProgramError, match=r"^test_shared_results.py:\d+: a size depends on a tensor, .*; use a fixed size"):
        hostweave.torch.compile(Sized(), hw.Mesh(tp=1), {}, (torch.ones(4, 4), torch.tensor(2)))


def random_view(draw: random.Random, y: Any) -> Any:
    dim = draw.randrange(y.ndim)
    return draw.choice(
        [
            lambda: y.select(dim, draw.randrange(y.shape[dim])),
            lambda: y.narrow(dim, draw.randrange(y.shape[dim]), 1),
            lambda: y.movedim(dim, 0),
            lambda: y.unsqueeze(dim),
            lambda: y.reshape(-1),
            lambda: y.flatten(dim),
            lambda: y[..., :: draw.choice([1, 2])],
            lambda: y.detach(),
            lambda: y.squeeze(dim),
            lambda: y.expand(2, *y.shape),
        ]
    )()


def random_function(seed: int) -> Callable[..., Any]:
    """Returns a function that computes values and views, writes to some of them, and returns some of them."""

    def function(module: Any, y: Any, x: Any) -> Any:
        draw = random.Random(seed)
        values = [x, y, module.buffer, module.linear.weight]
        for _ in range(draw.randint(3, 7)):
            one = draw.choice([value for value in values[1:] if value.ndim and value.ndim < 5])
            kind = draw.choice(["view", "view", "compute", "clone", "write"])
            if kind == "view":
                values.append(random_view(draw, one))
            elif kind == "compute":
                values.append(one * 2)
            elif kind == "clone":
                values.append(one.clone())
            else:
                base = one * 3
                view = random_view(draw, base)
                if 0 not in view.stride() and not draw.random() < 0.3:
                    base.mul_(2)
                values += [base, view]
        return [*draw.choices(values, k=draw.randint(2, 4)), y]

    return function


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 100))])
def test_random_results_share_memory_as_in_torch(seed: int) -> None:
    draw = random.Random(seed)
    compare(random_function(seed), draw.choice([1, 2]), draw.random() < 0.5, seed, draw.choice([0, -1]))
