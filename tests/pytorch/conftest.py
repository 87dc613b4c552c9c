"""What torch.export records of a module, which takes longer than all the rest of a compile, is shared by tests."""

from __future__ import annotations

from typing import Any

import pytest

_EXPORTED: dict[Any, Any] = {}  # of modules that tests share, each with the same inputs


@pytest.fixture
def exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import hostweave.torch

    export = hostweave.torch.exported

    def exported(module: Any, *arguments: Any) -> Any:
        if module not in _EXPORTED:
            _EXPORTED[module] = export(module, *arguments)
        return _EXPORTED[module]

    monkeypatch.setattr(hostweave.torch, "exported", exported)
