"""f32 attention on one GPU by Hostweave's kernels, compared with float64: masks, layouts, head sizes, and gradients."""

from __future__ import annotations

import pytest
from compiled_fusions import compiled

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(not gpus(), reason="needs a GPU")]
MASKS = ({}, {"causal": "top_left"}, {"causal": "bottom_right"}, {"causal": "bottom_right", "window": 100})


def masks(size: int, group: int) -> Fusion:
    @hw.fusion(
        q=hw.f32["B", 8, "S", size],
        k=hw.f32["B", 8 // group, "T", size],
        v=hw.f32["T", "B", 8 // group, size],
        dy=hw.f32["S", "B", 8, size],
        n=hw.i32["B"],
    )
    def masks(q, k, v, dy, n):  # type: ignore[no-untyped-def]
        value, given = (hw.permute_dims(x, (1, 2, 0, 3)) for x in (v, dy))
        results = []
        for number, masks in enumerate((*MASKS, MASKS[2])):
            how = {"enable_gqa": True, **masks, **({"lengths": n} if number == len(MASKS) else {})}
            y, lse = hw.attention(q, k, value, **how)
            results += [y, lse, *hw.attention_backward(q, k, value, y, given, lse, **how)]
        return tuple(results)

    return masks


@pytest.mark.parametrize(("size", "group"), [(128, 8), (64, 1), (20, 2), (256, 4)])
def test_matches_torch(size: int, group: int) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    torch.manual_seed(0)
    program = compiled(masks(size, group), "cuda")
    for rows, columns in ((1, 1), (1, 513), (37, 91), (500, 1000)):
        shapes = (2, 8, rows, size), (2, 8 // group, columns, size), (columns, 2, 8 // group, size), (rows, 2, 8, size)
        arrays = [torch.randn(shape, device="cuda") for shape in shapes]
        lengths = torch.tensor([columns, max(1, columns // 3)], dtype=torch.int32, device="cuda")
        results = iter(program.run(*arrays, lengths))
        q, k, v, dy = (x.double() for x in arrays)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        for number, mask in enumerate((*MASKS, MASKS[2])):
            ends = lengths[:, None, None, None] if number == len(MASKS) else torch.tensor(columns, device="cuda")
            row, column = torch.arange(rows, device="cuda")[:, None], torch.arange(columns, device="cuda")
            distance = row - column + (ends - rows if mask.get("causal") == "bottom_right" else 0)
            seen = (column < ends) & ((distance >= 0) & (distance < mask.get("window", 1 << 30)) if mask else True)
            keys, values = (x.repeat_interleave(group, 1) for x in (k, v.permute(1, 2, 0, 3)))
            scores = (q @ keys.mT * size**-0.5).masked_fill(~seen, -torch.inf)
            lse = scores.logsumexp(-1).detach()
            weights = torch.exp(scores - lse.clamp(min=-1e30)[..., None])  # 0 if a row attends to no column
            y = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ values
            wanted = y, lse, *torch.autograd.grad(y, (q, k, v), dy.permute(1, 2, 0, 3))
            for index, want in enumerate(wanted):
                want = want.permute(1, 2, 0, 3) if index == 4 else want
                got, message = next(results), f"{rows} rows, {columns} columns, mask {number}, result {index}"
                bound = 2e-5 * float(torch.nan_to_num(want, neginf=0.0).abs().max().clamp(min=1))
                torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=bound, msg=lambda text, m=message: f"{m}: {text}")
