"""One fusion for each group of features: indices, joined tensors, 8-bit floats, random numbers, sorts, layers, groups."""

import hostweave as hw

D = 8
dtype = hw.bf16
mesh = hw.Mesh(x=D)


@hw.fusion(
    mesh=mesh,
    table=dtype["V@x", 4],
    ids=hw.i32["T"],
    at=hw.i64["T", 4],
    x=dtype["T", 4],
    first=hw.i32[()],
    cache=dtype["T", 6],
    donate="cache",
)
def indices(table, ids, at, x, first, cache):
    """Lookups in a sharded table, gathers, sums at indices, and a slice and a cache update that start at an index from an input."""
    found = hw.embedding(ids, table)
    moved = hw.take_along_axis(x, hw.remainder(at, 2), 1)
    added = hw.scatter_add(x, 1, hw.remainder(at, 3), found)
    return moved + found, hw.dynamic_slice(added, (0, first), ("T", 2)), hw.dynamic_update_slice(cache, x, (0, first))


@hw.fusion(mesh=mesh, x=dtype["M@x", 4], y=dtype["M@x", 3], z=dtype["M", "K@x"])
def joined(x, y, z):
    """Concats, pads and slices along unsharded dims of sharded tensors, and a concat of resharded tensors."""
    both = hw.concat([x * 2, hw.tanh(y), x[:, ::2]], axis=1)
    padded = hw.pad(both, (1, 2), value=0.5)
    return padded[:, :6] - padded[:, 6:], hw.concat([hw.reshard(z, "M", "K"), hw.reshard(x, "M", 4)], axis=1)


@hw.fusion(mesh=mesh, x=hw.bf16["M@x", 256], w=hw.f8e4m3[64, 256], t=hw.f32[1, 64])
def scaled(x, w, t):
    """Rows quantised to 8 bits, gathered with their scales, and multiplied."""
    values, scales = hw.quantize(x, "row")
    return hw.scaled_matmul(hw.reshard(values, "M", 256), w.T, hw.reshard(scales, "M", 1), t, hw.f32)


@hw.fusion(mesh=mesh, x=dtype["M@x", 6], y=dtype["M", "K@x"], seed=hw.u32[()])
def random_numbers(x, y, seed):
    return hw.dropout(x, 0.25, seed, draw=1) + hw.astype(hw.uniform(x, seed, draw=2), dtype), hw.dropout(y, 0.5, seed, draw=3)


@hw.fusion(mesh=mesh, x=dtype["M@x", 6], y=dtype["M", "N@x"])
def orders(x, y):
    """Sorted rows, the largest elements with indices, cumulative sums, and maxima with indices over a sharded dim."""
    values, places = hw.top_k(x, 2)
    return hw.sort(x, axis=1, descending=True), values, places, hw.cumsum(x, axis=1), hw.max(y, axis=1), hw.argmax(y, axis=1)


@hw.block(x=dtype["M@x", 4], w=dtype[4, 4], b=dtype[4])
def one_layer(x, w, b):
    h = hw.silu(x @ w + b)
    return x + h, h


@hw.fusion(mesh=mesh, x=dtype["M@x", 4], **{f"{name}_{i}": dtype[4, 4] if name == "w" else dtype[4] for i in range(5) for name in "wb"})
def repeated(x, **given):
    first = None
    for i in range(5):
        x, h = one_layer(x, given[f"w_{i}"], given[f"b_{i}"])
        first = h if first is None else first
    return x, first - h


@hw.fusion(mesh=mesh, x=dtype["T", 4], w=dtype[f"{2 * D}@x", 4, 6], ends=hw.i32[2 * D])
def grouped(x, w, ends):
    """Groups of rows, whose ends are an input. Each group is multiplied by a separate matrix, which only one rank has."""
    return hw.grouped_matmul(x, w, ends)
