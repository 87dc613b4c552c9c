"""Reference for `examples/transformer.py` in NumPy and float64: forward passes, and gradients of linears and MLPs."""

from __future__ import annotations

from math import erf, pi, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostweave.fusion_ir.ops.pointwise import philox

Array = NDArray[np.float64]

DROPPED = 0.1
_erf = np.vectorize(erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    return x / 2 * (1 + _erf(x / sqrt(2)))


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    result: Array = powers / powers.sum(-1, keepdims=True)
    return result


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias


def rms_norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def dropout(x: Array, seed: int, draw: int) -> Array:
    """Dropout of x [S, B, E]. The Philox counter of an element is its index."""
    drawn = philox(np, *np.ogrid[tuple(slice(size) for size in x.shape)], 0, seed, draw)
    return np.where(drawn >= DROPPED, x / (1 - DROPPED), 0.0)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding. Rotates complex numbers: the real parts are the first half of a head, and the imaginary parts are the second
    half."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * (cos + 1j * sin)
    return np.concatenate([turned.real, turned.imag], -1)


def attended(q: Array, k: Array, v: Array) -> Array:
    """Causal attention. Each head of k and v, [B, G, S, D], belongs to a group of heads of q."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) / sqrt(q.shape[-1])
    return softmax(np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf)) @ v


def heads(x: Array, w: Array, size: int) -> Array:
    projected = x @ w
    return projected.reshape(*x.shape[:2], -1, size).transpose(1, 2, 0, 3)


def projected(x: Array, wo: Array) -> Array:
    rows, columns = x.shape[2], x.shape[0]
    return x.transpose(2, 0, 1, 3).reshape(rows, columns, -1) @ wo


class Reference:
    """Each method computes programs of the same name, also with the suffix `_tp` or `_sp`. `size` is the number of elements of a head."""

    def __init__(self, size: int):
        self.size = size

    def mlp(self, x: Array, w1: Array, w2: Array) -> Array:
        return gelu(x @ w1) @ w2

    def swiglu(self, x: Array, wg: Array, wu: Array, wd: Array) -> Array:
        return (silu(x @ wg) * (x @ wu)) @ wd

    def multi_head(self, x: Array, wq: Array, wk: Array, wv: Array, wo: Array) -> Array:
        return projected(attended(*(heads(x, w, self.size) for w in (wq, wk, wv))), wo)

    def grouped_query(self, x: Array, wq: Array, wk: Array, wv: Array, wo: Array, cos: Array, sin: Array) -> Array:
        q, k = (rotated(heads(x, w, self.size), cos, sin) for w in (wq, wk))
        return projected(attended(q, k, heads(x, wv, self.size)), wo)

    def gpt(self, x: Array, *, w1: Array, w2: Array, seed: Any, **p: Array) -> Array:
        normed = layer_norm(x, p["n1"], p["b1"])
        h = x + dropout(self.multi_head(normed, p["wq"], p["wk"], p["wv"], p["wo"]) + p["bo"], int(seed), 0)
        return h + dropout(self.mlp(layer_norm(h, p["n2"], p["b2"]), w1, w2) + p["bm"], int(seed), 1)

    def llama(self, x: Array, **p: Array) -> Array:
        h = x + self.grouped_query(rms_norm(x, p["n1"]), *(p[name] for name in ("wq", "wk", "wv", "wo", "cos", "sin")))
        return h + self.swiglu(rms_norm(h, p["n2"]), p["wg"], p["wu"], p["wd"])

    def linear_columns_backward(self, x: Array, w: Array, dy: Array) -> tuple[Array, ...]:
        return dy @ w.T, x.T @ dy, dy.sum(0)

    linear_rows_backward = linear_columns_backward

    def mlp_backward(self, x: Array, h: Array, w1: Array, w2: Array, dy: Array) -> tuple[Array, ...]:
        slope = (1 + _erf(h / sqrt(2))) / 2 + h * np.exp(-(h**2) / 2) / sqrt(2 * pi)
        dh = dy @ w2.T * slope
        return dh @ w1.T, x.T @ dh, gelu(h).T @ dy

    def swiglu_backward(self, x: Array, g: Array, u: Array, wg: Array, wu: Array, wd: Array, dy: Array) -> tuple[Array, ...]:
        s, da = 1 / (1 + np.exp(-g)), dy @ wd.T
        dg, du = da * u * s * (1 + g * (1 - s)), da * g * s
        return dg @ wg.T + du @ wu.T, x.T @ dg, x.T @ du, (g * s * u).T @ dy
