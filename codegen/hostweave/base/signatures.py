"""Errors for calls with arguments that a function does not have: location, reason, and the likely intention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from hostweave.base.errors import Location, ProgramError, did_you_mean

_P = ParamSpec("_P")
_T = TypeVar("_T")

# What torch calls some parameters.
_OF_TORCH = {"dim": "axis", "dims": "axes", "keepdim": "keepdims", "input": "x", "other": "b"}


def checked(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function; a call that does not fit its parameters is a ProgramError."""

    @wraps(function)
    def called(*args: _P.args, **options: _P.kwargs) -> _T:
        try:
            return function(*args, **options)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # from inside the function
                raise
            problem = error
        raise ProgramError(_misfit(function, problem, options), Location.of_caller())

    return called


def named(function: Callable[_P, _T], name: str, doc: str) -> Callable[_P, _T]:
    """A function made for an entry of a table, as one that was written under this name."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return checked(function)


def public_names(module: dict[str, object]) -> list[str]:
    """The names of a module's checked functions, for its `__all__`."""
    return [name for name, value in module.items() if hasattr(value, "__wrapped__") and not name.startswith("_")]


def checked_arguments(kind: type[_T]) -> type[_T]:
    """The class, made as a `checked` function is called."""
    kind.__init__ = checked(kind.__init__)  # type: ignore[method-assign]
    return kind


def _misfit(function: Callable[..., object], error: TypeError, options: dict[str, object]) -> str:
    """What is wrong with a call, and how the function is called."""
    parameters = {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}
    name = function.__qualname__.split(".")[0] if function.__name__ == "__init__" else function.__name__
    usage = f"{name}({', '.join(_usage(p) for p in parameters.values())})"
    by_name = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = next((option for option in options if option not in by_name), None)
    if unknown is None:
        return f"{name}: {str(error).partition('() ')[2]}; write {usage}"
    torch_word = _OF_TORCH.get(unknown)
    remedy = f"did you mean {torch_word}?" if torch_word in by_name else did_you_mean(unknown, by_name)
    return f"{name}: {usage} has no parameter {unknown!r}; {remedy}"


def _usage(parameter: inspect.Parameter) -> str:
    """The parameter as a call has it, without its type."""
    return str(parameter.replace(annotation=parameter.empty))
