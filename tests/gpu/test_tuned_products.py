"""`Options(tune=True)` on GPUs: results equal a reference, and a second group uses the same algorithms."""

from __future__ import annotations

from functools import partial

import pytest

import hostweave as hw
from hostweave.build.cuda import gpus

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("ranks", [ranks for ranks in (1, 2) if ranks <= max(len(gpus()), 1)])
def test_tuned_products(ranks: int) -> None:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["T", "E"], up=hw.bf16["E", "F@x"], bias=hw.bf16["F@x"], down=hw.bf16["F@x", "E"])
    def mlp(x: hw.Tensor, up: hw.Tensor, bias: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.matmul(hw.maximum(hw.matmul(x, up) + bias, 0), down), "T", "E")

    program = hw.compile(mlp, target="cuda", options=hw.Options(tune=True))

    def on_rank(rank: int, threads: hw.Threads) -> None:
        torch.cuda.set_device(rank)
        group = hw.init(threads)
        made = torch.Generator().manual_seed(0)
        x, up, down = (torch.randint(-1, 2, shape, generator=made).bfloat16() for shape in ((512, 256), (256, 512), (512, 256)))
        bias = torch.randint(-1, 2, (512,), generator=made).bfloat16()
        mine = up.chunk(ranks, 1)[rank].contiguous().cuda(), bias.chunk(ranks)[rank].cuda(), down.chunk(ranks)[rank].cuda()
        for rows in (16, 33, 512, 16):
            hidden = torch.relu(x[:rows].float() @ up.float() + bias.float()).bfloat16().float()
            parts = [h @ d for h, d in zip(hidden.chunk(ranks, 1), down.float().chunk(ranks), strict=True)]
            result = program(x[:rows].cuda(), *mine)
            wanted = sum(part.bfloat16().float() for part in parts).bfloat16()
            torch.testing.assert_close(result.cpu(), wanted, rtol=0, atol=0)  # Sums of small integers are exact.
        group.close()

    def measured() -> dict[str, bytes]:
        threads = hw.Threads(ranks)
        threads.run(partial(on_rank, threads=threads))
        return dict(program.module.measured_algorithms())

    known = measured()
    assert known
    assert measured() == known
