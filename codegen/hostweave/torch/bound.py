"""Programs of a module, with the module's tensors bound to the programs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import Node

from hostweave.api import Program
from hostweave.base.errors import SizeError
from hostweave.runtime.arrays import library_of
from hostweave.runtime.graphs import Captured
from hostweave.runtime.group import Group
from hostweave.runtime.group import current as current_group
from hostweave.targets.cuda import handle_of
from hostweave.torch.graph import Graph
from hostweave.torch.held import block_of, tensor_of
from hostweave.torch.ranges import Ranges


class Copies:
    """Copies of tensors that a program cannot read in place."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], block: Callable[[str, torch.Tensor], torch.Tensor]):
        self._tensors, self._block = tensors, block
        with torch.inference_mode(False):  # calls outside inference mode cannot write to inference tensors
            self.blocks = {name: block(name, tensor).contiguous().clone() for name, tensor in tensors.items()}

    def renew(self, stream: Any = None) -> None:
        """Updates all copies. Called before every call and launch, because torch's version counter misses some writes. `stream`: see
        `on_stream`."""
        for name, tensor in self._tensors.items():
            with on_stream(stream, tensor):
                self.blocks[name].copy_(self._block(name, tensor))


def on_stream(stream: Any, tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Context in which `stream`, if given, is the current stream."""
    if stream is None or tensor.device.type == "cpu":
        return nullcontext()
    try:
        return library_of(tensor).on_stream(handle_of(stream), tensor.device.index)
    except TypeError:  # not a stream; the launch of the graph then raises the error
        return nullcontext()


class BoundProgram:
    """A program with the module's tensors bound. A call passes all other inputs by name.

    `numbers` maps inputs of the program to indices of arguments of the joint graph of forward and backward.

    A block of columns is not contiguous, so a program cannot read it in place. If each rank of a group has the whole tensor, the program
    reads the whole tensor and slices it.
    """

    def __init__(self, graph: Graph, module: nn.Module, compile: Callable[[Graph], Program], numbers: Mapping[str, int] | None = None):
        self._module, self._compile, self._numbers, self._lock = module, compile, numbers or {}, threading.Lock()
        self.tensors = {name: tensor_of(module, of) for name, of in graph.parameters.items() if name not in graph.donated}
        self.graph = graph.taking_whole(self._columns(graph)) if current_group() else graph
        self.program = compile(self.graph)
        self._bound: dict[int | None, tuple[Program, Copies]] = {}  # by rank in the group; None without a group
        self.ranges: Ranges | None = None  # programs for further sizes, if sizes are unknown at compile time

    def for_call(self, arrays: Mapping[str, torch.Tensor], group: Group | None) -> BoundProgram:
        """This program, or a program that is compiled for the sizes of the call."""
        return (self.ranges and self.ranges.program_for(arrays, group)) or self

    def __call__(self, arrays: Mapping[str, torch.Tensor], group: Group | None) -> list[Any]:
        """Runs the program. Returns the values of the graph: this rank's blocks in a group, otherwise global tensors."""
        rank = group.rank if group else None
        program, copies = self._bound.get(rank) or self._bind(rank)
        copies.renew()
        given: dict[str, Any] = {**arrays, **({} if group else copies.blocks)}
        try:
            return self.values(program(**given, group=group) if group else program.run(**given))
        except SizeError as error:
            remedy = "compile once for each size" if self._numbers else "compile for sizes that change, with dynamic_shapes="
            raise SizeError(f"{error}; or {remedy}") from None

    def values(self, made: Any) -> list[Any]:
        """Values that the graph returns: results of the program, constants, and values such as None."""
        known, results = self.graph.constants, iter(made if isinstance(made, tuple) else (made,))

        def value(node: Any) -> Any:  # in order, not by node, because a node may be returned twice, with different shardings
            if not isinstance(node, Node):
                return node
            return known[node] if node in known else next(results)

        return list(map(value, self.graph.returned))

    def capture(self, arrays: Mapping[str, Any], group: Group) -> tuple[Captured, Copies]:
        """Captures a call as a CUDA graph. Also returns the copies that the graph reads."""
        program, copies = self._bound.get(group.rank) or self._bind(group.rank)
        copies.renew()
        return program.capture(**arrays, group=group), copies

    def taken(self, given: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Inputs of this program by name, from the arguments of the joint graph."""
        return {name: given[number].detach() for name, number in self._numbers.items()}

    def _bind(self, rank: int | None) -> tuple[Program, Copies]:
        """Binds the tensors that the program reads in place and, in a group, copies of other tensors. Returns program and copies."""
        with self._lock:  # ranks may be threads
            if rank is not None and (whole := self._columns(self.graph)):
                self.graph = self.graph.taking_whole(whole, [output.type for output in self.program.host.results])
                self.program = self._compile(self.graph)
        ready, others = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, held in {**self.tensors, **self.graph.bound}.items():
            block = self._block(name, held, rank)
            if self._lies_ready(name, held, block, rank):
                ready[name] = block
            else:
                others[name] = held
        copies = Copies(others, lambda name, held: self._block(name, held, rank))
        self._bound[rank] = self.program.bind(**ready, **({} if rank is None else copies.blocks)), copies
        return self._bound[rank]

    def _block(self, name: str, held: torch.Tensor, rank: int | None) -> torch.Tensor:
        return block_of(held, rank, self.graph.input_types[name], self.graph.mesh)  # type: ignore[no-any-return]

    def _columns(self, graph: Graph) -> list[str]:
        """Names of contiguous whole tensors whose blocks are not contiguous."""
        ranks, types, found = range(graph.mesh.size), graph.input_types, []
        for name, tensor in self.tensors.items():
            held: Any = tensor.detach()
            if not isinstance(held, DTensor) and held.is_contiguous():
                blocks: list[Any] = [types[name].shard(held, rank, graph.mesh) for rank in ranks]
                found += [] if all(block.is_contiguous() for block in blocks) else [name]
        return found

    def _lies_ready(self, name: str, held: torch.Tensor, block: torch.Tensor, rank: int | None) -> bool:
        """True if the program can read the tensor in place, and so sees later writes."""
        if not block.is_contiguous() or (rank is None and isinstance(held, DTensor)):
            return False
        ranks = range(self.graph.mesh.size) if rank is None else ()
        return all(self._block(name, block, other).is_contiguous() for other in ranks)
