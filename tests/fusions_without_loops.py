"""Programs with communication outside chunk loops."""

import hostweave as hw

D = 8  # ranks
mesh = hw.Mesh(x=D)
dtype = hw.bf16


@hw.fusion(mesh=mesh, x=dtype["M@x", "K"], y=dtype["M", "K@x"], w=dtype[16 * D, 16 * D], v=dtype["K@x", 16 * D])
def exchanges(x, y, w, v):
    gathered = hw.reshard(hw.relu(x), "M", "K")  # This gathers a computed value, which is in a window.
    columns = hw.reshard(y, "M", "K")  # This gathers an input along its inner dim.
    turned = hw.reshard(x, "M", "K@x")  # This is an all_to_all.
    scattered = hw.reshard(hw.matmul(x.T, x), "K", "K@x")  # This is a reduce_scatter along the inner dim.
    summed = hw.matmul(hw.clip(w[0:8, :], -1, 0), hw.reshard(hw.matmul(y, v), "M", 16 * D).T)  # This is an all_reduce.
    largest = hw.max(x, axis=0)
    return gathered, columns, turned, scattered, summed, largest


rows, columns = 3 * D - 1, 2 * D - 1  # Sizes are uneven: the last rank has one index less than the other ranks.


@hw.fusion(mesh=mesh, x=dtype[f"{rows}@x", "K"], y=dtype[columns, "K@x"], v=dtype["K@x", columns], z=hw.i32[f"{rows}@x", f"{columns}"])
def uneven(x, y, v, z):
    gathered = hw.reshard(hw.relu(x), rows, "K")
    turned = hw.reshard(x, rows, "K@x")
    scattered = hw.reshard(hw.matmul(y, v), columns, f"{columns}@x")
    both = hw.reshard(z, rows, f"{columns}@x")
    return gathered, turned, scattered, both, hw.reshard(turned, f"{rows}@x", "K")


@hw.fusion(mesh=mesh, x=dtype["M@x", "N"], k=hw.f32[64 * D, "L@x"], v=hw.f32["L@x", 64 * D], b=hw.i32["M@x"])
def permutes(x, k, v, b):
    shifted = hw.collective_permute(x, "M", [None, *range(D - 1)])  # A rank without a source gets zeros.
    around = hw.collective_permute(hw.relu(x), "M", [(rank + 1) % D for rank in range(D)])
    swapped = hw.collective_permute(x, "M", [rank ^ 1 if rank ^ 1 < D else rank for rank in range(D)])
    # The partial sums of the matmul are reduced in two steps. The terms of the xor are gathered.
    return shifted, around, swapped, hw.matmul(k, v), hw.reduce_xor(b)


@hw.fusion(mesh=hw.Mesh(dp=2, tp=D), x=dtype["M@dp", "K@tp"], w=dtype["K@tp", "N"])
def two_axes(x, w):
    y = hw.reshard(hw.matmul(x, w), "M@dp", "N@tp")  # This is a reduce_scatter along tp.
    return hw.reshard(y, "M", "N"), hw.sum(y, axis=(0, 1))  # There are gathers along dp and tp, and an all-reduce along both.


@hw.block(x=dtype["M@x", "E"], w_in=dtype["E", "F@x"], w_out=dtype["F@x", "E"])
def sequence_parallel(x, w_in, w_out):
    h = hw.clip(hw.matmul(hw.reshard(x, "M", "E"), w_in), -1, 1)
    return hw.clip(x + hw.reshard(hw.matmul(h, w_out), "M@x", "E"), -1, 1)


@hw.fusion(mesh=mesh, x=dtype["M@x", "E"], w_in=dtype["E", "F@x"], w_out=dtype["F@x", "E"])
def two_layers(x, w_in, w_out):
    return sequence_parallel(sequence_parallel(x, w_in, w_out), w_in, w_out)  # A loop calls the function twice.


half, rest = mesh.ranks(range((D + 1) // 2)), mesh.ranks(range((D + 1) // 2, D)) if D > 1 else mesh.ranks([0])
both = mesh.ranks([0, 1]) if D > 1 else mesh.ranks([0])


@hw.fusion(mesh=mesh, x=dtype["M", "K"].on(half), w=dtype["K", "N@x"].on(half), v=dtype["N", "K@x"].on(rest))
def stages(x, w, v):
    y = x
    for _ in range(2):  # The tensor moves to the mesh `rest` and back.
        h = hw.clip(hw.matmul(y, w), -1, 1)
        there = hw.reshard(h, "M", "N@x", mesh=rest)
        z = hw.reshard(hw.matmul(hw.reshard(there, "M", "N"), v), "M", "K")
        y = hw.clip(hw.reshard(z, "M", "K", mesh=half), -1, 1)
    return y, hw.reshard(y, "M", "K", mesh=both), hw.reshard(x, "M", "K@x", mesh=mesh)
