"""AdamW (Loshchilov and Hutter, 2019) in one kernel. Weights and moments are donated, and the moments are updated in place.

The stages of ZeRO (Rajbhandari et al., 2020) are shardings: stage 1 shards the moments, stage 2 also the gradients, and FSDP also the
weights. Row `i` of `g` is the gradient of rank `i`. The rows are all-reduced, or reduce-scattered if gradients are sharded. The kernel
updates sharded weights in place. If weights are replicated, the kernel writes a shard of the weights to a temporary, and an all_gather
updates the weights.
"""

import hostweave as hw

ZERO = {"zero_1": ("N", "N"), "zero_2": ("N", "N@dp"), "fsdp": ("N@dp", "N@dp")}  # shardings of the weights and of the gradients
BETAS = (0.9, 0.999)


def adamw(ranks, stage, eps=1e-8):
    """Returns the fusion of one step: `f(w, m, v, g, **rates(step))` returns the new w, m and v."""
    weights, gradients = ZERO[stage]

    @hw.fusion(
        mesh=hw.Mesh(dp=ranks),
        donate=("w", "m", "v"),
        w=hw.f32[weights],
        m=hw.f32["N@dp"],
        v=hw.f32["N@dp"],
        g=hw.f32[f"{ranks}@dp", "N"],
        rate=hw.f32[()],
        scale=hw.f32[()],
        decay=hw.f32[()],
    )
    def adamw_step(w, m, v, g, rate, scale, decay):
        g = hw.reshard(hw.sum(g, axis=0), gradients) / ranks
        m_new = BETAS[0] * m + (1 - BETAS[0]) * g
        v_new = BETAS[1] * v + (1 - BETAS[1]) * (g * g)
        return w * decay - rate * m_new / (hw.sqrt(v_new) * scale + eps), m_new, v_new

    return adamw_step


def rates(step, lr=1e-3, weight_decay=1e-2):
    """Three coefficients for step number `step`, from 1 on. The coefficients are inputs of the program, so that a schedule can change
    them."""
    rate, scale = lr / (1 - BETAS[0] ** step), (1 - BETAS[1] ** step) ** -0.5
    return {"rate": rate, "scale": scale, "decay": 1 - lr * weight_decay}
