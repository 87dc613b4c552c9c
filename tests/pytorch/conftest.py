"""Caches graphs of torch.export for several tests, because an export takes longer than the rest of a compilation."""

from __future__ import annotations

import sys
from typing import Any

import pytest

_EXPORTED: dict[Any, Any] = {}  # exports of modules that several tests use, with the same inputs, with and without training


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
    """Runs programs of modules by the NumPy interpreter of host programs, with all ranks, so that no C++ is compiled."""
    from hostweave.torch.compiled import ProgramPart

    monkeypatch.setattr(ProgramPart, "__call__", _in_numpy)


def _in_numpy(part: Any, arrays: Any, group: Any) -> list[Any]:
    import numpy as np
    import torch
    from interpret import interpret

    from hostweave.types.tensor import block_of, global_shape

    host = part.program.host
    given = {name: tensor.detach().numpy() for name, tensor in {**part.tensors, **part.graph.bound, **arrays}.items()}
    ranks, made = interpret(host, {one.name: given[one.name] for one in host.arguments}), []
    for output in host.results:
        shape = global_shape(output.type, {})
        whole = np.empty(shape, ranks[0][output.name].dtype)
        for rank, outputs in enumerate(ranks):
            whole[block_of(output.type, host.mesh, rank, shape)] = outputs[output.name]
        made.append(torch.from_numpy(whole))
    return part.values(tuple(made))  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def without_ranges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the background compilation of programs for ranges of sizes, except in their tests, because it takes time."""
    if "ranges" not in request.node.path.name and "torch" in sys.modules:
        import hostweave.torch

        monkeypatch.setattr(hostweave.torch.programs, "vary", lambda *_: False)
