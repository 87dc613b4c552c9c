"""Layering of the package: a module imports only from its own layer or from lower layers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from hostweave.base.paths import BENCHMARKS, EXAMPLES, PACKAGE, RUNTIME
from hostweave.communication.algorithms import ALGORITHMS
from hostweave.fusion_ir.ops import OPS
from hostweave.host_ir import ir, tree
from hostweave.kernel_ir.pipeline import PASSES as PASSES_OF_KERNELS
from hostweave.pipeline import PASSES
from hostweave.targets.target import NAMES
from hostweave.transports.transport import NAMES as TRANSPORTS

# Layers from top to bottom. `options` is below the passes, because passes read it.
FLOORS = (
    ("__main__",),
    ("cli", "torch"),
    ("api",),
    ("running",),
    ("compiled",),
    ("pipeline",),
    ("runtime",),
    ("targets",),
    ("build",),
    ("emit",),
    ("timeline",),
    ("passes",),
    ("tune",),
    ("communication",),
    ("kernel_ir",),
    ("check",),
    ("analysis",),
    ("host_ir",),
    ("fusion_ir",),
    ("options",),
    ("transports",),
    ("types",),
    ("base",),
)
# Modules that import inside functions. All other modules import at the top.
DELAYED_IMPORTS = {
    "start-up: importing NumPy, the builder or the rendezvous takes longer than a compilation": (
        *("api", "compiled", "cli/calibrate", "cli/main", "targets/cuda", "types/tensor", "types/zigzag"),
        "torch/dynamo",
    ),
    "packages that may be missing": ("torch/generation",),
    "classes whose parser imports them": ("fusion_ir/ir", "host_ir/ir"),
    "the names of the package, for a message": ("fusion_ir/frontend/remedies",),
}
pytestmark = pytest.mark.xdist_group("floors")  # One worker parses the package once.
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path) -> Iterator[str]:
    """Top-level modules and folders of the package that a file imports. Includes imports inside functions, imports for type checking, and
    `import_module`."""
    for node in nodes(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            modules = [name.value] if isinstance(name, ast.Constant) else []
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (module.split(".")[1] for module in modules if module.startswith("hostweave."))


def modules() -> list[Path]:
    """Files of the package, without the examples, benchmarks and runtime that a wheel contains."""
    files = [path for path in PACKAGE.rglob("*.py") if not {EXAMPLES, BENCHMARKS, RUNTIME} & {*path.parents}]
    assert len(files) > 100
    return files


def test_imports_point_down() -> None:
    wrong = []
    for path in modules():
        if path == PACKAGE / "__init__.py":
            continue
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        wrong += [
            f"{path.relative_to(PACKAGE)} imports {part}" for part in imports(path) if FLOOR_OF.get(part, len(FLOORS)) < FLOOR_OF[own]
        ]
    assert not wrong


def test_imports_inside_functions_have_a_reason() -> None:
    found = set()
    for path in modules():
        functions = [node for node in nodes(path) if isinstance(node, ast.FunctionDef)]
        if any(isinstance(node, ast.Import | ast.ImportFrom) for function in functions for node in ast.walk(function)):
            found.add(str(path.relative_to(PACKAGE).with_suffix("")))
    assert found == {name for names in DELAYED_IMPORTS.values() for name in names}


def test_modules_have_no_import_cycle() -> None:
    """Only modules of `fusion_ir` import each other in a cycle: public functions need tensors, and operators of tensors record ops. Imports
    for type checking also count."""
    paths = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path for path in modules()}
    del paths["hostweave"]
    needs: dict[str, set[str]] = {}
    for name, path in paths.items():
        blocks = [node.body if isinstance(node, ast.If) else [node] for node in ast.parse(path.read_text()).body]
        imported = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
        names = ((node.module or "", f"{node.module}.{alias.name}") for node in imported for alias in node.names)
        needs[name] = {whole if whole in paths else module for module, whole in names} & paths.keys()
    circles = {name for name in paths if name in _reached(needs, name)}
    assert {name.rpartition(".")[0].removeprefix("hostweave.") for name in circles} <= {"fusion_ir", "fusion_ir.ops", "fusion_ir.frontend"}


def _reached(needs: dict[str, set[str]], start: str) -> set[str]:
    """Modules that `start` imports, directly or indirectly."""
    found, following = set[str](), [start]
    while following:
        new = needs[following.pop()] - found
        found |= new
        following += new
    return found


def test_private_names_stay_in_their_modules() -> None:
    wrong, of_users = [], PACKAGE / "fusion_ir" / "frontend"  # Public names in this folder become attributes of `hw`.
    for path in modules():
        for node in nodes(path) if path.parent != of_users else ():
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hostweave"):
                wrong += [f"{path.relative_to(PACKAGE)}: {alias.name}" for alias in node.names if alias.name.startswith("_")]
    assert wrong == []


# Names of types that two modules define.
SHARED_TYPE_NAMES = {
    "Group": "the instruction has the name of its macro, after ncclGroupStart; `hw.Group` is a group of ranks",
    "Program": "runtime/jax_ffi.py is below api.py, and cannot import the class",
}


def test_types_have_different_names() -> None:
    """Two modules define a class or a type alias of one name only if SHARED_TYPE_NAMES has the name."""
    found: dict[str, set[str]] = {}
    for path in modules():
        (module,) = (node for node in nodes(path) if isinstance(node, ast.Module))
        classes = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
        assigned = [node for node in module.body if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call)]
        targets = (ast.unparse(target) for node in assigned for target in node.targets)
        for name in (*classes, *(name for name in targets if re.fullmatch(r"_?[A-Z][a-z]\w*", name))):
            found.setdefault(name, set()).add(str(path.relative_to(PACKAGE)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1}.keys() == SHARED_TYPE_NAMES.keys()


# Private names of torch and os that tests and benchmarks use.
OF_OTHERS = {"_exit", "_forward_hooks", "_get_backend", "_overloadname", "_parameters", "_schema", "_version"}


def test_tests_and_benchmarks_use_public_names() -> None:
    """Names that end in an underscore, such as `_repr_html_`, belong to protocols."""
    wrong = []
    for path in (*Path(__file__).parent.rglob("*.py"), *BENCHMARKS.rglob("*.py")):
        for node in nodes(path):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("torch"):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                names = [node.attr] if ast.unparse(node).partition(".")[0] not in ("self", "cls", "torch", "aten") else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("setattr"):
                names = [str(given.value).rpartition(".")[2] for given in node.args[:2] if isinstance(given, ast.Constant)]
            private = [name for name in names if name.startswith("_") and not name.endswith("_") and name not in OF_OTHERS]
            wrong += [f"{path.name}:{node.lineno}: {name}" for name in private]  # type: ignore[attr-defined]
    assert wrong == []


def test_tests_import_helpers_from_helper_modules() -> None:
    """A script that prints a table, and a test that also runs on GPUs, import tests."""
    wrong = set()
    for path in Path(__file__).parent.rglob("*.py"):
        imports = [node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom)]
        named = [str(node.module) if isinstance(node, ast.ImportFrom) else alias.name for node in imports for alias in node.names]
        wrong |= {path.name for name in named if name.rpartition(".")[2].startswith("test_")}
    assert wrong == {"sync_mutants.py", "test_hangs.py"}


def test_passes_are_those_of_the_list_and_call_no_others() -> None:
    """Each file of `passes/fusion` and `passes/host` has one pass, which no other pass imports."""
    names, folders = {apply.__name__ for apply in PASSES}, ("fusion", "host")
    files = [path for folder in folders for path in (PACKAGE / "passes" / folder).glob("*.py") if path.name != "__init__.py"]
    assert {path.stem for path in files} == names - {"lower_to_host"}
    for path in (PACKAGE / "passes").rglob("*.py"):
        imported = {alias.name for node in nodes(path) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert imported.isdisjoint(names), f"{path.stem} imports another pass"


def test_each_pass_has_a_test_file_that_names_it() -> None:
    """Each pass of programs and of kernels has a test file with its name. Each folder of the package has a folder of tests. Each other
    folder of tests is one of `others`, or a direct subfolder of such a folder."""
    tests = Path(__file__).parent
    folders = {apply.__name__: Path(*apply.__module__.split(".")[1:-1]) for apply in (*PASSES, *PASSES_OF_KERNELS)}
    assert [name for name, folder in folders.items() if not (tests / folder / f"test_{name}.py").is_file()] == []
    packages = {path.parent.relative_to(PACKAGE) for path in modules()}
    # The folders in `others` have tests of whole programs and of C++.
    others = {"conformance", "golden", "gpu", "programs", "pytorch", "runtime_cpp"}
    mine = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path()}
    folders_of_tests = {folder.parts[0] for folder in mine}
    assert {"pytorch" if name == "torch" else name for name in FLOOR_OF if (PACKAGE / name).is_dir()} <= folders_of_tests
    known = packages - {Path()} | {*map(Path, others)}
    assert [folder for folder in mine if folder not in known and folder.parent not in known] == []


def test_later_passes_do_not_compute_steps_of_reshards() -> None:
    """Only insert_reshards and decompose_reshards compute the steps of a reshard. Later passes read the steps from the op."""
    early = {"insert_reshards.py", "decompose_reshards.py"}
    for path in (PACKAGE / "passes").rglob("*.py"):
        modules = {"hostweave.fusion_ir.resharding": {"plan", "reshard_step"}, "hostweave.types.blocks": {"transfer"}}
        for node in nodes(path) if path.name not in early else ():
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                assert modules[node.module].isdisjoint(alias.name for alias in node.names), path.name


def test_names_of_targets_are_not_compared() -> None:
    """Only modules in the folder `targets` compare names of targets."""
    compared = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in modules()
        if path.parent.name != "targets"
        for node in nodes(path)
        if isinstance(node, ast.Compare) and "target" in ast.unparse(node.left)
        if any(isinstance(side, ast.Constant) and side.value in NAMES for side in ast.walk(node))
    ]
    assert not compared


def test_algorithms_are_not_compared() -> None:
    """Only modules in the folders `communication` and `transports` compare with names of transports, or with names of algorithms whose
    chunking is `by_shard`."""
    names = {algorithm.name for algorithm in ALGORITHMS if algorithm.chunking == "by_shard"} - {"reduce"} | {
        *TRANSPORTS
    }  # "reduce" is also the name of a reshard to one rank.
    compared = [
        f"{path.relative_to(PACKAGE)}:{ast.unparse(node)}"
        for path in modules()
        if path.parent.name not in ("communication", "transports")
        for node in nodes(path)
        if isinstance(node, ast.Compare)
        if names & {side.value for side in ast.walk(node) if isinstance(side, ast.Constant)}
    ]
    assert not compared


def test_names_of_transports_are_not_compared() -> None:
    """Only modules in the folders `transports`, `targets` and `build`, and the modules in `known`, name NCCL or the transport two_sided."""
    words, there = re.compile(r'nccl|"two_sided"', re.IGNORECASE), ("transports", "targets", "build")
    # NCCL is in reserved names, a public class for communicators, the report of `doctor`, and a requirement of graphs.
    known = {"emit/names.py", "runtime/providers.py", "cli/main.py", "api.py"}
    found = {str(path.relative_to(PACKAGE)) for path in modules() if words.search(path.read_text())}
    assert {name for name in found - known if not name.startswith(there)} == set()
    registers = {path.relative_to(PACKAGE).parts[0] for path in modules() if "registers_arena" in path.read_text()}
    assert registers == {"transports", "emit"}  # Only these two folders need to know which transports register memory.


# Files that may test for a concrete class of instructions, because no trait answers their question. Other code reads roles and traits.
OWN_SEMANTICS = {
    "analysis/alignment.py",
    "cli/memory_plan.py",
    "cli/notes.py",
    "emit/instructions.py",
    "emit/main.py",
    "emit/plans.py",
    "host_ir/text.py",
    "passes/host/fold_epilogues.py",
    "passes/host/fuse_kernels.py",
    "passes/host/group_communications.py",
    "passes/host/multiply_few_rows.py",
    "passes/host/privatize_per_stream.py",
    "passes/host/reduce_in_kernels.py",
    "passes/host/serialize_channels.py",
    "passes/host/software_pipeline.py",
    "passes/host/split_reductions.py",
    "passes/host/transpose_beside.py",
    "passes/lower/buffers.py",
}


def test_code_reads_traits_of_instructions() -> None:
    """Files outside OWN_SEMANTICS may test only for abstract classes, such as Communication."""
    concrete = {name for name, kind in vars(ir).items() if isinstance(kind, type) and issubclass(kind, tree.Instruction) and kind.syntax}
    asked: dict[str, list[str]] = {}
    for path in modules():
        for node in nodes(path):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            asks = node.args[1:] if called in ("isinstance", "issubclass") else node.args if called.endswith(".instructions") else ()
            asks = (node.cls,) if isinstance(node, ast.MatchClass) else asks
            named = {each.attr for ask in asks for each in ast.walk(ask) if isinstance(each, ast.Attribute) and each.attr in concrete}
            if named:
                asked.setdefault(str(path.relative_to(PACKAGE)), []).append(f"{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    assert asked.keys() <= OWN_SEMANTICS
    assert sum(map(len, asked.values())) <= 20, asked


def test_code_reads_properties_of_ops() -> None:
    """Code outside of `fusion_ir/ops` reads properties of an op's entry in the op table. Few comparisons with names of ops are left."""
    compared = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in modules()
        if path.parent != PACKAGE / "fusion_ir" / "ops"
        for node in nodes(path)
        if isinstance(node, ast.Compare) and any(ast.unparse(side).endswith("kind") for side in (node.left, *node.comparators))
        if OPS.keys() & {side.value for side in ast.walk(node) if isinstance(side, ast.Constant)}
    ]
    assert len(compared) <= 127, "\n".join(compared)


def test_instructions_are_identified_by_position() -> None:
    """Code that reads programs does not call `id`, because one instruction may occur twice in a program, and Python reuses ids."""
    folders = ("analysis", "check", "emit", "fusion_ir", "host_ir", "passes")
    sources = {path: path.read_text() for folder in folders for path in (PACKAGE / folder).rglob("*.py")}
    assert [str(path) for path, text in sources.items() if re.search(r"\bid\(", text)] == []


def test_modules_that_cpp_imports_are_there() -> None:
    named = {name for path in RUNTIME.rglob("*.cpp") for name in re.findall(r'import\("(hostweave[\w.]*)"\)', path.read_text())}
    assert "hostweave.base.errors" in named
    assert [name for name in sorted(named) if find_spec(name) is None] == []


def test_names_that_benchmarks_import_exist() -> None:
    """CI does not run benchmarks, because most of them need GPUs."""
    missing = []
    for path in BENCHMARKS.rglob("*.py"):
        text = path.read_text()
        # `sources` includes code that benchmarks run in other processes.
        sources = [text, *re.findall(r'code = f?"""(.*?)"""', text, re.DOTALL)]
        lines = {line for source in sources for line in re.findall(r"^ *from (hostweave[\w.]*) import (.+)$", source, re.MULTILINE)}
        for module, names in lines:
            found = find_spec(module) and import_module(module)
            missing += [f"{path.name}: {module}.{name}" for name in re.findall(r"\w+", names) if not hasattr(found, name)]
    assert missing == []


def test_compiling_imports_nothing_that_runs_programs() -> None:
    """Importing NumPy or the rendezvous takes longer than compiling. Only the check imports NumPy. Compiling never
    imports the rendezvous."""
    compile_one = """if True:
        import sys, hostweave as hw
        x = hw.f32["M@x", "K"]
        relu = hw.fusion(mesh=hw.Mesh(x=2), x=x)(lambda x: hw.relu(x))
        hw.compile(relu, options=hw.Options(check=False))
        print(*{"numpy", "asyncio", "hostweave.runtime"} & sys.modules.keys())
        hw.compile(relu)
        print(*{"asyncio", "hostweave.runtime"} & sys.modules.keys())
    """
    run = subprocess.run([sys.executable, "-c", compile_one], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "\n\n", "")
