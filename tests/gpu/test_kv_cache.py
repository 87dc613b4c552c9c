"""Decode step on GPUs with a donated cache: correct values, in the caller's array, without copies."""

from __future__ import annotations

import numpy as np
import pytest
from compiled_fusions import compiled

import hostweave as hw
from hostweave.build.cuda import gpus

GPUS = len(gpus())
RANKS = max((ranks for ranks in (1, 2, 4, 8) if ranks <= GPUS), default=1)
B, H, S, D = 2, 8, 512, 64

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not GPUS, reason="needs a GPU")]


@pytest.mark.parametrize("sharded", ["heads", "positions"])
def test_a_cache_is_updated_in_place(sharded: str) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    cache_type = hw.bf16["B", "H@x", "S", "D"] if sharded == "heads" else hw.bf16["B", "H", "S@x", "D"]
    row_type = hw.bf16["B", "H@x", 1, "D"] if sharded == "heads" else hw.bf16["B", "H", 1, "D"]
    mesh = hw.Mesh(x=RANKS)

    @hw.fusion(mesh=mesh, donate=("cache",), cache=cache_type, row=row_type, position=hw.i64[()])
    def decode(cache, row, position):  # type: ignore[no-untyped-def]
        cache = hw.dynamic_update_slice(cache, row * 2, (0, 0, position, 0))
        return hw.sum(hw.astype(cache, hw.f32), axis=2), hw.dynamic_slice(cache, (0, 0, position, 0), ("B", "H", 1, "D")), cache

    program = compiled(decode, "cuda")
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(B, H, S, D, generator=generator).to(torch.bfloat16)
    row = torch.randn(B, H, 1, D, generator=generator).to(torch.bfloat16)
    want = {position: cache.clone() for position in (0, S // RANKS, S + 3)}
    for position, after in want.items():
        after[:, :, min(position, S - 1)] = row[:, :, 0] * 2

    on_gpu = cache.to("cuda:0")
    whole = program.run(on_gpu.clone(), row.to("cuda:0"), torch.tensor(0, device="cuda:0"))
    assert torch.equal(whole[2].cpu(), want[0])

    threads = hw.Threads(RANKS)

    def rank(number: int) -> None:
        torch.cuda.set_device(number)
        hw.init(threads)
        for position, after in want.items():
            own, given = (
                torch.from_numpy(type.shard(x.float().numpy(), number, mesh).copy()) for type, x in ((cache_type, cache), (row_type, row))
            )
            own, given = own.to("cuda", torch.bfloat16), given.to("cuda", torch.bfloat16)
            before = own.data_ptr()
            sums, read, new = program(own, given, torch.tensor(position, device="cuda"))
            torch.cuda.synchronize()
            assert new is own
            assert own.data_ptr() == before
            held = cache_type.shard(after.float().numpy(), number, mesh)
            np.testing.assert_array_equal(own.float().cpu().numpy(), held)
            expected = after.float().sum(2).numpy()
            lies = sums.cpu().numpy()
            part = expected if lies.shape == expected.shape else hw.f32["B", "H@x", "D"].shard(expected, number, mesh)
            np.testing.assert_allclose(lies, part, rtol=1e-4, atol=1e-3)
            at = min(position, S - 1)
            slice_ = after[:, :, at : at + 1].float().numpy()
            mine = slice_ if read.shape == slice_.shape else hw.f32["B", "H@x", 1, "D"].shard(slice_, number, mesh)
            np.testing.assert_array_equal(read.float().cpu().numpy(), mine)

    threads.run(rank)
