"""Random numbers in modules. A seed reproduces the numbers. Each call draws new numbers. The numbers do not depend on the mesh, and have
the distributions of torch's numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, ProgramError  # noqa: E402
from hostweave.runtime.coordinator import CallSignature  # noqa: E402
from hostweave.torch.randomness import new_seeds  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreted")
X = torch.linspace(-1, 1, 64 * 96).reshape(64, 96)


class Drawing(nn.Module):
    def __init__(self, draw: Callable[..., Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Any) -> Any:
        return self.draw(x)


def compiled(draw: Callable[..., Any], ranks: int = 2, x: Any = X) -> Any:
    plan = {"x": ", ".join(["tp", *["-"] * (x.ndim - 1)])}
    return hostweave.torch.compile(Drawing(draw).train(), hw.Mesh(tp=ranks), plan, (x,))


# A function of x, with the mean, the standard deviation, and the bounds of the function's results. If a distribution is unbounded, values
# beyond these bounds are very improbable.
DRAWN: dict[str, tuple[Callable[..., Any], float, float, float, float]] = {
    "rand": (lambda x: torch.rand(64, 96) + 0 * x, 0.5, 12**-0.5, 0, 1),
    "rand_like": (lambda x: torch.rand_like(x, dtype=torch.float64), 0.5, 12**-0.5, 0, 1),
    "rand of bf16": (lambda x: torch.rand_like(x, dtype=torch.bfloat16).float(), 0.5, 12**-0.5, 0, 1 - 2**-8),
    "randn": (lambda x: torch.randn(x.shape) + 0 * x, 0, 1, -6, 6),
    "randn_like": (lambda x: torch.randn_like(x), 0, 1, -6, 6),
    "randint": (lambda x: torch.randint(3, 8, (64, 96)).float() + 0 * x, 5, 2**0.5, 3, 7),
    "randint_like": (lambda x: torch.randint_like(x, 5), 2, 2**0.5, 0, 4),
    "bernoulli": (lambda x: torch.bernoulli(0 * x + 0.25), 0.25, (3 / 16) ** 0.5, 0, 1),
    "bernoulli_": (lambda x: torch.empty_like(x, dtype=torch.int32).bernoulli_(0 * x + 0.25).float(), 0.25, (3 / 16) ** 0.5, 0, 1),
    "random_": (lambda x: torch.empty_like(x).random_(5), 2, 2**0.5, 0, 4),
    "random_ from 3": (lambda x: torch.empty_like(x).random_(3, 8), 5, 2**0.5, 3, 7),
    "random_ of bytes": (lambda x: torch.empty_like(x, dtype=torch.uint8).random_().float(), 127.5, 73.9, 0, 255),
    "rrelu": (lambda x: F.rrelu(torch.full_like(x, -1.0), 0.25, 0.75, training=True), -0.5, 48**-0.5, -0.75, -0.25),
    "normal": (lambda x: torch.normal(2.0, 3.0, (64, 96)) + 0 * x, 2, 3, -16, 20),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), 2, 3, -16, 20),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1, 4 * 12**-0.5, -1, 3),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2), 0.5, 0.5, 0, 9),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(0, 0.25), 2.718281828 ** (1 / 32), 0.262, 0, 5),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.5), 2, 2**0.5, 1, 25),
    "cauchy_": (lambda x: torch.empty_like(x).cauchy_().atan(), 0, 3.14159265 * 12**-0.5, -1.58, 1.58),
    "multinomial": (
        lambda x: torch.multinomial(torch.tensor([0.0, 0.75, 0.0, 0.25]).expand(6144, 4), 1).float() + 0 * x[0, 0],
        1.5,
        0.866,
        1,
        3,
    ),
    "multinomial of several": (
        lambda x: torch.multinomial(torch.tensor([0.75, 0, 0.25]), 6144, replacement=True).float() + 0 * x[0, 0],
        *(0.5, 0.866, 0, 2),
    ),
    "dropout": (lambda x: F.dropout(torch.ones_like(x), 0.25), 1, 3**-0.5, 0, 1.34),
    "dropout of 5 dims": (lambda x: F.dropout(torch.ones_like(x).reshape(8, 2, 4, 8, 12), 0.25), 1, 3**-0.5, 0, 1.34),
}


@pytest.mark.parametrize(("draw", "mean", "deviation", "least", "greatest"), DRAWN.values(), ids=DRAWN)
def test_numbers_have_the_distribution(draw: Callable[..., Any], mean: float, deviation: float, least: float, greatest: float) -> None:
    model = compiled(draw)
    torch.manual_seed(1)
    first, second = model(X), model(X)
    torch.manual_seed(1)
    assert torch.equal(model(X), first)
    assert not torch.equal(second, first)
    assert (first.dtype, first.shape) == (draw(X).dtype, draw(X).shape)
    of = first.double()
    assert of.min() >= least
    assert of.max() <= greatest
    assert abs(of.mean() - mean) < 5 * deviation / X.numel() ** 0.5
    assert abs(of.std() - deviation) < 0.05 * deviation


def test_numbers_are_the_same_on_every_mesh_and_differ_between_ops() -> None:
    def draw(x: Any) -> Any:
        return torch.rand_like(x), torch.rand_like(x), F.dropout(x, 0.5)

    made = []
    for ranks in (1, 4):
        model = compiled(draw, ranks)
        torch.manual_seed(3)
        made.append(model(X))
    for one, other in zip(*made, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(made[0][0], made[0][1])


def test_threads_use_the_numbers_of_rank_0() -> None:
    ranks = hw.Threads(3)

    def draw(rank: int) -> list[list[int]]:
        group = hw.init(ranks)
        return [new_seeds("m", 4, group).tolist() for _ in range(3)]

    torch.manual_seed(5)
    first, *others = ranks.run(draw)
    assert others == [first, first]
    assert len({seed for call in first for seed in call}) == 12
    torch.manual_seed(5)
    assert ranks.run(draw)[0] == first


@pytest.mark.parametrize("has_board", [True, False])
def test_processes_with_other_seeds_are_refused(has_board: bool) -> None:
    """Simulates a group of two processes. Rank 0 draws the seeds 1 and 2. Rank 1, which is the process of the test, draws other seeds."""

    class TwoProcesses:
        in_process, rank, count, can_coordinate, call_timeout = False, 1, 2, True, 1.0

        def same_on_host(self, program: str, value: int, announce: Callable[[], None], waits_for: str) -> bool | None:
            return value == hash((1, 2)) if has_board else None

        def agree(self, signature: CallSignature, waits_for: str, timeout: float) -> list[CallSignature]:
            return [replace(signature, bound="[1, 2]"), signature]

    with pytest.raises(ArgumentError, match=r"m: ranks draw different random numbers, .*call torch.manual_seed with the same seed in all"):
        new_seeds("m", 2, TwoProcesses())  # type: ignore[arg-type]


def test_attention_drops_weights() -> None:
    """The mean over many heads is close to attention without dropout."""
    q = torch.randn(1, 512, 4, 4, generator=torch.Generator().manual_seed(0))
    model = compiled(
        lambda q: F.scaled_dot_product_attention(q[:, :1].expand_as(q), q[:, :1].expand_as(q), q[:, :1].expand_as(q), dropout_p=0.25), 1, q
    )
    torch.manual_seed(0)
    made, want = model(q), F.scaled_dot_product_attention(*[q[:, :1]] * 3)
    assert made.std(1).max() > 0.05
    torch.testing.assert_close(made.mean(1, keepdim=True), want, rtol=0, atol=0.15)


def test_everything_is_dropped() -> None:
    q = torch.randn(1, 2, 4, 8)
    model = compiled(lambda q: (F.dropout(q, 1.0), F.scaled_dot_product_attention(q, q, q, dropout_p=1.0)), 1, q)
    assert not any(one.any() for one in model(q))


def test_gradient_of_random_slopes() -> None:
    weight = nn.Parameter(X.clone())
    model = hostweave.torch.compile(Sloped(weight).train(), hw.Mesh(tp=2), {"weight": "tp, -"}, (X,), training=True)
    made = model(X)
    made.sum().backward()
    torch.testing.assert_close(weight.grad * weight, made)
    assert bool((weight.grad[X > 0] == 1).all())


class Sloped(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Any) -> Any:
        return F.rrelu(self.weight + 0 * x, training=True)


def test_training_draws_the_same_numbers_in_its_backward_pass() -> None:
    weight = nn.Parameter(torch.ones(64, 96))

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Any) -> Any:
            noise = torch.randn_like(self.weight) * torch.rand(64, 1)
            return (self.weight * noise * x).sum(), noise

    model = hostweave.torch.compile(Noisy(), hw.Mesh(tp=2), {"weight": "tp, -"}, (X,), training=True)
    loss, noise = model(X)
    loss.backward()
    torch.testing.assert_close(weight.grad, noise * X)
    assert noise.std() > 0.3


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 16, bias=False), nn.Dropout(0.4))

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


def test_layers_with_dropout_are_a_loop() -> None:
    """Calls of layers with dropout are a loop. The layers are linear, so the sum of x * gradient equals the
    sum of the results only if both passes drop the same elements."""
    module, x = nn.Sequential(*(Dropping() for _ in range(4))).train(), torch.randn(8, 16, requires_grad=True)
    compiled = hostweave.torch.compile(module, hw.Mesh(), {}, (x,), training=True)
    assert all(len(re.findall(r"for \(int64_t i = 0; i < [34]; \+\+i\)", one.source)) == 1 for one in (compiled.program, compiled.backward))
    y = compiled(x)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close((x * x.grad).sum(), y.sum(), rtol=1e-4, atol=1e-4)


def test_permutations() -> None:
    """Each call draws a different permutation. Indices drawn without replacement differ from each other, and have weights above 0."""
    x = torch.rand(5, 7).index_fill(1, torch.tensor([2]), 0)
    model = compiled(lambda x: (x[torch.randperm(5)], torch.randperm(7), torch.multinomial(x, 6)), 1, x)
    rows, order, drawn = model(x)
    assert torch.equal(rows.sort(0).values, x.sort(0).values)
    assert not torch.equal(order, model(x)[1])
    assert order.sort().values.tolist() == [*range(7)]
    assert [row.sort().values.tolist() for row in drawn] == [[0, 1, 3, 4, 5, 6]] * 5


def test_other_draws_are_refused() -> None:
    with pytest.raises(ProgramError, match=r"integers from 0 to 100000000 have more than 2\^24 values"):
        compiled(lambda x: torch.randint(0, 10**8, (64, 96)) + x)
    with pytest.raises(ProgramError, match=r"poisson.* draw random numbers outside, and make them an input"):
        compiled(lambda x: torch.poisson(x + 1))
    with pytest.raises(ProgramError, match="generator"):
        compiled(lambda x: torch.empty_like(x).normal_(generator=torch.Generator()))
    with pytest.raises(ProgramError, match="generator"):
        compiled(lambda x: x + torch.randperm(96, generator=torch.Generator()))
    with pytest.raises(ProgramError, match="another generator"):
        compiled(lambda x: torch.empty_like(x).random_(4, generator=torch.Generator()))
    with pytest.raises(ProgramError, match="another generator"):
        compiled(lambda x: x + torch.rand(64, 96, generator=torch.Generator()))
    with pytest.raises(ProgramError, match=r"test_random_numbers.py:\d+: forward calls torch.manual_seed"):
        compiled(lambda x: (torch.manual_seed(3), torch.rand_like(x))[1])
