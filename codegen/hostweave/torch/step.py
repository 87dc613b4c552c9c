"""A whole step of training as one program: forward and backward pass, and the step of an optimizer in place."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import full as full_dtensor
from torch.export import ExportedProgram

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.base.names import unique_name
from hostweave.runtime.group import Group
from hostweave.runtime.group import current as current_group
from hostweave.torch.aten import cast, dtype_of
from hostweave.torch.compiled import ProgramPart, tensor_of
from hostweave.torch.graph import GradientUpdate, Graph, name_of
from hostweave.torch.joint import Joint
from hostweave.torch.loss_scale import SCALE, LossScale, unscaled
from hostweave.torch.optimizer import GRADIENT, PARAMETER, RecordedStep
from hostweave.torch.training import Compile, Differentiated
from hostweave.types.tensor import Dim, TensorType

_SUM = "sum"  # suffix of the names of sums of gradients
_ODD = "not_finite"  # number of gradient elements that are not finite, in a step that scales its loss
_IS_FIRST = "is_first"  # input of the program that adds gradients: 1 in the first call of a sum


class _Updated(NamedTuple):
    """A parameter that the step updates: its input of the program, its path in the module, and the step of the optimizer for it."""

    name: str
    path: str
    parameter: torch.Tensor
    recorded: RecordedStep

    @property
    def layer(self) -> tuple[str, str]:
        """The list that contains the parameter's module, and its number; only the path if there is no list."""
        words = self.path.split(".")
        at = next((at for at, word in enumerate(words) if word.isdigit()), len(words))
        return ".".join(words[:at]), "".join(words[at : at + 1])

    @property
    def own(self) -> str:
        """Its name within its layer."""
        return name_of(self.path.removeprefix(f"{'.'.join(self.layer)}.")) if self.layer[1] else self.name

    @property
    def entries(self) -> dict[str, str]:
        """The suffix of the name of each value that the step reads, by its role in the optimizer."""
        return {PARAMETER: "", **{key: f"_{key}" for key in self.recorded.entries}}

    @property
    def written(self) -> list[str]:
        """The suffixes of the names of values that the step writes."""
        results = self.recorded.step.results
        return [end for key, end in self.entries.items() if results[key].source != key]

    def type_of(self, key: str, stated: TensorType) -> TensorType:
        """The type of one of `entries`: sharded like the parameter if it has the same shape, otherwise replicated."""
        if key == PARAMETER:
            return stated
        entry = self.recorded.entries[key]
        dims = stated.dims if entry.shape == self.parameter.shape else tuple(map(Dim.of, entry.shape))
        return TensorType(dtype_of(entry.dtype), dims)


class TrainingStep(Differentiated):
    """A training step, made by `hostweave.torch.compile` with `optimizer`. A call returns the module's results, and updates parameters.

    Parameters, and the tensors in `optimizer.state`, are updated in place, in the same program, `program`. Numbers that change from step to
    step, such as learning rates, are computed by the code of the optimizer at each call. Otherwise it is a CompiledModule.

    With `accumulate=N` the gradients of N calls are added, and the last of these calls updates. With `clip_grad_norm`, `grad_norm` is the
    norm of all gradients before clipping, in the last update. With `scaler` a call that updates first scales and unscales the gradients. It
    changes no parameter and no state if a gradient is not finite, and then updates the scale.
    """

    def __init__(
        self,
        module: nn.Module,
        exported: ExportedProgram,
        joint: Joint,
        compile: Compile,
        optimizer: torch.optim.Optimizer,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
    ):
        self._joint, self._optimizer, self._clip, self._accumulate = joint, optimizer, clip_grad_norm, accumulate
        device = next((one.device for one in module.parameters()), torch.device("cpu"))
        self._scale = LossScale.of(scaler, device)
        graph = joint.step_graph(SCALE if self._scale else "")
        self.grad_norm: torch.Tensor | None = None
        self._added, self._sums = 0, dict[str, torch.Tensor]()
        self._updated = _updated(module, joint, graph, optimizer)
        self._kinds = self._alike_in_numbers()
        self._numbers = self._names_of_numbers(graph)
        graph.update = self._update(graph)
        parts = [ProgramPart(graph, module, partial(compile, end="_step"), joint.numbers_of(graph))]
        if accumulate > 1:
            graph = joint.step_graph(SCALE if self._scale else "")
            graph.update = self._addition(graph)
            parts.append(ProgramPart(graph, module, partial(compile, end="_accumulate"), joint.numbers_of(graph)))
        super().__init__(module, exported, joint, *parts)
        self._adding = parts[-1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a step, and returns the module's results before the update. Raises ArgumentError if arguments do not fit."""
        passed, given = self._leaves(args, kwargs)
        group = current_group()
        written = {} if group is None else {one.name: one.parameter for one in self._updated}
        for name, parameter in written.items():
            if not isinstance(parameter, DTensor) and any(dim.axes for dim in self._part.graph.input_types[name].dims):
                raise ArgumentError(
                    f"{self._name}: {name} is replicated, but the plan shards it; make it a DTensor, or train without optimizer="
                )
        self._expect_parameters()
        results = (self._add if self._added + 1 < self._accumulate else self._step)(given, group)
        return self._ended(passed, results)

    def _step(self, given: Sequence[Any], group: Group | None) -> list[Any]:
        """The results of the module; updates parameters and state."""
        part = self._part
        had_state = [bool(self._optimizer.state.get(one.parameter)) for one in self._updated]
        numbers, hosts = self._next()
        made = part({**part.taken(given), **self._entries(), **self._sums_now(), **self._scale_now(), **numbers}, group)
        count, self._added = len(self._joint.results), 0
        if self._clip is not None:
            self.grad_norm = made[count]
        if self._scale and self._scale.update(made[count + (self._clip is not None)]):
            for one, before in zip(self._updated, had_state, strict=True):
                if not before:  # entries for which the program took zeros
                    self._optimizer.state.pop(one.parameter)
            return made[:count]
        for one, host in zip(self._updated, hosts, strict=True):
            increment_version(one.parameter)  # torch does not see the write
            state = self._optimizer.state[one.parameter]
            for key, value in host.items():
                if isinstance(value, torch.Tensor) and isinstance(state.get(key), torch.Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            if list(state) != one.recorded.order:
                self._optimizer.state[one.parameter] = {key: state[key] for key in one.recorded.order}
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedules of learning rates ask
        return made[:count]

    def _add(self, given: Sequence[Any], group: Group | None) -> list[Any]:
        """The results of the module; adds the gradients to the sums."""
        is_first = torch.tensor(float(self._added == 0)).to(self._device)
        made = self._adding({**self._adding.taken(given), **self._sums_now(), **self._scale_now(), _IS_FIRST: is_first}, group)
        self._added += 1
        return made[: len(self._joint.results)]

    # --- arguments of a call -------------------------------------------------------------------------------------------

    def _expect_parameters(self) -> None:
        held = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        if gone := next((one.path for one in self._updated if id(one.parameter) not in held), None):
            raise ArgumentError(f"{self._name}: the optimizer no longer has {gone}; compile it again")

    def _next(self) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """The input numbers of the program, and for each parameter the state on the host after the step."""
        numbers: dict[str, torch.Tensor] = {}
        hosts: dict[int, dict[str, Any]] = {}
        for kind, members in enumerate(self._kinds):
            recorded = members[0].recorded
            before = [self._host_of(one) for one in members]
            if odd := next((one for one, host in zip(members, before, strict=True) if host != before[0]), None):
                why = f"{odd.path} is at another step than {members[0].path}: {self._host_of(odd)} and {before[0]}"
                raise ArgumentError(f"{self._name}: optimizer.state: {why}; give both the same state, or separate parameter groups")
            step = recorded.next(self._name, before[0])
            hosts.update({id(one.parameter): step.host for one in members})
            names = self._numbers[kind]
            dtype = torch.promote_types(members[0].parameter.dtype, torch.float32)
            given = torch.tensor([step.numbers[at] for at in names], dtype=dtype).to(self._device)
            numbers.update({name: given[place] for place, name in enumerate(names.values())})
        return numbers, [hosts[id(one.parameter)] for one in self._updated]

    def _host_of(self, one: _Updated) -> dict[str, Any] | None:
        """The entries of a parameter's state outside of the program, as numbers; None before the first step."""
        state, entries = self._optimizer.state.get(one.parameter, {}), one.recorded.entries
        host = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in state.items() if key not in entries}
        return host if host or state.keys() == {*one.recorded.order} else None

    def _entries(self) -> dict[str, torch.Tensor]:
        """The parameters and the tensors of their state, on this rank."""
        found: dict[str, torch.Tensor] = {}
        for one in self._updated:
            state = self._optimizer.state[one.parameter]
            for key, entry in one.recorded.entries.items():
                if key not in state:
                    state[key] = _filled(one.parameter, entry, one.recorded.initial[key])
            found |= {f"{one.name}{end}": _local(state[key] if end else one.parameter) for key, end in one.entries.items()}
        return found

    def _sums_now(self) -> dict[str, torch.Tensor]:
        """The sums of gradients, on this rank."""
        if self._accumulate > 1 and not self._sums:
            self._sums = {f"{one.name}_{_SUM}": torch.zeros_like(_local(one.parameter)) for one in self._updated}
        return self._sums

    def _scale_now(self) -> dict[str, torch.Tensor]:
        return {SCALE: self._scale.now()} if self._scale else {}

    # --- the programs -------------------------------------------------------------------------------------------------

    def _alike_in_numbers(self) -> list[list[_Updated]]:
        """The parameters, grouped by equal numbers of their steps. The first parameter of each group is the smallest."""
        alike: dict[object, list[_Updated]] = {}
        for one in self._updated:
            alike.setdefault(one.recorded.words, []).append(one)
        return [sorted(members, key=lambda one: one.recorded.size) for members in alike.values()]

    def _names_of_numbers(self, graph: Graph) -> list[dict[int, str]]:
        """For each group of parameters, the input of the program for each number of the step, by position."""
        taken = dict.fromkeys(graph.input_types, "")
        found: list[dict[int, str]] = []
        for members in self._kinds:
            recorded = members[0].recorded
            found.append({})
            for at in recorded.changing:
                found[-1][at] = unique_name(recorded.step.roles[at], taken)
                taken[found[-1][at]] = ""
        return found

    @cached_property
    def _kind_of(self) -> dict[str, int]:
        return {one.name: kind for kind, members in enumerate(self._kinds) for one in members}

    def _update(self, graph: Graph) -> GradientUpdate:
        """The inputs and results of the optimizer's step for the gradients of the graph."""
        of_name = {one.name: one for one in self._updated}
        types: dict[str, TensorType] = {}
        for name, stated in graph.input_types.items():  # state follows its parameter, so that a layer's inputs are adjacent
            types[name] = stated
            if one := of_name.get(name):
                types |= {f"{name}{end}": one.type_of(key, stated) for key, end in one.entries.items()}
                types |= {f"{name}_{_SUM}": stated} if self._accumulate > 1 else {}
        for members, names in zip(self._kinds, self._numbers, strict=True):
            dtype = torch.promote_types(members[0].parameter.dtype, torch.float32)
            types |= {name: dtype_of(dtype)[()] for name in names.values()}
        written = [f"{one.name}{end}" for one in self._updated for end in one.written]
        first = self._count_of_results(graph) + (self._clip is not None) + (self._scale is not None)
        return GradientUpdate(types, {name: number for number, name in enumerate(written, first)}, len(self._updated), self._compute)

    def _addition(self, graph: Graph) -> GradientUpdate:
        """The inputs and results of a sum of gradients."""
        own = {f"{one.name}_{_SUM}": graph.input_types[one.name] for one in self._updated}
        donated = {name: number for number, name in enumerate(own, self._count_of_results(graph))}

        def add(inputs: Mapping[str, hw.Tensor], gradients: Sequence[hw.Tensor]) -> list[hw.Tensor]:
            is_first = inputs[_IS_FIRST] > 0
            return [gradient + hw.where(is_first, 0, inputs[name]) for name, gradient in zip(own, gradients, strict=True)]

        return GradientUpdate({**graph.input_types, **own, _IS_FIRST: hw.f32[()]}, donated, len(self._updated), add)

    def _count_of_results(self, graph: Graph) -> int:
        return sum(node not in graph.constants for node in graph.outputs[: len(self._joint.results)])

    def _compute(self, inputs: Mapping[str, hw.Tensor], gradients: Sequence[hw.Tensor]) -> list[hw.Tensor]:
        """New parameters and state. Equal layers are updated by calls of one function."""
        if self._accumulate > 1:
            gradients = [inputs[f"{one.name}_{_SUM}"] + g for one, g in zip(self._updated, gradients, strict=True)]
        tensors, norm, found_odd = dict(inputs), list[hw.Tensor](), list[hw.Tensor]()
        if self._scale:
            gradients, odd = unscaled(gradients, inputs[SCALE])
            found_odd, tensors[_ODD] = [odd], odd
        if self._clip is not None:
            wide = [cast(g, torch.float32) if g.dtype != hw.f64 else g for g in gradients]
            norm = [hw.sqrt(sum((hw.sum(g * g) for g in wide[1:]), hw.sum(wide[0] * wide[0])))]
            scale = hw.minimum(self._clip / (norm[0] + 1e-6), 1.0)  # same formula as torch.nn.utils.clip_grad_norm_
            gradients = [hw.astype(one * scale, g.dtype) for one, g in zip(wide, gradients, strict=True)]
        tensors |= {f"{one.name}_{GRADIENT}": gradient for one, gradient in zip(self._updated, gradients, strict=True)}
        found: dict[str, hw.Tensor] = {}
        names: dict[str, None] = {}
        for layers in self._alike(tensors):
            function = self._update_of(layers[0])
            if len(layers) > 1:
                word = type(self._optimizer).__name__.lower()
                function.__name__ = unique_name(f"{word}_{name_of(layers[0][0].layer[0]).removesuffix('s')}", names)
                names[function.__name__] = None
                types = {own: tensors[name].type for own, name in self._names_in(layers[0]).items()}
                donated = [f"{one.own}{end}" for one in layers[0] for end in one.written]
                function = hw.block(donate={own: number for number, own in enumerate(donated)}, **types)(function)
            for layer in layers:
                made = iter(function(**{own: tensors[name] for own, name in self._names_in(layer).items()}))
                found |= {f"{one.name}{end}": next(made) for one in layer for end in one.written}
        return norm + found_odd + [found[f"{one.name}{end}"] for one in self._updated for end in one.written]

    def _alike(self, tensors: Mapping[str, hw.Tensor]) -> Iterable[list[list[_Updated]]]:
        """Groups the updated parameters by layer, and the layers by equal updates."""
        layers: dict[tuple[str, str], list[_Updated]] = {}
        for one in self._updated:
            layers.setdefault(one.layer, []).append(one)
        alike: dict[object, list[list[_Updated]]] = {}
        for (of, _), layer in layers.items():
            alike.setdefault((of, *((one.own, self._kind_of[one.name], str(tensors[one.name].type)) for one in layer)), []).append(layer)
        return alike.values()

    def _names_in(self, layer: Sequence[_Updated]) -> dict[str, str]:
        """Maps the operands of a layer's update to inputs of the program."""
        given = {f"{one.own}{end}": f"{one.name}{end}" for one in layer for end in (*one.entries.values(), f"_{GRADIENT}")}
        given |= {_ODD: _ODD} if self._scale else {}
        return given | {name: name for one in layer for name in self._numbers[self._kind_of[one.name]].values()}

    def _update_of(self, layer: Sequence[_Updated]) -> Callable[..., tuple[hw.Tensor, ...]]:
        """A function of the operands in `_names_in`. It computes in 32 bits, or in 64 bits for 64-bit values."""

        def update(**given: hw.Tensor) -> tuple[hw.Tensor, ...]:
            made: list[hw.Tensor] = []
            for one in layer:
                ends = {**one.entries, GRADIENT: f"_{GRADIENT}"}
                dtypes = {PARAMETER: one.parameter.dtype, **{key: entry.dtype for key, entry in one.recorded.entries.items()}}
                values = {key: given[f"{one.own}{end}"] for key, end in ends.items()}
                wide = {
                    key: cast(value, torch.promote_types(dtypes.get(key, one.parameter.dtype), torch.float32))
                    for key, value in values.items()
                }
                numbers = {at: given[name] for at, name in self._numbers[self._kind_of[one.name]].items()}
                results = one.recorded.step.compute(wide, numbers)
                new = {key: cast(results[key], dtypes[key]) for key, end in one.entries.items() if end in one.written}
                made += [hw.where(given[_ODD] > 0, values[key], value) if self._scale else value for key, value in new.items()]
            return tuple(made)

        return update


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of this rank."""
    own: Any = tensor.detach()
    return own.to_local() if isinstance(own, DTensor) else own


def _filled(parameter: torch.Tensor, entry: torch.Tensor, value: float) -> torch.Tensor:
    """An entry of the state before the first step."""
    if entry.shape == parameter.shape:
        return torch.full_like(parameter.detach(), value, dtype=entry.dtype)
    if isinstance(parameter, DTensor):
        whole = [Replicate() for _ in parameter.placements]
        return full_dtensor(tuple(entry.shape), value, dtype=entry.dtype, device_mesh=parameter.device_mesh, placements=whole)
    return torch.full(tuple(entry.shape), value, dtype=entry.dtype, device=parameter.device)


def _updated(module: nn.Module, joint: Joint, graph: Graph, optimizer: torch.optim.Optimizer) -> list[_Updated]:
    """The parameters with gradients, in the order of these. Raises ProgramError for an optimizer that does not fit."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ProgramError(f"optimizer: {optimizer!r} is not a torch.optim.Optimizer; pass one that has the parameters of the module")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ProgramError("optimizer: hooks on its step are not supported; remove them, or omit optimizer=")
    group_of = {one: number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    names = {of: name for name, of in graph.parameters.items()}
    recorded: dict[object, RecordedStep] = {}
    found = []
    for node, origin in zip(graph.returned[len(joint.results) :], joint.origins, strict=True):
        if node is None:
            continue
        tensor = tensor_of(module, origin.name) if origin.kind == "parameter" else None
        if tensor is None or tensor not in group_of:
            raise ProgramError(f"optimizer: {origin.name} requires grad, but is not in the optimizer; add it, or freeze it")
        if node in graph.constants:
            raise ProgramError(
                f"optimizer: the gradient of {origin.name} does not depend on the inputs; freeze the parameter, or omit optimizer="
            )
        state = optimizer.state.get(tensor, {})
        alike = group_of[tensor], tuple(tensor.shape), tensor.dtype, bool(state)
        if alike not in recorded:
            recorded[alike] = RecordedStep(optimizer, *alike[:3], state)
        found.append(_Updated(names[origin.name], origin.name, tensor, recorded[alike]))
    return found
