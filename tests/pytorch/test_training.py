"""Models of transformers, compiled with `training=True`: losses, gradients and steps of AdamW against torch on one device."""

from __future__ import annotations

import copy
import re
from collections import Counter
from typing import Any

import pytest
from compiled_fusions import unrolled_ir

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from exchanges import gathers  # noqa: E402
from small_models import MESHES, MODELS, expect_gradients, training_model  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from trained_dtensors import Loss  # noqa: E402

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


LONG = [("llama", 4), ("gpt2", 2), ("bert", 4), ("vit", 1)]  # the models that make all STEPS; the others make one


@pytest.mark.parametrize("ranks", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_those_of_torch(name: str, ranks: int) -> None:
    compiled = expect_training(name, ranks, STEPS if (name, ranks) in LONG else 1)
    for program in (compiled.program, compiled.backward):  # all layers are one function, and save the same
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
    """Parts that transformers' models lack: dropout, a frozen part, values without gradients, two results."""

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


class Rotated(nn.Module):
    """A layer like Llama's, with one head of keys. The tables of rotary embeddings are buffers, whose values may change."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (32, 64), "k": (32, 16), "o": (64, 32), "gate": (32, 64), "up": (32, 64), "down": (64, 32)}
        for name, (size_in, size_out) in sizes.items():
            self.add_module(name, nn.Linear(size_in, size_out, bias=False))
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.randn(8, 16))

    def turned(self, x: Any) -> Any:
        return x * self.cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * self.sin

    def forward(self, x: Any) -> Any:
        q, k = (self.turned(w(x).view(2, 8, -1, 16).transpose(1, 2)) for w in (self.q, self.k))
        k = k[:, :, None].expand(2, 1, 4, 8, 16).reshape(2, 4, 8, 16)
        y = nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


ROTATED: dict[str, Any] = {"x": "-, tp, -", "o": "-, tp, -", "down": "-, tp, -", "o.weight": "-, tp", "down.weight": "-, tp"}
ROTATED |= {f"{name}.weight": "tp, -" for name in ("q", "gate", "up")}


def test_a_layer_is_differentiated_with_few_gathers_and_kernels() -> None:
    """Both products of a derivative use one gathered value. The rotation, the activation and repeated keys write no intermediate values to
    memory."""
    torch.manual_seed(0)
    module, x = Rotated().train(), torch.randn(2, 8, 32, requires_grad=True)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), ROTATED, (x,), training=True)
    module.sin.neg_()
    grads = []
    for call in (compiled, module):
        call(x).square().sum().backward()
        grads.append([one.grad for one in (x, *module.parameters())])
        module.zero_grad()
        x.grad = None
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    source = compiled.backward.sources["program.cpp"]
    kernels = re.findall(r"launch @(\w+)", compiled.backward.sources["program.hw"])
    assert sum(name.endswith("_joined") for name in kernels) == 2  # rotary embeddings of queries and keys
    assert not [name for name in kernels if "broadcast" in name]
    assert source.count(".multiply(gradient_y_resharded_gathered_") == 2  # with the weight, and for its gradient


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        logits = self.head(nn.functional.dropout(x, 0.5))
        return {"loss": nn.functional.cross_entropy(logits, labels.view(-1)), "logits": logits}


def test_results_are_named_by_the_module_and_views_of_arguments_are_not_saved() -> None:
    inputs = {"x": torch.randn(6, 4), "labels": torch.randint(8, (2, 3))}
    compiled = hostweave.torch.compile(
        Classifier().train(), hw.Mesh(tp=2), {"head.weight": "tp, -", "head.bias": "tp"}, inputs, training=True
    )
    program, backward = compiled.program.host, compiled.backward.host
    assert [result.name for result in program.results][:2] == ["loss", "logits"]
    assert [result.name for result in backward.results] == ["gradient_head_weight", "gradient_head_bias"]
    assert {"gradient_loss", "gradient_logits", "labels"} <= {argument.name for argument in backward.arguments}
    assert not [result.name for result in program.results if "view" in result.name]


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
    """Forward, backward and AdamW in place. Two parameter groups have separate learning rates, which a schedule changes."""
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
    steps[1][0].load_state_dict(steps[0][0].state_dict())  # torch takes over where it ended
    assert {float(state["step"]) for state in steps[1][0].state.values()} == {STEPS}
    assert compiled.program.host_ir.count(" in %") >= 3 * len(steps[1][0].state)


class Stack(nn.Module):
    """Four layers, three of which are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, bias=at < 3), nn.SiLU()) for at in range(4))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def test_layers_of_a_step_are_functions() -> None:
    """Forward, backward and update of equal layers with other ops between them."""
    torch.manual_seed(3)
    module, x = Stack().train(), torch.randn(8, 16)
    want = copy.deepcopy(module)
    plan = {"x": "dp, -", "layers.*.0.weight": "dp, -"}
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (module, want)]
    compiled = hostweave.torch.compile(module, hw.Mesh(dp=2), plan, (x,), optimizer=optimizers[0])
    for name, calls in (("sequential", 3), ("sequential_backward", 3), ("adamw_layer", 3)):
        assert compiled.program.fusion_ir.count(f"function @{name}(") == 1
        assert unrolled_ir(compiled.program).count(f"call @{name}(") == calls
    for _ in range(3):
        compiled(x)
        optimizers[1].zero_grad()
        want(x).backward()
        optimizers[1].step()
    for (name, parameter), other in zip(module.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5, msg=lambda why, at=name: f"{at}: {why}")


@pytest.mark.parametrize("name", MODELS)
def test_steps_of_models_are_one_program(name: str) -> None:
    """The program of a step has three functions for its layers: forward, backward and update."""
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


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, x: Any) -> Any:
        return x + self.mlp(x)


class Residuals(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(layers))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("sharded", [True, False])
def test_programs_do_not_grow_with_layers(sharded: bool) -> None:
    """Calls of all layers except the last are a loop, also in reverse. Saved values and results are arrays of structs."""
    plan = {"layers.*.mlp.0.weight": "tp, -", "layers.*.mlp.0.bias": "tp", "layers.*.mlp.2.weight": "-, tp"}
    lines: set[tuple[int, ...]] = set()
    for count in (4, 6):
        torch.manual_seed(3)
        module, x = Residuals(count).train(), torch.randn(8, 16, requires_grad=True)
        between = {"x": "tp, -", **{f"layers.{layer}": "tp, -" for layer in range(count)}} if sharded else {}
        compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), plan | between, (x,), training=True)
        want = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
        got = torch.autograd.grad(compiled(x).square().sum(), [x, *module.parameters()])
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        sources = [one.sources["program.cpp"] for one in (compiled.program, compiled.backward)]
        runs = [re.search(r"void Program::run\(.*?\n}\n", source, re.DOTALL)[0] for source in sources]  # type: ignore[index]
        lines.add(tuple(run.count("\n") for run in runs))
        assert all(run.count(f"for (int64_t i = 0; i < {count - 1}; ++i) {{") == 1 for run in runs)
        assert re.search(rf"out\.\w+\[{count - 2} - i\]", runs[1])
    assert len(lines) == 1, lines


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(16, 16)

    def forward(self, x: Any, gate: Any) -> Any:
        return x + gate * self.mlp(x).tanh()


class GatedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, y: Any, gradient_y: Any, z: Any) -> Any:
        return self.layers[1](self.layers[0](y, gradient_y), z)


@pytest.mark.parametrize("alike", [True, False])
def test_arguments_with_names_of_results_and_shardings_of_their_own(alike: bool) -> None:
    """Layers take values of the program, not of one another. These are resharded if their shardings differ."""
    torch.manual_seed(3)
    module, given = GatedTwice().train(), [torch.randn(8, 16, requires_grad=True) for _ in range(3)]
    plan = {"y": "tp, -", "gradient_y": "tp, -", "z": "tp, -" if alike else "-, tp"}
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), plan, tuple(given), training=True)
    want = torch.autograd.grad(module(*given).square().sum(), [*given, *module.parameters()])
    got = torch.autograd.grad(compiled(*given).square().sum(), [*given, *module.parameters()])
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert "call @gated(" in compiled.program.fusion_ir


def test_weights_are_gathered_and_gradients_scattered(layers: Any) -> None:
    compiled, module = layers
    for factor in (1.0, 1024.0):  # factors of a gradient scaler
        for got, want in zip(gradients(compiled, module, factor), gradients(module, module, factor), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * factor)
    host = compiled.backward.host_ir
    assert "all_gather %down_weight" in host.replace("_packed", "")
    assert host.count("reduce_scatter sum") == 3


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
    """Each rank calls the module with its part of a batch. A parameter that each rank has whole gets its whole gradient."""
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


class Tied(nn.Module):
    """A parameter that is used twice, and a part under `torch.utils.checkpoint`."""

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
    """Two attentions, whose masks are arguments: a mask of bools, and a mask that is added to the scores and has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 3 * 32, bias=False)

    def forward(self, x: Any, mask: Any, added: Any) -> Any:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attend = nn.functional.scaled_dot_product_attention
        return (attend(q, k, v, mask) * attend(q, k, v, added, scale=0.5)).sum()


def test_a_mask_is_an_operand_of_attention() -> None:
    """The scores are not in memory, forward or backward. A row without visible columns has a gradient of zeros."""
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


def test_dropout_repeats_by_the_seed_and_has_its_gradient() -> None:
    torch.manual_seed(1)
    module = Layers(0.25).train().double()
    x = X.double()
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {"up.weight": "tp, -"}, (x, IDS), training=True)
    wanted = [module.up.bias, module.down.weight]  # parameters without a path to the loss that bypasses detached values

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


@pytest.mark.parametrize("whole", [False, True], ids=["backward", "step"])
def test_dtensors_state_their_shardings_and_get_dtensors(whole: bool) -> None:
    """Each rank, here a thread, has a module of DTensors with the local tensors that a process of torch.distributed would have."""
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
    """A copy of the module, whose parameters are DTensors with the local tensors of a rank."""
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


def test_constants_of_equal_elements_are_no_inputs() -> None:
    """The gradient of a mean is one number."""
    module = Loss()
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {}, (X,), optimizer=adamw(module))
    assert not compiled._part.graph.bound
    assert "fill(value=" in compiled.program.host_ir


class Normed(nn.Module):
    """Batch norms, whose statistics are buffers, and a buffer in which the module keeps a running average."""

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
    """Statistics of a sharded batch are those of the whole batch."""
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
