"""Donation: chooses the result that reuses the memory of each donated input."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from hostweave.base.errors import Location, ProgramError, did_you_mean
from hostweave.fusion_ir.frontend.recording import record
from hostweave.fusion_ir.frontend.trace import Tensor, _Trace

Donated = Sequence[str] | Mapping[str, int]  # names of inputs, or input -> index of the result


def donations(here: str, trace: _Trace, outputs: list[Tensor], donate: Donated, location: Location) -> tuple[str, ...]:
    """For each output, the donated input whose memory the output reuses, or "". Empty if nothing is donated. In `outputs`, a reshard
    replaces each output that reuses an input but does not state the input's sharding.

    For each input, exactly one output must qualify. An output that another input needs does not count. An output qualifies if it has the
    dtype, mesh and dims of the input; the user gave the output no sharding, or the input's sharding; and the output is computed from the
    input, or `donate` gives the index of the output. An output with the dims in another order qualifies only if `donate` gives the index of
    the output, or if no other qualifying output has the input's shape.
    """
    inputs = {str(tensor._name): tensor for tensor in trace.tensors.values() if tensor._op is None}
    if not isinstance(donate, Iterable) or not all(isinstance(name, str) for name in donate):
        raise ProgramError(f'{here}: donate={donate!r}: name inputs of the function, as in donate=("x",)', location)
    names = [donate] if isinstance(donate, str) else list(donate)
    for name in names:
        if name not in inputs:
            raise ProgramError(f"{here}: donate: {name!r} is not an input; {did_you_mean(str(name), inputs)}", location)
        if names.count(name) > 1:
            raise ProgramError(f"{here}: donate: {name} is named twice; name it once", location)
    alike: dict[object, list[int]] = {}  # numbers of the outputs of each kind
    for number, output in enumerate(outputs):
        alike.setdefault(_kind(output), []).append(number)
    needed = cache(lambda number: trace.needed_for([outputs[number]]))

    def candidates(name: str) -> list[int]:
        given = inputs[name]
        of_kind = alike.get(_kind(given), [])
        fitting = [number for number in of_kind if not outputs[number]._value.pinned or outputs[number].type.fills(given.type)]
        if isinstance(donate, Mapping):
            if donate[name] not in fitting:
                why = f"result {donate[name]!r} does not have the type of {name}, {given.type}"
                known = ", ".join(map(str, fitting)) or "none"
                raise ProgramError(f"{here}: donate: {why}; results that do: {known}", location)
            return [donate[name]]
        numbers = [number for number in fitting if given._value.name in needed(number)]
        return [number for number in numbers if outputs[number].shape == given.shape] or numbers

    open_ = {name: candidates(name) for name in names}
    chosen: dict[int, str] = {}
    while open_:
        sure = next((name for name, numbers in open_.items() if len(numbers) == 1), None)
        if sure is None:
            name, numbers = next(iter(open_.items()))
            type = inputs[name].type
            if not numbers:
                why = f"no result of {type}, apart from results that other inputs use, is computed from {name}"
                raise ProgramError(f"{here}: donate: {why}; return one, or leave {name} out of donate", location)
            why = f"results {' and '.join(map(str, numbers))} are of {type} and computed from {name}"
            raise ProgramError(f'{here}: donate: {why}; choose one: donate={{"{name}": {numbers[0]}, ...}}', location)
        (number,) = open_.pop(sure)
        chosen[number] = sure
        open_ = {name: [other for other in numbers if other != number] for name, numbers in open_.items()}
    for number, name in chosen.items():
        outputs[number] = _placed(outputs[number], inputs[name], trace)
    return tuple(chosen.get(number, "") for number in range(len(outputs))) if chosen else ()


def _kind(tensor: Tensor) -> object:
    """Dtype, mesh and dims, without the order and the shardings of the dims."""
    return tensor.dtype, tensor.type.mesh, tuple(sorted(map(str, tensor.type.shape)))


def _placed(output: Tensor, given: Tensor, trace: _Trace) -> Tensor:
    """Reshards an output to the input's sharding, unless the output states this sharding. The reshard takes the output's name."""
    target = given.type
    if output.type.shape != target.shape:  # the same dims in another order
        left = list(target.dims)
        dims = (left.pop([dim.size for dim in left].index(size)) for size in output.type.shape)
        target = output.type if output._value.pinned else replace(target, dims=tuple(dims))
    if output.type == target and (output._value.pinned or not trace.mesh.axes):
        return output
    placed = record("reshard", output, target=target)
    placed._variable, output._variable = output._variable, None
    if name := output._name:
        output._name = None
        trace.name(placed, name)
    return placed
