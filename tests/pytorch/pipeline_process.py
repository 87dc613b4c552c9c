"""One rank of a pipeline. torchrun starts this script. The rank uses a GPU if there is one.

The rank trains its stage twice: with torch's optimizer, and with a program that includes the step of the optimizer. The rank compares
the stage with the same layers of a model that torch trains on one device.

torchrun --nproc-per-node 2 tests/pytorch/pipeline_process.py 1f1b float32 zero_bubble bfloat16
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from typing import Any

import torch
from small_models import expect_gradients
from torch import nn
from trained_dtensors import run_cases

import hostweave as hw
import hostweave.torch

WIDTH, BATCHES, STEPS = 32, 4, 4
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}  # relative to the loss, the gradient norm, or the largest gradient of a parameter


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(group: hw.Group, device: torch.device, schedule: str, dtype: torch.dtype, in_program: bool) -> None:
    """Trains the stage of this rank with Hostweave, and all stages with torch, both with AdamW. The last rank compares each loss. In f32,
    each rank compares its parameters at the end.

    In f32, compares the gradients of each step, and in bf16, only the gradients of the first step. If `in_program`, the program includes
    the optimizer's step and clips the gradients of all stages. Then each step compares the norm of the gradients, instead of the gradients.
    """
    torch.manual_seed(0)
    stages = nn.Sequential(*(Block() for _ in range(group.count))).to(device, dtype)
    want = copy.deepcopy(stages)
    x, target = torch.randn(2, 2 * BATCHES, WIDTH, dtype=dtype).to(device)
    loss, own = nn.functional.mse_loss, stages[group.rank]
    mine, theirs = (torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (stages if in_program else own, want))
    whole = {"optimizer": mine, "clip_grad_norm": 0.5} if in_program else {}
    step = hostweave.torch.compile(
        list(stages), hw.Mesh(pp=group.count), {}, (x, target), schedule=schedule, microbatches=BATCHES, loss=loss, **whole
    )
    is_last = group.rank == group.count - 1
    for number in range(STEPS):
        made = step(x if group.rank == 0 else None, target if is_last else None)
        wanted = loss(want(x), target)
        wanted.backward()
        if is_last:
            torch.testing.assert_close(made, wanted.detach(), rtol=TOLERANCES[dtype], atol=0)
        if in_program:
            norm = nn.utils.clip_grad_norm_(want.parameters(), 0.5)
            torch.testing.assert_close(step.grad_norm.float(), norm.float(), rtol=TOLERANCES[dtype], atol=0)
        # In bf16, only the gradients of the first step are compared, because a rounding error may reverse the update of an element.
        elif number == 0 or dtype == torch.float32:
            expect_gradients(own, want[group.rank], TOLERANCES[dtype])
        for optimizer in (theirs,) if in_program else (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    if in_program:  # A rank has only the state of its stage.
        assert {id(one) for one in mine.state} == {id(one) for one in own.parameters()}
    if dtype == torch.float32:
        for one, other in zip(own.parameters(), want[group.rank].parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def train_both_ways(schedule: str, dtype: torch.dtype, group: hw.Group, device: torch.device) -> None:
    for in_program in (False, True):
        train(group, device, schedule, dtype, in_program)
        group.check()


if __name__ == "__main__":
    pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    run_cases({f"{schedule} in {word}": partial(train_both_ways, schedule, getattr(torch, word)) for schedule, word in pairs})
