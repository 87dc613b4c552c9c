"""Arrays of a recent call are checked again only if the arrays have changed."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.runtime import checked_call

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")


@hw.fusion(mesh=hw.Mesh(x=1), donate={"kept": 0}, x=hw.f32["M", 4], kept=hw.f32["M", 4], w=hw.f32[4])
def added(x: hw.Tensor, kept: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
    return kept + x, x * w


PROGRAM = hw.compile(added)


def arrays(rows: int = 3) -> tuple[Any, Any, Any]:
    return torch.arange(4.0 * rows).reshape(rows, 4), torch.zeros(rows, 4), torch.ones(4)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    group = hw.init()
    names: list[str] = []
    accept = checked_call.accept

    def noted(program: str, target: Any, name: str, *rest: Any) -> Any:
        names.append(name)
        return accept(program, target, name, *rest)

    monkeypatch.setattr(checked_call, "accept", noted)
    yield names
    group.close()


@pytest.mark.parametrize("of", [torch.Tensor.clone, torch.Tensor.numpy], ids=["torch", "numpy"])
def test_arrays_are_checked_once(checks: list[str], of: Callable[[Any], Any]) -> None:
    x, kept, w = map(of, arrays())
    out = of(torch.zeros(3, 4))
    model = PROGRAM.bind(w=w)
    for i in range(1, 4):
        model(x, kept, out=(None, out))
        np.testing.assert_array_equal(kept, i * np.asarray(x))
        np.testing.assert_array_equal(out, x)
    assert checks == ["x", "kept", PROGRAM.host.outputs[1].name]
    other = x * 2
    total, scaled = model(other, kept)
    assert total is kept
    np.testing.assert_array_equal(scaled, other)
    assert len(checks) == 5
    assert model(other, kept)[1] is not scaled
    assert len(checks) == 5


def test_changes_of_an_array_are_detected(checks: list[str]) -> None:
    x, kept, w = arrays()
    model = PROGRAM.bind(w=w)

    def fails(message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            model(x, kept)

    model(x, kept)
    x.requires_grad_()
    fails("x: requires grad")
    with torch.no_grad():
        model(x, kept)
    x.requires_grad_(False)
    x.t_()
    fails("x: is not contiguous")
    x.t_()
    model(x, kept)
    kept.set_(x)
    fails("kept, which is donated: kept and x overlap in memory")
    with pytest.raises(ArgumentError, match=r"takes 2 arrays \(x: .*\), not 3"):
        model(x, kept, w)


def test_changes_of_a_numpy_array_are_detected(checks: list[str]) -> None:
    x, kept, w = (array.numpy().copy() for array in arrays())
    PROGRAM(x, kept, w)
    kept.flags.writeable = False
    with pytest.raises(ArgumentError, match="kept: is donated but read-only"):
        PROGRAM(x, kept, w)
    kept.flags.writeable = True
    PROGRAM(x, kept, w)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy 2.5 and later deprecate assignments to `dtype`.
        x.dtype = np.int32
    with pytest.raises(ArgumentError, match="x: expected f32"):
        PROGRAM(x, kept, w)


def test_a_masked_array_on_known_memory_is_refused(checks: list[str]) -> None:
    x, kept, w = (array.numpy().copy() for array in arrays())
    out = np.zeros_like(x)
    PROGRAM(x, kept, w, out=(None, out))
    for given, of_out in (((np.ma.masked_array(x, x > 0), kept, w), out), ((x, kept, w), np.ma.masked_array(out, out > 0))):
        with pytest.raises(ArgumentError, match=r"masked arrays are not supported; call \.filled\(value\)"):
            PROGRAM(*given, out=(None, of_out))


def test_no_array_is_kept_alive_and_few_sets_are_remembered(checks: list[str]) -> None:
    for rows in range(1, 100):
        x, kept, w = arrays(rows)
        seen = [weakref.ref(array) for array in (x, kept, w, *PROGRAM(x, kept, w))]
    del x, kept, w
    assert all(one() is None for one in seen)
    (program,) = (one for one in hw.init().programs.values() if one.host is PROGRAM.host)
    assert all(len(table.checked_calls) <= 64 for table in program.arguments.tables.values())


def test_a_program_that_is_dropped_is_freed_at_once(checks: list[str]) -> None:
    x, kept, w = arrays()
    program = hw.compile(added)
    model = program.bind(w=w)
    model(x, kept)
    (local,) = map(weakref.ref, hw.init().programs.values())
    gc.disable()
    try:
        del program
        assert local() is not None  # The program with bound inputs still uses `local`.
        del model
        assert local() is None
    finally:
        gc.enable()
