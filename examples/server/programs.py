"""The two programs of the server: the first and the second half of an MLP, with weights that are sharded over two ranks.

hostweave export examples/server/programs.py:hidden build/hidden
hostweave export examples/server/programs.py:project build/project
"""

import hostweave as hw

TP = 2  # ranks

mesh = hw.Mesh(tp=TP)


@hw.fusion(mesh=mesh, x=hw.f32["M", "D"], up=hw.f32["D", "H@tp"])
def hidden(x, up):
    return hw.relu(hw.matmul(x, up))  # each rank computes a shard of the columns; the relu is the epilogue of the product


@hw.fusion(mesh=mesh, h=hw.f32["M", "H@tp"], down=hw.f32["H@tp", "D"])
def project(h, down):
    return hw.reshard(hw.matmul(h, down), "M", "D")  # all-reduce
