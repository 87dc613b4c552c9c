"""From a function to a fusion: it is called once with symbolic tensors, and what leads to its results is kept."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any

from hostweave.base.errors import Location, ProgramError
from hostweave.base.names import unique_name
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend.donation import Donated, donations
from hostweave.fusion_ir.frontend.naming import names_of
from hostweave.fusion_ir.frontend.recording import record
from hostweave.fusion_ir.frontend.trace import Tensor, _Trace, placed_on
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.types.mesh import Mesh
from hostweave.types.tensor import DTYPES, TensorType


@checked
def fusion(*, mesh: Mesh | None = None, donate: Donated = (), **inputs: TensorType) -> Callable[[Callable[..., Any]], Fusion]:
    """Traces the decorated function into a Fusion, which `hw.compile` compiles.

    `inputs` gives the type of each parameter by name: a dtype and dims, `hw.bf16["M@x", "K"]`. A function with `**weights`
    receives there the inputs that it does not name. `mesh` has the ranks; without it there is one device. The function is
    traced once with symbolic tensors, so Python loops are unrolled. It returns a tensor or a tuple of tensors.

    `donate` names inputs whose memory a result takes: after a call the caller's array holds that result. It is the one result of the
    input's dtype and shape that is computed from it, and gets its sharding; where several are, `donate={"m": 1}` gives its number.

    Raises ProgramError, with the location in the function, for operands that do not fit, and for what cannot be donated.

    Example:
        ```python
        @hw.fusion(mesh=hw.Mesh(x=8), x=hw.bf16["M@x", "K"], w=hw.bf16["K", "N"])
        def ag_matmul(x, w):
            return hw.matmul(x, w)
        ```
    """
    location = Location.of_caller()
    if not isinstance(mesh, Mesh | None):
        raise ProgramError(f"fusion: mesh={mesh} is not an hw.Mesh; a parameter of the function needs another name", location)
    return lambda function: traced(function, _Trace(mesh or Mesh()), inputs, "fusion", location, donate)


def traced(
    function: Callable[..., Any], trace: _Trace, inputs: dict[str, TensorType], word: str, location: Location, donate: Donated = ()
) -> Fusion:
    """What a function computes; `word` says what it is, a fusion or a function. Raises ProgramError."""
    name = name_of(function) or "program"
    arguments = {}
    for parameter in parameters(function, inputs, word, location):
        arguments[parameter] = trace.add(None, placed_on(inputs[parameter], trace.mesh, location), pinned=True, name=parameter)
    returned = trace.call(function, arguments)
    results = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    for result in results:
        if not isinstance(result, Tensor) or result._trace is not trace:
            raise ProgramError(f"{word} @{name} returns {result!r}; return a tensor of it, or a tuple of tensors", location)
    outputs = _distinct_results(results)
    donated = donations(f"{word} @{name}", trace, outputs, donate, location)
    shared = Counter(result._variable for result in outputs)
    for result, into in zip(outputs, donated or repeat(""), strict=False):  # the names of variables are theirs first
        if result._name is None and into and shared[result._variable] > 1:
            trace.name(result, unique_name(f"{into}_updated", trace.named))
        elif result._name is None and result._variable and result._variable not in trace.named:
            trace.name(result, result._variable)
        elif result._name is None and len(outputs) == 1:
            trace.name(result, unique_name("y", trace.named))
    finished = replace(_finished(name, trace, outputs), donated=donated)
    verify_fusion(finished)
    trace.is_traced = True
    return finished


def name_of(function: Callable[..., Any]) -> str:
    """A name for generated code: that of the function, also of one that is called by a partial. Lambdas and objects have none."""
    name = str(getattr(getattr(function, "func", function), "__name__", ""))
    return name if name.isidentifier() and name.isascii() else ""


def parameters(function: Callable[..., Any], inputs: dict[str, TensorType], word: str, location: Location) -> list[str]:
    """The names of the inputs in order: the parameters of the function, and those that its `**weights` takes, as they are given.

    A parameter that has a default and no type is no input: the function takes the default.
    """
    here = f"{word} @{name_of(function) or 'program'}"
    declared = inspect.signature(function).parameters.values()
    for p in declared:
        if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY):
            raise ProgramError(f"{here}: inputs are passed by name, so that {p} cannot be one; write a plain x", location)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in declared)
    named = [p.name for p in declared if p.kind is not p.VAR_KEYWORD and (p.default is p.empty or p.name in inputs)]
    for name in (names := list(dict.fromkeys((*named, *inputs)))):
        if name not in named and not takes_any:
            raise ProgramError(f"{here}: {name} is not a parameter of the function; add it or leave it out", location)
        _check_given(here, word, name, inputs, location)
        if name not in named and not (name.isidentifier() and name.isascii()):
            raise ProgramError(f"{here}: {name!r} is not a name; use letters, digits and _", location)
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
    """Every result made by an op of its own: an input that is returned, or one tensor returned twice, is copied."""
    distinct: dict[str, Tensor] = {}
    for result in results:
        own = result if result._op and result._value.name not in distinct else record("copy", result)
        distinct[own._value.name] = own
    return list(distinct.values())


def _finished(name: str, trace: _Trace, outputs: list[Tensor]) -> Fusion:
    """The ops that lead to the outputs, under their final names."""
    needed = {tensor._value.name for tensor in outputs}
    for number, tensor in reversed(trace.tensors.items()):
        if number in needed and tensor._op:
            needed.update(tensor._op.tensors)
    names = names_of(trace.tensors, needed)
    inputs, ops = [], []
    for number, tensor in trace.tensors.items():
        value = replace(tensor._value, name=names.get(number, ""))
        if tensor._op is None:
            inputs.append(value)
        elif number in needed:
            operands = tuple(names[operand] if isinstance(operand, str) else operand for operand in tensor._op.operands)
            ops.append(replace(tensor._op, operands=operands, result=value))
    return Fusion(name, trace.mesh, tuple(inputs), tuple(ops), tuple(names[tensor._value.name] for tensor in outputs))
