"""Verifier rules of memory, views and local computation."""

from math import isfinite
from typing import Any

from hostweave.fusion_ir.ops.attention import ATTENTION_DTYPES, BOTTOM_RIGHT, KERNEL_HEADS, kernels_for, why_no_bias, why_no_offsets
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.fusion_ir.ops.grouped import why_not_grouped
from hostweave.fusion_ir.ops.reductions import why_no_product, widens
from hostweave.fusion_ir.ops.scaled import BLOCKS, RESULTS, scaling, why_no_scaled_product
from hostweave.fusion_ir.user_kernel import UserKernel
from hostweave.host_ir import ir, tree
from hostweave.host_ir.rules.checker import Checker, Rule, Scope
from hostweave.host_ir.size_requirements import slack
from hostweave.types.size import LocalSize, Size
from hostweave.types.tensor import MAX_DIMS, BufferType, f32, i32, is_matrix, strides_of


def _allocate(c: Checker, i: ir.Allocate, scope: Scope) -> None:
    if unknown := next(filter(None, map(c.unknown, i.type.shape)), None):
        c.fail(f"{unknown} is not a size of any input or output")
    c.types[i.out] = i.type
    c.allocated.add(i.out)
    if i.in_window:
        c.windows.add(i.out)
        if c.mesh != c.program.mesh:
            c.fail(f"only {c.mesh} allocates the window, so its offset would differ between ranks: allocate it on all ranks")
        if any(isinstance(atom, LocalSize) for size in i.type.shape for atom in c.known(size).atoms):
            c.fail(
                f"the size of %{i.out} may differ between ranks, so the window's offset would differ: use sizes that the ranks split evenly"
            )


def _deallocate(c: Checker, i: ir.Deallocate, scope: Scope) -> None:
    if (root := c.roots.of(i.src)) != i.src:
        c.fail(f"%{i.src} is a view: deallocate %{root}")
    if i.src in c.inputs or any(p.name == i.src for p in c.program.outputs):
        c.fail(f"%{i.src} belongs to the caller: deallocate only buffers of this program")
    if i.src not in c.allocated:
        c.fail(f"%{i.src} is allocated outside of this loop or branch: deallocate it there, to free it once on each rank")
    c.freed.add(i.src)


def _view(c: Checker, i: ir.View, scope: Scope) -> None:
    source = c.types[i.src]
    if (dim := getattr(i, "dim", -1)) >= len(source.shape):
        c.fail(f"%{i.src} is {source}: it has no dim {dim}")
    try:
        c.types.update(i.defined(c.types))
    except ValueError as error:
        c.fail(f"%{i.src} is {source}: {error}")
    outside = next((room for room in slack(i, source) if room.is_int and int(room) < 0), None)
    if outside is not None:
        c.fail(f"%{i.src} is {source}: {-int(outside)} of the indices are outside of dim {dim}")


PADDED = 4  # each row of scales of 128 x 128 blocks is padded to a multiple of PADDED


def lies_along(type: BufferType, dim: int) -> bool:
    return type.shape[dim] == Size() or strides_of(type)[dim] == Size()


def _scaled(c: Checker, i: ir.Matmul) -> None:
    if len(i.scales) != 2:
        c.fail(f"{len(i.scales)} scales are given, not 2: name the scales of %{i.a}, then those of %{i.b}")
    a, b, dst, *scales = (c.types[name] for name in (i.a, i.b, i.dst, *i.scales))
    if why := why_no_scaled_product(*(unsharded(type) for type in (a, b, *scales))):
        c.fail(why)
    if dst.dtype not in RESULTS or dst.shape != (a.shape[0], b.shape[1]):
        c.fail(f"%{i.dst} is {dst}, not [{a.shape[0]}, {b.shape[1]}] of {', '.join(map(str, RESULTS))}")
    if i.precision:
        c.fail(f"only products of f32 can be in tf32, and %{i.a} is {a}: leave tf32 out")
    for name, type, dim in ((i.a, a, 1), (i.b, b, 0), (i.dst, dst, 1)):
        if not lies_along(type, dim):
            c.fail(f"the elements of %{name} along dim {dim} are not contiguous: copy it to or from a contiguous buffer")
    has_blocks = scaling(a.shape, b.shape, *(type.shape for type in scales)) == BLOCKS
    for name, type, of, outer in zip(i.scales, scales, (a, b), (0, 1), strict=True):
        count, along = type.shape[outer], strides_of(type)
        if not has_blocks or count == of.shape[outer]:
            is_right = lies_along(type, outer) and (type.shape[1 - outer] == Size() or along[1 - outer] == count)
        else:
            inner = type.shape[1 - outer]
            is_whole = inner.divisor == 1 and inner.coefficient % PADDED == 0
            is_padded = along[outer] == (inner if is_whole else PADDED * inner.ceil_div(PADDED))
            is_right = lies_along(type, 1 - outer) and (count == Size() or is_padded)
        if not is_right:
            c.fail(f"the scales %{name} do not have a layout that cuBLASLt supports, row-major or column-major: copy them to such a buffer")


def _expect_finite_scale(c: Checker, i: ir.Matmul | ir.Attention | ir.AttentionBackward) -> None:
    if not isfinite(i.scale):
        c.fail(f"scaled {i.scale}: write a finite number")


def _matmul(c: Checker, i: ir.Matmul, scope: Scope) -> None:
    _expect_finite_scale(c, i)
    if i.scales:
        _scaled(c, i)
        _epilogue(c, i)
        return
    c.same_dtype(i.a, i.b, *(() if widens(c.types[i.a].dtype, c.types[i.dst].dtype) else (i.dst,)))
    dtype = c.types[i.a].dtype
    if dtype.kind in ("int", "uint"):
        c.fail(f"cuBLASLt has no product of {dtype} by {dtype} that gives {dtype}: launch a kernel that computes it")
    if why := why_no_product(dtype):
        c.fail(f"{why}: cast both before")
    a, b, dst = (c.types[name].shape for name in (i.a, i.b, i.dst))
    if min(len(a), len(b)) < 2:
        c.fail("both operands need at least two dims")
    if max(len(a), len(b)) > MAX_DIMS:
        c.fail(f"an operand has at most {MAX_DIMS} dims: reshape it")
    if a[-1] != b[-2]:
        c.fail(f"inner dims differ: {c.types[i.a]} x {c.types[i.b]}")
    batch = broadcast_shapes(a[:-2], b[:-2])
    if batch is None:
        c.fail(f"leading dims do not broadcast: {c.types[i.a]} x {c.types[i.b]}")
    if dst != (*batch, a[-2], b[-1]):
        c.fail(f"%{i.dst} is {c.types[i.dst]}, not {BufferType(c.types[i.dst].dtype, (*batch, a[-2], b[-1]))}")
    if scattered := next((name for name in (i.a, i.b, i.dst) if not is_matrix(c.types[name])), None):
        c.fail(f"neither the rows nor the columns of %{scattered} are contiguous: copy it to or from a contiguous buffer")
    if i.precision and i.precision != "tf32":
        c.fail(f"there is no precision {i.precision}: write tf32, or leave it out")
    if i.precision and c.types[i.a].dtype.name != "f32":
        c.fail(f"only products of f32 can be in tf32, and %{i.a} is {c.types[i.a]}: leave tf32 out")
    _epilogue(c, i)


def _grouped(c: Checker, i: ir.Grouped, scope: Scope) -> None:
    x, y, starts, ends, dst = (c.types[name] for name in (i.x, i.other, i.starts, i.ends, i.dst))
    if why := why_not_grouped(x, y, starts, ends, i.is_outer):
        c.fail(why)
    c.same_dtype(i.x, i.other, *(() if widens(x.dtype, dst.dtype) else (i.dst,)))
    wanted = (starts.shape[0], x.shape[1], y.shape[1]) if i.is_outer else (x.shape[0], y.shape[2])
    if dst.shape != wanted:
        c.fail(f"%{i.dst} is {dst}, not {BufferType(dst.dtype, wanted)}")
    c.contiguous(i.starts, i.ends, what=", but starts and ends of groups must be")
    for name in (i.x, i.dst, *((i.other,) if i.is_outer else ())):
        if not lies_along(c.types[name], -1):
            c.fail(f"the elements of a row of %{name} are not contiguous: copy it to or from a contiguous buffer")
    if not (lies_along(y, -1) or lies_along(y, -2)):
        c.fail(f"neither the rows nor the columns of the matrices of %{i.other} are contiguous: copy it to a contiguous buffer")


def _epilogue(c: Checker, i: ir.Matmul) -> None:
    """Checks the buffers of the epilogue, and that cuBLASLt supports the epilogue."""
    dst, a, b = c.types[i.dst], c.types[i.a], c.types[i.b]
    if len(i.accumulate) > 1 or len(i.bias) > 1:
        c.fail("at most one buffer and one bias can be added: add the others before")
    for name in i.accumulate:
        c.same_dtype(name, i.dst)
        c.same_shape(name, i.dst)
        if c.types[name] != dst:
            c.fail(f"the memory layouts of %{name} and %{i.dst} differ: copy %{name} to a buffer with the layout of %{i.dst}")
    for name in i.bias:
        wanted = BufferType(dst.dtype, dst.shape[-1:])
        c.expect_type(name, wanted, f"not {wanted}, one element for each column of %{i.dst}")
        c.contiguous(name, what=", but a bias must be")
    if i.activation and i.activation not in ir.ACTIVATIONS:
        c.fail(f"cuBLASLt has no {i.activation}, only {' and '.join(ir.ACTIVATIONS)}: launch a kernel after the matmul")
    if (i.bias or i.activation) and (why := why_no_epilogue(a, b, dst)):
        c.fail(f"cuBLASLt has no bias and no activation for this product, because {why}: launch a kernel after the matmul")


def why_no_epilogue(a: BufferType, b: BufferType, dst: BufferType) -> str:
    """Reason why a matmul cannot have a bias or an activation as its epilogue, or ""."""
    if dst.dtype.name == "f64":
        return "it is of f64"
    if a.dtype.itemsize == 1 and dst.dtype.name == "f32":
        return "cuBLASLt reads the bias of a product of 8-bit floats as bf16, and the result is f32"
    if len(b.shape) != 2:
        return "it is a batch of products"
    if not (_rows_follow(a) and _rows_follow(dst)):
        return "its rows are not consecutive"
    if strides_of(dst)[-1] != Size():
        return "the elements of a row are not contiguous"
    return ""


def _rows_follow(type: BufferType) -> bool:
    """True if the distance between consecutive rows in memory is the same everywhere, as in one matrix."""
    strides = strides_of(type)
    return all(outer == size * inner for outer, size, inner in zip(strides[:-2], type.shape[1:-1], strides[1:-1], strict=True))


def _attention(c: Checker, i: ir.Attention, scope: Scope) -> None:
    _attends(c, i, i.dst)
    if len(i.lse) > 1:
        c.fail("lse is one buffer: name one")
    if i.blind not in ("", "zeros"):
        c.fail(f"blind {i.blind}: write blind zeros, or remove it")
    _has(c, i.lse, BufferType(f32, c.types[i.q].shape[:-1]), "lse")


def _attention_backward(c: Checker, i: ir.AttentionBackward, scope: Scope) -> None:
    _attends(c, i, i.o, i.gradient, i.dq, i.dk, i.dv, *i.dbias)
    if len(i.dbias) > len(i.bias):
        c.fail("dbias needs one bias and one result: name one of each")
    pairs = *zip(i.dbias, i.bias, strict=False), (i.gradient, i.o), (i.dq, i.q), (i.dk, i.k), (i.dv, i.v)
    for name, like in pairs:
        if c.types[name].shape != c.types[like].shape:
            c.fail(f"%{name} is {c.types[name]}, and %{like} {c.types[like]}: a gradient must have the shape of its operand")
    _has(c, (i.lse,), BufferType(f32, c.types[i.q].shape[:-1]), "lse")


def _has(c: Checker, names: tuple[str, ...], wanted: BufferType, what: str) -> None:
    for name in names:
        if c.types[name] != wanted:
            c.fail(f"%{name} is {c.types[name]}, but {what} must be contiguous {wanted}: use such a buffer")


def _attends(c: Checker, i: ir.Attention | ir.AttentionBackward, result: str, *others: str) -> None:
    c.same_dtype(i.q, i.k, i.v, result, *others)
    _expect_finite_scale(c, i)
    q, k, v = (c.types[name].shape for name in (i.q, i.k, i.v))
    if c.types[i.q].dtype.name not in ATTENTION_DTYPES:
        c.fail(f"%{i.q} is {c.types[i.q]}: attention supports {', '.join(ATTENTION_DTYPES)}: cast it")
    if not 3 <= len(q) == len(k) == len(v) <= 4 or q[-1] != k[-1] or k[:-1] != v[:-1] or q[:-3] != k[:-3] or not _is_grouped(q[-3], k[-3]):
        shapes = ", ".join(f"%{name} {c.types[name]}" for name in (i.q, i.k, i.v))
        c.fail(f"{shapes} are not [B, H, S, E], [B, G, T, E] and [B, G, T, F], with or without B, and G a divisor of H: reshape them")
    if c.types[result].shape != (*q[:-1], v[-1]):
        c.fail(f"%{result} is {c.types[result]}, not {BufferType(c.types[result].dtype, (*q[:-1], v[-1]))}")
    for name in (i.q, i.k, i.v, result, *others):
        if strides_of(c.types[name])[-1] != Size():
            c.fail(f"the elements of a row of %{name} are not contiguous: copy it to or from a contiguous buffer")
    names = [kernels_for(c.types[i.q].dtype, most) for most in KERNEL_HEADS if all(x.is_int and int(x) <= most for x in (q[-1], v[-1]))]
    if i.kernels not in ("", *names):
        c.fail(f"kernels {i.kernels}: these operands need {' or '.join(names) or 'none'}")
    if i.window is not None and (i.diagonal is None or i.window < 1):
        c.fail(f"window {i.window}: write an int of at least 1, and a diagonal")
    for word in ("lengths", "bias", "offsets"):
        if len(getattr(i, word)) > 1:
            c.fail(f"{word} {'is' if word == 'bias' else 'are'} one buffer: name one")
    _has(c, i.lengths, BufferType(i32, q[:-3]), "lengths")
    _masks(c, i)
    if i.corner not in ("", BOTTOM_RIGHT) or (i.corner and (i.diagonal is None or not i.lengths)):
        c.fail(f"corner {i.corner}: write {BOTTOM_RIGHT} with lengths and a diagonal, or remove it")


def _masks(c: Checker, i: ir.Attention | ir.AttentionBackward) -> None:
    q, k = (unsharded(c.types[name]) for name in (i.q, i.k))
    for name in i.bias:
        if why := why_no_bias(q, k, unsharded(c.types[name])):
            c.fail(f"%{name}: {why}")
        if strides_of(c.types[name])[-1] != Size():
            c.fail(f"the elements of a row of %{name} are not contiguous: copy it to a contiguous buffer first")
    for name in i.offsets:
        if why := why_no_offsets(q, k, unsharded(c.types[name])):
            c.fail(f"%{name}: {why}")
        if i.lengths or i.bias:
            c.fail("packed sequences support neither lengths nor a bias: remove one of them")
        _has(c, (name,), BufferType(i32, c.types[name].shape), "offsets")


def _is_grouped(heads: Size, groups: Size) -> bool:
    group = heads.divided_by(groups)
    return group is not None and group.is_int


def broadcast_shapes(a: tuple[Size, ...], b: tuple[Size, ...]) -> tuple[Size, ...] | None:
    """Shape to which two shapes broadcast, or None."""
    rank, one = max(len(a), len(b)), Size()
    padded = zip((one,) * (rank - len(a)) + a, (one,) * (rank - len(b)) + b, strict=True)
    result = [x if y == one else y if x in (one, y) else None for x, y in padded]
    return None if None in result else tuple(e for e in result if e is not None)


def _launch_source(c: Checker, i: ir.Launch, source: UserKernel) -> None:
    for role, names, types in (("takes", i.srcs, source.inputs), ("gives", i.dsts, source.outputs)):
        if len(names) != len(types):
            c.fail(f"@{source.name} {role} {len(types)} buffers, not {len(names)}")
        for name, type in zip(names, types, strict=True):
            if type.mesh_in(c.mesh) != c.mesh:
                c.fail(f"@{source.name} {role} {type}, but is launched on {c.mesh}: launch it on the mesh of its types")
            wanted = type.local(c.mesh, c.program.uneven)
            c.expect_type(name, wanted, f"and @{source.name} {role} {wanted}")
            c.contiguous(name, what=f", but @{source.name} needs contiguous buffers")


def launch(c: Checker, i: Any, scope: Scope) -> None:
    if twice := [name for name in i.dsts if i.dsts.count(name) > 1]:
        c.fail(f"%{twice[0]} is named twice: give each result its own buffer")
    source = next((source for source in c.program.user_kernels if source.name == i.kernel), None)
    if not i.exchanges and i.sent_on:
        after: Any = i
        for after in c.around[c.number + 1 :]:
            if after.calls and not tree.names(after, "free"):
                break
            c.roots.define(after)
        consumer = "reduce_scatter", i.sent_on, c.roots.of(i.dsts[0])
        is_next = after.exchanges and (after.kind, after.channel, c.roots.of(after.srcs[0])) == consumer
        if not is_next or source:
            c.fail(f"a launch_reduce_scatter on {i.sent_on} of the result of a generated kernel must follow: launch without `sent on`")
    if source and not i.exchanges:
        _launch_source(c, i, source)
        return
    if i.kernel not in c.kernels:
        c.fail(f"there is no kernel @{i.kernel}; the kernels are {', '.join('@' + name for name in c.kernels) or 'none'}")
    kernel = c.kernels[i.kernel]
    if kernel.exchanges and not i.exchanges:
        c.fail(f"@{i.kernel} contains the collective {kernel.exchanges.kind}: use launch_{kernel.exchanges.kind} with a channel")
    if len(i.srcs) != len(kernel.inputs):
        c.fail(f"@{i.kernel} takes {len(kernel.inputs)} buffers, not {len(i.srcs)}")
    if len(i.dsts) != len(kernel.results):
        c.fail(f"@{i.kernel} gives {len(kernel.results)} results, not {len(i.dsts)}")
    exchanged = int(i.exchanges)  # `_launch_exchange` checks the first input.
    for name, parameter in zip((*i.srcs, *i.dsts)[exchanged:], (*kernel.inputs, *kernel.results)[exchanged:], strict=True):
        wanted = BufferType(parameter.type.dtype, parameter.type.shape)
        c.expect_type(name, wanted, f"and @{i.kernel} takes {wanted} as %{parameter.name}")


def _copy(c: Checker, i: ir.Copy, scope: Scope) -> None:
    c.same_dtype(i.src, i.dst)
    c.same_shape(i.src, i.dst)


def _pack(c: Checker, i: ir.Pack, scope: Scope) -> None:
    c.same_dtype(i.src, i.dst)
    for name in (i.src, i.dst):
        c.cuts(i.cuts, name)
        c.contiguous(name, what="")


def _fill(c: Checker, i: ir.Fill, scope: Scope) -> None:
    dtype = c.types[i.dst].dtype
    bits = 8 * dtype.itemsize
    least, most = {"int": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1), "bool": (0, 1)}.get(dtype.kind, (0, 2**bits - 1))
    if not (dtype.kind == "float" or (float(i.value).is_integer() and least <= i.value <= most)):
        c.fail(f"{dtype} cannot hold {i.value}: write an int from {least} to {most}")


RULES: dict[type[tree.Instruction], Rule] = {
    ir.Allocate: _allocate,
    ir.Deallocate: _deallocate,
    ir.View: _view,
    ir.Matmul: _matmul,
    ir.Grouped: _grouped,
    ir.Attention: _attention,
    ir.AttentionBackward: _attention_backward,
    ir.Launch: launch,
    ir.Copy: _copy,
    ir.Pack: _pack,
    ir.Fill: _fill,
}
