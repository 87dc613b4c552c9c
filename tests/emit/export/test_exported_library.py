"""Exports as libraries. A C++ server adds two exports by add_subdirectory, and a C program uses the installed exports."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cuda_here import needs_cuda
from quick_builds import OPENBLAS, QUICK, for_cuda, run

from hostweave.base.paths import EXAMPLES
from hostweave.cli.main import main

PROGRAMS = EXAMPLES / "server" / "programs.py"
CONSUMER = Path(__file__).with_name("consumer")

# A parent project with another C++ standard. The project fails if the server leaves variables whose names are not listed here.
PARENT = """
cmake_minimum_required(VERSION 3.24)
project(parent LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 17)
get_cmake_property(before VARIABLES)
get_directory_property(targets_before BUILDSYSTEM_TARGETS)
add_subdirectory("{server}" server)
get_cmake_property(after VARIABLES)
list(REMOVE_ITEM after ${{before}} before targets_before)
list(FILTER after EXCLUDE REGEX "^(HOSTWEAVE_|hostweave_|PROGRAMS$|SERVER_|server_)|_(SOURCE|BINARY)_DIR$|_IS_TOP_LEVEL$")
list(FILTER after EXCLUDE REGEX "^(CMAKE_HAVE_LIBC_PTHREAD|FIND_PACKAGE_MESSAGE_DETAILS_Threads|CMAKE_INSTALL_.*|_GNUInstallDirs_.*)$")
if(after OR NOT CMAKE_CXX_STANDARD EQUAL 17)
  message(FATAL_ERROR "the programs leave ${{after}} behind")
endif()
"""


def export(folder: Path) -> None:
    for name in ("hidden", "project"):
        assert main(["export", f"{PROGRAMS}:{name}", str(folder / name)]) == 0


def succeeds(folder: Path, *command: str) -> str:
    result = run(folder, *command)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def each_rank(folder: Path, *command: str) -> list[str]:
    """Output of two processes that exchange the NCCL id through a file."""
    (folder / "id").unlink(missing_ok=True)
    started = [
        subprocess.Popen((*command, str(r), "2", "id"), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for r in (0, 1)
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    return printed


def check_server(folder: Path, server: str) -> None:
    rng = np.random.default_rng(0)
    up, down, requests = (rng.standard_normal(shape, np.float32) for shape in ((64, 256), (256, 64), (3, 8, 64)))
    for name, array in (("up.f32", up), ("down.f32", down), ("requests", requests)):
        array.tofile(folder / name)
    printed, _ = each_rank(folder, server, ".", "requests", "answers")
    assert printed.startswith(
        "refused as expected: run: not prepared for these sizes; call prepare with them on every rank first\n3 requests in "
    )
    answers = np.fromfile(folder / "answers", np.float32).reshape(requests.shape)
    np.testing.assert_allclose(answers, np.maximum(requests @ up, 0) @ down, rtol=1e-4, atol=1e-3)


@pytest.mark.more
def test_two_programs_are_libraries_of_one_server(tmp_path: Path) -> None:
    export(tmp_path)
    (tmp_path / "CMakeLists.txt").write_text(PARENT.format(server=PROGRAMS.parent))
    prefix = f"-DCMAKE_INSTALL_PREFIX={tmp_path / 'prefix'}"
    succeeds(tmp_path, "cmake", "-B", "build", f"-DPROGRAMS={tmp_path}", "-DHOSTWEAVE_INSTALL=ON", prefix, OPENBLAS)
    succeeds(tmp_path, "cmake", "--build", "build")
    assert len([*(tmp_path / "build").rglob("libhostweave_runtime.a")]) == 1
    check_server(tmp_path, "build/server/server")

    succeeds(tmp_path, "cmake", "--install", "build")
    shutil.rmtree(tmp_path / "project")  # Installed files do not need the exports.
    shutil.rmtree(tmp_path / "hidden" / "programs")
    installed = ("cmake", "-S", str(CONSUMER), "-B", "consumer", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}")
    missing = run(tmp_path, *installed, "-DCOMPONENTS=hidden;attend")
    assert "no program attend is installed in" in missing.stderr
    assert "there are: hidden," in " ".join(missing.stderr.split())
    succeeds(tmp_path, *installed, "-DCOMPONENTS=hidden;project")
    succeeds(tmp_path, "cmake", "--build", "consumer")
    assert each_rank(tmp_path, "consumer/consumer") == ["72.000\n"] * 2


def test_programs_of_one_build_are_of_one_version(tmp_path: Path) -> None:
    export(tmp_path)
    (tmp_path / "project" / "runtime" / "STAMP").write_text("another\n")
    result = run(tmp_path, "cmake", "-S", str(PROGRAMS.parent), "-B", "build", f"-DPROGRAMS={tmp_path}", OPENBLAS)
    assert result.returncode != 0
    assert "export them with the same version" in " ".join(result.stderr.split())


@needs_cuda
@pytest.mark.extra("mpirun")
def test_the_server_compiles_and_links_for_cuda(tmp_path: Path) -> None:
    export(tmp_path)
    succeeds(tmp_path, "cmake", "-S", str(PROGRAMS.parent), "-B", "build", f"-DPROGRAMS={tmp_path}", "-DSERVER_WITH_MPI=ON", *for_cuda())
    succeeds(tmp_path, "cmake", "--build", "build")
    needed = subprocess.run(["ldd", tmp_path / "build" / "server"], env=QUICK, capture_output=True, text=True, check=True).stdout
    assert [needed.count(f"\t{name}.so") for name in ("libcudart", "libnccl")] == [1, 1]
