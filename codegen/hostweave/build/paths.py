"""Where the files that travel with the package are: beside the code in a wheel, at the root in a source tree."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
_ROOT = PACKAGE if (PACKAGE / "runtime_cpp").is_dir() else PACKAGE.parents[1]

TEMPLATES = _ROOT / "templates"
RUNTIME = _ROOT / "runtime_cpp"
RUNTIME_INCLUDES = (RUNTIME / "include", RUNTIME / "driver" / "include")  # the program's part, and the part that Python calls it by
RUNTIME_SOURCES = (RUNTIME / "src", RUNTIME / "driver" / "src")
EXAMPLES = _ROOT / "examples"
BENCHMARKS = _ROOT / "benchmarks"
NATIVE = PACKAGE / "native"  # what the installation built: libhostweave_cpu.so and the glue
BUILDER = PACKAGE / "build"
