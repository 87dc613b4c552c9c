"""The command line: `hostweave demo | compile | inspect | timeline | export | bench | calibrate | doctor | cache`."""

import argparse
import ast
import difflib
import itertools
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hostweave as hw
from hostweave.base.errors import BuildError, HostweaveError
from hostweave.base.paths import BENCHMARKS, HOST_IR
from hostweave.build import cache
from hostweave.build.cuda import gpus
from hostweave.build.toolchain import find_compiler, openblas_root
from hostweave.cli.calibrate import calibrate
from hostweave.cli.highlight import show
from hostweave.cli.memory_plan import memory_report
from hostweave.cli.notes import costly_choices
from hostweave.cli.programs import load_program
from hostweave.emit import render
from hostweave.emit.main import executable_of
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.size_requirements import MOST
from hostweave.options import Options
from hostweave.pipeline import PASSES, lower
from hostweave.targets.target import NAMES, find_target

_HEADER = re.compile(r"\w+ @(\w+)\(")  # of a function, kernel or program in the text of an IR


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. A mistake of the user is one line on stderr and exit status 1."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int | None] = options.command
    try:
        return command(options) or 0
    except HostweaveError as error:
        print(f"hostweave: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `hostweave inspect ... | head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostweave", description="Compiles a multi-device tensor program into one readable C++ host program."
    )
    parser.add_argument("--version", action="version", version=f"hostweave {hw.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int | None], help: str, *of: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, parents=of)
        sub.set_defaults(command=command)
        return sub

    program = argparse.ArgumentParser(add_help=False)
    what = "a fusion in a Python file or of an example (seeds:ag_matmul_p2p), or a .hw file of IR text"
    program.add_argument("program", metavar="FILE.py:FUSION", help=what)
    program.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="replace a constant of the file, such as D=4")
    program.add_argument("--streams", type=int, default=4, help="number of CUDA streams of a stream loop (default 4)")

    demo = add("demo", _demo, "Compile a seed program, show every stage, run it on all ranks and compare with NumPy.")
    demo.add_argument("--program", default="ag_matmul_p2p", help="a program of examples/seeds.py (default ag_matmul_p2p)")
    demo.add_argument("--ranks", type=int, default=8, help="number of ranks (default 8)")
    demo.add_argument("--target", choices=NAMES, help="default: cuda where there are GPUs, else cpu")

    compile = add("compile", _compile, "Compile a program and say where its sources and module are.", program)
    compile.add_argument("--target", choices=NAMES, default="cpu")

    inspect = add("inspect", _inspect, "Print a stage of a program: an IR after a pass, or the generated C++.", program)
    inspect.add_argument(
        "--after", metavar="PASS", help="the IR after this pass; 'input' is the fusion as traced, 'all' what each pass changed"
    )
    inspect.add_argument("--only", metavar="NAME", help="one file of the C++, or with --after one function or kernel")
    inspect.add_argument("--memory", action="store_true", help="offsets and live ranges of temporaries, peak and lower bound")
    inspect.add_argument("--sizes", metavar="M=1024,K=512", default="", help="sizes for chosen loops, --memory and notes on costs")

    timeline_help = "Predict when each rank does what, and write it as a page, as JSON for Perfetto or as SVG."
    timeline = add("timeline", _timeline, timeline_help, program)
    timeline.add_argument("--sizes", metavar="M=1024,K=512", default="", help="global sizes; 4096 for others")
    timeline.add_argument("--ranks", metavar="8 | dp=2,tp=4", default="", help="predict for another number of ranks")
    timeline.add_argument("--output", "-o", type=Path, metavar="FILE", help="a .html, .json or .svg file (default NAME.html)")

    export = add("export", _export, "Write a CMake project that builds and runs the program without Python.", program)
    export.add_argument("folder", type=Path)

    bench_help = "Run the benchmarks that this machine can run, and print ratios to the peers of the same run."
    sub = add("bench", lambda options: bench(options.names), bench_help)
    sub.add_argument("names", nargs="*", help="benchmarks by name; default: all that this machine can run")

    doctor_help = "Say what was found (compiler, CUDA, NCCL, cuBLAS, GPUs, cache) and what to install for what is missing."
    add("doctor", lambda _: print(report()), doctor_help)

    calibrate_help = "Measure the GPUs of this machine, in about a minute, for the cost model that chooses how communication overlaps."
    add("calibrate", _calibrate, calibrate_help)

    cache_help = "The folder of compiled programs; HOSTWEAVE_CACHE moves it, HOSTWEAVE_CACHE_LIMIT (10 GB) bounds it."
    sub = add("cache", _cache, cache_help)
    sub.add_argument("action", nargs="?", choices=("path", "list", "size", "clear"), default="list")
    return parser


def _load(options: argparse.Namespace) -> Any:
    constants = {}
    for setting in options.set:
        name, equals, value = setting.partition("=")
        if not equals:
            raise HostweaveError(f"--set {setting}: write NAME=VALUE")
        try:
            constants[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise HostweaveError(f"--set {setting}: {value} is no Python literal; quote a text twice, as in NAME='\"text\"'") from None
    return load_program(options.program, constants), Options(streams=options.streams)


def _demo(options: argparse.Namespace) -> int:
    from hostweave.cli.demo import demo

    return demo(options.program, options.ranks, options.target)


def _compile(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    compiled = hw.compile(program, target=options.target, options=settings)
    compiled.build()
    print(compiled.folder)


def _inspect(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    settings = replace(settings, sizes=_sizes(options.sizes))
    seen: list[tuple[str, Fusion | HostProgram]] = []
    host = lower(program, settings, lambda name, stage: seen.append((name, stage)))
    stages = [(name, str(stage)) for name, stage in seen]
    if options.memory:
        print(memory_report(host, _sizes(options.sizes)), end="")
    elif options.after is None:
        sources = render(host)
        if options.only:
            sources = {options.only: _one_of(sources, options.only, "file")}
        for number, (path, text) in enumerate(sources.items()):
            if not options.only:
                show(f"{chr(10) if number else ''}// ==== {path}\n", "cpp")
            show(text, "ir" if path == HOST_IR else "cpp")
    elif options.after == "all":
        show("\n".join(_changes(_only(stages, options.only))), "ir")
    elif options.after in dict(stages):
        show(_only([(options.after, dict(stages)[options.after])], options.only)[0][1], "ir")
    else:
        raise HostweaveError(f"--after {options.after}: no such stage; one of input, {', '.join(p.__name__ for p in PASSES)}, all")
    if fusions := [stage for _, stage in seen if isinstance(stage, Fusion)]:
        for note in costly_choices(fusions[-1], host, _sizes(options.sizes)):
            print(f"note: {note}", file=sys.stderr)


def _timeline(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    sizes = _sizes(options.sizes)
    made = hw.compile(program, options=replace(settings, sizes=sizes, check=False))
    ranks = int(options.ranks) if options.ranks.isdigit() else _sizes(options.ranks, "--ranks")
    report = made.predict(sizes, ranks=ranks or None)
    print(report)
    report.save(output := options.output or Path(f"{made.name}.html"))
    print(output)


def _only(stages: Sequence[tuple[str, str]], name: str | None) -> Sequence[tuple[str, str]]:
    """Of each stage the function, kernel or program of that name; the stages themselves where it is None."""
    if name is None:
        return stages
    parts = [(stage, {found[1]: text for text in _split(whole) if (found := _HEADER.match(text))}) for stage, whole in stages]
    _one_of({known: text for _, functions in parts for known, text in functions.items()}, name, "function")
    return [(stage, functions.get(name, "")) for stage, functions in parts]


def _split(text: str) -> list[str]:
    """The functions, kernels and programs of an IR's text."""
    return re.split(rf"^(?={_HEADER.pattern})", text, flags=re.M)


def _one_of(texts: Mapping[str, str], name: str, what: str) -> str:
    if name not in texts:
        raise HostweaveError(f"--only {name}: no such {what}; one of {', '.join(texts)}")
    return texts[name]


def _changes(stages: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The first stage, and of each other one what differs from the one before, as a unified diff."""
    yield "# ---- {}\n{}".format(*stages[0])
    for (before, old), (after, new) in itertools.pairwise(stages):
        lines = "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), before, after))
        yield f"# ---- {after}\n{lines}" if lines else f"# ---- {after}: nothing changed\n"


def _sizes(text: str, option: str = "--sizes") -> dict[str, int]:
    sizes = {}
    for setting in filter(None, text.split(",")):
        name, equals, value = setting.partition("=")
        if not equals or not value.strip().isdigit():
            raise HostweaveError(f"{option} {text}: {setting}: write NAME=NUMBER, with commas between several")
        if len(value) > 2 * len(str(MOST)) or int(value) > MOST:
            raise HostweaveError(f"{option} {name.strip()}={value[:20]}: no memory has so many elements; give the size of a call")
        sizes[name.strip()] = int(value)
    return sizes


def _export(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    hw.compile(program, options=settings).export(options.folder)
    build = options.folder / "build"
    configure = ["cmake", "-S", options.folder, "-B", build, "-DHOSTWEAVE_TARGET=cpu", f"-DHOSTWEAVE_OPENBLAS_ROOT={openblas_root()}"]
    commands = configure, ["cmake", "--build", build], [(build / executable_of(program.name)).absolute()]
    print(" && ".join(shlex.join(map(str, command)) for command in commands))


def _calibrate(_: argparse.Namespace) -> None:
    for line in calibrate():
        print(line, flush=True)


def _cache(options: argparse.Namespace) -> None:
    if options.action == "path":
        print(cache.root())
    elif options.action == "clear":
        print(f"removed {cache.clear()} entries from {cache.root()}")
    else:
        for entry in cache.entries() if options.action == "list" else ():
            print(entry)
        print(cache.summary())


# --- bench ------------------------------------------------------------------------------------------------------------
# The scripts of benchmarks/, each in a process of its own.


NEEDED_GPUS = {
    **dict.fromkeys(("attention", "decode", "few_rows", "kernels", "layer", "model", "tune"), 1),
    **dict.fromkeys(("comm", "fsdp", "overlap", "sequence_parallel", "small_all_reduce", "torch_door"), 2),
}

NEEDED_PACKAGES = {
    **dict.fromkeys((name for name in NEEDED_GPUS if name != "comm"), ("torch",)),
    "torch_training": ("torch", "transformers"),
}


def bench(names: Sequence[str]) -> int:
    """Runs the named benchmarks, or all that this machine has the GPUs for. Returns the first exit status that is not 0.

    Raises HostweaveError for an unknown name, or a benchmark that needs more GPUs than there are, or a package that is not installed.
    """
    known = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    status = 0
    for name in names or known:
        if name not in known:
            raise HostweaveError(f"bench: no benchmark {name!r}; one of {', '.join(known)}")
        if needs := _lacking(name):
            if names:
                raise HostweaveError(f"bench: {name} {needs}")
            print(f"== {name}: {needs}")
            continue
        print(f"== {name}", flush=True)
        status = subprocess.run([sys.executable, str(BENCHMARKS / f"{name}.py")]).returncode or status
    return status


def _lacking(name: str) -> str | None:
    """Names the need of a benchmark that this machine does not meet; None if it can run."""
    if len(gpus()) < (needed := NEEDED_GPUS.get(name, 0)):
        return f"needs {needed} GPU{'s' if needed > 1 else ''}, and this machine has {len(gpus())}"
    missing = [package for package in NEEDED_PACKAGES.get(name, ()) if find_spec(package) is None]
    return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}" if missing else None


# --- doctor -----------------------------------------------------------------------------------------------------------
# What is installed on this machine, and how to install what is missing.


def report() -> str:
    """One line for each thing that a target needs. Lines of what is missing end in what to install."""
    return "\n".join(f"{name:<10} {text}" for name, text in _lines())


def _lines() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    yield "compiler", _or_why_not(_compiler, "missing")
    for target in NAMES:
        yield from find_target(target).report()
    yield "cache", _or_why_not(cache.summary, "cannot be used")


def _or_why_not(text: Callable[[], str], otherwise: str) -> str:
    try:
        return text()
    except BuildError as error:
        return f"{otherwise}: {error}"


def _compiler() -> str:
    compiler = find_compiler()
    version = subprocess.run([str(compiler), "--version"], stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return f"{version[0] if version else 'unknown version'}, {compiler}"
