"""Detects most changes that a compiled program does not see, such as a new tensor in place of a parameter."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hostweave.torch.graph import Graph
from hostweave.torch.plan import tensors_of
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import TensorType


class Held:
    """Tensors of a module that a program reads. The program sees writes to these tensors, but not new tensors in their place."""

    def __init__(self, module: nn.Module, paths: Iterable[str]):
        found = {path: slot_of(module, path) for path in paths}
        held = {id(tensor) for *_, tensor in found.values()}
        found |= {path: slot_of(module, path) for path, tensor in tensors_of(module) if id(tensor) in held}  # also names of tied tensors
        self._slots = [(path, *slot) for path, slot in found.items()]
        self.tensors = [tensor for *_, tensor in self._slots]
        self._memory = list(map(memory_of, self.tensors))

    def changed(self) -> str:
        remedy = "compile again, or use copy_ on the original tensor"
        for (path, tensors, key, tensor), memory in zip(self._slots, self._memory, strict=True):
            if tensors.get(key) is not tensor:
                return f"{path} was replaced after compilation; {remedy}"
            if memory_of(tensor) != memory:
                return f"{path} was moved in memory after compilation, as by .to() or a write to .data; {remedy}"
        return ""


class Folded:
    """Tensors from which values in the program were computed at compile time. Writes to inference tensors, and writes to the memory of
    `.data`, may not be noticed, because such writes change no version counter."""

    def __init__(self, module: nn.Module, outer: Graph, graphs: Iterable[Graph]):
        """`outer` is the exported graph of the module. The tensors of `graphs` are those of `outer`, and values computed from them."""
        known = {origin.name: origin.value for origin in outer.origins.values() if isinstance(origin.value, torch.Tensor)}
        names = sorted(known.keys() & {name for of in (outer, *graphs) for name in of.folded})
        self._slots = [_slot_or_constant(module, name, known) for name in names]
        self._copies = [tensor.detach().clone() for *_, tensor in self._slots]
        self._versions = self._now()

    def changed(self) -> str:
        changed = [name for name, held, key, tensor in self._slots if held.get(key) is not tensor]
        if not changed and (now := self._now()) != self._versions:
            changed = [name for (name, *_, tensor), copy in zip(self._slots, self._copies, strict=True) if not torch.equal(tensor, copy)]
            self._versions = now if not changed else self._versions
        why = "has changed, but the program holds values that were computed from it at compile time; compile it again"
        return f"{changed[0]} {why}" if changed else ""

    def _now(self) -> list[tuple[int, int]]:
        return [(0 if tensor.is_inference() else tensor._version, memory_of(tensor)[0]) for *_, tensor in self._slots]


def tensor_of(module: nn.Module, path: str) -> torch.Tensor:
    parent, _, key = path.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(parent), key)
    return tensor


def slot_of(module: nn.Module, path: str) -> tuple[Mapping[str, Any], str, torch.Tensor]:
    """The dict that has a tensor, the key, and the tensor. Reading the dict is faster than getattr."""
    parent, _, key = path.rpartition(".")
    owner, tensor = module.get_submodule(parent), tensor_of(module, path)
    held = next(one for one in (owner._parameters, owner._buffers, vars(owner)) if one.get(key) is tensor)
    return held, key, tensor


def memory_of(tensor: Any) -> tuple[int, torch.dtype]:
    """Address and dtype of a tensor, or of this rank's part of a DTensor."""
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return own.data_ptr(), own.dtype


def span_of(tensor: Any) -> tuple[int, int]:
    """Addresses of the first byte of a tensor, or of this rank's part of a DTensor, and of the byte after its last one."""
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    elements = 1 + sum((size - 1) * step for size, step in zip(own.shape, own.stride(), strict=True)) if own.numel() else 0
    return own.data_ptr(), own.data_ptr() + elements * own.itemsize


def overlap(tensor: Any, other: Any) -> bool:
    """True if tensors whose spans overlap have an element in common. Two columns of a matrix, for example, have none."""
    if tensor.is_contiguous() and other.is_contiguous():
        return True
    one, two = (torch.arange(*span_of(of), of.itemsize).as_strided(of.shape, of.stride()).flatten() for of in (tensor, other))
    return bool(torch.isin(one, two).any())


def block_of(tensor: Any, rank: int | None, type: TensorType, mesh: Mesh) -> Any:
    """Block of a tensor that a rank holds, or the whole tensor if `rank` is None."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.full_tensor() if rank is None else tensor.to_local()
    return tensor if rank is None else type.shard(tensor, rank, mesh)


def placed_like(parameter: Any, block: Any) -> Any:
    """Makes a rank's block a DTensor if the parameter is one, with the parameter's layout."""
    if not isinstance(parameter, DTensor) or block is None:
        return block
    layout, shape, stride = (parameter.device_mesh, parameter.placements), parameter.shape, parameter.stride()
    return DTensor.from_local(block, *layout, run_check=False, shape=shape, stride=stride)


def _slot_or_constant(module: nn.Module, path: str, known: Mapping[str, torch.Tensor]) -> tuple[str, Mapping[str, Any], str, torch.Tensor]:
    """Description and slot of a module's tensor, or of a tensor in `known` that is no attribute of a module, such as a global."""
    try:
        return path, *slot_of(module, path)
    except AttributeError:
        return f"a tensor of {list(known[path].shape)} that forward reads", known, path, known[path]
