"""Adds a kernel that does both steps of a split reduction in one launch, for calls with few rows.

    launch @multiply_sum_rows %x -> %rows               if M <= 16 {
    launch @sum_y %rows -> %y                             launch @multiply_sum_rows_of_few_rows %x -> %y
                                        becomes         } else {
                                                          launch @multiply_sum_rows %x -> %rows
                                                          launch @sum_y %rows -> %y
                                                        }

The kernel is not added if the stated sizes give many rows. For constant sizes, `split_reductions` has already chosen one kernel or two.
"""

from dataclasses import replace

from hostweave.analysis.def_use import Place
from hostweave.communication.dataflow import expr_of
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import AXES, COUNT, KEEPDIMS
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import launched, registered
from hostweave.host_ir.expr import Binary, Const
from hostweave.options import Options
from hostweave.passes.host.fuse_kernels import Links, fused_launch
from hostweave.types.size import Size, product

AT_ONCE = 1 << 14  # elements that a block of 512 threads reads with a few accesses per thread


def reduce_few_rows(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    links, kernels = Links(program), {kernel.name: kernel for kernel in program.kernels}
    edits: dict[int, tree.Body] = {}
    for first in links.launches:
        if not (last := _last(links, first)) or not (found := _of_few_rows(links, first, last)):
            continue
        if {first.number, last.number} & edits.keys():  # A launch is in one pair only.
            continue
        launch, kernel, elements = found
        typical = elements.at(options.sizes)
        if not typical.factors and typical.coefficient > AT_ONCE * typical.divisor:
            continue
        name = registered(kernels, kernel, f"{links.launches[first].kernel}_of_few_rows")
        is_few = Binary("<=", expr_of(Size(1, elements.factors, elements.divisor)), Const(AT_ONCE // elements.coefficient))
        both = (first.instruction, last.instruction)
        edits |= {first.number: (), last.number: (ir.If(is_few, (replace(launch, kernel=name),), both, location=launch.location),)}
    body = tree.edited(program.body, edits)
    return replace(program, body=body, kernels=launched(kernels.values(), body)) if edits else program


def _last(links: Links, first: Place) -> Place | None:
    launch = links.launches[first]
    (dst, *others), root = launch.dsts, links.root(launch.dsts[0])
    users = links.others(first, dst)
    if others or len(users) != 1 or root not in links.uses.allocates:
        return None
    (last,) = users
    is_next = last.body is first.body and not any(i.calls for i in tree.walk(first.body[first.index + 1 : last.index]))
    return last if is_next and last in links.launches and links.launches[last].srcs.count(dst) == 1 else None


def _of_few_rows(links: Links, first: Place, last: Place) -> tuple[ir.Launch, ir.Kernel, Size] | None:
    """A launch and kernel that reduce all dims at once, and the symbolic number of elements. None if the kernel is wrong or useless."""
    fused = fused_launch(links, first, last, [])
    kernel = fused.kernel
    reductions = [op for op in kernel.ops if OPS[op.kind].combine]
    if len(reductions) != 2 or reductions[1].tensors != (reductions[0].result.name,):
        return None
    rows, total = reductions
    (source,) = rows.tensors
    elements, uses = product(kernel.types[source].shape), [name for op in kernel.ops for name in op.tensors]
    is_one = _combine(rows, total) and uses.count(rows.result.name) == 1
    if not is_one or elements.is_int or links.root(links.launches[first].dsts[0]) in links.outputs:
        return None
    left = [axis for axis in range(len(kernel.types[source].dims)) if rows[KEEPDIMS] or axis not in rows[AXES]]
    axes = tuple(sorted({*rows[AXES], *(left[axis] for axis in total[AXES])}))
    at_once = replace(total.with_attribute(AXES, axes), operands=(source,))
    kernel = replace(kernel, ops=tuple(at_once if op is total else op for op in kernel.ops if op is not rows))
    return None if links.why_slow(kernel) else (fused.launch, kernel, elements)


def _combine(rows: Op, total: Op) -> bool:
    """True if the two reductions equal one reduction over all their dims."""
    combine = OPS[total.kind].combine
    if combine and combine.is_mean and total[COUNT] != Size(0):  # The total is a mean of sums, with an explicit divisor.
        combine = replace(combine, is_mean=False)
    return OPS[rows.kind].combine == combine and rows[KEEPDIMS] == total[KEEPDIMS] and not OPS[rows.kind].locates
