"""The paths of the files that belong to the package: beside the code in a wheel, at the root in a source tree.

An editable installation has the code in the source tree, and what it built in site-packages: both are on the package's `__path__`.
"""

from pathlib import Path

import hostweave

PACKAGE = Path(__file__).resolve().parents[1]
_ROOT = PACKAGE if (PACKAGE / "runtime_cpp").is_dir() else PACKAGE.parents[1]

TEMPLATES = _ROOT / "templates"
RUNTIME = _ROOT / "runtime_cpp"
RUNTIME_INCLUDES = (RUNTIME / "include", RUNTIME / "driver" / "include")  # the program's part, and the part that Python calls it by
RUNTIME_SOURCES = (RUNTIME / "src", RUNTIME / "driver" / "src")
EXAMPLES = _ROOT / "examples"
BENCHMARKS = _ROOT / "benchmarks"
BUILDER = PACKAGE / "build"

HOST_IR = "program.hw"  # the host IR of a program, among its generated sources

# What the installation built: libhostweave_cpu.so and the glue.
NATIVE = next((native for part in hostweave.__path__ if (native := Path(part) / "native").is_dir()), PACKAGE / "native")
