"""Results of a module that share memory: tensors of the module, arguments, and views of tensors, arguments or results.

A call makes the result from the tensor that owns the memory, by the graph's view ops. So a write to the result changes this tensor.
"""

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Node

from hostweave.torch.nodes import is_complex, is_size, is_view, op_of

_DETACH = "hostweave.detach.default"


def shared_results(graph: Any) -> dict[Node, Node]:
    """Maps each result that shares memory to the node that owns the memory. A view of a sharded argument or result shares no memory,
    because a view of a block may differ from the block of the view."""
    results = dict.fromkeys(node for node in graph.of_module if isinstance(node, Node) and not is_complex(node))
    bases = {node: base for node in results if (base := _base(graph, node)) is not None}
    counts, kept = Counter(bases.values()), {*results, *graph.written.values()}
    return {node: base for node, base in bases.items() if base.op == "placeholder" or base in kept or counts[base] > 1}


def _base(graph: Any, node: Node) -> Node | None:
    """Tensor whose memory a result shares, or the result if it is a placeholder. None if the memory is not shared."""
    chain: list[Any] = [node]
    while is_view(chain[-1]) or op_of(chain[-1]) == _DETACH:
        chain.append(chain[-1].args[0])
    base: Node = chain[-1]
    written: dict[Node, Node] = graph.written
    if base in written or (len(chain) == 1 and base.op != "placeholder") or not all(map(_is_known, _operands(chain))):
        return None
    if base.op == "placeholder" and graph.origins[base].kind != "argument":
        return None if isinstance(graph.origins[base].value, FakeTensor) else base  # a fake tensor stands for a DTensor
    if len(chain) > 1 and not base.meta["val"].is_contiguous() and any(op_of(one) == "view.default" for one in chain):
        return None  # a program returns `base` contiguous, and `reshape` of other strides may copy
    if graph.mesh.size > 1 and (base in written.values() or not all(_is_replicated(graph, one) for one in chain)):
        return None
    return base


def _is_replicated(graph: Any, node: Node) -> bool:
    axes = graph.layouts.inputs.get(graph.names.get(node, ""), ())
    return not any(axes) and not graph.is_stated(node) and not any(graph.layouts.of_rows(node.meta["val"]) if "val" in node.meta else ())


def _operands(chain: list[Any]) -> list[Node]:
    return [one for node in chain[:-1] for one in node.all_input_nodes if one is not node.args[0]]


def _is_known(size: Node) -> bool:
    """True if a size can be computed from shapes of arguments."""
    is_element = size.target is torch.ops.aten._local_scalar_dense.default
    return size.op == "placeholder" or (is_size(size) and not is_element and all(map(_is_known, size.all_input_nodes)))


def made_again(node: Any, value: Callable[[Any], Any]) -> Any:
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
    if op_of(node) == "view.default":  # reshape copies if the strides permit no view
        return args[0].reshape(args[1])
    if op_of(node) == _DETACH:
        return args[0].detach()
    return args[0][args[1]] if node.target is operator.getitem else node.target(*args, **kwargs)
