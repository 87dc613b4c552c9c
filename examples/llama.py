"""Llama 3 from a checkpoint of Hugging Face: `python examples/llama.py FOLDER --prompt "Once upon a time" --tp 2`.

Two programs share the weights and the cache of keys and values, and update the cache in place. `prefill` processes the prompt,
sequence-parallel. Each call of `decode` processes one token of each sequence, and writes the next token to the input `ids`, which the
next call reads. `hw.block` makes the layers one C++ function. `hostweave inspect examples/llama.py:llama --after all` shows the prefill of
Llama 3 8B on 8 ranks.
"""

import argparse
import sys
import time
from pathlib import Path

from checkpoint import DTYPES, CheckpointError, Config, needed, read_config, read_tokenizer, read_weights

import hostweave as hw

OPTIONS = hw.Options(sizes={"B": 1})


# --- the model --------------------------------------------------------------------------------------------------------


def layer_weights(c):
    """Types of a layer's weights by name. `self_attn.q_proj` is `model.layers.0.self_attn.q_proj.weight` in the checkpoint. A matrix is
    [out, in]."""
    E, F, dtype = c.hidden_size, f"{c.intermediate_size}@tp", c.dtype
    heads, groups = (f"{count * c.head_dim}@tp" for count in (c.num_attention_heads, c.num_key_value_heads))
    return {
        "input_layernorm": dtype[E],
        "self_attn.q_proj": dtype[heads, E],
        "self_attn.k_proj": dtype[groups, E],
        "self_attn.v_proj": dtype[groups, E],
        "self_attn.o_proj": dtype[E, heads],
        "post_attention_layernorm": dtype[E],
        "mlp.gate_proj": dtype[F, E],
        "mlp.up_proj": dtype[F, E],
        "mlp.down_proj": dtype[E, F],
    }


def other_weights(c):
    """Types of the weights outside of layers. Each rank has the rows of some tokens of the embedding table, and computes the logits of
    these tokens."""
    table = c.dtype[f"{c.vocab_size}@tp", c.hidden_size]
    return {"model.embed_tokens": table, "model.norm": c.dtype[c.hidden_size], **({} if c.tie_word_embeddings else {"lm_head": table})}


def short(name):
    """Last part of the name of a tensor in the checkpoint, such as q_proj."""
    return name.rpartition(".")[2]


def cache_of(c):
    return c.dtype["B", f"{c.num_key_value_heads}@tp", "L", c.head_dim]


def llama_layer(c, decode):
    """One layer. With `decode`, the layer processes one token of each sequence, which attends to the cache. Otherwise, the layer processes
    prompts. The tokens of a prompt are sharded along the sequence."""
    S, E, D, H, G, eps = 1 if decode else "S", c.hidden_size, c.head_dim, c.num_attention_heads, c.num_key_value_heads, c.rms_norm_eps
    inputs = {"x": c.dtype[1 if decode else "S@tp", "B", E], **dict.fromkeys(("cos", "sin"), hw.f32["B" if decode else 1, 1, S, D // 2])}
    if decode:
        inputs |= {"position": hw.i32["B"], "lengths": hw.i32["B"]}

    def heads(x, count):
        """View of [S, B, count * D] as [B, count, S, D]."""
        return hw.permute_dims(hw.reshape(x, S, "B", count, D), (1, 2, 0, 3))

    def layer(x, keys, values, input_layernorm, q_proj, k_proj, v_proj, o_proj,
              post_attention_layernorm, gate_proj, up_proj, down_proj, cos, sin, position=0, lengths=None):  # fmt: skip
        n = hw.rms_norm(x, input_layernorm, eps=eps)
        q, k = (hw.rotary_embedding(heads(hw.linear(n, w), count), cos, sin) for w, count in ((q_proj, H), (k_proj, G)))
        v = heads(hw.linear(n, v_proj), G)
        keys, values = (hw.dynamic_update_slice(cache, new, (0, 0, position, 0)) for cache, new in ((keys, k), (values, v)))
        k, v = (keys, values) if decode else (k, v)  # a prompt attends to itself
        attended = hw.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, lengths=lengths)
        h = x + hw.linear(hw.reshape(hw.permute_dims(attended, (2, 0, 1, 3)), S, "B", H * D), o_proj)
        n = hw.rms_norm(h, post_attention_layernorm, eps=eps)
        y = h + hw.linear(hw.silu(hw.linear(n, gate_proj)) * hw.linear(n, up_proj), down_proj)
        return y, keys, values

    weights = {short(name): type for name, type in layer_weights(c).items()}
    return hw.block(donate={"keys": 1, "values": 2}, keys=cache_of(c), values=cache_of(c), **weights, **inputs)(layer)


def largest(x):
    """Index of the first largest element of each row. If rows are sharded, ranks exchange only two numbers per row."""
    return hw.min(hw.where(x == hw.max(x, -1, keepdims=True), hw.iota(x, -1), int(x.type.shape[-1])), -1)


def sampled(logits, temperature, top_p, seed, draw):
    """Samples a token per row from the smallest set whose probabilities reach top_p. Bisection approximates this set without a sort."""
    V = int(logits.type.shape[-1])

    @hw.block(p=hw.f32[1, "B", f"{V}@tp"], low=hw.f32[1, "B", 1], high=hw.f32[1, "B", 1], top_p=hw.f32[()])
    def halved(p, low, high, top_p):
        """Bisection step that keeps the invariant: the sum of all p >= `low` reaches top_p, and the sum of all p >= `high` does not."""
        middle = (low + high) / 2
        enough = hw.sum(hw.where(p >= middle, p, 0.0), -1, keepdims=True) >= top_p
        return hw.where(enough, middle, low), hw.where(enough, high, middle)

    p = hw.softmax(hw.astype(logits, hw.f32) / temperature)
    high = hw.max(p, -1, keepdims=True) * 2
    low = high * 0
    for _ in range(26):
        low, high = halved(p, low, high, top_p)
    # Exponential race: index i gets an exponential time with rate p[i]. The index with the smallest time is the sample.
    return largest(hw.where(p >= low, p / -hw.log(hw.uniform(p, seed, draw)), -1.0))


def program(c, tp, decode=False, is_sampled=False):
    """The program `prefill` or `decode`. Both programs return the next token and the logits of each sequence, and the cache. `decode` also
    returns the next `position`.

    The input `position` of `prefill` is the number of tokens of each prompt, without padding. The input `position` of `decode` is the
    number of tokens of each sequence in the cache before the call.
    """
    S, first = (1, 3) if decode else ("S", 2)  # `first` is the index of the first result that is a cache
    layer, layers = llama_layer(c, decode), range(c.num_hidden_layers)
    types = {"keys": cache_of(c), "values": cache_of(c), **{short(name): type for name, type in layer_weights(c).items()}}
    caches = {f"{name}_{i}": first + 2 * i + at for i in layers for at, name in enumerate(("keys", "values"))}

    def llama(ids, position, frequencies, embed_tokens, norm, lm_head=None, **rest):
        places = hw.reshape(position, "B", 1, 1, 1) if decode else hw.reshape(hw.iota(ids, 0), 1, 1, S, 1)
        angles = hw.astype(places, hw.f32) * frequencies
        shared = {"cos": hw.cos(angles), "sin": hw.sin(angles)}
        place = position + 1 if decode else position  # position of the next token
        if decode:
            shared |= {"position": position, "lengths": place}
        x = hw.reshard(hw.embedding(ids, embed_tokens), 1 if decode else "S@tp", "B", c.hidden_size)
        held = []
        for i in layers:
            x, keys, values = layer(x, **{name: rest[f"{name}_{i}"] for name in types}, **shared)
            held += [keys, values]
        if not decode:
            x = hw.take_along_axis(x, hw.reshape(position - 1, 1, "B", 1), 0)  # last tokens, before any padding
        logits = hw.linear(hw.rms_norm(x, norm, eps=c.rms_norm_eps), embed_tokens if lm_head is None else lm_head)
        if is_sampled:
            token = sampled(logits, *(rest[name] for name in ("temperature", "top_p", "seed")), hw.astype(hw.max(place), hw.u32))
        else:
            token = largest(logits)
        return (token, logits, place, *held) if decode else (token, logits, *held)

    llama.__name__ = "decode" if decode else "prefill"
    return hw.fusion(
        mesh=hw.Mesh(tp=tp),
        donate={**({"ids": 0, "position": 2} if decode else {}), **caches},
        ids=hw.i32[S, "B"],
        position=hw.i32["B"],
        frequencies=hw.f32[c.head_dim // 2],
        **{short(name): type for name, type in other_weights(c).items()},
        **({"temperature": hw.f32[()], "top_p": hw.f32[()], "seed": hw.u32[()]} if is_sampled else {}),
        **{f"{name}_{i}": type for i in layers for name, type in types.items()},
    )(llama)


# --- execution --------------------------------------------------------------------------------------------------------


def compiled(c, tp, target="cpu", is_sampled=False):
    """Compiles both programs. Raises CheckpointError if `tp` does not divide the number of heads of keys and values."""
    if c.num_key_value_heads % tp:
        raise CheckpointError(f"{c.num_key_value_heads} heads of keys and values cannot be shared by {tp} ranks; give a divisor as --tp")
    return [hw.compile(program(c, tp, decode, is_sampled), target, OPTIONS) for decode in (False, True)]


def load(folder, c, mesh, rank, device="cpu"):
    """Reads the weights of a rank. Returns a dict by the names of the programs' inputs."""
    ours = {name: short(name) for name in other_weights(c)}
    types = other_weights(c)
    for i in range(c.num_hidden_layers):
        for name, type in layer_weights(c).items():
            ours[f"model.layers.{i}.{name}"], types[f"model.layers.{i}.{name}"] = f"{short(name)}_{i}", type
    return {ours[name]: weight for name, weight in read_weights(folder, types, mesh, rank, device).items()}


class Llama:
    """The model on one rank, with a cache of at least `length` tokens for each of `batch` sequences. All ranks must make the same calls.

    `weights` are the weights of this rank. `sampling` has temperature, top_p and seed, for programs that sample.
    """

    def __init__(self, c, programs, weights, frequencies, batch=1, length=4096, sampling=None):
        self.torch = torch = needed("torch")
        self.tp = tp = programs[0].mesh.size
        self.length = -(-length // tp) * tp  # prompts are also padded to a multiple of tp
        like = {"device": weights["norm"].device, "dtype": weights["norm"].dtype}
        self.device = like["device"]
        given = {"frequencies": torch.from_numpy(frequencies).to(self.device)}
        for name, dtype in (("temperature", torch.float32), ("top_p", torch.float32), ("seed", torch.uint32)) if sampling else ():
            given[name] = torch.tensor(sampling[name], dtype=dtype, device=self.device)
        self.prefill, self.decode = (program.bind(**weights, **given) for program in programs)
        caches = [f"{name}_{i}" for i in range(c.num_hidden_layers) for name in ("keys", "values")]
        self.cache = {name: torch.zeros(batch, c.num_key_value_heads // tp, self.length, c.head_dim, **like) for name in caches}
        self.ids = torch.zeros(1, batch, dtype=torch.int32, device=self.device)
        self.position = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.logits = torch.zeros(1, batch, weights["embed_tokens"].shape[0], **like)  # logits of this rank's part of the vocabulary
        self.graph = None

    def start(self, prompts):
        """Processes one prompt per sequence, and stores the next tokens in `ids`. Raises CheckpointError if a prompt is empty, or leaves
        no space in the cache."""
        counts = [len(prompt) for prompt in prompts]
        if wrong := [count for count in counts if not 0 < count < self.length]:
            raise CheckpointError(f"a prompt has {wrong[0]} tokens, and the cache has space for 1 to {self.length - 1}; raise --length")
        self.position.copy_(self.torch.tensor(counts))
        longest = -(-max(counts) // self.tp) * self.tp
        filled = self.torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], dtype=self.torch.int32)
        filled = filled.T.contiguous().to(self.device)
        self.prefill(filled, self.position, **self.cache, out=(self.ids, self.logits, *(None for _ in self.cache)))

    def advance(self):
        """Computes the next tokens. Each call updates `ids` and `position` in place for the next call, so one captured graph serves all
        calls."""
        if self.graph:
            return self.graph()
        out = (None, self.logits, None, *(None for _ in self.cache))
        self.graph = self.decode.capture(self.ids, self.position, **self.cache, out=out)  # capture also makes the call

    def generate(self, prompts, count):
        """Yields the next token of each sequence, until there are `count` tokens or the cache is full. The device computes one token
        ahead."""
        self.start(prompts)
        on_gpu = self.device.type == "cuda"
        room = self.length - max(map(len, prompts)) + 1  # the last token is not stored in the cache
        told = self.torch.zeros(min(count, room), len(prompts), dtype=self.torch.int32, pin_memory=on_gpu)
        for number, tokens in enumerate(told):
            tokens.copy_(self.ids[0], non_blocking=True)
            copied = self.torch.cuda.current_stream().record_event() if on_gpu else None
            if number + 1 < len(told):
                self.advance()
            if copied:
                copied.synchronize()
            yield tokens.tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="config.json, safetensors and tokenizer.json")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--tokens", type=int, default=128, help="maximum number of new tokens")
    parser.add_argument("--tp", type=int, default=1, help="number of ranks, one GPU each")
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights; default: that of the checkpoint")
    parser.add_argument("--length", type=int, default=4096, help="length of the cache, in tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 selects the most probable token")
    parser.add_argument("--top-p", type=float, default=0.9, help="samples from the fewest tokens whose probabilities reach this sum")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.tokens < 1 or given.temperature < 0 or not 0 < given.top_p <= 1 or not 0 <= given.seed < 2**32:
        parser.error("--tokens is at least 1, --temperature at least 0, --top-p above 0 and at most 1, and --seed from 0 to 2**32 - 1")
    sampling = {"temperature": given.temperature, "top_p": given.top_p, "seed": given.seed} if given.temperature else None
    try:
        run(given, sampling)
    except (CheckpointError, hw.errors.HostweaveError) as error:
        sys.exit(f"llama.py: {error}")


def run(given, sampling):
    c, frequencies, ends = read_config(given.folder, given.dtype)
    tokenizer = read_tokenizer(given.folder)
    prompt = tokenizer.encode(given.prompt).ids
    if given.target == "cuda" and (gpus := needed("torch").cuda.device_count()) < given.tp:
        raise CheckpointError(f"{given.tp} ranks need one GPU each, and there are {gpus}; lower --tp, or give --target cpu")
    text = needed("tokenizers").decoders.DecodeStream()

    def show(token):
        print(text.step(tokenizer, token) or "", end="", flush=True)  # empty if the tokens so far end in the middle of a character

    programs = compiled(c, given.tp, given.target, sampling is not None)
    ranks = hw.Threads(given.tp)

    def rank(number):
        hw.init(ranks)
        if given.target == "cuda":
            needed("torch").cuda.set_device(number)
        weights = load(given.folder, c, programs[0].mesh, number, f"cuda:{number}" if given.target == "cuda" else "cpu")
        model = Llama(c, programs, weights, frequencies, 1, given.length, sampling)
        for _ in model.generate([prompt], 2):
            pass  # warm-up: compiles, plans and captures
        started, times = time.perf_counter(), []
        for (token,) in model.generate([prompt], given.tokens):
            times.append(time.perf_counter())
            if token in ends:
                break
            if number == 0:
                show(token)
        if number == 0:
            rate = (len(times) - 1) / max(times[-1] - times[0], 1e-9)
            print(f"\nfirst token after {(times[0] - started) * 1e3:.1f} ms, then {rate:.1f} tokens per second", file=sys.stderr)

    for token in prompt:
        show(token)
    ranks.run(rank)


llama = program(Config(), tp=8)

if __name__ == "__main__":
    main()
