"""The door for PyTorch: a module and a sharding plan in, a compiled multi-GPU program out.

import hostweave as hw, hostweave.torch

model = hostweave.torch.compile(module, hw.Mesh(tp=2), {"q_proj.weight": "tp, -", "o_proj.weight": "-, tp"}, (input_ids,))
logits = model(input_ids)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from hostweave.api import Program
from hostweave.api import compile as compile_program
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.options import Options
from hostweave.runtime.group import current
from hostweave.torch.custom_op import as_torch_op as as_torch_op
from hostweave.torch.exported import exported
from hostweave.torch.graph import Graph
from hostweave.torch.plan import layouts, mesh_of
from hostweave.torch.trace import snake_case, traced
from hostweave.types.shards import shard


def compile(
    module: nn.Module,
    mesh: Any,
    plan: Mapping[str, Any] | None = None,
    example_inputs: Sequence[Any] | Mapping[str, Any] = (),
    *,
    target: str | None = None,
    options: Options | None = None,
    dynamic_shapes: Any = None,
) -> CompiledModule:
    """Compiles the forward pass of a module for the ranks of a mesh.

    `mesh` is an hw.Mesh, or a DeviceMesh with named dims. `plan` states shardings by name, with wildcards; a pattern may leave out the
    first words of a path:

    - a parameter, a buffer or an input: `"q_proj.weight": "tp, -"`, for each dim a mesh axis (`dp+tp` for two) or `-`;
    - what a module returns: `"layers.*": "-, tp, -"`;
    - a module, in the styles of torch.distributed.tensor.parallel: `"q_proj": ColwiseParallel()`, RowwiseParallel, SequenceParallel,
      PrepareModuleInput.

    Parameters that are DTensors state theirs themselves. All other shardings are inferred; outputs are replicated unless the plan
    states the module that makes them. `example_inputs` are the arguments of a call, a tuple, or a dict of keyword arguments: the graph
    is what torch.export records for them. Sizes are fixed, but for `dynamic_shapes`, which is torch.export's. Modules that repeat,
    as layers do, become one function of the generated program. `target` is "cuda" where the parameters are there, else "cpu".

    Raises ProgramError for a module that torch.export does not take, ops that are not supported (all at once, with the lines that use
    them), and a plan that does not fit the module.

    Example: `model = hostweave.torch.compile(module.eval(), hw.Mesh(tp=2), plan, (input_ids,))`, then `logits = model(input_ids)`.
    """
    if not isinstance(module, nn.Module):
        raise ProgramError(f"hostweave.torch.compile: {module!r} is no torch.nn.Module; pass the module, not its forward function")
    if not isinstance(plan, Mapping | None) or not all(isinstance(pattern, str) for pattern in plan or ()):
        raise ProgramError(f'hostweave.torch.compile: plan={plan!r} is no dict of names; write {{"q_proj.weight": "tp, -"}}')
    if isinstance(example_inputs, torch.Tensor):
        raise ProgramError("hostweave.torch.compile: example_inputs is a tensor; pass the arguments of one call, as a tuple: (x,)")
    if not example_inputs:
        raise ProgramError("hostweave.torch.compile: example_inputs is empty; pass the arguments of one call, as a tuple or a dict")
    named = isinstance(example_inputs, Mapping)
    args, kwargs = ((), dict(example_inputs)) if named else (tuple(example_inputs), {})
    placed = mesh_of(mesh)
    dims = {key: value.ndim for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
    graph_of = exported(module, args, kwargs, dynamic_shapes)
    if not named:
        names = [spec.arg.name for spec in graph_of.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
        leaves = pytree.tree_leaves(args)
        dims = {name: leaf.ndim for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
    graph = Graph(graph_of, layouts(plan or {}, module, dims, placed), placed)
    first = next(iter(module.parameters()), None)
    target = target or ("cuda" if first is not None and first.is_cuda else "cpu")
    options = options or Options()
    program = compile_program(traced(graph, snake_case(type(module).__name__), options), target=target, options=options)
    return CompiledModule(module, graph, program)


class CompiledModule:
    """A module that was compiled, made by `hostweave.torch.compile`. It is called as the module is, and returns what it returns.

    In a process or thread that has joined a group (`hw.init`) a call runs this rank: arguments are local blocks, as the plan shards
    inputs, and replicated ones by default. Without a group all ranks run in this process, on global tensors. Parameters are read where they
    lie, so what optimizers or `load_state_dict` write is seen. `program` is the compiled hw.Program, with its source and `check`.
    """

    def __init__(self, module: nn.Module, graph: Graph, program: Program):
        self.program, self._module, self._graph = program, module, graph
        self._tensors = {name: _tensor(module, of) for name, of in graph.parameters.items()}
        self._places = [(*_owner(module, of), self._tensors[name]) for name, of in graph.parameters.items()]
        self._training = module.training
        self._bound: dict[int | None, Program] = {}  # by rank of the group, None for all ranks in this process

    def __repr__(self) -> str:
        return f"<hostweave.torch.CompiledModule of {type(self._module).__name__}: {self.program!r}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments. Raises ArgumentError for others than it was compiled for."""
        self._expect_unchanged()
        arrays = self._arrays(args, kwargs)
        group = current()
        program = self._bound.get(group.rank if group else None) or self._bind(group.rank if group else None)
        made = program(**arrays) if group else program.run(**arrays)
        results = iter(made if isinstance(made, tuple) else (made,))
        constants = self._graph.constants
        outputs = [constants[node] if node in constants else next(results) for node in self._graph.outputs]
        return pytree.tree_unflatten(outputs, self._graph.exported.call_spec.out_spec)

    def _bind(self, rank: int | None) -> Program:
        """The program with parameters and constants: this rank's blocks, or the global tensors."""
        types, mesh = self._graph.input_types, self._graph.mesh
        given: dict[str, Any] = {}
        for name, held in {**self._tensors, **self._graph.bound}.items():
            tensor: Any = held.detach()
            if rank is None:
                given[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.contiguous()
            else:
                local: Any = tensor.to_local() if isinstance(tensor, DTensor) else shard(types[name], tensor, rank, mesh)
                given[name] = local.contiguous()
        bound = self._bound[rank] = self.program.bind(**given)
        return bound

    def _expect_unchanged(self) -> None:
        name = type(self._module).__name__
        if torch.is_grad_enabled() and any(tensor.requires_grad for *_, tensor in self._places):
            raise ArgumentError(
                f"{name}: this is a forward program, without gradients; call it in torch.no_grad() or torch.inference_mode()"
            )
        for owner, key, tensor in self._places:
            if getattr(owner, key) is not tensor:
                raise ArgumentError(
                    f"{name}: {key} is another tensor than at compile; compile again, or copy_ into the tensor that was there"
                )
        if self._module.training != self._training:
            raise ArgumentError(f"{name}: was compiled for {'train' if self._training else 'eval'}() and is changed; compile it again")

    def _arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        spec = self._graph.exported.call_spec.in_spec
        wanted = list(spec.child(1).context) if hasattr(spec, "child") else list(spec.children_specs[1].context)
        name = type(self._module).__name__
        if sorted(wanted) != sorted(kwargs):
            raise ArgumentError(
                f"{name}: was compiled for the keyword arguments {wanted or 'none'}, not {list(kwargs) or 'none'}; call it likewise"
            )
        leaves, given = pytree.tree_flatten((args, {key: kwargs[key] for key in wanted}))
        if given != spec:
            raise ArgumentError(f"{name}: the arguments have another structure than example_inputs; pass as many, nested likewise")
        arrays = {}
        for node, leaf in zip(self._graph.arguments, leaves, strict=True):
            if node in self._graph.names:
                if not isinstance(leaf, torch.Tensor):
                    raise ArgumentError(f"{name}: {node.name} is {leaf!r}, and was a tensor at compile; pass a tensor")
                arrays[self._graph.names[node]] = leaf.detach()
            elif leaf != self._graph.constants.get(node):
                raise ArgumentError(
                    f"{name}: {node.name} is {leaf!r}, and was {self._graph.constants.get(node)!r} at compile; compile it again"
                )
        return arrays


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, key = path.rpartition(".")
    return module.get_submodule(parent), key


def _tensor(module: nn.Module, path: str) -> torch.Tensor:
    owner, key = _owner(module, path)
    tensor: torch.Tensor = getattr(owner, key)
    return tensor
