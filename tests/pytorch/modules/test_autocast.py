"""torch.autocast and the default dtype, when a module is compiled and in calls."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError  # noqa: E402

X = torch.linspace(-2, 2, 32).reshape(4, 8)


def test_autocast() -> None:
    module = nn.Linear(8, 8).eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ArgumentError, match=r"torch.autocast is torch.bfloat16 of cpu, and was off at compile time"):
            model(X)
        within = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
        assert within(X).dtype == module(X).dtype == torch.bfloat16
        torch.testing.assert_close(within(X), module(X), rtol=1e-2, atol=1e-2)
    with torch.no_grad(), pytest.raises(ArgumentError, match=r"torch.autocast is off, and was torch.bfloat16 of cpu"):
        within(X)


def test_another_default_dtype() -> None:
    model = hostweave.torch.compile(nn.Linear(8, 8).eval(), hw.Mesh(tp=1), {}, (X,))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), pytest.raises(ArgumentError, match=r"the default dtype is torch.float64, and was torch.float32 at compile"):
            model(X)
    finally:
        torch.set_default_dtype(torch.float32)


class Frequencies(nn.Module):
    """Multiplies constants without autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return x + torch.arange(8.0)[:, None] @ torch.arange(8.0)[None]


def test_constants_are_computed_without_the_autocast_of_the_caller() -> None:
    x = torch.zeros(8, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model = hostweave.torch.compile(Frequencies(), hw.Mesh(tp=1), {}, (x,))
        torch.testing.assert_close(model(x), Frequencies()(x), rtol=0, atol=0)


class AutocastOfLayers(nn.Module):
    """Equal layers, each in another mode of torch.autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for layer, dtype in zip(self.layers, (torch.float32, torch.bfloat16, torch.float16), strict=True):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                results.append(layer(x))
        return results


def test_equal_layers_with_different_autocast() -> None:
    module = AutocastOfLayers().eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
    with torch.no_grad():
        results, expected = model(X), module(X)
    assert [x.dtype for x in results] == [x.dtype for x in expected] == [torch.float32, torch.bfloat16, torch.float16]
    torch.testing.assert_close(results, expected, rtol=1e-2, atol=1e-2)
    assert "as layers.0" not in model.traced.values()
