"""Computes a small all_reduce in the kernel that uses its result, or in a separate kernel.

    all_reduce sum %h_partial -> %h on x            if T <= 32 {
    launch @add_y %h, %x -> %y                        launch_all_reduce @all_reduce_add_y %h_partial, %x -> %y on x
                                        becomes     } else {
                                                      all_reduce sum %h_partial -> %h on x
                                                      launch @add_y %h, %x -> %y
                                                    }

The kernels of the ranks send each other their terms, which takes less time than the start of a collective. A kernel waits for other ranks
while it occupies the device, so no communication may overlap with it. Programs that communicate on separate streams keep their collectives.
"""

from dataclasses import replace

from hostweave.analysis.def_use import Place, def_use
from hostweave.base.names import unique_name
from hostweave.fusion_ir.ir import MeshAxes, Op, Value
from hostweave.fusion_ir.ops.attributes import MESH_AXES, REDUCTION
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies, joined, launched
from hostweave.host_ir.expr import Binary, Const, Symbol
from hostweave.options import Options
from hostweave.passes.host.fuse_kernels import Links
from hostweave.tune.cost import most_terms
from hostweave.types.size import product
from hostweave.types.tensor import Dim, TensorType


def reduce_in_kernels(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    """Moves small all_reduces into kernels. If the size is symbolic, a condition chooses at run time."""
    parts = bodies(program)
    beside = any(place.stream and isinstance(place.instruction, ir.Communication) for part in parts for place in def_use(part).places)
    if options.transport != "auto" or options.figures.no_peers or beside or program.has_signals:
        return program
    return joined([_Reducing(part, options).program() for part in parts])


class _Reducing:
    """Rewrites one body."""

    def __init__(self, program: ir.HostProgram, options: Options):
        self.given, self.options = program, options
        self.uses = def_use(program)
        self.kernels = {kernel.name: kernel for kernel in program.kernels}

    def program(self) -> ir.HostProgram:
        reduces = [(place, i) for place in self.uses.places if isinstance(i := place.instruction, ir.AllReduce)]
        found = [(place, i, most) for place, i in reduces if (most := self.most(place, i))]
        if not found:
            return self.given
        alone = {place.number: self.alone(i) for place, i, _ in found}
        links = Links(replace(self.given, body=tree.edited(self.given.body, alone), kernels=tuple(self.kernels.values())))
        edits: dict[int, tree.Instruction | tree.Body] = {}
        for place, i, most in found:
            launch, end = alone[place.number], place
            merged = links.union(links.uses.places[place.number])
            for one in merged if isinstance(merged, list) else ():  # there is at most one
                between = self.uses.places[place.number + 1 : one.consumer.number]
                if one.consumer.number not in edits and not any(isinstance(p.instruction, ir.Communication) for p in between):
                    name = f"{links.launches[one.consumer].kernel}_of_terms"
                    launch, end = self.named(*_with_own_term(one.launch, one.kernel), name), self.uses.places[one.consumer.number]
            if not self.is_over(launch):
                edits[place.number] = ()
                edits[end.number] = self.chosen(place, i, launch, end, most)
        body = tree.eliminate_dead_code(tree.edited(self.given.body, edits))
        return replace(self.given, body=body, kernels=launched(self.kernels.values(), body))

    def most(self, place: Place, i: ir.AllReduce) -> int:
        """Largest number of elements that a kernel should reduce, or 0."""
        if i.op != "sum" or place.loop or place.mesh_body or place.statement != place.number:
            return 0
        channel = self.given.channel(i.channel)
        is_here = channel.mesh == self.given.mesh
        return most_terms(self.options.figures, channel.size, self.uses.types[i.src]) if is_here else 0

    def alone(self, i: ir.AllReduce) -> ir.Launch:
        """Launch of a kernel that does only the all_reduce. This launch has no channel; `chosen` adds it."""
        type, term = self.uses.types[i.src], self.uses.root(i.src)
        tensor = TensorType(type.dtype, tuple(map(Dim, type.shape)))
        facts = (MESH_AXES.name, MeshAxes(self.given.channel(i.channel).axes)), (REDUCTION.name, i.op)
        op = Op("all_reduce", (term,), Value(unique_name(self.uses.root(i.dst), {term}), tensor), facts, i.location)
        kernel = ir.Kernel("", (ir.Parameter(term, tensor),), (op,))
        return self.named(ir.Launch("", (i.src,), (i.dst,), location=i.location), kernel, kernel.descriptive_name)

    def named(self, launch: ir.Launch, kernel: ir.Kernel, name: str) -> ir.Launch:
        same = next((name for name, other in self.kernels.items() if other == replace(kernel, name=name)), None)
        name = same or unique_name(name, self.kernels)
        self.kernels[name] = replace(kernel, name=name)
        return replace(launch, kernel=name)

    def is_over(self, launch: ir.Launch) -> bool:
        """True if a result shares memory with the term. Other threads may still be sending a part of the term."""
        return self.uses.root(launch.srcs[0]) in {self.uses.root(dst) for dst in launch.dsts}

    def chosen(self, place: Place, i: ir.AllReduce, launch: ir.Launch, end: Place, most: int) -> tree.Instruction:
        few = ir.LaunchAllReduce(launch.kernel, launch.srcs, launch.dsts, i.channel, location=i.location)
        size = product(self.uses.types[i.src].shape)
        if size.is_int:
            return few
        (name,) = (factor for factor in size.factors if isinstance(factor, str))
        condition = Binary("<=", Symbol(name), Const(most // size.coefficient))
        return ir.If(condition, (few,), (i,) if end is place else (i, end.instruction), location=i.location)


def _with_own_term(launch: ir.Launch, kernel: ir.Kernel) -> tuple[ir.Launch, ir.Kernel]:
    """Gives the all_reduce a separate input, if other ops read the same input."""
    (term, *_), (first, *others) = kernel.inputs, kernel.ops
    if not any(term.name in op.tensors for op in others):
        return launch, kernel
    taken = {parameter.name for parameter in kernel.inputs} | {op.result.name for op in kernel.ops}
    own = replace(term, name=unique_name(f"{term.name}_term", taken))
    ops = (first.renamed({term.name: own.name}), *others)
    return replace(launch, srcs=(launch.srcs[0], *launch.srcs)), replace(kernel, inputs=(own, *kernel.inputs), ops=ops)
