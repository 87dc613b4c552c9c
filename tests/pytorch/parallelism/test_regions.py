"""Models in regions: the backend of torch.compile, on one rank and on DTensors, and compilation with `fullgraph=False`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, ProgramError  # noqa: E402
from hostweave.torch.regions import Backend  # noqa: E402

X = torch.randn(4, 8)
PLAN = {"up.weight": "tp, -", "up.bias": "tp", "down.weight": "-, tp"}


@torch.library.custom_op("regions::turned", mutates_args=())  # type: ignore[untyped-decorator]
def turned(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy()[::-1].copy())


@turned.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Model(nn.Module):
    """Other code is between the first and the second layer."""

    def __init__(self, between: Callable[[Any], Any] = lambda x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
        self.between = between

    def forward(self, x: Any) -> Any:
        x = self.between(self.layers[0](x))
        for layer in self.layers[1:]:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def of_one_test() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def gradients(model: Any, x: Any, module: Any) -> list[torch.Tensor]:
    module.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.extra
def test_backend_on_one_rank() -> None:
    """torch.compile finds the backend by the name `hostweave`. Equal layers are one function, and parameters have names of the module."""
    module = Model().eval()
    backend = Backend()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend="hostweave", fullgraph=True)(X), module(X))
        torch._dynamo.reset()
        torch.compile(module, backend=backend)(X)
    (subgraph,) = backend.subgraphs
    assert subgraph.model is not None
    assert "layers_up_weight_2" in subgraph.model.program.fusion_ir
    assert "function @layer(%x: f32[4, 8], %up_weight: " in subgraph.model.program.fusion_ir


@pytest.mark.extra
@pytest.mark.slow
def test_backend_in_training() -> None:
    module = Model()
    torch.testing.assert_close(gradients(torch.compile(module, backend="hostweave"), X, module), gradients(module, X, module))


@pytest.mark.extra
@pytest.mark.slow
def test_backend_with_other_sizes() -> None:
    """At the second size, Dynamo makes the dim dynamic. Later sizes run the same program."""
    module, backend = Model().eval(), Backend()
    model = torch.compile(module, backend=backend)
    with torch.no_grad():
        for rows in (4, 6, 9, 12):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(model(x), module(x))
    assert len(backend.subgraphs) == 2


def branches(x: Any) -> Any:
    return x + 1 if x.sum() > 0 else x - 1


def prints(x: Any) -> Any:
    print("between")
    return x


BREAKS = {
    "a missing op": (turned, r"1: eager from test_regions\.py:\d+: .*turned.*: .*ops that are not supported: regions.turned.default"),
    "a branch": (branches, r"graph break at test_regions\.py:\d+: generic_jump"),
    "a side effect": (prints, r"graph break at test_regions\.py:\d+: Failed to trace builtin"),
}


@pytest.mark.extra
@pytest.mark.parametrize("kind", ["a missing op", "a branch", pytest.param("a side effect", marks=pytest.mark.slow)])
def test_a_break(kind: str) -> None:
    """The regions before and after `between` are programs of two ranks. `explain` lists unsupported ops and graph breaks."""
    between, told = BREAKS[kind]
    module = Model(between).eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), PLAN, (X,), fullgraph=False)
    with torch.no_grad():
        torch.testing.assert_close(model(X), module(X))
    assert re.search(told, model.explain())
    assert "1 values of 128 bytes leave the program" in model.explain()
    first, *_, last = model.programs
    assert {first.mesh.size, last.mesh.size} == {2}
    assert "all_reduce" in first.host_ir
    assert "f32[16@tp, 8]" in first.fusion_ir


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads .grad after a break.
def test_a_break_in_training() -> None:
    module = Model(prints)
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), PLAN, (X,), fullgraph=False, training=True)
    torch.testing.assert_close(gradients(model, X, module), gradients(module, X, module))


def test_whole_graphs_are_the_default() -> None:
    with pytest.raises(ProgramError, match=r"ops that are not supported: regions.turned.default, 1 times"):
        hostweave.torch.compile(Model(turned).eval(), hw.Mesh(tp=2), PLAN, (X,))
    with pytest.raises(ProgramError, match="a branch depends on the values of a tensor"):
        hostweave.torch.compile(Model(branches).eval(), hw.Mesh(tp=2), PLAN, (X,))
    with torch.no_grad(), pytest.raises(Exception, match=r"ops that are not supported: regions.turned.default, 1 times"):
        torch.compile(Model(turned).eval(), backend="hostweave", fullgraph=True)(X)


def test_settings() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="the backend hostweave has no setting 'mode'"):
        torch.compile(Model().eval(), backend="hostweave", options={"mode": 1})(X)


# --- on DTensors ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Mesh of a fake world of 2 processes. This process is rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def of_rank(module: nn.Module, rank: int, mesh: Any) -> Model:
    """A copy of the module, with the blocks of this rank as DTensors."""
    made = Model(module.between)
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        *words, name = path.split(".")
        owner = made.get_submodule(".".join(words))
        dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(".".join([*words[2:], name]))
        block = tensor.detach() if dim is None else tensor.detach().chunk(2, dim)[rank].contiguous()
        placed = DTensor.from_local(block, mesh, [Replicate() if dim is None else Shard(dim)], run_check=False)
        if name in owner._parameters:
            owner.register_parameter(name, nn.Parameter(placed))
        else:
            owner.register_buffer(name, placed)
    return made.train(module.training)


def on_ranks(function: Callable[[int], Any]) -> list[Any]:
    threads = hw.Threads(2)

    def rank_main(rank: int) -> Any:
        hw.init(threads)
        return function(rank)

    return threads.run(rank_main)


@pytest.mark.extra
def test_backend_on_dtensors(mesh: Any) -> None:
    """Placements of parameters, arguments and results determine the shardings. The result is a DTensor, as in torch."""
    module = Model().eval()

    def call(rank: int) -> Any:
        own = of_rank(module, rank, mesh)

        def function(x: Any) -> Any:
            x = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
            return own(x).redistribute(mesh, [Shard(1)])

        with torch.no_grad():
            return torch.compile(function, backend="hostweave", fullgraph=True)(X.chunk(2)[rank])

    with torch.no_grad():
        want = module(X)
    for rank, got in enumerate(on_ranks(call)):
        assert (got.placements, tuple(got.shape)) == ((Shard(1),), (4, 8))
        torch.testing.assert_close(got.to_local(), want.chunk(2, 1)[rank])


@pytest.mark.extra
@pytest.mark.slow
def test_gradients_of_dtensors(mesh: Any) -> None:
    module = Model()

    def call(rank: int) -> Any:
        own = of_rank(module, rank, mesh)
        x = DTensor.from_local(X, mesh, [Replicate()], run_check=False)
        torch.compile(own, backend="hostweave", fullgraph=True)(x).to_local().square().sum().backward()
        return [(one.grad.placements, one.grad.to_local()) for one in own.parameters()]

    want = gradients(module, X, module)
    for rank, got in enumerate(on_ranks(call)):
        for (placements, gradient), whole in zip(got, want, strict=True):
            block = whole.chunk(2, placements[0].dim)[rank] if placements[0].is_shard() else whole
            torch.testing.assert_close(gradient, block)


def test_dtensors_without_a_group(mesh: Any) -> None:
    own = of_rank(Model().eval(), 0, mesh)
    x = DTensor.from_local(X, mesh, [Replicate()], run_check=False)
    with torch.no_grad(), pytest.raises(Exception, match="this process has joined no group; call") as caught:
        torch.compile(own, backend="hostweave")(x)
    assert isinstance(caught.value.__cause__ or caught.value, ArgumentError) or "ArgumentError" in str(caught.value)


LOCAL: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a part": (lambda x, mesh: x.redistribute(mesh, [Shard(0)]).to_local() * 2, "computes with a rank's part of a DTensor; redistribute"),
}


@pytest.mark.parametrize(("function", "why"), LOCAL.values(), ids=LOCAL)
def test_local_parts(mesh: Any, function: Callable[[Any, Any], Any], why: str) -> None:
    def call(rank: int) -> str:
        x = DTensor.from_local(X, mesh, [Replicate()], run_check=False)
        with torch.no_grad(), pytest.raises(Exception, match=why) as caught:
            torch.compile(lambda x: function(x, mesh), backend="hostweave", fullgraph=True)(x)
        return str(caught.value)

    assert len(on_ranks(call)) == 2
