"""Passes values of many kinds for each parameter of public functions. A function must accept the value, or raise a HostweaveError."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import HostweaveError
from hostweave.types.machine import H200

X = np.ones((4, 2), np.float32)
WRONG = (None, 3, -1, True, 0.5, "x", b"x", [], [None], ["x", 2], (1, "x"), {}, {3: 3}, object(), type, hw.f32)
MESH, TYPE = hw.Mesh(x=2), hw.f32["M@x", "K"]
FITTING: dict[str, Any] = {
    "array": X,
    "arrays": [X[:2], X[2:]],
    "calls": [{"x": X}],
    "color": 0,
    "communicators": {"x": 1},
    "count": 1,
    "dim": 0,
    "donate": (),
    "dtype": hw.f32,
    "environ": {"RANK": "0", "WORLD_SIZE": "1"},
    "function": lambda *_: None,
    "mesh": MESH,
    "name": "h",
    "rank": 0,
    "ranks": [0, 1],
    "repetitions": 1,
    "shape": (4, 2),
    "text": "",
    "where": "a file",
}
GIVEN = ("Captured", "Group", "Program", "Provider", "Tensor")  # classes whose objects users do not construct


def named_in_the_reference() -> Iterator[tuple[str, list[str]]]:
    for path in Path(__file__).parents[1].glob("docs/reference/*.md"):
        for name, options in re.findall(r"^::: hostweave\.(\S+)\n((?:    .*\n)*)", path.read_text(), re.M):
            members = re.search(r"members: \[(.*)\]", options)
            yield name.split(".")[-1], re.findall(r"\w+", members[1]) if members else []


@pytest.fixture(scope="module")
def public() -> Iterator[dict[str, Callable[..., Any]]]:
    """Public functions that do not return a Tensor, public classes, and methods of objects and tensors."""
    fusion = hw.fusion(x=hw.f32["M", "K"])(lambda x: x + 1)
    program, group = hw.compile(fusion), hw.init(group="of wrong kinds")
    objects = (MESH, TYPE, hw.f32, H200, fusion, program, group, hw.Threads(1), program.capture(X, group=group))
    of_kind = {type(one).__name__: one for one in objects}
    found: dict[str, Callable[..., Any]] = {}
    for name, members in named_in_the_reference():
        made = getattr(hw, name, None)
        if callable(made) and name not in GIVEN and "Tensor" not in str(getattr(made, "__annotations__", {}).get("return")):
            found[name] = made
        for member in members:
            method = getattr(of_kind.get(name), member, None)
            if callable(method) and member != "close":
                found[f"{name}.{member}"] = method
    found |= {"Fusion.parse": hw.Fusion.parse, "HostProgram.parse": hw.HostProgram.parse, "TensorType.block": TYPE.block}
    found["DType.__getitem__"] = hw.f32.__getitem__
    found["fusion, and its function"] = lambda function, donate: hw.fusion(donate=donate, x=TYPE)(function)
    found["block, and its function"] = lambda function, donate: hw.block(donate=donate, x=TYPE)(function)
    for name in (
        "named",
        "stream",
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__add__",
        "__radd__",
        "__round__",
        "__pow__",
        "__matmul__",
    ):
        found[f"Tensor.{name}"] = of_a_tensor(name)
    yield found
    group.close()


def of_a_tensor(name: str) -> Callable[..., Any]:
    def door(*args: Any, **named: Any) -> Any:
        return hw.fusion(x=hw.f32[4, 6])(lambda x: getattr(x * 2, name)(*args, **named))

    door.__signature__ = inspect.signature(getattr(hw.Tensor(None, None, None), name))  # type: ignore[attr-defined, arg-type]
    return door


def calls(function: Callable[..., Any]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Yields a description, positional arguments and named arguments. In each call, one argument is a value of WRONG."""
    parameters = list(inspect.signature(function).parameters.values())
    for wrong, value in itertools.product(parameters, WRONG):
        args, named = list[Any](), dict[str, Any]()
        for p in parameters:
            if p is wrong and p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD):
                named["M" if p.kind is p.VAR_KEYWORD else p.name] = value
            elif p is wrong and len(args) < parameters.index(p):  # The argument is passed by name, because an earlier parameter is omitted.
                named[p.name] = value
            elif p is wrong:
                args.append(value)
            elif p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                args.append(FITTING.get(p.name, X))
        yield f"{wrong.name}={value!r}", args, named


def test_wrong_arguments_are_accepted_or_refused(
    public: dict[str, Callable[..., Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    raised = []
    for name, function in public.items():
        for wrong, args, named in calls(function):
            try:
                made = function(*args, **named)
                if isinstance(made, hw.Group):
                    made.close()
            except HostweaveError:
                pass
            except Exception as error:
                raised.append(f"{name}: {wrong}: {type(error).__name__}: {error}")
    assert not raised, "\n".join(raised)
