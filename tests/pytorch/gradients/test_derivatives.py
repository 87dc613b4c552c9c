"""Equal layers are differentiated once. Gradients are compared with torch, and traced layers are counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from compiled_fusions import unrolled_ir

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.torch import joint  # noqa: E402

X = torch.linspace(-1, 1, 24).reshape(6, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Dropout(0.0)
        self.scale, self.shift = nn.Parameter(torch.full((4,), 1.5)), nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))) * self.scale.detach() + self.shift)


class Stack(nn.Module):
    def __init__(self, count: int = 5, *, both: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.both = nn.ModuleList(Layer() for _ in range(count)), both

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for layer in self.layers:
            first, x = x, layer(x)
        return (x * first if self.both else x).square().mean()


def frozen(module: Stack) -> None:
    module.layers[2].up.weight.requires_grad_(False)


def tied(module: Stack) -> None:
    for layer in module.layers[1:]:
        layer.down.weight = module.layers[0].down.weight


def of_two(module: Stack) -> None:
    module.both = True


# For each change to a stack of 5 equal layers, the number of traced layers. The first layer is traced separately, because it computes no
# gradient of its input.
CASES: dict[Callable[[Stack], None], int] = {lambda module: None: 2, frozen: 3, tied: 2, of_two: 2}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_layers(case: Callable[[Stack], None], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    own = joint.result_of
    monkeypatch.setattr(joint, "result_of", lambda outer, env, node, *rest: traced.append(node.name) or own(outer, env, node, *rest))
    ours, want = Stack().train(), Stack().train()
    for module in (ours, want):
        case(module)
    plan = {"up.weight": "tp, -", "up.bias": "tp", "down.weight": "-, tp"}
    compiled = hostweave.torch.compile(ours, hw.Mesh(tp=ranks), plan, (X,), training=True)
    assert sum(name.startswith("relu") for name in traced) == 2 * CASES[case]  # AOTAutograd calls the traced function twice.
    compiled(X).backward()
    want(X).backward()
    for (name, one), other in zip(ours.named_parameters(), want.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_each_layer_draws_different_numbers() -> None:
    module = Stack().train()
    for layer in module.layers:
        layer.dropout.p = 0.5
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,), training=True)
    calls = [line for line in unrolled_ir(compiled.program).splitlines() if "= call @layer" in line]
    drawn = {line.rpartition(", ")[2] for line in calls}  # The last argument of a call is the seed.
    assert len(drawn) == len(calls) == len(module.layers)
