"""Philox 4x32-10 (Salmon et al., 2011), a counter-based generator: a number depends only on its global index and the key."""

from __future__ import annotations

from typing import Any

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox(np: Any, i: Any, j: Any, k: Any, m: Any, seed: Any, draw: Any) -> Any:
    """Uniform numbers in [0, 1), multiples of 2^-24: the first word of the counter (i, j, k, m) under the key (seed, draw)."""
    c0, c1, c2, c3, k0, k1 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in (i, j, k, m, seed, draw)))
    for _ in range(ROUNDS):
        left, right = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & WORD, (left >> 32) ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + INCREMENTS[0]) & WORD, (k1 + INCREMENTS[1]) & WORD
    return (c0 >> 8) * 2.0**-24
