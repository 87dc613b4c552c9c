"""Graphs that Dynamo passes to a backend."""

from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter, Node

from hostweave.base.errors import Location, ProgramError
from hostweave.torch.graph import refused
from hostweave.torch.nodes import OF_TORCH, location
from hostweave.torch.ops import ops
from hostweave.torch.plan import dtensor_axes, text_of

MARK = "hostweave"  # key in "custom" metadata of nodes, which export keeps; the value is the node's name in Dynamo's graph


class GlobalRun(Interpreter):
    """Runs a graph of DTensors on global tensors."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is DTensor.from_local:
            return args[0]
        if str(target) == "tag_activation_checkpoint":  # ignored, because the min-cut partitioner chooses the values to save
            function, *given = args
            return Interpreter(function).run(*given)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in ("redistribute", "to_local", "full_tensor"):
            return super().call_method(target, args, kwargs)
        node: Any = self.current
        of = node.args[0] if target == "to_local" else node
        return ops.reshard(args[0], text_of(dtensor_axes(of.meta["example_value"], args[0].ndim)))

    def run_node(self, n: Node) -> Any:
        self.current = n
        value = super().run_node(n)
        if n.op == "output":
            nodes: Any = n.args[0]
            pairs = zip(nodes, value, strict=True)
            return tuple(_as_stated(node, one) for node, one in pairs if not isinstance(node, Node) or not is_number(node))
        return value


def _as_stated(node: Any, value: Any) -> Any:
    made = node.meta.get("example_value") if isinstance(node, Node) else None
    return ops.reshard(value, text_of(dtensor_axes(made, value.ndim))) if isinstance(made, DTensor) else value


def expect_global(graph: GraphModule) -> None:
    """Refuses ops on local parts of sharded DTensors, and local terms of partial sums. Both differ between ranks."""
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target == "to_local":
            made = node.args[0].meta["example_value"]
            others = [user for user in node.users if user.op != "output" and user.target is not DTensor.from_local]
            is_sharded = any(not placement.is_replicate() for placement in made.placements)
            is_partial = any(placement.is_partial() for placement in made.placements)
            if is_partial or (is_sharded and others):
                why = "computes with a rank's part of a DTensor" if not is_partial else "reads a rank's term of a partial sum"
                raise refused_nodes(f"{why}; redistribute it first, or write use_local_output=False", others or [node])
        if node.op == "call_function" and node.target is DTensor.from_local:
            local = node.args[0]
            placements = node.meta["example_value"].placements
            if any(placement.is_partial() for placement in placements):
                raise refused_nodes("from_local of a partial sum; reduce it first", [node])
            is_local = local.op == "placeholder" or local.target == "to_local"
            if any(placement.is_shard() for placement in placements) and not (is_local and len(local.users) == 1):
                raise refused_nodes("from_local of a tensor that is also used as a local tensor; use only the DTensor", [node])


def value_of(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, Node) else node


def is_mesh(node: Any) -> bool:
    argument = node.meta.get("grapharg")
    return argument is not None and isinstance(argument.example, DeviceMesh)


def is_number(node: Any) -> bool:
    return not isinstance(value_of(node), torch.Tensor)


def bytes_of(value: Any) -> int:
    sizes = [size if isinstance(size, int) else int(size.node.hint) for size in value.shape]
    return prod(sizes) * int(value.element_size())


def op_name(node: Any) -> str:
    target = node.target
    if isinstance(target, str):
        return f"Tensor.{target}"
    return f"{getattr(target, '__module__', None) or 'torch'}.{target.__name__}" if hasattr(target, "__name__") else str(target)


def location_of(stack: Any) -> str:
    frames = [frame for frame in stack or () if not frame.filename.startswith(OF_TORCH)]
    return str(Location(frames[-1].filename.rpartition("/")[2], frames[-1].lineno or 0)) if frames else "an unknown line"


def refused_nodes(why: str, nodes: list[Any]) -> ProgramError:
    return refused(ProgramError(why, location(nodes[0])), nodes)


def nodes_of(graph: GraphModule, error: ProgramError) -> dict[Node, str]:
    """Maps unsupported nodes to the reason: the nodes of an error, and those with the same op and stack trace."""
    marks = {(node.meta.get("custom") or {}).get(MARK, node.name) for node in getattr(error, "nodes", ())}
    calls = [node for node in graph.graph.nodes if node.op.startswith("call_")]
    found = [node for node in calls if node.name in marks]
    alike = {(str(node.target), node.meta.get("stack_trace")) for node in found}
    return {node: str(error) for node in calls if (str(node.target), node.meta.get("stack_trace")) in alike}


def wants_one_graph() -> bool:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator: Any = InstructionTranslator.current_tx()
    except AttributeError:
        return False
    return bool(translator.one_graph)
