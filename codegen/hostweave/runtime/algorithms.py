"""Algorithms of cuBLASLt that `Options(tune=True)` has measured. They are stored in the cache, and are equal on all ranks of a group."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from hostweave.build.cache import get_or_make, lookup, name_of

_FILE = "algorithms.json"
_MAX_PROBLEMS = 10_000  # about 2 MB

Algorithms = dict[str, str]  # problem -> bytes of a cublasLtMatmulAlgo_t in hex


class MeasuredAlgorithms:
    """Algorithms that this process knows for one kind of device."""

    def __init__(self, module: ModuleType, device: str):
        self._module = module
        self._entry = name_of("algorithms", device, str(module.blas_version()))
        self._use(self._saved())

    def agree(self, gather: Callable[[str], list[str]]) -> None:
        """Makes all ranks use the same algorithms: for each problem, the algorithm of the lowest rank that knows an algorithm. `gather`
        returns the texts of all ranks."""
        for record in reversed(gather(json.dumps(self._known()))):
            self._use(json.loads(record))

    def save(self) -> None:
        known = self._known()

        def add(folder: Path) -> None:
            (folder / _FILE).write_text(json.dumps(dict(list({**self._saved(), **known}.items())[-_MAX_PROBLEMS:])))

        if not known.items() <= self._saved().items():
            get_or_make(self._entry, add, replaces=True)

    def _known(self) -> Algorithms:
        return {problem: algorithm.hex() for problem, algorithm in self._module.measured_algorithms().items()}

    def _use(self, algorithms: Mapping[str, str]) -> None:
        self._module.set_measured_algorithms({problem: bytes.fromhex(algorithm) for problem, algorithm in algorithms.items()})

    def _saved(self) -> Algorithms:
        with contextlib.suppress(FileNotFoundError):  # another process is replacing the folder
            if folder := lookup(self._entry):
                return dict(json.loads((folder / _FILE).read_text()))
        return {}
