"""A module as a graph of ATen ops on global tensors, by torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram, default_decompositions, export
from torch.fx import Graph

from hostweave.base.errors import ProgramError
from hostweave.torch.ops import ops
from hostweave.torch.repeats import Repeats

# Ops that stay as they are written: one op here, or a composite that the compiler knows.
_KEPT = """
linear scaled_dot_product_attention layer_norm rms_norm gelu silu softmax log_softmax matmul embedding cross_entropy_loss conv2d dropout
split chunk stack cumsum one_hot
"""


def exported(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any = None, training: bool = False
) -> tuple[ExportedProgram, dict[str, str]]:
    """The graph of the module for these inputs, functional and in core ATen but for `_KEPT`, and which layers were traced, by path.

    With `training` what has no gradient, by detach() or in torch.no_grad(), is marked by ops. Raises ProgramError.
    """
    repeats = Repeats(module)
    try:
        with _on_global_tensors(module), torch.set_grad_enabled(training), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # which torch.export raises of its own code
            call: Any = partial(export, module, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False)
            with repeats.standing_in():
                program = call()
            if why := repeats.why_apart(program.graph):
                repeats.how = dict.fromkeys(repeats.how, f"traced: {why}")
                program = call()
            if training:
                _mark_detached(program.graph)
            program = program.run_decompositions(dict(decompositions()))
            repeats.write_out(program.graph)
            return _without_empty_parts(program), repeats.how
    except ProgramError:
        raise
    except Exception as error:  # torch.export raises errors of many kinds, which name the line of the module
        why = str(error).strip()
        raise ProgramError(
            f"{type(module).__name__}: torch.export: {why}; write what depends on data as tensor ops (torch.where), and pass "
            "example_inputs that the module takes"
        ) from error
    finally:
        repeats.close()


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Those of torch.export, but for `_KEPT`."""
    table = default_decompositions()
    return {op: table[op] for op in list(table) if str(op).split(".")[1] not in _KEPT.split()}


@contextmanager
def _on_global_tensors(module: nn.Module) -> Iterator[None]:
    """While it lasts, parameters and buffers that are DTensors are fake tensors of their global shapes, and no hook makes DTensors."""
    mode, stand_ins = FakeTensorMode(allow_non_fake_inputs=True), dict[int, torch.Tensor]()
    with ExitStack() as stack:
        for part in module.modules():
            held: Any
            for held in (part._parameters, part._buffers):
                for name, tensor in list(held.items()):
                    if isinstance(tensor, DTensor):
                        if id(tensor) not in stand_ins:
                            stand_ins[id(tensor)] = _stand_in(tensor, mode)
                        stack.callback(held.__setitem__, name, tensor)
                        held[name] = stand_ins[id(tensor)]
            for hooks in (part._forward_pre_hooks, part._forward_hooks):
                stack.callback(hooks.update, dict(hooks))
                for number, hook in list(hooks.items()):
                    if getattr(hook, "__module__", "").startswith("torch.distributed.tensor"):
                        del hooks[number]
                stack.callback(hooks.clear)  # before the update: all in their order
        yield


def _stand_in(tensor: Any, mode: FakeTensorMode) -> Any:
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.to_local().device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _mark_detached(graph: Graph) -> None:
    """Has an op, which decompositions keep, where values lose their gradients."""
    for node in list(graph.nodes):
        name = str(node.target)
        if name in ("aten.detach.default", "aten.detach_.default"):
            node.target = ops.detach.default
        elif name == "wrap_with_set_grad_enabled" and node.args[0] is False:
            for made in list(node.users):
                with graph.inserting_after(made):
                    marked = graph.call_function(ops.detach.default, (made,))
                marked.meta = dict(made.meta)
                made.replace_all_uses_with(marked, delete_user_cb=lambda user, own=marked: user is not own)


def _without_empty_parts(program: ExportedProgram) -> ExportedProgram:
    """The same; what is concatenated has elements: x[..., n:] has none where a rotary embedding covers all n features of a head."""
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        tensors, *dim = node.args
        node.args = ([t for t in tensors if not any(isinstance(n, int) and n == 0 for n in t.meta["val"].shape)], *dim)
    program.graph.eliminate_dead_code()
    return program
