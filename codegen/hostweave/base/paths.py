"""Paths of the package's files. The files are next to the code in a wheel, and at the root of a source tree.

In an editable installation, the code is in the source tree, and build results are in site-packages; `__path__` has both.
"""

from pathlib import Path

import hostweave

PACKAGE = Path(__file__).resolve().parents[1]
_ROOT = PACKAGE if (PACKAGE / "runtime_cpp").is_dir() else PACKAGE.parents[1]

TEMPLATES = _ROOT / "templates"
RUNTIME = _ROOT / "runtime_cpp"
# first for generated programs, then for the driver that Python calls
RUNTIME_INCLUDES = (RUNTIME / "include", RUNTIME / "driver" / "include")
RUNTIME_SOURCES = (RUNTIME / "src", RUNTIME / "driver" / "src")
EXAMPLES = _ROOT / "examples"
BENCHMARKS = _ROOT / "benchmarks"
BUILDER = PACKAGE / "build"

HOST_IR = "program.hw"  # file with the host IR, next to the generated sources

# folder of build results: libhostweave_cpu.so and the binding
NATIVE = next((native for folder in hostweave.__path__ if (native := Path(folder) / "native").is_dir()), PACKAGE / "native")
