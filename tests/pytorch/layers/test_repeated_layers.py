"""Equal layers are traced once, and different layers separately. The graph gives the results of the module."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from torch import nn  # noqa: E402
from torch.export.graph_signature import InputKind  # noqa: E402
from torch.fx import Interpreter  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.torch.exported import exported  # noqa: E402

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Layer(nn.Module):
    def __init__(self, number: int, scale: float = 2.0, hidden: int = 5, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.number, self.scale = number, scale
        self.up, self.down, self.dropout = nn.Linear(4, hidden), nn.Linear(hidden, 4, bias=False), nn.Dropout(0.25)
        self.register_buffer("shift", torch.full((4,), number + 1.0).to(dtype))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        y = self.down(torch.relu(self.up(x))) * self.scale + self.shift
        return x + self.dropout(y if mask is None else y * mask)


class Stack(nn.Module):
    def __init__(
        self, layers: list[nn.Module], call: Callable[[nn.Module, int, torch.Tensor], torch.Tensor] = lambda layer, n, x: layer(x)
    ):
        super().__init__()
        self.layers, self.call = nn.ModuleList(layers), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            x = self.call(layer, n, x)
        return x


def of(*scales: float, kind: type[nn.Module] = Layer) -> Stack:
    torch.manual_seed(0)
    return Stack([kind(number, scale) for number, scale in enumerate(scales)]).eval()


def computed(module: nn.Module) -> tuple[torch.Tensor, dict[str, str]]:
    """Result of the exported graph, and, for each layer, how it was traced."""
    with torch.no_grad():
        program, how, *_ = exported(module, (X,), {})
        program.graph_module.recompile()
        held = {InputKind.USER_INPUT: lambda _: X, InputKind.CONSTANT_TENSOR: program.constants.get}
        given = [held.get(one.kind, program.state_dict.get)(one.target) for one in program.graph_signature.input_specs]
        return Interpreter(program.graph_module).run(*given)[-1], {path: how[path] for path in sorted(how)}


def expect(module: nn.Module, *how: str) -> None:
    """Compares the result with the module's. `how` has one entry per layer: the index of the equal layer whose trace is used, or a part of
    the reason for a separate trace."""
    y, found = computed(module)
    with torch.no_grad():
        torch.testing.assert_close(y, module(X), rtol=0, atol=0)
    for path, wanted, one in zip(found, how, found.values(), strict=True):
        assert one == f"as layers.{wanted}" if wanted.isdigit() else one.startswith("traced") and wanted in one, (path, one)


def test_layers_that_compute_the_same_are_traced_once() -> None:
    """Equal layers may differ in the values of parameters and buffers. Equal layers may also have different indices if `forward` does not
    read the index."""
    expect(of(2.0, 2.0, 2.0), "", "0", "0")


def test_attributes_that_a_layer_reads_are_compared() -> None:
    expect(of(2.0, 3.0, 2.0, 3.0), "", "its scale differs from layers.0", "0", "1")


class Named(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x)) * vars(self)["number"]


class Counting(Layer):
    calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls = 3
        return self.up(x)[:, :4] * self.calls


class Shared(Layer):
    config = types.SimpleNamespace(gain=1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.up(x)[:, :4] * self.config.gain


class Passing(Layer):
    """A layer that returns a dict. The dict also contains the argument."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.down(self.up(x)), "x": [x, None, 3]}


class InPlace(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(self.up(x))
        y *= self.scale
        return self.down(y)


class Writing(Layer):
    def forward(self, x: torch.Tensor) -> Any:
        self.up(x.add_(1.0))
        return None


class Told(Layer):
    told: ClassVar[dict[str, torch.Tensor]] = {}

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.told.get("y", 1.0)
        self.told["y"] = self.up(x)[:, :4]
        return self.down(self.up(y))


class Nested(nn.Module):
    def __init__(self, number: int, scale: float):
        super().__init__()
        self.parts = nn.ModuleList(Layer(n, scale) for n in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[1](self.parts[0](x))


def test_layers_that_could_read_anything_or_keep_a_state_are_traced() -> None:
    expect(of(2.0, 2.0, kind=Named), "", "number differs")
    expect(of(2.0, 2.0, kind=Counting), "traced separately: it writes its attribute calls", "traced separately")
    shared = of(2.0, 2.0, 2.0, kind=Shared)
    shared.call = lambda layer, n, x: (setattr(Shared.config, "gain", n // 2), layer(x))[1]
    expect(shared, "", "0", "config differs")
    Told.told.clear()
    _, how = computed(of(2.0, 2.0, kind=Told))
    assert "it writes its attribute told" in how["layers.0"]


def test_results_of_several_kinds_and_writes_within_a_layer() -> None:
    module = of(2.0, 2.0, 2.0, kind=Passing)
    module.call = lambda layer, n, x: (made := layer(x))["y"] * made["x"][2] + made["x"][0]
    expect(module, "", "0", "0")
    expect(of(2.0, 2.0, kind=InPlace), "", "0")
    expect(of(2.0, 2.0, kind=Nested), "", "0")


def test_writes_outside_of_a_layer_make_all_layers_traced() -> None:
    def kept(layer: nn.Module, n: int, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        layer(x)
        return x

    writing = of(2.0, 2.0, kind=Writing)
    writing.call = kept
    expect(writing, "in place", "in place")
    outside = of(2.0, 2.0)
    outside.call = lambda layer, n, x: layer(x).add_(1.0)
    expect(outside, "in place", "in place")


def test_structure_hooks_modes_and_calls_are_compared() -> None:
    larger, typed = of(2.0, 2.0), of(2.0, 2.0)
    larger.layers[1], typed.layers[1] = Layer(1, hidden=6), Layer(1, dtype=torch.float64)
    expect(larger.eval(), "", "structure")
    typed.call = lambda layer, n, x: layer(x).float()
    expect(typed.eval(), "", "structure")
    tied = of(2.0, 2.0, kind=Nested)
    tied.layers[1].parts[1].up.weight = tied.layers[1].parts[0].up.weight  # type: ignore[union-attr, index]
    expect(tied, "", "structure")
    hooked = of(2.0, 2.0, 2.0)
    hooked.layers[1].up.register_forward_hook(lambda module, args, y: y * 2)  # type: ignore[union-attr, operator]
    expect(hooked, "", "up._forward_hooks differs", "0")
    outer = of(2.0, 2.0)
    outer.layers[1].register_forward_hook(lambda module, args, y: y * 2)
    expect(outer, "", "0")  # Hooks of a layer run outside of its `forward`, so they are traced at each call.
    replaced = of(2.0, 2.0)
    replaced.layers[1].up.forward = types.MethodType(lambda self, x: x.new_ones(3, 5), replaced.layers[1].up)  # type: ignore[union-attr]
    expect(replaced, "", "up.forward differs")
    masked = of(2.0, 2.0, 2.0)
    masked.call = lambda layer, n, x: layer(x, mask=x > 0) if n else layer(x)
    expect(masked, "", "its arguments differ", "1")
    random = of(2.0, 2.0)
    random.layers[1].train()
    _, how = computed(random)
    assert "training differs" in how["layers.1"]


class State:
    def __init__(self, rows: int = 3):
        self.rows: Any = torch.zeros(rows, 4)
        self.calls = 0


class Cache:
    def __init__(self, states: list[State]):
        self.layers, self.total = states, 0

    def update(self, x: torch.Tensor, index: int) -> torch.Tensor:
        state = self.layers[index]
        state.calls += 1
        state.rows = state.rows + x
        return state.rows


class Caching(Layer):
    def __init__(self, number: int, scale: float):
        super().__init__(number, scale)
        self.layer_idx = number

    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        return x + self.down(self.up(cache.update(x, self.layer_idx)))


class CacheInPlace(Caching):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        rows = cache.layers[self.layer_idx].rows
        rows[1:].copy_(x[1:])
        return x + self.down(self.up(rows))


class PartOfCache(Caching):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        return cache.layers[self.layer_idx].rows.copy_(x)


class CacheBefore(Caching):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        return self.down(self.up(cache.update(x, self.layer_idx))) + cache.layers[self.layer_idx - 1].rows


class EveryCache(Caching):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        return x * self.scale + sum(state.rows for state in cache.layers)


class CountingInCache(Caching):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        cache.total += 1
        return self.down(self.up(x)) * cache.total


class ByIndex(Caching):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        return cache.update(x, self.layer_idx) * (1.0 + self.layer_idx)


class InTable(Caching):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        return cache.update(x, self.layer_idx) * [1.0, 2.0, 3.0][self.layer_idx]


class InTensor(Caching):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        return cache.update(x, self.layer_idx) * torch.full((), self.layer_idx)


class FirstTwo(Caching):
    def forward(self, x: torch.Tensor, cache: Any = None) -> Any:
        x = cache.update(x, self.layer_idx)
        return self.down(self.up(x)) if self.layer_idx < 2 else x * 2


class WithCache(nn.Module):
    """A model whose layers write to a cache. The tensors and numbers of the cache are a part of the result."""

    def __init__(self, layers: list[nn.Module], rows: tuple[int, ...] = ()):
        super().__init__()
        self.layers, self.rows = nn.ModuleList(layers), rows or (3,) * len(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache([State(rows) for rows in self.rows])
        for layer in self.layers:
            x = layer(x, cache=cache)
        return x + sum((n + 1) * state.rows.sum() + n * state.calls for n, state in enumerate(cache.layers)) + cache.total


def caching(kind: type[Caching], count: int = 3) -> WithCache:
    torch.manual_seed(0)
    return WithCache([kind(number, 2.0) for number in range(count)]).eval()


def test_layers_with_separate_state_in_a_cache_are_traced_once() -> None:
    """The index of a layer chooses the state, and has no other effect."""
    expect(caching(Caching), "", "0", "0")
    expect(caching(CacheInPlace), "", "0", "0")
    sharing = caching(Caching)
    sharing.layers[2].layer_idx = 0
    expect(sharing, "", "0", "its arguments differ")  # Layer 0 has used this state, and the state counts uses.
    writing = caching(CacheInPlace)
    writing.layers[2].layer_idx = 0
    expect(writing, "", "0", "0")
    tied = caching(Caching)
    tied.layers[1].up, tied.layers[2].down = tied.layers[0].up, tied.layers[1].down
    expect(tied, "", "0", "0")


def test_layers_whose_index_has_an_effect_are_traced() -> None:
    expect(caching(ByIndex), "", "layer_idx differs", "layer_idx differs")
    expect(caching(InTable), "", "layer_idx differs", "layer_idx differs")
    expect(caching(FirstTwo, 4), "", "0", "layer_idx differs", "2")
    expect(caching(InTensor), "an int is accepted", "an int is accepted", "an int is accepted")
    named = caching(Caching)
    named.layers[1].scale = 3.0
    expect(named, "", "0", "0")  # Nothing reads `scale`.
    without = caching(Caching)
    without.layers[1].layer_idx = True
    expect(without, "", "the cache of other layers", "0")


def test_layers_that_use_more_of_a_cache_are_traced() -> None:
    expect(caching(CacheBefore), "the cache of other layers", "the cache of other layers", "the cache of other layers")
    expect(caching(EveryCache), "the cache of other layers", "the cache of other layers", "the cache of other layers")
    expect(caching(CountingInCache), "objects to a cache", "objects to a cache", "objects to a cache")
    expect(caching(PartOfCache), "memory of a cache tensor", "memory of a cache tensor", "memory of a cache tensor")
    longer = caching(CacheInPlace)
    longer.rows = (3, 3, 1)
    longer.layers[2] = Caching(2, 2.0).eval()
    expect(longer, "", "0", "structure differs")
    broadcast = caching(Caching)
    broadcast.rows = (3, 1, 1)
    expect(broadcast, "", "its arguments differ", "1")


def test_untraced_layers_call_the_function_with_their_parameters() -> None:
    """A layer that was not traced passes its parameters to the function of an equal layer. `traced` names the equal layer, also with
    dynamic sizes."""
    module = of(2.0, 2.0, 2.0, 0.5)
    with torch.no_grad():
        model = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,))
        torch.testing.assert_close(model(X), module(X))
        assert dict(model.traced)["layers.2"] == "as layers.0"
        varied = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, (X,), dynamic_shapes=({0: torch.export.Dim("rows")},))
        assert dict(varied.traced) == dict(model.traced)
        for x in (X, X.repeat(3, 1)):
            torch.testing.assert_close(varied(x), module(x))


@pytest.mark.parametrize("training", [False, True])
def test_the_module_is_unchanged_after_compile(training: bool) -> None:
    module = of(2.0, 2.0).train(training)
    classes, held = [type(part) for part in module.modules()], [dict(vars(part)) for part in module.modules()]
    exported(module, (X,), {}, training=training)
    assert [type(part) for part in module.modules()] == classes
    assert [list(vars(part)) for part in module.modules()] == [list(one) for one in held]


def test_each_layer_gathers_the_weights_of_the_next_layer() -> None:
    """The gathers of sharded weights overlap with the layer before."""
    module = Stack([nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(6)])
    plan = {"x": "dp, -", **{f"layers.{i}.{k}.weight": "dp, -" for i in range(6) for k in (0, 2)}}
    given = (torch.zeros(8, 1024),)
    program = hostweave.torch.compile(module, hw.Mesh(dp=2), plan, given).program
    assert program.explain().count("each call gathers the tensor of the next call") == 2
    assert len([i for i in program.host_ir.split("\n") if "record gathered_ready" in i]) == 2  # before the loop, and in the loop
