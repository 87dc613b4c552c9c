"""One rank of a transformer that is prepared as in torchtitan. torchrun starts this script. The rank uses a GPU if there is one.

Rank 0 prints "trained" if 20 steps equal torch's steps. Rank 0 prints "loaded" if training from a checkpoint of tp 4 gives the same results
at dp 2 x tp 2 as at tp 4.

torchrun --nproc-per-node 4 tests/pytorch/torchtitan_process.py FOLDER_OF_THE_CHECKPOINT
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from trained_dtensors import joined

import hostweave as hw
import hostweave.torch

DIM, HEADS, WORDS, STEPS = 16, 4, 32, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*dims, bias=False) for dims in ((DIM, 32), (32, DIM), (DIM, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.norm, self.output = nn.Embedding(WORDS, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, WORDS, bias=False)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(2)})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def prepared(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> Any:  # noqa: B008
    """Prepares the module as torchtitan does: sequence-parallel, and sharded by `fully_shard` if there is an axis dp."""
    whole: Any = module
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(module, mesh["tp"], plan)
    of_block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.w{name}": ColwiseParallel() for name in "qkv"},
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    for block in whole.layers.values():
        parallelize_module(block, mesh["tp"], of_block)
    if "dp" in mesh.mesh_dim_names:
        for block in whole.layers.values():
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(whole, mesh=mesh["dp"], mp_policy=policy)
    return module


def full(tensor: Any) -> torch.Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def expect_close(one: nn.Module, other: nn.Module, rtol: float, atol: float) -> None:
    for (name, got), want in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(full(got), full(want), rtol=rtol, atol=atol, msg=lambda why, at=name: f"{at}: {why}")


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def make(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, foreach=False)


def batches(count: int, device: torch.device, part: slice = slice(None)) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of tokens and labels. `part` selects rows."""
    torch.manual_seed(5)
    return [(torch.randint(0, WORDS, (4, 8))[part].to(device), torch.randint(0, WORDS, (4, 8))[part].to(device)) for _ in range(count)]


def rows_of(group: hw.Group) -> slice:
    """The rows of a batch that this rank gets on a mesh of dp 2 x tp 2."""
    return slice(0, 2) if group.rank < 2 else slice(2, 4)


def train(group: hw.Group, device: torch.device, policy: MixedPrecisionPolicy, tolerance: float) -> None:
    """Compares compiled training with torch's training of a module that was prepared in the same way. The loss of the rank's rows is
    computed outside of the module."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Transformer().to(device)
    ours, want = prepared(copy.deepcopy(whole), mesh, policy), prepared(copy.deepcopy(whole), mesh, policy)
    optimizers = make(ours), make(want)
    given = batches(STEPS, device, rows_of(group))
    model = hostweave.torch.compile(ours, mesh, example_inputs=given[0][:1], training=True)
    for tokens, labels in given:
        if policy.param_dtype:  # The roundoff of 16 bits accumulates, so each step starts from the same parameters.
            with torch.no_grad():
                for one, other in zip(want.parameters(), ours.parameters(), strict=True):
                    one.copy_(other)
        for call, optimizer in zip((model, want), optimizers, strict=True):
            loss = loss_of(call(tokens), labels)
            loss.backward()
            if call is model:
                found = loss, {name: full(one.grad) for name, one in ours.named_parameters()}
            else:
                torch.testing.assert_close(found[0], loss, rtol=tolerance, atol=tolerance)
                for name, one in want.named_parameters():
                    largest = float(full(one.grad).abs().max())
                    torch.testing.assert_close(found[1][name], full(one.grad), rtol=0, atol=tolerance * largest, msg=f"gradient of {name}")
            optimizer.step()
            optimizer.zero_grad()
    if not policy.param_dtype:
        expect_close(ours, want, tolerance, tolerance)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model(tokens), labels)


def load(group: hw.Group, device: torch.device, folder: str) -> None:
    """Saves a module and its optimizer at tp 4, and loads them at dp 2 x tp 2. Training continues on both meshes with equal results."""
    torch.manual_seed(1)
    whole, given, of_all = Transformer().to(device), batches(4, device, rows_of(group)), batches(4, device)
    meshes = [
        init_device_mesh(device.type, (4,), mesh_dim_names=("tp",)),
        init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp")),
    ]
    modules = [prepared(copy.deepcopy(whole if mesh.ndim == 1 else Transformer()), mesh) for mesh in meshes]
    optimizers, steps = [make(module) for module in modules], []
    for module, optimizer, mesh, batch in zip(modules, optimizers, meshes, (of_all[0], given[0]), strict=True):
        steps.append(hostweave.torch.compile(WithLoss(module), mesh, example_inputs=batch, optimizer=optimizer))
    for batch in of_all[:2]:
        steps[0](*batch)
    for save, module, optimizer in zip((checkpoint.save, checkpoint.load), modules, optimizers, strict=True):
        model_state, optimizer_state = get_state_dict(module, optimizer)
        states = {"model": model_state, "optimizer": optimizer_state}
        save(states, checkpoint_id=folder)
        if save is checkpoint.load:
            set_state_dict(module, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    expect_close(modules[1], modules[0], 0, 0)
    for all_rows, rows in zip(of_all[2:], given[2:], strict=True):
        losses = [step(*batch) for step, batch in zip(steps, (all_rows, rows), strict=True)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    expect_close(modules[1], modules[0], 1e-3, 1e-4)


def main(folder: str) -> None:
    group, device = joined()
    train(group, device, MixedPrecisionPolicy(), 1e-4)
    train(group, device, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 5e-2)
    if group.rank == 0:
        print("trained", flush=True)
    load(group, device, folder)
    group.check()
    if group.rank == 0:
        print("loaded", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
