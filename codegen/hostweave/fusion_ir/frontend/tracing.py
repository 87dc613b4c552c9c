"""Tracing: calls a function with symbolic tensors, and keeps the ops on which the function's results depend."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

from hostweave.base.errors import HostweaveError, Location, ProgramError, users_frames
from hostweave.base.names import unique_name
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend.donation import Donated, donations
from hostweave.fusion_ir.frontend.outline import function_of, is_one_repeat, loops, with_calls
from hostweave.fusion_ir.frontend.recording import record
from hostweave.fusion_ir.frontend.repeats import repeat_calls
from hostweave.fusion_ir.frontend.trace import Tensor, _Trace, placed_on
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import INDEX, START
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import DTYPES, TensorType


@checked
def fusion(*, mesh: Mesh | None = None, donate: Donated = (), **inputs: TensorType) -> Callable[[Callable[..., Any]], Fusion]:
    """Decorator that traces a function into a Fusion, which `hw.compile` compiles.

    - `inputs` gives the type of each parameter by name: a dtype and dims, such as `hw.bf16["M@x", "K"]`. A parameter `**weights` receives
      the inputs that are not named parameters.
    - `mesh` is the mesh of ranks, by default one device.
    - `donate` names inputs whose memory a result reuses. After a call, the caller's array contains this result. The result must have the
      input's dtype and dims, in any order, and gets the input's sharding. Exactly one result of this dtype and these dims must be computed
      from the input, unless `donate={"m": 1}` chooses result 1 for the input m.

    The function is traced once with symbolic tensors. Python loops are unrolled, or become repeats if their iterations are equal. The
    function must return a tensor, or a tuple or list of tensors.

    Raises ProgramError if the function cannot be traced. The message names the line.

    Example:

        ```python
        @hw.fusion(mesh=hw.Mesh(x=8), x=hw.bf16["M@x", "K"], w=hw.bf16["K", "N"])
        def ag_matmul(x, w):
            return hw.matmul(x, w)
        ```
    """
    location = Location.of_caller()
    if not isinstance(mesh, Mesh | None):
        raise ProgramError(f"fusion: mesh={mesh} is not an hw.Mesh; if the function has a parameter mesh, rename this parameter", location)

    def decorate(function: Callable[..., Any]) -> Fusion:
        try:
            return traced(function, _Trace(mesh or Mesh()), inputs, "fusion", location, donate)
        except HostweaveError as error:
            raise error.with_traceback(users_frames(error.__traceback__))  # noqa: B904, the same error

    return decorate


def traced(
    function: Callable[..., Any], trace: _Trace, inputs: dict[str, TensorType], word: str, location: Location, donate: Donated = ()
) -> Fusion:
    """Traces a function. `word` is "fusion" or "function"."""
    name = name_of(function) or "program"
    arguments = {}
    for parameter in parameters(function, inputs, word, location):
        arguments[parameter] = trace.add(None, placed_on(inputs[parameter], trace.mesh, location), pinned=True, name=parameter)
    returned = trace.call(function, arguments)
    results = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    for result in results:
        if not isinstance(result, Tensor) or result._trace is not trace:
            raise ProgramError(f"{word} @{name} returns {result!r}; return a tensor of the {word}, or a tuple of tensors", location)
    outputs = _distinct_results(results)
    donated = donations(f"{word} @{name}", trace, outputs, donate, location)
    shared = Counter(result._variable for result in outputs)
    for result, into in zip(outputs, donated or repeat(""), strict=False):
        if result._name is None and into and (shared[result._variable] > 1 or not result._variable):
            trace.name(result, unique_name(f"{into}_updated", trace.named))
        elif result._name is None and result._variable and result._variable not in trace.named:
            trace.name(result, result._variable)
        elif result._name is None and len(outputs) == 1:
            trace.name(result, unique_name("y", trace.named))
    if not inputs:
        raise ProgramError(f"{word} @{name} has no inputs; add at least one tensor parameter", location)
    finished = replace(_finished(name, trace, outputs), donated=donated)
    finished = repeat_calls(finished) if word == "fusion" else finished
    verify_fusion(finished)
    trace.is_traced = True
    return _rolled(finished, trace, outputs, donated) if word == "fusion" else finished


def _rolled(fusion: Fusion, trace: _Trace, outputs: Sequence[Tensor], donated: tuple[str, ...]) -> Fusion:
    """Outlines the loops of a traced program. A loop that would not become exactly one repeat stays unrolled."""
    for loop in loops(trace, outputs, donated):
        inner, results = function_of(trace, loop)
        taken = {fusion.name, *trace.sources, *(function.name for function in fusion.functions)}
        function = _finished(unique_name("layer", taken), inner, results)
        outer = with_calls(trace, loop, function)
        made = [outer.tensors[output._value.name] for output in outputs]
        rolled = repeat_calls(replace(_finished(fusion.name, outer, made), donated=donated))
        if is_one_repeat(rolled, function, loop):
            verify_fusion(rolled)
            fusion, trace, outputs = rolled, outer, made
    return fusion


def name_of(function: Callable[..., Any]) -> str:
    """Name of the function in generated code, or "" if the name is not ASCII, or for a lambda. functools.partial is unwrapped."""
    name = str(getattr(getattr(function, "func", function), "__name__", ""))
    return name if name.isidentifier() and name.isascii() else ""


def parameters(function: Callable[..., Any], inputs: dict[str, TensorType], word: str, location: Location) -> list[str]:
    """Names of the inputs: the function's parameters, then the inputs for its `**weights`. A parameter with a default and no type is not an
    input."""
    here = f"{word} @{name_of(function) or 'program'}"
    try:
        declared = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ProgramError(f"{here}: {function!r} is not a function; write a def below the line of the decorator", location) from None
    for p in declared:
        if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY):
            raise ProgramError(f"{here}: inputs are passed by name, so {p} is not possible; write a plain parameter such as x", location)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in declared)
    named = [p.name for p in declared if p.kind is not p.VAR_KEYWORD and (p.default is p.empty or p.name in inputs)]
    for name in (names := list(dict.fromkeys((*named, *inputs)))):
        if name not in named and not takes_any:
            raise ProgramError(f"{here}: {name} is not a parameter of the function; add it or leave it out", location)
        _check_given(here, word, name, inputs, location)
        if name not in named and not (name.isidentifier() and name.isascii()):
            raise ProgramError(f"{here}: {name!r} is not a name; use ASCII letters, digits and _, and no digit first", location)
    return names


def _check_given(here: str, word: str, name: str, inputs: Mapping[str, object], location: Location) -> None:
    if name not in inputs:
        raise ProgramError(f"{here}: {name} has no type; pass {name}=hw.f32[...] to hw.{'block' if word == 'function' else word}", location)
    given = inputs[name]
    if not isinstance(given, TensorType):
        dtype, bracket, dims = given.partition("[") if isinstance(given, str) else (getattr(given, "name", "f32"), "", "")
        spec = ", ".join(f'"{dim.strip()}"' for dim in dims.removesuffix("]").split(",")) if bracket else "..."
        known = dtype if dtype in DTYPES else "f32"
        raise ProgramError(f"{here}: {name}={given!r} is not the type of a tensor; write {name}=hw.{known}[{spec}]", location)


def _distinct_results(results: tuple[Tensor, ...]) -> list[Tensor]:
    """Copies results that are inputs or returned twice, so that each result has a separate op."""
    distinct: dict[str, Tensor] = {}
    for result in results:
        own = result if result._op and result._value.name not in distinct else record("copy", result)
        distinct[own._value.name] = own
    return list(distinct.values())


def _finished(name: str, trace: _Trace, outputs: Sequence[Tensor]) -> Fusion:
    needed = trace.needed_for(outputs)
    names = names_of(trace.tensors, needed, [tensor._value.name for tensor in outputs])
    inputs, ops = [], []
    for number, tensor in trace.tensors.items():
        value = replace(tensor._value, name=names.get(number, ""))
        if tensor._op is None:
            inputs.append(value)
        elif number in needed:
            operands = tuple(names[operand] if isinstance(operand, str) else operand for operand in tensor._op.operands)
            ops.append(replace(tensor._op, operands=operands, result=value))
    return Fusion(name, trace.mesh, tuple(inputs), tuple(ops), tuple(names[tensor._value.name] for tensor in outputs))


# --- functions of a fusion --------------------------------------------------------------------------------------------


@checked
def block(*, donate: Donated = (), **inputs: TensorType) -> Callable[[Callable[..., Any]], BlockFunction]:
    """Decorator for a function that a fusion calls several times, such as a layer of a model. Each fusion traces and compiles the function
    once.

    `inputs` gives the type of each parameter by name, as for `hw.fusion`. The calling fusion determines the mesh and the sizes. If the
    sharding of an argument differs from the type, the call reshards the argument. `donate` names parameters that the function updates in
    place, as for `hw.fusion`. A donated argument that is used after the call is copied first.

    Raises ProgramError if names or types of parameters are not valid. The first call in a fusion raises ProgramError if tracing fails.

    Example:

        ```python
        @hw.block(x=hw.bf16["M@tp", "E"], w=hw.bf16["E", "E"])
        def layer(x, w):
            return x + hw.relu(x @ w)
        ```
    """
    location = Location.of_caller()
    return lambda function: BlockFunction(function, inputs, location, donate)


class BlockFunction:
    """A function that fusions and other functions can call, created by `hw.block`."""

    def __init__(self, function: Callable[..., Any], inputs: dict[str, TensorType], location: Location, donate: Donated = ()):
        self.name, self._donate = name_of(function), donate
        self._function, self._inputs, self._location = function, inputs, location
        if not self.name:
            given = getattr(function, "__name__", function)
            raise ProgramError(f"function {given}: its name is not of ASCII letters, digits and _; use def", location)
        self._parameters = parameters(function, inputs, "function", location)
        if not self._parameters:
            raise ProgramError(f"function @{self.name} has no parameters; add at least one tensor parameter", location)

    def __repr__(self) -> str:
        return f"<hostweave function {self.name}>"

    def __call__(self, *arguments: Tensor, **named: Tensor) -> Any:
        """Calls the function. Returns a tensor or a tuple. Reshards an argument whose sharding differs from the parameter's."""
        tensors = self._bound(arguments, named)
        made = self._traced(tensors[0]._trace)
        result = record("call", *tensors, callee=made)
        rest = (record("output", result, callee=made, index=i) for i in range(1, len(made.outputs)))
        return (result, *rest) if len(made.outputs) > 1 else result

    def _bound(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[Tensor]:
        signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in self._parameters])
        try:
            given = signature.bind(*arguments, **named).arguments
        except TypeError as error:
            raise self._misuse(str(error)) from None
        for name, argument in given.items():
            if not isinstance(argument, Tensor):
                raise self._misuse(f"{name} is {argument!r}, which is not a tensor of a fusion")
        return list(given.values())

    def _misuse(self, why: str) -> ProgramError:
        return ProgramError.here(f"call: @{self.name} takes {', '.join(self._parameters)}; {why}")

    def _traced(self, trace: _Trace) -> Fusion:
        if self not in trace.functions:
            if any(isinstance(other, BlockFunction) and other.name == self.name for other in trace.functions):
                raise ProgramError.here(f"call: two functions are named @{self.name}; rename one")
            trace.functions[self], inner = None, _Trace(trace.mesh, trace.functions, trace.sources)
            try:
                trace.functions[self] = traced(self._function, inner, self._inputs, "function", self._location, self._donate)
            finally:
                if trace.functions[self] is None:  # tracing raised an error
                    del trace.functions[self]
        found = trace.functions[self]
        if found is None:
            raise ProgramError.here(f"call: @{self.name} calls itself, and tracing would not end; use a Python loop")
        return found


def names_of(tensors: Mapping[str, Tensor], needed: set[str], outputs: Sequence[str]) -> dict[str, str]:
    """Name of each value: the user's name, the name of the user's variable, or a name derived from the op and an operand.

    In `return hw.reshard(loss)`, the output is named `loss`, and the operand `loss_local`, if nothing else reads the operand.
    """
    names = _Names({number: tensor._name for number, tensor in tensors.items() if tensor._name is not None})
    made = {number: tensor for number, tensor in tensors.items() if number in needed and tensor._op}
    variables = {number: tensor._variable for number, tensor in made.items() if tensor._variable and number not in names.of}
    reads = Counter(operand for tensor in made.values() if tensor._op for operand in tensor._op.tensors)
    alone = {number for number in variables if reads[number] == 1} - {*outputs}
    for number in outputs:
        op = tensors[number]._op
        if op and op.kind == "reshard" and number not in {*names.of, *variables} and op.tensors[0] in alone:
            variables[number] = variables[op.tensors[0]]
            variables[op.tensors[0]] += "_local"
    for number in filter(variables.__contains__, made):
        names.claim(number, variables[number])
    for number, tensor in made.items():
        assert tensor._op is not None
        names.derive(number, tensor._op, tensor._word)
    return names.of


class _Names:
    def __init__(self, given: dict[str, str]):
        self.of, self.taken = given, set(given.values())
        self.counts: dict[str, int] = {}
        self.given = set(given)  # values that the user named, and results of ops that only move elements of these values
        self.subjects: dict[str, str] = {}  # value -> name of the operand after which the value is named
        self.sources: dict[str, str] = {}  # result of an op that only moves elements -> name of the moved value

    def claim(self, number: str, wanted: str) -> None:
        """If a value has no name, names it `wanted`, with a number if `wanted` is taken."""
        while number not in self.of:
            self.counts[wanted] = self.counts.get(wanted, 0) + 1
            name = wanted if self.counts[wanted] == 1 else f"{wanted}_{self.counts[wanted]}"
            if name not in self.taken:
                self.of[number] = name
                self.taken.add(name)

    def derive(self, number: str, op: Op, word: str | None) -> None:
        """Names a value after its op (or `word`) and an operand: `matmul_wq`, `matmul_wq_transposed`."""
        moved = _movement(op)
        if moved and op.tensors[0] in self.given:
            self.given.add(number)
        if number in self.of:
            return
        # the weight of a matmul comes first, because it is the most distinctive operand
        weights = [operand for operand in op.tensors[1::-1] if operand in self.given and OPS[op.kind].is_product]
        names = (self.subjects.get(operand, self.of[operand]) for operand in (*weights, *op.tensors))
        self.subjects[number] = next(filter(None, names), "")
        if moved and (not word or OPS[op.kind].makes):
            self.sources[number] = self.sources.get(op.tensors[0], self.of[op.tensors[0]])
            self.claim(number, f"{self.sources[number]}_{moved}")
        else:
            made = word or (op.user_kernel.name if op.user_kernel else op.callee.name if op.callee else op.kind)
            length = str(op.result.type.dims[0].size) if op.kind == "iota" else ""
            self.claim(number, "_".join(filter(str.isidentifier, (made, self.subjects[number], length))))


def _movement(op: Op) -> str:
    """Word that follows the operand's name in the name of the result, such as "transposed", or ""."""
    if op.kind == "output":
        return op.callee.outputs[op[INDEX]] if op.callee else str(op[INDEX])
    if op.kind == "select":
        return str(op[INDEX]) if op[INDEX] >= 0 else "selected"
    if op.kind == "slice" and op[START] > 0:
        return f"from_{op[START]}"
    return op.result.type.dtype.name if op.kind == "astype" else OPS[op.kind].makes
