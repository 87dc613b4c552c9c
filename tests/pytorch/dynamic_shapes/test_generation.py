"""`generate` of transformers on compiled programs, on 1, 2 and 4 ranks. The tokens equal those of eager PyTorch, even if prompts differ in
length."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

import hostweave as hw  # noqa: E402
import hostweave.torch  # noqa: E402
from hostweave.base.errors import ArgumentError  # noqa: E402
from hostweave.torch.caches import requests  # noqa: E402
from hostweave.torch.exported import tracing  # noqa: E402
from hostweave.torch.generation import TokenGraph  # noqa: E402

VOCABULARY, TOKENS = 128, 64
shares_programs = pytest.mark.xdist_group("programs of a small Llama")  # One worker runs the marked tests, and compiles each program once.
OF_ALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {"num_hidden_layers": 10}),  # torch.export once named the tensors of ten or more layers wrongly.
    "Qwen3": ("Qwen3Config", {"head_dim": 16}),
    "Gemma3": ("Gemma3TextConfig", {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7}),
    "Mistral": ("MistralConfig", {"sliding_window": 8}),
    "GptOss": ("GptOssConfig", {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Mamba2": ("Mamba2Config", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
}
PLAN = {
    **{f"{name}_proj.weight": "tp, -" for name in ("q", "k", "v", "gate", "up")},
    **{f"{name}_proj.weight": "-, tp" for name in ("o", "down")},
}


def model_of(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config, more = MODELS[name]
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**{**OF_ALL, **more, **settings})).eval()


def plan_of(module: Any) -> dict[str, str]:
    held = [path for path, _ in module.named_parameters()]
    plan = {entry: axes for entry, axes in PLAN.items() if any(path.endswith(entry) for path in held)}
    biases = {entry.replace("weight", "bias"): "tp" for entry, axes in plan.items() if axes == "tp, -"}
    return plan | {entry: axes for entry, axes in biases.items() if any(path.endswith(entry) for path in held)}


def prompts(length: int) -> dict[str, torch.Tensor]:
    ids, mask = torch.randint(3, VOCABULARY, (2, length)), torch.ones(2, length, dtype=torch.long)
    mask[1, : length // 3] = 0
    return {"inputs": ids, "attention_mask": mask}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["Llama", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "Llama")])
def test_greedy_tokens(name: str, ranks: int) -> None:
    module = model_of(name)
    model = hostweave.torch.compile(
        module, hw.Mesh(tp=ranks), plan_of(module) if ranks > 1 else {}, {"input_ids": torch.ones(2, 8).long(), "use_cache": False}
    )
    for length in (7, 12):
        given = prompts(length) if name != "Mamba2" else {"inputs": torch.randint(3, VOCABULARY, (2, 7))}
        settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(**given, **settings), module.generate(**given, **settings))
    assert len(model.generation.programs) == 2  # One program is for prompts of both lengths, and one is for single tokens.
    if name == "Llama":
        decode = model.generation.programs[1].program
        assert "dynamic_update_slice" in decode.fusion_ir
        assert ("4@tp" in decode.fusion_ir) == (ranks > 1)


@cache
def small_llama() -> tuple[Any, Any]:
    """A module, and its compiled form for 2 ranks. Tests share the compiled module, because compilation is most of a test's time."""
    module = model_of("Llama", num_hidden_layers=2)
    given = {"input_ids": torch.ones(2, 9).long(), "use_cache": False}
    return module, hostweave.torch.compile(module, hw.Mesh(tp=2), plan_of(module), given)


@shares_programs
def test_ranks_of_a_group_and_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has some heads of the cache. For the first prompt, the second token is captured as a graph. The graph computes all later
    tokens, and all tokens of the second prompt except the first. A cache that the caller still refers to does not change.

    For the same random seed, the sampled tokens equal those of the module.
    """
    replays, replay = list[Any](), TokenGraph.__call__
    monkeypatch.setattr(TokenGraph, "__call__", lambda self, kwargs: replays.append(self) or replay(self, kwargs))
    module, model = small_llama()
    first, second = (torch.randint(3, VOCABULARY, (2, length)) for length in (5, 9))
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    threads, both = hw.Threads(2), threading.Barrier(2, timeout=60)

    def rank_main(rank: int) -> Any:
        hw.init(threads)
        found = []
        for prompt in (first, second):
            found.append(model.generate(prompt, **settings)["logits"])
            both.wait()  # Two ranks must not collect garbage at once: the second collection would do nothing.
            if rank == 0:
                assert len(replays) == 2 * (6 if prompt is first else 13)  # Prefill makes token 1, and capture makes token 2.
                assert len({*map(id, replays)}) == 2  # Each rank captures one graph.
                gc.collect()  # The compilation leaves reference cycles, which keep the cache.
            both.wait()
        more = model.generate(first, **settings)
        kept = more.get("cache", more.get("past_key_values")) if rank else None
        del more
        held = [layer.keys.clone() for layer in kept.layers] if kept else []
        found.append(model.generate(second, **settings)["logits"])
        assert all(torch.equal(was, layer.keys) for was, layer in zip(held, kept.layers if kept else (), strict=True))
        found.append(model.generate(first[:1], **settings)["logits"])
        return found

    # The ranks run before the `model.generate` below. So a rank is the first to compile the programs, with its blocks of the cache.
    ways = threads.run(rank_main)
    for place, prompt in enumerate((first, second, second, first[:1])):
        wanted = module.generate(prompt, **settings)["logits"]
        for found in ways:
            torch.testing.assert_close(found[place], wanted)
    sampled = {"max_new_tokens": 8, "do_sample": True, "top_k": 20}
    torch.manual_seed(1)
    drawn = model.generate(second, **sampled)
    torch.manual_seed(1)
    assert torch.equal(drawn, module.generate(second, **sampled))


@shares_programs
def test_caches_of_the_user() -> None:
    """If a cache is passed, the call appends tokens to the cache, as the module does."""
    module, model = small_llama()
    ids = torch.randint(3, VOCABULARY, (1, 6))
    found = []
    for one in (model, module):
        cache = transformers.StaticCache(config=module.config, max_cache_len=64)
        first = one.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, cache=cache)
        found.append((first, one.generate(first, max_new_tokens=4, do_sample=False, eos_token_id=None, cache=cache)))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.usefixtures("interpreted")
def test_a_module_of_one_token_and_a_cache() -> None:
    """The module adds the cache length, a tensor without dims, to `torch.arange(1)`. The sum must keep its dim."""
    module = model_of("Llama", num_hidden_layers=3)
    prompt, token = torch.randint(3, VOCABULARY, (2, 6)), torch.randint(3, VOCABULARY, (2, 1))

    def inputs() -> dict[str, Any]:
        cache = transformers.StaticCache(config=module.config, max_cache_len=64)
        module(input_ids=prompt, cache=cache, use_cache=True)
        return {"input_ids": token, "cache": cache, "use_cache": True}

    with torch.no_grad():
        model = hostweave.torch.compile(module, hw.Mesh(tp=2), plan_of(module), inputs())
        torch.testing.assert_close(model(**inputs()).logits, module(**inputs()).logits, rtol=1e-4, atol=1e-5)
    assert "repeat" in model.program.fusion_ir  # The layers are one loop, although cache values have different names in each layer.


def test_another_thread_does_not_compile() -> None:
    """`requests` makes `is_compiling` true only in the thread that calls `requests`. No other thread may trace meanwhile."""
    cache, found = transformers.StaticCache(config=model_of("Llama").config, max_cache_len=8), list[Any]()

    def run(*_: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            found.append((torch.compiler.is_compiling(), other.submit(lambda: torch.compiler.is_compiling()).result()))
            found.append(other.submit(tracing.acquire, blocking=False).result())

    requests(cache, run)
    assert found == [(True, False), False]


@shares_programs
def test_refusals() -> None:
    module, model = small_llama()
    ids = torch.ones(1, 4).long()
    for wrong in ({"use_cache": False}, {"cache_implementation": "dynamic"}):
        with pytest.raises(ArgumentError, match="programs write to a static cache; omit use_cache and cache_implementation"):
            model.generate(ids, **wrong)
    with pytest.raises(ArgumentError, match="the cache is a DynamicCache, which grows; pass a StaticCache, or omit it"):
        model.generate(ids, max_new_tokens=2, cache=transformers.DynamicCache(config=module.config))


class _Done:
    """Replaces torch.Event by an event that has already occurred."""

    def __init__(self, **settings: Any):
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@shares_programs
def test_the_host_does_not_wait_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, a compiled model makes transformers detect the end of greedy sequences one step late, and undo the last step. The test
    enables this late detection on the CPU. No step is undone if the caller gets the cache, or if tokens are sampled."""
    utils = pytest.importorskip("transformers.generation.utils")
    if not hasattr(utils, "DeferredStopCheck"):
        pytest.skip("this version of transformers waits for each token")
    module, model = small_llama()
    ids = torch.randint(3, VOCABULARY, (2, 9))
    token = int(module.generate(ids[:1], max_new_tokens=8, do_sample=False, eos_token_id=None)[0, -3])
    model.generate(ids[:1], max_new_tokens=2, do_sample=False)
    chosen, decide = list[bool](), utils.DeferredStopCheck.is_supported

    def on_cuda(device: torch.device, *args: Any, **others: Any) -> bool:
        chosen.append(decide(torch.device("cuda"), *args, **others))
        return chosen[-1]

    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(on_cuda))
    monkeypatch.setattr(torch, "Event", _Done)
    for settings in ({"eos_token_id": token}, {"eos_token_id": None}, {"return_dict_in_generate": True}, {"do_sample": True}):
        given = {"max_new_tokens": 8, "do_sample": False, **settings}
        found = []
        for one in (model, module):
            torch.manual_seed(1)
            found.append(one.generate(ids[:1], **given))
        sequences = [one if isinstance(one, torch.Tensor) else one.sequences for one in found]
        assert torch.equal(*sequences), settings
        assert sequences[0].shape[1] < ids.shape[1] + 8 or "eos_token_id" not in settings or settings["eos_token_id"] is None
    assert chosen == [True, False, True, False, False, False, False, False]
