"""Loops on one device: each iteration computes one slice, and iterations use the streams round-robin.

`allreduce_rows` runs on eight devices. In each iteration, a kernel of each rank adds up rows, and the sums of all ranks are all-reduced.
"""

import hostweave as hw

D = 8  # mesh size of allreduce_rows
S = 3  # stream chunks
mesh = hw.Mesh(x=1)
dtype = hw.bf16


@hw.fusion(mesh=mesh, x=dtype["M", "N"])
def set(x):
    return hw.copy(x).stream("M", chunks=S)


@hw.fusion(mesh=mesh, a=dtype["M", "N"], b=dtype["M", "N"])
def add(a, b):
    return (a + b).stream("M", chunks=S)


@hw.fusion(mesh=mesh, x=dtype["M", "N"])
def row_sum(x):
    return hw.sum(x, axis="N").stream("M", chunks=S)


@hw.fusion(mesh=mesh, x=dtype["M", "K"], w=dtype["K", "N"])
def matmul_m(x, w):
    return hw.matmul(x, w).stream("M", chunks=S)


@hw.fusion(mesh=mesh, x=dtype["M", "K"], w=dtype["K", "N"])
def matmul_n(x, w):
    return hw.matmul(x, w).stream("N", chunks=S)


@hw.fusion(mesh=mesh, x=dtype["B", "M", "K"], w=dtype["K", "N"])
def matmul_batch(x, w):
    return hw.matmul(x, w).stream("B")  # without chunks: one iteration per index


@hw.fusion(mesh=mesh, x=dtype["M", "N"])
def two_ops(x):
    h = hw.negative(x).stream("M", chunks=S).named("h")
    return (h * x).stream("M", chunks=S)  # the same loop: step i needs only step i of h


@hw.fusion(mesh=mesh, x=dtype["M", "N"])
def three_ops(x):
    a = hw.negative(x).stream("M", chunks=S).named("a")
    b = (a * x).named("b")  # not streamed: between two loops
    return (b + x).stream("M", chunks=S)


@hw.fusion(mesh=hw.Mesh(x=D), x=dtype["R@x", "N"])
def allreduce_rows(x):
    return hw.sum(x, axis="R").stream("N", chunks=S)
