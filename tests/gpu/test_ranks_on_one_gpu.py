"""Two ranks on one GPU, with transport `peer`, because NCCL refuses two ranks on one GPU. Processes can make calls and graphs. Threads are
refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from compiled_fusions import fusion_of, integer_arrays, sizes_of

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.options import Options
from hostweave.runtime.group import Group
from hostweave.types.tensor import TensorType, block_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not gpus(), reason="needs a GPU, and there is none"),
]
RANKS = 2
NAMES = ("ag_matmul_put", "ag_matmul_pull", "matmul_rs_put", "mlp_put")


def compare(fusion: Fusion, group: Group) -> None:
    import torch

    torch.cuda.set_device(0)
    program = hw.compile(fusion, target="cuda", options=Options(transport="peer"))

    def of_rank(type: TensorType, array: object) -> torch.Tensor:
        block = array[block_of(type, fusion.mesh, group.rank, array.shape)]
        return torch.from_numpy(block.astype("f4")).to("cuda:0", torch.bfloat16)

    arrays = integer_arrays(fusion, sizes_of(fusion, 8), seed=0)
    given = {value.name: of_rank(value.type, arrays[value.name]) for value in fusion.inputs}
    (want,) = map(of_rank, fusion.output_types, run_reference(fusion, arrays))
    for _ in range(3):
        result = program(**given, group=group)
        torch.cuda.synchronize()
        assert torch.equal(result, want), fusion.name
    captured = program.capture(**given, group=group)
    for _ in range(3):
        result = captured()
        torch.cuda.synchronize()
        assert torch.equal(result, want), f"{fusion.name}, captured"


def test_threads() -> None:
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    fusion, provider = fusion_of(NAMES[0], RANKS, 3, hw.bf16), hw.Threads(RANKS)
    with pytest.raises(ExecutionError, match="is a thread on the same GPU; run each rank in a separate process"):
        provider.run(lambda rank: compare(fusion, hw.init(provider, device=0, call_timeout=15)))


def test_processes() -> None:
    pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        told, _ = rank.communicate(timeout=60)
        assert rank.returncode == 0, told


if __name__ == "__main__":
    joined = hw.init(device=0, call_timeout=15)
    for each in NAMES:
        compare(fusion_of(each, RANKS, 3, hw.bf16), joined)
    joined.close()
