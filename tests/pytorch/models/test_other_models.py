"""Models that transformers does not have. Losses and gradients of a step are compared with torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402

BATCH, DIM, HEADS = 2, 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        other = x if other is None else other
        q, k, v = (w(of).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w, of in ((self.q, x), (self.k, other), (self.v, other)))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, dim: int = DIM, inner: int = 32) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(dim, inner), nn.Linear(inner, dim), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp_norm, self.mlp = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.cross_norm, self.cross = nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(DIM), Mlp()

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), causal=True)
        x = x + self.cross(self.cross_norm(x), memory)
        return x + self.mlp(self.mlp_norm(x))


class Translator(nn.Module):
    """An encoder, and a decoder that attends to the result of the encoder. The embedding is also the weight of the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, DIM)
        self.encoder, self.decoder = nn.ModuleList(Encoder() for _ in range(3)), nn.ModuleList(Decoder() for _ in range(3))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, x = self.table(source), self.table(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = F.linear(x[:, :-1], self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)


class Patches(nn.Module):
    """A ViT that scales the residual of each layer, and uses the mean of all patches instead of a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.position = nn.Conv2d(3, DIM, 4, 4), nn.Parameter(torch.randn(16, DIM) * 0.02)
        self.layers = nn.ModuleList(Encoder() for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((DIM,), 0.1)) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 10)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2) + self.position
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + (layer(x) - x) * scale
        return F.cross_entropy(self.head(self.norm(x).mean(1)), label)


class Mix(nn.Module):
    def __init__(self, patches: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mlp_of_tokens, self.mlp = Mlp(patches, 24), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mlp_of_tokens(self.token_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.channel_norm(x))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al., 2021), with each layer under torch.utils.checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.layers, self.head = nn.Linear(12, DIM), nn.Sequential(*(Mix(8) for _ in range(3))), nn.Linear(DIM, 10)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        x = self.patch(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(x.amax(1)), label)


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(0, 10, shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "an encoder and a decoder": (Translator, lambda: (_words(BATCH, 6), _words(BATCH, 5))),
    "a ViT without a class token": (Patches, lambda: (torch.randn(BATCH, 3, 16, 16), _words(BATCH))),
    "a mixer under checkpoints": (Mixer, lambda: (torch.randn(BATCH, 8, 12), _words(BATCH))),
}
PLAN = {f"{name}.{of}": axes for name in "qkv" for of, axes in (("weight", "tp, -"), ("bias", "tp"))} | {
    **{"up.weight": "tp, -", "up.bias": "tp", "down.weight": "-, tp", "o.weight": "-, tp"}
}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_step(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    make, draw = MODELS[name]
    ours, inputs = make().train(), draw()
    want = copy.deepcopy(ours)
    held = [path for path, _ in ours.named_parameters()]
    plan = {entry: axes for entry, axes in PLAN.items() if any(path.endswith(f".{entry}") for path in held)}
    compiled = hostweave.torch.compile(ours, hw.Mesh(tp=ranks), plan, inputs, training=True)
    losses = [call(*inputs) for call in (compiled, want)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    for loss in losses:
        loss.backward()
    for (path, one), other in zip(ours.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


def test_dropout_under_checkpoints() -> None:
    """The backward pass under a checkpoint uses the dropout mask of the forward pass. So for this mask, the gradient predicts how the
    loss changes when the parameters change."""
    torch.manual_seed(0)
    make, draw = MODELS["a mixer under checkpoints"]
    module, inputs = make().double().train(), draw()
    inputs = (inputs[0].double(), inputs[1])
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, inputs, training=True)

    def loss() -> Any:
        torch.manual_seed(7)
        return compiled(*inputs)

    loss().backward()
    steps = [(one, torch.randn_like(one)) for one in module.parameters()]
    expected = sum(float((one.grad * step).sum()) for one, step in steps)
    found = []
    with torch.no_grad():
        for by in (1e-5, -2e-5):
            for one, step in steps:
                one += by * step
            found.append(float(loss()))
    assert (found[0] - found[1]) / 2e-5 == pytest.approx(expected, rel=1e-4)
    torch.manual_seed(8)
    assert float(compiled(*inputs).detach()) != pytest.approx(found[1], rel=1e-6)
