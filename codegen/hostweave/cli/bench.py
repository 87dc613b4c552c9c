"""`hostweave bench`: runs the scripts of benchmarks/, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from hostweave.base.errors import HostweaveError
from hostweave.base.paths import BENCHMARKS
from hostweave.build.cuda import gpus

NEEDED_GPUS = {
    **dict.fromkeys(("attention", "decode", "few_rows", "kernels", "layer", "model", "tune"), 1),
    **dict.fromkeys(("comm", "fsdp", "overlap", "sequence_parallel", "small_all_reduce", "torch_door"), 2),
}


def bench(names: Sequence[str]) -> int:
    """Runs the named benchmarks, or all that this machine has the GPUs for. Returns the first exit status that is not 0.

    Raises HostweaveError for a name that there is not, or that needs more GPUs than there are.
    """
    known = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    status = 0
    for name in names or known:
        if name not in known:
            raise HostweaveError(f"bench: no benchmark {name!r}; one of {', '.join(known)}")
        if len(gpus()) < NEEDED_GPUS.get(name, 0):
            needed = NEEDED_GPUS[name]
            needs = f"needs {needed} GPU{'s' if needed > 1 else ''}, and this machine has {len(gpus())}"
            if names:
                raise HostweaveError(f"bench: {name} {needs}")
            print(f"== {name}: {needs}")
            continue
        print(f"== {name}", flush=True)
        status = subprocess.run([sys.executable, str(BENCHMARKS / f"{name}.py")]).returncode or status
    return status
