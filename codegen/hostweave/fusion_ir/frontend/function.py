"""`hw.block`: functions that are traced once and called many times, such as a layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hostweave.base.errors import Location, ProgramError
from hostweave.base.signatures import checked
from hostweave.fusion_ir.frontend.donation import Donated
from hostweave.fusion_ir.frontend.recording import record
from hostweave.fusion_ir.frontend.trace import Tensor, _Trace
from hostweave.fusion_ir.frontend.tracing import name_of, parameters, traced
from hostweave.fusion_ir.ir import Fusion
from hostweave.types.tensor import TensorType


@checked
def block(*, donate: Donated = (), **inputs: TensorType) -> Callable[[Callable[..., Any]], Function]:
    """Makes the decorated function one that is traced and compiled once, and called any number of times, such as a layer of a model.

    `inputs` gives the type of each parameter by name, as for `hw.fusion`; mesh and sizes are those of the fusion that calls it.
    An argument of another sharding is resharded at the call. `donate` names parameters that the function updates in place, as for
    `hw.fusion`; an argument that is used after the call is copied first. Raises ProgramError.

    Example:
        ```python
        @hw.block(x=hw.bf16["M@tp", "E"], w=hw.bf16["E", "E"])
        def layer(x, w):
            return x + hw.relu(x @ w)
        ```
    """
    location = Location.of_caller()
    return lambda function: Function(function, inputs, location, donate)


class Function:
    """A function of tensors that a fusion, or another such function, calls any number of times. Made by `hw.block`.

    It is traced once for each fusion that calls it, and becomes one function of the generated program.
    """

    def __init__(self, function: Callable[..., Any], inputs: dict[str, TensorType], location: Location, donate: Donated = ()):
        self.name, self._donate = name_of(function), donate
        self._function, self._inputs, self._location = function, inputs, location
        if not self.name:
            raise ProgramError(
                f"function {getattr(function, '__name__', function)}: it has no name of ASCII letters, digits and _; write it with def",
                location,
            )
        self._parameters = parameters(function, inputs, "function", location)
        if not self._parameters:
            raise ProgramError(f"function @{self.name} has no parameters; a function computes on tensors, give it one", location)

    def __repr__(self) -> str:
        return f"<hostweave function {self.name}>"

    def __call__(self, *arguments: Tensor, **named: Tensor) -> Any:
        """The results for these tensors: a tensor, or a tuple of tensors.

        Sizes and dtypes are as declared; an argument of another sharding is resharded. Raises ProgramError.
        """
        location = Location.of_caller()
        tensors = self._bound(arguments, named, location)
        made = self._traced(tensors[0]._trace, location)
        result = record("call", *tensors, callee=made)
        rest = (record("output", result, callee=made, index=i) for i in range(1, len(made.outputs)))
        return (result, *rest) if len(made.outputs) > 1 else result

    def _bound(self, arguments: tuple[Any, ...], named: dict[str, Any], location: Location) -> list[Tensor]:
        """The arguments in the order of the parameters."""
        if len(arguments) > len(self._parameters):
            self._refuse(f"{len(arguments)} are given", location)
        given = dict(zip(self._parameters, arguments, strict=False))
        for name, argument in named.items():
            if name not in self._parameters:
                self._refuse(f"{name} is none of them", location)
            if name in given:
                self._refuse(f"{name} is given twice", location)
            given[name] = argument
        for name in self._parameters:
            if name not in given:
                self._refuse(f"{name} is missing", location)
            if not isinstance(given[name], Tensor):
                self._refuse(f"{name} is {given[name]!r}, which is no tensor of a fusion", location)
        return [given[name] for name in self._parameters]

    def _refuse(self, why: str, location: Location) -> NoReturn:
        raise ProgramError(f"call: @{self.name} takes {', '.join(self._parameters)}; {why}", location)

    def _traced(self, trace: _Trace, location: Location) -> Fusion:
        if self not in trace.functions:
            if any(isinstance(other, Function) and other.name == self.name for other in trace.functions):
                raise ProgramError(f"call: two functions are named @{self.name}; give one of their functions another name", location)
            trace.functions[self], inner = None, _Trace(trace.mesh, trace.functions, trace.sources)
            trace.functions[self] = traced(self._function, inner, self._inputs, "function", self._location, self._donate)
        found = trace.functions[self]
        if found is None:
            raise ProgramError(f"call: @{self.name} calls itself, and would be traced without end; use a Python loop", location)
        return found
