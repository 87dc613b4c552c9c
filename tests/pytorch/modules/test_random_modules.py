"""Random modules of layers, compiled for training. Results, gradients and steps of an optimizer are compared with torch. Steps with dropout
are compared with the same step on one rank.

All layers of a module are equal, and have the same masks and arguments. Modules differ in norms, parts of layers, residuals, tied
parameters and plans.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from compiled_fusions import unrolled_ir

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import torch.nn.functional as F  # noqa: E402
from exchanges import gathers  # noqa: E402
from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402

BATCH, TOKENS, WIDTH, INNER, HEADS = 4, 8, 16, 32, 4
PARTS = ("attention", "attention", "mlp", "mlp", "gated", "argument", "mean", "normed")


@dataclass
class Recipe:
    """Random choices for a module of equal layers."""

    norms: list[type[nn.Module]]
    parts: list[str]
    activation: Callable[[Any], Any]
    mask: str
    bias: bool
    norm_first: bool
    norm_twice: bool
    scaled: bool
    returns_parts: bool
    tied: bool
    projected: bool

    @classmethod
    def of(cls, draw: random.Random) -> Recipe:
        count = draw.randint(1, 3)
        return cls(
            norms=draw.choices([nn.LayerNorm, nn.RMSNorm], k=count),
            parts=draw.choices(PARTS, k=count),
            activation=draw.choice([F.gelu, F.relu, F.silu, torch.tanh]),
            mask=draw.choice(["none", "causal", "bool", "float"]),
            bias=draw.random() < 0.5,
            norm_first=draw.random() < 0.7,
            norm_twice=draw.random() < 0.2,
            scaled=draw.random() < 0.5,
            returns_parts=draw.random() < 0.2,
            tied=draw.random() < 0.2,
            projected=draw.random() < 0.6,
        )


class Layer(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.recipe = recipe
        self.norms = nn.ModuleList(norm(WIDTH) for norm in recipe.norms)
        self.up = nn.ModuleList(nn.Linear(WIDTH, INNER, bias=recipe.bias) for _ in recipe.parts)
        self.down = nn.ModuleList(nn.Linear(INNER, WIDTH, bias=recipe.bias) for _ in recipe.parts)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Any, mask: Any, argument: Any) -> Any:
        for number, (part, norm) in enumerate(zip(self.recipe.parts, self.norms, strict=True)):
            h = self.part(part, number, norm(x) if self.recipe.norm_first else x, mask, argument)
            h = norm(h) if self.recipe.norm_twice else h
            x = (x + h) * 0.7 if self.recipe.scaled else x + h
            x = x if self.recipe.norm_first else norm(x)
        return (x, h) if self.recipe.returns_parts else x

    def part(self, part: str, number: int, x: Any, mask: Any, argument: Any) -> Any:
        if part == "attention":
            q, k, v = (of(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.recipe.mask == "causal")
            return self.o(y.transpose(1, 2).flatten(2))
        if part == "mlp":
            return self.down[number](self.recipe.activation(self.up[number](x)))
        if part == "gated":
            return self.down[number](F.silu(self.up[number](x)) * self.up[number - 1](x))
        if part == "argument":
            return x * argument.sigmoid() * self.scale
        if part == "normed":
            return x * F.layer_norm(argument, (WIDTH,)) * self.scale
        return (x.exp().clamp(max=3) + argument.tanh()).mean(-1, keepdim=True) * x


class Layers(nn.Module):
    def __init__(self, count: int, recipe: Recipe):
        super().__init__()
        self.recipe, self.projection = recipe, nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(count))
        for layer in self.layers[1:] if recipe.tied else ():
            layer.o = self.layers[0].o

    def forward(self, x: Any, keep: Any, argument: Any) -> Any:
        masks = {"bool": keep, "float": torch.where(keep, 0.0, -1e4)}
        mask = masks.get(self.recipe.mask)
        mask = None if mask is None else mask[:, None, None, :].expand(-1, 1, TOKENS, -1)
        x, parts = self.projection(x) if self.recipe.projected else x, []
        for layer in self.layers:
            x = layer(x, mask, argument)
            if self.recipe.returns_parts:
                x, part = x
                parts.append(part)
        return x + sum(parts) if parts else x


def plan_of(draw: random.Random, recipe: Recipe, count: int) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    if draw.random() < 0.7:
        plan |= {"layers.*.up.*.weight": "tp, -", "layers.*.down.*.weight": "-, tp"}
        plan |= {"layers.*.up.*.bias": "tp"} if recipe.bias else {}
    if draw.random() < 0.5:
        plan |= {f"layers.*.{name}": "tp, -" for name in ("q.weight", "k.weight", "v.weight")}
        plan |= {f"layers.*.{name}.bias": "tp" for name in "qkv"} | {"layers.*.o.weight": "-, tp"}
    if draw.random() < 0.3:
        plan |= {"x": "-, tp, -"} | ({} if recipe.returns_parts else {f"layers.{layer}": "-, tp, -" for layer in range(count)})
    elif draw.random() < 0.3:
        plan |= {"argument": "tp, -, -"}
    return plan


class Loss(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Any, keep: Any, argument: Any) -> Any:
        return self.module(x, keep, argument).square().mean()


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_modules_are_trained_as_by_torch(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    recipe, count, ranks = Recipe.of(draw), draw.choice([2, 3, 4]), draw.choice([1, 2, 2, 4])
    module, keep = Layers(count, recipe).train(), torch.ones(BATCH, TOKENS, dtype=torch.bool)
    keep[1, 5:] = False
    x, argument = torch.randn(2, BATCH, TOKENS, WIDTH).unbind()
    x, argument = x.clone().requires_grad_(), argument.clone().requires_grad_(draw.random() < 0.5)
    plan = plan_of(draw, recipe, count) if ranks > 1 else {}
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan, (x, keep, argument), training=True)
    sources = [one for one in (x, argument, *module.parameters()) if one.requires_grad]
    made = []
    for call in (compiled, module):
        y = call(x, keep, argument)
        made.append([y.detach(), *torch.autograd.grad(y.square().mean(), sources, allow_unused=True)])
    for got, want in zip(*made, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()) + 1e-6)
    assert unrolled_ir(compiled.program).count("call @layer") == count

    whole = Loss(copy.deepcopy(module))
    # With a large eps, a rounding error of a gradient near 0 changes the update little.
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, eps=1) for one in (whole, module)]
    given = x.detach(), keep, argument.detach()
    step = hostweave.torch.compile(whole, hw.Mesh(tp=ranks), plan, given, optimizer=optimizers[0])
    loss = module(*given).square().mean()
    torch.testing.assert_close(step(*given), loss.detach(), rtol=1e-4, atol=1e-6)
    loss.backward()
    optimizers[1].step()
    for got, want in zip(whole.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert gathers(step.program) <= gathers(compiled.program, compiled.backward)


class Plain(nn.Module):
    """A layer without a residual. The backward pass may need the layer's input and output. The layer may have only one parameter."""

    def __init__(self, activation: Callable[[Any], Any], bias: bool, frozen: bool, noise: float):
        super().__init__()
        self.activation, self.noise, self.linear = activation, noise, nn.Linear(WIDTH, WIDTH, bias=bias)
        self.linear.weight.requires_grad_(not frozen)

    def forward(self, x: Any) -> Any:
        return F.dropout(self.activation(self.linear(x)), self.noise, self.training)


class Stack(nn.Module):
    def __init__(self, layers: list[Plain]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60))])
def test_stacks_are_stepped_as_by_torch(seed: int) -> None:
    """One step in the interpreter. Without dropout, the result equals torch's. With dropout, the result equals the result on one rank."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    activation = draw.choice([F.relu, torch.tanh, F.silu, lambda x: x, torch.sigmoid])
    bias, noise, count = draw.random() < 0.5, draw.choice([0, 0, 0.25]), draw.randint(1, 5)
    frozen = bias and draw.random() < 0.3
    stack, x = Stack([Plain(activation, bias, frozen, noise) for _ in range(count)]), torch.randn(BATCH * 2, WIDTH)
    new = draw.choice([lambda of: torch.optim.SGD(of, lr=0.5), lambda of: torch.optim.SGD(of, lr=0.5, momentum=0.9)])
    plan = draw.choice([{"x": "tp, -"}, {"layers.*.weight": "-, tp"}, {"layers.*.weight": "tp, -", "x": "tp, -"}])
    stepped = []
    for ranks in (draw.choice([2, 4, 8]), *([1] if noise else [])):
        one = copy.deepcopy(stack)
        step = hostweave.torch.compile(one, hw.Mesh(tp=ranks), plan if ranks > 1 else {}, (x,), optimizer=new(trained(one)))
        torch.manual_seed(seed)
        stepped.append([step(x), *one.parameters()])
    if not noise:
        loss = stack(x)
        loss.backward()
        new(trained(stack)).step()
        stepped.append([loss.detach(), *stack.parameters()])
    for own, *others in zip(*stepped, strict=True):
        for other in others:
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [one for one in module.parameters() if one.requires_grad]
