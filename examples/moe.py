"""A mixture of experts whose tokens and experts are sharded over `ep`: routing, dispatch, experts, combine, and the backward pass.

TOP of EXPERTS experts process each token. The number of tokens of an expert is computed on the device, and the host never reads this
number. No token is dropped. Experts are SwiGLU MLPs, whose gate and up projections are one product. The bias of an expert affects only
which experts are chosen, as in DeepSeek-V3 (arXiv:2412.19437, 2.1.2).
"""

import hostweave as hw

mesh = hw.Mesh(ep=4)
T = "T@ep"  # tokens; "T@dp,ep" on a mesh with an axis dp
EXPERTS = 8
TOP = 2
dtype = hw.bf16
E = f"{EXPERTS}@ep"
INNER = "I"  # inner dim of the experts; "I@tp" on a mesh with an axis tp
LAYER = {"router": dtype["H", EXPERTS], "bias": hw.f32[EXPERTS], "w1": dtype[E, "H", 2, INNER], "w2": dtype[E, INNER, "H"]}


def routed(x, router, bias):
    """Scores of all experts, then index, score and weight of the chosen experts. The weights of a token sum to 1."""
    scores = hw.softmax(hw.astype(hw.matmul(x, router), hw.f32))
    _, experts = hw.top_k(scores + bias, TOP)
    chosen = hw.take_along_axis(scores, experts, axis=1)
    return scores, experts, chosen, chosen / hw.sum(chosen, axis=1, keepdims=True)


def of_ranks(w):
    """Reshapes the matrices of experts [E, K, ...] to [R, E/R, K, N], with a dim for the ranks."""
    ranks = mesh.axis_size("ep")
    return hw.reshape(w, ranks, EXPERTS // ranks, w.shape[1], -1)


def halves(x):
    """Splits the result of the gate and up projections [R, rows, 2*I] into two tensors [R, rows, I]."""
    parts = hw.reshape(x, *x.shape[:2], 2, "I")
    return parts[:, :, 0], parts[:, :, 1]


def turned(w):
    return hw.permute_dims(w, (0, 1, 3, 2))


@hw.fusion(mesh=mesh, x=dtype[T, "H"], **LAYER)
def moe(x, router, bias, w1, w2):
    _, experts, _, weights = routed(x, router, bias)
    routing = hw.moe_routing(experts, EXPERTS, axes="ep")
    gate, up = halves(hw.grouped_matmul(hw.moe_dispatch(x, routing), of_ranks(w1), routing.ends))
    y = hw.grouped_matmul(hw.silu(gate) * up, of_ranks(w2), routing.ends)
    return hw.moe_combine(y, routing, weights)


def differentiated(x, dy, router, bias, w1, w2):
    """The layer's result, and the gradients of x, the router and the matrices of the experts."""
    scores, experts, chosen, weights = routed(x, router, bias)
    routing = hw.moe_routing(experts, EXPERTS, axes="ep")
    rows, w1, w2 = hw.moe_dispatch(x, routing), of_ranks(w1), of_ranks(w2)
    gate, up = halves(hw.grouped_matmul(rows, w1, routing.ends))
    h = hw.silu(gate) * up
    y = hw.grouped_matmul(h, w2, routing.ends)

    # Combine is the transpose of dispatch.
    given = hw.moe_dispatch(dy, routing, weights)
    dw2 = hw.grouped_matmul(hw.permute_dims(h, (0, 2, 1)), given, routing.ends)
    dh = hw.grouped_matmul(given, turned(w2), routing.ends)
    sigmoid = hw.sigmoid(gate)
    both = hw.concat([dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * gate * sigmoid], axis=2)
    dw1 = hw.grouped_matmul(hw.permute_dims(rows, (0, 2, 1)), both, routing.ends)
    dx = hw.moe_combine(hw.grouped_matmul(both, turned(w1), routing.ends), routing)

    # Gradients of the router, backward through the weights w = c / sum(c), the softmax and the matmul.
    wide = hw.astype(y, hw.f32) * hw.astype(hw.moe_dispatch(dy, routing), hw.f32)
    dweights = hw.moe_return(hw.sum(wide, axis=2, keepdims=True), routing)[:, :, 0]
    dchosen = (dweights - hw.sum(dweights * weights, axis=1, keepdims=True)) / hw.sum(chosen, axis=1, keepdims=True)
    dscores = hw.sum(dchosen[:, :, None] * hw.one_hot(experts, EXPERTS, hw.f32), axis=1)
    dlogits = hw.astype(scores * (dscores - hw.sum(dscores * scores, axis=1, keepdims=True)), x.dtype)
    return hw.moe_combine(y, routing, weights), (
        dx + hw.matmul(dlogits, router.T),
        hw.matmul(x.T, dlogits),
        hw.reshape(dw1, EXPERTS, "H", 2, "I"),
        hw.reshape(dw2, EXPERTS, "I", "H"),
    )


@hw.fusion(mesh=mesh, x=dtype[T, "H"], dy=dtype[T, "H"], **LAYER)
def moe_backward(x, dy, router, bias, w1, w2):
    """The gradients. The forward pass is recomputed, as in activation checkpointing."""
    _, gradients = differentiated(x, dy, router, bias, w1, w2)
    return gradients


@hw.fusion(mesh=mesh, x=dtype[T, "H"], dy=dtype[T, "H"], **LAYER)
def moe_training(x, dy, router, bias, w1, w2):
    """The result and the gradients. The backward pass reuses values of the forward pass."""
    y, gradients = differentiated(x, dy, router, bias, w1, w2)
    return y, *gradients
