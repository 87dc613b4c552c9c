"""Programs that Python frees while a stream is captured."""

from __future__ import annotations

import gc

import pytest

import hostweave as hw

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def mlp() -> hw.Program:
    @hw.fusion(x=hw.bf16["T", "E"], up=hw.bf16["E", "F"], down=hw.bf16["F", "E"])
    def mlp(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
        return hw.matmul(hw.maximum(hw.matmul(x, up), 0), down)

    return hw.compile(mlp, target="cuda")


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_program_may_be_freed_during_a_capture(mode: str) -> None:
    """CUDA forbids the thread that captures to free memory, except in relaxed mode. Python may collect a program at any time."""
    threads = hw.Threads(1)

    def on_rank(rank: int) -> None:
        hw.init(threads)
        x, eye = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16), torch.eye(64, device="cuda", dtype=torch.bfloat16)
        program, forgotten = mlp(), mlp()
        for one in (program, forgotten):
            one(x, eye, eye)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            y = program(x, eye, eye)
            del one, forgotten
            gc.collect()
            z = program(y, eye, eye)
        x.fill_(3)
        graph.replay()
        torch.testing.assert_close(z, x, rtol=0, atol=0)

    threads.run(on_rank)
