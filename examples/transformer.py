"""Transformer layers as users write them. Layers with `_tp` in their names are tensor-parallel. Layers with `_sp` are sequence-parallel.

MLP and attention are plain functions. The last weight of each function is sharded over `tp` by rows, and all other weights by columns. So
the result is a partial sum. The partial sum is all-reduced if the layer's output is replicated. The partial sum is reduce-scattered if the
output is sharded along the sequence. The backward passes are written with the same ops.
"""

from math import pi, sqrt

import hostweave as hw

mesh = hw.Mesh(dp=2, tp=4)
B = "B@dp"  # sequences of the batch; "B" on a mesh of tp alone
T = "T@dp"  # the tokens of all sequences
TS = "T@dp,tp"  # the tokens of all sequences, also sharded over tp
dtype = hw.bf16
H = 32  # heads of the query
G = 8  # heads of key and value
D = 128  # elements of a head
DROPPED = 0.1

# The sequence is the outermost dim, so that gathered blocks are contiguous.
WHOLE = dtype["S", B, "E"]  # tensor-parallel: replicated over tp
SHARED = dtype["S@tp", B, "E"]  # sequence-parallel: the sequence is sharded over tp

MLP = {"w1": dtype["E", "F@tp"], "w2": dtype["F@tp", "E"]}
SWIGLU = {"wg": dtype["E", "F@tp"], "wu": dtype["E", "F@tp"], "wd": dtype["F@tp", "E"]}
HEADS = dict.fromkeys(("wq", "wk", "wv"), dtype["E", f"{H * D}@tp"]) | {"wo": dtype[f"{H * D}@tp", "E"]}
GROUPS = HEADS | dict.fromkeys(("wk", "wv"), dtype["E", f"{G * D}@tp"])
TABLES = {"cos": hw.f32["S", D // 2], "sin": hw.f32["S", D // 2]}  # for rotary embeddings


def mlp(x, w1, w2):
    return hw.matmul(hw.gelu(hw.matmul(x, w1)), w2)


def swiglu(x, wg, wu, wd):
    return hw.matmul(hw.silu(hw.matmul(x, wg)) * hw.matmul(x, wu), wd)


def heads(x, w, count):
    """Multiplies [S, B, E] by a weight, and returns a view of the product as [B, count, S, D]."""
    return hw.permute_dims(hw.reshape(hw.matmul(x, w), "S", "B", count, D), (1, 2, 0, 3))


def together(x):
    """View of [B, H, S, D] as [S, B, H * D]."""
    return hw.reshape(hw.permute_dims(x, (2, 0, 1, 3)), "S", "B", H * D)


def multi_head(x, wq, wk, wv, wo):
    attended = hw.scaled_dot_product_attention(heads(x, wq, H), heads(x, wk, H), heads(x, wv, H), is_causal=True)
    return hw.matmul(together(attended), wo)


def grouped_query(x, wq, wk, wv, wo, cos, sin):
    q, k = (hw.rotary_embedding(heads(x, w, count), cos, sin) for w, count in ((wq, H), (wk, G)))
    attended = hw.scaled_dot_product_attention(q, k, heads(x, wv, G), is_causal=True, enable_gqa=True)
    return hw.matmul(together(attended), wo)


def shared(y):
    return hw.reshard(y, "S@tp", B, "E")


# --- blocks -----------------------------------------------------------------------------------------------------------


@hw.fusion(mesh=mesh, x=WHOLE, **MLP)
def mlp_tp(x, w1, w2):
    return mlp(x, w1, w2)


@hw.fusion(mesh=mesh, x=SHARED, **MLP)
def mlp_sp(x, w1, w2):
    return shared(mlp(x, w1, w2))


@hw.fusion(mesh=mesh, x=WHOLE, **SWIGLU)
def swiglu_tp(x, wg, wu, wd):
    return swiglu(x, wg, wu, wd)


@hw.fusion(mesh=mesh, x=SHARED, **SWIGLU)
def swiglu_sp(x, wg, wu, wd):
    return shared(swiglu(x, wg, wu, wd))


@hw.fusion(mesh=mesh, x=WHOLE, **HEADS)
def multi_head_tp(x, wq, wk, wv, wo):
    return multi_head(x, wq, wk, wv, wo)


@hw.fusion(mesh=mesh, x=SHARED, **HEADS)
def multi_head_sp(x, wq, wk, wv, wo):
    return shared(multi_head(x, wq, wk, wv, wo))


@hw.fusion(mesh=mesh, x=WHOLE, **GROUPS, **TABLES)
def grouped_query_tp(x, wq, wk, wv, wo, cos, sin):
    return grouped_query(x, wq, wk, wv, wo, cos, sin)


@hw.fusion(mesh=mesh, x=SHARED, **GROUPS, **TABLES)
def grouped_query_sp(x, wq, wk, wv, wo, cos, sin):
    return shared(grouped_query(x, wq, wk, wv, wo, cos, sin))


# --- whole layers: tensors that are added to the residual get the sharding of the residual ----------------------------

GPT = {
    **HEADS,
    **MLP,
    **dict.fromkeys(("n1", "b1", "n2", "b2", "bo", "bm"), dtype["E"]),  # weights and biases of norms, and biases added after a reduction
    "seed": hw.u32[()],
}
LLAMA = {**GROUPS, **SWIGLU, "n1": dtype["E"], "n2": dtype["E"], **TABLES}


def gpt(x, wq, wk, wv, wo, w1, w2, n1, b1, n2, b2, bo, bm, seed):
    attended = multi_head(hw.layer_norm(x, n1, b1), wq, wk, wv, wo) + bo
    h = x + hw.dropout(attended, DROPPED, seed, draw=0)
    return h + hw.dropout(mlp(hw.layer_norm(h, n2, b2), w1, w2) + bm, DROPPED, seed, draw=1)


def llama(x, wq, wk, wv, wo, wg, wu, wd, n1, n2, cos, sin):
    h = x + grouped_query(hw.rms_norm(x, n1), wq, wk, wv, wo, cos, sin)
    return h + swiglu(hw.rms_norm(h, n2), wg, wu, wd)


@hw.fusion(mesh=mesh, x=WHOLE, **GPT)
def gpt_tp(x, wq, wk, wv, wo, w1, w2, n1, b1, n2, b2, bo, bm, seed):
    return gpt(x, wq, wk, wv, wo, w1, w2, n1, b1, n2, b2, bo, bm, seed)


@hw.fusion(mesh=mesh, x=SHARED, **GPT)
def gpt_sp(x, wq, wk, wv, wo, w1, w2, n1, b1, n2, b2, bo, bm, seed):
    return gpt(x, wq, wk, wv, wo, w1, w2, n1, b1, n2, b2, bo, bm, seed)


@hw.fusion(mesh=mesh, x=WHOLE, **LLAMA)
def llama_tp(x, wq, wk, wv, wo, wg, wu, wd, n1, n2, cos, sin):
    return llama(x, wq, wk, wv, wo, wg, wu, wd, n1, n2, cos, sin)


@hw.fusion(mesh=mesh, x=SHARED, **LLAMA)
def llama_sp(x, wq, wk, wv, wo, wg, wu, wd, n1, n2, cos, sin):
    return llama(x, wq, wk, wv, wo, wg, wu, wd, n1, n2, cos, sin)


# --- backward: reductions of weight gradients over dp overlap with computation ----------------------------------------


def gelu_slope(h):
    return 0.5 * (1 + hw.erf(h * sqrt(0.5))) + h * hw.exp(h * h * -0.5) * (1 / sqrt(2 * pi))


@hw.fusion(mesh=mesh, x=dtype[T, "K"], w=dtype["K", "N@tp"], dy=dtype[T, "N@tp"])
def linear_columns_backward(x, w, dy):
    dw = hw.matmul(x.T, dy)
    db = hw.sum(dy, axis=0)
    return hw.matmul(dy, w.T), dw, db


@hw.fusion(mesh=mesh, x=dtype[T, "K@tp"], w=dtype["K@tp", "N"], dy=dtype[T, "N"])
def linear_rows_backward(x, w, dy):
    dw = hw.matmul(x.T, dy)
    db = hw.sum(dy, axis=0)
    return hw.matmul(dy, w.T), dw, db


def mlp_gradients(x, h, w1, w2, dy):
    """Gradients of x, w1 and w2 of an MLP. `h` is the product of x and w1."""
    dw2 = hw.matmul(hw.gelu(h).T, dy)
    dh = hw.matmul(dy, w2.T) * gelu_slope(h)
    dw1 = hw.matmul(x.T, dh)
    return hw.matmul(dh, w1.T), dw1, dw2


@hw.fusion(mesh=mesh, x=dtype[T, "E"], h=dtype[T, "F@tp"], **MLP, dy=dtype[T, "E"])
def mlp_backward_tp(x, h, w1, w2, dy):
    return mlp_gradients(x, h, w1, w2, dy)


@hw.fusion(mesh=mesh, x=dtype[TS, "E"], h=dtype[T, "F@tp"], **MLP, dy=dtype[TS, "E"])
def mlp_backward_sp(x, h, w1, w2, dy):
    dx, dw1, dw2 = mlp_gradients(x, h, w1, w2, dy)
    return hw.reshard(dx, TS, "E"), dw1, dw2


@hw.fusion(mesh=mesh, x=dtype[T, "E"], g=dtype[T, "F@tp"], u=dtype[T, "F@tp"], **SWIGLU, dy=dtype[T, "E"])
def swiglu_backward_tp(x, g, u, wg, wu, wd, dy):
    s = hw.sigmoid(g)
    dwd = hw.matmul((g * s * u).T, dy)
    da = hw.matmul(dy, wd.T)
    du = da * (g * s)
    dwu = hw.matmul(x.T, du)
    dg = da * u * (s * (1 + g * (1 - s)))
    dwg = hw.matmul(x.T, dg)
    return hw.matmul(dg, wg.T) + hw.matmul(du, wu.T), dwg, dwu, dwd
