"""Computes matmuls with few rows and the same first operand in the pointwise kernel that reads the results of the matmuls.

    matmul %x, %wg -> %g                      if T <= 8 {
    matmul %x, %wu -> %u                        launch @silu_multiply_h_of_few_rows %x, %wg, %wu -> %h
    launch @silu_multiply_h %g, %u -> %h      } else {
                                                fork beside first 1
                                                stream beside[0] {
                                    becomes       matmul %x, %wu -> %u
                                                }
                                                matmul %x, %wg -> %g
                                                join beside first 1
                                                launch @silu_multiply_h %g, %u -> %h
                                              }

With few rows, the reads of the weights take nearly all of the time, and one kernel reads all weights in one pass. With more rows, the
matmuls run concurrently: one matmul uses multiprocessors that the last wave of another matmul leaves idle. There is no `if` if the number
of rows is known at compile time.

Unfused matmuls with a common first operand also run concurrently if their weights are large. All sizes must be known. The number of rows
must be above FEW_ROWS and at most MOST_ROWS.

This pass runs after plan_memory. Deallocates between the matmuls and the kernel move after the kernel, because the fused kernel reads the
operands of the matmuls.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace

from hostweave.analysis.def_use import DefUse, Place, def_use
from hostweave.analysis.kernel_indices import NotOneKernel, iteration
from hostweave.base.names import claim_unique
from hostweave.communication.dataflow import expr_of
from hostweave.fusion_ir.ir import Op, Value
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import launched, registered
from hostweave.host_ir.expr import Binary, Const
from hostweave.options import Options
from hostweave.types.size import Size, Sum, product
from hostweave.types.tensor import strides_of

BESIDE = "beside"  # pool of streams for concurrent matmuls

PlacedMatmul = tuple[Place, ir.Matmul]

FEW_ROWS_DTYPES = ("f16", "bf16", "f32")  # dtypes of the matrix with few rows
MOST_ROWS = 128  # maximum number of rows for which the reads of the weights take longer than the products
MIN_BYTES = 2 << 20  # minimum bytes of weights of a matmul in `_concurrent`; a fork takes longer than a read of fewer bytes


def multiply_few_rows(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    uses, kernels = def_use(program), {kernel.name: kernel for kernel in program.kernels}
    edits: dict[int, tree.Body] = {}
    streams = 0
    for place, i in uses.instructions(ir.Launch):
        if i.sent_on or i.kernel not in kernels or not (products := _products(uses, place, i, kernels[i.kernel])):
            continue
        matmuls = [matmul for _, matmul in products]
        kernel, srcs = _of_few_rows(i, kernels[i.kernel], matmuls, uses)
        name = registered(kernels, kernel, f"{i.kernel}_of_few_rows")
        few, freed = replace(i, kernel=name, srcs=srcs), _freed(_between(uses, place, products))
        rows = product(uses.types[matmuls[0].a].shape[:-1])
        if not rows.is_int:
            streams = max(streams, len(matmuls) - 1)
        is_few = Binary("<=", expr_of(rows), Const(ir.FEW_ROWS))
        chosen = few if rows.is_int else ir.If(is_few, (few,), (*_at_once(matmuls), i), location=i.location)
        edits |= {p.number: () for p in (*freed, *(p for p, _ in products))}
        edits[place.number] = (chosen, *(p.instruction for p in freed))
    for group in _concurrent(uses, edits):
        streams = max(streams, len(group) - 1)
        edits |= {p.number: () for p, _ in group}
        edits[group[-1][0].number] = tuple(_at_once([matmul for _, matmul in group]))
    if not edits:
        return program
    body = tree.edited(program.body, edits)
    beside = (ir.Streams(BESIDE, streams),) if streams else ()
    return replace(program, body=body, kernels=launched(kernels.values(), body), streams=(*program.streams, *beside))


def _at_once(matmuls: list[ir.Matmul]) -> Iterator[tree.Instruction]:
    """Runs the matmuls concurrently. The first matmul is on the caller's stream."""
    first, *others = matmuls
    yield ir.Fork(BESIDE, len(others), location=first.location)
    for stream, matmul in enumerate(others):
        yield ir.OnStream(BESIDE, Const(stream), (matmul,), location=matmul.location)
    yield first
    yield ir.Join(BESIDE, len(others), location=first.location)


def _concurrent(uses: DefUse, edits: Collection[int]) -> list[list[PlacedMatmul]]:
    """Groups of matmuls that can run concurrently. The matmuls of a group have the same first operand, and can move to the last matmul."""
    found: list[list[PlacedMatmul]] = []
    last: dict[str, list[PlacedMatmul]] = {}  # first operand -> last group of matmuls with this operand
    for place, matmul in uses.instructions(ir.Matmul):
        if not place.around and place.number not in edits and _reads_many_weights(uses, matmul):
            if len(group := last.get(matmul.a, [])) not in (0, ir.PRODUCTS) and _may_wait(uses, group, place):
                group.append((place, matmul))
            else:
                found.append([(place, matmul)])
                last[matmul.a] = found[-1]
    return [group for group in found if len(group) > 1]


def _may_wait(uses: DefUse, group: list[PlacedMatmul], place: Place) -> bool:
    places, matmuls = zip(*group, strict=True)
    passed = [p for p in uses.places[places[0].number : place.number] if p not in places]
    later = tuple(p.instruction for p in (*passed, place))
    return not (_freed(passed) or any(p.around or p.instruction.orders for p in passed) or uses.conflict(matmuls, later))


def _reads_many_weights(uses: DefUse, matmul: ir.Matmul) -> bool:
    """True if a matmul has too many rows to be fused, but reads of at least MIN_BYTES of weights take most of the time. False if sizes are
    unknown."""
    rows, weights = product(uses.types[matmul.a].shape[:-1]), uses.types[matmul.b]
    size = product(weights.shape)
    is_known = rows.is_int and size.is_int and len(weights.shape) == 2
    return is_known and ir.FEW_ROWS < int(rows) <= MOST_ROWS and int(size) * weights.dtype.itemsize >= MIN_BYTES


def _products(uses: DefUse, place: Place, launch: ir.Launch, kernel: ir.Kernel) -> list[PlacedMatmul]:
    """Matmuls to fuse with a kernel that reads their results. Empty if the kernel cannot be fused."""
    found = list(_read_products(uses, place))
    if not 2 <= len(found) <= ir.PRODUCTS or place.around:
        return []
    matmuls = [matmul for _, matmul in found]
    first = matmuls[0]
    rows = product(uses.types[first.a].shape[:-1])
    is_few = int(rows) <= ir.FEW_ROWS if rows.is_int else not any(isinstance(factor, Sum) for factor in rows.factors)
    alike = {(matmul.a, *_layout(uses, matmul)) for matmul in matmuls}
    if not is_few or len(alike) > 1 or _layout(uses, first) == () or uses.types[first.a].strides is not None:
        return []
    operands = {uses.root(name) for matmul in matmuls for name in (matmul.a, matmul.b)}
    if operands & {uses.root(dst) for dst in launch.dsts} or not _is_by_index(kernel, launch, {matmul.dst for matmul in matmuls}):
        return []
    between = _between(uses, place, found)
    passed = tuple(p.instruction for p in between if p not in _freed(between))
    return [] if any(i.orders for i in tree.walk(passed)) or uses.conflict(matmuls, passed) else found


def _read_products(uses: DefUse, place: Place) -> Iterator[PlacedMatmul]:
    launch = place.instruction
    written = {uses.root(name) for name in tree.names(launch, "write")}
    reads = tree.names(launch, "read")
    for src in reads:
        root = uses.root(src)
        at = uses.touches[root].index(place)
        maker = uses.touches[root][at - 1] if at else place
        matmul = maker.instruction
        if not isinstance(matmul, ir.Matmul) or matmul.dst != src or maker.body is not place.body or reads.count(src) > 1:
            continue
        is_last = root in uses.allocates and len(uses.touches[root]) == at + 1
        if (root in written or is_last) and replace(matmul, a="", b="", dst="", location=None) == ir.Matmul("", "", ""):
            yield maker, matmul


def _between(uses: DefUse, place: Place, products: list[PlacedMatmul]) -> list[Place]:
    makers = [maker for maker, _ in products]
    numbers = range(min(maker.number for maker in makers), place.number)
    return [p for p in uses.places if p.number in numbers and p.body is place.body and p not in makers]


def _freed(places: list[Place]) -> list[Place]:
    return [p for p in places if tree.names(p.instruction, "free")]


def _layout(uses: DefUse, matmul: ir.Matmul) -> tuple[object, ...]:
    """Properties that all matmuls of one kernel share. Empty if kernels do not support the matmul."""
    a, b, dst = (uses.types[name] for name in (matmul.a, matmul.b, matmul.dst))
    if len(b.shape) != 2 or a.dtype.name not in FEW_ROWS_DTYPES or dst.strides is not None or Size() not in strides_of(b):
        return ()
    return b.dtype, dst.dtype, b.shape, strides_of(b)


def _is_by_index(kernel: ir.Kernel, launch: ir.Launch, products: set[str]) -> bool:
    """True if each element of a result reads the results of the matmuls only at the index of this element."""
    try:
        walked = iteration(kernel)
    except NotOneKernel:
        return False
    names = [p.name for src, p in zip(launch.srcs, kernel.inputs, strict=True) if src in products]
    indices = {walked.indices[name] for name in (*names, *(result.name for result in kernel.results))}
    return not walked.reduced and not walked.fibers and not walked.joined and len(indices) == 1


def _of_few_rows(i: ir.Launch, kernel: ir.Kernel, matmuls: list[ir.Matmul], uses: DefUse) -> tuple[ir.Kernel, tuple[str, ...]]:
    """The fused kernel without a name: the matmuls, then the ops of `kernel`. Also returns the buffers that the kernel reads."""
    inputs = dict(zip(i.srcs, kernel.inputs, strict=True))
    made = [inputs.pop(matmul.dst) for matmul in matmuls]
    taken = {p.name for p in kernel.inputs} | {op.result.name for op in kernel.ops}
    names = []
    for word, operand in (("x", matmuls[0].a), *(("w", matmul.b) for matmul in matmuls)):
        if operand not in inputs:
            inputs[operand] = ir.Parameter(claim_unique(word, taken), unsharded(uses.types[operand]))
        names.append(inputs[operand].name)
    found = zip(names[1:], made, matmuls, strict=True)
    products = (Op("matmul", (names[0], weights), Value(p.name, p.type), location=matmul.location) for weights, p, matmul in found)
    return ir.Kernel("", tuple(inputs.values()), (*products, *kernel.ops), kernel.returned), tuple(inputs)
