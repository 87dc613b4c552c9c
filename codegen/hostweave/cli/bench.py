"""`hostweave bench`: runs the scripts of benchmarks/, each in a separate process."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from time import perf_counter

from hostweave.base.errors import HostweaveError, did_you_mean
from hostweave.base.paths import BENCHMARKS
from hostweave.build.cuda import gpus

NEEDED_GPUS = {
    **dict.fromkeys(("attention", "decode", "few_rows", "fp8", "kernels", "layer", "model", "moe", "tune", "vit"), 1),
    **dict.fromkeys(("comm", "figures", "fsdp", "graph_progress", "overlap", "predictions"), 2),
    **dict.fromkeys(("sequence_parallel", "small_all_reduce", "torch_door"), 2),
}

NEEDED_PACKAGES = {
    **dict.fromkeys((name for name in NEEDED_GPUS if name != "comm"), ("torch",)),
    **dict.fromkeys(("generate", "torch_training", "vit"), ("torch", "transformers")),
}

RUNS_ALL = "figures"  # this benchmark runs most of the other benchmarks


def benchmark_names() -> list[str]:
    return sorted(path.stem for path in BENCHMARKS.glob("*.py"))


def benchmark_list() -> Iterator[dict[str, str | bool]]:
    """Yields each benchmark with its purpose, and the first requirement that this machine does not meet."""
    for name in benchmark_names():
        purpose = (ast.get_docstring(ast.parse((BENCHMARKS / f"{name}.py").read_text())) or "").split("\n")[0]
        missing_text = _missing_requirement(name) or ""
        yield {"name": name, "measures": purpose, "runs_here": not missing_text, "lacks": missing_text}


def bench(names: Sequence[str]) -> int:
    """Runs the named benchmarks. The default is all benchmarks that this machine can run, except `figures`, which runs most of the other
    benchmarks. Returns the last non-zero exit status, or 0."""
    status = 0
    chosen, begin = names or [name for name in benchmark_names() if name != RUNS_ALL], perf_counter()
    for number, name in enumerate(chosen, 1):
        if name not in benchmark_names():
            raise HostweaveError(f"bench: there is no benchmark {name!r}; {did_you_mean(name, benchmark_names())}")
        if needs := _missing_requirement(name):
            if names:
                raise HostweaveError(f"bench: {name} {needs}")
            print(f"== {name}: {needs}")
            continue
        progress_text = f" ({number} of {len(chosen)}, after {perf_counter() - begin:.0f} s)" if sys.stdout.isatty() else ""
        print(f"== {name}{progress_text}", flush=True)
        status = subprocess.run([sys.executable, str(BENCHMARKS / f"{name}.py")]).returncode or status
    return status


def _missing_requirement(name: str) -> str | None:
    if len(gpus()) < (needed := NEEDED_GPUS.get(name, 0)):
        return f"needs {needed} GPU{'s' if needed > 1 else ''}, but this machine has {len(gpus())}"
    missing = [package for package in NEEDED_PACKAGES.get(name, ()) if find_spec(package) is None]
    return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}" if missing else None
