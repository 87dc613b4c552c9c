"""Compiled modules."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from hostweave.api import Program
from hostweave.base.errors import ArgumentError
from hostweave.runtime.graphs import Captured
from hostweave.runtime.group import Group, init
from hostweave.runtime.group import current as current_group
from hostweave.runtime.providers import Threads
from hostweave.torch.bound import BoundProgram, on_stream
from hostweave.torch.caches import continued
from hostweave.torch.exported import Exported
from hostweave.torch.graph import Graph
from hostweave.torch.held import Folded, Held, overlap, span_of, tensor_of
from hostweave.torch.nodes import is_complex
from hostweave.torch.randomness import new_seeds
from hostweave.torch.state import State, is_same
from hostweave.torch.transforms import expect_eager
from hostweave.torch.updates import copied_to
from hostweave.torch.views import made_again

F = TypeVar("F", bound=Callable[..., Any])


def not_traced(call: F) -> F:
    """Makes torch.compile run a function eagerly."""
    why = "torch cannot trace a module that hostweave compiled; with fullgraph=True, register its program by hostweave.torch.as_torch_op"
    return torch.compiler.disable(call, reason=why)  # type: ignore[no-any-return, no-untyped-call]


class Delegating(nn.Module):
    """A module that shares all attributes of another module, such as parameters and state dict."""

    def __init__(self, module: nn.Module):
        super().__init__()
        vars(self).update(_module=module, _parameters=module._parameters, _buffers=module._buffers, _modules=module._modules)

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("_module")
        return getattr(module, name) if module is not None else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets public attributes of the wrapped module there, where `forward` reads them. Sets all other attributes on this object."""
        module = vars(self).get("_module")
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        setattr(module, name, value) if not is_own and hasattr(module, name) else super().__setattr__(name, value)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ArgumentError(f"{self!r} cannot be copied or pickled; copy or save the original module, and compile it after loading")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__deepcopy__(protocol)

    @property
    def training(self) -> bool:
        """True if the module is in training mode. Calls of a CompiledModule raise ArgumentError if the mode has changed."""
        return self._module.training  # type: ignore[no-any-return]

    @training.setter
    def training(self, mode: bool) -> None:
        if "_module" in vars(self):
            self._module.training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the state into the original module, whose tensors the program reads in each call."""
        return self._module.load_state_dict(*args, **kwargs)


class CompiledModule(Delegating):
    """A compiled module, returned by `hostweave.torch.compile`.

    A call has the arguments and results of the original module. Parameters, buffers, state dict and other attributes are shared with the
    original module.

    In a process or thread that is a rank of a group (`hw.init`), a call runs that rank. Sharded arguments are then local blocks, and other
    arguments are replicated. Without a group, all ranks run in this process on global tensors. Parameters are read in place, or copied
    before each call, so calls see the writes of optimizers and of `load_state_dict`.
    """

    alone_on: torch.device | None = None  # device of a program of one rank that does not use this process's group
    generation: Any = None  # programs of `generate`, for a module of transformers

    def __init__(self, module: nn.Module, exported: Exported, graph: Graph, bound: BoundProgram, *others: BoundProgram):
        """A call runs `bound`. `graph` is the exported graph, without gradients. `others` has the backward program of a TrainingModule, or
        the accumulating program that a TrainingStep may have."""
        super().__init__(module)
        self._graph, self._specs, self._bound, self._ranges = graph, exported.program.call_spec, bound, exported.program.range_constraints
        self._varying = self._sizes()
        self._written_names = {graph.names[node] for node in graph.written}
        self._apart: dict[str, tuple[int, int]] = {}  # addresses of the arguments of the last call, if the program writes to a tensor
        owned = {node: origin for node in {*graph.of_module, *graph.shared.values()} if (origin := graph.origins.get(node))}
        of_module = {node: origin.name for node, origin in owned.items() if origin.kind in ("parameter", "buffer")}
        self._owned = {node: origin.value for node, origin in owned.items() if origin.kind == "constant"}
        self._owned |= {node: tensor_of(module, name) for node, name in of_module.items()}
        self._held_tensors = Held(module, dict.fromkeys((*graph.parameters.values(), *of_module.values())))
        self._how, self._state = exported.how, State(module, exported.reads, exported.grad_mode)
        self._folded = Folded(module, graph, [one.graph for one in (bound, *others)])

    @property
    def program(self) -> Program:
        """The compiled program, with its source and `check`."""
        return self._bound.program

    @property
    def checks_values(self) -> bool:
        """True if the module checks values on the host after each call, as torch.linalg.inv does. Such calls cannot be captured."""
        return bool(self._graph.checks)

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        """Generates sequences like `generate` of transformers, with the same arguments. The programs use a static cache.

        One program processes prompts, and another computes the next token of each sequence. Both programs are compiled on first use, for
        each number of sequences and each cache length (by default a multiple of 64). In a group, all ranks call `generate` with the same
        prompts, and with the same seed if tokens are sampled. Raises ArgumentError if the module has no `generate`, or if a static cache is
        impossible.

        Example: `model.generate(input_ids, attention_mask=mask, max_new_tokens=64, do_sample=False)`.
        """
        if self.generation is None:
            raise self._refused("generate: the module has no generate; pass a transformers model with a language modeling head")
        return self.generation.generate(inputs, **kwargs)

    def __repr__(self) -> str:
        return f"<hostweave.torch.{type(self).__name__} of {type(self._module).__name__}: {self.program!r}>"

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ArgumentError if arguments or the module differ from compile time, or if gradients are needed that were not compiled."""
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the module's results, without hooks."""
        leaves, group = self._checked(args, kwargs), self._group()
        arrays = {name: leaf.detach() for name, leaf in leaves.items()}
        written = self._written(arrays, group)
        made = self._finished(self._bound.for_call(arrays, group)({**arrays, **written}, group), written, leaves)
        continued((args, kwargs), made)
        return made

    def capture(self, *args: Any, **kwargs: Any) -> Captured:
        """Captures a call with these arguments as a CUDA graph, as `Program.capture` does. Returns a callable that launches the graph and
        returns the module's results.

        Use `copy_` to write new arguments. Launches see writes to parameters, but not new tensors that replace parameters. Each launch
        draws new random numbers.

        Raises the errors of a call and of `Program.capture`. Raises ArgumentError without a group, or if `checks_values` is true.

        Example: `step = model.capture(x)`, then `x.copy_(new)` and `y = step()`.
        """
        leaves, group = self._checked(args, kwargs), self._group()
        arrays = {name: leaf.detach() for name, leaf in leaves.items()}
        if group is None:
            why = "without a group all ranks run in this process on copies, and such a call cannot be captured"
            raise self._refused(f"capture: {why}; call hw.init on each rank, in a separate process or thread")
        if self.checks_values:
            why = "the module checks values on the host after each call, as torch.linalg.inv does"
            raise self._refused(f"capture: {why}; use functions without such checks, such as inv_ex")
        written = self._written(arrays, group)
        call, copies = self._bound.for_call(arrays, group).capture({**arrays, **written}, group)
        returned = self._finished(self._bound.values(call.outputs), written, leaves)

        def launch(stream: Any) -> None:
            copies.renew(stream)
            if self._graph.seeds is not None:  # each launch draws new random numbers
                seeds = arrays[self._graph.names[self._graph.seeds]]
                with on_stream(stream, seeds):
                    seeds.copy_(new_seeds(self._name, len(seeds), group))
            call.launch(stream)

        return Captured(launch, arrays, lambda: returned)

    def _group(self) -> Group | None:
        """Group of a call, or None if the call runs all ranks."""
        return current_group() if self.alone_on is None else alone(self.alone_on)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        arrays = self._arrays(args, kwargs)
        tensors = [*self._held_tensors.tensors, *arrays.values()]
        expect_eager(self._name, tensors)
        self._expect_no_gradients(tensors)
        self._expect_unchanged()
        self._expect_apart(arrays)
        return arrays

    def _expect_no_gradients(self, tensors: Iterable[torch.Tensor]) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            remedy = "call it in torch.no_grad() or torch.inference_mode(), or compile it with training=True"
            raise self._refused(f"this is a forward program, without gradients; {remedy}")

    @property
    def traced(self) -> Mapping[str, str]:
        """How the modules of a list, such as nn.ModuleList, were traced. Maps a path to "traced" or to text such as "as layers.0".
        Omits lists in lists.

        "as layers.0" means that the module uses the trace of the equal module `layers.0`. The text may have the reason for a separate
        trace, such as `traced: its attention.scale differs from layers.0`.
        """
        return self._how

    @property
    def _name(self) -> str:
        return type(self._module).__name__

    def _refused(self, why: str) -> ArgumentError:
        return ArgumentError(f"{self._name}: {why}")

    def takes(self, **kwargs: Any) -> bool:
        """True if the module was compiled for these arguments. Sizes of tensors that the program writes need not match."""
        try:
            given = self._passed((), kwargs)
        except ArgumentError:
            return False
        sizes: dict[Any, int] = {}
        for node, leaf in given.items():
            held = node.meta["val"]
            if (leaf.dtype, leaf.ndim) != (held.dtype, held.ndim):
                return False
            for size, own in zip(leaf.shape, held.shape, strict=True) if node not in self._graph.written else ():
                if size != (own if isinstance(own, int) else sizes.setdefault(own.node.expr, size)):
                    return False
        return True

    def _sizes(self) -> dict[Node, list[tuple[int, range]]]:
        """Maps each argument to its dims of varying size, with supported sizes. Omits sharded dims: in a group, arguments are blocks."""
        found: dict[Node, list[tuple[int, range]]] = {}
        for node in self._graph.arguments:
            held, axes = node.meta["val"], self._graph.layouts.inputs.get(self._graph.names.get(node, ""), ())
            for dim, size in enumerate(held.shape if isinstance(held, torch.Tensor) else ()):
                if not isinstance(size, int) and not (axes and axes[dim]):
                    found.setdefault(node, []).append((dim, self._range(size)))
        return found

    def _range(self, size: Any) -> range:
        of = self._ranges.get(size.node.expr)
        return range(int(of.lower), int(min(of.upper, 2**62)) + 1) if of is not None else range(2**62)

    def cut(self, kwargs: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Keyword arguments of a call, in which copies of one rank's blocks replace the tensors that the program writes."""
        leaves, spec = pytree.tree_flatten(((), {key: kwargs[key] for key in _keywords(self._specs.in_spec)}))
        types, names = self._bound.graph.input_types, self._graph.names
        blocks: list[Any] = [
            types[names[node]].shard(leaf, rank, self._graph.mesh) if node in self._graph.written else leaf
            for node, leaf in zip(self._graph.arguments, leaves, strict=True)
        ]
        owned = [block.contiguous().clone() if block is not leaf else leaf for block, leaf in zip(blocks, leaves, strict=True)]
        return pytree.tree_unflatten(owned, spec)[1]  # type: ignore[no-any-return]

    def _written(self, arrays: Mapping[str, torch.Tensor], group: Group | None) -> dict[str, torch.Tensor]:
        """Maps names to the arguments and buffers that the program writes to: local tensors in a group, otherwise global tensors."""
        found = {}
        for node in self._graph.written:
            name = self._graph.names[node]
            if name in arrays:
                found[name] = arrays[name]
                continue
            tensor: Any = tensor_of(self._module, self._graph.parameters[name]).detach()
            is_whole = not isinstance(tensor, DTensor)
            if group and is_whole and any(dim.axes for dim in self._graph.input_types[name].dims):
                why = f"{self._graph.parameters[name]} is written in forward, and each rank has all of it, but the plan shards it"
                raise self._refused(f"{why}; make it a DTensor, or omit it from the plan")
            found[name] = tensor if is_whole else tensor.to_local() if group else tensor.full_tensor()
        return found

    def _finished(self, values: list[Any], written: Mapping[str, torch.Tensor], leaves: Mapping[str, torch.Tensor]) -> Any:
        """Builds the module's results, and increments the versions of written tensors. `leaves` has the arguments of the call."""
        made: dict[Node, Any] = {node: leaves[name] for node, name in self._graph.names.items() if name in leaves}
        constants = self._graph.constants
        pairs = zip(self._bound.graph.returned, values, strict=True)
        made |= {node: value for node, value in pairs if isinstance(node, Node) and node not in constants}
        for node, value in self._graph.written.items():
            name = self._graph.names[node]
            if value in constants:
                written[name].copy_(constants[value])
            increment_version(written[name])
            made[value] = leaves.get(name, written[name])
        self._expect_valid(made)
        return self._returned(made)

    def _expect_valid(self, known: Mapping[Node, Any]) -> None:
        """Waits for the checked values of a call, checks them on the host, and raises torch's errors for invalid values."""
        for check in self._graph.checks:
            given: Any = check.args
            condition = known.get(given[2], self._graph.constants.get(given[2]))
            given[1](condition, *given[3:], **check.kwargs)

    def _returned(self, known: dict[Node, Any]) -> Any:
        """Builds the module's result. Copies constants that the module does not own, because the caller may write to the result."""
        constants = self._graph.constants

        def value(node: Any) -> Any:
            if is_complex(node):
                return torch.complex(*map(value, node.args))
            if not isinstance(node, Node):
                return node
            if node not in known:
                if node in self._owned:
                    known[node] = self._owned[node]
                elif self._graph.shared.get(node, node) is node and node in constants:
                    known[node] = constants[node].clone() if isinstance(constants[node], torch.Tensor) else constants[node]
                else:
                    known[node] = made_again(node, value)
            return known[node]

        leaves = list(map(value, self._graph.of_module))
        return pytree.tree_unflatten(leaves, self._specs.out_spec)

    def _expect_unchanged(self) -> None:
        for held in (self._held_tensors, self._folded, self._state):
            if changed := held.changed():
                raise self._refused(changed)

    def _arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Maps inputs of the program to arguments of a call and new seeds."""
        arrays = {self._graph.names[node]: leaf for node, leaf in self._passed(args, kwargs).items()}
        if self._graph.seeds is not None:
            seeds = new_seeds(self._name, int(self._graph.seeds.meta["val"].numel()), self._group())
            arrays[self._graph.names[self._graph.seeds]] = copied_to(self._device, seeds)
        return arrays

    def _expect_apart(self, arrays: Mapping[str, torch.Tensor]) -> None:
        """Refuses an argument that shares memory with another tensor of the call, if the program writes to one of the two."""
        written = self._written_names
        spans = {name: span_of(tensor) for name, tensor in arrays.items()} if written else {}
        if spans == self._apart:
            return
        parameters = self._graph.parameters.items()
        is_needed = not written.isdisjoint(arrays)  # otherwise, only written buffers can share memory with arguments
        tensors = {**arrays, **{name: tensor_of(self._module, path) for name, path in parameters if is_needed or name in written}}
        last: dict[bool, tuple[int, str]] = {}  # is the tensor written -> largest end so far, and name
        for begin, end, name in sorted((*span_of(tensor), name) for name, tensor in tensors.items()):
            for other_end, other in (last[is_written] for is_written in last if is_written or name in written):
                if begin < min(end, other_end) and overlap(tensors[name], tensors[other]):
                    why = f"{name} shares memory with {other}, and forward writes to one of the two"
                    raise self._refused(f"{why}; pass a clone()")
            last[name in written] = max(last.get(name in written, (0, "")), (end, name))
        self._apart = spans

    def _passed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Node, torch.Tensor]:
        spec = self._specs.in_spec
        wanted = _keywords(spec)
        if sorted(wanted) != sorted(kwargs):
            raise self._refused(f"the keyword arguments are {list(kwargs)}, and were {wanted} at compile time; pass the same arguments")
        leaves, given = pytree.tree_flatten((args, {key: kwargs[key] for key in wanted}))
        if given != spec:
            raise self._refused("the arguments differ in structure from example_inputs; pass the same number and nesting")
        passed = {}
        for node, leaf in zip(self._graph.arguments, leaves, strict=True):
            if node in self._graph.names:
                if not isinstance(leaf, torch.Tensor):
                    raise self._refused(f"{node.name} is {leaf!r}, and was a tensor at compile time; pass a tensor")
                passed[node] = leaf
                for dim, sizes in self._varying.get(node, ()):
                    if leaf.ndim > dim and leaf.shape[dim] not in sizes:
                        bounds = f"{sizes.start} to {sizes.stop - 1}" if sizes.stop < 2**62 else f"{sizes.start} or more"
                        why = f"{node.name} has {leaf.shape[dim]} elements along dim {dim}, and was compiled for {bounds}"
                        raise self._refused(f"{why}; compile it for that size, too")
            elif not is_same(leaf, was := self._graph.constants.get(node)):
                raise self._refused(f"{node.name} is {leaf!r}, and was {was!r} at compile time; compile it again")
        return passed

    @property
    def _device(self) -> torch.device:
        return next((tensor.device for tensor in self._held_tensors.tensors), torch.device("cpu"))


def alone(device: torch.device) -> Group:
    """Group with this thread as its only rank."""
    name = f"alone on {device}"
    return current_group(name) or init(Threads(1), name, device=device.index)


def _keywords(spec: Any) -> list[str]:
    return list(spec.child(1).context) if hasattr(spec, "child") else list(spec.children_specs[1].context)
