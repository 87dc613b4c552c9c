"""Forward pass of ViT-L on one GPU, compared with eager PyTorch and torch.compile.

`python benchmarks/vit.py` runs the ViT of transformers on 32 images of 224 x 224. The ViT has 24 layers, 1,024 features, patches of 16 x 16
and random bf16 weights. The benchmark first prints the compile times of Hostweave and torch.compile, and times of Hostweave alone. Then
variants alternate. A measured time is the mean of 10 consecutive launches. `--layers` and `--batch` change the sizes. Every variant except
`eager` is a CUDA graph. While torch captures or compiles, transformers makes an attention mask. With a mask, PyTorch's attention is slower.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peers import report
from peers.torch_graphs import in_a_graph

import hostweave as hw
import hostweave.torch

LAUNCHES = 10
TOLERANCE = 0.05  # relative to the largest element; the variants round to bf16 after different ops


def vit(layers: int) -> Any:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "image_size": 224, "patch_size": 16}
    config = transformers.ViTConfig(**sizes, num_hidden_layers=layers, num_labels=1000)
    with torch.device("cuda"):
        return transformers.ViTForImageClassification(config).to(torch.bfloat16).eval()


def milliseconds(call: Callable[[], Any]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(LAUNCHES):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / LAUNCHES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--turns", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    hw.init(hw.Threads(1))
    module, images = vit(arguments.layers), torch.randn(arguments.batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    report.print_machine()
    calls: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        started = time.perf_counter()
        calls["hostweave"] = hostweave.torch.compile(module, hw.Mesh(tp=1), {}, {"pixel_values": images}).capture(pixel_values=images)
        print(f"hostweave: compiled in {time.perf_counter() - started:.1f} s", flush=True)
        print(report.line({"hostweave": [milliseconds(calls["hostweave"]) for _ in range(arguments.turns)]}, ["hostweave"]), flush=True)
        calls["eager"] = lambda: module(pixel_values=images)
        calls["eager, in a graph"] = in_a_graph(calls["eager"])
        started = time.perf_counter()
        theirs = torch.compile(module, dynamic=False)
        calls["torch.compile"] = in_a_graph(lambda: theirs(pixel_values=images))
        print(f"torch.compile: compiled in {time.perf_counter() - started:.1f} s", flush=True)
        mine, *others = (call().logits.float() for call in calls.values())
        for wanted in others:
            difference = float((mine - wanted).abs().max() / wanted.abs().max())
            assert difference < TOLERANCE, difference
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(arguments.turns):
            for name, call in calls.items():
                times[name].append(milliseconds(call))
    print(f"ViT, {arguments.layers} layers, {arguments.batch} images: {report.line(times, ['hostweave'])}", flush=True)


if __name__ == "__main__":
    main()
