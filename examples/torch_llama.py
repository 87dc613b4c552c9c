"""A tensor-parallel Llama of transformers: `python examples/torch_llama.py FOLDER --tp 2` continues a prompt and prints the tokens.

Without FOLDER the model is small and has random weights. `--source` prints the generated program, in which all layers are one function.
"""

import argparse

import torch
import transformers

import hostweave as hw
import hostweave.torch

PLAN = {
    "embed_tokens.weight": "tp, -",  # the vocabulary
    "q_proj.weight": "tp, -",  # heads
    "k_proj.weight": "tp, -",
    "v_proj.weight": "tp, -",
    "o_proj.weight": "-, tp",
    "gate_proj.weight": "tp, -",  # columns of the MLP
    "up_proj.weight": "tp, -",
    "down_proj.weight": "-, tp",
}


def small() -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="folder of the model; without it, a small model with random weights")
    parser.add_argument("--tp", type=int, default=2, help="number of ranks")
    parser.add_argument("--tokens", type=int, default=8, help="number of tokens to print")
    parser.add_argument("--source", action="store_true", help="print the generated C++")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = transformers.AutoModelForCausalLM.from_pretrained(options.folder) if options.folder else small()
    module = module.to(device).eval()
    module.config.use_cache = False
    length = max(64, options.tokens + 1)  # prompt and continuation, padded to a fixed length; attention is causal
    ids = torch.zeros(1, length, dtype=torch.long, device=device)
    model = hostweave.torch.compile(module, hw.Mesh(tp=options.tp), PLAN if options.tp > 1 else {}, {"input_ids": ids})
    if options.source:
        print(model.program.source)
    ids[0, 0] = 1
    with torch.no_grad():
        for position in range(options.tokens):
            ids[0, position + 1] = model(input_ids=ids).logits[0, position].argmax()
            print(int(ids[0, position + 1]), end=" ", flush=True)
    print()


if __name__ == "__main__":
    main()
