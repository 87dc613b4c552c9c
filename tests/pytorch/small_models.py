"""Small models of the transformers library with random weights, their inputs, and their sharding plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import hostweave as hw

TOKENS, VOCABULARY = (2, 16), 128
Model = tuple[nn.Module, dict[str, torch.Tensor]]


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, TOKENS)


def llama() -> Model:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).eval(), {"input_ids": tokens()}


def gpt2() -> Model:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=32, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config).eval(), {"input_ids": tokens()}


def bert() -> Model:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    mask = torch.ones(TOKENS, dtype=torch.long)
    mask[1, 11:] = 0
    return transformers.BertForMaskedLM(config).eval(), {"input_ids": tokens(), "attention_mask": mask}


def vit() -> Model:
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.ViTForImageClassification(config).eval(), {"pixel_values": torch.randn(2, 3, 32, 32)}


MODELS: dict[str, Callable[[], Model]] = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit}

COLUMNS, ROWS, BIAS = "tp, -", "-, tp", "tp"  # nn.Linear stores weights as [out, in].
PLANS: dict[str, dict[str, Any]] = {
    "llama": {
        "*.embed_tokens.weight": "tp, -",
        "q_proj.weight": COLUMNS,
        "k_proj.weight": COLUMNS,
        "v_proj.weight": COLUMNS,
        "o_proj.weight": ROWS,
        "gate_proj.weight": COLUMNS,
        "up_proj.weight": COLUMNS,
        "down_proj.weight": ROWS,
        "lm_head.weight": COLUMNS,
    },
    "gpt2": {"mlp.c_fc.weight": "-, tp", "mlp.c_fc.bias": "tp", "mlp.c_proj.weight": "tp, -"},  # Conv1D stores weights as [in, out].
    "bert": {
        "self.query.weight": COLUMNS,
        "self.query.bias": BIAS,
        "self.key.weight": COLUMNS,
        "self.key.bias": BIAS,
        "self.value.weight": COLUMNS,
        "self.value.bias": BIAS,
        "attention.output.dense.weight": ROWS,
        "intermediate.dense.weight": COLUMNS,
        "intermediate.dense.bias": BIAS,
    },
    "vit": {},
}

MESHES = {1: hw.Mesh(tp=1), 2: hw.Mesh(tp=2), 4: hw.Mesh(dp=2, tp=2)}
BATCHES = {"input_ids": "dp, -", "attention_mask": "dp, -", "pixel_values": "dp, -, -, -"}


def training_model(name: str, ranks: int) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    torch.manual_seed(ranks)
    module, inputs = MODELS[name]()
    if name == "vit":
        inputs["labels"] = torch.tensor([0, 1])
    else:
        inputs["labels"] = inputs["input_ids"].clone()
        inputs["labels"][0, 3] = -100  # The loss ignores this label.
    plan = dict(PLANS[name]) if ranks > 1 else {}
    if ranks == 4:
        plan |= {key: BATCHES.get(key, "dp" if name == "vit" else "dp, -") for key in inputs}
    return module, inputs, plan


def expect_gradients(module: nn.Module, want: nn.Module, tolerance: float) -> None:
    for (name, parameter), other in zip(module.named_parameters(), want.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None and parameter.grad is not None:
            largest = float(max(other.grad.abs().max(), 1e-4))  # Some gradients, such as gradients of key biases, are only roundoff.
            torch.testing.assert_close(
                parameter.grad, other.grad, rtol=0, atol=tolerance * largest, msg=lambda why, at=name: f"{at}: {why}"
            )
