"""Cases in which results could differ from torch without an error, such as gradients, written weights, and modules changed after
compilation."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from cProfile import Profile
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError, ProgramError  # noqa: E402
from hostweave.torch.state import State  # noqa: E402

X = torch.linspace(-2, 2, 32).reshape(4, 8)
EDGES = torch.tensor([sign * x for x in (0.0, 1e-8, 0.5, 1.0, 5.0, 20.0, 100.0, 1e30, math.inf) for sign in (1, -1)] + [math.nan])


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


class Checkpointed(nn.Module):
    """A module in which one checkpoint has two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = checkpoint(lambda y: (self.first(y).relu(), self.second(y).tanh()), self.third(x), use_reentrant=True)
        return a + b


def gradients(call: Any, module: nn.Module, *given: torch.Tensor) -> list[Any]:
    given = tuple(one.clone().requires_grad_(one.is_floating_point()) for one in given)
    call(*given).sum().backward()
    return [one.grad for one in (*module.parameters(), *given) if one.is_floating_point()]


def test_a_reentrant_checkpoint_has_gradients() -> None:
    module = Checkpointed()
    want = gradients(other := copy.deepcopy(module), other, X)
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X.clone().requires_grad_(),), training=True)
    for mine, theirs in zip(gradients(compiled, module, X), want, strict=True):
        torch.testing.assert_close(mine, theirs)


# --- weights ----------------------------------------------------------------------------------------------------------


def through_data(weight: torch.Tensor) -> None:
    weight.data.mul_(2)


def through_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[...] *= 2


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("write", [through_data, through_numpy])
@pytest.mark.parametrize("plan", ["tp, -", "-, tp"])
def test_writes_that_torch_does_not_count(plan: str, write: Callable[[Any], None], training: bool) -> None:
    module = nn.Linear(8, 8)
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"weight": plan}, (X,), training=training)

    def on_ranks() -> list[torch.Tensor]:
        threads = hw.Threads(2)

        def call(rank: int) -> torch.Tensor:
            hw.init(threads)
            with torch.set_grad_enabled(training):
                return model(X).detach()

        return threads.run(call)

    for _ in range(2):
        write(module.weight)
        want = module(X).detach()
        with torch.set_grad_enabled(training):
            torch.testing.assert_close(model(X).detach(), want)
        for made in on_ranks():
            torch.testing.assert_close(made, want)


# --- modules that change ----------------------------------------------------------------------------------------------


class Changing(nn.Module):
    flag = False

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.scale, self.linear, self.dropout = 2.0, nn.Linear(8, 8), nn.Dropout()
        self.config = config or SimpleNamespace(shift=1.0, parts={"bias": 1})
        self.rows, self.threshold = ([0.0],), math.nan

    def offset(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.linear(x)) * self.scale + self.config.shift * self.config.parts["bias"] + self.rows[0][0]
        return y + self.offset() if self.flag or self.threshold > 0 else y - self.offset()


def _forward(module: Any) -> None:
    module.linear.forward = lambda x: x


def _hook(module: Any) -> None:
    module.linear.register_forward_hook(lambda *_: None)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attribute": (lambda m: setattr(m, "scale", 3.0), "scale is 3.0, and was 2.0 at compile time"),
    "flag of the class": (lambda m: setattr(m, "flag", True), "flag is True, and was False at compile time"),
    "deleted": (lambda m: delattr(m, "scale"), "scale was changed after compilation"),
    "hook": (_hook, "linear has other hooks than at compile time"),
    "forward": (_forward, "linear.forward was changed after compilation"),
    "config": (lambda m: setattr(m.config, "shift", 2.0), "'shift' of SimpleNamespace that forward reads was changed after compilation"),
    "dict": (lambda m: m.config.parts.update(bias=2), "'bias' of a dict that forward reads was changed after compilation"),
    "list in a tuple": (lambda m: m.rows[0].append(1.0), "a list that forward reads was changed after compilation"),
    "number for NaN": (lambda m: setattr(m, "threshold", 2.0), "threshold is 2.0, and was nan at compile time"),
    "object": (lambda m: setattr(m, "config", SimpleNamespace(shift=2.0, parts={"bias": 1})), "config was changed after compilation"),
    "mode of a part": (lambda m: m.dropout.train(), "dropout.training is True, and was False at compile time"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_module_that_changes_is_refused(change: Callable[[Any], Any], message: str) -> None:
    module = Changing().eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
    with torch.no_grad():
        module.note = "which forward does not read"
        Changing().register_forward_hook(lambda *_: None)
        torch.testing.assert_close(model(X), module(X))
        change(module)
        with pytest.raises(ArgumentError, match=f"Changing: {message}.*; compile it again"):
            model(X)


class Stateful(nn.Module):
    """In each call, `forward` sets `part` to 0 first, and adds to `state`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.linear = state, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part = 0
        for _ in range(2):
            self.part += 1
        x = self.linear(x) * self.part + self.state
        if self.state is not None:
            self.state = self.state + x.shape[0]
        return x


@pytest.mark.parametrize("state", [1, 0.5, torch.ones(8)], ids=str)
def test_an_attribute_that_is_kept_for_the_next_call_is_refused(state: Any) -> None:
    """With `fullgraph=False`, the module is compiled in regions, and the attribute is kept."""
    module = Stateful(state).eval()
    with pytest.raises(ProgramError, match=r"test_nothing_silent.py:\d+: forward changes state for the next call, .*fullgraph=False"):
        hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
    model, want = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,), fullgraph=False), copy.deepcopy(module)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(X), want(X))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = SimpleNamespace(shift=1.0, parts={"bias": 1})
        self.layers = nn.ModuleList(Changing(config) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_gradient_of_an_argument_is_refused() -> None:
    """The module has no parameters, so only the argument requires grad."""
    model = hostweave.torch.compile(Of(torch.tanh), hw.Mesh(tp=1), {}, (X,))
    with pytest.raises(ArgumentError, match=r"Of: this is a forward program, without gradients; call it in torch\.no_grad"):
        model(X.clone().requires_grad_())


class Stored(nn.Module):
    """Stores a tensor of forward in the module."""

    def __init__(self, store: Callable[[Any, Any], None]):
        super().__init__()
        self.linear, self.store = nn.Linear(8, 8), store
        self.last: Any = None
        self.every: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.store(self, y)
        return y * 2


STORED: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "an attribute": (
        lambda module, y: setattr(module, "last", y),
        r"^test_nothing_silent.py:\d+: Stored: forward stores a tensor in self.last, ",
    ),
    "a new attribute": (lambda module, y: setattr(module, "new", y), r"^test_nothing_silent.py:\d+: Stored: forward stores .* self.new, "),
    "a list": (
        lambda module, y: module.every.append(y),
        r"Stored: forward stores a tensor in self.every\[0\], .*; return the tensor, .* fullgraph=False",
    ),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("store", "message"), STORED.values(), ids=STORED)
def test_a_tensor_that_is_stored_in_the_module_is_refused(store: Any, message: str, training: bool) -> None:
    module = Stored(store)
    before = dict(vars(module))
    with pytest.raises(ProgramError, match=message):
        hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,), training=training)
    assert module.last is None
    assert module.every == []
    assert vars(module).keys() == before.keys()


def test_a_class_that_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Changing().eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
    other: Any = lambda self: 2.0  # noqa: E731
    for name, value, message in (
        ("flag", True, "is True, and was False at"),
        ("offset", other, "was changed"),
        ("forward", other, "was changed"),
    ):
        with monkeypatch.context() as patched, torch.no_grad():
            model(X)
            patched.setattr(Changing, name, value)
            with pytest.raises(ArgumentError, match=f"Changing: {name} {message} .*; compile it again"):
                model(X)


OF_GLOBAL = torch.ones(8)


class OfTensors(nn.Module):
    """A module with tensors that are no buffers. The program holds values that are computed from these tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.listed, self.named = [torch.ones(8)], {"a": torch.ones(8)}
        self.config, self.own = SimpleNamespace(a=torch.ones(8)), torch.ones(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.listed[0] + self.named["a"] + self.config.a + self.own + OF_GLOBAL).exp()


def _data(module: Any) -> None:
    module.own.data = torch.zeros(8)


WRITES: dict[str, Callable[[Any], Any]] = {
    "list": lambda m: m.listed[0].fill_(2),
    "dict": lambda m: m.named["a"].fill_(2),
    "object": lambda m: m.config.a.fill_(2),
    "global": lambda m: OF_GLOBAL.fill_(2),
    "data": _data,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_to_a_tensor_that_is_no_buffer_is_refused(write: Callable[[Any], Any], interpreted: None) -> None:
    module = OfTensors()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
    torch.testing.assert_close(model(X), module(X))
    write(module)
    message = r"(own|a tensor of \[8\] that forward reads) has changed, but the program holds values .*; compile it again"
    with pytest.raises(ArgumentError, match=message):
        model(X)
    OF_GLOBAL.fill_(1)


def test_changes_of_layers_that_were_not_traced_are_detected() -> None:
    module = Layers().eval()
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
    assert model.traced["layers.2"] == "as layers.0"
    with torch.no_grad():
        model(X)
        module.layers[2].scale = 4.0
        with pytest.raises(ArgumentError, match=r"layers.2.scale is 4.0, and was 2.0 at compile time"):
            model(X)


def test_the_comparison_makes_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a compiled module compares the state of the module with the state at compile time."""
    model, states, changed = hostweave.torch.compile(Layers().eval(), hw.Mesh(tp=1), {}, (X,)), list[State](), State.changed
    monkeypatch.setattr(State, "changed", lambda state: states.append(state) or changed(state))
    with torch.no_grad():
        model(X)
    with Profile() as profile:
        changed(states[0])
    assert sum(entry.callcount for entry in profile.getstats()) < 16


# --- values and gradients ---------------------------------------------------------------------------------------------

ACTIVATIONS = """
softplus silu mish elu selu celu leaky_relu hardswish hardsigmoid hardtanh relu6 logsigmoid softsign tanhshrink sigmoid tanh hardshrink relu
"""
FUNCTIONS = """
sqrt rsqrt log log1p log2 log10 exp expm1 exp2 sin cos tan abs sign reciprocal square sinc erf erfc asin acos atan asinh acosh atanh sinh
cosh frac trunc round floor isnan isinf signbit
"""
AT_EDGES: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(F, name) for name in ACTIVATIONS.split()},
    **{name: getattr(torch, name) for name in FUNCTIONS.split()},
    **{f"to the {power}": lambda x, power=power: x**power for power in (-2, -1, -0.5, 0, 0.5, 1.5, 2, 3.0)},
    **{name: lambda x, name=name: getattr(torch, name)(x, x.flip(0)) for name in ("hypot", "atan2", "fmod", "fmax", "fmin", "logaddexp")},
    "a power of 2": lambda x: 2**x,
}
IN_ROWS: dict[str, tuple[Callable[[Any], Any], torch.Tensor]] = {
    "std of a constant row": (lambda x: x.std(-1), torch.ones(3, 4)),
    "std_mean": (lambda x: sum(torch.std_mean(x, -1)), torch.ones(3, 4)),
    "norm of zeros": (lambda x: x.norm(dim=-1), torch.zeros(3, 4)),
    "cross_entropy of bf16": (lambda x: F.cross_entropy(x, torch.tensor([1, 0, 2, 3])), X.bfloat16()),
    "logsumexp": (lambda x: x.logsumexp(-1), EDGES[:16].reshape(4, 4)),
    **{
        f"{name} of no dims": (lambda x, name=name: getattr(x.sum(), name)(-1), X)
        for name in ("sum", "mean", "prod", "amax", "cumsum", "softmax", "log_softmax", "logsumexp", "squeeze", "flip")
    },
    "sort of no dims": (lambda x: x.sum().sort(-1).values, X),
    "max of no dims": (lambda x: x.sum().max(0).values, X),
    "norm of no dims": (lambda x: x.sum().norm(dim=-1), X),
    "any of no dims": (lambda x: x * x.sum().any(0), X),
    "std of no dims": (lambda x: x.sum().std(0, correction=0), X),
}


class Several(nn.Module):
    """Several functions with separate arguments, in one program."""

    def __init__(self, functions: list[Callable[[Any], Any]]):
        super().__init__()
        self.functions = functions

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(one) for function, one in zip(self.functions, given, strict=True))


def expect_as_torch(cases: dict[str, tuple[Callable[[Any], Any], torch.Tensor]]) -> None:
    module = Several([function for function, _ in cases.values()])
    made, found = [], []
    for is_mine in (True, False):
        given = tuple(x.clone().requires_grad_() for _, x in cases.values())
        call = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, given, training=True) if is_mine else module
        made.append(call(*given))
        sum(one.float().sum() for one in made[-1]).backward()
        found.append([one.grad for one in given])
    for name, *values in zip(cases, *made, *found, strict=True):
        for mine, theirs in (values[:2], values[2:]):
            tolerance = {"rtol": 1e-5, "atol": 1e-7} if mine is not None and mine.dtype == torch.float32 else {}
            torch.testing.assert_close(mine, theirs, equal_nan=True, msg=lambda why, name=name: f"{name}: {why}", **tolerance)


def test_at_the_edges_of_floats() -> None:
    expect_as_torch({name: (function, EDGES) for name, function in AT_EDGES.items()})


def test_along_rows() -> None:
    expect_as_torch(IN_ROWS)


@pytest.mark.parametrize("training", [False, True])
def test_an_attribute_that_is_set_on_the_compiled_module(training: bool) -> None:
    """The original module also gets the attribute, because `forward` reads it there. A call then raises an error, because the program
    contains the old value."""

    class Scaled(nn.Linear):
        scale = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    module, x = Scaled(4, 4), torch.ones(2, 4)
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (x,), training=training)
    model.scale = 3.0
    assert module.scale == model.scale == 3.0
    with torch.set_grad_enabled(training), pytest.raises(ArgumentError, match=r"scale is 3\.0, and was 2\.0 at compile time; compile it"):
        model(x)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_compiled_module_cannot_be_copied(copied: Any, fullgraph: bool) -> None:
    """The original torch.fx.GraphModule has a `__deepcopy__`, which would copy only the original module."""
    x = torch.ones(2, 4)
    model = hostweave.torch.compile(torch.fx.symbolic_trace(nn.Linear(4, 4)), hw.Mesh(tp=1), {}, (x,), fullgraph=fullgraph)
    with pytest.raises(ArgumentError, match="cannot be copied or pickled; copy or save the original module, and compile it after loading"):
        copied(model)


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_tied_parameter_that_is_replaced_in_one_module(name: str) -> None:
    """The program reads the shared tensor once, for both modules."""
    module = nn.Sequential()
    module.first, module.second = nn.Linear(8, 8), nn.Linear(8, 8)
    module.second.weight = module.first.weight
    model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
    module.get_submodule(name).weight = nn.Parameter(torch.zeros(8, 8))
    with torch.no_grad(), pytest.raises(ArgumentError, match="weight was replaced after compilation; compile again"):
        model(X)


def test_a_first_call_in_inference_mode() -> None:
    """The first call copies the column blocks of the weight. The second call updates these copies outside of inference mode."""
    module = nn.Linear(8, 8)
    model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"weight": "-, tp"}, (X,))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(model(X).clone(), module(X))
