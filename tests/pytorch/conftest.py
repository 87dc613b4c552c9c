"""Fixtures for tests of modules: cached exports, programs in NumPy, and no compilation in the background."""

from __future__ import annotations

import sys
from typing import Any

import pytest

# (module, training) -> export. The key omits inputs and dynamic shapes. So tests that use `exported_once` must not export a module twice
# with different inputs or shapes. An export takes longer than the rest of a compilation.
_EXPORTED: dict[Any, Any] = {}


@pytest.fixture
def exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import hostweave.torch

    export = hostweave.torch.exported

    def exported(module: Any, *arguments: Any) -> Any:
        key = module, arguments[-1]
        if key not in _EXPORTED:
            _EXPORTED[key] = export(module, *arguments)
        return _EXPORTED[key]

    monkeypatch.setattr(hostweave.torch, "exported", exported)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs programs of modules by the NumPy interpreter, with all ranks, so that no C++ is compiled."""
    from hostweave.torch.bound import BoundProgram

    monkeypatch.setattr(BoundProgram, "__call__", _in_numpy)


def _in_numpy(part: Any, arrays: Any, group: Any) -> list[Any]:
    import numpy as np
    from interpret import interpret

    from hostweave.types.numpy_dtypes import numpy_dtype
    from hostweave.types.tensor import block_of, global_shape

    host = part.program.host
    given = {name: _as_numpy(tensor) for name, tensor in {**part.tensors, **part.graph.bound, **arrays}.items()}
    ranks, made = interpret(host, {one.name: given[one.name] for one in host.arguments}), []
    for output in host.results:
        shape = global_shape(output.type, {})
        whole = given[output.memory] if output.memory else np.empty(shape, numpy_dtype(output.type.dtype))
        for rank, outputs in enumerate(ranks):
            whole.reshape(shape)[block_of(output.type, host.mesh, rank, shape)] = outputs[output.name]
        made.append(_as_tensor(whole))
    return part.values(tuple(made))  # type: ignore[no-any-return]


def _as_numpy(tensor: Any) -> Any:
    """The memory of a tensor as an array. NumPy needs ml_dtypes for 8-bit and bf16 floats."""
    import torch

    from hostweave.torch.aten import dtype_of
    from hostweave.types.numpy_dtypes import numpy_dtype

    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        bits = {1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize]
        return tensor.detach().view(bits).numpy().view(numpy_dtype(dtype_of(tensor.dtype)))
    return tensor.detach().numpy()


def _as_tensor(array: Any) -> Any:
    import numpy as np
    import torch

    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view({1: np.uint8, 2: np.int16}[array.dtype.itemsize])).view(getattr(torch, array.dtype.name))


@pytest.fixture(autouse=True)
def without_ranges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the background compilation of programs for ranges of sizes, because this compilation takes time. Test files with `ranges` in
    their names are an exception."""
    if "ranges" not in request.node.path.name and "torch" in sys.modules:
        import hostweave.torch

        monkeypatch.setattr(hostweave.torch.programs, "vary", lambda *_: False)
