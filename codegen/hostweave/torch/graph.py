"""An exported graph, prepared for translation to a fusion: its inputs, constants, shardings and names."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.base.names import claim_unique, unique_name
from hostweave.torch.aten import TABLE, dtype_of
from hostweave.torch.nodes import ATTENTION, RESHARD, is_complex, is_size, location, modules_of, name_of, name_of_constant, op_of, shape_of
from hostweave.torch.numbers import as_tensors
from hostweave.torch.patterns import word_of_mask
from hostweave.torch.plan import AxesOfDims, Layouts
from hostweave.torch.randomness import OTHER_GENERATOR, SEEDS, with_seeds
from hostweave.torch.views import shared_results
from hostweave.types.tensor import Dim, TensorType


@dataclass(frozen=True)
class Origin:
    """Meaning of a placeholder: an "argument" of the call, or a "parameter", "buffer" or "constant" of the module.

    `name` and `value` are those of the module's tensor. The kind "written" is a buffer that the forward pass of a training program writes
    to. The kind "seeds" is a tensor of new random seeds for each call.
    """

    kind: str
    name: str = ""
    value: Any = None


@dataclass
class GradientUpdate:
    """Computation at the end of a program, such as an optimizer step. The computation reads the gradients, which are the last values of the
    graph, and writes to the memory of inputs."""

    types: dict[str, TensorType]  # inputs of the graph, then additional inputs
    donated: dict[str, int]  # written input -> index of the result that reuses the input's memory
    gradients: int  # number of gradients
    compute: Callable[[Mapping[str, hw.Tensor], Sequence[hw.Tensor]], Sequence[hw.Tensor]]  # (all inputs, gradients) -> results


@dataclass
class Graph:
    fx: torch.fx.Graph
    origins: dict[Node, Origin]  # placeholder -> meaning
    layouts: Layouts
    mesh: hw.Mesh
    placed: dict[Node, AxesOfDims] = field(default_factory=dict)  # node -> sharding that is stated for the node's result
    gathered: dict[Node, AxesOfDims] = field(default_factory=dict)  # input -> sharding in which ops read the input
    results: list[AxesOfDims | None] | None = None  # shardings of outputs, None if inferred; without a list, the `default_axes`
    labels: list[str] = field(default_factory=list)  # names of outputs, or paths such as `gradient.head.weight`; or empty
    spec: Any = None  # pytree structure of the module's results
    update: GradientUpdate | None = None
    names: dict[Node, str] = field(default_factory=dict)  # placeholder or constant -> name of the fusion's input
    constants: dict[Node, Any] = field(default_factory=dict)  # values that are known at compile time, except buffers
    parameters: dict[str, str] = field(default_factory=dict)  # input of the fusion -> name of the module's tensor
    arguments: list[Node] = field(default_factory=list)  # placeholders of the module's arguments, including numbers
    bound: dict[str, torch.Tensor] = field(default_factory=dict)  # input of the fusion -> constant
    uniform: dict[Node, Any] = field(default_factory=dict)  # constant whose elements are all equal -> the number
    written: dict[Node, Node] = field(default_factory=dict)  # written argument or buffer -> new value
    seeds: Node | None = None  # input with one seed for each op that draws random numbers
    checks: list[Node] = field(default_factory=list)  # checks of values, which run after a call
    tokens: int = 0  # number of leading outputs that are effect tokens of torch, which only order the checks
    of_calls: bool = False  # True if the results go to the caller of a module; results may then share memory
    is_derived_from: bool = False  # True if the graph will be differentiated, and then decomposed

    def __post_init__(self) -> None:
        as_tensors(self.fx)
        taken = set[str]()
        for node, origin in self.origins.items():
            if origin.kind == "argument":
                self.arguments.append(node)
                if not isinstance(node.meta["val"], torch.Tensor):
                    self.constants[node] = node.meta["val"]
                    continue
                self.names[node] = claim_unique(origin.name or node.name, taken)
                if node.meta["val"].is_complex():
                    why = f"{self.names[node]} is an argument of complex numbers, which is not supported"
                    raise ProgramError(f"{why}; pass its torch.view_as_real(z), and write torch.view_as_complex(z) in forward")
            elif origin.kind == "constant":
                self.constants[node] = origin.value
            elif origin.kind == "seeds":
                self.names[node], self.seeds = claim_unique(origin.name, taken), node
            else:
                self.names[node] = claim_unique(name_of(origin.name), taken)
                self.parameters[self.names[node]] = origin.name
        self._fold(taken)
        for node, name in self.names.items():
            axes = self.layouts.parameters.get(self.parameters.get(name, ""), ())
            used = tuple(tuple(axis for axis in of if axis not in self.layouts.data) for of in axes)
            if used != axes:
                self.gathered[node] = used

    @cached_property
    def nodes(self) -> list[Node]:
        """Ops that the program computes, in order: those that an output needs, without constants and sizes."""
        calls = [node for node in self.fx.nodes if node.op == "call_function" and node not in self.constants and not is_size(node)]
        needed = set(self.outputs)
        for node in reversed(calls):
            if node in needed:
                needed.update(node.all_input_nodes)
        return [node for node in calls if node in needed]

    @cached_property
    def returned(self) -> list[Any]:
        """Values that the graph returns: new values of written tensors, other results of the module (which may be None), and checked
        values. A result in `shared` is replaced by the tensor that shares memory with the result."""
        written: list[Any] = list(self.written.values())
        checked = [node.args[2] for node in self.checks]
        of_module = [node for one in self.of_module for node in (one.args if is_complex(one) else (self.shared.get(one, one),))]
        if self.of_calls:
            of_module = [one for one in dict.fromkeys(of_module) if one not in self.shared.values() or one.op != "placeholder"]
        return [*written, *(one for one in (*of_module, *checked) if one not in written)]

    @cached_property
    def shared(self) -> dict[Any, Node]:
        """Maps results to the tensors with which they share memory. Empty unless `of_calls`."""
        return shared_results(self) if self.of_calls else {}

    @cached_property
    def of_module(self) -> list[Any]:
        """Values that the module returns."""
        returned: Any = self.fx.output_node().args[0]
        return list(returned)[self.tokens + len(self.written) :]

    @cached_property
    def keys(self) -> dict[Node, str]:
        """Maps returned values to their keys, such as `loss`, or `new_x` for the new value of a written input x."""
        named = list(zip(self.of_module, _keys_in(self.spec) if self.spec else (), strict=False))
        made = {node: name_of(key) for node, key in reversed(named) if isinstance(node, Node) and key and not key[0].isdigit()}
        return made | {value: f"new_{self.names[node]}" for node, value in self.written.items() if value in made}

    @property
    def donated(self) -> dict[str, int]:
        """Maps each written input to the index of the result that reuses the input's memory."""
        if self.update:
            return self.update.donated
        made = [node for node in self.outputs if node not in self.constants]
        return {self.names[node]: made.index(value) for node, value in self.written.items() if value not in self.constants}

    @property
    def outputs(self) -> list[Node]:
        """Returned values that are nodes of the graph."""
        return [node for node in self.returned if isinstance(node, Node)]

    @cached_property
    def fixed(self) -> dict[Node, Any]:
        """Values without a gradient: constants, and buffers that are not written to."""
        return {**self.constants, **self._buffers}

    @property
    def _buffers(self) -> dict[Node, Any]:
        return {node: origin.value for node, origin in self.origins.items() if origin.kind == "buffer" and node not in self.written}

    @cached_property
    def folded(self) -> set[str]:
        """Names of buffers and constants from which values in the program were computed at compile time."""
        read = {*self.outputs, *(argument for node in self.nodes for argument in node.all_input_nodes)}
        known, following = set[Node](), [node for node in read if node in self.constants]
        while following:
            node = following.pop()
            if node not in known:
                known.add(node)
                following += node.all_input_nodes
        return {self.origins[node].name for node in known if node in self.origins and self.origins[node].kind != "argument"}

    @cached_property
    def last_of(self) -> dict[str, Node]:
        """Last node of each module, by the path of the module."""
        return {path: node for node in self.nodes for path in modules_of(node)}

    def is_held(self, node: Node) -> bool:
        """True if the module owns this input: a parameter, a buffer or a constant."""
        name = self.names.get(node, "")
        return name in self.parameters or name in self.bound

    def is_stated(self, node: Node) -> bool:
        """True if the plan or the module states the sharding of a result."""
        return op_of(node) == RESHARD or any(path in self.layouts.outputs for path in modules_of(node))

    def default_axes(self, node: Node) -> AxesOfDims | None:
        """Sharding of an output: by rows, or replicated. None if the sharding is stated."""
        return None if self.is_stated(node) else self.layouts.of_rows(node.meta["val"])

    def stated(self, node: Node, made: Any) -> Iterator[AxesOfDims]:
        """Yields the shardings that the plan states for modules whose result is `node`, with value `made`."""
        for path in modules_of(node) if self.layouts.outputs else ():
            if (axes := self.layouts.outputs.get(path)) is not None and self.last_of[path] is node:
                if (dims := getattr(made, "ndim", None)) != len(axes):
                    found = "several results" if dims is None else f"{dims} dims"
                    raise ProgramError(f"plan: {path} returns {found}, but {len(axes)} dims are stated; write an axis or - for each dim")
                yield axes

    def _fold(self, taken: set[str]) -> None:
        """Computes values that depend only on `fixed` values. Most constant tensors that the remaining ops read become inputs."""
        buffers = self._buffers
        known: dict[Node, Any] = {**self.constants, **buffers}
        for node in self.fx.nodes:
            mask: Any = node.args[3] if op_of(node) == ATTENTION and len(node.args) > 3 else None
            if isinstance(mask, Node) and mask not in known and not self.is_derived_from:
                _share_bias(node, mask)
            is_fixed = all(argument in known for argument in node.all_input_nodes) and not _is_symbolic(node)
            if node.op == "call_function" and is_fixed and not _is_random(node):
                args, kwargs = pytree.tree_map_only(Node, known.__getitem__, (node.args, node.kwargs))
                with torch._C._DisableAutocast():  # the graph has the casts of autocast
                    known[node] = node.target(*args, **kwargs)
        self.constants.update({node: value for node, value in known.items() if node not in buffers})
        if not self.is_derived_from:
            expect_known(self.nodes)
        read = {argument for node in self.nodes for argument in node.all_input_nodes} | set(self.outputs)
        for node in [node for node in self.names if node not in {*read, *self.written} and self.names[node] in self.parameters]:
            del self.parameters[self.names.pop(node)]
        named: dict[object, str] = {}
        for node in self.nodes:  # constants that these nodes read are inputs, except numbers, uniform tensors and masks such as "causal"
            for argument in node.all_input_nodes:
                value = self.constants.get(argument)
                if (
                    not isinstance(value, torch.Tensor)
                    or value.numel() == 1
                    or argument in self.names
                    or argument in self.uniform
                    or word_of_mask(node, argument, value)
                ):
                    continue
                if (number := _uniform(value)) is not None:
                    self.uniform[argument] = number
                    continue
                dense = value.flatten().clone(memory_format=torch.contiguous_format)
                data = dense.cpu().view(torch.uint8).numpy().tobytes()
                equal = (value.dtype, tuple(value.shape), data)
                label = self.origins[argument].name if argument in self.origins else name_of_constant(argument)
                name = self.names[argument] = named.setdefault(equal, unique_name(name_of(label), taken))
                taken.add(name)
                self.bound[name] = value.contiguous()

    def type_of(self, node: Node, axes: AxesOfDims | None = None) -> TensorType:
        """Type of a node's value, sharded by the mesh axes `axes` of each dim."""
        value = node.meta["val"] if "val" in node.meta else self.constants[node]
        sizes = shape_of(value)
        axes = axes or tuple(() for _ in sizes)
        dims = tuple(Dim.of(f"{s}@{','.join(a)}" if a else s) for s, a in zip(sizes, axes, strict=True))
        return TensorType(dtype_of(value.dtype), dims, mesh=self.submesh)

    @property
    def submesh(self) -> hw.Mesh | None:
        """Mesh of the graph if it is a submesh of the program's mesh, otherwise None."""
        return self.mesh if self.mesh.members is not None else None

    def taking_whole(self, names: Sequence[str], results: Sequence[TensorType] = ()) -> Graph:
        """Copy of the graph in which the inputs `names` are replicated, and sliced by the ranks. `results` has the types of the outputs."""
        made = copy(self)
        nodes = {self.names[node]: node for node in self.names}
        used = {nodes[name]: tuple(dim.axes for dim in self.input_types[name].dims) for name in names}
        made.gathered = {**used, **self.gathered}
        whole = {name: self.type_of(nodes[name]) for name in names}
        made.input_types = {name: whole.get(name, type) for name, type in self.input_types.items()}
        if results:
            types = iter(results)
            made.results = [() if node in self.constants else tuple(dim.axes for dim in next(types).dims) for node in self.outputs]
        return made

    @cached_property
    def input_types(self) -> dict[str, TensorType]:
        """Types of the inputs, with the shardings that the plan states."""
        stated = {**{name: self.layouts.parameters.get(of) for name, of in self.parameters.items()}, **self.layouts.inputs}
        return {name: self.type_of(node, stated.get(name)) for node, name in self.names.items()}


def _share_bias(attention: Any, mask: Any) -> None:
    """Computes the bias once for all attention ops that read the same bool mask."""
    readers = [user for user in mask.users if op_of(user) == ATTENTION and user.args[3] is mask]
    if len(readers) > 1 and mask.meta["val"].dtype == torch.bool:
        dtype = attention.args[0].meta["val"].dtype
        with attention.graph.inserting_after(mask):
            bias = attention.graph.call_function(torch.ops.aten.where.Scalar, (mask, 0.0, -math.inf))
        bias.meta = {**mask.meta, "val": mask.meta["val"].to(dtype)}
        for user in readers:
            user.replace_input_with(mask, bias)


def expect_known(nodes: Sequence[Node]) -> None:
    """Raises one error that lists all unsupported ops."""
    missing = [node for node in nodes if not is_known(node)]
    if missing:
        counts = Counter(op_of(node) for node in missing)
        first = {op_of(node): location(node) for node in reversed(missing)}
        words = {op: op if op.count(".") > 1 else f"aten.{op}" for op in counts}
        listed = "; ".join(f"{words[op]}, {n} times, first at {first[op]}" for op, n in counts.items())
        names = dict.fromkeys(op.removeprefix("transformers.").partition(".")[0] for op in counts)
        remedy = "; ".join(_INSTEAD[name] for name in names if name in _INSTEAD)
        remedy = remedy or "write them with other ops, or as an hw.kernel in a fusion"
        raise refused(ProgramError(f"ops that are not supported: {listed}; {remedy}"), missing)


def refused(error: ProgramError, nodes: list[Node]) -> ProgramError:
    """Attaches the nodes that caused an error, unless the error has nodes already."""
    vars(error).setdefault("nodes", nodes)
    return error


_BY_MASK = "the number of true elements is known only at a call: use torch.where(mask, x, 0), or the first k by topk or argsort"
_VALUES = "the number of different values is known only at a call: count those of a range by torch.histc"
_INSTEAD = {
    **dict.fromkeys(("nonzero", "masked_select"), _BY_MASK),
    **dict.fromkeys(("_unique2", "unique_consecutive", "unique_dim"), _VALUES),
    **dict.fromkeys(("poisson", "binomial"), "draw random numbers outside, and make them an input"),
    "as_strided": "it reads memory outside of its tensor: use slices, or unfold",
}


def read(exported: ExportedProgram, layouts: Layouts, mesh: hw.Mesh, is_derived_from: bool = False, of_calls: bool = False) -> Graph:
    origins = {}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    by_name = {node.name: node for node in exported.graph.nodes}
    written: dict[Node, Node] = {}
    of_buffers = {spec.target: by_name[spec.arg.name] for spec in exported.graph_signature.input_specs if spec.target}
    checks = [node for node in exported.graph.nodes if op_of(node) == "with_effects"]
    for node in checks:
        if node.args[1] is not torch.ops.aten._linalg_check_errors.default:
            remedy = "omit the call, or use a function without side effects"
            raise ProgramError(f"{node.args[1]} has a side effect, which is not supported; {remedy}", location(node))
    for spec in exported.graph_signature.output_specs:
        if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.TOKEN):
            continue
        target = str(spec.target)
        if is_derived_from and spec.kind is OutputKind.USER_INPUT_MUTATION:
            remedy = "write to a copy, and return the copy"
            raise ProgramError(f"{target}: the module writes to it in forward, which is not supported in training; {remedy}")
        if spec.kind not in (OutputKind.USER_INPUT_MUTATION, OutputKind.BUFFER_MUTATION):
            raise ProgramError(f"{target}: the module writes to it in forward, which is not supported; make it an input, or a buffer")
        written[by_name[target] if spec.kind is OutputKind.USER_INPUT_MUTATION else of_buffers[target]] = by_name[spec.arg.name]
    for node, spec in zip(placeholders, exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.TOKEN:
            continue
        if spec.kind not in _KINDS:
            if isinstance(exported.constants.get(spec.target or ""), torch.Generator):
                raise ProgramError(OTHER_GENERATOR)
            raise ProgramError(f"{node.name}: an input of the kind {spec.kind.name} is not supported")
        name = spec.target or ""
        value = exported.state_dict.get(name, exported.constants.get(name))
        origins[node] = Origin(_KINDS[spec.kind], name, value)
    if (seeds := with_seeds(exported.graph)) is not None:
        origins[seeds] = Origin("seeds", SEEDS)
    tokens = sum(spec.kind is OutputKind.TOKEN for spec in exported.graph_signature.output_specs)
    others: Any = {"tokens": tokens, "is_derived_from": is_derived_from, "of_calls": of_calls, "spec": exported.call_spec.out_spec}
    return Graph(exported.graph, origins, layouts, mesh, written=written, checks=checks, **others)


def expect_unchecked(graph: Graph, of: str) -> None:
    """Refuses a graph that checks values after a call, because the call would have changed state by then."""
    if graph.checks:
        why = f"checks of values after a call, as torch.linalg.inv makes, are not supported in {of}"
        raise ProgramError(f"{why}; use a function without checks, such as inv_ex", location(graph.checks[0]))


def _keys_in(spec: Any, path: str = "") -> Iterator[str]:
    """Keys of a module's results: names of fields or indices in tuples, joined by "_"."""
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    keys = getattr(spec.context, "_fields", spec.context)
    if not isinstance(keys, list | tuple) or list(map(type, keys)) != [str] * len(children):
        keys = range(len(children))
    if not children and spec.num_leaves:
        yield path
    for key, child in zip(keys, children, strict=True):
        yield from _keys_in(child, f"{path}_{key}" if path else str(key))


_KINDS = {
    InputKind.USER_INPUT: "argument",
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


def _uniform(value: torch.Tensor) -> Any:
    """Value of all elements. None if there are no elements, or if elements differ, as 0.0 and -0.0 do."""
    first = value.flatten()[:1]
    if not value.numel() or not bool((value == first).all()):
        return None
    return None if value.is_floating_point() and bool((value.signbit() != first.signbit()).any()) else first.item()


def is_known(node: Node) -> bool:
    return node.target is operator.getitem or op_of(node) in TABLE or is_size(node)


def recorded(function: Callable[..., Any], given: Sequence[Any], table: Mapping[Any, Callable[..., Any]]) -> torch.fx.GraphModule:
    """Records the ATen ops of a function. Decomposes composite ops only if a fusion has no op for them."""
    table, missing = dict(table), {None: None}
    while missing:
        made = make_fx(function, table, pre_dispatch=True)(*given)
        unknown = {node.target for node in made.graph.nodes if node.op == "call_function" and not is_known(node)} - table.keys()
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        missing = {op: op.decompose for op in unknown if op.has_kernel_for_dispatch_key(composite)}
        table |= missing
    return made


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _is_symbolic(node: Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(size, torch.SymInt) for v in values for size in (v.shape if isinstance(v, torch.Tensor) else (v,)))
