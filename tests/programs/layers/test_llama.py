"""examples/llama.py: logits, greedy tokens, samples, the command, and errors."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from compiled_fusions import compiled
from cuda_here import needs_cuda

import hostweave as hw
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus

pytest.importorskip("safetensors", reason="needs safetensors: pip install safetensors")
torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
sys.path.insert(0, str(EXAMPLES))
import llama  # noqa: E402
from checkpoint import CheckpointError, read_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 16}
LONG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
PROMPTS, TOKENS = np.random.default_rng(0).integers(0, 96, (2, 13)).tolist(), 64  # 13 tokens are uneven on 2 and 4 ranks.
ROUNDOFFS = 8  # factor of the tolerance, which is relative to the largest logit


@cache
def checkpoint(tied: bool) -> tuple[Path, Any, Any]:
    """Writes a checkpoint. Returns the folder of the checkpoint, and the logits and tokens of transformers in f32."""
    torch.manual_seed(1)
    rope = {"rope_theta": 500000.0, **LONG} if tied else {"rope_theta": 10000.0, "rope_type": "default"}
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=4, tie_word_embeddings=tied, rope_parameters=rope, initializer_range=0.2, eos_token_id=None
    )
    model = transformers.LlamaForCausalLM(config)
    folder = Path(mkdtemp(prefix="hostweave-llama-"))
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())  # The weights are exact in bf16.
        model.save_pretrained(folder, max_shard_size="100KB" if tied else "1GB")  # The checkpoint has several files, or one file.
        ids = torch.tensor(PROMPTS)
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        return folder, model(ids).logits[:, -1], tokens[:, ids.shape[1] :]


def on_gpus(ranks: int, *case: Any) -> Any:
    few = pytest.mark.skipif(len(gpus()) < ranks, reason=f"needs {ranks} GPUs")
    return pytest.param("cuda", *case, marks=[pytest.mark.gpu, few])


CASES = [
    pytest.param("cpu", 1, "float32", True, marks=pytest.mark.slow),  # The case of 4 ranks has the same features.
    ("cpu", 2, "float32", False),
    ("cpu", 4, "float32", True),
    ("cpu", 2, "bfloat16", False),
    on_gpus(1, 1, "float32", True),
    on_gpus(2, 2, "float32", False),
    on_gpus(1, 1, "bfloat16", False),
    on_gpus(2, 2, "bfloat16", True),
]


@pytest.mark.parametrize(("target", "tp", "dtype", "tied"), CASES)
def test_logits_and_greedy_tokens(target: str, tp: int, dtype: str, tied: bool) -> None:
    """Compares all ranks. In f32 and on GPUs, also covers a second text with the same cache and graph, and a text that fills the cache."""
    folder, logits, tokens = checkpoint(tied)
    c, frequencies, ends = read_config(folder, dtype)
    assert (c.num_key_value_heads, c.tie_word_embeddings, c.rms_norm_eps, ends) == (4, tied, 1e-6, [])
    programs = llama.compiled(c, tp, target)
    threads = hw.Threads(tp)
    is_exact = dtype == "float32"

    def rank(number: int) -> tuple[Any, Any]:
        hw.init(threads)
        device = f"cuda:{number}" if target == "cuda" else "cpu"
        if target == "cuda":
            torch.cuda.set_device(number)
        weights = llama.load(folder, c, programs[0].mesh, number, device)
        assert weights["embed_tokens"].shape == (96 // tp, 64)
        assert weights["down_proj_1"].shape == (64, 96 // tp)
        assert ("lm_head" in weights) is not tied
        model = llama.Llama(c, programs, weights, frequencies, batch=2, length=len(PROMPTS[0]) + TOKENS - 1)
        model.start(PROMPTS)
        own = model.logits[0].float().cpu().clone()
        if not is_exact and target == "cpu":
            return own, None
        first = list(model.generate(PROMPTS, 3))
        model.start([row[::-1] for row in PROMPTS])
        got = list(model.generate(PROMPTS, TOKENS))
        assert got[:3] == first
        if target == "cuda" or tied:
            short = [PROMPTS[0], PROMPTS[1][:5]]  # The results must equal the results of each sequence alone.
            alone = llama.Llama(c, programs, weights, frequencies, batch=1, length=model.length)
            each = [[token for (token,) in alone.generate([prompt], 6)] for prompt in short]
            assert not is_exact or list(map(list, zip(*model.generate(short, 6), strict=True))) == each
        with pytest.raises(
            CheckpointError, match=rf"a prompt has {model.length} tokens, and the cache has space for 1 to {model.length - 1};"
        ):
            model.start([[1] * model.length])
        return own, got

    results = threads.run(rank)
    allowed = ROUNDOFFS * (2e-6 if is_exact else hw.bf16.roundoff) * float(logits.abs().max())
    torch.testing.assert_close(torch.cat([own for own, _ in results], -1), logits, rtol=0, atol=allowed)
    for _, got in results:
        assert got is None or not is_exact or got == tokens.T.tolist()
    for program in programs:
        program.close()


ROWS = 2000


def test_samples_are_among_the_most_probable_tokens() -> None:
    """Samples come only from the smallest set of tokens whose probability reaches top_p, and from tokens that tie with the last token of
    this set. The frequencies of the samples are right. Shards of the vocabulary are uneven."""
    dtype, vocabulary = hw.f32, 11

    @hw.fusion(
        mesh=hw.Mesh(tp=2), x=dtype[1, "B", f"{vocabulary}@tp"], temperature=dtype[()], top_p=dtype[()], seed=hw.u32[()], draw=hw.u32[()]
    )
    def drawn(x, temperature, top_p, seed, draw):  # type: ignore[no-untyped-def]
        return llama.sampled(x, temperature, top_p, seed, draw), llama.largest(x)

    logits = np.array([0.0, 4, 1, 3, 2.5, 3, -1, 0.5, 1, 2, 3.5], np.float32)
    rows = np.broadcast_to(logits, (1, ROWS, vocabulary)).copy()
    before = None
    for temperature, top_p, draw in ((1.0, 0.8, 0), (1.0, 0.8, 1), (2.0, 0.35, 2), (0.7, 1.0, 3), (1.0, 1e-6, 4)):
        numbers = {"temperature": temperature, "top_p": top_p}
        given = {name: np.array(number, np.float32) for name, number in numbers.items()}
        tokens, first = compiled(drawn).run(rows, **given, seed=np.array(7, np.uint32), draw=np.array(draw, np.uint32))
        assert (first == 1).all()
        p = np.exp(logits.astype(np.float64) / temperature)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        kept = order[: 1 + int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-6))]
        wanted = np.where(np.isin(np.arange(vocabulary), kept) | (p >= p[kept].min()), p, 0)  # Ties with the last token are kept.
        wanted /= wanted.sum()
        counts = np.bincount(tokens[0], minlength=vocabulary) / ROWS
        assert not counts[wanted == 0].any()
        assert (np.abs(counts - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / ROWS)).all()
        assert before is None or top_p < 1e-3 or (tokens != before).any()
        before = tokens


def write_tokenizer(folder: Path) -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install tokenizers")
    words = {f"w{number}": number for number in range(96)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, target: str = "cpu") -> None:
    monkeypatch.setattr(sys, "argv", ["llama.py", str(folder), "--target", target, *arguments])
    llama.main()


@pytest.mark.parametrize("target", ["cpu", on_gpus(2)])
def test_the_command(target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command prints tokens, prints the number of tokens per second, and stops at an end-of-text token."""
    folder, _, tokens = checkpoint(False)
    write_tokenizer(folder)
    prompt = " ".join(f"w{token}" for token in PROMPTS[0])
    run(monkeypatch, folder, "--tp", "2", "--prompt", prompt, "--tokens", "20", "--length", "76", target=target)
    out, err = capsys.readouterr()
    assert out.split() == [f"w{token}" for token in [*PROMPTS[0], *tokens[0][:20].tolist()]]
    assert "first token after " in err
    assert " tokens per second" in err
    found = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**found, "eos_token_id": int(tokens[0][3])}))
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).symlink_to(folder / file)
    run(monkeypatch, tmp_path, "--tp", "2", "--prompt", prompt, "--tokens", "20", "--length", "76", target=target)
    assert capsys.readouterr().out.split()[13:] == [f"w{token}" for token in tokens[0][:3].tolist()]
    if target == "cuda":  # top_p is so small that sampling is greedy.
        drawn = ["--tokens", "4", "--length", "76", "--temperature", "1", "--top-p", "1e-4"]
        run(monkeypatch, folder, "--tp", "2", "--prompt", prompt, *drawn, target=target)
        assert capsys.readouterr().out.split()[13:] == [f"w{token}" for token in tokens[0][:4].tolist()]
    with pytest.raises(SystemExit):
        run(monkeypatch, folder, "--prompt", prompt, "--top-p", "1.5")
    assert "--top-p above 0 and at most 1" in capsys.readouterr().err
    for mistake, arguments in {
        "4 heads of keys and values cannot be shared by 3 ranks; give a divisor as --tp": ["--tp", "3"],
        "a prompt has 13 tokens, and the cache has space for 1 to 9; raise --length": ["--tp", "2", "--length", "10"],
        r"ranks need one GPU each, and there are \d+; lower --tp, or give --target cpu": ["--tp", "64", "--target", "cuda"],
    }.items():
        with pytest.raises(SystemExit, match=mistake):
            run(monkeypatch, folder, "--prompt", prompt, *arguments)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SystemExit, match=r"tokenizer.json: there is no such file; give a folder with a tokenizer.json"):
        run(monkeypatch, folder, "--prompt", prompt)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(SystemExit, match="a checkpoint needs tokenizers, which is not installed: pip install tokenizers"):
        run(monkeypatch, folder, "--prompt", prompt)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": (
        {"model_type": "mixtral"},
        "model_type mixtral with experts and their router, which this example lacks; give a plain Llama",
    ),
    "qwen": ({"model_type": "qwen2"}, "model_type qwen2 with biases of queries, keys and values, which this example lacks"),
    "qwen3": ({"model_type": "qwen3", "attention_bias": True}, "with norms of queries and keys, biases of attention, which this"),
    "unknown": ({"model_type": "mamba"}, "model_type mamba with layers of another architecture, which this example lacks"),
    "biases": ({"attention_bias": True}, "model_type llama with biases of attention, which"),
    "yarn": ({"rope_parameters": {"rope_type": "yarn"}}, "with rotary embeddings of type yarn, which"),
    "older yarn": ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "with rotary embeddings of type linear, which"),
    "activation": ({"hidden_act": "gelu"}, "with the activation gelu, which"),
    "quantized": ({"quantization_config": {"bits": 4}}, "with quantized weights, which"),
    "dtype": ({"dtype": "float8"}, "dtype float8, which is none of float32, bfloat16, float16; give one as --dtype"),
    "size": ({"hidden_size": None}, "there is no hidden_size; give the config.json that came with the weights"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_refused(name: str, tmp_path: Path) -> None:
    changes, message = OTHERS[name]
    found = json.loads((checkpoint(True)[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**found, **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


def test_the_names_of_older_configs(tmp_path: Path) -> None:
    """Older configs have the keys rope_theta, rope_scaling and torch_dtype. Older configs may lack keys that have default values."""
    found = json.loads((checkpoint(True)[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**found, "eos_token_id": [3, 4]}))
    wanted, rates, ends = read_config(tmp_path)
    assert ends == [3, 4]
    for name in ("rope_parameters", "dtype", "head_dim", "num_key_value_heads", "tie_word_embeddings"):
        del found[name]
    older = {**found, "rope_theta": 500000.0, "rope_scaling": LONG, "torch_dtype": "float32", "hidden_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**older, "eos_token_id": 3}))
    got, same, ends = read_config(tmp_path)
    assert (got.head_dim, got.num_key_value_heads, got.tie_word_embeddings, got.dtype, ends) == (16, 8, False, wanted.dtype, [3])
    np.testing.assert_array_equal(same, rates)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    c, _, _ = read_config(checkpoint(False)[0])
    tensors = load_file(checkpoint(False)[0] / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    for changed, message in (
        ({**tensors, f"{name}.bias": torch.zeros(128)}, rf"the model has no parameter {name}.bias, one of 1 unknown; give a plain Llama"),
        ({key: tensors[key] for key in tensors if key != f"{name}.weight"}, rf"there is no tensor {name}.weight, one of 1 missing ones"),
        ({**tensors, f"{name}.weight": torch.zeros(127, 64)}, rf"{name}.weight: .*dim 0 is 127; it must be 128"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            llama.load(tmp_path, c, hw.Mesh(tp=2), 0)
    with pytest.raises(CheckpointError, match=r"none: .*; give a folder with the weights as safetensors"):
        llama.load(tmp_path / "none", c, hw.Mesh(tp=2), 0)


@needs_cuda
@pytest.mark.usefixtures("kernels_together")
def test_compiles_for_cuda() -> None:
    c = read_config(checkpoint(False)[0], "bfloat16")[0]
    for program in llama.compiled(c, 2, "cuda", is_sampled=True):
        assert "warning" not in (program.folder / "build.log").read_text()
