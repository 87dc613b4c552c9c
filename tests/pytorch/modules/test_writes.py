"""Modules on 1 and 2 ranks that write to arguments and buffers, compared with torch. Written tensors become donated inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from compiled_fusions import unrolled_ir

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError  # noqa: E402


class Cache(nn.Module):
    """Writes the keys of tokens to a cache. The tensor `count` is the position of the first key."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1]) + count
        count.add_(x.shape[1])
        keys.index_copy_(2, places, self.key(x).unflatten(-1, (2, 4)).transpose(1, 2))
        return x + keys.sum(2).flatten(1)[:, None]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cache() for _ in range(3))

    def forward(self, x: torch.Tensor, keys: list[torch.Tensor], counts: list[torch.Tensor]) -> torch.Tensor:
        for layer, key, count in zip(self.layers, keys, counts, strict=True):
            x = layer(x, key, count)
        return x


class Constants(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y.zero_()
        x.copy_(y + 1)
        return x * 2, x


class Rolled(nn.Module):
    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        rolled = x.roll(-1, 0)
        rolled[-1] = row
        x.copy_(rolled)
        x[:, :2] += 1
        return x.sum(0)


def caches() -> tuple[Any, ...]:
    return torch.randn(1, 2, 8), [torch.zeros(1, 2, 9, 4) for _ in range(3)], [torch.tensor(0) for _ in range(3)]


CACHE_PLAN = {"key.weight": "tp, -", "key.bias": "tp"}


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Any) -> Any:
        self.mean = self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return x - self.mean


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]], dict[str, str]]] = {
    "caches of layers": (Layers, caches, CACHE_PLAN),
    "caches that the plan shards": (Layers, caches, CACHE_PLAN | {"keys_*": "-, tp, -, -"}),
    "values that are constants": (Constants, lambda: (torch.randn(4), torch.randn(4)), {}),
    "elements that are moved": (Rolled, lambda: (torch.randn(4, 6), torch.randn(6)), {"x": "-, tp"}),
    "batch norm": (lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)).train(), lambda: (torch.randn(4, 8),), {}),
    "a buffer that is assigned to itself": (Averaged, lambda: (torch.randn(4, 6),), {}),
    "a batch that is sharded": (lambda: nn.BatchNorm1d(6).train(), lambda: (torch.randn(4, 6),), {"input": "tp, -"}),
}


def flat(given: Any) -> list[torch.Tensor]:
    return [one for one in torch.utils._pytree.tree_leaves(given) if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_as_torch(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    make, draw, plan = CASES[name]
    ours = make()
    theirs, given = copy.deepcopy(ours), draw()
    model = hostweave.torch.compile(ours, hw.Mesh(tp=ranks), plan if ranks > 1 else {}, copy.deepcopy(given))
    expected = copy.deepcopy(given)
    before = [[one._version for one in flat(of)] for of in (given, expected)]
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(flat(model(*given)), flat(theirs(*expected)))
            torch.testing.assert_close(flat(given), flat(expected))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    written = [
        [one._version > then for one, then in zip(flat(of), at, strict=True)] for of, at in zip((given, expected), before, strict=True)
    ]
    assert written[0] == written[1]  # The version counters show the same writes.
    if name.startswith("caches"):
        assert unrolled_ir(model.program).count("call @cache") == (3 if ranks == 1 else 2)  # Only layers 1 and 2 get a sharded x.
        assert "dynamic_update_slice(%keys" in model.program.fusion_ir
        assert ("2@tp" in model.program.fusion_ir) == (ranks > 1)


def test_a_returned_argument_keeps_its_memory() -> None:
    model = hostweave.torch.compile(Constants(), hw.Mesh(tp=1), {}, (torch.ones(4), torch.ones(4)))
    x, y = torch.ones(4), torch.ones(4)
    with torch.no_grad():
        _, returned = model(x, y)
    assert returned.data_ptr() == x.data_ptr()


def test_a_replicated_buffer_with_a_sharded_plan_is_refused() -> None:
    module = nn.BatchNorm1d(8).train()
    threads = hw.Threads(2)
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"running_mean": "tp"}, (torch.ones(4, 8),))

    def rank_main(rank: int) -> None:
        hw.init(threads)
        with (
            torch.no_grad(),
            pytest.raises(ArgumentError, match=r"running_mean is written in forward, and each rank has all of it.*DTensor"),
        ):
            model(torch.ones(4, 8))

    threads.run(rank_main)


def test_a_compiled_module_is_a_module() -> None:
    module = Cache()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (torch.ones(1, 2, 8), torch.zeros(1, 2, 9, 4), torch.tensor(0)))
    assert isinstance(model, nn.Module)
    assert dict(model.named_parameters()).keys() == dict(module.named_parameters()).keys() == model.state_dict().keys()
    assert model.key is module.key
    assert [*model.children()] == [module.key]
    model.eval()
    assert not module.training
    assert not module.key.training
    seen = []
    module.eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (torch.ones(1, 2, 8), torch.zeros(1, 2, 9, 4), torch.tensor(0)))
    model.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(torch.ones(1, 2, 8), torch.zeros(1, 2, 9, 4), torch.tensor(0))
        model.load_state_dict({"key.weight": torch.zeros(8, 8), "key.bias": torch.zeros(8)})
        keys = torch.ones(1, 2, 9, 4)
        model(torch.ones(1, 2, 8), keys, torch.tensor(3))
    assert seen
    assert keys.sum() == 2 * 7 * 4
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    with pytest.raises(ArgumentError, match="the module has no generate; pass a transformers model"):
        model.generate(torch.ones(1, 2))


def test_sizes_for_which_it_was_not_compiled() -> None:
    batch = torch.export.Dim("batch", min=2, max=8)
    module = nn.Linear(4, 4).eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (torch.ones(4, 4),), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(8, 4)), module(torch.ones(8, 4)))
        with pytest.raises(ArgumentError, match="input has 9 elements along dim 0, and was compiled for 2 to 8; compile it for that size"):
            model(torch.ones(9, 4))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        y.add_(1)
        return x * self.scale + y + self.count


def test_arguments_that_share_memory_with_written_tensors() -> None:
    module, row, rows = Counted(), torch.ones(8), torch.ones(4, 2)
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (row[:4], row[4:]))
    for x, y in ((row[:4], row[4:]), (rows[:, 0], rows[:, 1]), (module.scale, row[:4])):
        torch.testing.assert_close(model(x, y), x * module.scale + y + module.count)
    shared = (row[:4], row[3:7]), (row[3:7], row[:4]), (row[:4], module.scale), (module.count, row[:4]), (rows[:, 0], rows[:, 0])
    for x, y in shared:
        with pytest.raises(ArgumentError, match=r"Counted: \w+ shares memory with \w+, and forward writes to one of the two; pass a clone"):
            model(x, y)
