"""Computes the step of an optimizer in a program."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import full as full_dtensor

import hostweave as hw
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.base.names import claim_unique
from hostweave.torch.aten import cast, dtype_of
from hostweave.torch.nodes import name_of
from hostweave.torch.optimizer import RecordedStep
from hostweave.torch.update_step import GRADIENT, PARAMETER
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import Dim, TensorType

_ODD = "not_finite"  # operand of an update with loss scaling: number of gradient elements that are not finite


class Updated(NamedTuple):
    """A parameter that the step updates. `name` is the program input for the parameter."""

    name: str
    path: str
    parameter: torch.Tensor
    recorded: RecordedStep

    @property
    def layer(self) -> tuple[str, str]:
        """Path of the outermost list that contains the parameter, and the index in the list. Without a list: (path, "")."""
        words = self.path.split(".")
        at = next((at for at, word in enumerate(words) if word.isdigit()), len(words))
        return ".".join(words[:at]), "".join(words[at : at + 1])

    @property
    def own(self) -> str:
        return name_of(self.path.removeprefix(f"{'.'.join(self.layer)}.")) if self.layer[1] else self.name

    @property
    def entries(self) -> dict[str, str]:
        """Maps `PARAMETER` and the key of each state entry to a suffix for names of program inputs."""
        return {PARAMETER: "", **{key: f"_{key}" for key in self.recorded.entries}}

    @property
    def written(self) -> list[str]:
        """Suffixes of the values that the step writes."""
        results = self.recorded.step.results
        return [end for key, end in self.entries.items() if results[key].source != key]

    def types(self, stated: TensorType) -> dict[str, TensorType]:
        """Types of `entries` by name. Entries of the parameter's shape are sharded like the parameter, and all others are replicated."""
        found = {self.name: stated}
        for key, entry in self.recorded.entries.items():
            dims = stated.dims if entry.shape == self.parameter.shape else tuple(map(Dim.of, entry.shape))
            found[f"{self.name}{self.entries[key]}"] = TensorType(dtype_of(entry.dtype), dims, mesh=stated.mesh)
        return found


def updated_by(optimizer: Any, parameters: Iterable[tuple[str, str, torch.Tensor]]) -> list[Updated]:
    """Records the optimizer's step for each parameter (input of the program, path, tensor)."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ProgramError(f"optimizer: {optimizer!r} is not a torch.optim.Optimizer; pass an optimizer of the parameters of the module")
    parameters = list(parameters)
    if why := hooked((one[1:] for one in parameters), optimizer):
        raise ProgramError(f"optimizer: {why}")
    group_of = {one: number for number, group in enumerate(optimizer.param_groups) for one in group["params"]}
    recorded: dict[object, RecordedStep] = {}
    found = []
    for name, path, tensor in parameters:
        if tensor not in group_of:
            raise ProgramError(f"optimizer: {path} requires grad, but is not in the optimizer; add it, or freeze it")
        state = optimizer.state.get(tensor, {})
        alike = group_of[tensor], tuple(tensor.shape), tensor.dtype, bool(state)
        if alike not in recorded:
            recorded[alike] = RecordedStep(optimizer, *alike[:3], state)
        found.append(Updated(name, path, tensor, recorded[alike]))
    return found


def hooked(parameters: Iterable[tuple[str, torch.Tensor]], optimizer: torch.optim.Optimizer | None = None) -> str:
    """Error text for hooks that a program would not call, or ""."""
    if optimizer and (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks):
        return "hooks on the step of the optimizer are not supported; remove them, or omit optimizer="
    found = next((path for path, one in parameters if one._backward_hooks or one._post_accumulate_grad_hooks), "")
    remedy = "remove them, or compile the module with training=True and without optimizer="
    return f"{found} has hooks on its gradient, which the program would not call; {remedy}" if found else ""


class Updates:
    """The step of an optimizer in a program. `taken` has the names of all other inputs. Names of functions begin with `prefix`."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Updated], taken: Collection[str], prefix: str = ""):
        self.optimizer, self.parameters, self._prefix = optimizer, parameters, prefix
        alike: dict[object, list[Updated]] = {}
        for one in parameters:
            alike.setdefault(one.recorded.words, []).append(one)
        # Parameters with equal steps, the smallest one first.
        self._kinds = [sorted(members, key=lambda one: one.recorded.size) for members in alike.values()]
        names = set(taken)
        self._numbers: list[dict[int, str]] = []  # for each kind: index of a changing number in the step -> input of the program
        for members in self._kinds:
            recorded = members[0].recorded
            self._numbers.append({})
            for at in recorded.changing:
                self._numbers[-1][at] = claim_unique(recorded.step.roles[at], names)

    # --- the program ---------------------------------------------------------------------------------------------------

    @property
    def written(self) -> list[str]:
        """Inputs that the step writes, in the order of `compute`."""
        return [f"{one.name}{end}" for one in self.parameters for end in one.written]

    def numbers(self, mesh: Mesh | None = None) -> dict[str, TensorType]:
        """Types of the inputs for numbers that change between steps, such as learning rates."""
        dtypes = [torch.promote_types(members[0].parameter.dtype, torch.float32) for members in self._kinds]
        pairs = zip(dtypes, self._numbers, strict=True)
        return {name: TensorType(dtype_of(dtype), (), mesh=mesh) for dtype, names in pairs for name in names.values()}

    def compute(self, inputs: Mapping[str, hw.Tensor], gradients: Sequence[hw.Tensor], odd: hw.Tensor | None = None) -> list[hw.Tensor]:
        """Computes the new values of `written`. If `odd` is above 0, they are the old values. Equal layers share one function."""
        tensors = dict(inputs) if odd is None else {**inputs, _ODD: odd}
        tensors |= {f"{one.name}_{GRADIENT}": gradient for one, gradient in zip(self.parameters, gradients, strict=True)}
        found: dict[str, hw.Tensor] = {}
        names = set[str]()
        for layers in self._alike(tensors):
            function = self._update_of(layers[0])
            operands = [self._names_in(layer, odd is not None) for layer in layers]
            if len(layers) > 1:
                word = f"{self._prefix}{type(self.optimizer).__name__.lower()}"
                function.__name__ = claim_unique(f"{word}_{name_of(layers[0][0].layer[0]).removesuffix('s')}", names)
                types = {own: tensors[name].type for own, name in operands[0].items()}
                donated = [f"{one.own}{end}" for one in layers[0] for end in one.written]
                function = hw.block(donate={own: number for number, own in enumerate(donated)}, **types)(function)
            for layer, names_of in zip(layers, operands, strict=True):
                results: Any = function(**{own: tensors[name] for own, name in names_of.items()})
                made = iter([results] if isinstance(results, hw.Tensor) else results)  # a function with one result returns a tensor
                found |= {f"{one.name}{end}": next(made) for one in layer for end in one.written}
        return [found[name] for name in self.written]

    @cached_property
    def _kind_of(self) -> dict[str, int]:
        return {one.name: kind for kind, members in enumerate(self._kinds) for one in members}

    def _alike(self, tensors: Mapping[str, hw.Tensor]) -> Iterable[list[list[Updated]]]:
        layers: dict[tuple[str, str], list[Updated]] = {}
        for one in self.parameters:
            layers.setdefault(one.layer, []).append(one)
        alike: dict[object, list[list[Updated]]] = {}
        for (of, _), layer in layers.items():
            alike.setdefault((of, *((one.own, self._kind_of[one.name], str(tensors[one.name].type)) for one in layer)), []).append(layer)
        return alike.values()

    def _names_in(self, layer: Sequence[Updated], is_scaled: bool) -> dict[str, str]:
        """Maps operands of a layer's update to the names of tensors in `compute`."""
        given = {f"{one.own}{end}": f"{one.name}{end}" for one in layer for end in (*one.entries.values(), f"_{GRADIENT}")}
        given |= {_ODD: _ODD} if is_scaled else {}
        return given | {name: name for one in layer for name in self._numbers[self._kind_of[one.name]].values()}

    def _update_of(self, layer: Sequence[Updated]) -> Callable[..., tuple[hw.Tensor, ...]]:
        """Returns a function that updates a layer, with the keys of `_names_in` as arguments, in f64 for f64 values, otherwise in f32."""

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
                made += [hw.where(given[_ODD] > 0, values[key], value) if _ODD in given else value for key, value in new.items()]
            return tuple(made)

        return update

    # --- a call --------------------------------------------------------------------------------------------------------

    def expect_held(self, name: str, sharded: Mapping[str, TensorType]) -> None:
        """Refuses a step in torch.inference_mode(), and a step with hooks. Also refuses a step if the optimizer has lost a parameter, or
        if a parameter of this rank is not sharded as in the program. `sharded` has the types of this rank's inputs, and is empty without
        a group."""
        if torch.is_inference_mode_enabled():
            raise ArgumentError(f"{name}: torch.inference_mode() is on, in which no tensor can be trained; call the step outside of it")
        if why := hooked(((one.path, one.parameter) for one in self.parameters), self.optimizer):
            raise ArgumentError(f"{name}: {why}")
        held = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        if gone := next((one.path for one in self.parameters if id(one.parameter) not in held), None):
            raise ArgumentError(f"{name}: the optimizer no longer has {gone}; compile it again")
        for one in self.parameters if sharded else ():
            if not isinstance(one.parameter, DTensor) and any(dim.axes for dim in sharded[one.name].dims):
                why = "is replicated, but the plan shards it; make it a DTensor, or train without optimizer="
                raise ArgumentError(f"{name}: {one.path} {why}")

    def next(self, name: str, device: torch.device) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
        """Computes the changing numbers of the next step, and the host state of each parameter after this step."""
        numbers: dict[str, torch.Tensor] = {}
        hosts: dict[int, dict[str, Any]] = {}
        for members, names in zip(self._kinds, self._numbers, strict=True):
            recorded = members[0].recorded
            before = [self._host_of(one) for one in members]
            if odd := next((one for one, host in zip(members, before, strict=True) if host != before[0]), None):
                why = f"{odd.path} is at another step than {members[0].path}: {self._host_of(odd)}, not {before[0]}"
                raise ArgumentError(f"{name}: optimizer.state: {why}; give both the same state, or separate parameter groups")
            step = recorded.next(name, before[0])
            hosts.update({id(one.parameter): step.host for one in members})
            dtype = torch.promote_types(members[0].parameter.dtype, torch.float32)
            given = copied_to(device, torch.tensor([step.numbers[at] for at in names], dtype=dtype))
            numbers.update({of: given[position] for position, of in enumerate(names.values())})
        return numbers, [hosts[id(one.parameter)] for one in self.parameters]

    def _host_of(self, one: Updated) -> dict[str, Any] | None:
        """State entries on the host, as numbers. None before the first step."""
        state, entries = self.optimizer.state.get(one.parameter, {}), one.recorded.entries
        host = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in state.items() if key not in entries}
        return host if host or state.keys() == {*one.recorded.order} else None

    def has_state(self) -> list[bool]:
        return [bool(self.optimizer.state.get(one.parameter)) for one in self.parameters]

    def entries(self) -> dict[str, torch.Tensor]:
        """Local tensors of parameters and of their state, by name. Creates missing state entries."""
        found: dict[str, torch.Tensor] = {}
        for one in self.parameters:
            state = self.optimizer.state[one.parameter]
            for key, entry in one.recorded.entries.items():
                if key not in state:
                    state[key] = _filled(one.parameter, entry, one.recorded.initial[key])
            found |= {f"{one.name}{end}": local(state[key] if end else one.parameter) for key, end in one.entries.items()}
        return found

    def skipped(self, had_state: Sequence[bool]) -> None:
        """Removes state that was created for a skipped step."""
        for one, before in zip(self.parameters, had_state, strict=True):
            if not before:
                self.optimizer.state.pop(one.parameter)

    def ended(self, hosts: Sequence[Mapping[str, Any]]) -> None:
        """Stores the host state in the optimizer."""
        for one, host in zip(self.parameters, hosts, strict=True):
            increment_version(one.parameter)  # torch does not see the program's write
            state = self.optimizer.state[one.parameter]
            for key, value in host.items():
                if isinstance(value, torch.Tensor) and isinstance(state.get(key), torch.Tensor):
                    state[key].copy_(value)
                else:
                    state[key] = value.clone() if isinstance(value, torch.Tensor) else value
            if list(state) != one.recorded.order:
                self.optimizer.state[one.parameter] = {key: state[key] for key in one.recorded.order}
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # learning rate schedulers check this flag


def squares(gradients: Sequence[hw.Tensor]) -> hw.Tensor:
    """Sum of the squares of all elements."""
    wide = [widened(one) for one in gradients]
    return sum((hw.sum(one * one) for one in wide[1:]), hw.sum(wide[0] * wide[0]))


def clipped(gradients: Sequence[hw.Tensor], norm: hw.Tensor, limit: float) -> list[hw.Tensor]:
    """Scales gradients by the formula of torch.nn.utils.clip_grad_norm_."""
    scale = hw.minimum(limit / (norm + 1e-6), 1.0)
    return [hw.astype(widened(one) * scale, one.dtype) for one in gradients]


def widened(gradient: hw.Tensor) -> hw.Tensor:
    """A gradient in 32 bits, or in 64 bits for a 64-bit gradient."""
    return cast(gradient, torch.float32) if gradient.dtype != hw.f64 else gradient


def local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # DTensor records the gradient of `to_local` in Python, which is slow
        own: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach()


def copied_to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copies a host tensor to a device. The host does not wait for a GPU, because the source is pinned."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _filled(parameter: torch.Tensor, entry: torch.Tensor, value: float) -> torch.Tensor:
    if entry.shape == parameter.shape:
        return torch.full_like(parameter.detach(), value, dtype=entry.dtype)
    if isinstance(parameter, DTensor):
        whole = [Replicate() for _ in parameter.placements]
        return full_dtensor(tuple(entry.shape), value, dtype=entry.dtype, device_mesh=parameter.device_mesh, placements=whole)
    return torch.full(tuple(entry.shape), value, dtype=entry.dtype, device=parameter.device)
