"""Modules that `parallelize_module` or `fully_shard` of torch.distributed prepared.

The hooks of these modules gather and cast DTensors. A compiled program contains these gathers and casts, so the hooks are disabled during
an export.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from hostweave.base.errors import ProgramError
from hostweave.types.mesh import Mesh

_OURS = -1  # key of our hooks; keys of torch begin with 0


def states(module: nn.Module) -> dict[str, Any]:
    return {path: submodule._get_fsdp_state() for path, submodule in module.named_modules() if isinstance(submodule, FSDPModule)}


def data_axes(module: nn.Module, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes over which `fully_shard` shards or replicates parameters, or ()."""
    found: dict[tuple[str, ...], str] = {}
    for path, state in states(module).items():
        for group in state._fsdp_param_groups:
            axes = tuple(group.mesh_info.mesh.mesh_dim_names or ())
            if not axes or any(axis not in dict(mesh.axes) for axis in axes):
                raise ProgramError(f"{path or 'the module'}: fully_shard has a mesh of dims {axes}; name them like the axes of {mesh}")
            if group.gradient_divide_factor is not None:
                why = "set_gradient_divide_factor is not compiled"
                raise ProgramError(f"{path or 'the module'}: {why}; omit it, and multiply the loss instead")
            found.setdefault(axes, path)
    if len(found) > 1:
        (one, path), (other, at) = list(found.items())[:2]
        raise ProgramError(f"fully_shard has the axes {one} for {path or 'the module'} and {other} for {at}; use the same axes for both")
    return next(iter(found), ())


def of_all_ranks(leaves: Sequence[Any], count: int) -> tuple[list[Any], int]:
    """Repeats the rows of arguments `count` times, as a stand-in for the rows of all ranks. Also returns the new number of rows. Rows are
    along dim 0 of the first tensor that has dims, and of tensors whose dim 0 has the same size."""
    rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), 0)
    return [torch.cat([leaf] * count) if has_rows(leaf, rows) else leaf for leaf in leaves], rows * count


def has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.shape[0] == rows


# --- while a module is exported ---------------------------------------------------------------------------------------


@contextmanager
def on_global_tensors(module: nn.Module) -> Iterator[None]:
    """Replaces DTensors of the module by fake tensors of global shape, and disables the forward hooks of torch.distributed.

    Parameters, arguments and results get the dtypes of the MixedPrecisionPolicy.
    """
    mode, stand_ins, dtypes = FakeTensorMode(allow_non_fake_inputs=True), dict[int, torch.Tensor](), _dtypes(module)
    with ExitStack() as stack:
        for submodule in module.modules():
            held: Any
            for held in (submodule._parameters, submodule._buffers):
                for name, tensor in list(held.items()):
                    if isinstance(tensor, DTensor):
                        if id(tensor) not in stand_ins:
                            stand_ins[id(tensor)] = _stand_in(tensor, mode, dtypes.get(id(tensor), tensor.dtype))
                        stack.callback(held.__setitem__, name, tensor)
                        held[name] = stand_ins[id(tensor)]
            for hooks in (submodule._forward_pre_hooks, submodule._forward_hooks):
                for number, hook in list(hooks.items()):
                    if getattr(hook, "__module__", "").startswith(("torch.distributed.tensor", "torch.distributed.fsdp")):
                        stack.callback(_put_back, hooks, dict(hooks))
                        del hooks[number]
        for path, state in states(module).items():
            _cast_around(module.get_submodule(path), state._mp_policy, stack)
        yield


def _put_back(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    """Restores the hooks in `before`, ahead of the hooks that were added since."""
    now = {**before, **hooks}
    hooks.clear()
    hooks.update(now)


def _stand_in(tensor: Any, mode: FakeTensorMode, dtype: torch.dtype) -> Any:
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.to_local().device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _dtypes(module: nn.Module) -> dict[int, torch.dtype]:
    """Dtypes to which `fully_shard` casts parameters, by the id of the parameter."""
    found = {}
    for state in states(module).values():
        dtype = state._mp_policy.param_dtype
        for group in state._fsdp_param_groups if dtype else ():
            found.update({id(one.sharded_param): dtype for one in group.fsdp_params if one.sharded_param.is_floating_point()})
    return found


def _cast_around(submodule: nn.Module, policy: Any, stack: ExitStack) -> None:
    """Casts arguments and results of a module as `policy` says, until the stack is closed."""
    if policy.param_dtype and policy.cast_forward_inputs:
        submodule._forward_pre_hooks[_OURS] = _casts(policy.param_dtype)[0]
        submodule._forward_pre_hooks_with_kwargs[_OURS] = True
        stack.callback(submodule._forward_pre_hooks.pop, _OURS)
        stack.callback(submodule._forward_pre_hooks_with_kwargs.pop, _OURS)
    if policy.output_dtype:
        submodule._forward_hooks[_OURS] = _casts(policy.output_dtype)[1]
        stack.callback(submodule._forward_hooks.pop, _OURS)


@cache
def _casts(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Hooks that cast floats among arguments and results. Modules share the hooks, because layers with different hooks are not equal."""

    def cast(values: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, values)

    return lambda _, args, kwargs: (cast(args), cast(kwargs)), lambda _, args, result: cast(result)


def cast_parameters(program: ExportedProgram, module: nn.Module) -> None:
    """Restores the original dtypes of parameters that `fully_shard` casts. Casts each of these parameters before its first use."""
    dtypes, tensors = _dtypes(module), dict(module.named_parameters(remove_duplicate=False))
    by_name = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        tensor: Any = tensors.get(spec.target or "") if spec.kind is InputKind.PARAMETER else None
        node: Any = by_name.get(spec.arg.name)
        if tensor is None or dtypes.get(id(tensor), tensor.dtype) == tensor.dtype or not node.users:
            continue
        used = node.meta["val"]
        order = {user: number for number, user in enumerate(program.graph.nodes)}
        first = min(node.users, key=order.__getitem__)
        with program.graph.inserting_before(first):
            cast = program.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": used.dtype})
        cast.meta = {key: first.meta[key] for key in ("nn_module_stack", "stack_trace") if key in first.meta} | {"val": used}
        node.meta["val"] = used.to(tensor.dtype)
        node.replace_all_uses_with(cast, delete_user_cb=lambda user, own=cast: user is not own)
