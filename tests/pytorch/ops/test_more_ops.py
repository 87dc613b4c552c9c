"""Ops and small modules: results, and gradients of parameters, compared with torch on 1 and 2 ranks."""

from __future__ import annotations

import copy
import gc
import importlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, ProgramError  # noqa: E402

scans = importlib.import_module("torch._higher_order_ops.associative_scan")

ROWS, DIM, CLASSES = 4, 16, 5
PLAN = {"linear.weight": "tp, -", "linear.bias": "tp"}
INDEX = torch.tensor([[1, 2], [3, 0]])
TARGET = torch.tensor([1, 2, -100, 4])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.7])


class Then(nn.Module):
    def __init__(self, function: Callable[[Any], Any], out: int = DIM):
        super().__init__()
        self.function, self.linear = function, nn.Linear(DIM, out)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.linear(x))


def written(y: torch.Tensor, part: Any, value: Any) -> torch.Tensor:
    y = y.clone()
    y[part] = value
    return y


OF_LINEAR: dict[str, Callable[[Any], Any]] = {
    "elu": F.elu,
    "leaky_relu": F.leaky_relu,
    "group_norm": lambda y: F.group_norm(y, 4),
    "batch_norm of a batch": lambda y: F.batch_norm(y, None, None, training=True),
    "pairs": lambda y: torch.stack((y[..., ::2] * 2, y[..., 1::2]), -1).flatten(-2),
    "steps of 3": lambda y: y[:, 1::3],
    "steps of 4 from 2": lambda y: y[:, 2:11:4],
    "flip": lambda y: y.flip(0, 1) * torch.arange(DIM),
    "a write of a number": lambda y: written(y, (slice(None), slice(0, None, 2)), 1.0),
    "a write of a part": lambda y: written(y, (slice(1, 3), slice(2, 9)), y[:2, :7]),
    "min": lambda y: y.min(0).values,
    "max": lambda y: y.max(1).values,
    "topk": lambda y: y.topk(3, 1).values,
    "var_mean": lambda y: sum(torch.var_mean(y, -1)),
    "one_hot": lambda y: y * F.one_hot(torch.arange(ROWS) % 3, DIM),
    "scatter of fewer rows": lambda y: y.scatter(1, INDEX, y[:2, :2] * 3),
    "scatter of a number": lambda y: y.scatter(1, INDEX, 2.0),
    "scatter_add of one row": lambda y: y.scatter_add(1, INDEX[:1], y[:1, :2]),
    "gather of one row": lambda y: y.gather(1, INDEX[:1]),
    "negative indices": lambda y: y[torch.arange(ROWS) - 2],
    "one index": lambda y: y[torch.tensor([1])] + y[:, torch.tensor([3])],
    "one column": lambda y: y[:, torch.tensor([3])],
    "a middle dim": lambda y: y.view(2, 2, 4, 4)[:, torch.tensor([1, 0]), torch.tensor([2, 3])],
    "indices of dims that are not adjacent": lambda y: y.view(2, 2, 4, 4)[torch.tensor([[1], [0]]), :, torch.tensor([0, 2])],
    "indices with two dims": lambda y: y[INDEX],
    "a write at several indices": lambda y: y.index_put((torch.tensor([1, 3]), torch.tensor([2, 0])), y[0, :2], accumulate=True),
    "a write where a mask is true": lambda y: written(y, y > 0, 0.5),
    "masked_scatter": lambda y: y.masked_scatter(y > 0, y.flip(0)),
    "scatter_reduce": lambda y: y.scatter_reduce(1, INDEX, y[:2, :2], "amax"),
    "cumprod": lambda y: y.cumprod(1),
    "cummax": lambda y: y.cummax(0).values,
    "diagonal": lambda y: y.diagonal(1) * 2,
    "unfold": lambda y: y.unfold(1, 4, 3),
    "median": lambda y: y.median(1).values,
    "norm of order 3": lambda y: y.norm(3, dim=1),
    "layer_norm over two dims": lambda y: F.layer_norm(y, (ROWS, DIM)),
    "embedding_bag": lambda y: F.embedding_bag(INDEX, y, mode="mean"),
    "pdist": F.pdist,
    "cdist": lambda y: torch.cdist(y, y[:2] + 1, p=1.0),
    "softplus": lambda y: F.softplus(y * 100),
    "narrower pad": lambda y: F.pad(y, (1, -2, 0, 1)),
}
OF_IMAGES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "stem": (nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 1, 1)), (2, 3, 9, 9)),
    "sequences": (nn.Conv1d(3, 4, 3, padding=1), (2, 3, 8)),
    "dilated": (nn.Conv2d(3, 4, 3, padding="same", dilation=2), (2, 3, 8, 8)),
    "patches": (nn.Conv2d(3, 4, 2, 2), (2, 3, 8, 8)),
    "of a channel": (nn.Conv1d(8, 16, 4, padding=3, groups=8), (2, 8, 6)),
    "groups": (nn.Conv2d(8, 16, 3, padding=1, groups=2), (2, 8, 6, 6)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2), (2, 4, 5, 5)),
    "transposed and dilated": (nn.ConvTranspose1d(3, 4, 3, dilation=2), (2, 3, 8)),
    "pools": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1, 1, count_include_pad=False)), (2, 3, 9, 9)),
    "adaptive pools": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveMaxPool2d(5), nn.AdaptiveAvgPool2d((3, 2))), (2, 3, 9, 9)),
    "upsampled": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")), (2, 3, 6, 6)),
    "a group norm with a scale": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), (2, 3, 6, 6)),
    "volumes": (nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
}
LOSSES: dict[str, Callable[[Any], Any]] = {
    "weights": lambda y: F.cross_entropy(y, TARGET, WEIGHT),
    "weights, each": lambda y: F.cross_entropy(y, TARGET, WEIGHT, reduction="none"),
    "smooth": lambda y: F.cross_entropy(y, TARGET, label_smoothing=0.1),
    "smooth sum of weights": lambda y: F.cross_entropy(y, TARGET, WEIGHT, reduction="sum", label_smoothing=0.1),
    "probabilities": lambda y: F.cross_entropy(y, F.one_hot(TARGET.clamp(0), CLASSES).float(), label_smoothing=0.1),
    "of more dims": lambda y: F.cross_entropy(y.view(2, 2, CLASSES).transpose(1, 2), TARGET.view(2, 2), label_smoothing=0.1),
    "of one row": lambda y: F.cross_entropy(y[0], TARGET[0]),
}


class Each(nn.Module):
    """Several modules with separate inputs and results. One program of all modules compiles faster than separate programs."""

    def __init__(self, modules: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part, x in zip(self.parts, inputs, strict=True))


def expect_same(modules: dict[str, nn.Module], inputs: Sequence[torch.Tensor], plan: dict[str, str], trained: int, inferred: int) -> None:
    """Compares results and gradients of parameters on `trained` ranks with torch's. Also compares results without gradients on `inferred`
    ranks."""
    want = Each(list(modules.values()))
    own = copy.deepcopy(want)
    found = [want(*inputs), hostweave.torch.compile(own, hw.Mesh(tp=trained), plan, tuple(inputs), training=True)(*inputs)]
    for results in found:
        sum((y**2).sum() for y in results).backward()
    with torch.no_grad():
        found.append(hostweave.torch.compile(own, hw.Mesh(tp=inferred), plan, tuple(inputs))(*inputs))
    for name, mine, theirs, wanted, *made in zip(modules, own.parts, want.parts, *found, strict=True):
        for y in made:
            torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4, msg=lambda why, name=name: f"{name}: {why}")
        for parameter, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-3, atol=1e-3, msg=lambda why, name=name: f"{name}: {why}")


# Fast tests train on 2 ranks and infer on 1 rank. Slow tests swap these numbers.
numbers_of_ranks = pytest.mark.parametrize(("trained", "inferred"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow)])


def parts_of(names: Iterable[str], count: int) -> list[list[str]]:
    """Splits names into `count` lists. The tests of different lists may run at the same time."""
    names = list(names)
    return [names[start::count] for start in range(count)]


@numbers_of_ranks
@pytest.mark.parametrize("names", parts_of(OF_LINEAR, 4), ids=lambda names: names[0])
def test_ops(names: list[str], trained: int, inferred: int) -> None:
    torch.manual_seed(0)
    expect_same({name: Then(OF_LINEAR[name]) for name in names}, [torch.randn(ROWS, DIM) for _ in names], PLAN, trained, inferred)


@numbers_of_ranks
def test_losses(trained: int, inferred: int) -> None:
    torch.manual_seed(0)
    modules = {name: Then(loss, CLASSES) for name, loss in LOSSES.items()}
    expect_same(modules, [torch.randn(ROWS, DIM) for _ in modules], {}, trained, inferred)


@pytest.mark.parametrize("names", parts_of(OF_IMAGES, 2), ids=lambda names: names[0])
def test_convolutions(names: list[str]) -> None:
    torch.manual_seed(0)
    modules = {name: OF_IMAGES[name][0] for name in names}
    expect_same(modules, [torch.randn(OF_IMAGES[name][1]) for name in names], {}, trained=2, inferred=2)


class Straight(torch.autograd.Function):
    """Returns a rounded product and x + 1. The method `backward` differs from the true gradient, so a test detects if `backward` is not
    called."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return (x * factor).round(), x + 1

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, dz: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return dy * ctx.factor * x.sign() + 2 * dz, None


step = Straight.apply


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("ranks", [1, 2])
def test_derivatives_defined_by_users(ranks: int) -> None:
    torch.manual_seed(0)

    def twice(y: Any) -> Any:
        a, b = Straight.apply(y, 3.0)
        c, _ = step(b, 0.5)
        return a + b + c

    expect_same({"twice": Then(twice)}, [torch.randn(ROWS, DIM)], PLAN, ranks, ranks)


class Factor:
    """An argument whose text does not tell its value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Factor()"


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: Factor) -> torch.Tensor:
        ctx.factor = factor
        return x * factor.value

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy * ctx.factor.value, None


@pytest.mark.usefixtures("interpreted")
def test_functions_with_objects_as_arguments() -> None:
    """Objects of equal text are told apart, and are freed with the compiled module."""
    factors = [Factor(3.0), Factor(0.5)]
    alive = [weakref.ref(factor) for factor in factors]
    function = Then(lambda y: sum(Times.apply(y, factor) for factor in factors))
    expect_same({"sums": function}, [torch.randn(ROWS, DIM)], PLAN, 1, 1)
    del function, factors[:]
    gc.collect()
    assert [one() for one in alive] == [None, None]


def matrices(y: Any) -> Any:
    return scans.associative_scan(torch.matmul, y[None].expand(4, ROWS, DIM), 0)


def decayed(y: Any) -> Any:
    """A recurrence as in state-space models: each step scales the previous sum."""

    def joined(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    pair = torch.sigmoid(y), y
    return sum(scans.associative_scan(joined, pair, 0, reverse=turned, combine_mode="generic")[1] for turned in (False, True))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("ranks", [1, 2])
def test_scans(ranks: int) -> None:
    torch.manual_seed(0)
    expect_same({"decayed": Then(decayed)}, [torch.randn(ROWS, DIM)], PLAN, ranks, ranks)


class OfTruths(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.maximum(a, b) ^ torch.fmin(a, b),
            a.clamp(min=b) | a.sign() | a.signbit(),
            *a.max(1),
            *b.min(0),
            a.index_add(0, index, b),
            a.scatter_add(0, index[:, None].expand(-1, DIM), b),
            a.scatter_reduce(0, index[:, None].expand(-1, DIM), b, "prod"),
            F.pad(a, (1, 2), value=True),
            torch.diagflat(a[0]),
        )


@pytest.mark.usefixtures("interpreted")
def test_bools() -> None:
    torch.manual_seed(0)
    given = torch.rand(ROWS, DIM) > 0.5, torch.rand(ROWS, DIM) > 0.5, torch.randint(0, ROWS, (ROWS,))
    for mine, theirs in zip(hostweave.torch.compile(OfTruths(), hw.Mesh(tp=1), {}, given)(*given), OfTruths()(*given), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


class OfBytes(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = x.view(2, -1, DIM)
        return (x.any(), x.all(1), torch.addbmm(x[:DIM], batch.mT, batch[:, :DIM]), F.bilinear(x, x, batch[:, :DIM]))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_sums_keep_narrow_integers(dtype: torch.dtype) -> None:
    given = torch.randint(0, 3, (2 * DIM, DIM)).to(dtype)
    for mine, theirs in zip(hostweave.torch.compile(OfBytes(), hw.Mesh(tp=1), {}, (given,))(given), OfBytes()(given), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


# --- refused ops, and other modules ----------------------------------------------------------------------------------


def hooked(y: torch.Tensor) -> torch.Tensor:
    y.register_hook(lambda dy: dy * 2)
    return y


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (hooked, r"test_more_ops.py:\d+: a hook is not compiled"),
        (lambda y: y.detach().mul_(2) + y, r"mul_.Tensor writes to the result of detach\(\)"),
        (lambda y: y.detach().chunk(2)[0].mul_(2).sum() + y, r"mul_.Tensor writes to the result of detach\(\)"),
        (lambda y: y * y.new_empty(ROWS, 1).bernoulli_(0.5, generator=torch.Generator()), r"generator"),
        (lambda y: y[y > 0], r"test_more_ops.py:\d+: a size depends on a tensor, as in x\[mask\]"),
        (lambda y: y.tensor_split((y[0] > 0).to(torch.int64).cumsum(0)[:2].cpu())[0], r"a branch depends on the values of a tensor"),
        (matrices, r"calls aten.\S+, but only pointwise ops"),
    ],
    ids=["hook", "detached", "detached part", "random", "mask", "split", "scan"],
)
def test_ops_that_are_refused(function: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        hostweave.torch.compile(Then(function), hw.Mesh(tp=1), {}, (torch.ones(ROWS, DIM),), training=True)


def _moved(module: nn.Module) -> None:
    module.linear.weight.data = torch.zeros(DIM, DIM)


def _replaced(module: nn.Module) -> None:
    module.linear = nn.Linear(DIM, DIM)


@pytest.mark.parametrize("change", [_moved, nn.Module.half, _replaced, lambda module: delattr(module.linear, "bias")])
@pytest.mark.parametrize("training", [False, True])
def test_replaced_and_moved_parameters_are_refused(change: Callable[[nn.Module], Any], training: bool) -> None:
    module, x = Then(F.relu), torch.ones(ROWS, DIM)
    call = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,), training=training)
    with torch.set_grad_enabled(training):
        call(x)
        change(module)
        with pytest.raises(ArgumentError, match="after compilation"):
            call(x)


def test_a_failed_step_is_not_counted_and_changes_no_option() -> None:
    module, x = Then(lambda y: y.square().mean()), torch.ones(ROWS, DIM)
    optimizer = torch.optim.AdamW(module.parameters())
    step = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,), optimizer=optimizer)
    step(x)
    with pytest.raises(ArgumentError, match="dim 0 is 3"):
        step(x[:3])
    assert optimizer.state[module.linear.weight]["step"] == 1
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ArgumentError, match="amsgrad of parameter group 0 is True, and was False at compile time"):
        step(x)


def test_a_parameter_is_returned() -> None:
    module, x = Then(F.relu), torch.ones(ROWS, DIM)
    module.forward = lambda x: (module.linear.weight, module.linear(x))  # type: ignore[method-assign]
    assert hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,), training=True)(x)[0] is module.linear.weight


def test_hooks_of_the_first_call_stay() -> None:
    """Models of transformers record hidden states with hooks that the first call registers."""
    module, x = Then(F.relu), torch.ones(ROWS, DIM)
    plain = module.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not module.linear._forward_hooks:
            module.linear.register_forward_hook(lambda *_: None)
        return plain(x)

    module.forward = forward  # type: ignore[method-assign]
    hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,), training=True)
    assert len(module.linear._forward_hooks) == 1


def test_layers_keep_the_shardings_of_data() -> None:
    """Each rank computes only its rows in both passes."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, DIM)
            self.layers = nn.ModuleList(Then(F.gelu) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.table(x)
            for layer in self.layers:
                y = y + layer(y)
            return y.square().mean()

    tokens = torch.zeros(8, 4, dtype=torch.int64)
    model = hostweave.torch.compile(Layers(), hw.Mesh(dp=2), {"x": "dp, -"}, (tokens,), training=True)
    assert f"f32[8, 4, {DIM}]" not in str(model.program.host_ir)
    assert all("all_gather" not in str(program.host_ir) for program in (model.program, model.backward))


@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_to_one_head_of_keys(ranks: int) -> None:
    """All heads of queries use one head of keys and values, as in Falcon 7B."""

    class OneHead(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    given = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(2, 1, 5, 8)
    model = hostweave.torch.compile(OneHead(), hw.Mesh(tp=ranks), {"q": "-, tp, -, -"} if ranks > 1 else {}, given)
    torch.testing.assert_close(model(*given), OneHead()(*given))


@pytest.mark.extra
def test_gradients_of_sampled_images() -> None:
    """Gradients of grid_sample with respect to the image and to the positions. Some positions are outside of the image."""

    class Sampled(nn.Module):
        def forward(self, image: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
            return nn.functional.grid_sample(image, places, align_corners=False)

    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 2, 4, 5, generator=generator).requires_grad_()
    places = (torch.rand(1, 3, 3, 2, generator=generator) * 2.4 - 1.2).requires_grad_()
    module, found = Sampled(), []
    for call in (hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (image, places), training=True), module):
        found.append(torch.autograd.grad(call(image, places).square().sum(), (image, places)))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.extra
def test_repeats_by_a_size_of_the_call() -> None:
    """`repeat` and `empty_permuted` with a dynamic size, as in Bloom and in mixtures of experts."""

    class Repeated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.where(x > 1e30, torch.empty_permuted((x.shape[0], 3), (1, 0)), x)
            return x.unsqueeze(1) + torch.arange(6.0).view(2, 3).repeat(x.shape[0], 1).view(x.shape[0], 2, 3)

    module = Repeated()
    sizes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}}
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (torch.randn(4, 3),), dynamic_shapes=sizes)
    with torch.no_grad():
        for rows in (2, 5, 9):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(model(x), module(x))
