"""Mixtures of experts of transformers, with the default implementation `grouped_mm`. Inference and training, compared with eager
PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
transformers = pytest.importorskip("transformers")

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402

pytestmark = pytest.mark.extra("torch", "transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
    "DeepseekV3": (
        "DeepseekV3Config",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16},
            **{"first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
            "v_head_dim": 8,
        },
    ),
    "GptOss": ("GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
PLANS = {
    "experts": {"experts.gate_up_proj": "tp, -, -", "experts.down_proj": "tp, -, -"},
    "tensors": {"experts.gate_up_proj": "-, tp, -", "experts.down_proj": "-, -, tp"},
}
OTHERS = {
    **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "lm_head.weight", "q_b_proj.weight", "kv_b_proj.weight"), "tp, -"),
    "o_proj.weight": "-, tp",
}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config, more = MODELS[name]
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**{**SIZES, **HEADS, **more})).eval()


def plan_of(module: Any, kind: str, ranks: int) -> dict[str, str]:
    if ranks == 1:
        return {}
    held = [path for path, _ in module.named_parameters()]
    plan = {entry: axes for entry, axes in {**PLANS[kind], **OTHERS}.items() if any(path.endswith(entry) for path in held)}
    if isinstance(module, transformers.GptOssForCausalLM) and kind == "tensors":  # The weights of this model are transposed.
        plan |= {"experts.gate_up_proj": "-, -, tp", "experts.down_proj": "-, tp, -"}
    return plan


CASES = [("Mixtral", "experts", 2)]
MORE = [(name, kind, ranks) for name in MODELS for kind in PLANS for ranks in (1, 2, 4) if (name, kind, ranks) not in CASES]


@pytest.mark.parametrize(("name", "kind", "ranks"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_inference(name: str, kind: str, ranks: int) -> None:
    module = model_of(name)
    inputs = {"input_ids": torch.randint(3, 64, (2, 8)), "use_cache": False}
    compiled = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan_of(module, kind, ranks), inputs)
    assert "grouped_matmul" in compiled.program.fusion_ir
    with torch.no_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            inputs["input_ids"] = torch.randint(3, 64, (2, 8))
            torch.testing.assert_close(compiled(**inputs).logits, module(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "kind", "ranks"), [CASES[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_training(name: str, kind: str, ranks: int) -> None:
    module, other = model_of(name).train(), model_of(name).train()
    ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    trained = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan_of(module, kind, ranks), inputs, training=True)
    got, want = trained(**inputs).loss, other(**inputs).loss
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    got.backward()
    want.backward()
    theirs = dict(other.named_parameters())
    for path, parameter in module.named_parameters():
        if theirs[path].grad is None:
            assert parameter.grad is None or not parameter.grad.any()
            continue
        torch.testing.assert_close(parameter.grad, theirs[path].grad, rtol=1e-3, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")
