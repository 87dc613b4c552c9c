"""User names that have a meaning in templates, runtime headers, or headers of C, CUDA, NCCL and cuBLAS.

In the tested programs, dims, inputs, axes, kernels, blocks and streams have such names.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from cuda_here import needs_cuda

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.base.paths import RUNTIME, RUNTIME_INCLUDES, TEMPLATES
from hostweave.build import cuda
from hostweave.build.nvrtc import Nvrtc, Unit
from hostweave.build.toolchain import find_compiler
from hostweave.emit import render
from hostweave.emit.kernels import C_FUNCTIONS
from hostweave.emit.names import CppNames, is_reserved
from hostweave.host_ir.ir import HostProgram
from hostweave.pipeline import lower
from hostweave.runtime.cpu import seeded

CPU_INCLUDES = (*RUNTIME_INCLUDES, RUNTIME / "cpu" / "include")
STANDARD = ("array", "barrier", "cstdint", "cstdio", "exception", "optional", "vector")  # headers that templates include
# These names cannot collide. `rank` is a parameter of constructors, in which user names are only members. The names after `rank` are words
# of the preprocessor.
HARMLESS = {"rank", "once", "pragma", "ifdef", "endif", "line"}
NO_CPP = ("CMakeLists.txt.j2", "pyproject.toml.j2", "timeline.html.j2", "timeline.svg.j2")
# Templates in which user names can occur only as members, or not at all.
ONLY_MEMBERS = ("main.cpp.j2", "c_api.h.j2", "c_api.cpp.j2", "join.h.j2", "join.cpp.j2")


def identifiers(text: str) -> set[str]:
    """Unqualified identifiers in C++, without the parts that a template substitutes."""
    text = re.sub(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", " ", text, flags=re.S)
    text = re.sub(r"//.*|\"(?:[^\"\\\n]|\\.)*\"|^\s*#\s*include.*", " ", text, flags=re.M)
    return set(re.findall(r"(?<![\w.:>])[A-Za-z_]\w*", text))


def of_templates() -> set[str]:
    files = [path for path in TEMPLATES.rglob("*.j2") if path.name not in (*NO_CPP, *ONLY_MEMBERS)]
    return {name for path in files for name in identifiers(path.read_text())} - HARMLESS


def of_headers() -> set[str]:
    return {name for folder in RUNTIME_INCLUDES for path in folder.rglob("*.h") for name in identifiers(path.read_text())}


@cache
def macros(*folders: Path) -> frozenset[str]:
    """Macros that are defined if a program includes all headers of the runtime, and those in STANDARD."""
    headers = [f"hostweave/{path.name}" for path in (RUNTIME / "include" / "hostweave").glob("*.h")]
    text = "".join(f"#include <{header}>\n" for header in (*headers, *STANDARD))
    command = [str(find_compiler()), "-std=gnu++20", "-dM", "-E", "-x", "c++", *(f"-I{folder}" for folder in folders), "-"]
    found = subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=60)
    return frozenset(re.findall(r"^#define (\w+)", found.stdout, re.M))


def folders_of(target: str) -> tuple[Path, ...]:
    return CPU_INCLUDES if target == "cpu" else (*RUNTIME_INCLUDES, *cuda.find_cuda().require().include_folders)


def test_no_name_of_a_template_is_given_to_anything_of_the_user() -> None:
    assert {name for name in of_templates() if CppNames().of(name) == name} == set()


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_no_macro_is_given_to_anything_of_the_user(target: str) -> None:
    defined = macros(*folders_of(target))
    assert {name for name in defined if CppNames().of(name) == name} == set()
    assert {name for name in defined if CppNames().of(name) in defined} == set()


@pytest.mark.parametrize(
    "name", ["Row", "kWidth", "kAxes", "kRanks2", "M_E", "M_PI", "INT_MAX", "INFINITY", "ncclSend", "NCCL_MAJOR", "CUDART_VERSION", "EIO"]
)
def test_a_name_that_is_reserved(name: str) -> None:
    assert is_reserved(name)


@pytest.mark.parametrize("name", ["M", "KV", "N_HEADS", "BATCH_SIZE", "EMB", "M_x", "rank", "row", "cuda_stream", "x"])
def test_a_name_that_is_not_reserved(name: str) -> None:
    assert CppNames().of(name) == name


# --- one program with all names ---------------------------------------------------------------------------------------


def everything(names: Iterable[str]) -> HostProgram:
    """Program with a dim, axis, input, kernel, block and stream of each name. Outputs, indices and buffers have a suffix."""
    kernels, blocks, inputs, outputs, body, own = [], [], [], [], [], list(names)
    for at, n in enumerate(own):
        m, k = own[at - 1], own[at - 2]
        kernels.append(f"kernel @{n}(%{n}: f32[{n}, {m}], %{m}: f32[{n}, {m}]) {{\n  %{k}: f32[{n}, {m}] = exp(%{n})")
        kernels.append(f"  %{k}_2: f32[{n}, {m}] = multiply(%{k}, %{m})\n  %{n}_2: f32[{n}, {m}] = add(%{k}_2, %{k})\n}}")
        blocks.append(f"function @{n}(%{n}: f32[{n}, {m}], %{m}: f32[{n}, {m}]) -> (%{k}: f32[{n}, {m}]) {{")
        blocks.append(f"  launch @{n} %{n}, %{m} -> %{k}\n}}")
        inputs.append(f"%{n}: f32[{n}, {m}]")
        outputs.append(f"%{n}_out: f32[{n}, {m}]")
        body.append(f"  %{n}_mem = allocate f32[{n}, {m}]\n  call @{n} %{n}, %{n} -> %{n}_mem\n  fork {n}\n  for %{n}_i in 0..{n} {{")
        body.append(f"    stream {n}[%{n}_i] {{\n      %{n}_v = select %{n}_mem[0: %{n}_i]\n      %{n}_w = select %{n}_out[0: %{n}_i]")
        body.append(f"      collective_permute %{n}_v -> %{n}_w from [0] on {n}\n    }}\n  }}\n  join {n}")
    channels = ", ".join(f"{n}: {n} two_sided" for n in own)
    axes, streams = ", ".join(f"{n}=1" for n in own), ", ".join(f"{n}[2]" for n in own)
    head = f"host @{own[0]}({', '.join(inputs)}) -> ({', '.join(outputs)}) mesh({axes}) channels({channels}) streams({streams}) {{"
    return HostProgram.parse("\n".join([*kernels, *blocks, head, *body, "}"]))


def unusual() -> list[str]:
    """All collected names, and some macros. Omits names that begin with an underscore, and keywords of the IR."""
    found = of_templates() | of_headers() | C_FUNCTIONS
    defined = macros(*CPU_INCLUDES) if cuda.find_cuda().missing else macros(*CPU_INCLUDES) | macros(*folders_of("cuda"))
    found |= {*sorted(name for name in defined - found if not name.startswith("_"))[::16]}  # Another test uses all macros.
    return sorted(name for name in found if not name.startswith("_") and name not in GRAMMAR)


GRAMMAR = {"rank", "ceil", "part", "launch", "on"}  # keywords of the IR


A_PROGRAM = 8  # largest number of names per program, because the text of a program grows quadratically


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with programs that use all names. One program.cpp and one kernels.cu include the files of all programs."""
    folder, names = tmp_path_factory.mktemp("programs"), unusual()
    count = -(-len(names) // A_PROGRAM)
    for number in range(count):
        (folder / str(number)).mkdir()
        for path, text in render(everything(names[number::count])).items():
            (folder / str(number) / path).write_text(text)
    for file in ("program.cpp", "kernels.cu"):
        (folder / file).write_text("".join(f'#include "{number}/{file}"\n' for number in range(count)))
    return folder


@pytest.mark.xdist_group("unusual_names")  # The tests of a group run in one worker, which renders the programs once.
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_programs_of_unusual_names_compile(target: str, programs: Path) -> None:
    includes = [f"-I{path}" for path in folders_of(target)]
    for file in ("program.cpp", "kernels.cu") if target == "cpu" else ("program.cpp",):
        command = [str(find_compiler()), "-std=gnu++20", "-fsyntax-only", "-x", "c++", *includes, file]
        done = subprocess.run(command, cwd=programs, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[:2000]


@needs_cuda
def test_kernels_of_unusual_names_compile_for_cuda(tmp_path: Path) -> None:
    """Compiles only some of the names, because NVRTC takes a quarter of a second per kernel."""
    nvrtc, others = cuda.find_cuda().nvrtc.path, [name for name in unusual() if not re.search("[A-Z]", name[1:])]
    assert nvrtc
    chosen = (*sorted(of_templates() & set(unusual()))[:24], *sorted(C_FUNCTIONS)[:16], *others[::40])
    (tmp_path / "kernels.cu").write_text(text := render(everything(dict.fromkeys(chosen)))["kernels.cu"])
    Nvrtc(nvrtc, "compute_90", folders_of("cuda")).compile(Unit("kernels", 1, "", text), tmp_path)


# --- results ----------------------------------------------------------------------------------------------------------


def test_dims_with_names_of_variables_of_an_exchange() -> None:
    names = ("source", "target", "kSources", "kTargets", "peer", "route", "guard", "stream")
    fields = {f"x_{name}": hw.f32[f"{name}@x", "source"] for name in names}

    @hw.fusion(mesh=hw.Mesh(x=3), **fields)
    def moved(**inputs):  # type: ignore[no-untyped-def]
        return tuple(hw.collective_permute(x, 0, [None, 0, 1]) for x in inputs.values())

    program = hw.compile(moved)
    sizes = {name: 3 * (at + 1) for at, name in enumerate(names)}
    arrays = {f"x_{name}": np.arange(sizes[name] * 3, dtype=np.float32).reshape(-1, 3) + 1 for name in names}
    with seeded(0):
        results = program.run(**arrays)
    for array, got in zip(arrays.values(), results, strict=True):
        own = len(array) // 3
        np.testing.assert_array_equal(got, np.concatenate([np.zeros_like(array[:own]), array[: 2 * own]]))


def test_a_function_of_the_user_that_generated_code_uses() -> None:
    source = "__global__ void Sizes(const float* x, float* y, long n) { for (long i = 0; i < n; ++i) y[i] = x[i]; }"

    @hw.fusion(x=hw.f32["M"])
    def named(x):  # type: ignore[no-untyped-def]
        return hw.kernel(source, "Sizes", "M", (x, hw.f32["M"], "M"))

    with pytest.raises(ProgramError, match="generated code uses the name Sizes; rename the function"):
        render(lower(named, hw.Options()))


@pytest.mark.parametrize("name", ["a\n#error", "", "1", "x-y", "é"])
def test_an_invalid_name_of_a_mesh_axis(name: str) -> None:
    with pytest.raises(ProgramError, match="is not a name; use ASCII letters, digits and _, and no digit first"):
        hw.Mesh(**{name: 2})
