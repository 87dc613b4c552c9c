"""Models compiled for training: losses, gradients and steps of AdamW, compared with torch on one device."""

from __future__ import annotations

import copy
import re
from collections import Counter
from itertools import product
from typing import Any

import pytest
from compiled_fusions import unrolled_ir

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from exchanges import gathers  # noqa: E402
from small_models import MESHES, MODELS, expect_gradients, training_model  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.build.cuda import gpus  # noqa: E402

STEPS = 20


def expect_training(name: str, ranks: int, steps: int, device: str = "cpu", dtype: Any = torch.float32) -> Any:
    module, inputs, plan = training_model(name, ranks)
    module = module.to(device, dtype)
    inputs = {key: value.to(device, dtype if value.is_floating_point() else None) for key, value in inputs.items()}
    want, keys = copy.deepcopy(module), list(module.state_dict())
    compiled = hostweave.torch.compile(module, MESHES[ranks], plan, inputs, training=True)
    tolerance = 2e-5 if dtype == torch.float32 else 0.1
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (module, want)]
    for step in range(steps):
        losses = []
        for call, optimizer in zip((compiled, want), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(call(**inputs).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4 if dtype == torch.float32 else 0.03, atol=0)
        if step == 0:
            expect_gradients(module, want, tolerance)
        for optimizer in optimizers:
            optimizer.step()
    assert list(module.state_dict()) == keys
    return compiled


LONG = [("llama", 4), ("gpt2", 2), ("bert", 4), ("vit", 1)]  # (model, ranks) with STEPS steps on the CPU; all other pairs have one step
QUICK = [*LONG, ("vit", 4)]  # pairs that contain every model and every mesh; other pairs run with -m slow
PAIRS = [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in product(MODELS, MESHES)]


@pytest.mark.parametrize(("name", "ranks"), PAIRS)
def test_steps_are_those_of_torch(name: str, ranks: int) -> None:
    compiled = expect_training(name, ranks, STEPS if (name, ranks) in LONG else 1)
    for program in (compiled.program, compiled.backward):  # All layers call one function.
        (function,) = re.findall(r"^function @(\w+)", program.fusion_ir, re.MULTILINE)
        assert unrolled_ir(program).count(f"call @{function}(") == MODELS[name]()[0].config.num_hidden_layers
        assert "Gradient addition" not in program.source


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [ranks for ranks in (1, 2, 4) if ranks <= len(gpus())])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_steps_on_gpus(name: str, dtype: str, ranks: int) -> None:
    expect_training(name, ranks, STEPS, "cuda", getattr(torch, dtype))


class Layers(nn.Module):
    """A model with dropout, a frozen part, values without gradients, and two results."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16, bias=False), nn.LayerNorm(16)
        self.table, self.dropout = nn.Embedding(10, 16), nn.Dropout(p)
        self.table.weight.requires_grad_(False)

    def forward(self, x: Any, ids: Any, heads: Any = None) -> Any:
        with torch.no_grad():
            scale = self.up.weight.abs().mean()
        x = self.norm(x + self.table(ids)) * scale
        y = self.down(self.dropout(torch.nn.functional.gelu(self.up(x), approximate="tanh")))
        q = y.reshape(2, 2, -1, 8)
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout.p if self.training else 0.0)
        sliced = torch.cat([y[1:, :4], x[:-1, 4:].tanh()], 1).softmax(-1)
        return mixed.pow(2).mean() + sliced.square().sum() + (y[3] * x.detach()[3]).sum(), torch.relu(y).sigmoid()


class LossOf(nn.Module):
    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any, ids: Any) -> Any:
        loss, other = self.layers(x, ids)
        return loss + other.sum()


X, IDS = torch.randn(8, 16), torch.arange(8) % 5


FSDP = {"up.weight": "dp, -", "up.bias": "dp", "down.weight": "-, dp", "x": "dp, -", "ids": "dp"}


@pytest.fixture(scope="module")
def layers() -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    module = Layers().train()
    return hostweave.torch.compile(module, hw.Mesh(dp=2), FSDP, (X.clone().requires_grad_(), IDS), training=True), module


def gradients(call: Any, module: nn.Module, factor: float = 1.0) -> list[Any]:
    module.zero_grad()
    x = X.clone().requires_grad_()
    loss, other = call(x, IDS)
    ((loss + other.sum()) * factor).backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def test_a_step_is_one_program() -> None:
    """Forward pass, backward pass and AdamW are one program that works in place. A schedule changes the separate learning rates of two
    parameter groups."""
    torch.manual_seed(2)
    module = LossOf(Layers().train())
    want, steps = copy.deepcopy(module), []
    for one in (module, want):
        last = [one.layers.down.weight]
        others = [parameter for parameter in one.parameters() if parameter.requires_grad and parameter is not last[0]]
        optimizer = torch.optim.AdamW([{"params": others}, {"params": last, "lr": 1e-2, "weight_decay": 0.1}], lr=1e-3)
        steps.append((optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)))
    compiled = hostweave.torch.compile(module, hw.Mesh(dp=2), FSDP, (X, IDS), optimizer=steps[0][0])
    for _ in range(STEPS):
        got = compiled(X, IDS)
        steps[1][0].zero_grad()
        loss = want(X, IDS)
        loss.backward()
        steps[1][0].step()
        torch.testing.assert_close(got, loss.detach(), rtol=1e-4, atol=1e-5)
        for _, schedule in steps:
            schedule.step()
    for one, other in zip(module.state_dict().values(), want.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    steps[1][0].load_state_dict(steps[0][0].state_dict())  # torch's optimizer can load the state.
    assert {float(state["step"]) for state in steps[1][0].state.values()} == {STEPS}
    assert compiled.program.host_ir.count(" in %") >= 3 * len(steps[1][0].state)


@pytest.mark.parametrize("name", ["llama", "vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "bert"))])
def test_steps_of_models_are_one_program(name: str) -> None:
    """The program of a step has three functions for the layers: forward, backward and update."""
    module, inputs, plan = training_model(name, 2)
    want = copy.deepcopy(module)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (module, want)]
    compiled = hostweave.torch.compile(module, MESHES[2], plan, inputs, optimizer=optimizers[0])
    for _ in range(3):
        optimizers[1].zero_grad()
        loss = want(**inputs).loss
        loss.backward()
        optimizers[1].step()
        torch.testing.assert_close(compiled(**inputs).loss, loss.detach(), rtol=1e-4, atol=0)
    calls = Counter(re.findall(r"call @(\w+)\(", unrolled_ir(compiled.program)))
    assert list(calls.values()) == [module.config.num_hidden_layers] * 3, calls
    trained = hostweave.torch.compile(want, MESHES[2], plan, inputs, training=True)
    assert gathers(compiled.program) <= gathers(trained.program, trained.backward)


def test_weights_are_gathered_and_gradients_scattered(layers: Any) -> None:
    compiled, module = layers
    for factor in (1.0, 1024.0):  # These are factors of a gradient scaler.
        for got, want in zip(gradients(compiled, module, factor), gradients(module, module, factor), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * factor)
    host = re.sub(r"launch_(\w+) @\w+", r"\1", compiled.backward.host_ir.replace("_packed", ""))
    assert "all_gather %down_weight" in host
    assert len(re.findall(r"^ *reduce_scatter ", host, re.MULTILINE)) == 3


def test_gradients_accumulate_and_calls_are_checkpointed(layers: Any) -> None:
    compiled, module = layers
    want = gradients(module, module)
    module.zero_grad()
    x = X.clone().requires_grad_()
    first, second = compiled(x, IDS), checkpoint(compiled, x, IDS, use_reentrant=False)
    for loss, other in (first, second):
        (loss + other.sum()).backward()
    for got, once in zip([x.grad, *(parameter.grad for parameter in module.parameters())], want, strict=True):
        assert (got is None) == (once is None)
        if once is not None and got is not None:
            torch.testing.assert_close(got, 2 * once, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not compiled(X, IDS)[0].requires_grad


def test_ranks_of_a_group_train(layers: Any) -> None:
    """Each rank calls the module with its part of a batch, and gets the gradients of the whole batch."""
    compiled, module = layers
    want = gradients(module, module)[1:]
    threads = hw.Threads(2)

    def rank_main(rank: int) -> Any:
        hw.init(threads)
        wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
        loss, other = compiled(X[4 * rank : 4 * rank + 4], IDS[4 * rank : 4 * rank + 4])
        return torch.autograd.grad(loss + other.sum(), wanted)

    for got in threads.run(rank_main):
        for one, other in zip(got, [gradient for gradient in want if gradient is not None], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_dropout_repeats_by_the_seed_and_has_its_gradient() -> None:
    torch.manual_seed(1)
    module = Layers(0.25).train().double()
    x = X.double()
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {"up.weight": "tp, -"}, (x, IDS), training=True)
    # No detached value depends on these parameters, so finite differences of the loss approximate their gradients.
    wanted = [module.up.bias, module.down.weight]

    def loss(seed: int) -> Any:
        torch.manual_seed(seed)
        return compiled(x, IDS)[0]

    assert loss(5).item() == loss(5).item() != loss(6).item()
    step = 1e-6
    for parameter, gradient in zip(wanted, torch.autograd.grad(loss(5), wanted), strict=True):
        direction, ends = torch.randn_like(parameter), []
        for sign in (step, -2 * step, step):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign)
                ends.append(loss(5).item())
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), float((direction * gradient).sum()), rtol=1e-5, atol=1e-6)
