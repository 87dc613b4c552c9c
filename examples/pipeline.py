"""Pipelines: the first half of the ranks computes the first layers, and the second half computes the remaining layers.

Each stage runs on a mesh of some of the ranks. A result is on the mesh of its operands. A reshard moves a result to another mesh.
"""

import hostweave as hw

D = 8  # ranks
S = 4  # micro-batches
mesh = hw.Mesh(x=D)
first, second = mesh.ranks(range(D // 2)), mesh.ranks(range(D // 2, D))
dtype = hw.bf16


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"].on(first), w1=dtype["K", "N"].on(first), w2=dtype["N", "K"].on(second))
def two_stages(x, w1, w2):
    h = hw.relu(hw.matmul(x, w1)).named("h")
    arrived = hw.reshard(h, "M@x", "N", mesh=second).named("arrived")  # rank i of `first` sends its rows to rank i of `second`
    return hw.matmul(arrived, w2)


@hw.fusion(
    mesh=mesh,
    x=dtype["M", "K"].on(first),
    up1=dtype["K", "N@x"].on(first),  # weights are sharded over the ranks of their stage
    down1=dtype["N@x", "K"].on(first),
    up2=dtype["K", "N@x"].on(second),
    down2=dtype["N@x", "K"].on(second),
)
def two_stages_streamed(x, up1, down1, up2, down2):
    h = hw.relu(hw.matmul(x, up1).stream("M", chunks=S)).named("h").stream("M", chunks=S)
    layer = hw.reshard(hw.matmul(h, down1), "M", "K").named("layer").stream("M", chunks=S)
    arrived = hw.reshard(layer, "M", "K", mesh=second).named("arrived").stream("M", chunks=S)  # pipelined by micro-batch
    g = hw.relu(hw.matmul(arrived, up2).stream("M", chunks=S)).named("g").stream("M", chunks=S)
    return hw.reshard(hw.matmul(g, down2), "M", "K").stream("M", chunks=S)
