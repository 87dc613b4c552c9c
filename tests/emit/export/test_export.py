"""CMake builds exported projects. The projects run on the CPU target, and are compiled and linked for CUDA."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from cuda_here import needs_cuda
from fusions_from_files import all_fusions, more_fusions, pipelines
from quick_builds import CUDA, NVCC, OPENBLAS, for_cuda, run

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.main import main
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram

KERNELS = "programs/matmul_rs_flat/kernels.cu"
FUSIONS = {**all_fusions(ranks=4, chunks=3), **more_fusions(ranks=4), **pipelines(ranks=4)}


def build(fusion: Fusion, folder: Path, *settings: str) -> None:
    hw.compile(fusion).export(folder)
    for command in (("cmake", "-B", "build", *settings), ("cmake", "--build", "build")):
        result = run(folder, *command)
        assert result.returncode == 0, result.stdout + result.stderr


def in_zigzag() -> Fusion:
    @hw.fusion(mesh=hw.Mesh(cp=4), x=hw.f32[3, "S@zigzag(cp)"], y=hw.f32[3, "S"])
    def in_zigzag(x: hw.Tensor, y: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return x + y, hw.reshard(x * 2, 3, "S"), hw.reshard(x, 3, "S@cp")

    return in_zigzag


def test_projects_run_on_the_cpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The commands that `hostweave export` prints build and run the first project. A second project in the same folder does not build the
    runtime again."""
    folder = tmp_path / "a project"
    assert main(["export", f"{EXAMPLES / 'seeds.py'}:ag_matmul_p2p", "--set", "D=4", "--set", "S=3", str(folder)]) == 0
    result = run(tmp_path, "bash", "-c", capsys.readouterr().out)
    assert result.stdout.endswith("the results of all ranks are correct\n"), result.stdout + result.stderr

    runtime = [folder / "build" / "runtime" / path for path in ("libhostweave_runtime.a", "cpu/libhostweave_cpu_device.a")]
    built_at = [path.stat().st_mtime_ns for path in runtime]
    build(FUSIONS["matmul_rs_flat"], folder)  # This program has sends, recvs, matmuls and a kernel.
    # A second export to the folder has not rewritten the sources of the runtime.
    assert [path.stat().st_mtime_ns for path in runtime] == built_at
    for sizes in ("M=64", "K=32", "N=16"), ("K=30",), ("K=3", "N=5"):  # Shards are equal, or unequal, or empty on one rank.
        result = run(folder, "build/matmul_rs_flat", *sizes, "repetitions=2")
        assert (result.returncode, result.stderr) == (0, "")
        assert len(result.stdout.splitlines()) == 5
        assert result.stdout.endswith("the results of all ranks are correct\n")
    assert run(folder, "build/matmul_rs_flat", "Q=1").stderr == "Q=1: there is no such setting; --help lists them\n"
    for wrong in ("M=64x", "M=", "M", "M=-4", "M=99999999999999999999"):
        assert (
            run(folder, "build/matmul_rs_flat", wrong).stderr
            == f"{wrong}: write NAME=NUMBER, with a number of at least 1; --help lists the names\n"
        )
    usage = run(folder, "build/matmul_rs_flat", "--help")
    assert usage.stdout == "usage: build/matmul_rs_flat [NAME=NUMBER]...\n  M=64\n  K=64\n  N=64\n  repetitions=20\n  roundoffs=16\n"
    assert usage.returncode == 0
    indivisible = run(folder, "build/matmul_rs_flat", "M=66")  # The loop of the program needs equal chunks.
    assert indivisible.returncode == 1
    assert "M = 66: must be a multiple of 4" in indivisible.stderr

    kernels = folder / "programs" / "matmul_rs_flat" / "kernels.cu"
    kernels.write_text(kernels.read_text().replace("hw::bf16(sum[e])", "hw::bf16(sum[e] + 1)"))
    assert run(folder, "cmake", "--build", "build").returncode == 0
    result = run(folder, "build/matmul_rs_flat", "M=8", "repetitions=1")
    assert result.returncode == 1
    assert re.search(r"rank \d: y: element 0 of this rank's block is \S+, and \S+ in the reference: they differ by", result.stderr)


@pytest.mark.more
def test_a_project_with_zigzag_dims_runs_on_the_cpu(tmp_path: Path) -> None:
    build(in_zigzag(), tmp_path, OPENBLAS)
    for sizes in ("S=16", "S=40"):
        result = run(tmp_path, "build/in_zigzag", sizes, "repetitions=2")
        assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.more
def test_projects_with_blocks_and_attention_run_on_the_cpu(tmp_path: Path) -> None:
    build(recurrent, tmp_path, OPENBLAS)  # This program has one struct per call of a block.
    result = run(tmp_path, "build/recurrent", "M=15", "K=8", "repetitions=1")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("the results of all ranks are correct\n")

    build(attention, tmp_path)  # This program needs additional files of the runtime.
    result = run(tmp_path, "build/attention", "S=37", "T=70", "repetitions=1")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("the results of all ranks are correct\n")

    build(masked, tmp_path)
    assert run(tmp_path, "build/masked", "M=40", "repetitions=1").returncode == 0
    kernels = tmp_path / "programs" / "masked" / "kernels.cu"
    kernels.write_text(kernels.read_text().replace("= -x_e", "= x_e"))  # Wrong where the mask is false.
    assert run(tmp_path, "cmake", "--build", "build").returncode == 0
    result = run(tmp_path, "build/masked", "M=40", "repetitions=1")
    assert result.returncode == 1
    assert "in the reference: they differ by" in result.stderr


@hw.block(donate={"state": 1}, x=hw.f32["M@x", "K"], w=hw.f32["K", "K@x"], state=hw.f32["M@x", "K"])
def step(x, w, state):  # type: ignore[no-untyped-def]
    state = state / 2 + hw.reshard(hw.matmul(hw.reshard(x, "M", "K"), w), "M@x", "K")
    return x + state, state


weights_and_states = {"w": hw.f32["K", "K@x"], "state": hw.f32["M@x", "K"]}


@hw.fusion(
    mesh=hw.Mesh(x=2),
    donate={f"state_{i}": i for i in (1, 2, 3)},
    x=hw.f32["M@x", "K"],
    **{f"{name}_{i}": type for i in (1, 2, 3) for name, type in weights_and_states.items()},
)
def recurrent(x, **given):  # type: ignore[no-untyped-def]
    states = []
    for i in (1, 2, 3):
        x, state = step(x, given[f"w_{i}"], given[f"state_{i}"])
        states.append(state)
    return x, *states


@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x"], mask=hw.bool_["M@x"])
def masked(x, mask):  # type: ignore[no-untyped-def]
    return hw.reshard(hw.where(mask, x, -x), "M")


@hw.fusion(mesh=hw.Mesh(x=2), q=hw.f32["4@x", "S", 16], k=hw.f32["2@x", "T", 16])
def attention(q, k):  # type: ignore[no-untyped-def]
    return hw.attention(q, k, k, "bottom_right", enable_gqa=True)


def test_a_project_without_a_reference_reports_it(tmp_path: Path) -> None:
    source = 'extern "C" __global__ void twice(const float* x, float* y) {}'

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x"])
    def doubled(x):  # type: ignore[no-untyped-def]
        return hw.kernel(source, "twice", grid="M@x", args=[x, hw.f32["M@x"]])

    from_host_ir = HostProgram.parse(hw.compile(FUSIONS["matmul_rs_flat"]).host_ir)
    reasons = "it was compiled from host IR", "@twice, a kernel of the user, is written for the blocks of one rank"
    for program, why in zip((from_host_ir, doubled), reasons, strict=True):
        hw.compile(program, target="cuda").export(tmp_path)
        assert not (tmp_path / "reference" / "program.cpp").exists()
        assert f"there is no reference to compare with: {why}" in (tmp_path / "main.cpp").read_text()


@pytest.mark.slow
def test_a_project_with_stages_runs_on_the_cpu(tmp_path: Path) -> None:
    build(FUSIONS["two_stages_streamed"], tmp_path, OPENBLAS)
    result = run(tmp_path, "build/two_stages_streamed", "M=64", "K=32", "N=16", "repetitions=2")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("the results of all ranks are correct\n")


def test_ranks_of_a_stage_make_its_channel(tmp_path: Path) -> None:
    hw.compile(FUSIONS["two_stages_streamed"]).export(tmp_path)
    main = (tmp_path / "main.cpp").read_text()
    assert """\
  world.join("mesh(x=2 of ranks 2, 3)", "x", hw::Transport::two_sided, r >= 2 ? 0 : hw::World::kNone, r >= 2 ? r - 2 : 0, 2);
""" in (tmp_path / "programs" / "two_stages_streamed" / "join.cpp").read_text()
    assert main.count(", 2, r >= 2});") == 1  # The output is only on ranks 2 and 3.


def test_an_export_overwrites_only_exported_files(tmp_path: Path) -> None:
    with_kernels, without = hw.compile(FUSIONS["matmul_rs_flat"]), hw.compile(FUSIONS["ag_matmul_p2p"])
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "SHA256SUMS").write_text(f"{hashlib.sha256(b'mine').hexdigest()}  notes.txt\n")  # the user's own list
    with_kernels.export(tmp_path)
    assert (tmp_path / KERNELS).exists()
    without.export(tmp_path)
    assert not (tmp_path / KERNELS).exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    for path in ("main.cpp", "runtime/src/rank.cpp", KERNELS):
        there = tmp_path / path
        before = there.read_bytes() if there.exists() else None
        there.write_text("// mine\n")
        why = "was edited since it was exported" if before else "was not written by an export"
        with pytest.raises(ArgumentError, match=rf"export: {there} exists and {why}; move it, or choose another folder"):
            with_kernels.export(tmp_path)
        assert there.read_text() == "// mine\n"
        # The failed export has changed no file.
        assert "project(hostweave_program_ag_matmul_p2p " in (tmp_path / "CMakeLists.txt").read_text()
        if before:
            there.write_bytes(before)
        else:
            there.unlink()
    with_kernels.export(tmp_path)


def test_an_interrupted_export_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export is interrupted several times: first in an empty folder, then while it replaces an earlier export."""
    write, files, every = Path.write_bytes, 0, 20

    def interrupt(path: Path, content: bytes) -> int:
        nonlocal files
        files += 1
        if files % every == 0:
            raise KeyboardInterrupt
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", interrupt)
    for program in (hw.compile(FUSIONS["matmul_rs_flat"]), hw.compile(FUSIONS["ag_matmul_p2p"])):
        interruptions = 0
        while True:
            try:
                program.export(tmp_path)
                break
            except KeyboardInterrupt:
                interruptions += 1
        assert interruptions > 1
        every = 3  # The second export writes fewer files.
    assert "project(hostweave_program_ag_matmul_p2p " in (tmp_path / "CMakeLists.txt").read_text()
    (tmp_path / "main.cpp").write_text("// mine\n")
    with pytest.raises(ArgumentError, match="was edited since it was exported"):
        program.export(tmp_path)


@needs_cuda
def test_projects_compile_and_link_for_cuda(tmp_path: Path) -> None:
    """All projects are in one folder, so that the runtime is built once."""
    build(FUSIONS["matmul_rs_flat" if NVCC else "ag_matmul_p2p"], tmp_path, *for_cuda())  # Programs with kernels need nvcc.
    if all(part.path for part in CUDA.cudnn):
        build(attention, tmp_path, *for_cuda())


@pytest.mark.gpu
def test_a_project_runs_on_gpus(tmp_path: Path) -> None:
    build(all_fusions(ranks=len(gpus()))["matmul_rs_flat"], tmp_path, *for_cuda())
    result = run(tmp_path, "build/matmul_rs_flat", "M=64", "K=32", "N=16", "repetitions=2")
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("the results of all ranks are correct\n")


def test_default_cmake_settings(tmp_path: Path) -> None:
    hw.compile(FUSIONS["matmul_rs_flat"]).export(tmp_path)
    result = run(tmp_path, "cmake", "-B", "build", "-DHOSTWEAVE_TARGET=rocm")
    assert "HOSTWEAVE_TARGET is rocm: write cpu or cuda" in result.stderr
    result = run(tmp_path, "env", "-u", "CMAKE_BUILD_TYPE", "cmake", "-B", "own", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", OPENBLAS)
    assert result.returncode == 0, result.stderr
    commands = (tmp_path / "own" / "compile_commands.json").read_text()
    assert commands.count(" -O3 -DNDEBUG ") == commands.count('"command"')
