"""The program of a pipeline, which runs all micro-batches in all stages."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.fx import Node

import hostweave as hw
from hostweave.base.names import unique_name
from hostweave.fusion_ir.ir import Fusion
from hostweave.torch.aten import Result, full, resharded
from hostweave.torch.held import tensor_of
from hostweave.torch.nodes import name_of
from hostweave.torch.schedules import Action
from hostweave.torch.stages import AXIS, Stage, StageFunction
from hostweave.torch.updates import Updates, clipped, squares, updated_by
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import TensorType


class PipelineInputs:
    """Inputs of a pipeline's program, and the optimizer steps of its stages."""

    def __init__(
        self, stages: list[Stage], names: list[str], microbatches: int, optimizer: torch.optim.Optimizer | None, clip: float | None
    ):
        self.stages, self.microbatches, self.clip = stages, microbatches, clip
        self.types: dict[str, Any] = {}
        self.name_of: dict[Any, str] = {}  # key of a value -> input of the program
        self.updates: dict[int, Updates] = {}  # by stage number
        self.tensors: dict[str, tuple[Stage, str]] = {}  # input of the program -> (stage, path of the module's tensor)
        self.constants: dict[str, torch.Tensor] = {}
        self.arguments: dict[str, tuple[int, int]] = {}  # input of the program -> (index of the argument, micro-batch)
        self.updated: list[tuple[Stage, str]] = []  # parameters whose gradients the program returns
        for stage in stages:
            for function in (stage.forward, *stage.backward.values()):
                self._enter_inputs_of(function, stage, names)
        for stage in stages if optimizer else ():
            self.updates[stage.number] = self._updates_of(stage, optimizer)

    @property
    def stage_meshes(self) -> list[Mesh]:
        return list(dict.fromkeys(stage.mesh for stage in self.stages))

    def _enter(self, key: Any, name: str, type: TensorType) -> str:
        """Name of the input for the value `key`. Adds the input if the key is new."""
        if key not in self.name_of:
            self.name_of[key] = unique_name(name, self.types)
            self.types[self.name_of[key]] = type
        return self.name_of[key]

    def _enter_tensor(self, stage: Stage, path: str, type: TensorType) -> str:
        name = self._enter((stage.number, path), name_of(path), type)
        self.tensors[name] = stage, path
        return name

    def _enter_inputs_of(self, function: StageFunction, stage: Stage, names: list[str]) -> None:
        for node, name in function.graph.names.items():
            type = function.graph.input_types[name]
            if name in function.graph.bound:
                self.constants[self._enter((id(function), name), name, type)] = function.graph.bound[name]
            elif path := function.graph.parameters.get(name):
                self._enter_tensor(stage, path, type)
            elif (number := stage.joint.source_of(node)) is not None:
                source = stage.source_of(number)
                if source is None or source.stage is not None:
                    continue
                for one in range(self.microbatches):
                    self.arguments[self._enter((source, one, stage.mesh), f"{names[source.number]}_{one}", type)] = source.number, one

    def _updates_of(self, stage: Stage, optimizer: Any) -> Updates:
        trained = [(self._enter_tensor(stage, path, type), path, tensor_of(stage.module, path)) for path, type in stage.trained]
        updates = Updates(optimizer, updated_by(optimizer, trained), self.types, f"stage_{stage.number}_")
        for updated in updates.parameters:
            self.types |= updated.types(self.types[updated.name])
        self.types |= updates.numbers(stage.outer.submesh)
        return updates


def recorded(inputs: PipelineInputs, actions: Sequence[Action]) -> Fusion:
    """Records the program. The program returns the loss, the gradient norms if gradients are clipped, and either the gradients or, with an
    optimizer, the new parameters and state."""
    first = 1 + (len(inputs.stage_meshes) if inputs.clip is not None else 0)
    written = [name for updates in inputs.updates.values() for name in updates.written]

    def pipeline(**given: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return _Recording(inputs, given).results(actions)

    mesh = Mesh(((AXIS, len(inputs.stage_meshes)), *inputs.stages[0].mesh.axes))
    return hw.fusion(mesh=mesh, donate={name: at for at, name in enumerate(written, first)}, **inputs.types)(pipeline)


class _Recording:
    def __init__(self, pipeline: PipelineInputs, named: Mapping[str, hw.Tensor]):
        self.pipeline, self.named, self.stages = pipeline, named, pipeline.stages
        self.inputs = {key: named[name] for key, name in pipeline.name_of.items()}
        self.results_of: dict[tuple[int, int], dict[Node, hw.Tensor]] = {}  # (stage, micro-batch) -> results and saved values
        self.moved: dict[Any, hw.Tensor] = {}  # results of stages, moved to the meshes of the stages that read them
        self.tangents: dict[Any, hw.Tensor] = {}  # gradients of results of stages
        self.kept: dict[tuple[int, int], dict[str, hw.Tensor]] = {}  # values that the first half of a backward pass saves
        self.gradients: dict[tuple[int, str], hw.Tensor] = {}
        self.losses: list[hw.Tensor] = []

    def results(self, actions: Sequence[Action]) -> tuple[hw.Tensor, ...]:
        for kind, number, one in actions:
            stage = self.stages[number]
            if kind == "forward":
                self._forward(stage, one)
            elif kind in stage.backward:
                self._backward(stage, stage.backward[kind], one)
        scaled = sum(self.losses[1:], self.losses[0]) * (1 / self.pipeline.microbatches)
        if self.pipeline.updates:
            return scaled, *self._step()
        updated = self.pipeline.updated
        updated[:] = [(self.stages[number], path) for number, path in self.gradients]
        return scaled, *(self._as_parameter(*key, gradient) for key, gradient in self.gradients.items())

    def _step(self) -> list[hw.Tensor]:
        """Returns the gradient norm on each mesh of stages if gradients are clipped, then the new parameters and state of each stage."""
        pipeline = self.pipeline
        gradients: dict[int, list[hw.Tensor]] = {}
        for number, updates in pipeline.updates.items():
            axes = {one.path: tuple(dim.axes for dim in pipeline.types[one.name].dims) for one in updates.parameters}
            gradients[number] = [resharded(self.gradients[number, path], of) for path, of in axes.items()]
        norms: dict[Mesh, hw.Tensor] = {}
        if (limit := pipeline.clip) is not None:
            first = pipeline.stage_meshes[0]
            totals = [squares(of_stage) for of_stage in gradients.values() if of_stage]
            norm = hw.sqrt(sum((_moved(one, one.type, first) for one in totals[1:]), _moved(totals[0], totals[0].type, first)))
            norms = {mesh: _moved(norm, norm.type, mesh) for mesh in pipeline.stage_meshes}
            gradients = {number: clipped(own, norms[self.stages[number].mesh], limit) for number, own in gradients.items()}
        made = [*norms.values()]
        for number, updates in pipeline.updates.items():
            made += updates.compute(self.named, gradients[number])
        return made

    def _as_parameter(self, number: int, path: str, gradient: hw.Tensor) -> hw.Tensor:
        """Shards the gradient of a DTensor like the DTensor. Replicates the gradient of a plain tensor."""
        stage = self.stages[number]
        is_sharded = isinstance(tensor_of(stage.module, path), DTensor)
        return resharded(gradient, stage.joint.outer.layouts.parameters.get(path, ()) if is_sharded else ())

    def _leaf(self, stage: Stage, function: StageFunction, node: Node, name: str, one: int) -> hw.Tensor:
        """Value of an input of a stage's function."""
        if name in function.graph.bound:
            return self.inputs[id(function), name]
        if path := function.graph.parameters.get(name):
            return self.inputs[stage.number, path]
        number: Any = stage.joint.source_of(node)
        source: Any = stage.source_of(number)
        key = source, one, stage.mesh
        if source.stage is None:
            return self.inputs[key]
        if key not in self.moved:
            maker = self.stages[source.stage]
            value = self.results_of[source.stage, one][maker.outer.of_module[source.number]]
            self.moved[key] = _moved(value, function.graph.input_types[name], stage.mesh)
        return self.moved[key]

    def _forward(self, stage: Stage, one: int) -> None:
        made = stage.forward(lambda node, name: self._leaf(stage, stage.forward, node, name, one))
        self.results_of[stage.number, one] = {of: made[node] for of, node in stage.returned if node in made}
        if stage.number == len(self.stages) - 1:
            loss = stage.joint.results[stage.joint.differentiable.index(True)]
            self.losses.append(self.results_of[stage.number, one][loss])

    def _backward(self, stage: Stage, function: StageFunction, one: int) -> None:
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
                    return _filled(result, results[result], 1 / self.pipeline.microbatches)
                key = stage.number, result, one
                return self.tangents[key] if key in self.tangents else _filled(result, results[result], 0)
            return self._leaf(stage, function, node, name, one)

        made = function(value)
        for node, what in zip(function.graph.returned, function.returned, strict=True):
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

    def _send_back(self, maker: Stage, number: int, gradient: hw.Tensor, one: int) -> None:
        result = maker.outer.of_module[number]
        arrived = _moved(gradient, maker.type_of(result), maker.mesh)
        key = maker.number, result, one
        self.tangents[key] = self.tangents[key] + arrived if key in self.tangents else arrived


def _moved(value: hw.Tensor, type: TensorType, mesh: Mesh) -> hw.Tensor:
    """Moves a value to a mesh with the sharding of `type`, unless the value is already on this mesh."""
    if value.type.mesh == mesh:
        return value
    return hw.reshard(value, *(f"{dim.size}@{','.join(dim.axes)}" if dim.axes else dim.size for dim in type.dims), mesh=mesh)


def _filled(node: Node, beside: hw.Tensor, value: float) -> hw.Tensor:
    of = node.meta["val"]
    return full(Result((of.dtype,), (tuple(of.shape),), beside), value)
