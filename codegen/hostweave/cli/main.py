"""The command line `hostweave COMMAND`. `_parser` lists the commands."""

import argparse
import ast
import difflib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostweave as hw
from hostweave.base.errors import HostweaveError, did_you_mean
from hostweave.base.paths import HOST_IR
from hostweave.base.progress import progress, tell
from hostweave.base.shortages import remedy_of
from hostweave.build import cache
from hostweave.build.toolchain import MODULE_FILE
from hostweave.cli.bench import bench, benchmark_list
from hostweave.cli.calibrate import calibrate
from hostweave.cli.completion import SHELLS, commands_of, script
from hostweave.cli.doctor import report
from hostweave.cli.highlight import show
from hostweave.cli.memory_plan import memory_report
from hostweave.cli.notes import costly_choices
from hostweave.cli.programs import load_program
from hostweave.emit import render
from hostweave.emit.main import executable_of
from hostweave.emit.program import ProgramSources
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.size_requirements import MAX_SIZE
from hostweave.kernel_ir.pipeline import STAGES, stages
from hostweave.options import OVERLAPS, TRANSPORTS, Options
from hostweave.pipeline import PASSES, lower
from hostweave.targets.target import NAMES, find_target
from hostweave.types.machine import Network

_HEADER = re.compile(r"\w+ @(\w+)(?:\(| \{)")  # begins a function, kernel, program or loops in IR text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, or prints the help. For a HostweaveError, prints the message on stderr and returns 1."""
    try:
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        finally:
            print(end="", flush=True)
    except HostweaveError as error:
        print(f"hostweave: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        is_closed, remedy = isinstance(error, BrokenPipeError), remedy_of(str(error))  # closed by `hostweave inspect ... | head`
        if not (is_closed or remedy):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest of the output when it exits.
        if remedy:
            print(f"hostweave: {error.strerror}; {remedy}", file=sys.stderr)
        return int(not is_closed)
    except KeyboardInterrupt:
        print("hostweave: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(given: Sequence[str]) -> int:
    parser = _parser()
    if not given:
        parser.print_help()
        return 0
    if not given[0].startswith("-") and given[0] not in (known := commands_of(parser)):
        raise HostweaveError(f"there is no command {given[0]}; {did_you_mean(given[0], known)}")
    options = parser.parse_args(given)
    command: Callable[[argparse.Namespace], int | None] = options.command
    return command(options) or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hostweave", description="Compiles a multi-device tensor program into one readable C++ host program."
    )
    parser.add_argument("--version", action="version", version=f"hostweave {hw.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int | None], help: str, *parents: Any) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help, parents=parents)
        sub.set_defaults(command=command)
        return sub

    program, target, as_json = (argparse.ArgumentParser(add_help=False) for _ in range(3))
    what = "a fusion in a Python file, an example (seeds:ag_matmul_p2p), or a .hw file with IR text"
    program.add_argument("program", metavar="FILE.py:FUSION", help=what)
    program.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="replace a constant of the file, such as D=4")
    program.add_argument("--sizes", metavar="M=1024,K=512", default="", help="sizes for the compiler's choices, checks and predictions")
    program.add_argument("--overlap", choices=OVERLAPS, default="auto", help="how chunk loops are chosen (default auto)")
    program.add_argument("--transport", choices=TRANSPORTS, default="auto", help="transport of bytes between ranks (default auto)")
    program.add_argument("--streams", type=int, default=4, help="most CUDA streams of a chunk loop (default 4)")
    target.add_argument("--target", choices=NAMES, default="cpu", help="target (default cpu)")
    as_json.add_argument("--json", action="store_true", help="print JSON for scripts; bench needs --list, and cache needs list or size")

    demo = add("demo", _demo, "Compile an example, run it on all ranks, compare with NumPy and show the generated loop.")
    demo.add_argument("--program", default="ag_matmul_p2p", help="a program of examples/seeds.py (default ag_matmul_p2p)")
    demo.add_argument("--ranks", type=int, default=8, help="number of ranks (default 8)")
    demo.add_argument("--target", choices=NAMES, help="default: cuda if there is a GPU for each rank, else cpu")

    add("compile", _compile, "Compile a program and print the folder of its sources and module.", program, target, as_json)
    add("check", _check, "Prove a program free of races and deadlocks, and check its results, at --sizes or small sizes.", program, as_json)
    add("explain", _explain, "Explain the choice for each communication, with times of the alternatives.", program, target, as_json)

    inspect = add("inspect", _inspect, "Print a stage of a program: an IR after a pass, or the generated C++.", program)
    inspect.add_argument(
        "--after",
        metavar="PASS",
        help="the IR after this pass, or the loops of kernels; 'input' is the IR before all passes, 'all' the changes of each pass",
    )
    inspect.add_argument("--only", metavar="NAME", help="one file of the C++, or with --after one function, kernel or program")
    inspect.add_argument("--memory", action="store_true", help="offsets and live ranges of temporaries, peak and lower bound")

    timeline_help = "Predict the timeline of each rank, and write it as a page, as JSON for Perfetto or as SVG."
    timeline = add("timeline", _timeline, timeline_help, program, target)
    timeline.add_argument("--measure", action="store_true", help="also measure a call of all ranks here, on random arrays of --sizes")
    timeline.add_argument("--ranks", metavar="8 | dp=2,tp=4", default="", help="predict for another number of ranks")
    network = "network between hosts of 8 GPUs: bytes per second of a GPU, and seconds of latency; needed for more than 8 ranks"
    timeline.add_argument("--network", metavar="BANDWIDTH,LATENCY", help=network)
    timeline.add_argument("--output", "-o", type=Path, metavar="FILE", help="a .html, .json or .svg file (default NAME.html)")

    export_help = "Write a CMake project: the program as a library, which needs no Python. With --wheel, make a Python wheel of it."
    export = add("export", _export, export_help, program, target)
    export.add_argument("folder", type=Path)
    wheel_help = "also build a wheel of this version (default 0.1.0) for --target in FOLDER/dist; the wheel does not need Hostweave"
    export.add_argument("--wheel", metavar="VERSION", nargs="?", const="0.1.0", help=wheel_help)

    benchmarks = add("bench", _bench, "Run the benchmarks that this machine can run, and compare with other libraries.", as_json)
    benchmarks.add_argument("names", nargs="*", help="benchmarks by name; default: all that this machine can run, except 'figures'")
    benchmarks.add_argument("--list", action="store_true", help="list the benchmarks and their purpose")

    doctor = add("doctor", _doctor, "Report the compiler, CUDA, NCCL, cuBLAS, GPUs and cache, and how to install missing parts.", as_json)
    doctor.add_argument("--target", choices=NAMES, help="also exit with status 1 if this machine cannot compile for this target")

    add("calibrate", _calibrate, "Measure the GPUs of this machine, in about a minute, for the cost model that chooses overlaps.")

    cache_help = "The folder of compiled programs; HOSTWEAVE_CACHE moves it, HOSTWEAVE_CACHE_LIMIT (10 GB) bounds it."
    cached = add("cache", _cache, cache_help, as_json)
    cached.add_argument("action", nargs="?", choices=("path", "list", "size", "clear"), default="list")

    completion = add("completion", lambda options: print(script(options.shell, parser), end=""), "Print a script that completes commands.")
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _load(options: argparse.Namespace) -> Any:
    constants = {}
    for setting in options.set:
        name, equals, value = setting.partition("=")
        if not equals:
            raise HostweaveError(f"--set {setting}: there is no '='; write NAME=VALUE")
        try:
            constants[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            raise HostweaveError(f"--set {setting}: {value} is not a Python literal; quote a string twice, as in NAME='\"text\"'") from None
    given = {name: getattr(options, name) for name in ("streams", "overlap", "transport")}
    return load_program(options.program, constants), Options(sizes=_sizes(options.sizes), **given)


def _demo(options: argparse.Namespace) -> int:
    from hostweave.cli.demo import demo

    return demo(options.program, options.ranks, options.target)


def _compile(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    compiled = hw.compile(program, target=options.target, options=settings)
    compiled.build()
    folder = compiled.folder
    found = {"name": compiled.name, "target": options.target, "folder": str(folder), "module": str(folder / MODULE_FILE)}
    print(json.dumps(found) if options.json else folder)


def _check(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    compiled = hw.compile(program, options=replace(settings, check=False))
    unchecked = compiled.check(**settings.sizes)
    if options.json:
        print(json.dumps({"name": compiled.name, "mesh": str(compiled.mesh), "sizes": settings.sizes, "unchecked": unchecked}))
        return
    print(f"{compiled.name} on {compiled.mesh}: no race, no deadlock, no unmatched communication on any rank")
    skipped = any(text.startswith("the results") for text in unchecked)
    equal = "some or all results are not compared; the others equal" if skipped else "its results equal"
    print(f"{equal} those of the fusion" if isinstance(program, Fusion) else "its results are not checked: host IR has no fusion")
    for text in unchecked:
        print(f"not checked: {text}")


def _explain(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    compiled = hw.compile(program, target=options.target, options=settings)
    if not options.json:
        print(compiled.explain(), end="")
        return
    choices = [
        {
            "function": choice.function,
            "value": choice.value,
            "measured": choice.is_measured,
            "alternatives": [{"name": a.name, "algorithm": a.algorithm, "chunks": a.chunks, "us": a.micros} for a in choice.alternatives],
        }
        for choice in compiled.choices
    ]
    print(json.dumps({"name": compiled.name, "mesh": str(compiled.mesh), "sizes": settings.sizes, "choices": choices}))


def _inspect(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    if settings.overlap == "search":
        settings = hw.compile(program, options=replace(settings, check=False)).compiled.options  # has the choices of the search
    seen: list[tuple[str, Fusion | HostProgram]] = []
    host = lower(program, settings, lambda name, stage: seen.append((name, stage)))
    texts = [(name, str(stage)) for name, stage in seen]
    if options.memory:
        if options.after is not None or options.only is not None:
            raise HostweaveError("--memory: prints the final program; omit --after and --only")
        print(memory_report(host, _sizes(options.sizes)), end="")
    elif options.after is None:
        sources = render(host, settings.figures)
        if options.only:
            sources = {options.only: _one_of(sources, options.only, "file")}
        for number, (path, text) in enumerate(sources.items()):
            if not options.only:
                show(f"{chr(10) if number else ''}// ==== {path}\n", "cpp")
            show(text, "ir" if path == HOST_IR else "cpp")
    elif options.after == "all":
        show("\n".join(_changes(_only(texts, options.only))), "ir")
    elif options.after in dict(texts):
        show(_only([(options.after, dict(texts)[options.after])], options.only)[0][1], "ir")
    elif options.after in STAGES:
        show(_only([(options.after, _loops(host, settings, options.after))], options.only)[0][1], "ir")
    else:
        known = ("input", *(apply.__name__ for apply in PASSES), *STAGES, "all")
        raise HostweaveError(f"--after {options.after}: there is no such stage; use one of {', '.join(known)}")
    if fusions := [stage for _, stage in seen if isinstance(stage, Fusion)]:
        for note in costly_choices(fusions[-1], host, _sizes(options.sizes)):
            print(f"note: {note}", file=sys.stderr)


def _loops(host: HostProgram, settings: Options, stage: str) -> str:
    """Text of the loops of all kernels after a pass of kernels."""
    passed = STAGES[: STAGES.index(stage) + 1]
    launches = ProgramSources(host, settings.figures).context.launches
    found = (dict(stages(kernel, buffers, settings.figures)) for kernel, buffers in launches)
    return "".join(dict.fromkeys(str(next(loops[name] for name in reversed(passed) if name in loops)) for loops in found))


def _timeline(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    made = hw.compile(program, target=options.target, options=replace(settings, check=False))
    figures = replace(made.figures, network=_network(options.network)) if options.network is not None else made.figures
    if options.measure:
        if options.ranks:
            raise HostweaveError("--measure: runs the program on its own mesh; omit --ranks, and set the mesh by --set")
        report = made.timeline(machine=figures, **random_inputs(program, settings.sizes))
    else:
        ranks = int(options.ranks) if options.ranks.isdecimal() else _sizes(options.ranks, "--ranks") or None
        report = made.predict(settings.sizes, ranks=ranks, machine=figures)
    print(report)
    report.save(output := options.output or Path(f"{made.name}.html"))
    print(output)


def random_inputs(program: Fusion | HostProgram, sizes: Mapping[str, int]) -> dict[str, Any]:
    from hostweave.runtime.search import random_array

    if missing := {name for value in program.arguments for size in value.type.shape for name in size.symbols} - sizes.keys():
        example = ",".join(f"{name}=1024" for name in sorted(missing))
        raise HostweaveError(f"--measure: no size is given for {', '.join(sorted(missing))}; give --sizes {example}")
    return {value.name: random_array(value.type, sizes) for value in program.arguments}


def _network(text: str) -> Network:
    try:
        bandwidth, latency = map(float, text.split(","))
    except ValueError:
        raise HostweaveError(f"--network {text}: write two numbers, as in --network 45e9,5e-6") from None
    return Network(bandwidth, latency, source="--network")


def _only(stages: Sequence[tuple[str, str]], name: str | None) -> Sequence[tuple[str, str]]:
    """Reduces each stage to the function, kernel or program `name`, unless `name` is None."""
    if name is None:
        return stages

    def named(whole: str) -> dict[str, str]:
        texts: dict[str, str] = {}
        for text in re.split(rf"^(?={_HEADER.pattern})", whole, flags=re.M):
            if found := _HEADER.match(text):
                texts[found[1]] = texts.get(found[1], "") + text  # A kernel has loops for each layout of its buffers.
        return texts

    texts = [(stage, named(whole)) for stage, whole in stages]
    _one_of({known: text for _, functions in texts for known, text in functions.items()}, name, "function")
    return [(stage, functions.get(name, "")) for stage, functions in texts]


def _one_of(texts: Mapping[str, str], name: str, what: str) -> str:
    if name not in texts:
        raise HostweaveError(f"--only {name}: there is no such {what}; use one of {', '.join(texts)}")
    return texts[name]


def _changes(stages: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yields the text of the first stage, then a unified diff from each stage to the next."""
    yield "# ---- {}\n{}".format(*stages[0])
    for (before, old), (after, new) in itertools.pairwise(stages):
        lines = "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), before, after))
        yield f"# ---- {after}\n{lines}" if lines else f"# ---- {after}: nothing changed\n"


def _sizes(text: str, option: str = "--sizes") -> dict[str, int]:
    sizes = {}
    for setting in filter(None, text.split(",")):
        name, equals, value = setting.partition("=")
        if not equals or not name.strip() or not value.strip().isdecimal():
            raise HostweaveError(f"{option} {text}: {setting!r} is not a size; write NAME=NUMBER, with commas between several")
        if len(value) > 2 * len(str(MAX_SIZE)) or int(value) > MAX_SIZE:
            raise HostweaveError(f"{option} {name.strip()}={value[:20]}: no memory holds so many elements; pass a smaller size")
        sizes[name.strip()] = int(value)
    return sizes


def _export(options: argparse.Namespace) -> None:
    program, settings = _load(options)
    folder: Path = options.folder
    if options.wheel is not None:
        hw.compile(program, options=settings).export(folder, wheel=options.target, version=options.wheel)
        return _build_wheel(folder)
    hw.compile(program, options=settings).export(folder)
    build = folder / "build"
    local = find_target(options.target).cmake_options()
    configure = ["cmake", "-S", folder, "-B", build, f"-DHOSTWEAVE_TARGET={options.target}", *local]
    commands = configure, ["cmake", "--build", build], [(build / executable_of(program.name)).absolute()]
    print(" && ".join(shlex.join(map(str, command)) for command in commands))


def _build_wheel(folder: Path) -> None:
    dist = folder / "dist"
    with progress("building the wheel"):
        project = str(folder.resolve())  # absolute, because pip looks up a name without slashes in the package index
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(dist), project]
        result = subprocess.run(pip, capture_output=True, text=True)
    if result.returncode:
        text = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise HostweaveError("\n".join([f"export --wheel: pip could not build {folder}:", *text[-20:]]))
    print(max(dist.glob("*.whl"), key=lambda path: path.stat().st_mtime_ns))


def _calibrate(_: argparse.Namespace) -> None:
    with progress("calibrating"):
        for line in calibrate():
            tell(line)


def _cache(options: argparse.Namespace) -> None:
    if options.json and options.action not in ("list", "size"):
        raise HostweaveError(f"cache {options.action} --json: only list and size print JSON; remove --json")
    if options.action == "path":
        print(cache.root())
        return
    if options.action == "clear":
        print(f"removed {cache.clear()} entries from {cache.root()}")
        return
    left = cache.remove_leftovers()
    found = cache.entries()
    if options.json:
        listed = [{"name": one.name, "kind": one.kind, "bytes": one.bytes, "used": one.used, "folder": str(one.path)} for one in found]
        print(json.dumps({"folder": str(cache.root()), "limit": cache.limit(), "entries": listed}))
        return
    if options.action == "list":
        kinds = {kind: [entry for entry in found if entry.kind == kind] for kind in cache.KINDS}
        for entry in sorted(kinds["program"], key=lambda entry: entry.used, reverse=True):
            print(entry)
        for kind in ("object", "library", "failed build", "unfinished build"):
            if group := kinds[kind]:
                print(f"{cache.size_text(sum(entry.bytes for entry in group))}  {len(group)} {plural(kind, len(group))}")
    if left:
        print(f"removed {left} {plural('folder', left)} of interrupted builds")
    print(cache.summary())


def plural(word: str, count: int) -> str:
    return word if count == 1 else word[:-1] + "ies" if word.endswith("y") else f"{word}s"


def _bench(options: argparse.Namespace) -> int:
    if not options.list:
        if options.json:
            raise HostweaveError("bench --json: only the list of benchmarks is JSON; add --list, or remove --json")
        return bench(options.names)
    if options.names:
        raise HostweaveError("bench --list: lists all benchmarks; omit the names, or remove --list")
    benchmarks = list(benchmark_list())
    if options.json:
        print(json.dumps(benchmarks))
    else:
        for one in benchmarks:
            print(f"{one['name']:18}{one['measures']}" + (f" ({one['lacks']})" if one["lacks"] else ""))
    return 0


def _doctor(options: argparse.Namespace) -> None:
    lines = list(report())
    if options.json:
        print(json.dumps([{"name": name, "found": text} for name, text in lines]))
    else:
        for name, text in lines:
            print(f"{name:<10} {text}")
    if options.target:
        find_target(options.target).toolchain()  # may raise BuildError
