"""Trains a GPT-2 with tensor and data parallelism: `torchrun --nproc-per-node 4 examples/torch_train.py --dp 2 --tp 2` prints the losses.

With torchrun, each process is one rank. `python examples/torch_train.py` runs all ranks in one process. The model is small, has random
initial weights, and learns to count. The forward and the backward pass are one program each; `--source` prints both.
"""

import argparse

import torch.distributed
import transformers

import hostweave as hw
import hostweave.torch

PLAN = {
    "input_ids": "dp, -",  # data parallel
    "labels": "dp, -",
    "mlp.c_fc.weight": "-, tp",  # columns of the MLP; the rest is inferred
    "mlp.c_fc.bias": "tp",
    "mlp.c_proj.weight": "tp, -",
    "lm_head": "dp, -, -",  # a rank has the logits of its rows only
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, default=2, help="number of replicas")
    parser.add_argument("--tp", type=int, default=2, help="number of ranks of a replica")
    parser.add_argument("--steps", type=int, default=20, help="number of training steps")
    parser.add_argument("--source", action="store_true", help="print the generated C++")
    options = parser.parse_args()

    torch.manual_seed(0)
    mesh = hw.Mesh(dp=options.dp, tp=options.tp)
    group = hw.init() if torch.distributed.is_torchelastic_launched() else None
    if group and torch.cuda.is_available():
        torch.cuda.set_device(group.local_rank)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    config.use_cache = False
    module = transformers.GPT2LMHeadModel(config).to(device).train()
    ids = torch.randint(0, 32, (8, 1), device=device) + torch.arange(32, device=device)
    model = hostweave.torch.compile(module, mesh, PLAN, {"input_ids": ids, "labels": ids}, training=True)
    if group:  # a call takes this rank's rows
        ids = ids[hw.i64["B@dp", "S"].block(ids.shape, group.rank, mesh)]
    if options.source:
        print(model.program.source, model.backward.source)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        if not group or group.rank == 0:
            print(f"step {step:2d}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
