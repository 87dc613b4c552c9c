"""The layers of Llama 3 8B: `hw.block` makes one function of the generated program, which is traced once and called 32 times.

Tensor-parallel, and sequence-parallel between the two halves of a layer. `hostweave inspect examples/llama.py:llama --after all`
"""

import hostweave as hw

TP = 8  # ranks: heads, columns of the MLP and the sequence are sharded
LAYERS = 32
E = 4096  # elements of a token
F = 14336  # columns of the MLP
H = 32  # heads of the query
G = 8  # heads of key and value
D = 128  # elements of a head
dtype = hw.bf16

# The sequence is the outermost dim, so that gathered blocks are contiguous.
TOKENS = dtype["S@tp", "B", E]
TABLES = {"cos": hw.f32["S", D // 2], "sin": hw.f32["S", D // 2]}  # of rotary embeddings
WEIGHTS = {
    "norm_1": dtype[E],
    "q": dtype[E, f"{H * D}@tp"],
    "k": dtype[E, f"{G * D}@tp"],
    "v": dtype[E, f"{G * D}@tp"],
    "o": dtype[f"{H * D}@tp", E],
    "norm_2": dtype[E],
    "gate": dtype[E, f"{F}@tp"],
    "up": dtype[E, f"{F}@tp"],
    "down": dtype[f"{F}@tp", E],
}


def heads(x, count):
    """[S, B, count * D] as [B, count, S, D]."""
    return hw.permute_dims(hw.reshape(x, "S", "B", count, D), (1, 2, 0, 3))


def attention(x, q, k, v, o, cos, sin):
    query, key = (hw.rotary_embedding(heads(hw.matmul(x, w), count), cos, sin) for w, count in ((q, H), (k, G)))
    attended = hw.scaled_dot_product_attention(query, key, heads(hw.matmul(x, v), G), is_causal=True, enable_gqa=True)
    return hw.matmul(hw.reshape(hw.permute_dims(attended, (2, 0, 1, 3)), "S", "B", H * D), o)


@hw.block(x=TOKENS, **WEIGHTS, **TABLES)
def layer(x, norm_1, q, k, v, o, norm_2, gate, up, down, cos, sin):
    h = x + attention(hw.rms_norm(x, norm_1, eps=1e-5), q, k, v, o, cos, sin)
    n = hw.rms_norm(h, norm_2, eps=1e-5)
    return h + hw.matmul(hw.silu(hw.matmul(n, gate)) * hw.matmul(n, up), down)


@hw.fusion(
    mesh=hw.Mesh(tp=TP),
    x=TOKENS,
    **TABLES,
    norm=dtype[E],
    **{f"{name}_{i}": type for i in range(LAYERS) for name, type in WEIGHTS.items()},
)
def llama(x, cos, sin, norm, **weights):
    for i in range(LAYERS):
        x = layer(x, cos=cos, sin=sin, **{name: weights[f"{name}_{i}"] for name in WEIGHTS})
    return hw.rms_norm(x, norm, eps=1e-5)
