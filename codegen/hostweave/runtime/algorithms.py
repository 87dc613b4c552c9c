"""The algorithms of `Options(tune=True)`: what the native library has measured is kept in the cache, and is the same on all ranks."""

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from hostweave.base.forks import renewed
from hostweave.build.cache import lookup, name_of, replace

_FILE = "algorithms.json"
_MOST = 10_000  # problems that are kept: some 2 MB

_keeping = renewed(threading.Lock())  # ranks that are threads

Algorithms = dict[str, str]  # by problem: the bytes of a cublasLtMatmulAlgo_t in hex


class Measured:
    """Those of a process, on devices of one name."""

    def __init__(self, module: ModuleType, device: str):
        """With what was found before."""
        self._module = module
        self._entry = name_of("algorithms", device, str(module.blas_version()))
        self._take(self._kept())

    def agree(self, gather: Callable[[str], list[str]]) -> None:
        """Has all ranks take what the first of those took that knows a problem. `gather` gives the records of all, by rank."""
        for record in reversed(gather(json.dumps(self._known()))):
            self._take(json.loads(record))

    def keep(self) -> None:
        """Writes down what is new."""
        with _keeping:
            kept, known = self._kept(), self._known()
            if new := {problem: algorithm for problem, algorithm in known.items() if kept.get(problem) != algorithm}:
                every = list({**kept, **new}.items())[-_MOST:]
                replace(self._entry, lambda folder: _write(folder / _FILE, dict(every)))

    def _known(self) -> Algorithms:
        return {problem: algorithm.hex() for problem, algorithm in self._module.measured_algorithms().items()}

    def _take(self, algorithms: Mapping[str, str]) -> None:
        self._module.set_measured_algorithms({problem: bytes.fromhex(algorithm) for problem, algorithm in algorithms.items()})

    def _kept(self) -> Algorithms:
        with contextlib.suppress(FileNotFoundError):  # another process writes it anew
            if folder := lookup(self._entry):
                return dict(json.loads((folder / _FILE).read_text()))
        return {}


def _write(file: Path, algorithms: Algorithms) -> None:
    file.write_text(json.dumps(algorithms))
