"""Traces repeated layers once: torch.export traces the first of several equal layers. Each other layer is recorded as one op.

Two modules of a list are equal under three conditions. They have the same structure. All attributes that the first one reads while it is
traced are equal in the second. Both are called with equal arguments, except for the values of tensors. Attributes that are never read may
differ. After ops were decomposed, the nodes of the first layer are copied for the others.
"""

from __future__ import annotations

import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from hostweave.torch.graph import OF_TORCH
from hostweave.torch.layer_caches import INDEX, Index, Part, State, Tensor, described, flat, is_cache, tensors_in
from hostweave.torch.ops import LIBRARY, ops
from hostweave.torch.plan import tensors_of
from hostweave.torch.state import is_same

_STRUCTURE = ("_parameters", "_buffers", "_modules")  # attributes that `_structure` compares
_ABSENT = object()
results_of: dict[int, list[Any]] = {}  # number of a traced layer -> (shape, strides, dtype) of each result
numbers = count()


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def laid_out(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _made(number: int) -> list[torch.Tensor]:
    return [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in results_of[number]]


LIBRARY.define("layer_begins(Tensor[] taken, Tensor[] own, int number) -> Tensor[]")
LIBRARY.define("layer_ends(Tensor[] made, int number) -> Tensor[]")
LIBRARY.define("layer(Tensor[] taken, Tensor[] own, int number, str path) -> Tensor[]")
LIBRARY.impl("layer_begins", lambda taken, own, number: [_alike(one) for one in taken], "Meta")
LIBRARY.impl("layer_ends", lambda made, number: [_alike(one) for one in made], "Meta")
LIBRARY.impl("layer", lambda taken, own, number, path: _made(number), "Meta")


@dataclass
class _First:
    """A traced layer, and the data with which other layers are compared."""

    path: str
    number: int
    structure: object
    call: object
    reads: dict[str, dict[str, _Read]]  # path of a submodule -> attributes that it read
    returned: list[Any]  # results of the layer, with indices in place of tensors
    spec: Any
    indices: dict[str, Index]  # submodule -> its index in a cache
    state: State | None  # state of the cache after the layer


class Repeats:
    """Makes equal layers of a module be traced only once, inside `standing_in`. `how` says for the path of each layer how it was traced."""

    def __init__(self, module: nn.Module):
        self.how: dict[str, str] = {}
        self._layers = [
            (f"{path}.{name}".lstrip("."), layer)
            for path, part in module.named_modules()
            for name, layer in part.named_children()
            if name.isdigit() and len(part._modules) > 1 and not any(word.isdigit() for word in path.split("."))
        ]
        self._firsts: dict[str, list[_First]] = {}  # path of a list of modules -> its traced layers
        self._writable: dict[int, int] = {}  # number of a traced layer -> its first tensor that is the state of a cache
        self._is_inside = self.has_indices = False

    @property
    def paths(self) -> list[str]:
        """The paths of all layers."""
        return [path for path, _ in self._layers]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path, layer in self._layers:
                if "forward" not in vars(layer):
                    stack.callback(vars(layer).pop, "forward")
                    vars(layer)["forward"] = self._forward(path, layer, layer.forward, _structure(layer))
            yield

    def _forward(self, path: str, layer: nn.Module, own: Callable[..., Any], structure: object) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = flat((args, kwargs))
            (*given,) = {id(leaf): leaf for leaf in leaves if is_cache(leaf)}.values()
            part = Part(given[0], layer) if len(given) == 1 else None
            call = _call_of(leaves, spec, part)
            if self._is_inside or call is None:
                self.how.setdefault(path, "traced: it takes objects that are neither tensors nor numbers nor a cache")
                return own(*args, **kwargs)
            firsts, why = self._firsts.setdefault(path.rpartition(".")[0], []), ""
            for first in firsts:
                if not (differs := _difference(first, layer, structure, call)):
                    self.how[path] = f"as {first.path}"
                    made = ops.layer(_taken(leaves, part), _own(layer), first.number, path)
                    if part is not None and first.state is not None:
                        part.put(first.state, made)
                    return _rebuilt(made, first.returned, first.spec)
                why = why or f": {differs} from {first.path}"
            self.how[path] = f"traced{why}"
            return self._traced(path, layer, own, structure, call, leaves, spec, part)

        return forward

    def _traced(
        self,
        path: str,
        layer: nn.Module,
        own: Callable[..., Any],
        structure: object,
        call: object,
        leaves: list[Any],
        spec: Any,
        part: Part | None,
    ) -> Any:
        number, arguments = next(numbers), tensors_in(leaves)
        begun = list(ops.layer_begins(_taken(leaves, part), _own(layer), number))
        self._writable[number] = len(arguments)
        given, indices = iter(begun), None if part is None else dict[str, Index]()
        self.has_indices |= part is not None
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)
        self._is_inside = True
        try:
            with watched(layer, indices) as (reads, written), nullcontext() if part is None else part.lent(list(given)):
                made = own(*args, **kwargs)
        finally:
            self._is_inside = False
        results, made_spec = flat(made)
        tensors = tensors_in(results)
        state, why = (None, "") if part is None else part.after(tensors)
        if described(results) is None:
            why = "it returns an object that is neither a tensor nor a number"
        why = f"it writes its attribute {written[0]}" if written else why
        if why:
            self.how[path] = f"traced separately: {why}"
        else:
            results_of[number] = [laid_out(one) for one in tensors]
            places = count()
            returned = [Tensor(next(places)) if isinstance(leaf, torch.Tensor) else leaf for leaf in results]
            firsts = self._firsts[path.rpartition(".")[0]]
            firsts.append(_First(path, number, structure, call, reads, returned, made_spec, indices or {}, state))
            tensors = ops.layer_ends(tensors, number)
        if part is not None and state is not None:
            part.put(state, tensors)
        return made if why else _rebuilt(tensors, returned, made_spec)

    def why_apart(self, graph: Graph) -> str:
        """Reason why the first layer of an exported graph cannot represent the others: code outside depends on its inner values or on its
        writes."""
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
            for written in _written_by(node):
                root = _root(written)
                if _is_begun(root) and root.args[1] >= self._writable[root.args[0].args[2]]:
                    continue
                if _is_begun(root) or str(root.target).startswith("hostweave.layer") or (own is not None and region.get(root) != own):
                    return f"{node.name} writes to {written.name} in place"
        return ""

    def write_out(self, graph: Graph) -> None:
        """Replaces each op for an equal layer by a copy of the traced layer's nodes."""
        write_out(graph, {first.number: first.path for firsts in self._firsts.values() for first in firsts})

    def names_read(self, reads: Mapping[str, Mapping[str, _Read]]) -> dict[str, set[str]]:
        """Attributes that each module read, by path. An equal layer reads the same attributes as the traced one."""
        found = {path: set(of_module) for path, of_module in reads.items()}
        for path, how in self.how.items():
            first = how.removeprefix("as ")
            for other in [other for other in found if how != first and (other == first or other.startswith(f"{first}."))]:
                found.setdefault(path + other.removeprefix(first), set()).update(found[other])
        return found

    def close(self) -> None:
        for firsts in self._firsts.values():
            for first in firsts:
                results_of.pop(first.number, None)


def _taken(leaves: list[Any], part: Part | None) -> list[torch.Tensor]:
    """The tensors that a layer takes: its arguments, and those of its state in a cache."""
    return [*tensors_in(leaves), *(part.tensors if part is not None else ())]


def _own(layer: nn.Module) -> list[torch.Tensor]:
    return [tensor for _, tensor in tensors_of(layer)]


def _rebuilt(made: list[torch.Tensor], returned: list[Any], spec: Any) -> Any:
    return pytree.tree_unflatten([made[leaf.number] if isinstance(leaf, Tensor) else leaf for leaf in returned], spec)


def _call_of(leaves: list[Any], spec: Any, part: Part | None) -> object | None:
    """Key that is equal for calls of equal layers; None if objects cannot be compared."""
    state = part.key() if part is not None else []
    arguments = described([None if part is not None and is_cache(leaf) else leaf for leaf in leaves])
    if state is None or arguments is None:
        return None
    return [spec, torch.is_grad_enabled(), torch.is_autocast_enabled(), arguments, state]


def _structure(layer: nn.Module) -> object:
    """Classes and tensors of a layer, and which of its tensors are identical."""
    modules = [(path, type(part)) for path, part in layer.named_modules(remove_duplicate=False)]
    places: dict[int, int] = {}
    tensors = [
        (name, described([one]), one.requires_grad, places.setdefault(id(one), n)) for n, (name, one) in enumerate(tensors_of(layer))
    ]
    return modules, tensors


def _difference(first: _First, layer: nn.Module, structure: object, call: object) -> str:
    """Describes how a layer differs from a traced one. "" if they compute the same."""
    if structure != first.structure:
        return "its structure differs"
    if call != first.call:
        return "its arguments differ"
    for path, reads in first.reads.items():
        held = vars(layer.get_submodule(path))
        for name, read in reads.items():
            now = held.get(name, _ABSENT)
            if name == INDEX and path in first.indices and type(now) is int and first.indices[path].equals(now):
                continue
            contents = _contents(read.found if now is _ABSENT else now)
            if not is_same(read.value, now) or not is_same(read.contents, contents):
                return f"its {f'{path}.{name}'.lstrip('.')} differs"
    return ""


class _Read(NamedTuple):
    """An attribute at its first read: the object, and a copy of its contents."""

    value: Any
    contents: Any
    found: Any  # the value that was found, possibly in the class

    @classmethod
    def of(cls, value: Any, found: Any) -> _Read:
        return cls(value, _contents(found), found)


def _contents(value: Any) -> Any:
    """Copies the contents of an object that other code may change."""
    if isinstance(value, dict | list | set):
        return value.copy()
    is_code = isinstance(value, type | nn.Module | torch.Tensor | types.ModuleType | types.FunctionType | types.MethodType)
    return None if is_code else dict(getattr(value, "__dict__", ()))


@contextmanager
def watched(layer: nn.Module, indices: dict[str, Index] | None = None) -> Iterator[tuple[dict[str, dict[str, _Read]], list[str]]]:
    """Records, inside the `with` block, the attributes that submodules of a layer read, by path, and the names of attributes that are
    written. With `indices` a submodule reads an `Index` as its index in a cache, which is added to `indices`.
    """
    reads: dict[str, dict[str, _Read]] = {}
    written: list[str] = []
    with ExitStack() as stack:
        for path, part in layer.named_modules():
            own = type(part)
            stack.callback(setattr, part, "__class__", own)
            index = None
            if indices is not None and type(vars(part).get(INDEX)) is int:
                index = indices[path] = Index(vars(part)[INDEX])
            part.__class__ = _watching(own, vars(part), reads.setdefault(path, {}), written, index)
        yield reads, written
        of_all = ((name, read) for of_part in reads.values() for name, read in of_part.items())
        written += [name for name, read in of_all if not is_same(read.contents, _contents(read.found))]


def _watching(own: Any, held: Mapping[str, Any], reads: dict[str, _Read], written: list[str], index: Index | None) -> Any:
    def get(self: Any, name: str) -> Any:
        found = own.__getattribute__(self, name)
        if name == "__dict__":
            if not sys._getframe(1).f_code.co_filename.startswith(OF_TORCH):
                reads.update({name: _Read.of(value, value) for name, value in held.items() if name not in _STRUCTURE})
                if index is not None:
                    index.read()
        elif name not in _STRUCTURE and name not in reads:
            reads[name] = _Read.of(held.get(name, _ABSENT), found)
        return index if name == INDEX and index is not None else found

    def put(self: Any, name: str, value: Any) -> None:
        if name not in ("__dict__", "__class__"):  # torch also ignores these when it traces modules
            written.append(name)
        own.__setattr__(self, name, value)

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    return type(own.__name__, (own,), {"__getattribute__": get, "__setattr__": put, **names})


# --- graphs -----------------------------------------------------------------------------------------------------------


def write_out(graph: Graph, path_of: Mapping[int, str], derived: Mapping[int, int] = MappingProxyType({})) -> None:
    """Replaces each op that stands for a layer by a copy of the traced layer's nodes. `path_of` maps the number of a traced layer to its
    path. `derived` maps the number of a derivative to the number of its layer.
    """
    of_target: dict[Any, list[Any]] = {}
    for node in graph.nodes:
        of_target.setdefault(node.target, []).append(node)
    begins = {node.args[2]: node for node in of_target.get(ops.layer_begins.default, ())}
    ends = {node.args[1]: node for node in of_target.get(ops.layer_ends.default, ())}
    copies: dict[tuple[int | None, str], dict[Node, Node]] = {}
    for stand_in in of_target.get(ops.layer.default, ()):
        *_, number, path = stand_in.args
        of = copies[number, path] = dict(copies.get((derived.get(number), path), {}))
        results = _copied(graph, begins[number], ends[number], stand_in, path_of[number], path, of)
        _replace(graph, stand_in, results)
    for node in (*begins.values(), *ends.values()):
        _replace(graph, node, node.args[0])
    graph.lint()


def _between(begin: Node, end: Node) -> Iterator[Node]:
    node = begin.next
    while node is not end:
        yield node
        node = node.next


def _regions(graph: Graph) -> dict[Node, int]:
    """Maps each node to the number of the traced layer that it belongs to."""
    found: dict[Node, int] = {}
    begins = {node.args[2]: node for node in graph.nodes if node.target is ops.layer_begins.default}
    for end in graph.nodes:
        if end.target is ops.layer_ends.default:
            found.update(dict.fromkeys(_between(begins[end.args[1]], end), end.args[1]))
    return found


def _written_by(node: Any) -> list[Node]:
    """Arguments that an op writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    return [value for value, one in zip(node.args, written, strict=False) if one and isinstance(value, Node)]


def _is_begun(node: Any) -> bool:
    """True for a tensor that a traced layer takes."""
    return node.target is operator.getitem and node.args[0].target is ops.layer_begins.default


def _root(node: Any) -> Any:
    """Node that owns the memory of a node, which may be a view."""
    while node.args and isinstance(node.args[0], Node) and not _is_begun(node):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not any(one.alias_info for one in schema.returns):
            break
        node = node.args[0]
    return node


def _copied(graph: Graph, begin: Any, end: Any, before: Any, path: str, own: str, of: dict[Node, Node]) -> list[Node]:
    """Copies the nodes between `begin` and `end`. In the copies, operands of the node `before` replace the arguments. Returns the results,
    and adds each copy to `of`."""
    of.update(zip(begin.args[1], before.args[1], strict=True))
    of.update({user: before.args[0][user.args[1]] for user in begin.users})
    with graph.inserting_before(before):
        for node in _between(begin, end):
            if node not in of:
                of[node] = graph.node_copy(node, lambda argument: of.get(argument, argument))
                of[node].meta = {**node.meta, **_moved(node.meta, path, own)}
    return [of.get(result, result) for result in end.args[0]]


def _moved(meta: Mapping[str, Any], path: str, own: str) -> dict[str, Any]:
    """Metadata of a copied node, with the modules of the layer that the copy belongs to."""

    def moved(at: str) -> str:
        return f"{own}{at[len(path) :]}" if at == path or at.startswith(f"{path}.") else at

    stacks = {name: meta[name] for name in ("nn_module_stack", "fwd_nn_module_stack") if meta.get(name)}
    return {name: {f"{own}/{key}": (moved(at), kind) for key, (at, kind) in stack.items()} for name, stack in stacks.items()}


def _replace(graph: Graph, node: Any, results: list[Node]) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)
