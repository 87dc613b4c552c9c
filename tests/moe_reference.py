"""Reference of examples/moe.py: a mixture of experts on one device, token by token. Also inputs with several kinds of routing."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
T, H, INNER, TOP = 24, 6, 8, 2
ROUTINGS = ("learned", "one expert", "one rank", "the last rank gets none", "skewed")


def experts_of(ranks: int) -> int:
    return 6 if ranks == 3 else 8


def arrays(routing: str, ranks: int) -> dict[str, Array]:
    """Inputs whose biases cause this kind of routing."""
    random, experts = np.random.default_rng(len(routing)), experts_of(ranks)
    own = experts // ranks
    bias = np.zeros(experts, np.float32)
    if routing == "one expert":
        bias[[experts - 1, 0]] = 20, 10  # All tokens choose the same two experts.
    elif routing == "one rank":
        bias[: max(own, TOP)] = 10
    elif routing == "the last rank gets none":
        bias[experts - own :] = -10
    elif routing == "skewed":
        bias[:] = np.linspace(0, 0.3, experts)
    shapes = {"x": (T, H), "dy": (T, H), "router": (H, experts), "w1": (experts, H, 2, INNER), "w2": (experts, INNER, H)}
    return {name: random.standard_normal(shape) for name, shape in shapes.items()} | {"bias": bias}


def one_device(x: Array, dy: Array, router: Array, bias: Array, w1: Array, w2: Array) -> tuple[Array, tuple[Array, ...]]:
    """Result of the layer, and the gradients of x, the router and the weights, computed token by token."""
    logits = x @ router
    scores = np.exp(logits - logits.max(1, keepdims=True))
    scores /= scores.sum(1, keepdims=True)
    y, dx, dscores, dw1, dw2 = (np.zeros_like(of, dtype=np.float64) for of in (x, x, scores, w1, w2))
    for t in range(len(x)):
        chosen = np.argsort(-(scores[t].astype(np.float32) + bias), kind="stable")[:TOP]
        total = scores[t, chosen].sum()
        weights, dweights = scores[t, chosen] / total, np.zeros(TOP)
        for i, e in enumerate(chosen):
            gate, up = np.tensordot(x[t], w1[e], 1)
            sigmoid = 1 / (1 + np.exp(-gate))
            h = gate * sigmoid * up
            out = h @ w2[e]
            y[t] += weights[i] * out
            dweights[i] = out @ dy[t]
            dh = weights[i] * (w2[e] @ dy[t])
            dw2[e] += weights[i] * np.outer(h, dy[t])
            both = np.stack([dh * up * sigmoid * (1 + gate * (1 - sigmoid)), dh * gate * sigmoid])
            dw1[e] += np.multiply.outer(x[t], both)
            dx[t] += np.tensordot(w1[e], both, 2)
        dscores[t, chosen] = (dweights - dweights @ weights) / total
    dlogits = scores * (dscores - (dscores * scores).sum(1, keepdims=True))
    return y, (dx + dlogits @ router.T, x.T @ dlogits, dw1, dw2)
