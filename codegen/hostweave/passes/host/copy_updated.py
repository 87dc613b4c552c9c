"""Copies the operand of an in-place update to the result if the two do not share memory.

    launch @dynamic_update_slice_x %x, %row, %start -> %y

This launch writes some elements of %y, so %y must already contain the other elements of %x. If %y does not share the memory of %x, the
launch becomes

    copy %x -> %y
    launch @dynamic_update_slice_x %y, %row, %start -> %y
"""

from hostweave.analysis.def_use import def_use
from hostweave.analysis.kernel_indices import updated
from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.host_ir import ir, tree
from hostweave.options import Options


def copy_updated(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    uses, kernels = def_use(program), {kernel.name: kernel for kernel in program.kernels}
    functions, taken = {function.name: function for function in program.functions}, {*uses.types, *uses.indices}

    def rule(i: tree.Instruction) -> tree.Body | None:
        read, written = tree.names(i, "read"), tree.names(i, "write")
        outputs = next((functions[name].outputs for name in tree.names(i, "call")), ())
        apart: dict[int, str] = {}
        views, copies = list[tree.Instruction](), list[tree.Instruction]()
        for number, at in updated(i, kernels, program.functions):
            if uses.root(read[number]) != uses.root(written[at]):
                apart[number] = there = written[at]
                if (shape := uses.types[read[number]].shape) != uses.types[there].shape:
                    apart[number] = claim_unique(f"{there}_as_given", taken)
                    views.append(ir.Reshape(apart[number], there, shape, location=i.location))
                copy, mesh = ir.Copy(read[number], apart[number], location=i.location), outputs[at].type.mesh if outputs else None
                copies.append(ir.OnMesh(mesh, (copy,), location=i.location) if mesh else copy)  # Only ranks of `mesh` run the update.
        return (*views, *copies, tree.with_names_at(i, apart, "read")) if apart else None

    return replaced(program, body=tree.rewrite(program.body, rule))
