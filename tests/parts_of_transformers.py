"""Parts of transformers with enough temporaries for memory planning. Each function of PROGRAMS takes the number of ranks and the dtype."""

from __future__ import annotations

import hostweave as hw
from hostweave.fusion_ir.ir import Fusion
from hostweave.types.tensor import DType

HEADS, HEAD = 8, 4  # number of heads, and elements of a head


def mlp(ranks: int, t: DType) -> Fusion:
    """Sequence-parallel MLP: tokens are gathered before the first linear layer, and the result of the second linear layer is
    reduce-scattered."""

    @hw.fusion(mesh=hw.Mesh(tp=ranks), x=t["S@tp", "E"], up=t["F@tp", "E"], bias=t["F@tp"], down=t["E", "F@tp"])
    def mlp(x, up, bias, down):  # type: ignore[no-untyped-def]
        h = hw.gelu(hw.linear(hw.reshard(x, "S", "E"), up, bias))
        return x + hw.reshard(hw.linear(h, down), "S@tp", "E")

    return mlp


def _attention(x, query, key, value, out):  # type: ignore[no-untyped-def]
    def heads(w):  # type: ignore[no-untyped-def]
        return hw.permute_dims(hw.reshape(hw.linear(x, w), "S", HEADS, HEAD), (1, 0, 2))

    attended = hw.scaled_dot_product_attention(heads(query), heads(key), heads(value), is_causal=True)
    return hw.linear(hw.reshape(hw.permute_dims(attended, (1, 0, 2)), "S", HEADS * HEAD), out)


def attention(ranks: int, t: DType) -> Fusion:
    inner = f"{HEADS * HEAD}@tp"

    @hw.fusion(mesh=hw.Mesh(tp=ranks), x=t["S", "E"], query=t[inner, "E"], key=t[inner, "E"], value=t[inner, "E"], out=t["E", inner])
    def attention(x, query, key, value, out):  # type: ignore[no-untyped-def]
        return hw.reshard(_attention(x, query, key, value, out), "S", "E")

    return attention


def layers(ranks: int, t: DType, count: int = 2) -> Fusion:
    """Tensor-parallel transformer layers that share one set of weights."""
    inner = f"{HEADS * HEAD}@tp"

    @hw.fusion(
        mesh=hw.Mesh(tp=ranks),
        x=t["S", "E"],
        scale=t["E"],
        shift=t["E"],
        query=t[inner, "E"],
        key=t[inner, "E"],
        value=t[inner, "E"],
        out=t["E", inner],
        up=t["F@tp", "E"],
        down=t["E", "F@tp"],
    )
    def layers(x, scale, shift, query, key, value, out, up, down):  # type: ignore[no-untyped-def]
        for _ in range(count):
            x = x + hw.reshard(_attention(hw.layer_norm(x, scale, shift), query, key, value, out), "S", "E")
            h = hw.gelu(hw.linear(hw.layer_norm(x, scale, shift), up))
            x = x + hw.reshard(hw.linear(h, down), "S", "E")
        return x

    return layers


PROGRAMS = (mlp, attention, layers)
