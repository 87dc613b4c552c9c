"""Reads Llama checkpoints of Hugging Face: config.json, and weights as safetensors. Each rank reads only its shards of the weights."""

import importlib
import json
import math
from dataclasses import dataclass, fields

import numpy as np

import hostweave as hw

DTYPES = {"float32": hw.f32, "bfloat16": hw.bf16, "float16": hw.f16}
MISSING = {"mixtral": "experts and their router", "qwen2": "biases of queries, keys and values", "qwen3": "norms of queries and keys"}
SWITCHES = {"attention_bias": "biases of attention", "mlp_bias": "biases of the MLP", "quantization_config": "quantized weights"}


@dataclass(frozen=True)
class Config:
    """Fields of config.json that describe a model. The defaults are those of Llama 3 8B."""

    vocab_size: int = 128256
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    dtype: object = hw.bf16


class CheckpointError(Exception):
    """Raised if a checkpoint or a request cannot be used. The message has a remedy."""


def needed(module):
    """Returns an optional package. Raises CheckpointError if the package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise CheckpointError(f"a checkpoint needs {package}, which is not installed: pip install {package}") from None


def read_json(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; give the folder of a model, as `hf download MODEL --local-dir FOLDER` makes it") from None


def read_config(folder, dtype=None):
    """Returns the config, the rotary frequencies (radians per token for each pair of elements), and the end-of-text tokens. Raises
    CheckpointError if the file cannot be read, lacks a field, or describes a model or dtype that this example does not support."""
    path = folder / "config.json"
    found = read_json(path)
    kind, rope = found.get("model_type"), found.get("rope_parameters") or found.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    lacks = [what for key, what in SWITCHES.items() if found.get(key)]
    lacks += [f"the activation {found['hidden_act']}"] if found.get("hidden_act", "silu") != "silu" else []
    lacks += [f"rotary embeddings of type {scaling}"] if scaling not in ("default", "llama3") else []
    if kind != "llama" or lacks:
        lacks = [MISSING.get(kind, "layers of another architecture"), *lacks] if kind != "llama" else lacks
        raise CheckpointError(f"{path}: model_type {kind} with {', '.join(lacks)}, which this example lacks; give a plain Llama")
    given = {name: value for name, value in found.items() if value is not None}
    dtype = dtype or given.get("dtype") or given.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise CheckpointError(f"{path}: dtype {dtype}, which is none of {', '.join(DTYPES)}; give one as --dtype")
    theta = rope.get("rope_theta", found.get("rope_theta", 10000.0))
    try:
        heads = given["num_attention_heads"]
        derived = {"num_key_value_heads": heads, "head_dim": given["hidden_size"] // heads, "tie_word_embeddings": False}
        config = Config(**{field.name: {**derived, **given, "dtype": DTYPES[dtype]}[field.name] for field in fields(Config)})
        rates = frequencies(config.head_dim, theta, rope if scaling == "llama3" else None)
    except KeyError as error:
        raise CheckpointError(f"{path}: there is no {error.args[0]}; give the config.json that came with the weights") from None
    ends = given.get("eos_token_id", [])
    return config, rates, ends if isinstance(ends, list) else [ends]


def frequencies(size, theta, scaling=None):
    """Rotary frequencies theta ** (-2 i / size). With `scaling`, as in Llama 3.1, the low frequencies are divided by a factor, for longer
    texts."""
    rates = 1 / np.float32(theta) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    if scaling:
        low, high, factor = (scaling[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
        turns = scaling["original_max_position_embeddings"] * rates / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        rates = (1 - kept) * rates / factor + kept * rates
    return rates.astype(np.float32)


def read_tokenizer(folder):
    tokenizer, path = needed("tokenizers").Tokenizer, folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file; give a folder with a tokenizer.json")
    return tokenizer.from_file(str(path))


def read_weights(folder, types, mesh, rank, device="cpu"):
    """Reads this rank's shard of each tensor of the model. Returns the shards by name.

    Raises CheckpointError if the checkpoint does not fit `types`, for example if a tensor is missing or has another shape.
    """
    open_file, torch = needed("safetensors").safe_open, needed("torch")
    index = folder / "model.safetensors.index.json"
    files = set(read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    try:
        opened = [open_file(folder / file, "pt", device) for file in sorted(files)]
    except OSError as error:
        raise CheckpointError(f"{folder}: {error}; give a folder with the weights as safetensors") from None
    lies = {name.removesuffix(".weight"): file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    if missing := sorted(types.keys() - lies):
        raise CheckpointError(f"{folder}: there is no tensor {missing[0]}.weight, one of {len(missing)} missing ones; fetch all files")
    if unknown := sorted(name for name in lies.keys() - types if name != "lm_head" and not name.endswith("inv_freq")):
        raise CheckpointError(f"{folder}: the model has no parameter {unknown[0]}, one of {len(unknown)} unknown; give a plain Llama")
    dtypes = {ours: getattr(torch, name) for name, ours in DTYPES.items()}
    weights = {}
    for name, type in types.items():
        try:
            block = type.block(lies[name].get_shape(), rank, mesh)
        except hw.errors.ArgumentError as error:
            raise CheckpointError(f"{folder}: {name}.weight: {error}; give config.json and weights of one model") from None
        weights[name] = lies[name][block].to(dtypes[type.dtype]).contiguous()
    return weights
