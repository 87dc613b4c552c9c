"""Traces the forward and backward pass of a module as one joint graph, by AOTAutograd, and splits it by torch's min-cut partitioner."""

import math
import operator
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node
from torch.fx.traceback import preserve_node_meta, set_current_meta
from torch.utils import _pytree as pytree

from hostweave.base.errors import ProgramError
from hostweave.torch.aten import TABLE
from hostweave.torch.derivatives import Derivatives
from hostweave.torch.exported import decompositions, error_of_torch, without_code
from hostweave.torch.graph import Graph, Origin, expect_known
from hostweave.torch.layers import Layer
from hostweave.torch.nodes import ATTENTION, location, name_of_constant, op_of, role_of
from hostweave.torch.ops import Silu, call_recorded, composed_attention, matmul, ops
from hostweave.torch.patterns import repeated, rotated, word_of_constant_mask, word_of_mask
from hostweave.torch.plan import AxesOfDims, Layouts, text_of
from hostweave.torch.repeats import write_out
from hostweave.torch.saved import read_rows, save_alike, save_compared, save_sources, saved_names, take_views_again
from hostweave.types.tensor import TensorType

Env = MutableMapping[Node, Any]
# Assertions, and ops that return the values of their operand. Programs omit both.
_WORDS = """
alias.default detach.default clone.default lift_fresh_copy.default _assert_tensor_metadata.default _assert_async.default _assert_async.msg
"""
_SAME = _WORDS.split()
_OF_LOGITS = ("sub.Tensor", "_to_copy.default", "view.default")  # ops between the logits and the log-probabilities
LOG_SOFTMAX = torch.ops.aten._log_softmax.default, torch.ops.aten._log_softmax_backward_data.default


@dataclass
class Joint:
    """Forward graph and backward graph of a module."""

    outer: Graph  # the exported graph
    sources: list[Node]  # nodes of `outer` that are arguments of the joint graph
    origins: list[Origin]  # one for each of `sources`
    results: list[Node]  # nodes of `outer` that the joint graph computes
    differentiable: list[bool]  # for each result, True if it has a gradient
    whole: GraphModule  # joint graph: returns the results, then one gradient or None for each source
    needs_gradient: dict[str, bool]  # name of an argument -> True if the argument gets a gradient

    def __post_init__(self) -> None:
        """Sets `forward`, which returns results and saved values, and `backward`, which returns gradients."""
        self._cut()
        with torch._functorch.config.patch(cse=False):  # the first cut has already merged equal nodes
            if save_compared(self.whole, self.backward):
                self._cut()
            for change in (save_alike, save_sources):
                if change(self.whole, self._kept):
                    self._cut()

    def _cut(self) -> None:
        with without_code():
            self.forward, self.backward = min_cut_rematerialization_partition(self.whole, None, num_fwd_outputs=len(self.results))

    @property
    def _kept(self) -> list[Node]:
        output: Any = self.forward.graph.output_node()
        return [node for node in output.args[0][len(self.results) :] if node.op != "placeholder"]

    def forward_graph(self, shared: Mapping[Node, int] = MappingProxyType({})) -> Graph:
        """Forward graph without the saved values in `shared`. The shardings of saved values are inferred."""
        graph = Graph(self.forward.graph, self._origins(self.forward), self._layouts(), self.outer.mesh)
        saved = {node: name for node, name in self.saved.items() if node not in shared}
        graph.returned = [*graph.returned[: len(self.results)], *saved]
        graph.results = [*map(self.outer.default_axes, self.results), *(None for _ in saved)]
        graph.labels = [*self._labels("y"), *saved.values()]
        return graph

    @cached_property
    def shared(self) -> dict[Node, int]:
        """`results_saved` on one rank, which the program returns only once. Empty on several ranks, because their shardings may differ."""
        return self.results_saved if self.outer.mesh.size == 1 else {}

    @cached_property
    def results_saved(self) -> dict[Node, int]:
        """Maps saved values that are also results to the indices of the results."""
        output: Any = self.forward.graph.output_node()
        return {node: number for number, node in enumerate(output.args[0][: len(self.results)]) if node in self.saved}

    def _labels(self, alone: str) -> list[str]:
        """Names of the results: their keys, or `alone` for a single result without a key."""
        return [self.outer.keys.get(node, alone if len(self.results) == 1 else "") for node in self.results]

    @property
    def tangents(self) -> dict[str, str]:
        """Maps placeholders of the results' gradients, such as `tangents_1`, to names in programs."""
        labels = [label for label, has in zip(self._labels("y"), self.differentiable, strict=True) if has]
        return {f"tangents_{number}": f"gradient_{label or number}" for number, label in enumerate(labels, 1)}

    def step_graph(self, scale: str = "") -> Graph:
        """Graph of the results and the gradients. The argument named `scale` multiplies all gradients, but not the loss."""
        whole = self._joined()
        origins = self._origins(whole)
        for node in origins:
            if node.name.startswith("tangents_"):
                of = node.meta["val"]
                one = Origin("constant", node.name, torch.ones(of.shape, dtype=of.dtype, device=of.device))
                origins[node] = Origin("argument", scale) if scale else one
        graph = Graph(whole.graph, origins, self._layouts(), self.outer.mesh)
        given = [(node, origin) for node, origin in zip(graph.returned[len(self.results) :], self.origins, strict=True) if node is not None]
        of_gradients, graph.placed = self._of_gradients(given)
        graph.results = [*map(self.outer.default_axes, self.results), *of_gradients]
        graph.labels = [*self._labels("loss"), *(f"gradient.{origin.name}" for _, origin in given)]
        return graph

    def _joined(self) -> GraphModule:
        """Concatenates the forward graph and the backward graph."""
        graph, root = torch.fx.Graph(), torch.nn.Module()
        values = {node.name: graph.node_copy(node) for node in self.whole.graph.find_nodes(op="placeholder")}
        returned = list[Any]()
        for module, count in ((self.forward, len(self.results)), (self.backward, None)):
            copies = {node: values[node.name] for node in module.graph.find_nodes(op="placeholder")}
            outputs: Any = graph.graph_copy(module.graph, copies)
            returned += outputs[:count]
            values.update((node.name, copy) for node, copy in copies.items())
            for node in module.graph.find_nodes(op="get_attr"):
                setattr(root, node.target, getattr(module, node.target))
        for node, copy in copies.items():  # recomputed nodes of the backward graph count as part of the derivative
            if node.op == "call_function" and "nn_module_stack" in node.meta:
                copy.meta["fwd_nn_module_stack"] = copy.meta.pop("nn_module_stack")
        graph.output(tuple(returned))
        return GraphModule(root, graph)

    def backward_graph(self, forward: Graph, types: list[TensorType]) -> Graph:
        """Graph that computes the gradients of parameters and arguments. `types` has the types of the forward program's results."""
        made = iter(types)
        axes = [None if node in forward.constants else tuple(dim.axes for dim in next(made).dims) for node in forward.outputs]
        origins, stated = self._origins(self.backward), dict[str, AxesOfDims | None]()
        tangents = [one for one, has in zip(axes, self.differentiable, strict=False) if has]
        stated.update(zip(self.tangents.values(), tangents, strict=True))
        of_name, of_saved = {node.name: node for node in origins}, dict(zip(forward.outputs, axes, strict=True))
        for saved, name in self.saved.items():
            node, one = of_name[saved.name], of_saved[saved]
            node.meta["role"] = role_of(saved)
            stated[name] = one
            del origins[node]  # removed and added again, so that saved values come last
            origins[node] = Origin("argument", name) if one is not None else Origin("constant", name, forward.constants[saved])
        layouts = self._layouts()
        inputs = {**layouts.inputs, **{name: one for name, one in stated.items() if one is not None}}
        graph = Graph(self.backward.graph, origins, replace(layouts, inputs=inputs), self.outer.mesh)
        given = [(node, origin) for node, origin in zip(graph.returned, self.origins, strict=True) if isinstance(node, Node)]
        graph.results, graph.placed = self._of_gradients(given)
        graph.labels = [f"gradient.{origin.name}" for _, origin in given]
        return graph

    def _of_gradients(self, given: list[tuple[Node, Origin]]) -> tuple[list[AxesOfDims | None], dict[Node, AxesOfDims]]:
        """Shardings of the gradients, as a list and, for gradients of parameters, by node."""
        placed = {node: self.axes_of(origin) for node, origin in given if origin.kind == "parameter"}
        return [self.axes_of(origin) for _, origin in given], placed

    @cached_property
    def saved(self) -> dict[Node, str]:
        """Maps forward nodes that the backward graph reads to names of the nodes' values."""
        return saved_names(self._kept)

    def source_of(self, node: Node) -> int | None:
        """Index of a placeholder's source. None for a saved value or the gradient of a result."""
        return int(node.name.removeprefix("primals_")) - 1 if node.name.startswith("primals_") else None

    def numbers_of(self, graph: Graph) -> dict[str, int]:
        """Maps inputs of the program that are arguments or seeds to the indices of their sources."""
        taken = [*graph.arguments, *([] if graph.seeds is None else [graph.seeds])]
        named = ((graph.names[node], self.source_of(node)) for node in taken if node in graph.names)
        return {name: number for name, number in named if number is not None}

    def axes_of(self, origin: Origin) -> AxesOfDims:
        """Sharding of an origin's tensor and gradient."""
        stated = self.outer.layouts.parameters if origin.kind == "parameter" else self.outer.layouts.inputs
        return stated.get(origin.name, ())

    def _layouts(self) -> Layouts:
        return replace(self.outer.layouts, outputs={})

    def _origins(self, module: GraphModule) -> dict[Node, Origin]:
        origins = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                source = self.source_of(node)
                origins[node] = Origin("argument", self.tangents.get(node.name, node.name)) if source is None else self.origins[source]
            elif node.op == "get_attr":
                origins[node] = Origin("constant", node.target, getattr(module, node.target))
        return origins


@cache
def _decompositions() -> dict[Any, Any]:
    """Decompositions of torch and of this package. Cached, because `core_aten_decompositions` visits all ops of torch.

    The f32 result of log-softmax is often a model's largest tensor, so the backward pass recomputes this result from the logits.
    """
    return {**core_aten_decompositions(), **decompositions(), **{op: decomposition_table[op] for op in LOG_SOFTMAX}}


def joint_of(outer: Graph, wanted: list[bool], of_loss: bool = False) -> Joint:
    """Traces the joint graph. `wanted` selects arguments that get gradients. `of_loss` differentiates only the one scalar result."""
    needs_gradient = {node.name: one for node, one in zip(outer.arguments, wanted, strict=True)}
    results = [node for node in dict.fromkeys(outer.outputs) if node not in outer.constants and node not in outer.names]
    sources = list(outer.names)
    for node in outer.nodes:
        for argument in node.all_input_nodes:
            value = outer.constants.get(argument)
            if isinstance(value, torch.Tensor) and argument not in sources and not word_of_mask(node, argument, value):
                sources.append(argument)
    for node, origin in outer.origins.items():
        is_lost = origin.kind in ("buffer", "constant") and isinstance(origin.value, torch.Tensor) and origin.value.requires_grad
        if is_lost and node.users:
            name = f"the buffer {origin.name}" if origin.kind == "buffer" else f"a tensor of {list(origin.value.shape)} that forward reads"
            remedy = "register it as an nn.Parameter of the module, or call requires_grad_(False)"
            raise ProgramError(f"training: {name} requires grad, but is not a parameter; {remedy}", location(next(iter(node.users))))
    origins = [replace(_origin_of(outer, node), kind="written") if node in outer.written else _origin_of(outer, node) for node in sources]
    fakes = [_fake(outer, node, origin, needs_gradient) for node, origin in zip(sources, origins, strict=True)]
    differentiable: list[bool] = []
    losses = _losses(results) if of_loss else results
    patterns, derivatives = _patterns(outer), Derivatives(outer)

    def compute(nodes: Sequence[Node], env: Env) -> None:
        for node in nodes:
            with set_current_meta(node):
                env[node] = result_of(outer, env, node, patterns.get(node))

    def compute_layer(layer: Layer, env: Env) -> None:
        def results(*begun: torch.Tensor) -> list[torch.Tensor]:
            inside = ChainMap(dict(zip(layer.arguments, begun, strict=True)), env)
            compute(layer.nodes, inside)
            return [inside[node] for node in layer.results]

        taken = [env[node] for node in layer.arguments]
        env.update(zip(layer.results, derivatives.results(layer, taken, results), strict=True))

    def forward(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        env: dict[Node, Any] = dict(zip(sources, flat, strict=True))
        derivatives.firsts.clear()
        with preserve_node_meta():
            computed = set[Node]()
            for node in outer.nodes:
                if node in derivatives.layers:
                    compute_layer(derivatives.layers[node], env)
                    computed.update(derivatives.layers[node].nodes)
                elif node not in computed:
                    compute([node], env)
        made = tuple(env[node].clone() if node in losses else env[node].detach().clone() for node in results)
        differentiable[:] = [value.requires_grad for value in made]
        return made

    rules = {op: rule for op, rule in _decompositions().items() if op in LOG_SOFTMAX or str(op).removeprefix("aten.") not in TABLE}
    try:
        with without_code():
            made: Any = aot_export_joint_simple(forward, tuple(fakes), trace_joint=True, decompositions=rules)
        write_out(made.graph)
    except ProgramError:
        raise
    except Exception as error:
        raise error_of_torch("training", error) from error
    if not any(differentiable):
        why = "no result depends on a tensor that requires grad"
        raise ProgramError(f"training: {why}; let parameters or example_inputs require grad, or compile without training=True")
    _cut_before_padding(made.graph)
    _simplify(made)
    _read_logits(made)
    expect_known(_computed_of(made.graph))
    read_rows(made)
    take_views_again(made, {f"primals_{number + 1}" for number, origin in enumerate(origins) if origin.kind != "written"})
    _average(made.graph, outer, sources, [node for node, has in zip(results, differentiable, strict=True) if has])
    return Joint(outer, sources, origins, results, differentiable, made, needs_gradient)


def _read_logits(made: GraphModule) -> None:
    """Makes nll_loss_backward, which needs only the shape of the log-probabilities, read the logits, so that only they are saved."""
    for node in made.graph.nodes:
        source: Any = node.args[1] if op_of(node) == "nll_loss_backward.default" else None
        views: list[Any] = []
        while source is not None and op_of(source) in _OF_LOGITS:
            views += [source] if op_of(source) == "view.default" else []
            source = source.args[0]
        if source is not None:
            with made.graph.inserting_before(node):
                for view in reversed(views):
                    value = source.meta["val"].reshape(view.meta["val"].shape)
                    source = made.graph.call_function(view.target, (source, view.args[1]))
                    source.meta["val"] = value
            node.update_arg(1, source)


def _computed_of(graph: Any) -> list[Node]:
    """Ops that depend on a placeholder. All other ops compute constants."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (node.op == "call_function" and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return [node for node in graph.nodes if node in found and node.op == "call_function"]


def _average(graph: Any, outer: Graph, sources: list[Node], results: list[Node]) -> None:
    """Divides gradients of row-sharded results by the number of blocks, because `fully_shard` averages the gradients of the blocks.
    Gradients of row-sharded arguments are not averaged, so they are multiplied by this number."""
    ranks = math.prod(dict(outer.mesh.axes)[axis] for axis in outer.layouts.axes_of_rows)
    tangents = [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents_")]
    averaged = [tangent for tangent, result in zip(tangents, results, strict=True) if outer.layouts.of_rows(result.meta["val"])]
    returned = list(graph.output_node().args[0])

    def scaled(node: Node, factor: float, before: Node) -> Node:
        with graph.inserting_before(before):
            made: Node = graph.call_function(torch.ops.aten.mul.Tensor, (node, factor))
        made.meta["val"] = node.meta["val"]
        return made

    for place, source in enumerate(sources, -len(sources)) if averaged else ():
        if returned[place] is not None and source in outer.arguments and outer.layouts.of_rows(source.meta["val"]):
            if len(averaged) < len(tangents):
                why = f"with fully_shard, {source.name} requires grad, but the module returns rows of a rank and a value of all ranks"
                raise ProgramError(f"training: {why}; return only one of the two, or detach() the argument")
            returned[place] = scaled(returned[place], ranks, graph.output_node())
    graph.output_node().args = (returned,)
    for tangent in averaged:
        if tangent.users:
            mean = scaled(tangent, 1 / ranks, min(tangent.users, key=list(graph.nodes).index))
            tangent.replace_all_uses_with(mean, delete_user_cb=lambda user, own=mean: user is not own)


def _losses(results: list[Node]) -> list[Node]:
    found = [node for node in results if node.meta["val"].is_floating_point() and node.meta["val"].ndim == 0]
    if len(found) != 1:
        why = f"a step needs one scalar result, the loss, but the module returns {len(found)} scalars"
        raise ProgramError(f"optimizer: {why}; return only the loss, or omit optimizer= and call backward() and step()")
    return found


def _origin_of(outer: Graph, node: Node) -> Origin:
    if node in outer.origins:
        return replace(outer.origins[node], name=outer.origins[node].name or node.name)
    return Origin("constant", name_of_constant(node), outer.constants[node])


def _fake(outer: Graph, node: Node, origin: Origin, needs_gradient: dict[str, bool]) -> torch.Tensor:
    value = node.meta.get("val", origin.value)
    wanted = origin.value.requires_grad if origin.kind == "parameter" else node in outer.arguments and needs_gradient[node.name]
    made: torch.Tensor = torch.empty_like(value, requires_grad=wanted)
    return made


def _patterns(outer: Graph) -> dict[Node, Any]:
    """Maps attention ops to the name of a known mask, such as "causal", and rotary embeddings to their operands."""
    found = {node: word_of_constant_mask(node, outer.constants) or rotated(node, outer.fixed) for node in outer.nodes}
    return {node: what for node, what in found.items() if what}


_INSTEAD: dict[str, Callable[..., Any]] = {  # op -> function that computes the op
    "silu.default": Silu.apply,
    "view.default": torch.Tensor.reshape,  # because torch's strides differ between devices
    "hostweave.function.default": call_recorded,
    "hostweave.detach.default": torch.Tensor.detach,
}


def result_of(outer: Graph, env: Env, node: Any, pattern: Any) -> Any:
    """Computes a node of the graph `outer` from the values in `env`."""

    def value(of: Node) -> Any:
        return env[of] if of in env else outer.constants.get(of, of.meta.get("val"))

    if node.target is operator.getitem:
        return value(node.args[0])[node.args[1]]
    args, kwargs = pytree.tree_map_only(Node, value, (node.args, node.kwargs))
    made: Any
    op = op_of(node)
    if op == ATTENTION:
        made = _attention(node, value, args, kwargs, pattern)
    elif op == "linear.default" and args[0].ndim > 1:
        made = ops.linear(args[0], args[1], args[2] if len(args) > 2 else None)
    elif op in ("matmul.default", "mm.default", "bmm.default") and min(args[0].ndim, args[1].ndim) > 1:
        made = matmul(*args)
    elif op == "addmm.default" and not kwargs:
        made = args[0] + matmul(*args[1:])
    elif pattern:
        made = ops.rotary(*map(value, pattern), False)
    elif op == "hostweave.random.default":  # has no derivative
        made = node.target(*(one.detach() if isinstance(one, torch.Tensor) else one for one in args))
    else:
        made = _INSTEAD.get(op, node.target)(*args, **kwargs)
    for axes in outer.stated(node, made):
        made = ops.reshard(made, text_of(axes))
    return made


def _attention(node: Any, value: Any, args: Any, kwargs: Any, word: str | None) -> Any:
    defaults: list[Any] = [None, 0.0, False]
    q, k, v, mask, p, causal = list(args) + defaults[len(args) - 3 :]
    p, causal, scale = kwargs.get("dropout_p", p), kwargs.get("is_causal", causal), kwargs.get("scale")
    mask, gqa = kwargs.get("attn_mask", mask), bool(kwargs.get("enable_gqa"))
    if word:
        mask, causal = None, causal or word == "causal"
    if all(pair := [repeated(argument) for argument in node.args[1:3]]):
        (k, v), gqa = map(value, pair), True
    if p or (mask is not None and mask.dtype not in (torch.bool, q.dtype)):
        return composed_attention(q, k, v, mask, p, causal, scale, gqa, kwargs.get("seed"))
    return ops.attention(q, k, v, None if mask is None else _as_bias(mask, q, k), causal, scale, gqa)[0]


def _as_bias(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Bias that is equivalent to a mask. The size of the last dim of the bias is the number of keys."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=q.dtype), torch.full((), -math.inf, dtype=q.dtype))
    return mask.expand(*(mask.shape[:-1] if mask.ndim > 1 else (1,)), k.shape[-2])


def _cut_before_padding(graph: Any) -> None:
    """Moves a slice before a padding, as in `pad(labels, (0, 1))[..., 1:]`, so that the padding can fuse with the op that reads it."""
    for cut in graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        padded, dim, start = (*cut.args, 0, 0)[:3]
        if op_of(padded) != "constant_pad_nd.default" or len(padded.args[1]) != 2 or padded.args[1][0] != 0:
            continue
        x, widths, *value = padded.args
        lengths = [node.meta["val"].shape[-1] for node in (x, padded, cut)]
        if dim % cut.meta["val"].ndim != cut.meta["val"].ndim - 1 or not all(isinstance(one, int) for one in (start, *lengths)):
            continue
        if start < lengths[0] and lengths[1] - start == lengths[2]:
            with graph.inserting_before(cut):
                rest = graph.call_function(cut.target, (x, *cut.args[1:]))
                again = graph.call_function(padded.target, (rest, widths, *value))
            rest.meta, again.meta = {**cut.meta, "val": x.meta["val"][..., start:]}, dict(cut.meta)
            cut.replace_all_uses_with(again)


def _simplify(made: GraphModule) -> None:
    """Removes nodes that compute nothing. Backward nodes without a source line get the line of their forward node."""
    lines: dict[int, str] = {}
    for node in list(made.graph.nodes):
        is_same_view = op_of(node) == "view.default" and node.meta["val"].shape == node.args[0].meta["val"].shape
        if node.op == "call_function" and (op_of(node) in _SAME or is_same_view):
            if node.users:
                node.replace_all_uses_with(node.args[0])
            made.graph.erase_node(node)
        elif trace := node.meta.get("stack_trace"):
            lines.setdefault(node.meta.get("seq_nr", -1), trace)
    for node in made.graph.nodes:
        if not node.meta.get("stack_trace") and (trace := lines.get(node.meta.get("seq_nr", -1))):
            node.meta["stack_trace"] = trace
    made.graph.eliminate_dead_code()
    made.recompile()
