"""Steps of a torch optimizer for the parameters of a parameter group, with the numbers that change from step to step."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.torch.update_step import GRADIENT, PARAMETER, Recorder, Replay, UpdateStep, lazy_numbers

_OFF = ("foreach", "fused")  # options that are switched off: they only select faster implementations of a step
_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")  # options that may change between steps


class Shadow:
    """A "meta" parameter and its state. Records steps of an optimizer with the options of one parameter group."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype):
        self._optimizer, self._group = optimizer, group
        self._parameter = nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        self._gradient = self._parameter.grad = torch.empty_like(self._parameter)
        self.state: dict[str, Any] = {}

    def step(self, options: Mapping[str, Any] | None = None) -> UpdateStep:
        """Records a step and updates the state. `options` replaces the options of the group."""
        recorder = Recorder({PARAMETER: self._parameter, GRADIENT: self._gradient, **self.tensors}, type(self._optimizer))
        name = type(self._optimizer).__name__
        try:
            self._run(recorder, options)
        except ProgramError as error:
            raise ProgramError(f"optimizer: the step of {name} {error}; {_REMEDY}") from error
        except Exception as error:
            raise ProgramError(f"optimizer: the step of {name} is not recorded: {type(error).__name__}: {error}; {_REMEDY}") from error
        if odd := [key for key, value in self.state.items() if isinstance(value, list | dict | tuple)]:
            raise ProgramError(f"optimizer: the state of {name} has {odd[0]}, which is neither a tensor nor a number; {_REMEDY}")
        return recorder.recorded({PARAMETER: self._parameter, **self.tensors}, self._host)

    def replayed(self, step: UpdateStep) -> UpdateStep | None:
        """Runs another step. Returns `step` with the new numbers, or None if the step fails or makes different calls."""
        replay = Replay(step.calls)
        try:
            self._run(replay)
        except Exception:  # the caller then records the step, and gets the error
            return None
        is_complete = len(replay.numbers) == len(step.numbers) and next(replay.calls, None) is None
        return replace(step, numbers=replay.numbers, host=self._host) if is_complete else None

    def _run(self, mode: TorchDispatchMode, options: Mapping[str, Any] | None = None) -> None:
        shadow = _alone(self._optimizer, options or self._optimizer.param_groups[self._group], self._parameter, self.state)
        with lazy_numbers(type(self._optimizer)), mode:
            type(self._optimizer).step(shadow)
        self.state = dict(shadow.state[self._parameter])

    @property
    def _host(self) -> dict[str, Any]:
        return {key: value for key, value in self.state.items() if key not in self.tensors}

    @property
    def tensors(self) -> dict[str, Any]:
        return {key: value for key, value in self.state.items() if isinstance(value, torch.Tensor) and value.is_meta}


_REMEDY = "omit optimizer=, and call backward() and step()"


def _alone(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, state: Mapping[str, Any]) -> Any:
    """Copy of the optimizer with only `parameter`, and without hooks."""
    shadow = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)  # copy() would copy only the pickled attributes
    shadow.param_groups = [{**group, "params": [parameter], **{key: False for key in _OFF if key in group}}]
    shadow.state = defaultdict(dict, {parameter: dict(state)} if state else {})
    shadow._optimizer_step_pre_hooks, shadow._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return shadow


def starts_from_zero(optimizer: torch.optim.Optimizer, group: int, dims: int, keys: Sequence[str]) -> bool:
    """True if two steps with random gradients have the same results from an empty state as from zeros in the entries `keys`."""
    start, *gradients = torch.randn((3, *range(2, 2 + dims)), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = []
    for zeros in (False, True):
        parameter = nn.Parameter(start.clone())
        made = _alone(optimizer, optimizer.param_groups[group], parameter, {key: torch.zeros_like(start) for key in keys} if zeros else {})
        for gradient in gradients:
            parameter.grad = gradient.clone()
            try:
                type(optimizer).step(made)
            except Exception:  # for example, the optimizer reads an entry that the empty state lacks
                return False
        ends.append([parameter.detach(), *(made.state[parameter][key] for key in keys)])
    return all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(*ends, strict=True))


class RecordedStep:
    """Recorded step for the parameters of one shape and dtype in a group. `changing` has the indices of numbers that change."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype, state: Mapping[str, Any]):
        self._optimizer, self.group, self.size = optimizer, group, prod(shape)
        wide = torch.promote_types(dtype, torch.float32)
        own, self._shadow = Shadow(optimizer, group, shape, dtype), Shadow(optimizer, group, shape, wide)
        own.step()
        self.entries: dict[str, torch.Tensor] = own.tensors  # state entries that are inputs of a program
        first = self._shadow.step()
        self._entries, self.order = self._shadow.tensors, list(self._shadow.state)
        self._hosts = {key: value for key, value in self._shadow.state.items() if _is_host(value)}
        if state:
            self._shadow.state |= {key: self._like(key, float(state[key])) for key in self._hosts if key in state}
            self._shadow.state |= {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        self.step = self._shadow.step()
        self._words = self.step.words
        self._is_first_alike = first.words == self._words
        probes = [self._shadow.step(), *self._with_other_numbers()]
        if probes[0].words != self._words:
            name = type(optimizer).__name__
            raise ProgramError(f"optimizer: two steps of {name} use different ops; {_REMEDY}")
        alike = [probe for probe in probes if probe.words == self._words]
        self.changing = [at for at, value in enumerate(self.step.numbers) if any(probe.numbers[at] != value for probe in alike)]
        self.initial = self._initial(first, len(shape), bool(state))
        self.options = self._plain_options()

    def _initial(self, first: UpdateStep, dims: int, has_state: bool) -> dict[str, float]:
        if self._is_first_alike or has_state:
            return {key: first.filled.get(key, 0) for key in self.entries}
        if starts_from_zero(self._optimizer, self.group, dims, list(self.entries)):
            return dict.fromkeys(self.entries, 0)
        name = type(self._optimizer).__name__
        raise ProgramError(f"optimizer: the first step of {name} uses different ops from later steps; run one step, and then compile")

    def _with_other_numbers(self) -> list[UpdateStep]:
        """Records a step for each scheduled option with a slightly changed value, unless nothing changes or the recording fails."""
        steps = []
        before = dict(self._shadow.state)
        for key in _SCHEDULED:
            changed = _nudged(self._optimizer.param_groups[self.group].get(key), 1e-3 if key == "lr" else None)
            if changed is not None:
                self._shadow.state = {name: one.clone() if _is_host(one) else one for name, one in before.items()}
                try:
                    steps.append(self._shadow.step({**self._optimizer.param_groups[self.group], key: changed}))
                except ProgramError:
                    continue
        self._shadow.state = before
        return steps

    def _plain_options(self) -> dict[str, Any]:
        return {key: value for key, value in self._optimizer.param_groups[self.group].items() if key not in ("params", *_OFF)}

    @property
    def words(self) -> tuple[object, ...]:
        """Key of the group, the ops, the numbers and the initial state."""
        fixed = tuple(value for at, value in enumerate(self.step.numbers) if at not in self.changing)
        return self.group, self._words, tuple(self.changing), fixed, tuple(self.step.numbers), tuple(self.initial.items())

    def next(self, name: str, host: Mapping[str, Any] | None) -> UpdateStep:
        """Returns the step that starts from the host state `host`, which is None before the first step. Errors begin with `name`."""
        step = None
        if host is not None and self.step.calls:
            self._start_from(host)
            step = self._shadow.replayed(self.step)
        if step is None:
            self._start_from(host)
            try:
                step = self._shadow.step()
            except ProgramError as error:
                raise ArgumentError(f"{name}: {self._changed() or error}") from error
        fixed = [[value for at, value in enumerate(one.numbers) if at not in self.changing] for one in (step, self.step)]
        if step.words != self._words or fixed[0] != fixed[1]:
            why = self._changed() or f"this step of {type(self._optimizer).__name__} uses different ops from earlier steps"
            raise ArgumentError(f"{name}: {why}; compile it again")
        return step

    def _start_from(self, host: Mapping[str, Any] | None) -> None:
        entries = {key: self._entries[key] for key in self.entries}
        if host is not None:
            self._shadow.state = {**entries, **{key: self._like(key, value) for key, value in host.items()}}
        else:
            self._shadow.state = {} if self._is_first_alike else entries

    def _changed(self) -> str:
        for key, value in self._plain_options().items():
            if str(self.options.get(key)) != str(value) and (key not in _SCHEDULED or not self.options.get(key)):
                return f"{key} of parameter group {self.group} is {value}, and was {self.options.get(key)} at compile time"
        return ""

    def _like(self, key: str, value: float) -> Any:
        return torch.tensor(value, dtype=self._hosts[key].dtype) if key in self._hosts else value


def _is_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta


def _nudged(value: Any, of_zero: float | None = None) -> Any:
    """Makes the floats and one-element tensors of an option 1% smaller. Returns `of_zero` for 0, and None if nothing changes."""
    if isinstance(value, tuple | list):
        changed = [_nudged(one) for one in value]
        return tuple(one if new is None else new for one, new in zip(value, changed, strict=True)) if any(changed) else None
    if not isinstance(value, float) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
        return None
    return value * 0.99 if float(value) else of_zero
