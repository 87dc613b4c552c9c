"""Whole scripts: examples, scripts of documentation pages, and the `*_process.py` files. One process runs all ranks, or each rank has a
process.

On the CPU, most processes are forks of a server that has imported torch, because an import takes seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from processes import as_rank, free_port

pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus

HERE = Path(__file__).parents[1]
DOCS = HERE.parents[1] / "docs"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["transformers", "hostweave.torch"])
pytestmark = pytest.mark.xdist_group("scripts")  # These tests run in one worker, so that only one fork server imports torch.
everywhere = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def printed(place: str, ranks: int, *command: str | Path) -> list[str]:
    if place == "cuda" and len(gpus()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if place == "cpu" else {})
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def run_script(words: list[str], variables: dict[str, str], output: Path) -> None:
    os.environ.update(variables)
    sys.argv[:] = words
    with output.open("w") as sys.stdout, errors_of(output).open("w", buffering=1) as sys.stderr:
        runpy.run_path(words[0], run_name="__main__")


def errors_of(output: Path) -> Path:
    return output.with_suffix(".errors")


def forked(folder: Path, variables: list[dict[str, str]], script: Path, *arguments: str) -> list[str]:
    """Lines that a script prints on the CPU. Each element of `variables` is added to the environment of one process."""
    files = [folder / f"output_{number}" for number in range(len(variables))]
    processes = [FORKS.Process(target=run_script, args=([str(script), *arguments], *own)) for own in zip(variables, files, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # The fork server starts with the first process, and inherits this variable.
        for process in processes:
            process.start()
    for process, file in zip(processes, files, strict=True):
        process.join(500)
        assert process.exitcode == 0, errors_of(file).read_text()[-3000:]
    return [line for file in files for line in file.read_text().splitlines()]


def by_torchrun(place: str, ranks: int, script: str | Path, *arguments: str | Path) -> list[str]:
    return printed(place, ranks, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", HERE / script, *arguments)


def in_processes(place: str, ranks: int, folder: Path, script: Path, *arguments: str) -> list[str]:
    """Lines that a script prints in one process per rank. CPU processes have torchrun's variables."""
    if place == "cuda":
        return by_torchrun(place, ranks, script, *arguments)
    port = free_port()
    return forked(folder, [as_rank(rank, ranks, port) | {"TORCHELASTIC_RUN_ID": "none"} for rank in range(ranks)], script, *arguments)


def alone(place: str, ranks: int, folder: Path, script: Path, *arguments: str) -> list[str]:
    """Lines that a script prints if one process runs all ranks."""
    return forked(folder, [{}], script, *arguments) if place == "cpu" else printed(place, ranks, script, *arguments)


@everywhere
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["dtensors"]),  # Models are slow. The example torch_train.py trains a GPT-2.
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, ["vit"]), (4, ["bert"]), (2, ["gpt2", "llama", "bert", "vit"]))),
    ],
)
def test_processes_compute_and_train_models(place: str, ranks: int, names: list[str], tmp_path: Path) -> None:
    lines = in_processes(place, ranks, tmp_path, HERE / "model_process.py", *names)
    assert [line for line in lines if line.endswith("is right")] == [f"{name} is right" for name in names]


@pytest.mark.parametrize("place", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_processes_are_stages_of_a_pipeline(place: str) -> None:
    cases = [("1f1b", "float32"), ("zero_bubble", "bfloat16")]
    lines = by_torchrun(place, 2, "pipeline_process.py", *(word for case in cases for word in case))
    assert [line for line in lines if line.endswith("is right")] == [f"{name} in {dtype} is right" for name, dtype in cases]


@everywhere
@pytest.mark.slow
def test_processes_train_as_torchtitan_prepares(place: str, tmp_path: Path) -> None:
    lines = by_torchrun(place, 4, "torchtitan_process.py", tmp_path)
    assert [line for line in lines if line in ("trained", "loaded")] == ["trained", "loaded"]


@everywhere
def test_the_llama_of_the_examples(place: str, tmp_path: Path) -> None:
    (tokens,) = alone(place, 2, tmp_path, EXAMPLES / "torch_llama.py", "--tp", "2", "--tokens", "64")
    assert re.fullmatch(r"(\d+ ){64}", tokens)


@everywhere
def test_the_gpt_of_the_examples_learns(place: str, tmp_path: Path) -> None:
    losses = [float(line.split()[-1]) for line in alone(place, 4, tmp_path, EXAMPLES / "torch_train.py", "--steps", "5")]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.2


@everywhere
def test_the_gpt_of_the_examples_learns_the_same_in_processes(place: str, tmp_path: Path) -> None:
    script, arguments = EXAMPLES / "torch_train.py", ("--dp", "2", "--tp", "1", "--steps", "3")
    assert in_processes(place, 2, tmp_path, script, *arguments) == alone(place, 2, tmp_path, script, *arguments)


@pytest.mark.parametrize("example", ["torch_llama.py", "torch_train.py"])
def test_examples_are_short(example: str) -> None:
    assert len((EXAMPLES / example).read_text().splitlines()) < 60


def test_the_script_of_the_tutorial(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (text,) = re.findall(r"```py\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)
    script.write_text(text)
    assert in_processes("cpu", 2, tmp_path, script) == ["rank 0: (8, 32)", "rank 1: (8, 32)"]


OTHERS = {
    "DTensor": """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh = init_device_mesh("cpu", (1,))
{block}
dist.destroy_process_group()
""",
    "shard_map": """
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_default_matmul_precision", "highest")
mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
{block}
""",
}


@pytest.mark.parametrize("name", ["DTensor", pytest.param("shard_map", marks=pytest.mark.extra("jax"))])
def test_the_same_program_in_another_system(name: str, tmp_path: Path) -> None:
    """Runs the code of a documentation page in a separate process, because torch.distributed and JAX have global state."""
    text = (DOCS / "coming-from.md").read_text()
    found = re.search(rf"## {name}\n\n```py\n(.*?)```", text, re.DOTALL)
    arrays = re.search(r"(import numpy.*?)@hw", text, re.DOTALL)
    assert found
    assert arrays
    test = "np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-4, atol=1e-4)"
    script = tmp_path / "script.py"
    script.write_text("\n".join([arrays[1], OTHERS[name].format(block=found[1]), test]))
    forked(tmp_path, [{}], script)
