"""Training of modules with tied parameters, masks, DTensors, constants and buffers, compared with torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from trained_dtensors import Loss  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.torch.bound import BoundProgram  # noqa: E402

X = torch.randn(8, 16)


class Tied(nn.Module):
    """A module with a parameter that is used twice. A part of the module is under `torch.utils.checkpoint`."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Any) -> Any:
        return checkpoint(lambda words: self.head(words).square(), self.table(ids), use_reentrant=False).sum()


def test_tied_parameters_and_checkpoints_inside() -> None:
    module, ids = Tied(), torch.arange(6).reshape(2, 3)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {"table.weight": "tp, -"}, (ids,), training=True)
    (got,), (want,) = (torch.autograd.grad(call(ids), list(module.parameters())) for call in (compiled, module))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class Masked(nn.Module):
    """Two attentions with masks as arguments: a mask of bools, and a mask that is added to the scores and needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 3 * 32, bias=False)

    def forward(self, x: Any, mask: Any, added: Any) -> Any:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attend = nn.functional.scaled_dot_product_attention
        return (attend(q, k, v, mask) * attend(q, k, v, added, scale=0.5)).sum()


def test_a_mask_is_an_operand_of_attention() -> None:
    """Scores are not materialised, forward or backward. Some rows attend to no column."""
    torch.manual_seed(3)
    module, x, added = Masked(), torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 1, 5, 5, requires_grad=True)
    mask = torch.rand(2, 1, 1, 5) > 0.4
    mask[1] = False
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {"project.weight": "tp, -"}, (x, mask, added), training=True)
    got, want = (torch.autograd.grad(call(x, mask, added), (x, module.project.weight, added)) for call in (compiled, module))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    said = compiled.program.host_ir + compiled.backward.host_ir
    assert (said.count(" bias %"), said.count(" dbias %")) == (4, 1)
    assert "scores" not in said


@pytest.mark.parametrize("whole", [False, True], ids=["backward", "step"])
def test_dtensors_state_their_shardings_and_get_dtensors(whole: bool) -> None:
    """Each rank is a thread with a separate module, whose DTensors have the local tensors of this rank."""
    torch.manual_seed(4)
    want = Loss()
    placements = [Shard(0), Shard(0), Shard(1), Replicate(), Replicate(), Replicate()]
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ranks = [distributed(want, rank, mesh, placements) for rank in range(2)]
        optimizers = [adamw(module) for module in (*ranks, want)]
        given: list[dict[str, Any]] = [{"optimizer": one} if whole else {"training": True} for one in optimizers]
        calls = [hostweave.torch.compile(module, mesh, {}, (X,), **options) for module, options in zip(ranks, given, strict=False)]
        threads = hw.Threads(2)

        def rank_main(rank: int) -> Any:
            hw.init(threads)
            for _ in range(3):
                train(calls[rank], None if whole else optimizers[rank])
            return [parameter.detach().to_local() for parameter in ranks[rank].parameters()]

        found = threads.run(rank_main)
    finally:
        torch.distributed.destroy_process_group()
    for _ in range(3):
        train(want, optimizers[2])
    for blocks, placement, parameter in zip(zip(*found, strict=True), placements, want.parameters(), strict=True):
        got = torch.cat(blocks, placement.dim) if isinstance(placement, Shard) else blocks[0]
        torch.testing.assert_close(got, parameter.detach(), rtol=1e-3, atol=1e-4)
    assert list(ranks[0].state_dict()) == list(want.state_dict())


def distributed(want: nn.Module, rank: int, mesh: Any, placements: list[Any]) -> nn.Module:
    """A copy of `want`. The parameters of the copy are DTensors with the local tensors of a rank."""
    module = copy.deepcopy(want)
    for (path, whole), placement in zip(list(want.named_parameters()), placements, strict=True):
        owner, _, name = path.rpartition(".")
        block = whole.detach().chunk(2, placement.dim)[rank] if isinstance(placement, Shard) else whole.detach()
        local = DTensor.from_local(block.clone(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
        setattr(module.get_submodule(owner), name, nn.Parameter(local))
    return module


def adamw(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)


def train(call: Any, optimizer: Any) -> None:
    loss = call(X)
    if optimizer:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_constants_of_equal_elements_are_no_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, the gradient of a mean is a constant with equal elements."""
    parts, init = list[BoundProgram](), BoundProgram.__init__
    monkeypatch.setattr(BoundProgram, "__init__", lambda part, *given: parts.append(part) or init(part, *given))
    module = Loss()
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {}, (X,), optimizer=adamw(module))
    assert [part.graph.bound for part in parts] == [{}]
    assert "fill(value=" in compiled.program.host_ir


@pytest.mark.usefixtures("interpreted")
def test_parametrizations_are_not_run_by_the_compiler() -> None:
    """If the compiler read `weight` once more, spectral_norm would write to its buffers."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 6))).train()
    want, x = copy.deepcopy(module), torch.randn(4, 16)
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"bias": "tp"}, (x,), training=True)
    for _ in range(2):
        made, wanted = model(x), want(x)
        torch.testing.assert_close(made, wanted)
        made.sum().backward()
        wanted.sum().backward()
    for one, other in zip(module.state_dict().values(), want.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(*(of[0].parametrizations.weight.original.grad for of in (module, want)))


class Quantized(nn.Module):
    """A layer that replaces vectors by the nearest vector of a codebook. Attributes of the layer have the names of attributes of torch's
    graph modules."""

    meta: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.code = nn.Embedding(12, 16), nn.Parameter(torch.rand(16))
        self.register_buffer("meta", torch.zeros(12, dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        rows = x.reshape(-1, x.shape[-1])
        index = torch.cdist(rows, self.graph.weight).argmin(1)
        chosen = F.one_hot(index, 12)
        self.meta.add_(chosen.sum(0))
        near = self.graph(index).view_as(x)
        return x * self.code + (near - x).detach(), F.mse_loss(near, x.detach()), chosen


@pytest.mark.usefixtures("interpreted")
def test_a_codebook() -> None:
    torch.manual_seed(0)
    module = Quantized().train()
    want, x = copy.deepcopy(module), torch.randn(2, 3, 16, requires_grad=True)
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"graph.weight": "tp, -", "code": "tp"}, (x,), training=True)
    gradients = []
    for call, of in ((model, module), (want, want)):
        made, loss, chosen = call(x)
        (made.square().sum() + loss).backward()
        gradients.append([made, loss, chosen, x.grad, of.graph.weight.grad, of.code.grad, of.meta])
        x.grad = None
    torch.testing.assert_close(*gradients)


class Normed(nn.Module):
    """A module with batch norms and a running average. The statistics of the norms and the average are buffers."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.line, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return self.last(self.line(y - self.average)).square().mean() + y.mean()


@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_that_forward_writes_to(ranks: int) -> None:
    """The statistics of a sharded batch are the statistics of the whole batch."""
    torch.manual_seed(0)
    module, plan = Normed().train(), {"x": "dp, -, -, -"} if ranks > 1 else {}
    want = copy.deepcopy(module)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (module, want)]
    for options in ({"training": True}, {"optimizer": optimizers[0]}):
        given: dict[str, Any] = options
        call = hostweave.torch.compile(module, hw.Mesh(dp=ranks), plan, (torch.randn(6, 3, 5, 5),), **given)
        for _ in range(3):
            x = torch.randn(6, 3, 5, 5)
            made, loss = call(x), want(x)
            torch.testing.assert_close(made, loss.detach() if "optimizer" in options else loss, rtol=1e-4, atol=1e-5)
            loss.backward()
            if "optimizer" not in options:
                made.backward()
                optimizers[0].step()
                optimizers[0].zero_grad()
            optimizers[1].step()
            optimizers[1].zero_grad()
        for (name, one), other in zip(module.state_dict().items(), want.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=lambda why, at=name: f"{at}: {why}")


class Pooled(nn.Module):
    """Pooling creates constants named `x`. The argument and the result are also named `x`."""

    def forward(self, x: Any) -> Any:
        x = F.adaptive_avg_pool1d(x.exp(), 3)
        return x


@pytest.mark.usefixtures("interpreted")
def test_constants_that_are_named_as_an_argument_have_no_gradients() -> None:
    module, x = Pooled(), torch.randn(2, 3, 8, requires_grad=True)
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,), training=True)
    torch.testing.assert_close(*(torch.autograd.grad(call(x).square().sum(), x) for call in (model, module)))


class Peaks(nn.Module):
    """A module with a maximum. The gradient goes to the elements that are equal to the maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(3, 12)

    def forward(self, x: Any) -> Any:
        y = F.pixel_shuffle(F.silu(self.norm(x)), 2)
        return F.avg_pool2d(y, 2).amax((2, 3))


@pytest.mark.parametrize(("ranks", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_gradients_of_maxima_of_values_that_could_be_computed_again(ranks: int, dtype: Any) -> None:
    torch.manual_seed(0)
    module, x = Peaks().to(dtype), torch.randn(4, 12, 6, 6, dtype=dtype)
    want = copy.deepcopy(module)
    plan = {"x": "dp, -, -, -"} if ranks > 1 else {}
    hostweave.torch.compile(module, hw.Mesh(dp=ranks), plan, (x,), training=True)(x).sum().backward()
    want(x).sum().backward()
    for one, other in zip(module.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.1, atol=0.5 if dtype == torch.bfloat16 else 1e-4)
