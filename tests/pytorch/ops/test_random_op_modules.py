"""Random modules of ops on odd inputs: results, dtypes and gradients, compared with torch, on 1 or 2 ranks in the interpreter.

Inputs may be transposed, strided or expanded, and may have dims of size 1 or 0. Some modules write to a copy of a
tensor. In some modules, two layers share a weight.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402

SHAPES = [(3, 4), (1, 4), (2, 3, 4), (4, 1), (2, 0, 4), (0, 4), (2, 1, 4), (5,)]
REFUSED = ("at least one element", "no result depends on a tensor that requires grad")
Op = Callable[[Any, int], Any]  # An op takes a tensor and a dim.
POINTWISE: list[Op] = [
    lambda x, _: torch.tanh(x),
    lambda x, _: x.to(torch.bfloat16).float(),
    lambda x, _: x.double().sin().to(x.dtype),
    lambda x, _: torch.where(x > 0, x, x * 0.1),
    lambda x, _: x.masked_fill(x > 1, 0.5),
    lambda x, _: x.abs().sqrt() + 0.1,
    lambda x, _: x.masked_fill(x >= torch.tensor(0.1, dtype=torch.float64), 2),
    lambda x, _: x * (x.to(torch.int32) == torch.tensor([0])) * torch.tensor(True),
]
VIEWS: list[Op] = [
    lambda x, dim: x.transpose(0, dim),
    lambda x, _: x[..., None],
    lambda x, _: x.squeeze(),
    lambda x, dim: x.select(dim, x.shape[dim] - 1),
    lambda x, dim: x.narrow(dim, 0, max(x.shape[dim] - 1, 0)),
    lambda x, _: x.expand(2, *x.shape),
    lambda x, _: x.reshape(-1),
    lambda x, dim: x.unflatten(dim, (1, x.shape[dim])),
    lambda x, dim: x.movedim(dim, -1).contiguous(),
    lambda x, dim: x.unbind(dim)[0],
]
ALONG_A_DIM: list[Op] = [
    lambda x, dim: x.sum(dim),
    lambda x, dim: x.mean(dim, keepdim=True),
    lambda x, dim: x.amax(dim),
    lambda x, dim: x.softmax(dim),
    lambda x, dim: x.logsumexp(dim),
    lambda x, dim: x.var(dim, unbiased=False),
    lambda x, dim: x.norm(dim=dim),
    lambda x, dim: x.prod(dim),
    lambda x, dim: x.cumsum(dim),
    lambda x, dim: x.sort(dim).values,
    lambda x, dim: x.topk(min(x.shape[dim], 2), dim).values,
    lambda x, dim: x.argmax(dim).to(x.dtype) * x.sum(),
    lambda x, dim: torch.cat([x, x * 3], dim),
    lambda x, dim: torch.stack([x, x.cos()], dim),
    lambda x, dim: x.flip(dim).roll(1, dim),
    lambda x, dim: x.repeat_interleave(2, dim),
    lambda x, dim: x.gather(dim, torch.zeros_like(x, dtype=torch.int64)),
    lambda x, dim: x.diff(dim=dim),
    lambda x, _: F.pad(x, (1, 0)),
    lambda x, _: x @ x.transpose(-1, -2),
    lambda x, _: x.tril(),
]


def written(draw: random.Random, x: Any) -> Any:
    y = x.clone()
    kind = draw.randrange(5)
    if kind == 0:
        y[..., 0] = 1.0
    elif kind == 1:
        y.transpose(0, -1).add_(1)
    elif kind == 2:
        y[y > 0.5] = 0.0
    elif kind == 3:
        y.view(-1)[::2] *= 3
    else:
        y.clamp_(-0.5, 0.5).relu_()
    return y


class Drawn(nn.Module):
    """Draws the same ops in each call."""

    def __init__(self, seed: int, width: int):
        super().__init__()
        self.seed, self.linear, self.again = seed, nn.Linear(width, width), nn.Linear(width, width, bias=False)
        if seed % 3 == 0:
            self.again.weight = self.linear.weight

    def forward(self, x: Any) -> list[Any]:
        draw, values = random.Random(self.seed), [x, self.linear(x)]
        for _ in range(draw.randint(2, 6)):
            x, other = draw.choice(values), draw.choice(values)
            x = x if x.ndim else x.view(1)
            kind, dim = draw.randrange(6), draw.randrange(x.ndim)
            if kind == 0:
                y = written(draw, x)
            elif kind == 1:
                y = torch.maximum(x, other) * other if x.shape == other.shape else x * 2 - 1
            elif kind == 2 and x.shape[-1] == self.again.in_features:
                y = self.again(x)
            else:
                y = draw.choice(draw.choice([POINTWISE, VIEWS, ALONG_A_DIM]))(x, dim)
            values += [y] if y.numel() < 600 and y.ndim < 5 else []
        return draw.sample(values[1:], k=min(len(values) - 1, draw.randint(1, 3)))


def drawn_input(draw: random.Random) -> Any:
    *outer, width = draw.choice(SHAPES)
    kind = draw.choice(["dense", "transposed", "strided", "expanded"])
    if kind == "transposed" and outer:
        return torch.randn(*outer[:-1], width, outer[-1]).transpose(-1, -2)
    if kind == "strided":
        return torch.randn(*outer, 2 * width)[..., ::2]
    return torch.randn(1, *outer[1:], width).expand(*outer, width) if kind == "expanded" and outer else torch.randn(*outer, width)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 200))])
def test_results_and_gradients_are_those_of_torch(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    x, training, ranks = drawn_input(draw), draw.random() < 0.6, draw.choice([1, 2])
    x = x.detach().requires_grad_(training and draw.random() < 0.5)
    ours = Drawn(seed, x.shape[-1])
    theirs = copy.deepcopy(ours)
    dims = [dim for dim, size in enumerate(x.shape) if x.numel() and size % 2 == 0]
    sharded = draw.choice([None, *dims]) if ranks > 1 else None
    plan = {} if sharded is None else {"x": ", ".join("tp" if dim == sharded else "-" for dim in range(x.ndim))}
    if ranks > 1 and draw.random() < 0.5:  # The program then gathers or reduces next to a matmul.
        plan["linear.weight"] = draw.choice(["tp, -", "-, tp"])
    with warnings.catch_warnings(), torch.set_grad_enabled(training):
        warnings.simplefilter("ignore")  # torch warns about reductions of no elements.
        try:
            want = theirs(x)
        except (RuntimeError, IndexError):
            with pytest.raises(ProgramError):
                hostweave.torch.compile(ours, hw.Mesh(tp=ranks), plan, (x,), training=training)(x)
            return
        try:
            got = hostweave.torch.compile(ours, hw.Mesh(tp=ranks), plan, (x,), training=training)(x)
        except ProgramError as error:
            if 0 not in x.shape and not any(word in str(error) for word in REFUSED):
                raise
            return
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3, equal_nan=True)
        assert one.requires_grad == other.requires_grad
    if any(one.requires_grad for one in want):
        gradients = []
        for module, results in ((ours, got), (theirs, want)):
            sources = [one for one in (x, *module.parameters()) if one.requires_grad]
            loss = sum((one * torch.linspace(0.5, 1.5, one.numel()).view(one.shape)).sum() for one in results if one.requires_grad)
            gradients.append(torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(
                one, other, rtol=5e-3, atol=5e-3 * float(other.abs().max() if other.numel() else 0) + 1e-5, equal_nan=True
            )


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_equal_maxima_on_several_ranks_share_the_gradient(dim: int, dtype: Any) -> None:
    """With small integers, the maximum often occurs several times."""

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(8, 8, bias=False, dtype=dtype)

        def forward(self, x: Any) -> Any:
            return self.c(x).relu().amax(dim)

    torch.manual_seed(0)
    ours, x = Largest(), torch.randint(-1, 2, (6, 8)).to(dtype)
    with torch.no_grad():
        ours.c.weight.copy_(torch.randint(-1, 2, (8, 8)))
    theirs = copy.deepcopy(ours)
    plan = {"x": "tp, -"} if dim == 0 else {"c.weight": "tp, -"}
    for call in (hostweave.torch.compile(ours, hw.Mesh(tp=2), plan, (x,), training=True), theirs):
        y = call(x)
        (y * torch.arange(1, len(y) + 1)).sum().backward()
    torch.testing.assert_close(ours.c.weight.grad, theirs.c.weight.grad)
