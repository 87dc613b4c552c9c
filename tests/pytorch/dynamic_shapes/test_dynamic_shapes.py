"""Models of the transformers package with a dynamic batch and, except for ViT, a dynamic sequence length. Each model is compiled once per
mesh and plan, and compared with torch at many sizes."""

from __future__ import annotations

from typing import Any

import pytest
from compiled_fusions import unrolled_ir

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

import small_models  # noqa: E402
import transformers  # noqa: E402
from small_models import VOCABULARY, Model, tokens  # noqa: E402
from torch.export import Dim  # noqa: E402

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402

SIZES = [(1, 2), (1, 5), (1, 16), (2, 3), (2, 16), (3, 7), (3, 8), (4, 11), (4, 16), (5, 9), (5, 4), (6, 13), (7, 6), (8, 8), (8, 15)]
SIZES += [(9, 2), (11, 5), (12, 12), (13, 10), (16, 16)]
BATCH, SEQUENCE = Dim("batch", min=1, max=64), Dim("sequence", min=2, max=32)


def given(name: str, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 32, 32)}
    tokens = {"input_ids": torch.randint(0, VOCABULARY, (batch, sequence))}
    if name == "bert":
        mask = torch.ones(batch, sequence, dtype=torch.long)
        mask[-1, sequence // 2 :] = 0
        tokens["attention_mask"] = mask
    return tokens


def first(output: Any) -> torch.Tensor:
    return output["logits"]


def gptj() -> Model:
    config = transformers.GPTJConfig(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=32, rotary_dim=8, use_cache=False)
    return transformers.GPTJForCausalLM(config).eval(), {"input_ids": tokens()}


def codegen() -> Model:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32, "rotary_dim": 8}
    config = transformers.CodeGenConfig(vocab_size=VOCABULARY, **sizes, use_cache=False)
    return transformers.CodeGenForCausalLM(config).eval(), {"input_ids": tokens()}


def mamba() -> Model:
    """A Mamba model. Its scan always has as many steps as the longest allowed sequence needs."""
    config = transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, use_cache=False)
    return transformers.MambaForCausalLM(config).eval(), {"input_ids": tokens()}


MLP = {"fc_in.weight": "tp, -", "fc_in.bias": "tp", "fc_out.weight": "-, tp"}


def rwkv() -> Model:
    """An RWKV model. Its loop over tokens becomes a scan."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}
    config = transformers.RwkvConfig(vocab_size=VOCABULARY, **sizes, rescale_every=0, use_cache=False)  # Rescaling would write to weights.
    module, inputs = transformers.RwkvForCausalLM(config).eval(), {"input_ids": tokens()}
    module(**inputs)  # The first call changes an attribute.
    return module, inputs


MODELS = small_models.MODELS | {"gptj": gptj, "codegen": codegen, "mamba": mamba, "rwkv": rwkv}
PLANS = small_models.PLANS | {"gptj": MLP | {"out_proj.weight": "-, tp"}, "codegen": MLP, "mamba": {"out_proj.weight": "-, tp"}, "rwkv": {}}

CASES = [
    pytest.param(name, ranks, sequence, marks=() if (name, ranks) == ("llama", 2) else pytest.mark.slow)
    for name in MODELS
    for ranks in (1, 2, 4)
    for sequence in ((False, True) if ranks > 1 and name == "llama" else (False,))
]


@pytest.mark.parametrize(("name", "ranks", "splits_sequence"), CASES)
def test_at_many_sizes(name: str, ranks: int, splits_sequence: bool) -> None:
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    shapes = {key: {0: BATCH, 1: SEQUENCE} if one.ndim == 2 else {0: BATCH} for key, one in inputs.items()}
    plan = dict(PLANS[name]) if ranks > 1 else {}
    plan |= {"layers.*": "-, tp, -"} if splits_sequence else {}
    model = hostweave.torch.compile(module, hw.Mesh(tp=ranks), plan, inputs, dynamic_shapes=shapes)
    sizes = [(b, 2 * s) if splits_sequence else (b, s) for b, s in SIZES if not splits_sequence or s <= 16]  # Lengths are even.
    for batch, sequence in sizes if name != "vit" else sizes[::4]:
        arguments = given(name, batch, sequence)
        with torch.no_grad():
            torch.testing.assert_close(first(model(**arguments)), first(module(**arguments)), rtol=1e-4, atol=1e-5)
    if name == "llama" and not splits_sequence:
        assert unrolled_ir(model.program).count("call @llama_decoder_layer") == 3
