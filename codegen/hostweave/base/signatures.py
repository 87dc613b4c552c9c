"""Error messages for calls whose arguments do not fit the function's parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from numbers import Integral
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin

from hostweave.base.errors import HostweaveError, ProgramError, did_you_mean

_P = ParamSpec("_P")
_T = TypeVar("_T")

MAX_CHARACTERS = 120  # length of a usage, such as `matmul(a, b)`, above which some messages shorten the usage

# PyTorch's names of some parameters.
_OF_TORCH = {"dim": "axis", "dims": "axes", "keepdim": "keepdims", "input": "x", "other": "b"}


def checked(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: a call that fails because of its arguments raises ProgramError. NumPy integers become ints."""

    @wraps(function)
    def wrapper(*args: _P.args, **options: _P.kwargs) -> _T:
        args, options = with_ints(args), with_ints(options)
        try:
            if any(map(_has_bools, (*args, *options.values()))) and (problem := _wrong_type_of(function, args, options, _has_bools)):
                raise ProgramError.here(problem)  # first, because Python accepts a bool as an int
            return function(*args, **options)
        except HostweaveError:
            raise
        except (TypeError, AttributeError, ValueError, LookupError) as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # raised inside the function
                problem = _wrong_type_of(function, args, options)
                if problem is None:
                    raise
            else:
                problem = _mismatched_call(function, error, args, options)
        raise ProgramError.here(problem)

    return wrapper


def with_ints(value: Any) -> Any:
    """Replaces NumPy integers by ints, also in tuples, lists, dicts and slices."""
    if isinstance(value, Integral):
        return value if isinstance(value, int) else int(value)
    if type(value) in (tuple, list):
        return type(value)(map(with_ints, value))
    if type(value) is dict:
        return {key: with_ints(one) for key, one in value.items()}
    return slice(*map(with_ints, (value.start, value.stop, value.step))) if isinstance(value, slice) else value


def named(function: Callable[_P, _T], name: str, doc: str) -> Callable[_P, _T]:
    """Sets the name and the docstring of a generated function, and wraps it in `checked`."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return checked(function)


def public_names(module: dict[str, object]) -> list[str]:
    """Names of a module's `checked` functions without a leading underscore."""
    return [name for name, value in module.items() if hasattr(value, "__wrapped__") and not name.startswith("_")]


def checked_arguments(kind: type[_T]) -> type[_T]:
    kind.__init__ = checked(kind.__init__)  # type: ignore[method-assign]
    return kind


def _mismatched_call(function: Callable[..., object], error: Exception, args: Sequence[object], options: Mapping[str, object]) -> str:
    parameters, name, usage = _usage_of(function)
    by_name = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    has_others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = None if has_others else next((option for option in options if option not in by_name), None)
    if unknown is None:
        said = str(error).partition("() ")[2]
        if said.startswith("takes "):  # Python counts `self`
            most = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values())
            given = len(args) - ("self" in inspect.signature(function).parameters)
            said = f"takes at most {most} positional argument{'s' * (most != 1)}, but gets {given}"
        return f"{name}: {said}; write {usage}"
    torch_word = _OF_TORCH.get(unknown)
    remedy = f"did you mean {torch_word}?" if torch_word in by_name else did_you_mean(unknown, by_name)
    return f"{name}: {usage if len(usage) <= MAX_CHARACTERS else name} has no parameter {unknown!r}; {remedy}"


def _wrong_type_of(
    function: Callable[..., object],
    args: Sequence[object],
    options: Mapping[str, object],
    of: Callable[[object], bool] = lambda _: True,
) -> str | None:
    """Error message for the first value of a wrong type, among values for which `of` is True. None if there is no such value, or if the
    arguments do not bind to the parameters."""
    try:
        bound = inspect.signature(function).bind(*args, **options)
    except TypeError:
        return None
    (parameters, name, usage), hints = _usage_of(function), _hints(function)
    for parameter, given in bound.arguments.items():
        kind = parameters[parameter].kind if parameter in hints and parameter in parameters else None
        values = [(parameter, each) for each in given] if kind is inspect.Parameter.VAR_POSITIONAL else [(parameter, given)]
        for argument, value in given.items() if kind is inspect.Parameter.VAR_KEYWORD else values:
            if kind is not None and of(value) and not _fits(value, hints[parameter]):
                usage = usage if len(usage) <= MAX_CHARACTERS else f"{name}({_without_type(parameters[parameter])})"
                wanted = _types_text(hints[parameter])
                article = "an" if wanted.lower().startswith(("a", "e", "i", "o", "u", "hw.")) else "a"
                return f"{name}: {argument}={shown(value)} is not {article} {wanted}; write {usage}"
    return None


def shown(value: object) -> str:
    """One line of a value, for error messages."""
    line = " ".join(repr(value).split())
    return line if len(line) < 100 else f"{line[:100]}..."


@cache
def _hints(function: Callable[..., object]) -> dict[str, Any]:
    """Annotations, except those with names that only type checkers import."""
    hints = {}
    for name, stated in function.__annotations__.items():
        with suppress(NameError):
            hints[name] = eval(stated, function.__globals__) if isinstance(stated, str) else stated
    return hints


def _has_bools(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, tuple | list) and any(isinstance(each, bool) for each in value))


def _fits(value: object, hint: Any) -> bool:
    kind, hints = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, one) for one in hints)
    if kind in (tuple, list, Sequence):
        return isinstance(value, tuple | list) and all(any(_fits(each, one) for one in hints if one is not ...) for each in value)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(_fits(each, one) for item in value.items() for each, one in zip(item, hints, strict=True))
    if not isinstance(kind, type) or kind is Any or getattr(kind, "_is_protocol", False):
        return True
    if isinstance(value, bool) and kind in (int, float):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _types_text(*hints: Any) -> str:
    """Types as text for a message: `int, str or Sequence of int`."""
    kinds = (kind for hint in hints for kind in (get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)))
    words = [_type_text(kind) for kind in kinds if kind is not ...]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _type_text(hint: Any) -> str:
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    name = getattr(kind, "__name__", str(kind))
    if kind is Mapping:
        return f"{name} of {_types_text(arguments[0])} to {_types_text(arguments[1])}"
    return f"{name} of {_types_text(*arguments)}" if arguments and kind in (tuple, list, Sequence) else name


def _usage_of(function: Callable[..., object]) -> tuple[dict[str, inspect.Parameter], str, str]:
    """Parameters, name, and usage without types."""
    parameters = {name: p for name, p in inspect.signature(function).parameters.items() if name != "self"}
    name = function.__qualname__.split(".")[0] if function.__name__ == "__init__" else function.__name__
    return parameters, name, f"{name}({', '.join(map(_without_type, parameters.values()))})"


def _without_type(parameter: inspect.Parameter) -> str:
    return str(parameter.replace(annotation=parameter.empty)).replace("<factory>", "...")
