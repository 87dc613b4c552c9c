"""A compiled module. It is called like the original one, and reads the tensors of that module in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from hostweave.api import Program
from hostweave.base.errors import ArgumentError, SizeError
from hostweave.runtime.arrays import library_of
from hostweave.runtime.graphs import Captured
from hostweave.runtime.group import Group, init
from hostweave.runtime.group import current as current_group
from hostweave.runtime.providers import Threads
from hostweave.targets.cuda import handle_of
from hostweave.torch.caches import continued
from hostweave.torch.graph import Graph, is_complex
from hostweave.torch.randomness import new_seeds
from hostweave.torch.ranges import Ranges
from hostweave.torch.state import State

F = TypeVar("F", bound=Callable[..., Any])


def not_traced(call: F) -> F:
    """Excludes a function from torch.compile, which then runs it eagerly."""
    why = "torch cannot trace a module that hostweave compiled; for fullgraph=True make its program an op by hostweave.torch.as_torch_op"
    return torch.compiler.disable(call, reason=why)  # type: ignore[no-any-return, no-untyped-call]


class Copies:
    """Copies of those tensors, by name, that a program cannot read in place because of their layout."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], block: Callable[[str, torch.Tensor], torch.Tensor]):
        self._tensors, self._block = tensors, block
        self.blocks = {name: block(name, tensor).contiguous().clone() for name, tensor in tensors.items()}

    def renew(self, stream: Any = None) -> None:
        """Updates all copies. torch's version counter misses some writes, so this runs before every call. Before the launch of a graph it
        runs on the launch's stream."""
        for name, tensor in self._tensors.items():
            with _on(stream, tensor):
                self.blocks[name].copy_(self._block(name, tensor))


def _on(stream: Any, tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the stream of a launch the current stream, if one is given."""
    if stream is None or tensor.device.type == "cpu":
        return nullcontext()
    try:
        return library_of(tensor).on_stream(handle_of(stream), tensor.device.index)
    except TypeError:  # not a stream, which the launch reports
        return nullcontext()


class ProgramPart:
    """A program, and the module's tensors that it reads. It is called with all other inputs, by name.

    `numbers` maps inputs of the program to arguments of the joint graph of forward and backward pass. A block of columns of a whole tensor
    is not contiguous, so it cannot be read in place. If ranks of a group have such a tensor whole, the program takes the whole tensor.
    """

    def __init__(self, graph: Graph, module: nn.Module, compile: Callable[[Graph], Program], numbers: Mapping[str, int] | None = None):
        self._module, self._compile, self._numbers, self._lock = module, compile, numbers or {}, threading.Lock()
        self.tensors = {name: tensor_of(module, of) for name, of in graph.parameters.items() if name not in graph.donated}
        self.graph = graph.taking_whole(self._columns(graph)) if current_group() else graph
        self.program = compile(self.graph)
        self._bound: dict[int | None, tuple[Program, Copies]] = {}  # keyed by the rank in the group; None if all ranks are in this process
        self.ranges: Ranges[ProgramPart] | None = None  # further parts, if sizes are known only when the program runs

    def for_call(self, arrays: Mapping[str, torch.Tensor], group: Group | None) -> ProgramPart:
        """Returns the part that computes a call. It may have been compiled for the range of sizes that the call is in."""
        return (self.ranges and self.ranges.part(arrays, group)) or self

    def __call__(self, arrays: Mapping[str, torch.Tensor], group: Group | None) -> list[Any]:
        """Returns the values of the graph. In a group they are blocks of this rank, otherwise global tensors that this process computes."""
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

        def value(node: Any) -> Any:  # results are taken in order, not by node: a node may be returned twice, with different shardings
            if not isinstance(node, Node):
                return node
            return known[node] if node in known else next(results)

        return list(map(value, self.graph.returned))

    def capture(self, arrays: Mapping[str, torch.Tensor], group: Group) -> tuple[Captured, Copies]:
        """Captures a call of this rank as a graph. Also returns the copies that the graph reads."""
        program, copies = self._bound.get(group.rank) or self._bind(group.rank)
        copies.renew()
        given: dict[str, Any] = {**arrays}
        return program.capture(**given, group=group), copies

    def taken(self, given: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Selects the inputs of this program from the arguments of the joint graph. Returns them by name."""
        return {name: given[number].detach() for name, number in self._numbers.items()}

    def _bind(self, rank: int | None) -> tuple[Program, Copies]:
        """Binds the tensors that the program can read in place. Also returns copies of the others: blocks of a rank, or global tensors."""
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
        tensor: Any = held.detach()
        if isinstance(tensor, DTensor):
            return tensor.full_tensor() if rank is None else tensor.to_local()
        block: Any = tensor if rank is None else self.graph.input_types[name].shard(tensor, rank, self.graph.mesh)
        return block  # type: ignore[no-any-return]

    def _columns(self, graph: Graph) -> list[str]:
        """Names of tensors that each rank has whole, and whose blocks are not contiguous."""
        ranks, types, found = range(graph.mesh.size), graph.input_types, []
        for name, tensor in self.tensors.items():
            held: Any = tensor.detach()
            if not isinstance(held, DTensor) and held.is_contiguous():
                blocks: list[Any] = [types[name].shard(held, rank, graph.mesh) for rank in ranks]
                found += [] if all(block.is_contiguous() for block in blocks) else [name]
        return found

    def _lies_ready(self, name: str, held: torch.Tensor, block: torch.Tensor, rank: int | None) -> bool:
        """True if the program can read the tensor's own memory, and therefore sees later writes."""
        if not block.is_contiguous() or (rank is None and isinstance(held, DTensor)):
            return False
        ranks = range(self.graph.mesh.size) if rank is None else ()
        return all(self._block(name, block, other).is_contiguous() for other in ranks)


class Folded:
    """Tensors of a module that a program does not read, because it has values that were computed from them at compile time."""

    def __init__(self, module: nn.Module, names: Iterable[str]):
        self._places = [(name, *place_of(module, name)) for name in sorted(names) if _is_tensor(module, name)]
        self._copies = [tensor.detach().clone() for *_, tensor in self._places]
        self._versions = self._now()

    def changed(self) -> str:
        """Name of a tensor whose values have changed since compile time, or ""."""
        for name, held, key, tensor in self._places:
            if held.get(key) is not tensor:
                return name
        if (now := self._now()) != self._versions:
            for (name, *_, tensor), copy in zip(self._places, self._copies, strict=True):
                if not torch.equal(tensor, copy):
                    return name
            self._versions = now
        return ""

    def _now(self) -> list[int]:
        return [tensor._version for *_, tensor in self._places if not tensor.is_inference()]


class Delegating(nn.Module):
    """A module that shares the parameters, buffers, submodules, state dict, mode and other attributes of another module."""

    def __init__(self, module: nn.Module):
        super().__init__()
        vars(self).update(_module=module, _parameters=module._parameters, _buffers=module._buffers, _modules=module._modules)

    def __getattr__(self, name: str) -> Any:
        module = vars(self).get("_module")
        return getattr(module, name) if module is not None else super().__getattr__(name)

    @property
    def training(self) -> bool:
        """Mode of the module. A CompiledModule raises if its mode differs from that at compile time."""
        return self._module.training  # type: ignore[no-any-return]

    @training.setter
    def training(self, mode: bool) -> None:
        if "_module" in vars(self):
            self._module.training = mode

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """State dict of the wrapped module."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Loads the state into the wrapped module, whose tensors the program reads in place."""
        return self._module.load_state_dict(*args, **kwargs)


class CompiledModule(Delegating):
    """A compiled module. `hostweave.torch.compile` returns it. It has the arguments and results of the original module.

    It also has the parameters, buffers, submodules, state dict and other attributes of the original module.

    In a process or thread that has joined a group (`hw.init`), a call runs this rank. Arguments that the plan shards are then local blocks,
    and others are replicated. Without a group, all ranks run in this process on global tensors. Parameters are read in place, so calls see
    the writes of optimizers and of `load_state_dict`. `program` is the compiled hw.Program, with its source and `check`.
    """

    def __init__(self, module: nn.Module, exported: ExportedProgram, graph: Graph, part: ProgramPart, *others: ProgramPart):
        """A call runs `part`. In training, `graph` is the joint graph of forward and backward pass, and `others` are the programs of the
        backward pass or of accumulation."""
        super().__init__(module)
        self._graph, self._specs, self._part, self._ranges = graph, exported.call_spec, part, exported.range_constraints
        self._varying = self._sizes()
        self.alone_on: torch.device | None = None  # device of a program of one rank, which ignores the group of this process
        self.generation: Any = None  # programs of `generate`, for a module of transformers
        self._places = [place_of(module, of) for of in graph.parameters.values()]
        self._memory = [memory_of(tensor) for *_, tensor in self._places]
        self._parts = [(of._modules, name, held) for of in module.modules() for name, held in of._modules.items()]
        self._training, self._state, self._autocast = module.training, State(module, graph.reads), _autocast()
        self._folded = Folded(module, {name for of in (graph, part.graph, *(one.graph for one in others)) for name in of.folded})

    @property
    def program(self) -> Program:
        """The compiled program, with its source and `check`."""
        return self._part.program

    @property
    def checks_values(self) -> bool:
        """True if the module checks values on the host after each call, as torch.linalg.inv does. A call cannot be captured then."""
        return bool(self._graph.checks)

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        """Generates sequences like `generate` of transformers, with the same arguments. The programs use a static cache.

        One program processes prompts, and another one computes the next token of each sequence. They are compiled on first use, for each
        number of sequences and for each cache length, rounded up to a multiple of 64. In a group, all ranks call it with the same prompts,
        and with the same seed if tokens are sampled. Raises ArgumentError if the module has no `generate`, or if a cache of another kind is
        given.

        Example: `model.generate(input_ids, attention_mask=mask, max_new_tokens=64, do_sample=False)`.
        """
        if self.generation is None:
            raise ArgumentError(
                f"{self._name}: generate: the module has no generate; pass a transformers model with a language modeling head"
            )
        return self.generation.generate(inputs, **kwargs)

    def __repr__(self) -> str:
        return f"<hostweave.torch.{type(self).__name__} of {type(self._module).__name__}: {self.program!r}>"

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with these arguments. Raises ArgumentError if it was compiled for different ones."""
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the module's results. Prefer to call the module itself, which also runs hooks."""
        arrays, group = self._checked(args, kwargs), self._group()
        written = self._written(arrays, group)
        made = self._finished(self._part.for_call(arrays, group)({**arrays, **written}, group), written)
        continued((args, kwargs), made)
        return made

    def capture(self, *args: Any, **kwargs: Any) -> Captured:
        """Captures a call with these arguments as a CUDA graph. Returns a callable that launches the graph, and returns the module's
        results.

        Capturing is collective, and so is each launch. `capture` makes the call once. A launch reads the current contents of the same
        argument tensors and writes the same result tensors. Use `copy_` to write new arguments. Launches see writes to parameters, but not
        the replacement of a parameter by another tensor. Each launch draws new random numbers. Raises the errors of a call and of
        `Program.capture`, and ArgumentError if no group was joined.

        Example: `step = model.capture(x)`, then `x.copy_(new)` and `y = step()`.
        """
        arrays, group = self._checked(args, kwargs), self._group()
        if group is None:
            why = "without a group all ranks run in this process on copies of the arguments, which cannot be captured"
            raise ArgumentError(f"{self._name}: capture: {why}; call hw.init on each rank, in a separate process or thread")
        if self.checks_values:
            why = "the module checks values on the host after each call, as torch.linalg.inv does"
            raise ArgumentError(f"{self._name}: capture: {why}; use functions without such checks, such as inv_ex")
        written = self._written(arrays, group)
        call, copies = self._part.for_call(arrays, group).capture({**arrays, **written}, group)
        returned = self._finished(self._part.values(call.outputs), written)

        def launch(stream: Any) -> None:
            copies.renew(stream)
            if self._graph.seeds is not None:  # each launch draws other numbers
                seeds = arrays[self._graph.names[self._graph.seeds]]
                with _on(stream, seeds):
                    seeds.copy_(new_seeds(self._name, len(seeds), group))
            call.launch(stream)

        return Captured(launch, arrays, lambda: returned)

    def _group(self) -> Group | None:
        """Group whose ranks run a call. None if all ranks are in this process."""
        return current_group() if self.alone_on is None else alone(self.alone_on)

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Arguments of a call that the program takes, by name. Raises ArgumentError if the call is not possible."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for *_, tensor in self._places):
            raise ArgumentError(
                f"{self._name}: this is a forward program, without gradients; call it in torch.no_grad() or torch.inference_mode(), "
                "or compile it with training=True"
            )
        self._expect_unchanged()
        return {name: leaf.detach() for name, leaf in self._arrays(args, kwargs).items()}

    @property
    def traced(self) -> Mapping[str, str]:
        """For each module of a list such as nn.ModuleList, by path: "traced", or the equal module whose trace it uses, as in `as layers.0`.

        If the attributes or calls of a module differ, it is traced separately, with the reason: `traced: its attention.scale differs from
        layers.0`.
        """
        return self._graph.traced

    @property
    def _name(self) -> str:
        return type(self._module).__name__

    def takes(self, **kwargs: Any) -> bool:
        """True if the module was compiled for such arguments: tensors with these sizes and dtypes, and equal other values."""
        wanted = _keywords(self._specs.in_spec)
        if sorted(wanted) != sorted(kwargs):
            return False
        leaves, given = pytree.tree_flatten(((), {key: kwargs[key] for key in wanted}))
        if given != self._specs.in_spec:
            return False
        sizes: dict[Any, int] = {}
        for node, leaf in zip(self._graph.arguments, leaves, strict=True):
            held = node.meta["val"]
            if not isinstance(held, torch.Tensor):
                if leaf != held:
                    return False
                continue
            if not isinstance(leaf, torch.Tensor) or (leaf.dtype, leaf.ndim) != (held.dtype, held.ndim):
                return False
            for size, own in zip(leaf.shape, held.shape, strict=True) if node not in self._graph.written else ():
                if isinstance(own, int):
                    if size != own:
                        return False
                elif sizes.setdefault(own.node.expr, size) != size or size not in self._range(own):
                    return False
        return True

    def _sizes(self) -> dict[Node, list[tuple[int, range]]]:
        """For each argument, its dims of varying size, with the sizes for which the module was compiled. A dim that a mesh axis shards may
        have any size, because in a group the arguments are blocks.
        """
        found: dict[Node, list[tuple[int, range]]] = {}
        for node in self._graph.arguments:
            held, axes = node.meta["val"], self._graph.layouts.inputs.get(self._graph.names.get(node, ""), ())
            for dim, size in enumerate(held.shape if isinstance(held, torch.Tensor) else ()):
                if not isinstance(size, int) and not (axes and axes[dim]):
                    found.setdefault(node, []).append((dim, self._range(size)))
        return found

    def _range(self, size: Any) -> range:
        """Sizes of a varying dim for which the module was compiled."""
        of = self._ranges.get(size.node.expr)
        return range(int(of.lower), int(min(of.upper, 2**62)) + 1) if of is not None else range(2**62)

    def cut(self, kwargs: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """Keyword arguments of a call. A copy of this rank's block replaces each whole tensor that the program writes to."""
        wanted = _keywords(self._specs.in_spec)
        leaves, spec = pytree.tree_flatten(((), {key: kwargs[key] for key in wanted}))
        types, names = self._part.graph.input_types, self._graph.names
        blocks: list[Any] = [
            types[names[node]].shard(leaf, rank, self._graph.mesh) if node in self._graph.written else leaf
            for node, leaf in zip(self._graph.arguments, leaves, strict=True)
        ]
        owned = [block.contiguous().clone() if block is not leaf else leaf for block, leaf in zip(blocks, leaves, strict=True)]
        return pytree.tree_unflatten(owned, spec)[1]  # type: ignore[no-any-return]

    def _written(self, arrays: Mapping[str, torch.Tensor], group: Group | None) -> dict[str, torch.Tensor]:
        """Arguments and buffers that the program writes to, by name, in the layout of this rank. Raises ArgumentError if a whole tensor on
        each rank would have to be sharded."""
        found = {}
        for node in self._graph.written:
            name = self._graph.names[node]
            if name in arrays:
                found[name] = arrays[name]
                continue
            tensor: Any = tensor_of(self._module, self._graph.parameters[name]).detach()
            is_whole = not isinstance(tensor, DTensor)
            if group and is_whole and any(dim.axes for dim in self._graph.input_types[name].dims):
                why = f"{self._graph.parameters[name]} is written in forward and whole on each rank, but the plan shards it"
                raise ArgumentError(f"{self._name}: {why}; make it a DTensor, or omit it from the plan")
            found[name] = tensor if is_whole else tensor.to_local() if group else tensor.full_tensor()
        return found

    def _finished(self, values: list[Any], written: Mapping[str, torch.Tensor]) -> Any:
        """Selects the module's results from the program's results, and marks the tensors that the program has written to."""
        made = {node: value for node, value in zip(self._part.graph.returned, values, strict=True) if isinstance(node, Node)}
        for node, value in self._graph.written.items():
            tensor = written[self._graph.names[node]]
            if value in self._graph.constants:
                tensor.copy_(self._graph.constants[value])
            increment_version(tensor)
            made[value] = tensor
        known = {**self._graph.constants, **made}
        for check in self._graph.checks:  # raises the errors that torch raises, after waiting for the values
            given: Any = check.args
            given[1](known[given[2]], *given[3:], **check.kwargs)
        return self._returned(made)

    def _returned(self, made: Mapping[Node, Any]) -> Any:
        """Builds the module's result from the values of the graph's nodes."""
        known = {**self._graph.constants, **made}

        def value(node: Any) -> Any:
            if is_complex(node):
                return torch.complex(*(known[part] for part in node.args))
            return known[node] if isinstance(node, Node) else node

        leaves = list(map(value, self._graph.of_module))
        return pytree.tree_unflatten(leaves, self._specs.out_spec)

    def _expect_unchanged(self) -> None:
        for modules, name, part in self._parts:
            if modules.get(name) is not part:
                raise ArgumentError(f"{self._name}: {name} was replaced after compile; compile it again")
        for (tensors, key, tensor), memory in zip(self._places, self._memory, strict=True):
            if tensors.get(key) is not tensor:
                path = path_in(self._module, tensors, key)
                raise ArgumentError(f"{self._name}: {path} was replaced after compile; compile again, or use copy_ on the original tensor")
            if memory_of(tensor) != memory:
                why = f"{path_in(self._module, tensors, key)} was moved in memory after compile, as by .to() or a write to .data"
                raise ArgumentError(f"{self._name}: {why}; compile again, or use copy_ on the original tensor")
        if changed := self._folded.changed():
            why = f"{changed} has changed, but the program holds values that were computed from it at compile"
            raise ArgumentError(f"{self._name}: {why}; compile it again")
        if self._module.training != self._training:
            was = "train" if self._training else "eval"
            raise ArgumentError(f"{self._name}: the mode has changed from {was}(); compile it again")
        if (now := _autocast()) != self._autocast:
            why = f"torch.autocast is {_in_words(now)}, and was {_in_words(self._autocast)} at compile"
            raise ArgumentError(f"{self._name}: {why}; call it under the same autocast as at compile, or compile it within torch.autocast")
        if changed := self._state.changed():
            raise ArgumentError(f"{self._name}: {changed}; compile it again")

    def _arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        spec, name = self._specs.in_spec, self._name
        wanted = _keywords(spec)
        if sorted(wanted) != sorted(kwargs):
            raise ArgumentError(
                f"{name}: was compiled for the keyword arguments {wanted or 'none'}, not {list(kwargs) or 'none'}; use the same ones"
            )
        leaves, given = pytree.tree_flatten((args, {key: kwargs[key] for key in wanted}))
        if given != spec:
            raise ArgumentError(f"{name}: the arguments differ in structure from example_inputs; pass the same number and nesting")
        arrays = {}
        for node, leaf in zip(self._graph.arguments, leaves, strict=True):
            if node in self._graph.names:
                if not isinstance(leaf, torch.Tensor):
                    raise ArgumentError(f"{name}: {node.name} is {leaf!r}, and was a tensor at compile; pass a tensor")
                arrays[self._graph.names[node]] = leaf
                for dim, sizes in self._varying.get(node, ()):
                    if leaf.ndim > dim and leaf.shape[dim] not in sizes:
                        why = f"{node.name} has {leaf.shape[dim]} elements along dim {dim}, and was compiled for {_words_of(sizes)}"
                        raise ArgumentError(f"{name}: {why}; compile it for that size, too")
            elif leaf != self._graph.constants.get(node):
                raise ArgumentError(
                    f"{name}: {node.name} is {leaf!r}, and was {self._graph.constants.get(node)!r} at compile; compile it again"
                )
        if self._graph.seeds is not None:
            seeds = new_seeds(self._name, self._count_of_seeds, self._group())
            arrays[self._graph.names[self._graph.seeds]] = seeds.to(self._device)
        return arrays

    @property
    def _count_of_seeds(self) -> int:
        return 0 if self._graph.seeds is None else int(self._graph.seeds.meta["val"].numel())

    @property
    def _device(self) -> torch.device:
        return next((tensor.device for *_, tensor in self._places), torch.device("cpu"))


def alone(device: torch.device) -> Group:
    """Group with this thread as its only rank, on a GPU or on the CPU."""
    name = f"alone on {device}"
    return current_group(name) or init(Threads(1), name, device=device.index)


def _words_of(sizes: range) -> str:
    return f"{sizes.start} to {sizes.stop - 1}" if sizes.stop < 2**62 else f"{sizes.start} or more"


def _keywords(spec: Any) -> list[str]:
    """Names of the keyword arguments of a call."""
    return list(spec.child(1).context) if hasattr(spec, "child") else list(spec.children_specs[1].context)


def _autocast() -> tuple[torch.dtype | None, ...]:
    """Dtypes of torch.autocast on the CPU and on GPUs. None if it is off."""
    return tuple(torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in ("cpu", "cuda"))


def _in_words(autocast: tuple[torch.dtype | None, ...]) -> str:
    return " and ".join(f"{dtype} of {device}" for device, dtype in zip(("cpu", "cuda"), autocast, strict=True) if dtype) or "off"


def memory_of(tensor: Any) -> tuple[int, torch.dtype]:
    """Address and dtype of a tensor, or of this rank's part of a DTensor. Writes to the tensor change neither."""
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return own.data_ptr(), own.dtype


def tensor_of(module: nn.Module, path: str) -> torch.Tensor:
    parent, _, key = path.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(parent), key)
    return tensor


def place_of(module: nn.Module, path: str) -> tuple[Mapping[str, Any], str, torch.Tensor]:
    """The module's dict that contains a tensor, the tensor's name in it, and the tensor. A look-up in the dict is faster than one in the
    module."""
    parent, _, key = path.rpartition(".")
    owner, tensor = module.get_submodule(parent), tensor_of(module, path)
    held = next(one for one in (owner._parameters, owner._buffers, vars(owner)) if one.get(key) is tensor)
    return held, key, tensor


def path_in(module: nn.Module, held: Mapping[str, Any], key: str) -> str:
    """Path of a tensor, computed from the dict and the name that `place_of` returns."""
    for path, owner in module.named_modules():
        if any(held is one for one in (owner._parameters, owner._buffers, vars(owner))):
            return f"{path}.{key}" if path else key
    return key


def _is_tensor(module: nn.Module, path: str) -> bool:
    try:
        return isinstance(tensor_of(module, path), torch.Tensor)
    except AttributeError:  # a constant that only the graph has
        return False
