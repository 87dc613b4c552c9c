"""Functions, kernels, gathers, names and lines of training programs."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
from compiled_fusions import unrolled_ir

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from torch import nn  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402


class Rotated(nn.Module):
    """A layer like Llama's, with one head of keys. Tables of rotary embeddings are buffers. So the tables are inputs, not constants."""

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
    """Both matmuls for the gradients of a linear layer read one gathered tensor. The rotation, the activation and repeated keys write no
    intermediate values to memory."""
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
    assert sum(name.endswith("_joined") for name in kernels) == 2  # The two kernels are the rotary embeddings of queries and keys.
    assert not [name for name in kernels if "broadcast" in name]
    # The linear layer of the forward pass reads the result of the attention in place, and so does the backward pass.
    assert "copy %saved_attention" not in compiled.program.sources["program.hw"]
    # One product is with the weight, and one is for the gradient of the weight.
    assert source.count(".multiply(gradient_y_sliced_gathered_") == 2


class Next(nn.Module):
    """Predicts the next token. The labels are shifted as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)

    def forward(self, x: Any, labels: Any) -> Any:
        following = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return nn.functional.cross_entropy(self.head(x).view(-1, 16), following.view(-1))


@pytest.mark.parametrize("batch", [1, 3])
def test_shifted_labels_are_not_saved(batch: int) -> None:
    """The backward pass shifts the labels again. For a batch of 1, the kernels that read the labels also pad them."""
    module, x, labels = Next().train(), torch.randn(batch, 6, 8, requires_grad=True), torch.randint(16, (batch, 6))
    compiled = hostweave.torch.compile(module, hw.Mesh(), {}, (x, labels), training=True)
    for sources in (compiled.program.sources, compiled.backward.sources):
        assert "cudaMemcpy" not in sources["program.cpp"]
        assert ("hw::load(pad_" in sources["program.cpp"]) == (batch > 1)
    losses = [call(x, labels) for call in (compiled, module)]
    torch.testing.assert_close(*losses)
    for mine, theirs in zip(*(torch.autograd.grad(loss, [x, *module.parameters()]) for loss in losses), strict=True):
        torch.testing.assert_close(mine, theirs)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        logits = self.head(nn.functional.dropout(x, 0.5))
        return {"loss": nn.functional.cross_entropy(logits, labels.view(-1)), "logits": logits}


@pytest.mark.parametrize("of_head", [{}, {"head": "-, tp"}], ids=["gathered", "sharded"])
def test_results_are_named_by_the_module_and_views_of_arguments_are_not_saved(of_head: dict[str, str]) -> None:
    """If the logits stay sharded, one value is both a result and saved. The result has the name."""
    inputs, plan = {"x": torch.randn(6, 4), "labels": torch.randint(8, (2, 3))}, {"head.weight": "tp, -", "head.bias": "tp"} | of_head
    compiled = hostweave.torch.compile(Classifier().train(), hw.Mesh(tp=2), plan, inputs, training=True)
    program, backward = compiled.program.host, compiled.backward.host
    assert [result.name for result in program.results][:2] == ["loss", "logits"]
    assert [result.name for result in backward.results] == ["gradient_head_weight", "gradient_head_bias"]
    assert {"gradient_loss", "gradient_logits", "labels"} <= {argument.name for argument in backward.arguments}
    assert not [result.name for result in program.results if "view" in result.name]
    for sources in (compiled.program.sources, compiled.backward.sources):  # the lines above collectives are the module's too
        assert all(line in inspect.getsource(Classifier) for line in re.findall(r"// \S+\.py:\d+  (.{,30})", sources["program.cpp"]))


class NormedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.up(self.norm(x)).tanh())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(NormedLayer() for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def test_values_of_layers_are_named_by_module_and_role() -> None:
    def function(program: Any, name: str) -> tuple[list[str], list[str]]:
        given, made = re.findall(rf"^function @{name}\((.*)\) -> \((.*)\)", program.sources["program.hw"], re.MULTILINE)[0]
        return re.findall(r"%(\w+)", given), re.findall(r"%(\w+)", made)

    module, x = Normed().train(), torch.randn(4, 2, 8)
    model = hostweave.torch.compile(module, hw.Mesh(), {}, (x,), training=True)
    step = hostweave.torch.compile(module, hw.Mesh(dp=2), {"x": "dp, -, -"}, (x,), optimizer=torch.optim.AdamW(module.parameters()))
    made = ["norm_output", "norm_mean", "norm_rstd", "tanh", "output"]
    assert function(model.program, "normed_layer") == (["x", "norm_weight", "norm_bias", "up_weight", "up_bias", "dropout_seed"], made)
    assert function(step.program, "normed_layer") == function(model.program, "normed_layer")
    given, gradients = function(model.backward, "normed_layer")
    of_norm = ["norm_output", "x", "norm_mean", "norm_rstd", "norm_weight", "norm_bias"]
    assert given == ["gradient", "dropout_seed", "tanh", "up_weight", *of_norm]
    assert gradients == [*(f"gradient_{name}" for name in ("up_weight", "up_bias", "norm_weight", "norm_bias")), "gradient_x"]
    assert function(step.program, "normed_layer_backward") == (given, gradients)
    assert "saved_layers_norm_rstd_2" in {argument.name for argument in model.backward.host.arguments}
    assert {"gradient_head_weight", "gradient_head_bias", "gradient_layers_norm_weight_0"} <= {
        *re.findall(r"all_reduce sum %\w+ -> %(\w+)", step.program.sources["program.hw"])
    }


class Mixer(nn.Module):
    """Attention by matmuls, or two attention ops with one mask. Queries, keys and values are slices of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Any, mask: Any = None) -> Any:
        q, k, v = self.qkv(x).split(16, -1)
        if mask is not None:
            y = nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], mask)
            return nn.functional.scaled_dot_product_attention(y, k[:, None], v[:, None], mask)
        return ((q @ k.transpose(1, 2)).softmax(-1) @ v).square().sum()


@pytest.mark.usefixtures("interpreted")
def test_slices_of_one_tensor_are_saved_as_that_tensor() -> None:
    torch.manual_seed(0)
    module, x = Mixer().train(), torch.randn(2, 8, 16)
    want = copy.deepcopy(module)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,), training=True)
    for call in (compiled, want):
        call(x).backward()
    for mine, theirs in zip(module.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert [result.name for result in compiled.program.host.results] == ["y", "saved_qkv_output", "saved_softmax", "saved_matmul"]
    assert " copy " not in str(compiled.program.host)


@pytest.mark.usefixtures("interpreted")
def test_attentions_with_one_mask_share_a_bias() -> None:
    torch.manual_seed(0)
    module, x, mask = Mixer().eval(), torch.randn(2, 8, 16), torch.ones(2, 1, 8, 8, dtype=torch.bool).tril(1)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x, mask))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, mask), module(x, mask), rtol=1e-4, atol=1e-4)
    assert str(compiled.program.host).count("= where(") == 1


class Stack(nn.Module):
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
    """Forward pass, backward pass and update of equal layers are functions, even if ops are between the layers."""
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
    """A loop calls all layers except the last. The loop of the backward pass has the reverse order. Saved values and results are arrays in
    structs."""
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
        runs = [re.search(r"void Program::enqueue\(.*?\n}\n", source, re.DOTALL)[0] for source in sources]  # type: ignore[index]
        lines.add(tuple(run.count("\n") for run in runs))
        assert all(run.count(f"for (int64_t i = 0; i < {count - 1}; ++i) {{") == 1 for run in runs)
        assert re.search(rf"out\.\w+\[{count - 2} - i\]", runs[1])
        assert not any("expect_room" in source for source in sources)  # The number of layers is a constant.
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
def test_arguments_that_are_resharded_for_layers(alike: bool) -> None:
    """An argument that is not a result of another layer is resharded if the parameter of the function has another sharding."""
    torch.manual_seed(3)
    module, given = GatedTwice().train(), [torch.randn(8, 16, requires_grad=True) for _ in range(3)]
    plan = {"y": "tp, -", "gradient_y": "tp, -", "z": "tp, -" if alike else "-, tp"}
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), plan, tuple(given), training=True)
    want = torch.autograd.grad(module(*given).square().sum(), [*given, *module.parameters()])
    got = torch.autograd.grad(compiled(*given).square().sum(), [*given, *module.parameters()])
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert "call @gated(" in compiled.program.fusion_ir


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, x: Any, labels: Any) -> tuple[Any, Any]:
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten()), logits


def test_a_loss_keeps_the_logits_and_no_log_probabilities() -> None:
    """The backward pass computes the log-probabilities again, from the logits that the module returns and two values per row."""
    torch.manual_seed(4)
    module, x, labels = Logits().to(torch.bfloat16).train(), torch.randn(2, 8, 16).to(torch.bfloat16), torch.randint(0, 64, (2, 8))
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x, labels), training=True)
    shapes = [str(output.type) for output in compiled.program.host.results]
    assert sorted(shapes)[:1] == ["bf16[2, 8, 64]"]
    assert [shape for shape in shapes if "64" in shape] == ["bf16[2, 8, 64]"]
    assert "= allocate f32[16, 64]" not in compiled.program.host_ir + compiled.backward.host_ir
    for of_logits in (0.0, 1.0):  # Gradients of the logits are added.
        grads = []
        for call in (compiled, module):
            loss, logits = call(x, labels)
            (loss + of_logits * logits.float().square().mean()).backward()
            grads.append(module.head.weight.grad.float())
            module.zero_grad()
        torch.testing.assert_close(*grads, rtol=2e-2, atol=1e-3)
