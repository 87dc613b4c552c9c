"""Builds of modules from sources: cache hits, failed builds, edited sources, and the requirements that `doctor` reports."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_here import needs_cuda
from forked import Forked

import hostweave as hw
from hostweave.base.errors import BuildError
from hostweave.base.paths import RUNTIME
from hostweave.build import cache, cuda, figures, make, toolchain
from hostweave.build.figures import file_of, save
from hostweave.build.nvrtc import loader, units_of_runtime
from hostweave.build.program import build, load, load_library
from hostweave.build.toolchain import Library
from hostweave.cli.main import report
from hostweave.targets.target import find_target
from hostweave.types.machine import H200


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
def product(x, w):
    return hw.matmul(x, w)


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])
def doubled(x):
    return x + x


X = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture
def cache_with_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that contains only Hostweave's runtime library for CUDA. Compiling this library takes 20 core-seconds."""
    target, folder = find_target("cuda"), tmp_path / "cache"
    (library,) = target.runtime_libraries(target.toolchain(), frozenset())
    library.make()
    runtime = library.path.parent
    folder.mkdir(mode=0o700)
    shutil.copytree(runtime, folder / runtime.name)
    monkeypatch.setenv("HOSTWEAVE_CACHE", str(folder))
    return folder


def test_runtime_libraries_and_program_are_built_in_parallel(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = find_target("cpu").toolchain()
    at_once = threading.Barrier(3, timeout=20)

    def fails(_: Path) -> None:
        at_once.wait()
        raise BuildError("no compiler")

    def make_program(*given: Any) -> None:
        at_once.wait()
        given[-1]()

    entries = [f"runtime-{number}" for number in range(2)]
    libraries = tuple(Library(empty_cache / entry / "library.so", partial(cache.get_or_make, entry, fails)) for entry in entries)
    monkeypatch.setattr("hostweave.build.program.make_program", make_program)
    with pytest.raises(BuildError) as raised:
        build("nothing", "", here, lambda _: libraries, lambda: {})
    assert str(raised.value).startswith("no compiler; sources and log are in ")
    assert str(raised.value).count("sources and log are in") == 1


def test_libraries_of_a_module_are_those_that_were_checked(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if another file replaces the library while a module is loaded, the module uses the checked library. Loading the replacement is
    an error."""
    here, open_library = find_target("cpu").toolchain(), ctypes.CDLL
    entry, used = f"runtime_of-{os.urandom(8).hex()}", "libused.so"

    def make_library(folder: Path, value: int = 1) -> None:
        (folder / "used.cpp").write_text(f'extern "C" int hw_used() {{ return {value}; }}\n')
        make.make_runtime(folder, [folder / "used.cpp"], here, used, soname=f"{entry}.so")

    def sources() -> dict[str, str]:
        asks = 'extern "C" int hw_used();\nextern "C" __attribute__((visibility("default"))) int hw_asked() { return hw_used(); }\n'
        return {**hw.compile(doubled).sources, "asks.cpp": asks}

    library = Library(empty_cache / entry / used, partial(cache.get_or_make, entry, make_library), f"{entry}.so")
    own = find_target("cpu").runtime_libraries(here, frozenset())
    folder = build("asking", "", here, lambda _: (*own, library), sources)
    # The module has no rpath, so the loader cannot find a library by itself.
    assert str(empty_cache).encode() not in (folder / toolchain.MODULE_FILE).read_bytes()
    planted, kept = tmp_path / "planted", tmp_path / "kept.so"
    planted.mkdir()
    make_library(planted, value=2)

    def load_late(file: str, *flags: int) -> ctypes.CDLL:
        library.path.rename(kept)
        (planted / used).rename(library.path)
        return open_library(file, *flags)

    monkeypatch.setattr(ctypes, "CDLL", load_late)
    module = load(folder / toolchain.MODULE_FILE, find_target("cpu").dlopen_flags)
    assert open_library(module.__file__).hw_asked() == 1
    monkeypatch.setattr(ctypes, "CDLL", open_library)
    with pytest.raises(BuildError, match=rf"{used} is not the file that was built; remove its folder to build it again"):
        load_library.__wrapped__(library.path)


def test_a_file_that_is_not_a_library(empty_cache: Path) -> None:
    def make_text(folder: Path) -> None:
        (folder / "libtext.so").write_text("no library")

    path = cache.get_or_make("runtime_text", make_text) / "libtext.so"
    with pytest.raises(BuildError, match=r"libtext.so cannot be loaded: libtext.so: .*; remove its folder to build it again"):
        load_library(path)


def test_kernels_of_the_runtime_are_compiled_in_parts() -> None:
    for file in (RUNTIME / "attention" / "kernels" / "attention_kernels.cu", RUNTIME / "src" / "few_rows.cu"):
        text = file.read_text()
        units = units_of_runtime(file.stem, text)
        assert len({unit.name for unit in units}) == len(units) >= 4
        for unit in units:
            own, closing = unit.text.split("\n", 1)[0], unit.text.rstrip().rpartition("\n")[2]
            assert text.splitlines()[unit.line - 1] == own
            assert closing == "}  // namespace hw"
            assert text.startswith(unit.before)
    assert [unit.name for unit in units_of_runtime("one", "void f();\n")] == ["one"]


def test_a_hit_renders_and_compiles_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hw.compile(doubled)
    first.build()
    monkeypatch.setattr("hostweave.compiled.render", lambda *_: pytest.fail("rendered"))
    monkeypatch.setattr("hostweave.build.make.run_together", lambda *_: pytest.fail("compiled"))
    second = hw.compile(doubled)
    assert second.folder == first.folder
    np.testing.assert_array_equal(second.run(x=X), X + X)


def test_a_cache_entry_has_sources_log_and_module(empty_cache: Path) -> None:
    program = hw.compile(doubled)
    assert (program.folder / "program.cpp").read_text() == program.source
    assert (program.folder / "program.hw").read_text() == program.host_ir
    assert "-c module.cpp" in (program.folder / "build.log").read_text()
    assert program.module.name == "doubled"


def test_the_key_depends_on_the_compiler_and_on_the_generated_code(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = hw.compile(doubled).folder
    # `streams` and `sizes` do not change the generated files.
    assert hw.compile(doubled, options=hw.Options(streams=2, sizes={"M": 8})).folder == folder
    compiler = tmp_path / "my-c++"
    compiler.write_text(f'#!/bin/sh\nexec "{toolchain.find_compiler()}" "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert hw.compile(doubled).folder != folder


def test_the_source_needs_no_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert hw.compile(doubled, target="cuda").source == hw.compile(doubled, target="cpu").source


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError) as error:
        hw.compile(doubled).build()
    assert str(error.value) == "no C++ compiler: none of c++, g++ and clang++ is on PATH; apt install g++"


def test_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-c++")
    with pytest.raises(BuildError) as error:
        hw.compile(doubled).build()
    assert str(error.value) == "no C++ compiler: CXX=no-such-c++ is not on PATH; unset CXX, or install that compiler"


def test_without_the_parts_of_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "INSTALLED", (tmp_path / "libhostweave_cpu.so",))
    with pytest.raises(BuildError) as error:
        hw.compile(doubled).build()
    missing = tmp_path / "libhostweave_cpu.so"
    assert str(error.value) == f"{missing} is not there: the source tree is not built; pip install ."


def test_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "folders_to_search", lambda: [])
    with pytest.raises(BuildError) as error:
        hw.compile(doubled, target="cuda").build()
    assert str(error.value) == (
        "target cuda: cuda_runtime_api.h, crt/host_defines.h, nv/target, cublasLt.h, nccl.h, libcudart.so.13, libcublasLt.so.13, "
        "libnccl.so.2, libnvrtc.so.13 not found in the CUDA toolkit or the pip wheels; pip install nvidia-cuda-runtime "
        "nvidia-cuda-crt nvidia-cuda-cccl nvidia-cublas nvidia-nccl-cu13 nvidia-cuda-nvrtc"
    )


def lines_of_doctor() -> list[str]:
    return [f"{name:<10} {text}" for name, text in report()]


def test_doctor_names_missing_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "folders_to_search", lambda: [])
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    lines = lines_of_doctor()
    assert "compiler   missing: no C++ compiler: none of c++, g++ and clang++ is on PATH; apt install g++" in lines
    assert "nccl       nccl.h missing: pip install nvidia-nccl-cu13" in lines
    assert "cublas     libcublasLt.so.13 missing: pip install nvidia-cublas" in lines
    assert any(line.startswith("cuda       target cuda generates, but cannot compile: ") for line in lines)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("NVIDIA H100 80GB HBM3", "the package's figures of NVIDIA H100 80GB HBM3; hostweave calibrate measures this machine"),
        ("NVIDIA B200", "the cost model has no figures of NVIDIA B200, and uses the figures of NVIDIA H200: run hostweave calibrate"),
    ],
)
def test_doctor_names_the_figures_of_the_cost_model(name: str, says: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (cuda.Gpu(name, "sm_90"),) * 2
    monkeypatch.setattr(cuda, "gpus", lambda: gpus)
    monkeypatch.setattr(cuda, "pair_without_access", lambda: None)
    assert f"figures    {says}" in lines_of_doctor()
    save(H200, gpus)
    assert f"figures    measured on this machine, {file_of(gpus)}" in lines_of_doctor()
    file_of(gpus).write_text("{}")
    figures.read.cache_clear()
    assert any(line.startswith(f"figures    {file_of(gpus)}: contains no valid figures of a machine") for line in lines_of_doctor())


def test_doctor_finds_the_compiler_and_the_cpu_target(empty_cache: Path) -> None:
    lines = lines_of_doctor()
    assert any(line.startswith("compiler ") and line.endswith(str(toolchain.find_compiler())) for line in lines)
    assert any(line.startswith("cpu        target cpu is ready, ") for line in lines)
    assert lines[-1] == f"cache      {empty_cache}: 0 entries, 0.0 MB of at most 10000 MB"
    empty_cache.mkdir(mode=0o777)
    empty_cache.chmod(0o777)
    assert lines_of_doctor()[-1].startswith(f"cache      cannot be used: {empty_cache} can be written by other users (mode 777)")


def test_edited_sources_are_compiled(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_EDIT", str(tmp_path / "edit"))
    np.testing.assert_array_equal(hw.compile(doubled).run(x=X), X + X)
    kernels = tmp_path / "edit" / "doubled" / "kernels.cu"
    text = kernels.read_text()
    assert " + " in text
    kernels.write_text(text.replace(" + ", " - "))
    np.testing.assert_array_equal(hw.compile(doubled).run(x=X), X - X)


def test_an_error_in_edited_sources(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_EDIT", str(tmp_path / "edit"))
    hw.compile(doubled).build()
    program = tmp_path / "edit" / "doubled" / "program.cpp"
    program.write_text("#error made by hand\n" + program.read_text())
    with pytest.raises(BuildError) as error:
        hw.compile(doubled).build()
    (kept,) = (empty_cache / "failed").iterdir()
    assert str(error.value) == f"the compiler failed: program.cpp:1:2: error: #error made by hand; sources and log are in {kept}"
    assert "#error made by hand" in (kept / "build.log").read_text()
    assert (kept / "program.cpp").read_text() == program.read_text()


def test_edited_sources_of_another_program(empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_EDIT", str(tmp_path / "edit"))
    hw.compile(doubled).build()
    folder = tmp_path / "edit" / "doubled"
    (folder / "program.hw").write_text("host @doubled() {}")
    with pytest.raises(BuildError) as error:
        hw.compile(doubled).build()
    assert str(error.value) == (f"the sources in {folder} were generated from another program; remove that folder, or unset HOSTWEAVE_EDIT")


def test_racing_processes_build_one_entry(empty_cache: Path, tmp_path: Path) -> None:
    script = tmp_path / "race.py"
    script.write_text(
        "import numpy as np\nimport hostweave as hw\n"
        "@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32['M@x', 'K'])\n"
        "def doubled(x):\n    return x + x\n"
        "x = np.ones((4, 2), np.float32)\n"
        "assert (hw.compile(doubled).run(x=x) == 2).all()\n"
    )
    processes = [Forked([sys.executable, str(script)]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    entries = [entry.path.relative_to(empty_cache).as_posix().rsplit("-", 1)[0] for entry in cache.entries()]
    assert entries == ["doubled", "objects/kernels.cu", "objects/module.cpp"]


@pytest.mark.parametrize(("target", "folder"), [("cpu", "empty_cache"), pytest.param("cuda", "cache_with_runtime", marks=needs_cuda)])
def test_only_changed_parts_are_compiled_again(target: Any, folder: str, request: pytest.FixtureRequest) -> None:
    """After a change of a constant, only the file of kernels is compiled again. After a change of a name, the host program
    is also compiled again."""
    request.getfixturevalue(folder)

    def compiled(function: Any) -> set[str]:
        program = hw.compile(hw.fusion(x=hw.f32["M"])(function), target)
        program.build()
        log = (program.folder / "build.log").read_text()
        return {name for name in ("module.cpp", "kernels.cu", "kernels_jit.cpp") if f"-c {name} " in log}

    def twice(x: hw.Tensor) -> hw.Tensor:
        return hw.exp(x * 2.0)

    def thrice(x: hw.Tensor) -> hw.Tensor:
        return hw.exp(x * 3.0)

    def named(x: hw.Tensor) -> hw.Tensor:
        return hw.exp((x * 3.0).named("threefold")).named("grown")

    for function in (thrice, named):
        function.__name__ = "twice"
    kernels = "kernels.cu" if target == "cpu" else "kernels_jit.cpp"
    assert compiled(twice) == {"module.cpp", kernels}
    assert compiled(thrice) == {kernels}
    assert {"module.cpp", kernels} == compiled(named)


@needs_cuda
@pytest.mark.usefixtures("cache_with_runtime")
def test_only_changed_kernels_are_compiled_again() -> None:
    """Each generated kernel is compiled separately. So a kernel that moves within the file is not compiled again. User kernels are compiled
    together."""

    def compiled(sums_of: float, softmax_of: float, user_factor: int, more: bool = False) -> set[str]:
        source = "__global__ void scaled(const float* x, float* y, int64_t n) {\n"
        source += f"  for (int64_t i : hw::over_grid(n)) y[i] = x[i] * {user_factor};\n}}"

        @hw.fusion(x=hw.f32["M"], z=hw.f32["M", 64])
        def several(x, z):
            scaled = hw.kernel(source, "scaled", "M", [x, hw.f32["M"], "M"], per=256)
            results = hw.sum(sums_of * z, 0), scaled, hw.softmax(z * softmax_of)
            return (*results, hw.max(z, 1)) if more else results

        program = hw.compile(several, "cuda")
        program.build()
        return set(re.findall(r"^nvrtc .* (\w+)$", (program.folder / "build.log").read_text(), re.M))

    sums, users, softmax = "multiply_sum_z", "user_kernels", "fused_softmax_z"
    assert compiled(2.0, 2.0, 2) == {sums, users, softmax}
    assert compiled(3.0, 2.0, 2) == {sums}
    assert compiled(3.0, 3.0, 2) == {softmax}
    assert compiled(3.0, 3.0, 3) == {users}
    assert compiled(2.0, 3.0, 2) == set()
    assert compiled(2.0, 3.0, 2, more=True) == {"max_z_2_kernel"}


def test_sources_of_a_runtime_are_compiled_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is at most one translation unit per core. The units have about equal sizes."""
    sources = [tmp_path / f"{size}.cpp" for size in (1, 2, 3, 4, 5)]
    for source in sources:
        source.write_text("\n" * int(source.stem))
    monkeypatch.setattr(make, "CORES", 2)
    assert make.merge_sources(sources, tmp_path) == ["unit_0.cpp", "unit_1.cpp"]
    for unit, sizes in (("unit_0.cpp", (5, 3, 1)), ("unit_1.cpp", (4, 2))):
        assert (tmp_path / unit).read_text() == "".join(f'#include "{tmp_path / f"{size}.cpp"}"\n' for size in sizes)
    monkeypatch.setattr(make, "CORES", 8)
    assert len(make.merge_sources(sources, tmp_path)) == 5


def test_a_broken_module(empty_cache: Path) -> None:
    program = hw.compile(doubled)
    module = program.folder / "hostweave_program.so"
    module.write_bytes(b"not a library")
    with pytest.raises(BuildError) as error:
        program.build()
    assert str(error.value) == f"{module} is not the file that was built; remove its folder to build it again"
    np.testing.assert_array_equal(hw.compile(doubled).run(x=X), X + X)


@pytest.mark.parametrize("cut", ["hostweave_program.so", "module.cpp.o"])
def test_a_truncated_file_is_built_again(cut: str, empty_cache: Path) -> None:
    folder = hw.compile(doubled).folder
    (path,) = empty_cache.rglob(cut)
    whole = path.stat().st_size
    os.truncate(path, 100)
    if folder not in path.parents:
        shutil.rmtree(folder)  # Without this folder, the module is linked again.
    assert hw.compile(doubled).folder == folder
    assert path.stat().st_size == whole
    np.testing.assert_array_equal(hw.compile(doubled).run(x=X), X + X)


def test_a_name_of_300_characters(empty_cache: Path) -> None:
    def named(x: hw.Tensor) -> hw.Tensor:
        return (x + x).named("y" * 300)

    named.__name__ = "n" * 300
    np.testing.assert_array_equal(hw.compile(hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"])(named)).run(x=X), X + X)


def test_a_build_evicts_the_least_recently_used_entries(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = hw.compile(doubled).folder
    os.utime(old / "SHA256SUMS", (0, 0))
    monkeypatch.setenv("HOSTWEAVE_CACHE_LIMIT", "1 kB")
    os.utime(empty_cache / "evicted", (0, 0))  # Otherwise, no build would evict for 10 minutes.
    new = hw.compile(product).folder
    assert new.exists()
    assert not old.exists()


def test_a_folder_for_edited_sources_that_cannot_be_written(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_EDIT", "/proc/self/edit")
    with pytest.raises(BuildError, match=r"^HOSTWEAVE_EDIT=/proc/self/edit: .*: No such file or directory; set it to a folder"):
        hw.compile(doubled).build()


@needs_cuda
def test_cuda(cache_with_runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fusion in (product, doubled):  # a program without a kernel, and a program with a kernel
        program = hw.compile(fusion, target="cuda")
        program.build()
        assert program.module.mesh == "mesh(x=2)"
    programs = [entry.path for entry in cache.entries() if entry.path.parent == cache_with_runtime]
    assert [path.name.rsplit("-", 1)[0] for path in programs] == ["doubled", "product", "runtime_cuda"]

    monkeypatch.setenv("HOSTWEAVE_EDIT", str(tmp_path / "edit"))
    _ = hw.compile(doubled, target="cuda").folder
    kernels = tmp_path / "edit" / "doubled" / "kernels.cu"
    kernels.write_text("int x = ;\n" + kernels.read_text())
    with pytest.raises(BuildError) as error:
        hw.compile(doubled, target="cuda").build()
    (kept,) = (cache_with_runtime / "failed").iterdir()
    assert str(error.value) == f"nvrtc failed: kernels.cu:1: error: expected an expression; sources and log are in {kept}"
    assert "expected an expression" in (kept / "build.log").read_text()


def test_a_folder_of_any_name_with_cubins(tmp_path: Path) -> None:
    """The path of a cubin may contain any characters. A kernel has a constant bank in its cubin, and becomes a C++ object. A function that
    kernels call has no constant bank, and becomes no object. So two cubins may contain the same function."""
    folder = tmp_path / 'a"b\\c\nd'
    folder.mkdir()
    code = b"cubin\0.text.add_x\0.text.helper\0.nv.constant0.add_x\0"
    (folder / "k.cubin").write_bytes(code)
    text = loader({"k": folder / "k.cubin"})
    assert "hw::JitKernel add_x{" in text
    assert "helper" not in text
    header = "namespace hw { struct JitKernel { const char* code, *name; }; }"
    (tmp_path / "loader.cpp").write_text(text.replace('#include "hostweave/jit.h"', header))
    subprocess.run(["c++", "-c", "loader.cpp"], cwd=tmp_path, check=True)
    assert code in (tmp_path / "loader.o").read_bytes()


def test_a_compiler_that_fails_without_output(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="the compiler failed: it printed nothing"):
        make.run_together({"a.o": ["false"]}, tmp_path)
