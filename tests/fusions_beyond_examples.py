"""Programs in the style of `examples/`, for features that the examples do not use."""

import hostweave as hw

D = 8  # ranks
mesh = hw.Mesh(x=D)
dtype = hw.bf16


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], w=dtype["K", "N"])
def ag_matmul_flat_chunked(x, w):
    return hw.matmul(x, w).stream("M", chunks=2 * D)  # There are two chunks per shard.


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], w=dtype["K", "N"])
def ag_matmul_broadcast(x, w):
    return hw.matmul(x, w).stream("M", chunks=D, algorithm="broadcast")  # The owner of a block sends the block to all ranks.


@hw.fusion(mesh=mesh, x=dtype["M", "K@x"], w=dtype["K@x", "N"])
def matmul_ar_unstreamed(x, w):
    return hw.matmul(x, w)  # All work is on the caller's stream.


@hw.fusion(mesh=mesh, x=dtype["M@x", "N"], b=dtype["N"])
def two_outputs(x, b):
    y = (x + b).named("y")
    return y, hw.sum(y, axis="N").named("z")


@hw.fusion(mesh=hw.Mesh(dp=2, tp=D), x=dtype["M@dp", "K@tp"], w=dtype["K@tp", "N"])
def matmul_ar_two_axes(x, w):
    return hw.reshard(hw.matmul(x, w), "M@dp", "N").stream("N", chunks=2)  # Each half of the rows has a separate process group.


@hw.fusion(mesh=hw.Mesh(dp=2, tp=D), x=dtype["M@dp", "K@tp"], w=dtype["K@tp", "N"])
def matmul_ar_ag(x, w):
    return hw.reshard(hw.matmul(x, w), "M", "N").stream("M", chunks=3)  # The communications on the two channels are serialised.


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], w=dtype["K", "N"], v=dtype["M@x", "L"])
def ag_matmul_beside_sums(x, w, v):
    y = hw.matmul(x, w).stream("M", chunks=D)
    return y, hw.sum(x, axis=0).named("s"), hw.sum(v, axis=0).named("t")  # The sums overlap with the loop, and share an NCCL group.


WEIGHTS = {"w_in": dtype["E", "F@x"], "w_out": dtype["F@x", "E"]}


@hw.block(x=dtype["M@x", "E"], **WEIGHTS)
def layer(x, w_in, w_out):
    h = hw.clip(hw.matmul(x, w_in).stream("M", chunks=D), -1, 1).named("h")
    scattered = hw.reshard(hw.matmul(h, w_out), "M@x", "E").stream("M", chunks=D).named("scattered")
    return hw.clip(x + scattered, -1, 1)


@hw.fusion(mesh=mesh, x=dtype["M", "E"], **{f"{name}_{i}": type for i in range(3) for name, type in WEIGHTS.items()})
def three_layers(x, **weights):
    for i in range(3):
        x = layer(x, **{name: weights[f"{name}_{i}"] for name in WEIGHTS})  # The program calls one function in a loop.
    return x


@hw.fusion(mesh=mesh, x=dtype["T@x", "K"], dy=dtype["T@x", "N"], w=dtype["K", "N"])
def gradients(x, dy, w):
    dw = hw.matmul(x.T, dy).named("dw")
    db = hw.sum(dy, axis=0).named("db")
    return hw.matmul(dy, w.T).named("dx"), dw, db  # dx is computed during the all-reduces of dw and db.


@hw.fusion(mesh=mesh, x=dtype["M@x", 8], w=dtype[8, 3])
def halves(x, w):
    h = hw.matmul(x, w).named("h")
    # One kernel writes all operands directly into the result.
    joined = hw.concat([x[:, 4:], -x[:, :4], h[:, ::2], h[:, 1:2]], axis=1)
    return joined, hw.pad(hw.relu(x[:, 1:3]), (1, 0), value=1)


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], w=dtype["K", "N"], v=dtype["N", "F@x"], u=dtype["F@x", "N"])
def two_loops(x, w, v, u):
    h = hw.matmul(x, w).stream("M", chunks=D)  # The second loop may reuse the buffer of gathered x.
    g = hw.clip(hw.matmul(h, v), -1, 1)
    return hw.reshard(hw.matmul(g, u), "M@x", "N").stream("M", chunks=D)


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], w=dtype["K", "N"], b=dtype["N"], r=dtype["M@x", "N"])
def epilogues(x, w, b, r):
    biased = (hw.matmul(x, w).stream("M", chunks=D) + b).stream("M", chunks=D)
    h = hw.relu(biased).stream("M", chunks=D).named("h")  # The loop has no kernel.
    s = (hw.matmul(x, w) * 0.5 + r).named("s")
    return h, s, hw.clip(s, -1, 1).named("c")  # The kernel of the clip reads s, which the matmul wrote.


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], gate=dtype["K", "F@x"], up=dtype["K", "F@x"], down=dtype["F@x", "K"])
def gated_in_loops(x, gate, up, down):
    g = hw.matmul(x, gate).stream("M", chunks=D)
    u = hw.matmul(x, up).stream("M", chunks=D)  # The matmul joins the loop of the gather.
    h = (hw.clip(g, -1, 1) * u).named("h")
    return hw.reshard(hw.matmul(h, down), "M@x", "K").stream("M", chunks=D)
