"""Records and replays the ATen ops that the step of a torch optimizer runs for one parameter.

Tensors are on the device "meta" and have no data. Numbers on the host, such as the step number, are computed during recording. A recorded
op refers to a number by the index of the number in a list.
"""

import inspect
import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import hostweave as hw
from hostweave.base.errors import Location, ProgramError, stated_location
from hostweave.torch.aten import TABLE, cast, computed
from hostweave.torch.nodes import shape_of

PARAMETER, GRADIENT = "parameter", "gradient"
_FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1, "full": None, "full_like": None}


@dataclass(frozen=True)
class OperandSource:
    """Source of an operand: the name of an input, or the index of an op. `result` is an index into the results of the op."""

    source: str | int
    result: int = 0


@dataclass(frozen=True)
class NumberOperand:
    """An operand that is a number: element `at` of `UpdateStep.numbers`."""

    at: int


@dataclass(frozen=True)
class UpdateOp:
    """An ATen op without side effects. `made` is the result on the device "meta". `location` is the line of the optimizer with the op."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: Any
    location: Location | None

    @property
    def words(self) -> tuple[object, ...]:
        """Key of the op, without the values of numbers."""
        return self.name, str(self.args), str(dict(self.kwargs)), str([one.dtype for one in pytree.tree_leaves(self.made)])


# op, arguments by position or name, keys of the arguments that are numbers of the step, results
RecordedCall = tuple[Any, Mapping[object, Any], Sequence[object], Any]


@dataclass
class UpdateStep:
    """One step of an optimizer for one parameter. `results` has the sources of the new parameter and state."""

    ops: list[UpdateOp]
    numbers: list[float]
    roles: list[str]  # role of each number in its op, such as "mul" or "addcdiv_value"
    results: dict[str, OperandSource]
    filled: dict[str, float]  # state entry that the step creates -> number that fills the entry
    host: dict[str, Any]  # state entry on the host -> value after the step
    calls: list[RecordedCall]  # empty if the step cannot be replayed

    @property
    def words(self) -> tuple[object, ...]:
        return tuple(op.words for op in self.ops), tuple(self.roles), str(self.results)

    def compute(self, values: Mapping[str, hw.Tensor], numbers: Mapping[int, hw.Tensor]) -> dict[str, hw.Tensor]:
        """Computes the new parameter and state. `values` has the named operands. `numbers` maps indices of numbers to inputs of the
        program; numbers without an input are constants."""
        made: list[Any] = []
        anything = values[PARAMETER]

        def operand(one: Any) -> Any:
            if isinstance(one, NumberOperand):
                return numbers.get(one.at, self.numbers[one.at])
            return self._value(one, values, made) if isinstance(one, OperandSource) else one

        for op in self.ops:
            args, kwargs = pytree.tree_map(operand, (list(op.args), dict(op.kwargs)))
            if isinstance(kwargs.get("alpha"), hw.Tensor):  # table entries take only Python numbers as alpha
                args[1] = cast(args[1], op.made.dtype) * cast(kwargs.pop("alpha"), op.made.dtype)
            with stated_location(op.location):
                made.append(computed(op.name, SimpleNamespace(meta={"val": op.made}), args, kwargs, shape_of, anything))  # type: ignore[arg-type]
        return {name: self._value(read, values, made) for name, read in self.results.items()}

    @staticmethod
    def _value(read: OperandSource, values: Mapping[str, hw.Tensor], made: Sequence[Any]) -> Any:
        if isinstance(read.source, str):
            return values[read.source]
        return made[read.source][read.result] if isinstance(made[read.source], tuple) else made[read.source]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records ops on tensors of the device "meta". Records the functional form of each in-place op."""

    def __init__(self, given: Mapping[str, torch.Tensor], optimizer: type):
        super().__init__()  # type: ignore[no-untyped-call]
        self._file = inspect.unwrap(vars(optimizer).get("step", optimizer.step)).__code__.co_filename  # type: ignore[attr-defined]
        self._ops: list[UpdateOp] = []
        self._numbers: list[float] = []
        self._roles: list[str] = []
        self._operands: list[Any] = []  # numbers of the current op, some of them in tensors on the host
        self._calls, self._can_replay = list[RecordedCall](), True
        self._values: dict[int, dict[object, OperandSource]] = {}  # storage -> layout of a tensor in the storage -> source of the tensor
        self._first: dict[int, OperandSource] = {}  # storage -> source of the first tensor in the storage
        self._held: list[torch.Tensor] = []  # kept alive, so that ids of storages are not reused
        for name, tensor in given.items():
            self._put(tensor, OperandSource(name))

    def recorded(self, kept: Mapping[str, torch.Tensor], host: dict[str, Any]) -> UpdateStep:
        """Returns the recorded step. Ops that fill new state entries with a number become entries of `filled` in the step."""
        filled: dict[str, float] = {}
        named: dict[OperandSource, OperandSource] = {}  # result of a fill op -> state entry that the op creates
        for name, tensor in kept.items():
            first = self._first[_storage(tensor)]
            if isinstance(first.source, int) and (value := self._fill(self._ops[first.source])) is not None:
                filled[name], named[first] = value, OperandSource(name)
        stay = [number for number in range(len(self._ops)) if OperandSource(number) not in named]
        number_of = {old: new for new, old in enumerate(stay)}
        ops, numbers, roles = list[UpdateOp](), list[float](), list[str]()

        def moved(read: OperandSource) -> OperandSource:
            if read in named or isinstance(read.source, str):
                return named.get(read, read)
            return OperandSource(number_of[read.source], read.result)

        def renumbered(one: Any) -> Any:
            if isinstance(one, NumberOperand):
                numbers.append(self._numbers[one.at])
                roles.append(self._roles[one.at])
                return NumberOperand(len(numbers) - 1)
            return moved(one) if isinstance(one, OperandSource) else one

        for op in (self._ops[number] for number in stay):
            args, kwargs = pytree.tree_map(renumbered, (op.args, op.kwargs))
            ops.append(UpdateOp(op.name, args, kwargs, op.made, op.location))
        results = {name: moved(self._get(tensor)) for name, tensor in kept.items()}
        return UpdateStep(ops, numbers, roles, results, filled, host, self._calls if self._can_replay else [])

    def _fill(self, op: UpdateOp) -> float | None:
        word = op.name.partition(".")[0]
        value = _FILLS.get(word)
        given = [self._numbers[one.at] for one in op.args if isinstance(one, NumberOperand)]
        return value if value is not None else given[0] if word in _FILLS and given else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        leaves = [one for one in pytree.tree_leaves((args, kwargs, made)) if isinstance(one, torch.Tensor)]
        if any(one.is_meta for one in leaves):
            self._operands.clear()
            self._record(func, args, kwargs, made)
            given, keys = dict(enumerate(args)) | kwargs, list[object]()
            for operand in self._operands:
                keys += [key for key, one in given.items() if one is operand and key not in keys][:1]
            self._can_replay &= len(keys) == len(self._operands) and not func.is_view
            self._calls.append((func, given, keys, made))
        return made

    def _record(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        base, overload = func._schema.name.split("::")[-1], func._overloadname or "default"
        names = [argument.name for argument in func._schema.arguments]
        passed = dict(zip(names, args, strict=False)) | kwargs
        names_written = [argument.name for argument in func._schema.arguments if argument.is_write]
        written = [passed[name] for name in names_written if passed.get(name) is not None]
        if len(written) > 1 or any(isinstance(one, list) for one in written):
            raise ProgramError(f"calls {func}, which writes several tensors")
        target = written[0] if written else None
        if base == "detach" or (base == "alias" and target is None):
            return
        plain = _plain(func, base, overload, passed, target)
        if isinstance(plain, torch.Tensor):  # a copy of a whole tensor
            self._put(target, self._get(plain), anew=True)
            return
        name, args, kwargs = plain
        if name in TABLE:
            types_of = {argument.name: str(argument.type) for argument in (_overload(name) or func)._schema.arguments}
            written_args = tuple(self._operand(base, key, kind, one) for (key, kind), one in zip(types_of.items(), args, strict=False))
            written_kwargs = {key: self._operand(base, key, types_of.get(key, ""), one) for key, one in kwargs.items()}
            shapes = made if target is None else target.detach()
            self._ops.append(UpdateOp(name, written_args, written_kwargs, shapes, self._location()))
            results = [shapes] if isinstance(shapes, torch.Tensor) else list(shapes)
            reads = [OperandSource(len(self._ops) - 1, number) for number in range(len(results))]
        else:
            apart = torch._decomp.decomposition_table.get(_overload(name))
            if apart is None:
                raise ProgramError(f"calls aten.{name}, which is not supported")
            self._can_replay = False
            with self:
                outputs = apart(*args, **kwargs)
            results = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
            reads = [self._get(one) for one in results]
        for tensor, read in zip([target] if target is not None else pytree.tree_leaves(made), reads, strict=True):
            self._put(tensor, read, anew=target is not None)

    def _location(self) -> Location | None:
        """Current line in the file of the optimizer's `step`, or None."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename != self._file:
            if frame.f_back is None:
                return None
            frame = frame.f_back
        return Location(Path(self._file).name, frame.f_lineno, linecache.getline(self._file, frame.f_lineno))

    def _operand(self, base: str, key: str, kind: str, one: Any) -> Any:
        """Converts an argument to an OperandSource or a NumberOperand. Returns attributes, such as dims, unchanged."""
        if isinstance(one, list | tuple):
            return type(one)(self._operand(base, key, kind, each) for each in one)
        is_tensor = isinstance(one, torch.Tensor)
        if is_tensor and one.is_meta:
            return self._get(one)
        if is_tensor and one.numel() != 1:
            raise ProgramError(f"computes aten.{base} with a tensor of {tuple(one.shape)} that is on the device {one.device}")
        is_number = isinstance(one, int | float) and not isinstance(one, bool) and ("number" in kind or "float" in kind or "Scalar" in kind)
        if not is_tensor and not (is_number or (isinstance(one, float) and "Tensor" in kind)):
            return one
        self._operands.append(one)
        self._numbers.append(one.item() if is_tensor else one)
        word = base.removesuffix("_")
        self._roles.append(word if key == "other" else f"{word}_{key}")
        return NumberOperand(len(self._numbers) - 1)

    def _put(self, tensor: Any, read: OperandSource, anew: bool = False) -> None:
        """Records the source of a tensor. With `anew`, the tensor was written, so earlier views of its storage become invalid."""
        storage, layout = _storage(tensor), (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        self._held.append(tensor)
        if anew:
            self._values[storage] = {layout: read}
        else:
            self._values.setdefault(storage, {})[layout] = read
        self._first.setdefault(storage, read)

    def _get(self, tensor: torch.Tensor) -> OperandSource:
        layout = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype
        if (read := self._values.get(_storage(tensor), {}).get(layout)) is None:
            raise ProgramError(f"reads a tensor of {tuple(tensor.shape)} that no recorded op computed, or that was written through a view")
        return read


class Replay(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns the results of recorded calls, and collects the numbers of the new calls. Raises ValueError if a new call differs from the
    recorded call in anything but numbers, and StopIteration if there is no recorded call left."""

    def __init__(self, calls: Sequence[RecordedCall]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls, self.numbers = iter(calls), list[float]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(enumerate(args)) | (kwargs or {})
        if not any(isinstance(one, torch.Tensor) and one.is_meta for one in given.values()):
            return func(*args, **(kwargs or {}))
        op, before, keys, made = next(self.calls)
        if func is not op or given.keys() != before.keys():
            raise ValueError
        numbers = [given.pop(key) for key in keys]
        self.numbers += [one.item() if isinstance(one, torch.Tensor) else one for one in numbers]
        if any(one is not before[key] and (isinstance(one, torch.Tensor) or one != before[key]) for key, one in given.items()):
            raise ValueError
        return made


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _plain(func: Any, base: str, overload: str, passed: dict[str, Any], target: Any) -> Any:
    """Name, args and kwargs of the functional form of an op, or the source tensor if the op only copies."""
    word, names = base, [argument.name for argument in func._schema.arguments if not argument.kwarg_only]
    match base.rstrip("_") if target is not None else "":
        case "copy":
            source = passed["src"]
            if not source.is_meta:
                return "full_like.default", (target, source), {}
            if source.shape != target.shape:
                return "expand.default", (source, list(target.shape)), {}
            return source if source.dtype == target.dtype else ("_to_copy.default", (source,), {"dtype": target.dtype})
        case "fill":
            return "full_like.default", (target, passed["value"]), {}
        case "zero":
            return "zeros_like.default", (target,), {}
    if target is not None:
        passed, word = {key: value for key, value in passed.items() if key not in ("out", "non_blocking")}, base.removesuffix("_")
        if overload.endswith("out"):
            plain = overload.removesuffix("out").rstrip("_") or "default", "Tensor"
            overload = next((one for one in plain if _overload(f"{word}.{one}")), overload)
    args = tuple(passed[key] for key in names if key in passed)
    return f"{word}.{overload}", args, {key: value for key, value in passed.items() if key not in names}


def _overload(name: str) -> Any:
    word, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, word, None), overload, None)


class _LazyNumbers(TorchFunctionMode):
    """Makes `item()` of a "meta" tensor return the tensor. If `alpha` or `value` is a "meta" tensor, multiplies an operand by the tensor,
    because torch accepts only numbers as `alpha` and `value`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "item" and args[0].is_meta:
            return args[0]
        for key in ("alpha", "value"):
            if isinstance(kwargs.get(key), torch.Tensor) and kwargs[key].is_meta and len(args) > 1:
                args = (args[0], args[1] * kwargs[key], *args[2:])
                kwargs = {name: value for name, value in kwargs.items() if name != key}
        return func(*args, **kwargs)


_CHANGING = threading.RLock()  # locked while globals of an optimizer's module are replaced


@contextmanager
def lazy_numbers(optimizer: type) -> Iterator[None]:
    """Lets the code of an optimizer use "meta" tensors as numbers, also in `max` and `min`."""
    module: dict[str, Any] = getattr(inspect.unwrap(vars(optimizer).get("__init__", optimizer.step)), "__globals__", {})  # type: ignore[attr-defined]
    with _CHANGING:
        before: dict[str, Any] = {name: module[name] for name in ("max", "min") if name in module}
        module["max"], module["min"] = partial(_bounded, before.get("max", max), "min"), partial(_bounded, before.get("min", min), "max")
        try:
            with _LazyNumbers():
                yield
        finally:
            for name in ("max", "min"):
                del module[name]
            module.update(before)


def _bounded(plain: Callable[..., Any], bound: str, *values: Any, **how: Any) -> Any:
    """Variant of `max` or `min` that clamps a "meta" tensor if all other arguments are numbers."""
    tensors = [one for one in values if isinstance(one, torch.Tensor) and one.is_meta]
    numbers = [one for one in values if not isinstance(one, torch.Tensor)]
    if len(tensors) != 1 or len(numbers) != len(values) - 1:
        return plain(*values, **how)
    return tensors[0].clamp(**{bound: plain(numbers) if len(numbers) > 1 else numbers[0]})
