"""Error messages of `hostweave.torch.compile` and of compiled modules about training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, ProgramError  # noqa: E402

X = torch.ones(4, 8)
MESH = hw.Mesh(dp=2)
with torch.inference_mode():
    OF_INFERENCE = torch.ones(4, 8)


class Layer(nn.Module):
    def __init__(self, written: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.written = written
        if written is with_a_trained_buffer:
            self.register_buffer("scale", torch.ones(8, requires_grad=True))

    def forward(self, x: Any, scale: Any = None) -> Any:
        if self.written:
            return self.written(self, x)
        return self.down(torch.relu(self.up(x))) * (1.0 if scale is None else scale), x.detach() * 2


def compiled(written: Any = None, plan: Any = None, inputs: Any = (X,), **options: Any) -> Any:
    return hostweave.torch.compile(Layer(written), MESH, plan, inputs, training=True, **options)


def in_place_on_a_parameter(self: Any, x: Any) -> Any:
    self.up.weight.mul_(2)
    return self.up(x)


def in_place_on_a_view_of_a_parameter(self: Any, x: Any) -> Any:
    self.up.weight[0].add_(1)
    return self.up(x)


def random_numbers(self: Any, x: Any) -> Any:
    return torch.poisson(self.up(x).abs())


def unsupported_op(self: Any, x: Any) -> Any:
    return torch.linalg.svdvals(self.up(x))


def without_parameters(self: Any, x: Any) -> Any:
    return x * 2


def branch_on_data(self: Any, x: Any) -> Any:
    return self.up(x) if self.up.weight.sum() > 0 else self.up(x) * 2


def custom_function(self: Any, x: Any) -> Any:
    return nn.functional.embedding(torch.arange(4), self.up.weight, scale_grad_by_freq=True)


UNREGISTERED, OF_FUNCTION = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)


def in_inference_mode(self: Any, x: Any) -> Any:
    with torch.inference_mode():
        y = x * 2
    return self.up(x).sum() + y.sum()


def with_a_trained_buffer(self: Any, x: Any) -> Any:
    return self.up(x * self.scale)


LOST = "requires grad, but is not a parameter; register it as an nn.Parameter of the module, or call requires_grad_"
MODULES: dict[str, tuple[Callable[..., Any], str]] = {
    "in-place on a parameter": (in_place_on_a_parameter, "(?s)Layer: torch.export: .*a leaf Variable that requires grad"),
    "in-place on a view": (in_place_on_a_view_of_a_parameter, "(?s)Layer: torch.export: .*a view of a leaf Variable that requires grad"),
    "random": (random_numbers, r"ops that are not supported: aten.poisson.default, 1 times, first at test_training_mistakes.py:\d+"),
    "op": (
        unsupported_op,
        r"ops that are not supported: aten._linalg_svd.default, 1 times, first at test_training_mistakes.py:\d+",
    ),
    "closure": (lambda self, x: self.up(x * UNREGISTERED.exp()), rf"training: a tensor of \[8\] that forward reads {LOST}"),
    "other module": (lambda self, x: self.up(OF_FUNCTION(x)), rf"training: a tensor of \[8, 8\] that forward reads {LOST}"),
    "buffer": (with_a_trained_buffer, f"training: the buffer scale {LOST}"),
    "inference mode": (in_inference_mode, r"forward uses torch.inference_mode\(\), .*; use torch.no_grad\(\)"),
    "no parameters": (without_parameters, "no result depends on a tensor that requires grad; .* or compile without training=True"),
    "branch": (
        branch_on_data,
        r"^test_training_mistakes.py:\d+: Layer: a branch depends on the values of a tensor, .*, such as torch.where$",
    ),
    "by frequency": (custom_function, r"test_training_mistakes.py:\d+: an embedding with scale_grad_by_freq=True is not supported"),
}


@pytest.mark.parametrize(("written", "message"), MODULES.values(), ids=MODULES)
def test_module(written: Callable[..., Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        compiled(written)


def of_inference_mode() -> Any:
    with torch.inference_mode():
        return Layer()


def in_inference_mode() -> None:
    with torch.inference_mode():
        hostweave.torch.compile(Layer(), MESH, {}, (X,), training=True)


MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "parameter": (
        lambda: hostweave.torch.compile(of_inference_mode(), MESH, {}, (X,)),
        r"Layer: up.weight was created in torch.inference_mode\(\), so autograd cannot use it; create it outside, or pass its clone",
    ),
    "argument": (
        lambda: compiled(inputs=(OF_INFERENCE,)),
        r"Layer: example_inputs\[0\] was created in torch.inference_mode\(\), .*; create it outside",
    ),
    "mode": (in_inference_mode, r"Layer: torch.inference_mode\(\) is on, .*; compile with training=True outside of it"),
}


@pytest.mark.parametrize(("make", "message"), MADE.values(), ids=MADE)
def test_inference_mode(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        make()


PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "fight": ({"up.weight": "dp, -", "*.weight": "-, dp"}, 'plan: up.weight is sharded as "dp, -" by "up.weight" and as "-, dp" by '),
    "nothing": ({"upp.weight": "dp, -"}, 'plan: "upp.weight" matches none of the parameters, inputs or modules; did you mean up.weight'),
    "result": ({"up": "dp, -, -"}, "plan: up returns 2 dims, but 3 dims are stated; write an axis or - for each dim"),
}


@pytest.mark.parametrize(("plan", "message"), PLANS.values(), ids=PLANS)
def test_plan(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        compiled(plan=plan)


def test_dynamic_sizes() -> None:
    with pytest.raises(ProgramError, match="dynamic_shapes is for inference; with training=True compile once for each size"):
        compiled(dynamic_shapes=({0: torch.export.Dim("batch")}, None))


def optimized(make: Callable[[list[nn.Parameter]], Any], x: Any = X) -> Any:
    module = Layer(lambda self, x: self.down(self.up(x)).sum())
    return hostweave.torch.compile(module, MESH, {}, (x,), optimizer=make(list(module.parameters())))


OPTIMIZERS: dict[str, tuple[Callable[[list[nn.Parameter]], Any], str]] = {
    "too few": (
        lambda of: torch.optim.AdamW(of[:1]),
        "optimizer: up.bias requires grad, but is not in the optimizer; add it, or freeze",
    ),
}


@pytest.mark.parametrize(("make", "message"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer(make: Callable[[list[nn.Parameter]], Any], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        optimized(make)


def test_an_argument_that_requires_grad_with_an_optimizer() -> None:
    with pytest.raises(ProgramError, match="the argument x requires grad; detach\\(\\) it in example_inputs, or omit optimizer="):
        optimized(torch.optim.AdamW, X.clone().requires_grad_())


def test_a_step_needs_one_loss() -> None:
    module = Layer()
    with pytest.raises(
        ProgramError, match="optimizer: a step needs one scalar result, the loss, but the module returns 0 scalars; return only the loss"
    ):
        hostweave.torch.compile(module, MESH, {}, (X,), optimizer=torch.optim.AdamW(module.parameters()))


@pytest.fixture(scope="module")
def layer() -> Any:
    return compiled(plan={"x": "dp, -"})


def second_backward(call: Any) -> None:
    loss = call(X)[0].sum()
    loss.backward()
    loss.backward()


def derivative_of_a_gradient(call: Any) -> None:
    torch.autograd.grad(call(X)[0].sum(), [call.up.weight], create_graph=True)


def written_before_backward(call: Any) -> None:
    loss = call(X)[0].sum()
    with torch.no_grad():
        call.down.weight.add_(0)
    loss.backward()


def gradient_of_an_argument(call: Any) -> None:
    call(X.clone().requires_grad_())


def frozen(call: Any) -> None:
    call.down.weight.requires_grad_(False)
    try:
        call(X)
    finally:
        call.down.weight.requires_grad_(True)


def replaced(call: Any) -> None:
    was = call.down.weight
    call.down.weight = nn.Parameter(torch.zeros(8, 16))
    try:
        call(X)
    finally:
        call.down.weight = was


def evaluated(call: Any) -> None:
    call.eval()
    try:
        call(X)
    finally:
        call.train()


def with_a_tangent(call: Any) -> None:
    with forward_ad.dual_level():
        call(forward_ad.make_dual(X, X))


def batched_gradients(call: Any) -> None:
    torch.autograd.grad(call(X)[0], call.down.weight, torch.ones(3, 4, 8), is_grads_batched=True)


BY_TRANSFORM = r"Layer: torch.vmap, .* do not see the ops of a compiled module; apply the transform to the original .* backward\(\)"
BY_TRACER = "Layer: torch.export, make_fx and torch.jit.trace do not see the ops .*; trace the original module, or register its program by"
CALLS: dict[str, tuple[Callable[[Any], None], str]] = {
    "inference": (
        lambda call: call(OF_INFERENCE),
        r"Layer: x was created in torch.inference_mode\(\), so autograd cannot use it; create it outside, or pass its clone\(\)",
    ),
    "vmap": (lambda call: torch.vmap(call)(torch.ones(3, 4, 8)), BY_TRANSFORM),
    "jvp": (lambda call: torch.func.jvp(call, (X,), (X,)), BY_TRANSFORM),
    "grad": (lambda call: torch.func.grad(lambda x: call(x)[0].sum())(X), BY_TRANSFORM),
    "batched": (batched_gradients, BY_TRANSFORM),
    "tangent": (with_a_tangent, "Layer: a tensor has a tangent, but forward-mode derivatives are not compiled; apply the transform to"),
    "make_fx": (lambda call: make_fx(call)(X), BY_TRACER),
    "export": (lambda call: torch.export.export(call, (X,)), BY_TRACER),
    "jit.trace": (lambda call: torch.jit.trace(call, X), BY_TRACER),
    "twice": (
        second_backward,
        "Layer: backward is called a second time, and its saved tensors are freed; call the module again, or .*retain_graph",
    ),
    "twice derived": (
        derivative_of_a_gradient,
        "Layer: second derivatives are not compiled; .* without create_graph=True",
    ),
    "written": (
        written_before_backward,
        "Layer: a parameter, an argument or a result was written to after the call, and .*; call backward before the write",
    ),
    "argument": (
        gradient_of_an_argument,
        r"Layer: x requires grad, but did not at compile time; compile with example_inputs that .*, or detach",
    ),
    "frozen": (frozen, "Layer: down.weight has requires_grad=False, but had True at compile time; compile again"),
    "replaced": (
        replaced,
        "Layer: (up|down).weight was replaced after compilation; compile again, or use copy_ on the original tensor",
    ),
    "evaluated": (evaluated, r"Layer: the mode has changed from train\(\); compile it again"),
    "dtype": (lambda call: call(X.double()), r"x: expected f32\[4@dp, 8\], got f64\[4, 8\]; cast it"),
    "shape": (lambda call: call(X[:3]), "x: dim 0 is 3; it must be 4.*; or compile once for each size$"),
    "captured": (lambda call: call.capture(X), r"Layer: capture: a module compiled for training .*; pass options=hw.Options\(graph="),
    "structure": (lambda call: call(X, 2.0), "Layer: the arguments differ in structure from example_inputs; pass the same number"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch itself uses torch.jit for jvp.
@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_call(layer: Any, call: Callable[[Any], None], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call(layer)


class Activated(nn.Module):
    """A module whose backward pass reads the first result."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.up(x)
        return y.sigmoid(), y * 2


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_results_that_are_written_to_before_backward(ranks: int, which: int) -> None:
    """A write to a result is an error if the backward pass needs the old values, as in torch."""
    torch.manual_seed(0)
    module, found = Activated(), []
    model = hostweave.torch.compile(module, hw.Mesh(dp=ranks), {"x": "dp, -"}, (X,), training=True)
    for call in (model, module):
        results = [one if call is model else one.clone() for one in call(X)]
        results[which].select(0, 1).mul_(3.0)
        loss = sum(one.sin().sum() for one in results)
        if call is model and which == 0:
            with pytest.raises(ArgumentError, match="a result was written to after the call"):
                loss.backward()
            return
        found.append(torch.autograd.grad(loss, list(module.parameters())))
    torch.testing.assert_close(*found)


def test_a_gradient_of_another_dtype_or_shape(layer: Any) -> None:
    """The compiled module casts a gradient to the dtype of the result, and refuses a gradient of another shape. torch does the same."""
    want = torch.autograd.grad(layer(X)[0], layer.down.weight, torch.ones(4, 8))
    torch.testing.assert_close(torch.autograd.grad(layer(X)[0], layer.down.weight, torch.ones(4, 8, dtype=torch.float64)), want)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        torch.autograd.grad(layer(X)[0], layer.down.weight, torch.ones(4, 1))
    assert not layer(X)[1].requires_grad


def test_a_step_in_inference_mode() -> None:
    """In inference mode, the optimizer would create state that no step outside of this mode could update."""
    module = Layer(lambda self, x: self.down(self.up(x)).square().mean())
    step = hostweave.torch.compile(module, MESH, {}, (X,), optimizer=torch.optim.AdamW(module.parameters()))
    with (
        torch.inference_mode(),
        pytest.raises(ArgumentError, match=r"Layer: torch.inference_mode\(\) is on, .*; call the step outside of it"),
    ):
        step(X)


@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_asks_for_the_grad_mode(training: bool, interpreted: None) -> None:
    module = Layer(lambda self, x: self.up(x) * 2 if torch.is_grad_enabled() else self.up(x))
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,), training=training)
    module.requires_grad_(training)
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(model(X), module(X))
    remedy = r"call it in torch.enable_grad\(\)" if training else r"call it in torch.no_grad\(\)"
    message = rf"Layer: forward calls torch.is_grad_enabled\(\), which returned {training} at compile time; {remedy}"
    with torch.set_grad_enabled(not training), pytest.raises(ArgumentError, match=message):
        model(X)


HOOKS = ["register_hook", "register_post_accumulate_grad_hook"]


def squares(module: Any, optimizer: Any = None) -> Any:
    options: Any = {"training": True} if optimizer is None else {"optimizer": optimizer}
    return hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,), **options)


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_on_parameters_of_a_step(register: str, interpreted: None) -> None:
    module = Layer(lambda self, x: self.down(self.up(x)).square().mean())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    step, found = squares(module, optimizer), []
    hook = getattr(module.up.weight, register)(lambda _: found.append(1))
    with pytest.raises(ArgumentError, match=r"Layer: up.weight has hooks on its gradient, which the program would not call; remove them"):
        step(X)
    with pytest.raises(ProgramError, match=r"optimizer: up.weight has hooks on its gradient, which the program would not call; remove"):
        squares(module, optimizer)
    squares(module)(X).backward()
    assert found == [1]
    hook.remove()
    step(X)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match="Layer: hooks on the step of the optimizer are not supported; remove them, or omit optimizer="):
        step(X)


def test_hooks_on_parameters_of_a_pipeline(interpreted: None) -> None:
    stages: list[Any] = [nn.Linear(8, 8), nn.Linear(8, 8)]
    hook = stages[0].weight.register_hook(lambda _: None)
    options: Any = {"microbatches": 2, "loss": nn.functional.mse_loss}
    with pytest.raises(ProgramError, match="stage 0: weight has hooks on its gradient, which the program would not call; remove them"):
        hostweave.torch.compile(stages, hw.Mesh(pp=2), {}, (X, X), **options)
    hook.remove()
    step = hostweave.torch.compile(stages, hw.Mesh(pp=2), {}, (X, X), **options)
    stages[1].weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ArgumentError, match=r"pipeline: stage 1: stage.weight has hooks on its gradient, which the program would not call"):
        step(X, X)
