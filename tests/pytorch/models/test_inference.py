"""Models of transformers, and other modules, compiled by `hostweave.torch.compile`, compared with torch on one device."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from compiled_fusions import unrolled_ir

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from small_models import MODELS, PLANS  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, ProgramError  # noqa: E402
from hostweave.build.cuda import gpus  # noqa: E402
from hostweave.torch.plan import layouts  # noqa: E402

SEQUENCE_PARALLEL = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    "model.layers.*.input_layernorm": SequenceParallel(),
    "model.layers.*.post_attention_layernorm": SequenceParallel(),
    "self_attn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "q_proj": ColwiseParallel(),
    "k_proj": ColwiseParallel(),
    "v_proj": ColwiseParallel(),
    "o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "gate_proj": ColwiseParallel(),
    "up_proj": ColwiseParallel(),
    "down_proj": RowwiseParallel(output_layouts=Shard(1)),
}


BY_NAME = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in MODELS]


@cache
def model(name: str) -> Any:
    """The model with this name, and its inputs. Tests share the model and the inputs."""
    torch.manual_seed(1)
    return MODELS[name]()


def expect_logits(compiled: Any, module: nn.Module, inputs: dict[str, Any]) -> None:
    with torch.no_grad():
        got, want = compiled(**inputs), module(**inputs)
    assert type(got) is type(want)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("exported_once")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", BY_NAME)
def test_logits_are_those_of_torch(name: str, ranks: int) -> None:
    module, inputs = model(name)
    plan = PLANS[name] if ranks > 1 else {}
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan, inputs)
    expect_logits(compiled, module, inputs)
    again = {key: value.flip(0).contiguous() for key, value in inputs.items()}
    expect_logits(compiled, module, again)
    if name == "llama":
        ir = compiled.program.fusion_ir
        assert ir.count("function @llama_decoder_layer") == 1
        assert unrolled_ir(compiled.program).count("call @llama_decoder_layer") == 3


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [ranks for ranks in (1, 2, 4) if ranks <= len(gpus())])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_on_gpus(name: str, dtype: str, ranks: int) -> None:
    torch.manual_seed(ranks)
    module, inputs = MODELS[name]()
    module = module.to("cuda", getattr(torch, dtype))
    inputs = {key: value.to(module.dtype if value.is_floating_point() else value.dtype).cuda() for key, value in inputs.items()}
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=ranks), PLANS[name] if ranks > 1 else {}, inputs)
    with torch.no_grad():
        got, want = compiled(**inputs).logits, module(**inputs).logits
    allowed = 1e-5 if dtype == "float32" else 0.02  # For bf16, a few roundoffs of the largest logit are allowed.
    torch.testing.assert_close(got, want, rtol=0, atol=allowed * float(want.abs().max()) + 1e-6)


@pytest.mark.usefixtures("exported_once")
@pytest.mark.xdist_group("llama")
def test_styles_of_torch_make_it_sequence_parallel() -> None:
    module, inputs = model("llama")
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), SEQUENCE_PARALLEL, inputs)
    expect_logits(compiled, module, inputs)
    layer = compiled.program.host_ir.partition("function @llama_decoder_layer")[2].partition("\n}")[0]
    assert [len(re.findall(rf"^ *(?:launch_)?{kind} ", layer, re.MULTILINE)) for kind in ("reduce_scatter", "all_gather")] == [2, 2], layer
    assert "all_reduce" not in layer


@pytest.mark.parametrize("plan", ["tp, -", "-, tp"], ids=["rows", "columns"])
def test_calls_use_new_values_of_parameters(plan: str) -> None:
    """With the second plan, blocks of a weight are copies."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Any, factor: float = 1.0) -> Any:
            return {"y": self.linear(x) * factor, "twice": (x + x, x)}

    module = Scaled().eval()
    x = torch.randn(6, 8)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {"linear.weight": plan}, (x, 3.0))
    with torch.no_grad():
        got = compiled(x, 3.0)
        torch.testing.assert_close(got["y"], module(x, 3.0)["y"])
        torch.testing.assert_close(got["twice"][0], x + x)
        torch.testing.assert_close(got["twice"][1], x)
        module.linear.weight.mul_(2)
        torch.testing.assert_close(compiled(x, 3.0)["y"], module(x, 3.0)["y"])
        state = {key: value.clone() for key, value in module.state_dict().items()}
        module.load_state_dict({key: value + 1 for key, value in state.items()})
        torch.testing.assert_close(compiled(x, 3.0)["y"], module(x, 3.0)["y"])


@pytest.mark.parametrize("plan", ["tp, -", "-, tp"], ids=["rows", "columns"])
def test_parameters_of_which_torch_counts_no_writes(plan: str) -> None:
    with torch.inference_mode():
        module = nn.Linear(8, 4).eval().requires_grad_(False)
        x = torch.randn(6, 8)
        compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {"weight": plan}, (x,))
        for _ in range(2):
            torch.testing.assert_close(compiled(x), module(x))
            module.weight.mul_(2)


class Centred(nn.Module):
    """A module with tensors that are not inputs of its program. The program contains values computed from these tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), torch.ones(8)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Any) -> Any:
        return self.linear(x - self.mean.exp()) * (self.scale + 1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["mean", "scale"])
def test_values_computed_from_buffers_are_not_stale(name: str, training: bool) -> None:
    module, x = Centred().train(training), torch.ones(2, 8)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {"linear.weight": "tp, -"}, (x,), training=training)
    changed = re.escape(f"Centred: {name} has changed, but the program holds values that were computed from it at compile time; compile it")
    with torch.set_grad_enabled(training):
        module.load_state_dict(module.state_dict())  # The values are the same.
        torch.testing.assert_close(compiled(x), module(x))
        held = getattr(module, name)
        held.add_(1)
        with pytest.raises(ArgumentError, match=changed):
            compiled(x)
        held.sub_(1)
        torch.testing.assert_close(compiled(x), module(x))
        setattr(module, name, held + 1)
        with pytest.raises(ArgumentError, match=changed):
            compiled(x)


def test_torch_compile_does_not_change_a_compiled_module() -> None:
    module, x = nn.Linear(8, 8), torch.ones(2, 8)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {"weight": "tp, -"}, (x,))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(lambda x: compiled(x) + 1, backend="eager")(x), module(x) + 1)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"with fullgraph=True, register its program by hostweave.torch.as_torch"):
            torch.compile(compiled, fullgraph=True, backend="eager")(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        return self.head(self.embed(ids))


@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_tied_parameter_is_planned_by_each_of_its_names(name: str) -> None:
    module, ids = Tied(), torch.arange(4)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), {f"{name}.weight": "tp, -"}, (ids,))
    assert "[16@tp, 8]" in compiled.program.fusion_ir.partition("\n")[0]
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids), module(ids))
    with pytest.raises(ProgramError, match=r'plan: embed.weight = head.weight is sharded as "tp, -" by "head.weight" and as "-, tp" by'):
        hostweave.torch.compile(module, hw.Mesh(tp=2), {"head.weight": "tp, -", "embed.weight": "-, tp"}, (ids,))


class Named(nn.Module):
    def forward(self, x: Any) -> Any:
        angles = torch.arange(8.0) / 8
        new = angles.exp()
        größe = angles.sin()
        _ = angles.cos()
        wide = angles.tan()
        return (x + new) * größe - _ + wide.reshape(2, 4).T.reshape(1, 8)


@pytest.mark.parametrize("training", [False, True])
def test_constants_have_names_of_their_lines(training: bool) -> None:
    """A constant has the variable name of its line if that name is valid, and otherwise torch's name. A view has the name of its tensor."""
    module, x = Named().train(training), torch.randn(2, 8, requires_grad=training)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,), training=training)
    torch.testing.assert_close(compiled(x), module(x))
    assert re.findall(r"%(\w+): f32\[(?:1, )?8\]", compiled.program.fusion_ir.partition("\n")[0]) == ["new", "sin", "cos", "wide"]


def test_dynamic_sizes_are_symbols() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    compiled = hostweave.torch.compile(module, hw.Mesh(dp=2), {"input": "dp, -"}, (torch.randn(4, 8),), dynamic_shapes=shapes)
    with torch.no_grad():
        for rows in (2, 6, 32):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert "@dp" in compiled.program.fusion_ir


@pytest.mark.usefixtures("exported_once")
@pytest.mark.xdist_group("llama")
def test_ranks_of_a_group_call_it() -> None:
    module, inputs = model("llama")
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=2), PLANS["llama"], inputs)
    with torch.no_grad():
        want = module(**inputs).logits

    threads = hw.Threads(2)

    def rank_main(rank: int) -> Any:
        hw.init(threads)
        with torch.no_grad():
            return compiled(**inputs).logits

    for got in threads.run(rank_main):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", ["tp, -", "-, tp"], ids=["rows", "columns"])
def test_calls_are_captured(plan: str) -> None:
    """Graphs of `capture` can alternate with calls. Graphs use new values of parameters, also with `graph="auto"`."""
    module, arrays, weights = nn.Linear(8, 4).eval(), torch.randn(3, 6, 8), torch.randn(3, 4, 8)
    of = hw.Mesh(tp=2), {"weight": plan}, (arrays[0],)
    model, by_itself = (hostweave.torch.compile(module, *of, options=hw.Options(graph=graph)) for graph in (None, "auto"))
    threads, following = hw.Threads(2), iter(weights)
    written = threading.Barrier(2, lambda: module.weight.copy_(next(following)))

    def rank_main(rank: int) -> list[Any]:
        hw.init(threads)
        x, found = arrays[0].clone(), []
        with torch.no_grad():
            step = model.capture(x)
            for array in arrays:
                written.wait()
                x.copy_(array)
                assert step() is step.outputs
                for _ in range(8):
                    last = by_itself(x)
                found.append([step.outputs.clone(), model(x), last])
        return found

    want = [nn.functional.linear(x, weight, module.bias).detach() for x, weight in zip(arrays, weights, strict=True)]
    for found in threads.run(rank_main):
        for got, one in zip(found, want, strict=True):
            for result in got:
                torch.testing.assert_close(result, one)


@pytest.mark.gpu
def test_a_written_weight_is_copied_on_the_stream_of_the_launch() -> None:
    """A transposed weight is written and copied on a second stream while the first stream is still busy."""
    group = hw.init()
    module = nn.Linear(64, 64, bias=False, device="cuda").eval()
    module.weight = nn.Parameter(torch.randn(64, 64, device="cuda").t(), requires_grad=False)
    x, weight = torch.randn(2, 64, 64, device="cuda")
    want = nn.functional.linear(x, weight)
    step, beside = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,)).capture(x), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    with torch.cuda.stream(beside):
        module.weight.copy_(weight)
    y = step(stream=beside)
    beside.synchronize()
    assert not torch.cuda.current_stream().query()
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    group.close()


class Pooled(nn.Module):
    """A bag-of-words model with a mask of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(50, 16), nn.Linear(16, 6)

    def forward(self, ids: Any, mask: Any) -> Any:
        words, taken = self.embedding(ids), mask.unsqueeze(-1).to(torch.float32)
        return torch.log_softmax(self.linear((words * taken).sum(1) / taken.sum(1).clamp(min=1)), -1)


class Residuals(nn.Module):
    """A module with residual blocks whose layers have only numbers as names, results of several dtypes, and an empty slice."""

    def __init__(self) -> None:
        super().__init__()
        part = nn.Linear(16, 16)
        blocks = (nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.blocks, self.last = nn.ModuleList(blocks), part

    def forward(self, x: Any, y: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        norms = x.norm(), x.norm(1, dim=-1), x.norm(float("inf"))
        chosen = torch.where(x > y, x, y).std(-1), torch.topk(x, 2)[1], x.argmax(-1), (x / 2).int() % 3
        x = torch.cat((x, x[:, 16:]), -1)
        return norms, chosen, x[:, 1:3].flatten(), torch.einsum("ij,kj->ik", x, y), x.masked_fill(y > 0, -1.0).cumsum(0), self.last(x)


IDS, MASK, ROWS = torch.arange(28).reshape(4, 7), torch.ones(4, 7, dtype=torch.long), torch.randn(4, 16)
OTHERS = {
    "pooled": (Pooled, (IDS, MASK), {"ids": "dp, -", "mask": "dp, -", "linear.weight": "tp, -"}),
    "recurrent": (lambda: nn.GRU(16, 8), (ROWS,), {"weight_ih_l0": "tp, -"}),
    "residuals": (Residuals, (ROWS, -ROWS), {"*.1.weight": "tp, -", "*.1.bias": "tp", "*.3.weight": "-, tp"}),
}


@pytest.mark.parametrize(("make", "arguments", "plan"), OTHERS.values(), ids=OTHERS)
def test_other_modules(make: Callable[[], nn.Module], arguments: Any, plan: dict[str, str]) -> None:
    torch.manual_seed(1)
    module = make().eval()
    compiled = hostweave.torch.compile(module, hw.Mesh(dp=2, tp=2), plan, arguments)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*arguments), module(*arguments), rtol=1e-4, atol=1e-5)


def test_the_last_component_of_a_pattern_matches_that_of_a_name() -> None:
    mesh = hw.Mesh(dp=2, tp=2)
    found = layouts({"blocks.*": "dp, -", "blocks.*.[13].weight": "-, tp", "*ast.bias": "tp"}, Residuals(), {}, mesh)
    assert set(found.outputs) == {"blocks.0", "blocks.1", "blocks.2"}
    assert set(found.parameters) == {*(f"blocks.{i}.{part}.weight" for i in range(3) for part in (1, 3)), "last.bias"}
