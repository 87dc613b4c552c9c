"""A whole step of training as one program: forward and backward pass, and AdamW in place."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.export import ExportedProgram

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.base.names import unique_name
from hostweave.runtime.group import current as current_group
from hostweave.torch.aten import cast
from hostweave.torch.compiled import Part, not_traced, tensor_of
from hostweave.torch.graph import Graph, Update, name_of
from hostweave.torch.joint import Joint
from hostweave.torch.training import Compile, Differentiated
from hostweave.types.tensor import TensorType

_UNUSED = ("amsgrad", "maximize", "capturable", "differentiable")
_RATES = ("rate", "scale", "decay")  # numbers of a parameter group that change from step to step
_MOMENTS = ("exp_avg", "exp_avg_sq")
_WRITTEN = ("", *(f"_{key}" for key in _MOMENTS))  # ends of the names of what is updated


class _Updated(NamedTuple):
    """A parameter that the step updates: its input of the program, its path in the module, and its parameter group."""

    name: str
    path: str
    parameter: torch.Tensor
    group: int

    @property
    def layer(self) -> tuple[str, str]:
        """The list of modules in which it is, and the number there; its path alone in none."""
        words = self.path.split(".")
        at = next((at for at, word in enumerate(words) if word.isdigit()), len(words))
        return ".".join(words[:at]), "".join(words[at : at + 1])

    @property
    def own(self) -> str:
        """Its name within its layer."""
        return name_of(self.path.removeprefix(f"{'.'.join(self.layer)}.")) if self.layer[1] else self.name


class TrainingStep(Differentiated):
    """A step of training, made by `hostweave.torch.compile` with `optimizer`: a call returns what the module does, and updates parameters.

    Parameters, and the moments in `optimizer.state`, are updated in place, in the same program, `program`. Learning rates and weight decay
    are read from the optimizer at each call. Otherwise it is a CompiledModule.
    """

    def __init__(self, module: nn.Module, exported: ExportedProgram, joint: Joint, compile: Compile, optimizer: torch.optim.Optimizer):
        self._joint, self._optimizer, graph = joint, optimizer, joint.step_graph()
        self._updated = _updated(module, joint, graph, optimizer)
        graph.update = self._update(graph)
        self._options = self._options_now()
        super().__init__(module, exported, joint, Part(graph, module, partial(compile, end="_step"), joint.numbers_of(graph)))

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns for these arguments, before the update. Raises ArgumentError for others than it was compiled for."""
        passed, given = self._leaves(args, kwargs)
        group = current_group()
        written = {} if group is None else {one.name: one.parameter for one in self._updated}
        for name, parameter in written.items():
            if not isinstance(parameter, DTensor) and any(dim.axes for dim in self._part.graph.input_types[name].dims):
                raise ArgumentError(
                    f"{self._name}: {name} is whole on each rank, and the plan shards it; make it a DTensor, or train without optimizer="
                )
        self._expect_options()
        part = self._part
        results = part({**part.taken(given), **self._written(), **self._rates()}, group)[: len(self._joint.results)]
        for one in self._updated:  # which torch does not see written
            increment_version(one.parameter)
            self._optimizer.state[one.parameter]["step"] += 1
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedules of learning rates ask
        return self._returned({**passed, **dict(zip(self._joint.results, results, strict=True))})

    def _options_now(self) -> list[dict[str, Any]]:
        """What the program is compiled for, of each parameter group."""
        return [{key: group.get(key) for key in ("betas", "eps", *_UNUSED)} for group in self._optimizer.param_groups]

    def _expect_options(self) -> None:
        for number, (now, then) in enumerate(zip(self._options_now(), self._options, strict=False)):  # a group that is added has others
            for key in (key for key in then if now[key] != then[key]):
                why = f"{key} of parameter group {number} is {now[key]}, and was {then[key]} at compile"
                remedy = ", and with OneCycleLR pass cycle_momentum=False" if key == "betas" else ""
                raise ArgumentError(f"{self._name}: {why}; compile it again{remedy}")
        held = {id(one) for group in self._optimizer.param_groups for one in group["params"]}
        if gone := next((one.path for one in self._updated if id(one.parameter) not in held), None):
            raise ArgumentError(f"{self._name}: the optimizer no longer has {gone}, and had it at compile; compile it again")

    def _written(self) -> dict[str, torch.Tensor]:
        """The parameters and moments, as this rank has them."""
        found: dict[str, torch.Tensor] = {}
        for one in self._updated:
            state = self._optimizer.state[one.parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state.update({key: torch.zeros_like(one.parameter) for key in _MOMENTS})
            for name, tensor in ((one.name, one.parameter), *((f"{one.name}_{key}", state[key]) for key in _MOMENTS)):
                own: Any = tensor.detach()
                found[name] = own.to_local() if isinstance(own, DTensor) else own
        return found

    def _rates(self) -> dict[str, torch.Tensor]:
        """What depends on the number of the step, and on the learning rates of now."""
        rates: dict[str, torch.Tensor] = {}
        for number in {one.group for one in self._updated}:
            options = self._optimizer.param_groups[number]
            one = next(one for one in self._updated if one.group == number)
            step, lr, (first, second) = float(self._optimizer.state[one.parameter]["step"]) + 1, float(options["lr"]), options["betas"]
            numbers = lr / (1 - first**step), (1 - second**step) ** -0.5, 1 - lr * options["weight_decay"]
            given = torch.tensor(numbers, dtype=torch.float32).to(self._device)
            rates.update({f"{key}_{number}": given[place] for place, key in enumerate(_RATES)})
        return rates

    def _update(self, graph: Graph) -> Update:
        """The inputs and results of AdamW (Loshchilov and Hutter, 2019) for the gradients of the graph."""
        results = sum(node not in graph.constants for node in graph.outputs[: len(self._joint.results)])
        donated = {f"{one.name}{end}": number for number, (one, end) in enumerate(product(self._updated, _WRITTEN), results)}
        updated = {one.name for one in self._updated}
        types: dict[str, TensorType] = {}
        for name, of in graph.input_types.items():  # moments beside their parameter, so that those of a layer are beside each other
            types |= {f"{name}{end}": of for end in (_WRITTEN if name in updated else ("",))}
        types |= {f"{key}_{number}": hw.f32[()] for number in {one.group for one in self._updated} for key in _RATES}
        return Update(types, donated, len(self._updated), self._compute)

    def _compute(self, inputs: Mapping[str, hw.Tensor], gradients: Sequence[hw.Tensor]) -> list[hw.Tensor]:
        """New parameters and moments. Layers that have the same parameters are updated by calls of one function."""
        tensors = {**inputs, **{f"{one.name}_gradient": gradient for one, gradient in zip(self._updated, gradients, strict=True)}}
        found: dict[str, list[hw.Tensor]] = {}
        names: dict[str, None] = {}
        for layers in self._alike(tensors):
            function = self._update_of(layers[0])
            if len(layers) > 1:
                function.__name__ = unique_name(f"adamw_{name_of(layers[0][0].layer[0]).removesuffix('s')}", names)
                names[function.__name__] = None
                types = {own: tensors[name].type for own, name in _given(layers[0]).items()}
                donated = [f"{one.own}{end}" for one in layers[0] for end in _WRITTEN]
                function = hw.block(donate={own: number for number, own in enumerate(donated)}, **types)(function)
            for layer in layers:
                made = iter(function(**{own: tensors[name] for own, name in _given(layer).items()}))
                found.update({one.name: [next(made) for _ in _WRITTEN] for one in layer})
        return [tensor for one in self._updated for tensor in found[one.name]]

    def _alike(self, tensors: Mapping[str, hw.Tensor]) -> Iterable[list[list[_Updated]]]:
        """What is updated, by layers, together with those that are updated in the same way."""
        layers: dict[tuple[str, str], list[_Updated]] = {}
        for one in self._updated:
            layers.setdefault(one.layer, []).append(one)
        alike: dict[object, list[list[_Updated]]] = {}
        for (of, _), layer in layers.items():
            alike.setdefault((of, *((one.own, one.group, str(tensors[one.name].type)) for one in layer)), []).append(layer)
        return alike.values()

    def _update_of(self, layer: Sequence[_Updated]) -> Callable[..., tuple[hw.Tensor, ...]]:
        """A function of what `_given` names."""

        def update(**given: hw.Tensor) -> tuple[hw.Tensor, ...]:
            made: list[hw.Tensor] = []
            for one in layer:
                options = self._optimizer.param_groups[one.group]
                (first, second), dtype = options["betas"], one.parameter.dtype
                wide = torch.promote_types(dtype, torch.float32)
                w, m, v, g = (cast(given[f"{one.own}{end}"], wide) for end in (*_WRITTEN, "_gradient"))
                rate, scale, decay = (cast(given[f"{key}_{one.group}"], wide) for key in _RATES)
                m, v = first * m + (1 - first) * g, second * v + (1 - second) * (g * g)
                w = w * decay - rate * m / (hw.sqrt(v) * scale + options["eps"])
                made += [cast(x, dtype) for x in (w, m, v)]
            return tuple(made)

        return update


def _given(layer: Sequence[_Updated]) -> dict[str, str]:
    """What the update of a layer takes: names of its own, and those of the program."""
    given = {f"{one.own}{end}": f"{one.name}{end}" for one in layer for end in (*_WRITTEN, "_gradient")}
    return given | {f"{key}_{one.group}": f"{key}_{one.group}" for one in layer for key in _RATES}


def _updated(module: nn.Module, joint: Joint, graph: Graph, optimizer: torch.optim.Optimizer) -> list[_Updated]:
    """The parameters with gradients, in the order of these. Raises ProgramError for an optimizer that does not fit."""
    if type(optimizer) is not torch.optim.AdamW:
        why = f"a step is compiled with torch.optim.AdamW, not {type(optimizer).__name__}"
        raise ProgramError(f"optimizer: {why}; pass one, or leave optimizer= out and call backward() and step()")
    for number, group in enumerate(optimizer.param_groups):
        if used := [key for key in _UNUSED if group.get(key)]:
            raise ProgramError(f"optimizer: parameter group {number} has {used[0]}=True, which a step does not compute; leave it False")
    group_of = {one: number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    names = {of: name for name, of in graph.parameters.items()}
    found = []
    for node, origin in zip(graph.returned[len(joint.results) :], joint.origins, strict=True):
        if node is None:
            continue
        tensor = tensor_of(module, origin.name) if origin.kind == "parameter" else None
        if tensor is None or tensor not in group_of:
            raise ProgramError(f"optimizer: {origin.name} requires grad, and the optimizer does not have it; add it, or freeze it")
        if node in graph.constants:
            raise ProgramError(
                f"optimizer: the gradient of {origin.name} is the same whatever the module takes; freeze it, or leave optimizer= out"
            )
        found.append(_Updated(names[origin.name], origin.name, tensor, group_of[tensor]))
    return found
