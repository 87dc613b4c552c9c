"""Complex numbers and Fourier transforms. Programs represent a complex number as a pair of real numbers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ProgramError  # noqa: E402


class Rotary(nn.Module):
    """A projection to queries, and a rotation by complex numbers, as in Meta's code of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16, bias=False)
        angles = torch.outer(torch.arange(6.0), 0.5 ** torch.arange(4.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Any) -> Any:
        heads = self.project(x).unflatten(-1, (2, 8)).float()
        turned = torch.view_as_complex(heads.unflatten(-1, (4, 2))) * self.turns[:, None]
        return torch.view_as_real(turned).flatten(-3)


class Spectrum(nn.Module):
    def forward(self, x: Any) -> Any:
        a = torch.fft.rfft(x, norm="ortho")
        b = torch.fft.fft2(x) / (2 + 1j) + torch.exp(1j * x)
        back = torch.fft.irfft(a * a.conj(), n=x.shape[-1])
        return a, b.abs() * b.angle(), back, torch.fft.hfft(b), torch.matmul(a, a.mT.conj())


X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    def __init__(self, has_window: bool) -> None:
        super().__init__()
        self.rotary, self.has_window = Rotary(), has_window

    def forward(self, x: Any) -> Any:
        q = self.rotary(x).unflatten(-1, (2, 8)).transpose(1, 2)
        if not self.has_window:
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        window = torch.ones(6, 6, dtype=torch.bool).tril() & torch.ones(6, 6, dtype=torch.bool).triu(-2)
        attended = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=window)
        return attended.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("has_window", [False, True])
@pytest.mark.usefixtures("interpreted")
def test_attention_of_rotated_queries(has_window: bool) -> None:
    """Attention must not be decomposed. Its gradient and a view of its result must be supported."""
    module = Attention(has_window)
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"project.weight": "tp, -"}, (X,), training=True)
    assert "attention(" in model.program.fusion_ir
    gradients = []
    for one in (model, module):
        made = one(X)
        made.square().sum().backward()
        gradients.append((made, module.rotary.project.weight.grad))
        module.rotary.project.weight.grad = None
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Any, angles: Any) -> Any:
        pairs = torch.view_as_complex(self.project(x).float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles.to(pairs.device)).flatten(-2)


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Turn(), Turn()])

    def forward(self, x: Any) -> Any:
        angles = torch.polar(torch.ones(6, 8), torch.arange(48.0).unflatten(0, (6, 8)))
        for layer in self.layers:
            x = layer(x, angles)
        return x


@pytest.mark.usefixtures("interpreted")
def test_layers_with_an_argument_of_complex_numbers() -> None:
    module = Turns()
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"project.weight": "tp, -"}, (X,), training=True)
    assert model.traced == {"layers.0": "traced", "layers.1": "as layers.0"}
    gradients = []
    for one in (model, module):
        made = one(X)
        made.square().sum().backward()
        gradients.append((made, *[layer.project.weight.grad for layer in module.layers]))
        module.zero_grad()
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.extra
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rotary_and_transforms(ranks: int) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary, self.spectrum = Rotary(), Spectrum()

        def forward(self, x: Any) -> Any:
            return self.rotary(x), self.spectrum(x)

    module = Both().eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=ranks), {"x": "tp, -, -", "project.weight": "tp, -"} if ranks > 1 else {}, (X,))
    with torch.no_grad():
        torch.testing.assert_close(model(X), module(X), rtol=2e-5, atol=2e-4)


@pytest.mark.extra
def test_gradients_through_complex_numbers() -> None:
    class Filtered(Rotary):
        def forward(self, x: Any) -> Any:
            turned = super().forward(x)
            return torch.fft.irfft(torch.fft.rfft(turned) * (1 + 2j), n=turned.shape[-1])

    module = Filtered()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,), training=True)
    found = []
    for one in (model, module):
        module.zero_grad()
        one(X).square().mul(torch.arange(16)).sum().backward()
        found.append(module.project.weight.grad.clone())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)


def test_an_op_that_is_missing() -> None:
    class Module(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.special.log_softmax(x, -1), torch.acos(torch.complex(x, x))

    with pytest.raises(ProgramError, match=r"aten\.acos\.default of complex numbers is not supported: compute with"):
        hostweave.torch.compile(Module(), hw.Mesh(tp=1), {}, (X,))


def test_an_argument_of_complex_numbers() -> None:
    class Magnitudes(nn.Module):
        def forward(self, z: Any) -> Any:
            return z.abs()

    with pytest.raises(ProgramError, match=r"z is an argument of complex numbers, .*; pass its torch.view_as_real\(z\), and write"):
        hostweave.torch.compile(Magnitudes(), hw.Mesh(tp=1), {}, (torch.ones(3, dtype=torch.complex64),))
