"""`hostweave export --wheel` makes a program a Python module. The module does not need Hostweave."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import scipy_openblas32
from cuda_here import needs_cuda
from quick_builds import QUICK, for_cuda

from hostweave.build.cuda import gpus
from hostweave.cli.main import main

PROGRAMS = '''
import hostweave as hw


@hw.block(donate={"state": 1}, x=hw.f32["M@x", "K"], w=hw.f32["K", "K@x"], state=hw.f32["M@x", "K"])
def step(x, w, state):
    state = state / 2 + hw.reshard(hw.matmul(hw.reshard(x, "M", "K"), w), "M@x", "K")
    return x + state, state


@hw.fusion(
    mesh=hw.Mesh(x=2),
    donate={f"state_{i}": i for i in (1, 2, 3)},
    x=hw.f32["M@x", "K"],
    **{f"{name}_{i}": type for i in (1, 2, 3) for name, type in {"w": hw.f32["K", "K@x"], "state": hw.f32["M@x", "K"]}.items()},
    z=hw.f16["S@zigzag(x)"],
)
def recurrent(x, z, **given):
    """Three layers, with states in place, and a zigzag dim that the last result does not have."""
    states = []
    for i in (1, 2, 3):
        x, state = step(x, given[f"w_{i}"], given[f"state_{i}"])
        states.append(state)
    return x, *states, hw.reshard(z + z, "S@zigzag(x)"), hw.sum(z, axis=0)
'''

# Runs all ranks as threads, or one rank. An import of Hostweave would fail.
USE = """
import sys
sys.modules["hostweave"] = None
import numpy as np
import recurrent as program
from pathlib import Path

rng = np.random.default_rng(0)
M, K, S = 5, 6, 8
x, z = rng.standard_normal((M, K), np.float32), rng.standard_normal(S, np.float32).astype(np.float16)
layers = [(rng.standard_normal((K, K), np.float32), rng.standard_normal((M, K), np.float32)) for _ in range(3)]
given = {"x": x, "z": z} | {f"w_{i}": w for i, (w, _) in enumerate(layers, 1)} | {f"state_{i}": s for i, (_, s) in enumerate(layers, 1)}
arrays = [given[each.name] for each in program.INPUTS]
cuda = program.TARGET == "cuda"
wanted, out = [], x
for w, state in layers:
    state = state / 2 + out @ w
    out = out + state
    wanted.append(state)
wanted = [out, *wanted, z + z, z.sum()]


def given_to(device, arrays):
    return [program.torch.from_numpy(array).to(f"cuda:{device}") if cuda else array for array in arrays]


def expect(found, wanted):
    for own, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(own.cpu() if cuda else own, np.float32), right, rtol=1e-2, atol=1e-2)


if sys.argv[1] == "threads":
    held = given_to(0, arrays)
    expect(program.run(*held), wanted)
    expect(program.run(*held), wanted)  # the first run did not change the caller's states
    for wrong in ([*arrays[:-1], arrays[-1].astype(np.float64)], [arrays[0][:, :5].copy(), *arrays[1:]], arrays[1:]):
        try:
            program.run(*given_to(0, wrong))
        except ValueError as error:
            print(error)
else:
    rank, file = int(sys.argv[2]), Path("id")
    if rank == 0:
        Path("new").write_bytes(program.new_id())
        Path("new").rename(file)
    while not file.exists():
        pass
    world = program.World(file.read_bytes(), rank)
    own = [np.ascontiguousarray(array[np.ix_(*each.block(array.shape, rank))]) for each, array in zip(program.INPUTS, arrays)]
    own = given_to(rank, own)
    call = program.Program(world)
    found = call(*own, global_shapes={each.name: array.shape for each, array in zip(program.INPUTS, arrays)})
    parts = [np.asarray(right)[np.ix_(*each.block(np.shape(right), rank))] if np.ndim(right) else right
             for each, right in zip(program.OUTPUTS, wanted)]
    expect(found, parts)
    assert found[1] is own[[each.name for each in program.INPUTS].index("state_1")]
    call.close(), world.close()
"""


def build(folder: Path, *options: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    for name, value in QUICK.items():
        patch.setenv(name, value)
    patch.setenv("SKBUILD_CMAKE_BUILD_TYPE", "Debug")
    patch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip builds with the installed packages.
    (folder / "programs.py").write_text(PROGRAMS)
    assert main(["export", "--wheel", "2.1", *options, f"{folder / 'programs.py'}:recurrent", str(folder / "project")]) == 0
    return Path(capsys.readouterr().out.strip())


def use(wheel: Path, folder: Path) -> list[str]:
    """Installs only the wheel. Returns the output of USE with ranks as threads, and of each of two processes."""
    site = folder / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], check=True)
    (site / "scipy_openblas32").symlink_to(Path(scipy_openblas32.__file__).parent)  # Without --no-deps, pip installs scipy_openblas32 here.
    (folder / "use.py").write_text(USE)
    processes = [
        subprocess.Popen(
            [sys.executable, "use.py", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(site)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for arguments in (("threads",), ("process", "0"), ("process", "1"))
    ]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(texts)
    return texts


def expect_refusals(printed: str) -> None:
    kind, sizes, number = printed.splitlines()
    assert kind == "recurrent: state_3: a float64 array of shape [5, 6] is given; pass a f32[M@x, K]"
    assert re.search(r"w_1: expected f32\[K, local\(K, x\)\], here f32\[5, [23]\], got f32\[6, 3\]", sizes)  # Either rank may raise first.
    assert "7 arrays; pass 8: x, " in number


@pytest.mark.extra("scikit_build_core")
def test_a_wheel_runs_without_hostweave(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = build(tmp_path, patch=monkeypatch, capsys=capsys)
    assert wheel.name.startswith("recurrent-2.1-py3-none-linux_")
    expect_refusals(use(wheel, tmp_path)[0])


@pytest.mark.gpu
@pytest.mark.slow  # The test builds the runtime, which takes 30 s.
@pytest.mark.skipif(len(gpus()) < 2, reason="needs 2 GPUs")
def test_a_wheel_runs_on_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_ARGS", " ".join(for_cuda()))
    expect_refusals(use(build(tmp_path, "--target", "cuda", patch=monkeypatch, capsys=capsys), tmp_path)[0])


@needs_cuda
@pytest.mark.extra("scikit_build_core")
def test_a_wheel_is_built_for_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_ARGS", " ".join(for_cuda()))
    wheel = build(tmp_path, "--target", "cuda", patch=monkeypatch, capsys=capsys)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "site")], check=True)
    needed = subprocess.run(["readelf", "-d", tmp_path / "site/recurrent/program.so"], capture_output=True, text=True, check=True).stdout
    assert "libcudart.so" in needed
    assert "libnccl.so" in needed
    assert "openblas" not in needed
