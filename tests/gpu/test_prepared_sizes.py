"""After `prepare` of a bound program on GPUs, calls with varying sizes take no more memory of the GPUs or the host."""

from __future__ import annotations

import random

import pytest
from processes import resident_bytes

import hostweave as hw
from hostweave.build.cuda import gpus

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

GPUS = len(gpus())
CALLS, SIZES, E, F = 3_400, 2_000, 32, 64  # on one rank: calls per round, and numbers of rows; sizes of the MLP
LEAK = 4 << 20  # growth of memory that counts as a leak, in bytes per round

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("ranks", [ranks for ranks in (1, 2) if ranks <= max(GPUS, 1)])
def test_a_server_of_varying_sizes(ranks: int) -> None:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["T", "E"], up=hw.bf16["E", "F@x"], down=hw.bf16["F@x", "E"])
    def mlp(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.matmul(hw.maximum(hw.matmul(x, up), 0), down), "T", "E")

    program, threads = hw.compile(mlp, target="cuda"), hw.Threads(ranks)
    calls, sizes = (CALLS, SIZES) if ranks == 1 else (CALLS // 10, SIZES // 10)
    order = random.Random(0).choices(range(1, sizes + 1), k=calls)

    def on_rank(rank: int) -> None:
        torch.cuda.set_device(rank)
        group = hw.init(threads)
        made = torch.Generator().manual_seed(0)
        x, up, down = (torch.randint(-1, 2, shape, generator=made).bfloat16() for shape in ((sizes, E), (E, F), (F, E)))
        want = (torch.relu(x.float() @ up.float()).bfloat16().float() @ down.float()).bfloat16().cuda()
        model = program.bind(up=up.chunk(ranks, 1)[rank].contiguous().cuda(), down=down.chunk(ranks)[rank].cuda())
        x, out = x.cuda(), torch.empty_like(want)
        model.prepare(*({"T": rows} for rows in range(1, sizes + 1)))
        for rows in order[: calls // 10]:
            model(x[:rows], out=out[:rows])
        torch.cuda.synchronize()
        grown: list[tuple[int, int]] = []
        # A leak grows in every round. Other processes allocate only in some rounds.
        while len(grown) < 40 and not group.all_true(bool(grown) and all(min(growth) < LEAK for growth in zip(*grown, strict=True))):
            before = torch.cuda.mem_get_info()[0], resident_bytes()
            for i, rows in enumerate(order):
                model(x[:rows], out=out[:rows])
                if i % 100 == 0:
                    torch.testing.assert_close(out[:rows], want[:rows], rtol=0, atol=0)
                    out.zero_()
            torch.cuda.synchronize()
            grown.append((before[0] - torch.cuda.mem_get_info()[0], resident_bytes() - before[1]))
        for growth in zip(*grown, strict=True):
            assert min(growth) < LEAK, grown

    threads.run(on_rank)
