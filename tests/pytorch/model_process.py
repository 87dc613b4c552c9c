"""Runs one rank of models of transformers, and of a module of DTensors. torchrun starts this script. The rank uses a GPU if there is one.

For each model, rank 0 prints a line if the results equal torch's results on one device.

torchrun --nproc-per-node 2 tests/pytorch/model_process.py llama gpt2 dtensors
"""

from __future__ import annotations

import copy
import sys
from functools import partial

import torch
from trained_dtensors import run_cases, train

import hostweave as hw
import hostweave.torch


def check(name: str, group: hw.Group, device: torch.device) -> None:
    """Compares logits, and the loss and gradients of a step. A rank has blocks of the arguments, and all parameters."""
    from small_models import MESHES, expect_gradients, training_model  # `small_models` imports transformers, which takes seconds.

    module, inputs, plan = training_model(name, group.count)
    module, inputs = module.to(device), {key: value.to(device) for key, value in inputs.items()}
    want, mesh = copy.deepcopy(module), MESHES[group.count]
    training = hostweave.torch.compile(module, mesh, plan, inputs, training=True)
    types = {one.name: one.type for one in training.program.host.arguments}
    local = {key: types[key].shard(value, group.rank, mesh) for key, value in inputs.items()}
    got, expected = training(**local), want(**inputs)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-4, atol=0)
    got.loss.backward()
    expected.loss.backward()
    expect_gradients(module, want, 2e-5)
    del inputs["labels"]
    forward = hostweave.torch.compile(module, mesh, {key: of for key, of in plan.items() if key != "labels"}, inputs)
    with torch.no_grad():
        logits = forward(**{key: local[key] for key in inputs}).logits
    torch.testing.assert_close(logits, expected.logits.detach(), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    run_cases({name: train if name == "dtensors" else partial(check, name) for name in sys.argv[1:]})
