"""Forward and backward pass of Llama layers on one GPU: hostweave.torch against torch, eager and torch.compile.

`python benchmarks/torch_training.py --layers 2 --tokens 4096` uses the shapes of a rank of Llama 70B at TP 8. Variants alternate
in one process. A time is the median of the work that a loss and its backward pass enqueue.
"""

import argparse
import statistics
import time

import torch
import transformers

import hostweave as hw
import hostweave.torch


def model(layers):
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=8192,
        intermediate_size=3584,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        use_cache=False,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()


def milliseconds(call, module, inputs):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for parameter in module.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # lets the host run ahead
    start.record()
    call(**inputs).loss.backward()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--ways", default="hostweave,eager,compile")
    options = parser.parse_args()
    torch.manual_seed(0)
    hw.init()
    module = model(options.layers)
    ids = torch.randint(0, 1024, (1, options.tokens), device="cuda")
    inputs = {"input_ids": ids, "labels": ids}
    makes = {
        "hostweave": lambda: hostweave.torch.compile(module, hw.Mesh(tp=1), {}, inputs, training=True),
        "eager": lambda: module,
        "compile": lambda: torch.compile(module),
    }
    ways = {}
    for name in options.ways.split(","):
        begin = time.perf_counter()
        ways[name] = makes[name]()
        milliseconds(ways[name], module, inputs)
        print(f"{name}: {time.perf_counter() - begin:.1f} s to compile and first call", flush=True)
        times = {one: [] for one in ways}
        for _ in range(options.turns):
            for one, call in ways.items():
                times[one].append(milliseconds(call, module, inputs))
        for one, measured in times.items():
            print(f"  {one}: {statistics.median(measured):.2f} ms, {min(measured):.2f} to {max(measured):.2f}", flush=True)


if __name__ == "__main__":
    main()
