"""Host to host: what is updated in place is copied first where it stays, as something reads it afterwards.

    launch @dynamic_update_slice_x %x, %row, %start -> %y

writes some elements of %y, where %x lies already. Where that is memory of its own it becomes

    copy %x -> %y
    launch @dynamic_update_slice_x %y, %row, %start -> %y
"""

from dataclasses import replace

from hostweave.analysis.def_use import def_use
from hostweave.analysis.kernel_indices import updated
from hostweave.host_ir import ir, tree
from hostweave.options import Options


def copy_updated(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    """After it an instruction that updates some elements has its operand where its result is."""
    uses, kernels = def_use(program), {kernel.name: kernel for kernel in program.kernels}

    def rule(i: tree.Instruction) -> tree.Body | None:
        apart = {src: dst for src, dst in updated(i, kernels, program.functions) if uses.root(src) != uses.root(dst)}
        copies = (ir.Copy(src, dst, location=i.location) for src, dst in apart.items())
        return (*copies, tree.with_names(i, apart, "read")) if apart else None

    return replace(program, body=tree.rewrite(program.body, rule))
