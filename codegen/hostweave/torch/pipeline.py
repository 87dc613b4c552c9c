"""Pipelines: stages of a model run on parts of a mesh. One program runs all micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import Pipe
from torch.distributed.tensor import DTensor

from hostweave.api import Program
from hostweave.api import compile as compile_program
from hostweave.base.errors import ArgumentError, HostweaveError, ProgramError
from hostweave.options import Options, options_of
from hostweave.runtime.group import current as current_group
from hostweave.torch.compiled import not_traced
from hostweave.torch.held import Folded, block_of, placed_like, tensor_of
from hostweave.torch.pipeline_program import PipelineInputs, recorded
from hostweave.torch.plan import AxesOfDims, mesh_of
from hostweave.torch.schedules import schedule_of
from hostweave.torch.stage_trace import example_of, traced_stage
from hostweave.torch.stages import HERE, Source, Stage, WithLoss, cut, expect_matches, expect_own_parameters, stage_meshes_of
from hostweave.torch.updates import hooked


class Pipeline:
    """A compiled training pipeline. A call returns the mean loss of the micro-batches, and adds the gradients to `.grad`.

    In a group, only ranks of the last stage receive the loss. A rank computes gradients only for parameters of its stages, and may pass
    None for arguments that its stages do not read. Without a group, all ranks are in this process, and arguments are whole tensors.

    With `optimizer`, a call changes no `.grad`, but updates parameters and `optimizer.state` in place. Each rank updates only parameters of
    its stages. With `clip_grad_norm`, `grad_norm` is the gradient norm of the last call, over all stages and before clipping.
    """

    def __init__(self, inputs: PipelineInputs, program: Program, names: list[str]):
        self.program, self._inputs, self._names = program, inputs, names
        self.grad_norm: torch.Tensor | None = None
        graphs = ((stage, (stage.forward, *stage.backward.values())) for stage in inputs.stages)
        self._folded = [Folded(stage.module, stage.outer, [one.graph for one in functions]) for stage, functions in graphs]
        for stage in inputs.stages:
            if why := hooked(stage.module.named_parameters()):
                raise ProgramError(f"{HERE}: stage {stage.number}: {why}")
        self._wants = {id(one): one.requires_grad for stage in inputs.stages for one in stage.module.parameters()}

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Computes the loss and the gradients, or runs a training step. Returns None on ranks outside of the last stage.

        Raises ArgumentError if arguments do not fit, or if a module has changed since compilation.
        """
        self._expect_unchanged()
        group = current_group()
        rank = group.rank if group else None
        values = _bound(self._names, args, kwargs)
        count, named = self._inputs.microbatches, zip(self._names, values, strict=True)
        batches = [None if value is None and group else _batches(f"pipeline: {name}", value, count, ArgumentError) for name, value in named]
        given, hosts = self._stepped(rank)
        with torch.no_grad():
            held = {name: tensor_of(stage.module, path) for name, (stage, path) in self._inputs.tensors.items() if name not in given}
            given |= {name: self._own(tensor, name, rank) for name, tensor in {**held, **self._inputs.constants}.items()}
            for name, (number, one) in self._inputs.arguments.items():
                is_here = self._is_on(rank, name)
                if is_here and batches[number] is None:
                    raise ArgumentError(f"pipeline: {self._names[number]} is None, but rank {rank} takes it; pass this rank's rows")
                given[name] = batches[number][one] if is_here else None  # type: ignore[index]
            made = self.program(**given, group=group) if group else self.program.run(**given)
            loss, *others = made if isinstance(made, tuple) else (made,)
            if self._inputs.clip is not None:
                self.grad_norm = next(one for one in others[: len(self._inputs.stage_meshes)] if one is not None)
            for number, of_stage in hosts.items():
                self._inputs.updates[number].ended(of_stage)
            for (stage, path), gradient in zip(self._inputs.updated, others if self._inputs.updated else (), strict=True):
                if gradient is not None:
                    parameter = tensor_of(stage.module, path)
                    added = placed_like(parameter, gradient) if group else gradient
                    parameter.grad = added if parameter.grad is None else parameter.grad + added
        return loss  # type: ignore[no-any-return]

    def _stepped(self, rank: int | None) -> tuple[dict[str, Any], dict[int, list[dict[str, Any]]]]:
        """Inputs of the optimizer steps, None for stages of other ranks, and the host state after the step of each stage of this rank."""
        given: dict[str, Any] = {}
        hosts: dict[int, list[dict[str, Any]]] = {}
        for number, updates in self._inputs.updates.items():
            stage = self._inputs.stages[number]
            is_here = rank is not None and rank in stage.mesh.all_ranks
            updates.expect_held(f"pipeline: stage {number}", self._inputs.types if is_here else {})
            if rank is not None and not is_here:
                names = [name for one in updates.parameters for name in one.types(self._inputs.types[one.name])]
                given |= dict.fromkeys([*names, *updates.numbers()])
                continue
            for one in updates.parameters:
                if rank is None and isinstance(one.parameter, DTensor):
                    why = "is a DTensor, and without a group all ranks run in this process on copies of it"
                    raise ArgumentError(f"pipeline: stage {number}: {one.path} {why}; call hw.init on each rank")
            device = next((one.parameter.device for one in updates.parameters), torch.device("cpu"))
            numbers, hosts[number] = updates.next("pipeline", device)
            given |= {**updates.entries(), **numbers}
        return given, hosts

    def _own(self, held: Any, name: str, rank: int | None) -> Any:
        """This rank's block of a tensor, or None if the rank has none. Without a group, the whole tensor."""
        return block_of(held, rank, self._inputs.types[name], self.program.mesh).contiguous() if self._is_on(rank, name) else None

    def _is_on(self, rank: int | None, name: str) -> bool:
        """True if a rank takes a block of an input. Without a group, all ranks are in this process."""
        return rank is None or rank in self._inputs.types[name].mesh_in(self.program.mesh).all_ranks

    def _expect_unchanged(self) -> None:
        for stage, folded in zip(self._inputs.stages, self._folded, strict=True):
            if changed := stage.state.changed() or folded.changed() or hooked(stage.module.named_parameters()):
                raise ArgumentError(f"pipeline: stage {stage.number}: {changed}")
            for path, one in stage.module.named_parameters():
                if self._wants.get(id(one)) != one.requires_grad:
                    raise ArgumentError(
                        f"pipeline: stage {stage.number}: {path} was replaced, or its requires_grad has changed; compile again"
                    )


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
    optimizer: torch.optim.Optimizer | None,
    clip_grad_norm: float | None,
) -> Pipeline:
    names, modules, wiring = cut(pipe)
    if loss is not None:
        modules[-1] = WithLoss(modules[-1], loss).train(modules[-1].training)
        wiring[-1].append(Source(None, len(names)))
        names.append("target")
    args, kwargs = ((), example_inputs) if isinstance(example_inputs, Mapping) else (tuple(example_inputs), {})
    bound = zip(names, _bound(names, args, kwargs), strict=True)
    examples = [_batches(f"{HERE}: example_inputs: {name}", value, microbatches, ProgramError)[0] for name, value in bound]
    stage_meshes = stage_meshes_of(mesh_of(mesh))
    actions = schedule_of(schedule, len(modules), len(stage_meshes), microbatches)
    settings = options_of(options, "pipeline")
    expect_own_parameters(modules)
    expect_matches(plan, modules, names)
    splits = any(action.kind == "weight" for action in actions)
    stages: list[Stage] = []
    rows: tuple[int, AxesOfDims] = (examples[0].shape[0], ())
    for number, (module, sources) in enumerate(zip(modules, wiring, strict=True)):
        if number and not isinstance(pipe, Pipe):
            sources[:0] = [Source(number - 1, at) for at in range(len(stages[-1].outer.of_module))]
        given = [example_of(stages, source, examples) for source in sources]
        mesh_of_stage, is_last = stage_meshes[number % len(stage_meshes)], number == len(modules) - 1
        stage, rows = traced_stage(number, module, mesh_of_stage, sources, given, names, plan, rows, settings, splits, is_last)
        stages.append(stage)
    tensors = [one for module in modules for one in module.parameters()]
    device = target or ("cuda" if any(one.is_cuda for one in tensors) else "cpu")
    if schedule != "auto":
        settings = replace(settings, stages="as_written")
    inputs = PipelineInputs(stages, names, microbatches, optimizer, clip_grad_norm)
    return Pipeline(inputs, compile_program(recorded(inputs, actions), target=device, options=settings), names)


def _batches(name: str, value: Any, count: int, error: type[HostweaveError]) -> tuple[torch.Tensor, ...]:
    if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] % count:
        of = f"{value.shape[0]} rows" if isinstance(value, torch.Tensor) and value.ndim else repr(value)
        raise error(f"{name} has {of}; pass a tensor whose first dim is a multiple of microbatches={count}")
    return value.detach().contiguous().chunk(count)


def _bound(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names) or len(given) != len(args) + len(kwargs) or sorted(given) != sorted(names):
        listed = ", ".join([*(f"#{number + 1}" for number in range(len(args))), *kwargs]) or "none"
        raise ArgumentError(f"pipeline: takes {', '.join(names)}, but was given {listed}; pass each argument once")
    return [given[name] for name in names]
