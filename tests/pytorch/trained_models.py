"""Small models for training, with arguments for which a model returns a loss, and plans for 1, 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

import hostweave as hw

BATCH, WORDS = 4, 64
Inputs = dict[str, torch.Tensor]


def words(*shape: int) -> torch.Tensor:
    return torch.randint(3, WORDS, shape)


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def labels() -> Inputs:
    return {"labels": torch.arange(BATCH) % 3}


def whisper() -> tuple[nn.Module, Inputs]:
    config = transformers.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=12,
        max_target_positions=16,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    inputs = {"input_features": torch.randn(BATCH, 8, 24), "labels": words(BATCH, 6)}
    return transformers.WhisperForConditionalGeneration(config), inputs


TEXT = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"max_position_embeddings": 8}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}


def clip() -> tuple[nn.Module, Inputs]:
    of_text = TEXT | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(text_config=of_text, vision_config=VISION, projection_dim=16)
    ids = words(BATCH, 8)
    ids[:, -1] = 2
    return transformers.CLIPModel(config), {"input_ids": ids, "pixel_values": images(16), "return_loss": True}


def siglip() -> tuple[nn.Module, Inputs]:
    config = transformers.SiglipConfig(text_config=TEXT | {"projection_size": 16}, vision_config=VISION)
    return transformers.SiglipModel(config), {"input_ids": words(BATCH, 8), "pixel_values": images(16), "return_loss": True}


def bloom() -> tuple[nn.Module, Inputs]:
    config = transformers.BloomConfig(vocab_size=WORDS, hidden_size=16, n_layer=2, n_head=2, use_cache=False, hidden_dropout=0.0)
    ids = words(BATCH, 8)
    return transformers.BloomForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


def dinov2() -> tuple[nn.Module, Inputs]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2, "image_size": 16, "patch_size": 8}
    config = transformers.Dinov2Config(**sizes, num_labels=3)
    return transformers.Dinov2ForImageClassification(config), {"pixel_values": images(16), **labels()}


def convnext() -> tuple[nn.Module, Inputs]:
    config = transformers.ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 2], num_labels=3, layer_scale_init_value=0.5)
    return transformers.ConvNextForImageClassification(config), {"pixel_values": images(), **labels()}


def swin() -> tuple[nn.Module, Inputs]:
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        mlp_ratio=2.0,
        num_labels=3,
        drop_path_rate=0.0,
    )
    return transformers.SwinForImageClassification(config), {"pixel_values": images(), **labels()}


def resnet() -> tuple[nn.Module, Inputs]:
    """A ResNet with bottleneck blocks, like ResNet-50, but with smaller depth and width."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck", downsample_in_bottleneck=False, num_labels=3
    )
    return transformers.ResNetForImageClassification(config), {"pixel_values": images(), **labels()}


def wav2vec2() -> tuple[nn.Module, Inputs]:
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        num_labels=3,
        layerdrop=0.0,
        apply_spec_augment=False,
        **{f"{of}_dropout": 0.0 for of in ("hidden", "activation", "attention", "feat_proj", "final")},
    )
    return transformers.Wav2Vec2ForSequenceClassification(config), {"input_values": torch.randn(BATCH, 200), **labels()}


class Dlrm(nn.Module):
    """DLRM (Naumov et al., 2019, arXiv:1906.00091): embeddings of categories, and dot products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(WORDS, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.bottom(dense)
        features = torch.stack([x, *(table(sparse[:, number]) for number, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        rows, columns = self.pairs
        top = torch.cat([x, products[:, rows, columns]], 1)
        return nn.functional.binary_cross_entropy_with_logits(self.top(top).squeeze(1), labels)


def dlrm() -> tuple[nn.Module, Inputs]:
    return Dlrm(), {"dense": torch.randn(BATCH, 5), "sparse": words(BATCH, 3, 2), "labels": torch.rand(BATCH)}


def rwkv() -> tuple[nn.Module, Inputs]:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "context_length": 16}
    config = transformers.RwkvConfig(vocab_size=WORDS, **sizes, use_cache=False, bos_token_id=1, eos_token_id=2)
    ids = words(BATCH, 7)
    return transformers.RwkvForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}


@dataclass
class Trained:
    """A model and the shardings of its weights over the axis tp."""

    make: Callable[[], tuple[nn.Module, Inputs]]
    plan: dict[str, str] = field(default_factory=dict)


def mlp(up: str, down: str) -> dict[str, str]:
    return {f"{up}.weight": "tp, -", f"{up}.bias": "tp", f"{down}.weight": "-, tp"}


HEADS = {f"{name}.{of}": axes for name in ("q_proj", "v_proj") for of, axes in (("weight", "tp, -"), ("bias", "tp"))}
HEADS |= {"k_proj.weight": "tp, -", "out_proj.weight": "-, tp"}
MODELS: dict[str, Trained] = {
    "whisper": Trained(whisper, mlp("fc1", "fc2") | HEADS),
    "clip": Trained(clip, mlp("fc1", "fc2") | HEADS | {"k_proj.bias": "tp"}),
    "siglip": Trained(siglip, mlp("fc1", "fc2")),
    "bloom": Trained(bloom, mlp("dense_h_to_4h", "dense_4h_to_h")),
    "dinov2": Trained(dinov2, mlp("mlp.fc1", "mlp.fc2")),
    "convnext": Trained(convnext, mlp("pwconv1", "pwconv2")),
    "swin": Trained(swin, mlp("mlp.fc1", "mlp.fc2")),
    "resnet": Trained(resnet),
    "wav2vec2": Trained(wav2vec2, mlp("intermediate_dense", "output_dense")),
    "rwkv": Trained(rwkv, {"feed_forward.key.weight": "tp, -", "feed_forward.value.weight": "-, tp"}),
    "dlrm": Trained(dlrm, {"tables.*.weight": "-, tp"}),
}


def trained(name: str, ranks: int) -> tuple[nn.Module, dict[str, Any], dict[str, str], hw.Mesh]:
    """A model with arguments, and the plan of the model for `ranks` ranks. Two ranks shard the weights of the plan, or the batch if the
    plan is empty."""
    torch.manual_seed(ranks)
    module, inputs = MODELS[name].make()
    plan = dict(MODELS[name].plan)
    mesh = {1: hw.Mesh(tp=1), 2: hw.Mesh(tp=2) if plan else hw.Mesh(dp=2), 4: hw.Mesh(dp=2, tp=2)}[ranks]
    if ranks == 1:
        plan = {}
    if "dp" in dict(mesh.axes):
        plan |= {key: ", ".join(["dp"] + ["-"] * (value.ndim - 1)) for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    return module.train(), inputs, plan, mesh
