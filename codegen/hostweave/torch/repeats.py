"""Traces equal layers once. torch.export traces the first layer, and records each later layer as one op. After decomposition, a copy of the
first layer's nodes replaces each recorded op.

Two modules of a list are equal if they have the same structure, and equal values of all attributes that the first module reads. The indices
of the modules in a cache may differ. Both modules must be called with equal arguments, in the same grad and autocast modes. The values of
parameters, buffers and tensor arguments may differ.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.fx import Graph, Node

from hostweave.base.errors import ProgramError
from hostweave.torch.layer_caches import INDEX, LayerCache, LayerIndex, LayerState, described, flat, is_cache, tensors_in, with_tensors
from hostweave.torch.nodes import OF_TORCH, written_by
from hostweave.torch.ops import define, ops
from hostweave.torch.plan import tensors_of
from hostweave.torch.replaced import replaced
from hostweave.torch.state import CODE, autocast_dtypes, is_same

_STRUCTURE = ("_parameters", "_buffers", "_modules")  # attributes that `_structure` describes
_ABSENT = object()


@dataclass(eq=False)
class Traced:
    """A traced layer, or the derivative of a traced layer. A copy of the traced nodes replaces each op `layer` with this `number`."""

    path: str
    arguments: int = 0  # number of operands that are arguments; tensors of a cache follow the arguments
    layer: Traced | None = None  # for a derivative: the layer
    results: list[tuple[Any, ...]] = field(default_factory=list)  # (shape, strides, dtype) of each result
    number: int = field(default_factory=count().__next__)

    def __post_init__(self) -> None:
        _traced[self.number] = self

    def returns(self, tensors: list[torch.Tensor]) -> None:
        self.results = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in tensors]


_traced: WeakValueDictionary[int, Traced] = WeakValueDictionary()


def _alike(tensors: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    return [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device) for one in tensors]


def _made(taken: Any, own: Any, number: int, path: str) -> list[torch.Tensor]:
    return [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in _traced[number].results]


define("layer_begins(Tensor[] taken, Tensor[] own, int number) -> Tensor[]", _alike)
define("layer_ends(Tensor[] made, int number) -> Tensor[]", _alike)
define("layer(Tensor[] taken, Tensor[] own, int number, str path) -> Tensor[]", _made)


class _LayerCall:
    """A call of a layer. `key` is equal for calls with equal arguments, modes and caches, and None if these cannot be compared."""

    def __init__(self, layer: nn.Module, args: Any, kwargs: Any):
        self.leaves, self.spec = flat((args, kwargs))
        caches = {id(leaf): leaf for leaf in self.leaves if is_cache(leaf)}
        self.has_cache = len(caches) == 1
        (cache,) = caches.values() if self.has_cache else (SimpleNamespace(layers=[]),)
        self.cache = LayerCache(cache, layer)
        self.arguments = tensors_in(self.leaves)
        self.operands = [*self.arguments, *self.cache.tensors], [tensor for _, tensor in tensors_of(layer)]
        state, others = self.cache.key(), [None if self.has_cache and is_cache(leaf) else leaf for leaf in self.leaves]
        modes, arguments = [torch.is_grad_enabled(), autocast_dtypes()], described(others)
        self.key = None if state is None or arguments is None else [self.spec, modes, arguments, state]


@dataclass
class _First:
    """A traced layer, and data for comparisons with other layers."""

    traced: Traced
    structure: object
    call: _LayerCall
    reads: dict[str, dict[str, _Read]]  # by path of the submodule
    returned: list[Any]
    spec: Any  # structure of `returned`
    state: LayerState  # cache after the layer


class Repeats:
    """Traces equal layers once in the context `standing_in`. For `how`, see `CompiledModule.traced`."""

    def __init__(self, module: nn.Module):
        self.how: dict[str, str] = {}
        self.layers = {
            f"{path}.{name}".lstrip("."): layer
            for path, submodule in module.named_modules()
            for name, layer in submodule.named_children()
            if name.isdigit() and len(submodule._modules) > 1 and not any(word.isdigit() for word in path.split("."))
        }
        self._firsts: dict[str, list[_First]] = {}  # by path of the list of modules
        self._traced: list[Traced] = []  # strong references; those of the global `_traced` are weak
        self._is_inside = self.has_indices = False

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        layers = ((path, layer) for path, layer in self.layers.items() if "forward" not in vars(layer))
        with replaced(*((layer, "forward", self._forward(path, layer, layer.forward, _structure(layer))) for path, layer in layers)):
            yield

    def _forward(self, path: str, layer: nn.Module, own: Callable[..., Any], structure: object) -> Callable[..., Any]:
        firsts = self._firsts.setdefault(path.rpartition(".")[0], [])

        def forward(*args: Any, **kwargs: Any) -> Any:
            call, why = _LayerCall(layer, args, kwargs), ""
            if self._is_inside or call.key is None:
                why = "another traced layer calls it" if self._is_inside else "its arguments or its cache cannot be compared"
                self.how.setdefault(path, f"traced: {why}")
                return own(*args, **kwargs)
            for first in firsts:
                if not (differs := _difference(first, layer, structure, call)):
                    self.how[path] = f"as {first.traced.path}"
                    made = ops.layer(*call.operands, first.traced.number, path)
                    break
                why = why or f": {differs} from {first.traced.path}"
            else:
                self.how[path] = f"traced{why}"
                first, made, why = self._first(path, layer, own, structure, call)
                if why:
                    self.how[path] = f"traced separately: {why}"
                else:
                    firsts.append(first)
                    made = ops.layer_ends(made, first.traced.number)
            call.cache.put(first.state, made)
            return with_tensors(first.returned, first.spec, made)

        return forward

    def _first(self, path: str, layer: nn.Module, own: Any, structure: object, call: _LayerCall) -> tuple[_First, list[torch.Tensor], str]:
        """Traces a layer. Returns the layer, its results and cache tensors, and "" or the reason why it cannot represent other layers."""
        traced = Traced(path, len(call.arguments))
        self._traced.append(traced)
        begun = list(ops.layer_begins(*call.operands, traced.number))
        args, kwargs = with_tensors(call.leaves, call.spec, begun)
        self.has_indices |= call.has_cache
        self._is_inside = True
        try:
            with watched(layer, call.has_cache) as (reads, written), call.cache.lent(begun[traced.arguments :]):
                returned, spec = flat(own(*args, **kwargs))
        finally:
            self._is_inside = False
        made = tensors_in(returned)
        state, why = call.cache.after(made)
        traced.returns(made)
        if described(returned) is None:
            why = "it returns an object that is neither a tensor nor a number"
        why = f"it writes its attribute {written[0]}" if written else why
        return _First(traced, structure, call, reads, returned, spec, state), made, why

    def why_apart(self, graph: Graph) -> str:
        """Reason why a traced layer cannot represent equal layers, or ""."""
        region = _regions(graph)
        for node in graph.nodes:
            own = region.get(node)
            for argument in node.all_input_nodes:
                if isinstance(argument.meta.get("val"), torch.SymInt):  # equal layers compute with equal sizes
                    continue
                of = region.get(argument)
                if own is not None and of != own and argument.op == "call_function" and argument.target is not ops.layer_begins.default:
                    return f"{node.name} reads {argument.name}, which is not an argument of its layer"
                if of is not None and of != own and node.target is not ops.layer_ends.default:
                    return f"{node.name} reads {argument.name}, which its layer does not return"
            for written in written_by(node):
                root = _root(written)
                if _is_begun(root) and root.args[1] >= _traced[root.args[0].args[2]].arguments:
                    continue
                if _is_begun(root) or str(root.target).startswith("hostweave.layer") or (own is not None and region.get(root) != own):
                    return f"{node.name} writes to {written.name} in place"
        return ""

    def names_read(self, reads: Mapping[str, Mapping[str, _Read]]) -> dict[str, set[str]]:
        """Names of the attributes that were read, by path of the module. Includes layers that were not traced."""
        found = {path: set(of_module) for path, of_module in reads.items()}
        for path, how in self.how.items():
            first = how.removeprefix("as ")
            for other in [other for other in found if how != first and (other == first or other.startswith(f"{first}."))]:
                found.setdefault(path + other.removeprefix(first), set()).update(found[other])
        return found


def _structure(layer: nn.Module) -> object:
    """Classes, parameters and buffers of a layer, including which tensors are identical."""
    modules = [(path, type(submodule)) for path, submodule in layer.named_modules(remove_duplicate=False)]
    positions: dict[int, int] = {}
    tensors = [
        (name, described([one]), one.requires_grad, positions.setdefault(id(one), n)) for n, (name, one) in enumerate(tensors_of(layer))
    ]
    return modules, tensors


def _difference(first: _First, layer: nn.Module, structure: object, call: _LayerCall) -> str:
    """Description of how a layer differs from a traced layer, or ""."""
    if structure != first.structure:
        return "its structure differs"
    if call.key != first.call.key:
        return "its arguments differ"
    for path, reads in first.reads.items():
        held = vars(layer.get_submodule(path))
        for name, read in reads.items():
            now = held.get(name, _ABSENT)
            contents = _contents(read.found if now is _ABSENT else now)
            equals = read.value.equals if type(read.value) is LayerIndex else lambda value, read=read: is_same(read.value, value)
            if not equals(now) or not is_same(read.contents, contents):
                return f"its {f'{path}.{name}'.lstrip('.')} differs"
    return ""


class _Read(NamedTuple):
    """An attribute, as it was at the first read."""

    value: Any
    contents: Any
    found: Any  # result of the lookup, possibly an attribute of the class

    @classmethod
    def of(cls, value: Any, found: Any) -> _Read:
        return cls(value, _contents(found), found)


def _contents(value: Any) -> Any:
    """Copy of an object's mutable contents."""
    if isinstance(value, dict | list | set):
        return value.copy()
    return None if isinstance(value, CODE) else dict(getattr(value, "__dict__", ()))


@contextmanager
def watched(layer: nn.Module, has_cache: bool = False) -> Iterator[tuple[dict[str, dict[str, _Read]], list[str]]]:
    """Records which attributes of submodules are read, by path, and the names of attributes that are assigned or whose contents change.
    With `has_cache`, a read of a submodule's index in a cache returns a `LayerIndex`."""
    reads: dict[str, dict[str, _Read]] = {}
    written: list[str] = []
    with ExitStack() as stack:
        for path, submodule in layer.named_modules():
            stack.callback(setattr, submodule, "__class__", type(submodule))
            index = vars(submodule).get(INDEX) if has_cache else None
            instead = {INDEX: LayerIndex(index)} if type(index) is int else {}
            submodule.__class__ = _watching(type(submodule), vars(submodule), reads.setdefault(path, {}), written, instead)
        yield reads, written
        of_all = ((name, read) for of_submodule in reads.values() for name, read in of_submodule.items())
        written += [name for name, read in of_all if not is_same(read.contents, _contents(read.found))]


def _watching(own: Any, held: Mapping[str, Any], reads: dict[str, _Read], written: list[str], instead: Mapping[str, Any]) -> Any:
    def get(self: Any, name: str) -> Any:
        found = own.__getattribute__(self, name)
        if name == "__dict__":
            if not sys._getframe(1).f_code.co_filename.startswith(OF_TORCH):
                reads.update({name: _Read.of(value, value) for name, value in held.items() if name not in _STRUCTURE})
        elif name not in _STRUCTURE and name not in reads:
            reads[name] = _Read.of(instead.get(name, held.get(name, _ABSENT)), found)
        return instead.get(name, found)

    def put(self: Any, name: str, value: Any) -> None:
        if name not in ("__dict__", "__class__"):
            if name not in written and name in reads:
                _expect_same(name, held.get(name), value)
            written.append(name)
        own.__setattr__(self, name, value)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (own,), {"__getattribute__": get, "__setattr__": put, **names})


def _expect_same(name: str, before: Any, value: Any) -> None:
    """Refuses a new value of a number or tensor that forward has read, because the next call would read the new value."""
    if isinstance(before, bool | int | float | torch.Tensor) and not is_same(before, value):
        why = f"forward changes {name} for the next call, but a program would not"
        raise ProgramError.here(f"{why}; make it a buffer that forward writes to in place, or pass fullgraph=False")


def write_out(graph: Graph) -> None:
    """Replaces each op `layer` by a copy of the nodes of the traced layer with the same number."""
    begins, ends = _ends(graph)
    copies: dict[tuple[Traced, str], dict[Node, Node]] = {}
    for stand_in in graph.find_nodes(op="call_function", target=ops.layer.default):
        *_, number, path = stand_in.args
        traced = _traced[number]
        of = copies[traced, path] = dict(copies.get((traced.layer, path), {}) if traced.layer else {})
        _replace(graph, stand_in, _copied(graph, begins[number], ends[number], stand_in, traced.path, path, of))
    for node in (*begins.values(), *ends.values()):
        _replace(graph, node, node.args[0])
    graph.lint()


def _ends(graph: Graph) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """First and last op of each traced layer, by the number of the layer."""
    begins, ends = (graph.find_nodes(op="call_function", target=op.default) for op in (ops.layer_begins, ops.layer_ends))
    return {node.args[2]: node for node in begins}, {node.args[1]: node for node in ends}


def _between(begin: Node, end: Node) -> Iterator[Node]:
    node = begin.next
    while node is not end:
        yield node
        node = node.next


def _regions(graph: Graph) -> dict[Node, int]:
    """Maps the nodes of traced layers to the number of the layer."""
    begins, ends = _ends(graph)
    return {node: number for number, end in ends.items() for node in _between(begins[number], end)}


def _is_begun(node: Any) -> bool:
    """True if a node is an input tensor of a traced layer."""
    return node.target is operator.getitem and node.args[0].target is ops.layer_begins.default


def _root(node: Any) -> Any:
    """Node that owns the memory of a view."""
    while node.args and isinstance(node.args[0], Node) and not _is_begun(node):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not any(one.alias_info for one in schema.returns):
            break
        node = node.args[0]
    return node


def _copied(graph: Graph, begin: Any, end: Any, before: Any, path: str, own: str, of: dict[Node, Node]) -> list[Node]:
    """Copies the nodes between `begin` and `end` that `of` lacks. The copies precede the op `before`, whose operands replace the layer's
    inputs. Adds the copies to `of`, by node, and returns the results."""
    of.update(zip(begin.args[1], before.args[1], strict=True))
    of.update({user: before.args[0][user.args[1]] for user in begin.users})
    with graph.inserting_before(before):
        for node in _between(begin, end):
            if node not in of:
                of[node] = graph.node_copy(node, lambda argument: of.get(argument, argument))
                of[node].meta = {**node.meta, **_moved(node.meta, path, own)}
    return [of.get(result, result) for result in end.args[0]]


def _moved(meta: Mapping[str, Any], path: str, own: str) -> dict[str, Any]:
    """Module stacks of a copied node: those of the original, with `own` in place of the path `path`."""

    def moved(at: str) -> str:
        return f"{own}{at[len(path) :]}" if at == path or at.startswith(f"{path}.") else at

    stacks = {name: meta[name] for name in ("nn_module_stack", "fwd_nn_module_stack") if meta.get(name)}
    return {name: {f"{own}/{key}": (moved(at), kind) for key, (at, kind) in stack.items()} for name, stack in stacks.items()}


def _replace(graph: Graph, node: Any, results: list[Node]) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
