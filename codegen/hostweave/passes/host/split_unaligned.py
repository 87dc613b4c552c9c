"""Splits a matmul whose sizes are not multiples of 16 bytes into an aligned matmul, and matmuls of the remaining rows, columns or terms.

                                      %y_aligned = slice %y[1: 50256 from 0]
                                      %y_rest = slice %y[1: 1 from 50256]
    matmul %x, %w -> %y     becomes   matmul %x, %w_rest -> %y_rest
                                      matmul %x, %w_aligned rest [0, 0, 1] -> %y_aligned

with `%y: bf16[M, 50257]`. `rest` has the split-off sizes of k, m and n. If the contracted dim is split, the aligned matmul adds to the
result of the matmul of the remaining terms. The pass splits a matmul only if the cost model predicts a gain, and if all rows start at
multiples of 16 bytes. `widen_rows` has already aligned most rows.
"""

from collections.abc import Iterator
from dataclasses import replace

from hostweave.analysis.alignment import SIDES, Unaligned, unaligned
from hostweave.analysis.def_use import def_use
from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import names_in
from hostweave.host_ir.expr import Const
from hostweave.options import Options
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType


def split_unaligned(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    types, taken = def_use(program).types, names_in(program)

    def split(i: tree.Instruction) -> tree.Body | None:
        found = unaligned(i, types, options.figures)
        return tuple(_matmuls(found, {**types}, taken)) if found and not found.pitched and found.gain > 0 else None

    return replaced(program, body=tree.rewrite(program.body, split))


def _matmuls(found: Unaligned, types: dict[str, BufferType], taken: set[str]) -> Iterator[tree.Instruction]:
    """Splits off the remaining indices of each unaligned dim, one dim at a time."""
    matmul = found.matmul
    for dim in found.dims:
        end = found.sizes[dim] - found.sizes[dim] % found.multiple
        rest = replace(matmul, bias=(), activation="") if dim == "k" else matmul
        for word, start, size in (("rest", end, found.sizes[dim] - end), ("aligned", 0, end)):
            one = rest if word == "rest" else matmul
            views: dict[str, str] = {}
            for name, axis in _along(one, dim, types):
                views[name] = claim_unique(f"{name}_{word}", taken)
                view = ir.Slice(views[name], name, axis, Size(size), Const(start), location=matmul.location)
                types.update(view.defined(types))
                yield view
            viewed = tree.with_names(one, views, "read", "write")
            if word == "rest":
                yield viewed
            else:
                matmul = replace(viewed, accumulate=(viewed.dst,)) if dim == "k" else viewed
    yield replace(matmul, rest=tuple(found.sizes[dim] % found.multiple if dim in found.dims else 0 for dim in "kmn"))


def _along(matmul: ir.Matmul, dim: str, types: dict[str, BufferType]) -> dict[tuple[str, int], None]:
    """Buffers of a matmul with the dim m, n or k, each with the index of the dim."""
    sides = [(getattr(matmul, field), sides.index(dim) - 2) for field, sides in SIDES.items() if dim in sides]
    if dim != "k":
        sides += [(name, SIDES["dst"].index(dim) - 2) for name in matmul.accumulate]
    if dim == "n":
        sides += [(name, -1) for name in matmul.bias]
    return dict.fromkeys((name, len(types[name].shape) + axis) for name, axis in sides)
