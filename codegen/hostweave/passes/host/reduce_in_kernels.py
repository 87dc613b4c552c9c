"""The kernel that reads the result of a small all_reduce, reduce_scatter or all_gather also does this collective. Without such a kernel, a
separate kernel does the collective.

    all_reduce sum %h_partial -> %h on x            if T <= 32 {
    launch @add_y %h, %x -> %y                        launch_all_reduce @add_y_of_terms %h_partial, %x -> %y on x
                                        becomes     } else {
                                                      all_reduce sum %h_partial -> %h on x
                                                      launch @add_y %h, %x -> %y
                                                    }

The kernel of each rank writes to the memory of peers. Such writes take less time than a library's collective. A kernel that computes the
operand of a reduce_scatter can store each block in the memory of the rank that receives the block.

A kernel occupies the device while it waits for other ranks. Programs that communicate on separate streams therefore keep their collectives.
So do programs with signals, with a stated transport, or without access to peer memory.
"""

from dataclasses import replace

from hostweave.analysis.def_use import Place, def_use
from hostweave.base.names import unique_name
from hostweave.fusion_ir.ir import MeshAxes, Op, Value, attributes
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.definition import unsharded
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies, launched, on_each_body, registered
from hostweave.host_ir.expr import Binary, Const, Symbol
from hostweave.options import Options
from hostweave.passes.host.fuse_kernels import Links
from hostweave.tune.cost import most_terms
from hostweave.types.size import product

IN_KERNELS: dict[type, type[ir.LaunchExchange]] = {
    ir.AllReduce: ir.LaunchAllReduce,
    ir.ReduceScatter: ir.LaunchReduceScatter,
    ir.AllGather: ir.LaunchAllGather,
}


def reduce_in_kernels(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    programs = bodies(program)
    beside = any(place.stream and isinstance(place.instruction, ir.Communication) for body in programs for place in def_use(body).places)
    if options.transport != "auto" or options.figures.no_peers or beside or program.has_signals:
        return program
    return on_each_body(program, lambda body: _Reducing(body, options).program())


def _block(i: ir.FromTo) -> str:
    """The operand or the result, whichever has a single block."""
    return i.dst if i.blocks == "src" else i.src


class _Reducing:
    def __init__(self, program: ir.HostProgram, options: Options):
        self.given, self.options = program, options
        self.uses = def_use(program)
        self.kernels = {kernel.name: kernel for kernel in program.kernels}

    def program(self) -> ir.HostProgram:
        reduces = [(place, i) for place in self.uses.places if isinstance(i := place.instruction, ir.FromTo) and type(i) in IN_KERNELS]
        found = [(place, i, most) for place, i in reduces if (most := self.most(place, i))]
        if not found:
            return self.given
        alone = {place.number: self.alone(i) for place, i, _ in found}
        links = Links(replace(self.given, body=tree.edited(self.given.body, alone), kernels=tuple(self.kernels.values())))
        edits: dict[int, tree.Instruction | tree.Body] = {}
        for place, i, most in found:
            launch, end = alone[place.number], place
            merged = links.union(links.uses.places[place.number])
            for one in merged if isinstance(merged, list) else ():  # There is at most one launch.
                between = self.uses.places[place.number + 1 : one.consumer.number]
                is_first = not any(isinstance(p.instruction, ir.Communication) for p in between)
                if one.consumer.number not in edits and is_first and self.is_light(i, links.launches[one.consumer]):
                    name = f"{links.launches[one.consumer].kernel}_of_terms"
                    launch, kernel = _with_own_term(one.launch, one.kernel)
                    launch, end = replace(launch, kernel=registered(self.kernels, kernel, name)), self.uses.places[one.consumer.number]
            # A result must not share memory with the collective's operand: other threads may still send parts of the operand.
            if self.uses.root(launch.srcs[0]) not in map(self.uses.root, launch.dsts):
                edits[place.number] = ()
                producer = self.sending(place, i, end)
                if producer and producer.number in edits:  # The launch is part of another exchange.
                    producer = None
                if producer:
                    edits[producer.number] = ()
                edits[end.number] = self.chosen(place, i, launch, end, most, producer)
        body = tree.eliminate_dead_code(tree.edited(self.given.body, edits))
        return replace(self.given, body=body, kernels=launched(self.kernels.values(), body))

    def most(self, place: Place, i: ir.FromTo) -> int:
        """Maximum number of elements that a kernel should send to each rank. 0 if a kernel cannot do the collective, or would be slower."""
        channel, is_nested = self.given.channel(i.channel), place.loop or place.mesh_body or place.statement != place.number
        is_sum = not isinstance(i, ir.Reduction) or i.op == "sum"
        if not is_sum or i.is_shared or is_nested or channel.mesh != self.given.mesh:
            return 0
        return most_terms(self.options.figures, IN_KERNELS[type(i)].kind, channel.size, self.uses.types[_block(i)])

    def alone(self, i: ir.FromTo) -> ir.Launch:
        """Launch of a kernel that does only the collective. `chosen` adds the channel."""
        kind, term = IN_KERNELS[type(i)].kind, self.uses.root(i.src)
        tensor = unsharded(self.uses.types[i.src if OPS[kind].reduces_to_all else i.dst])
        dim, reduction = None if OPS[kind].reduces_to_all else 0, "sum" if OPS[kind].reduces else None
        facts = attributes(dim=dim, axes=MeshAxes(self.given.channel(i.channel).axes), reduction=reduction)
        op = Op(kind, (term,), Value(unique_name(self.uses.root(i.dst), {term}), tensor), facts, i.location)
        kernel = ir.Kernel("", (ir.Parameter(term, tensor),), (op,))
        return ir.Launch(registered(self.kernels, kernel, kernel.descriptive_name), (i.src,), (i.dst,), location=i.location)

    def is_light(self, i: ir.FromTo, consumer: ir.Launch) -> bool:
        """True if the kernel of the collective may do the work of the consumer. Always true for an all_reduce.

        For other collectives, no array of the consumer may be larger than the result, because the kernel has few thread blocks. The
        consumer must not read the operand of the collective: in the kernel, this buffer stands for the blocks of all ranks.
        """
        if not i.blocks:
            return True
        most, *sizes = (product(self.uses.types[name].shape) for name in (i.dst, *consumer.srcs, *consumer.dsts))
        are_small = all({*size.factors} <= {*most.factors} and size.coefficient <= most.coefficient * size.divisor for size in sizes)
        return are_small and self.uses.root(i.src) not in map(self.uses.root, consumer.srcs)

    def sending(self, place: Place, i: ir.FromTo, end: Place) -> Place | None:
        """The launch that stores the operand of a reduce_scatter. None if this launch may not store each block in the memory of the rank
        that receives the block.

        No work is between the launch and the reduce_scatter. Only these two instructions access the operand. Each block must consist of
        whole rows, because a kernel may store a vector along the innermost dim.
        """
        touches = self.uses.touches[root] if (root := self.uses.root(i.src)) in self.uses.allocates else []
        if len(touches) != 2 or not i.sends_blocks or not self.uses.is_whole(i.src) or touches[0].body is not place.body:
            return None
        producer, rows = touches[0], self.uses.types[i.src].shape
        kernels = [self.kernels[name] for name in tree.names(producer.instruction, "launch") if name in self.kernels]
        later = self.uses.places[producer.number + 1 : end.number]
        is_next = not any(p.instruction.calls for p in later if p.number < place.number)
        if not kernels or len(kernels[0].results) > 1 or kernels[0].exchanges or not is_next:
            return None
        moves = not self.uses.conflict([producer.instruction], [p.instruction for p in later if p is not place])
        has_rows = len(rows) > 1 and rows[-1] == kernels[0].results[0].type.shape[-1]
        return producer if moves and has_rows and not any(OPS[op.kind].fiber or OPS[op.kind].updates for op in kernels[0].ops) else None

    def chosen(self, place: Place, i: ir.FromTo, launch: ir.Launch, end: Place, most: int, producer: Place | None) -> tree.Body:
        """The exchange, or a choice between the exchange and the collective. Also launches the producer of the blocks, if given."""
        few: tree.Body = (IN_KERNELS[type(i)](launch.kernel, launch.srcs, launch.dsts, i.channel, location=i.location),)
        many: tree.Body = (i,) if end is place else (i, end.instruction)
        if producer:
            few, many = (replace(producer.instruction, sent_on=i.channel), *few), (producer.instruction, *many)  # type: ignore[call-arg]
        size = product(self.uses.types[_block(i)].shape)
        if size.is_int:
            return few
        (name,) = (factor for factor in size.factors if isinstance(factor, str))
        condition = Binary("<=", Symbol(name), Const(most // size.coefficient))
        return (ir.If(condition, few, many, location=i.location),)


def _with_own_term(launch: ir.Launch, kernel: ir.Kernel) -> tuple[ir.Launch, ir.Kernel]:
    """Adds a second parameter for the operand of the collective if later ops also read this operand."""
    (term, *_), (first, *others) = kernel.inputs, kernel.ops
    if not any(term.name in op.tensors for op in others):
        return launch, kernel
    taken = {parameter.name for parameter in kernel.inputs} | {op.result.name for op in kernel.ops}
    own = replace(term, name=unique_name(f"{term.name}_term", taken))
    ops = (first.renamed({term.name: own.name}), *others)
    return replace(launch, srcs=(launch.srcs[0], *launch.srcs)), replace(kernel, inputs=(own, *kernel.inputs), ops=ops)
