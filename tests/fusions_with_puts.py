"""Programs in which ranks access each other's memory."""

import hostweave as hw

D = 8  # ranks
mesh = hw.Mesh(x=D)
dtype = hw.bf16


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], w=dtype["K", "N"])
def ag_matmul_put(x, w):
    return hw.matmul(x, w).stream("M", chunks=D, algorithm="put")  # Ranks put x. Peers cannot get x, because an input is not in a window.


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], w=dtype["K", "N"])
def ag_matmul_pull(x, w):
    h = hw.relu(x).named("h")  # Peers read h in place.
    return hw.matmul(h, w).stream("M", chunks=2 * D, algorithm="put")


@hw.fusion(mesh=mesh, x=dtype["M", "K@x"], w=dtype["K@x", "N"])
def matmul_rs_put(x, w):
    return hw.reshard(hw.matmul(x, w), "M@x", "N").stream("M", chunks=D, algorithm="put")


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], w_in=dtype["K", "F@x"], w_out=dtype["F@x", "E"])
def mlp_put(x, w_in, w_out):
    h = hw.clip(hw.matmul(x, w_in).stream("M", chunks=D, algorithm="put"), -1, 1).named("h")
    return hw.reshard(hw.matmul(h, w_out), "M@x", "E").stream("M", chunks=2 * D, algorithm="put")


@hw.fusion(mesh=mesh, x=dtype["M", "K@x"], w=dtype["K@x", "N"], v=dtype["N@x", "E"])
def columns_put(x, w, v):
    y = hw.reshard(hw.matmul(x, w), "M", "N@x").stream("N", chunks=2 * D, algorithm="put")  # The columns are not contiguous.
    return hw.matmul(hw.reshard(hw.clip(y, -1, 1), "M@x", "N"), hw.reshard(v, "N", "E"))  # After the clip, sums are exact in bf16.


@hw.fusion(mesh=mesh, x=dtype["M@x", "E"], h=dtype["M", "K@x"], w=dtype["K@x", "E"])
def residual_put(x, h, w):
    """One kernel adds the terms of the reduce-scatter and the residual, and reduces rows."""
    y = hw.clip(x + hw.reshard(hw.matmul(h, w), "M@x", "E").stream("M", chunks=2 * D, algorithm="put"), -64, 64)
    return y - hw.max(y, axis=1, keepdims=True)


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], w=dtype["K", "N"])
def ag_pieces_put(x, w):
    return hw.matmul(x, w).stream("M", chunks=2 * D, algorithm="put")  # There are two chunks per shard, so each peer receives two puts.
