"""Trains a module of DTensors on ranks of torchrun, on GPUs if possible. Compares the results with torch's on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hostweave as hw
import hostweave.torch


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: Any) -> Any:
        return (x + self.down(torch.relu(self.up(self.norm(x))))).square().mean()


class Broken(Loss):
    """`Loss` with a graph break after the first linear layer."""

    def forward(self, x: Any) -> Any:
        hidden = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return (x + self.down(torch.relu(hidden))).square().mean()


def joined() -> tuple[hw.Group, torch.device]:
    """Joins torch's process group, and a group of Hostweave that uses torch's store. Returns Hostweave's group and the device of this
    rank."""
    on_gpus = torch.cuda.is_available()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    group = hw.init(hw.TorchStore())
    if on_gpus:
        torch.cuda.set_device(group.local_rank)
    return group, torch.device("cuda", group.local_rank) if on_gpus else torch.device("cpu")


def run_cases(cases: Mapping[str, Callable[[hw.Group, torch.device], None]]) -> None:
    """Joins the groups, and runs the cases one after another. Rank 0 prints the name of each case that has passed."""
    group, device = joined()
    for name, case in cases.items():
        case(group, device)
        group.check()
        if group.rank == 0:
            print(f"{name} is right", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train_in_regions(want: nn.Module, mesh: Any, x: torch.Tensor) -> None:
    """Tests the backend of torch.compile on a module with a graph break. Ops on local parts of DTensors run eagerly."""
    alone, module = copy.deepcopy(want), Broken().to(x.device)
    module.load_state_dict(want.state_dict())
    parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled = torch.compile(module, backend="hostweave")
    for _ in range(2):
        alone(x).backward()
        compiled(x).backward()
        for parameter, other in zip(module.parameters(), alone.parameters(), strict=True):
            gradient: Any = parameter.grad
            full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(full, other.grad, rtol=1e-3, atol=1e-4)


def train(group: hw.Group, device: torch.device) -> None:
    torch.manual_seed(0)
    want = Loss().to(device)
    x = torch.randn(8, 16, device=device)
    mesh = init_device_mesh(device.type, (group.count,), mesh_dim_names=("tp",))
    adamw = partial(torch.optim.AdamW, lr=1e-2)
    of_step: list[tuple[Any, dict[str, Any]]] = [
        (adamw, {}),
        (partial(torch.optim.Adafactor, lr=0.1), {"clip_grad_norm": 0.1, "accumulate": 2}),
    ]
    for make, options in ((adamw, None), *of_step):
        alone, module = copy.deepcopy(want), copy.deepcopy(want)
        parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        # With foreach=True, the default on GPUs, one op of torch updates all parameters. This op refuses a mixture of DTensors and plain
        # tensors.
        optimizers = [make(one.parameters(), foreach=False) for one in (module, alone)]
        given: dict[str, Any] = {"training": True} if options is None else {"optimizer": optimizers[0], **options}
        compiled = hostweave.torch.compile(module, mesh, {}, (x,), **given)
        for _ in range(5):
            for _ in range(given.get("accumulate", 1)):
                loss = alone(x)
                loss.backward()
                got = compiled(x)
                torch.testing.assert_close(got.detach(), loss.detach(), rtol=1e-4, atol=1e-5)
            if "clip_grad_norm" in given:
                norm = nn.utils.clip_grad_norm_(alone.parameters(), given["clip_grad_norm"])
                torch.testing.assert_close(compiled.grad_norm, norm, rtol=1e-4, atol=1e-6)
            optimizers[1].step()
            optimizers[1].zero_grad()
            if options is None:
                got.backward()
                optimizers[0].step()
                optimizers[0].zero_grad()
        for parameter, other in zip(module.parameters(), alone.parameters(), strict=True):
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            torch.testing.assert_close(full.detach(), other.detach(), rtol=1e-3, atol=1e-4)
    train_in_regions(want, mesh, x)
