"""Pipelines: stages of a model on parts of a mesh, through which micro-batches pass, as one program of forward and backward pass."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import Pipe
from torch.distributed.tensor import DTensor
from torch.fx import Node

import hostweave as hw
from hostweave.api import Program
from hostweave.api import compile as compile_program
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.base.names import unique_name
from hostweave.fusion_ir.frontend.tracing import Function
from hostweave.options import Options, options_of
from hostweave.runtime.group import Group
from hostweave.runtime.group import current as current_group
from hostweave.torch.aten import Result, full, resharded
from hostweave.torch.compiled import not_traced, tensor_of
from hostweave.torch.exported import exported
from hostweave.torch.graph import Graph, Origin, name_of, read
from hostweave.torch.joint import Joint, joint_of
from hostweave.torch.plan import AxesOfDims, Layouts, layouts, matching, mesh_of, tensors_of
from hostweave.torch.schedules import Action, schedule_of
from hostweave.torch.state import State
from hostweave.torch.trace import traced_function
from hostweave.torch.updates import Updates, clipped, squares, updated_by
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import TensorType

AXIS = "pp"  # the mesh axis of the stages, if the mesh has several axes
_HERE = "hostweave.torch.compile"


@dataclass(frozen=True)
class _Source:
    """Source of an argument of a stage: argument `number` of the pipeline if `stage` is None, else result `number` of a stage."""

    stage: int | None
    number: int


@dataclass
class _Part:
    """A function of a stage: its graph, and the types of its results."""

    graph: Graph
    function: Function
    types: list[TensorType]

    def __call__(self, value: Callable[[Node, str], hw.Tensor]) -> dict[Node, hw.Tensor]:
        """The results of a call, by node. `value` gives the argument for a node of the graph and its name."""
        taken = {name: value(node, name) for node, name in self.graph.names.items()}
        made = self.function(*(taken[name] for name in self.graph.input_types))
        nodes = [node for node in self.graph.outputs if node not in self.graph.constants]
        return dict(zip(nodes, made if isinstance(made, tuple) else (made,), strict=True))


@dataclass
class _Stage:
    """A stage: its module, its mesh, the sources of its arguments, and its functions."""

    number: int
    module: nn.Module
    mesh: Mesh
    sources: list[_Source]
    outer: Graph
    joint: Joint
    forward: _Part
    parts: dict[str, tuple[_Part, list[Any]]] = field(default_factory=dict)  # by kind of backward action, with the results
    state: State | None = None

    @property
    def trained(self) -> list[tuple[str, TensorType]]:
        """The path of each parameter that gets a gradient, and the type of the parameter in the program."""
        numbers = [what for _, returned in self.parts.values() for what in returned if isinstance(what, int)]
        own = [(self.joint.origins[at], self.joint.sources[at]) for at in numbers if self.source_of(at) is None]
        return [(origin.name, self.outer.type_of(node, self.joint.axes_of(origin))) for origin, node in own]

    @property
    def returned(self) -> list[tuple[Node, Node]]:
        """The results and the saved values of the forward pass, each with its node of the forward graph."""
        return list(zip((*self.joint.results, *self.joint.saved), self.forward.graph.returned, strict=True))

    def type_of(self, result: Node) -> TensorType:
        """The type of a result of the forward pass."""
        computed = [of for of, node in self.returned if node not in self.forward.graph.constants]
        return self.forward.types[computed.index(result)]

    def source_of(self, number: int) -> _Source | None:
        """The source of a tensor of the joint graph; None for a tensor of the module."""
        if self.joint.origins[number].kind != "argument":
            return None
        return self.sources[self.outer.arguments.index(self.joint.sources[number])]


class WithLoss(nn.Module):
    """The last stage followed by the loss."""

    def __init__(self, stage: nn.Module, loss: Callable[..., torch.Tensor]):
        super().__init__()
        self.stage, self.loss = stage, loss

    def forward(self, *args: Any) -> torch.Tensor:
        *given, target = args
        return self.loss(self.stage(*given), target)


class Pipeline:
    """A compiled training pipeline. A call returns the mean loss of the micro-batches, and adds gradients to `.grad`.

    `program` is its program. Ranks of the last stage get the loss, and ranks of a stage the gradients of its parameters. If all ranks are
    in this process, a call takes whole arguments and returns both. A rank passes None for arguments that its stages do not take.

    With `optimizer` a call updates parameters and `optimizer.state` in place instead, each rank those of its stages. With `clip_grad_norm`,
    `grad_norm` is the norm of the gradients of all stages before clipping, in the last call.
    """

    def __init__(
        self,
        stages: list[_Stage],
        names: list[str],
        microbatches: int,
        actions: list[Action],
        options: Options,
        target: str,
        optimizer: torch.optim.Optimizer | None = None,
        clip_grad_norm: float | None = None,
    ):
        self._stages, self._names, self._microbatches, self._clip = stages, names, microbatches, clip_grad_norm
        self.grad_norm: torch.Tensor | None = None
        self._updates: dict[int, Updates] = {}  # the step of the optimizer, by number of the stage
        self._tensors: dict[str, tuple[_Stage, str, TensorType]] = {}  # tensors of modules, by input of the program
        self._constants: dict[str, torch.Tensor] = {}
        self._arguments: dict[str, tuple[int, int]] = {}  # input of the program -> argument and micro-batch
        self._updated: list[tuple[_Stage, str]] = []  # the parameters whose gradients the program returns, in order
        self._wants = {id(one): one.requires_grad for stage in stages for one in stage.module.parameters()}
        self._modes = [(stage.module, stage.module.training) for stage in stages]
        self.program = self._compiled(actions, options, target, optimizer)

    # --- the program --------------------------------------------------------------------------------------------------

    def _compiled(self, actions: list[Action], options: Options, target: str, optimizer: torch.optim.Optimizer | None) -> Program:
        types: dict[str, Any] = {}
        inputs: dict[Any, str] = {}  # identity of a value -> input

        def enter(key: Any, name: str, type: TensorType) -> bool:
            if key in inputs:
                return False
            inputs[key] = unique_name(name, types)
            types[inputs[key]] = type
            return True

        for stage in self._stages:
            for part in (stage.forward, *(part for part, _ in stage.parts.values())):
                for node, name in part.graph.names.items():
                    type = part.graph.input_types[name]
                    if name in part.graph.bound:
                        if enter((id(part), name), name, type):
                            self._constants[inputs[id(part), name]] = part.graph.bound[name]
                    elif path := part.graph.parameters.get(name):
                        if enter((stage.number, path), name_of(path), type):
                            self._tensors[inputs[stage.number, path]] = stage, path, type
                    elif (number := stage.joint.source_of(node)) is not None:
                        source = stage.source_of(number)
                        if source is not None and source.stage is None:
                            for one in range(self._microbatches):
                                if enter((source, one, stage.mesh), f"{self._names[source.number]}_{one}", type):
                                    self._arguments[inputs[source, one, stage.mesh]] = source.number, one

        for stage in self._stages:
            if optimizer is None:
                break
            for path, type in stage.trained:
                if enter((stage.number, path), name_of(path), type):
                    self._tensors[inputs[stage.number, path]] = stage, path, type
            trained = [(inputs[stage.number, path], path, tensor_of(stage.module, path)) for path, _ in stage.trained]
            updates = Updates(optimizer, updated_by(optimizer, trained), types, f"stage_{stage.number}_")
            for updated in updates.parameters:
                types |= updated.types(types[updated.name])
            types |= updates.numbers(stage.outer.part)
            self._updates[stage.number] = updates
        first = 1 + (len(self._places) if self._clip is not None else 0)
        written = [name for updates in self._updates.values() for name in updates.written]

        def pipeline(**given: hw.Tensor) -> tuple[hw.Tensor, ...]:
            return _Recording(self, {key: given[name] for key, name in inputs.items()}, given).results(actions)

        mesh, donated = Mesh(self._mesh_axes), {name: number for number, name in enumerate(written, first)}
        return compile_program(hw.fusion(mesh=mesh, donate=donated, **types)(pipeline), target=target, options=options)

    @property
    def _places(self) -> list[Mesh]:
        return list(dict.fromkeys(stage.mesh for stage in self._stages))

    @property
    def _mesh_axes(self) -> tuple[tuple[str, int], ...]:
        return ((AXIS, len(self._places)), *self._stages[0].mesh.axes)

    # --- a call -------------------------------------------------------------------------------------------------------

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Computes the loss and the gradients of these arguments, or makes a step. Returns None on ranks outside of the last stage.

        Raises ArgumentError for arguments that do not fit, and if a module has changed since it was compiled.
        """
        self._expect_unchanged()
        group = current_group()
        rank = group.rank if group else None
        values = _bound(self._names, args, kwargs)
        batches = [self._split(name, value, group) for name, value in zip(self._names, values, strict=True)]
        given, hosts = self._stepped(rank)
        with torch.no_grad():
            for name, (stage, path, type) in self._tensors.items():
                if name not in given:
                    given[name] = self._own(tensor_of(stage.module, path), type, rank)
            for name, type in ((parameter.name, parameter.type) for parameter in self.program.host.arguments):
                if name in self._constants:
                    given[name] = self._own(self._constants[name], type, rank)
                elif name in self._arguments:
                    number, one = self._arguments[name]
                    is_here = rank is None or rank in type.mesh_in(self.program.mesh).all_ranks
                    if is_here and batches[number] is None:
                        raise ArgumentError(f"pipeline: {self._names[number]} is None, and rank {rank} takes it; pass this rank's rows")
                    given[name] = batches[number][one] if is_here else None  # type: ignore[index]
            made = self.program(**given, group=group) if group else self.program.run(**given)
            loss, *others = made if isinstance(made, tuple) else (made,)
            if self._clip is not None:
                self.grad_norm = next(one for one in others[: len(self._places)] if one is not None)
            for number, of_stage in hosts.items():
                self._updates[number].ended(of_stage)
            for (stage, path), gradient in zip(self._updated, others if self._updated else (), strict=True):
                if gradient is not None:
                    self._accumulate(tensor_of(stage.module, path), gradient, group)
        return loss  # type: ignore[no-any-return]

    def _stepped(self, rank: int | None) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
        """The inputs of the optimizer's step, None for those of other ranks, and the state on the host after it, by stage."""
        given: dict[str, Any] = {}
        hosts: dict[int, list[dict[str, Any]]] = {}
        for number, updates in self._updates.items():
            stage = self._stages[number]
            updates.expect_held("pipeline")
            if rank is not None and rank not in stage.mesh.all_ranks:
                names = [name for one in updates.parameters for name in one.types(self._tensors[one.name][-1])]
                given |= dict.fromkeys([*names, *updates.numbers()])
                continue
            for one in updates.parameters:
                is_whole, is_sharded = not isinstance(one.parameter, DTensor), any(dim.axes for dim in self._tensors[one.name][-1].dims)
                if rank is None and not is_whole:
                    why = "is a DTensor, and without a group all ranks run in this process on copies of it"
                    raise ArgumentError(f"pipeline: stage {number}: {one.path} {why}; call hw.init on each rank")
                if rank is not None and is_whole and is_sharded:
                    why = "is replicated, but the plan shards it; make it a DTensor, or train without optimizer="
                    raise ArgumentError(f"pipeline: stage {number}: {one.path} {why}")
            device = next((one.parameter.device for one in updates.parameters), torch.device("cpu"))
            numbers, hosts[number] = updates.next("pipeline", device)
            given |= {**updates.entries(), **numbers}
        return given, hosts

    def _split(self, name: str, value: Any, group: Group | None) -> tuple[torch.Tensor, ...] | None:
        if value is None and group is not None:
            return None
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] % self._microbatches:
            of = f"{value.shape[0]} rows" if isinstance(value, torch.Tensor) and value.ndim else repr(value)
            raise ArgumentError(f"pipeline: {name} has {of}; pass a tensor with a multiple of {self._microbatches}, its micro-batches")
        return value.detach().contiguous().chunk(self._microbatches)

    def _own(self, held: Any, type: TensorType, rank: int | None) -> Any:
        """The array of a tensor that the program takes: this rank's block, or the whole array if all ranks are in this process."""
        tensor = held.detach()
        if rank is None:
            return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).contiguous()
        if rank not in type.mesh_in(self.program.mesh).all_ranks:
            return None
        block: Any = tensor.to_local() if isinstance(tensor, DTensor) else type.shard(tensor, rank, self.program.mesh)
        return block.contiguous()

    def _accumulate(self, parameter: Any, gradient: Any, group: Group | None) -> None:
        if isinstance(parameter, DTensor) and group:
            of_mesh = parameter.device_mesh, parameter.placements
            gradient = DTensor.from_local(gradient, *of_mesh, run_check=False, shape=parameter.shape, stride=parameter.stride())
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _expect_unchanged(self) -> None:
        for stage in self._stages:
            if stage.state and (changed := stage.state.changed()):
                raise ArgumentError(f"pipeline: stage {stage.number}: {changed}; compile it again")
            for path, one in stage.module.named_parameters():
                if self._wants.get(id(one)) != one.requires_grad:
                    raise ArgumentError(
                        f"pipeline: stage {stage.number}: {path} is another parameter or requires_grad has changed; compile again"
                    )
        for module, mode in self._modes:
            if module.training != mode:
                raise ArgumentError(f"pipeline: the mode has changed from {'train' if mode else 'eval'}(); compile it again")


class _Recording:
    """Records the actions of a pipeline in its program."""

    def __init__(self, pipeline: Pipeline, inputs: Mapping[Any, hw.Tensor], named: Mapping[str, hw.Tensor]):
        self.pipeline, self.inputs, self.named, self.stages = pipeline, inputs, named, pipeline._stages
        self.results_of: dict[tuple[int, int], dict[Node, hw.Tensor]] = {}  # results and saved values of a stage and micro-batch
        self.moved: dict[Any, hw.Tensor] = {}  # results of stages, by their users
        self.tangents: dict[Any, hw.Tensor] = {}  # gradients of results of stages
        self.kept: dict[tuple[int, int], dict[str, hw.Tensor]] = {}  # values that one half of a backward pass saves for the other
        self.gradients: dict[tuple[int, str], hw.Tensor] = {}
        self.losses: list[hw.Tensor] = []

    def results(self, actions: Sequence[Action]) -> tuple[hw.Tensor, ...]:
        for kind, number, one in actions:
            stage = self.stages[number]
            if kind == "forward":
                self._forward(stage, one)
            elif kind in stage.parts:
                self._backward(stage, *stage.parts[kind], one)
        loss = self.losses[0]
        for other in self.losses[1:]:
            loss = loss + other
        scaled = loss * (1 / self.pipeline._microbatches)
        if self.pipeline._updates:
            return scaled, *self._step()
        updated = self.pipeline._updated
        updated[:] = [(self.stages[number], path) for number, path in self.gradients]
        return scaled, *(self._as_parameter(*key, gradient) for key, gradient in self.gradients.items())

    def _step(self) -> list[hw.Tensor]:
        """The norm of all gradients at each place, if they are clipped, and the new parameters and state of each stage."""
        pipeline = self.pipeline
        gradients: dict[int, list[hw.Tensor]] = {}
        for number, updates in pipeline._updates.items():
            dims = {one.path: [dim.axes for dim in pipeline._tensors[one.name][-1].dims] for one in updates.parameters}
            gradients[number] = [resharded(self.gradients[number, path], tuple(axes)) for path, axes in dims.items()]
        norms: dict[Mesh, hw.Tensor] = {}
        if (limit := pipeline._clip) is not None:
            first = pipeline._places[0]
            totals = [squares(of_stage) for of_stage in gradients.values() if of_stage]
            norm = hw.sqrt(sum((_moved(one, one.type, first) for one in totals[1:]), _moved(totals[0], totals[0].type, first)))
            norms = {place: _moved(norm, norm.type, place) for place in pipeline._places}
            gradients = {number: clipped(own, norms[self.stages[number].mesh], limit) for number, own in gradients.items()}
        made = [*norms.values()]
        for number, updates in pipeline._updates.items():
            made += updates.compute(self.named, gradients[number])
        return made

    def _as_parameter(self, number: int, path: str, gradient: hw.Tensor) -> hw.Tensor:
        """The gradient, sharded like its parameter if that is a DTensor, otherwise replicated."""
        stage = self.stages[number]
        is_sharded = isinstance(tensor_of(stage.module, path), DTensor)
        return resharded(gradient, stage.joint.outer.layouts.parameters.get(path, ()) if is_sharded else ())

    def _leaf(self, stage: _Stage, part: _Part, node: Node, name: str, one: int) -> hw.Tensor | None:
        """The value of an input of a part that is a tensor of the module, a constant, or an argument of the stage."""
        if name in part.graph.bound:
            return self.inputs[id(part), name]
        if path := part.graph.parameters.get(name):
            return self.inputs[stage.number, path]
        if (number := stage.joint.source_of(node)) is None:
            return None
        source = stage.source_of(number)
        assert source is not None
        if source.stage is None:
            return self.inputs[source, one, stage.mesh]
        key = source, one, stage.mesh
        if key not in self.moved:
            maker = self.stages[source.stage]
            value = self.results_of[source.stage, one][maker.outer.of_module[source.number]]
            self.moved[key] = _moved(value, part.graph.input_types[name], stage.mesh)
        return self.moved[key]

    def _forward(self, stage: _Stage, one: int) -> None:
        def value(node: Node, name: str) -> hw.Tensor:
            made = self._leaf(stage, stage.forward, node, name, one)
            assert made is not None
            return made

        made = stage.forward(value)
        self.results_of[stage.number, one] = {of: made[node] for of, node in stage.returned if node in made}
        if stage.number == len(self.stages) - 1:
            loss = stage.joint.results[stage.joint.differentiable.index(True)]
            self.losses.append(self.results_of[stage.number, one][loss])

    def _backward(self, stage: _Stage, part: _Part, returned: list[Any], one: int) -> None:
        """Calls a part of the backward pass. `returned` has the number of the joint graph's tensor, or a name, for each result."""
        results, kept = self.results_of[stage.number, one], self.kept.setdefault((stage.number, one), {})
        saved = {node.name: results[node] for node in stage.joint.saved if node in results}
        differentiable = [node for node, has in zip(stage.joint.results, stage.joint.differentiable, strict=True) if has]

        def value(node: Node, name: str) -> hw.Tensor:
            if node.name in kept:
                return kept[node.name]
            if node.name in saved:
                return saved[node.name]
            if node.name.startswith("tangents_"):
                result = differentiable[int(node.name.removeprefix("tangents_")) - 1]
                if stage.number == len(self.stages) - 1:
                    return _filled(result, results[result], 1 / self.pipeline._microbatches)
                key = stage.number, result, one
                return self.tangents[key] if key in self.tangents else _filled(result, results[result], 0)
            made = self._leaf(stage, part, node, name, one)
            assert made is not None
            return made

        made = part(value)
        for node, what in zip(part.graph.returned, returned, strict=True):
            gradient = made.get(node)
            if isinstance(what, str):
                kept[what] = made[node]
            elif gradient is None:
                continue
            elif (source := stage.source_of(what)) is None:
                key = stage.number, stage.joint.origins[what].name
                self.gradients[key] = self.gradients[key] + gradient if key in self.gradients else gradient
            elif source.stage is not None:
                self._send_back(self.stages[source.stage], source.number, gradient, one)

    def _send_back(self, maker: _Stage, number: int, gradient: hw.Tensor, one: int) -> None:
        result = maker.outer.of_module[number]
        arrived = _moved(gradient, maker.type_of(result), maker.mesh)
        key = maker.number, result, one
        self.tangents[key] = self.tangents[key] + arrived if key in self.tangents else arrived


def _moved(value: hw.Tensor, type: TensorType, mesh: Mesh) -> hw.Tensor:
    """The value on a mesh, with the sharding of a type."""
    if value.type.mesh == mesh:
        return value
    return hw.reshard(value, *(f"{dim.size}@{','.join(dim.axes)}" if dim.axes else dim.size for dim in type.dims), mesh=mesh)


def _filled(node: Node, beside: hw.Tensor, value: float) -> hw.Tensor:
    of = node.meta["val"]
    return full(Result((of.dtype,), (tuple(of.shape),), beside), value)


# --- stages -----------------------------------------------------------------------------------------------------------


def compiled_pipeline(
    pipe: Pipe | Sequence[nn.Module],
    mesh: Any,
    plan: Mapping[str, str],
    example_inputs: Sequence[Any] | Mapping[str, Any],
    loss: Callable[..., torch.Tensor] | None,
    microbatches: int,
    schedule: str,
    target: str | None,
    options: Options | None,
    optimizer: torch.optim.Optimizer | None = None,
    clip_grad_norm: float | None = None,
) -> Pipeline:
    """Compiles a model that is cut into stages. Raises ProgramError if stages, plan, arguments or optimizer do not fit."""
    names, modules, wiring = _cut(pipe)
    if loss is not None:
        modules[-1] = WithLoss(modules[-1], loss).train(modules[-1].training)
        wiring[-1].append(_Source(None, len(names)))
        names.append("target")
    args, kwargs = ((), example_inputs) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    examples = _bound(names, args, kwargs)
    for name, value in zip(names, examples, strict=True):
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] % microbatches:
            why = f"example_inputs: {name} is {tuple(value.shape) if isinstance(value, torch.Tensor) else value!r}"
            raise ProgramError(f"{_HERE}: {why}; pass a tensor whose first dim is a multiple of microbatches={microbatches}")
    places = _places(mesh_of(mesh))
    actions = schedule_of(schedule, len(modules), len(places), microbatches)
    settings = options_of(options, "pipeline")
    _expect_own_parameters(modules)
    _expect_matches(plan, modules, names)
    splits = any(action.kind == "weight" for action in actions)
    stages: list[_Stage] = []
    rows: tuple[int, AxesOfDims] = (examples[0].shape[0] // microbatches, ())
    for number, (module, sources) in enumerate(zip(modules, wiring, strict=True)):
        if number and not isinstance(pipe, Pipe):
            sources[:0] = [_Source(number - 1, at) for at in range(len(stages[-1].outer.of_module))]
        given = [_example(stages, source, examples, microbatches) for source in sources]
        mesh_of_stage, is_last = places[number % len(places)], number == len(modules) - 1
        stage, rows = _stage(number, module, mesh_of_stage, sources, given, names, plan, rows, settings, splits, is_last)
        stages.append(stage)
    tensors = [one for module in modules for one in module.parameters()]
    device = target or ("cuda" if any(one.is_cuda for one in tensors) else "cpu")
    if schedule != "auto":
        settings = replace(settings, stages="as_written")
    return Pipeline(stages, names, microbatches, actions, settings, device, optimizer, clip_grad_norm)


def _cut(pipe: Pipe | Sequence[nn.Module]) -> tuple[list[str], list[nn.Module], list[list[_Source]]]:
    """The names of the arguments, the stages, and the sources of each stage's arguments."""
    if not isinstance(pipe, Pipe):
        modules = list(pipe)
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise ProgramError(f"{_HERE}: the stages are {[type(one).__name__ for one in modules]}; pass a list of torch.nn.Modules")
        names = list(inspect.signature(modules[0].forward).parameters)
        return names, modules, [[_Source(None, number) for number in range(len(names))], *([] for _ in modules[1:])]
    found: dict[Node, _Source] = {}
    names, modules, wiring = [], [], []
    for node in pipe.split_gm.graph.nodes:
        if node.op == "placeholder":
            found[node] = _Source(None, len(names))
            names.append(node.name)
        elif node.op == "call_module":
            if node.kwargs or not all(isinstance(one, Node) for one in node.args):
                raise ProgramError(f"{_HERE}: stage {len(modules)} takes {node.args} and {node.kwargs}; stages take tensors, by position")
            wiring.append([found[one] for one in node.args])
            found[node] = _Source(len(modules), 0)
            modules.append(pipe.split_gm.get_submodule(node.target))
        elif node.op == "call_function" and isinstance(node.args[0], Node) and isinstance(node.args[-1], int):
            found[node] = _Source(found[node.args[0]].stage, node.args[1])
        elif node.op != "output":
            raise ProgramError(f"{_HERE}: {node.format_node()} is in no stage of the Pipe; cut the module elsewhere")
    return names, modules, wiring


def _places(mesh: Mesh) -> list[Mesh]:
    """The part of the mesh at each place along the axis of stages."""
    axes = [name for name, _ in mesh.axes]
    axis = axes[0] if len(axes) == 1 else AXIS
    if axis not in axes:
        raise ProgramError(f"{_HERE}: {mesh} has no axis {AXIS} for the stages; name one of its axes {AXIS}")
    if axes.index(axis):
        raise ProgramError(f"{_HERE}: {AXIS} is not the first axis of {mesh}; write hw.Mesh({AXIS}=..., tp=...)")
    others = tuple((name, size) for name, size in mesh.axes if name != axis)
    ranks = [[rank for rank in mesh.all_ranks if mesh.coordinate(rank, axis) == place] for place in range(mesh.axis_size(axis))]
    return [Mesh(others, tuple(of)) for of in ranks]


def _bound(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments in the order of their names."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names) or len(given) != len(args) + len(kwargs) or sorted(given) != sorted(names):
        listed = ", ".join([*(f"#{number + 1}" for number in range(len(args))), *kwargs]) or "none"
        raise ArgumentError(f"pipeline: takes {', '.join(names)}, and was given {listed}; pass each once")
    return [given[name] for name in names]


def _expect_own_parameters(modules: Sequence[nn.Module]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for number, module in enumerate(modules):
        for path, one in module.named_parameters():
            other, name = owners.setdefault(id(one), (number, path))
            if other != number:
                why = f"{path} of stage {number} is {name} of stage {other}"
                raise ProgramError(f"{_HERE}: {why}, and each parameter belongs to one stage; untie it, or cut the module elsewhere")


def _expect_matches(plan: Mapping[str, str], modules: Sequence[nn.Module], names: Sequence[str]) -> None:
    known = [name for module in modules for name in _names_in(module)]
    for pattern in plan:
        matching(pattern, [*names, *known], "parameters, inputs or modules of a stage")


def _names_in(module: nn.Module) -> list[str]:
    return [*dict(tensors_of(module)), *(name for name, _ in module.named_modules() if name)]


def _entries(plan: Mapping[str, str], module: nn.Module, labels: Sequence[str]) -> dict[str, str]:
    """The entries of the plan that match a name of a stage."""
    found = {}
    for pattern, value in plan.items():
        with suppress(ProgramError):
            matching(pattern, [*_names_in(module), *labels], "names")
            found[pattern] = value
    return found


def _example(stages: Sequence[_Stage], source: _Source, examples: Sequence[Any], microbatches: int) -> torch.Tensor:
    """An argument of a stage, of one micro-batch."""
    if source.stage is None:
        first: torch.Tensor = examples[source.number].detach().chunk(microbatches)[0]
        return first
    maker = stages[source.stage]
    if source.number >= len(maker.outer.of_module) or (node := maker.outer.of_module[source.number]) not in maker.joint.results:
        why = f"result {source.number} of stage {source.stage} is no tensor that the stage computes"
        raise ProgramError(f"{_HERE}: {why}; return one, and pass arguments to the stage that takes them")
    of = node.meta["val"]
    has = maker.joint.differentiable[maker.joint.results.index(node)]
    return torch.zeros(tuple(of.shape), dtype=of.dtype, device=of.device, requires_grad=has)


def _stage(
    number: int,
    module: nn.Module,
    mesh: Mesh,
    sources: list[_Source],
    given: list[torch.Tensor],
    arguments: list[str],
    plan: Mapping[str, str],
    rows: tuple[int, AxesOfDims],
    options: Options,
    splits: bool,
    is_last: bool,
) -> tuple[_Stage, tuple[int, AxesOfDims]]:
    """A stage with its functions, and the rows of a micro-batch with the axes that shard them."""
    graph_of, _, reads = exported(module, tuple(given), {}, None, True)
    names = [spec.arg.name for spec in graph_of.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    labels = [arguments[source.number] if source.stage is None else name for source, name in zip(sources, names, strict=True)]
    dims = {label: one.ndim for label, one in zip(labels, given, strict=True)}
    stated = layouts(_entries(plan, module, labels), module, dims, mesh, Layouts())
    stated.inputs = {name: stated.inputs[label] for label, name in zip(labels, names, strict=True) if label in stated.inputs}
    if not rows[1]:
        rows = rows[0], next((axes[:1] for axes in stated.inputs.values() if axes and axes[0]), ())
    for name, one in zip(names, given, strict=True):
        if rows[1] and one.ndim and one.shape[0] == rows[0]:
            stated.inputs.setdefault(name, (*rows[1], *(() for _ in one.shape[1:])))
    stated.data |= {axis for axes in rows[1] for axis in axes if axis != "tp"}
    outer = read(graph_of, stated, mesh, True)
    if outer.written:
        path = outer.origins[next(iter(outer.written))].name
        why = f"stage {number} writes to {path} in forward, which is not supported in a pipeline"
        raise ProgramError(f"{_HERE}: {why}; use a module without such state, such as LayerNorm for BatchNorm")
    if outer.seeds is not None:
        why = f"stage {number} draws random numbers, as dropout does, which is not supported in a pipeline"
        raise ProgramError(f"{_HERE}: {why}; set its probability to 0, or make them an input")
    joint = joint_of(outer, [one.requires_grad for one in given], is_last)
    name = f"stage_{number}"
    graph = joint.forward_graph()
    forward = _Part(graph, *traced_function(graph, f"{name}_forward", options))
    backward = joint.backward_graph(graph, forward.types)
    for node, origin in zip(backward.returned, joint.origins, strict=True):
        if node in backward.constants:
            raise ProgramError(f"{_HERE}: stage {number}: the gradient of {origin.name} is a constant; set its requires_grad to False")
    stage = _Stage(number, module, mesh, sources, outer, joint, forward, {}, State(module, reads))
    every = [at for at, node in enumerate(backward.returned) if isinstance(node, Node)]
    of_inputs = [at for at in every if stage.source_of(at) is not None]
    if not splits:
        stage.parts["backward"] = _backward_part(backward, every, f"{name}_backward", options)
    elif not of_inputs or of_inputs == every:  # the backward pass has one half only
        stage.parts["input"] = _backward_part(backward, every, f"{name}_backward", options)
    else:
        first, kept = _half(backward, of_inputs, {})
        stage.parts["input"] = _backward_part(first, [*of_inputs, *kept], f"{name}_backward_input", options)
        types = dict(zip(kept, stage.parts["input"][0].types[len(of_inputs) :], strict=True))
        of_weights = [at for at in every if at not in of_inputs]
        second, _ = _half(backward, of_weights, types)
        stage.parts["weight"] = _backward_part(second, of_weights, f"{name}_backward_weight", options)
    return stage, rows


def _backward_part(graph: Graph, numbers: list[Any], name: str, options: Options) -> tuple[_Part, list[Any]]:
    returned = [at if isinstance(node, Node) else None for at, node in enumerate(graph.returned)]
    if len(numbers) != sum(one is not None for one in returned):
        raise AssertionError(name)
    each = iter(numbers)
    return _Part(graph, *traced_function(graph, name, options)), [None if one is None else next(each) for one in returned]


def _half(graph: Graph, wanted: list[int], before: Mapping[str, TensorType]) -> tuple[Graph, list[str]]:
    """The part of a backward pass that computes these gradients, from the values `before` that the other half has computed.

    Without `before` it also returns the values that the other half needs. Returns the names of these values, too.
    """
    outputs: list[Any] = [graph.returned[at] for at in wanted]
    nodes = list(graph.fx.nodes)
    inner, following = set[Node](), [*outputs]
    while following:
        node = following.pop()
        if node not in inner and node.name not in before:
            inner.add(node)
            following += node.all_input_nodes
    kept: list[Node] = []
    if not before:
        others = {node for node in nodes if node.op == "call_function" and node not in inner and node not in graph.constants}
        picked = {user for node in inner for user in node.users if user in others and user.target is operator.getitem}
        inner |= picked
        needed = {argument for node in others - picked for argument in node.all_input_nodes} | {
            node for at, node in enumerate(graph.returned) if at not in wanted and isinstance(node, Node)
        }
        kept = [node for node in nodes if node in inner and node in needed and node.op == "call_function" and node not in graph.constants]
    made, copies = torch.fx.Graph(), dict[Node, Node]()
    origins: dict[Node, Origin] = {}
    for node in nodes:
        if node.name in before:
            copies[node] = made.placeholder(node.name)
            copies[node].meta = dict(node.meta)
            origins[copies[node]] = Origin("argument", node.name)
        elif node in inner:
            copies[node] = made.node_copy(node, copies.__getitem__)
            if node in graph.origins:
                origins[copies[node]] = graph.origins[node]
    made.output(tuple(copies[node] for node in (*outputs, *kept)))
    inputs = {**graph.layouts.inputs, **{name: tuple(dim.axes for dim in type.dims) for name, type in before.items()}}
    half = Graph(made, origins, replace(graph.layouts, inputs=inputs), graph.mesh)
    half.placed = {copies[node]: axes for node, axes in graph.placed.items() if node in copies and node in inner}
    given = [at for at, node in enumerate(graph.returned) if isinstance(node, Node)]
    assert graph.results is not None
    half.results = [*(graph.results[given.index(at)] for at in wanted), *(None for _ in kept)]
    half.labels = [*(graph.labels[given.index(at)] for at in wanted), *(node.name for node in kept)]
    return half, [node.name for node in kept]
