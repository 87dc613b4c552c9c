"""Folds pointwise ops on the result of a matmul into the matmul's epilogue, if cuBLASLt supports the epilogue.

    %h = allocate bf16[M, N]
    matmul %x, %w -> %h
    launch @add_relu_y %h, %b -> %y

becomes

    matmul %x, %w bias %b activation relu -> %y

with `kernel @add_relu_y(%h, %b) { %s = add(%h, %b); %y = relu(%s) }`.

Folds a factor, an added tensor with the layout of the result, a bias per column, and relu. Folds the tanh gelu if elements of the result
have at most 16 bits. The epilogue reads unrounded sums. The matmul moves to the position of the launch.

Folds all ops of the kernel, or all ops up to a value that the kernel writes to memory anyway. A fold that ends elsewhere would save no pass
over memory. In a sum of matmuls, each matmul accumulates onto the result of the previous matmul.
"""

from dataclasses import dataclass, replace
from math import frexp

from hostweave.analysis.def_use import Place, def_use
from hostweave.analysis.kernel_indices import NotOneKernel, iteration
from hostweave.fusion_ir.ir import Op, Value
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import launched, registered
from hostweave.host_ir.rules.computing import why_no_epilogue
from hostweave.options import Options
from hostweave.types.tensor import is_matrix

SMALLEST, LARGEST = 2.0**-126, 2.0**127  # bounds of factors, because cuBLASLt takes factors in f32


def fold_epilogues(program: ir.HostProgram, options: Options) -> ir.HostProgram:
    while True:
        matmuls = _Matmuls(program)
        launches = matmuls.uses.instructions(ir.Launch)
        folded = {place.number: found for place, launch in launches if (found := matmuls.folded(place, launch))}
        if not folded:
            return program
        program = _rewritten(program, folded)


@dataclass(frozen=True)
class _Folded:
    """Replacement of a launch: a matmul, and the launch of the rest of the kernel, if any."""

    old: Place
    new: ir.Matmul
    left: tuple[ir.Launch, ir.Kernel] | None = None


class _Matmuls:
    def __init__(self, program: ir.HostProgram):
        self.uses = def_use(program)
        self.kernels = {kernel.name: kernel for kernel in program.kernels}

    def folded(self, place: Place, launch: ir.Launch) -> _Folded | None:
        """Folds a launch into the last possible matmul that computes an operand. None if the launch fits no matmul."""
        if launch.kernel not in self.kernels:
            return None
        made = [(*found, src) for src in launch.srcs if (found := self.matmul_of(src, place))]
        last_first = sorted(made, key=lambda one: -one[0].number)
        return next(filter(None, (self.folded_into(*one, place, launch) for one in last_first)), None)

    def matmul_of(self, name: str, reader: Place) -> tuple[Place, ir.Matmul] | None:
        """Matmul that writes a buffer. None if a third instruction accesses the buffer, or the matmul cannot move to `reader`."""
        root = self.uses.root(name)
        touches, srcs = self.uses.touches[root], tree.names(reader.instruction, "read")
        if root not in self.uses.allocates or len(touches) != 2 or sum(self.uses.root(src) == root for src in srcs) > 1:
            return None
        maker, matmul = touches[0], touches[0].instruction
        if not isinstance(matmul, ir.Matmul) or matmul.dst != name or touches[1] is not reader or maker.body is not reader.body:
            return None
        between = maker.body[maker.index + 1 : reader.index]
        if any(i.orders for i in tree.walk(between)) or self.uses.reads([matmul]) & self.uses.writes(between):
            return None
        return maker, matmul

    def folded_into(self, place: Place, matmul: ir.Matmul, made: str, reader: Place, launch: ir.Launch) -> _Folded | None:
        """Folds the ops of a launch into the matmul of the operand `made`, up to the first written value. None if impossible."""
        kernel = self.kernels[launch.kernel]
        buffers = {p.name: src for src, p in zip(launch.srcs, kernel.inputs, strict=True)}
        targets = {result.name: dst for dst, result in zip(launch.dsts, kernel.results, strict=True)}
        value, ended, gone = kernel.inputs[launch.srcs.index(made)].name, matmul, list[Op]()
        while value not in targets:
            users = [op for op in kernel.ops if value in op.tensors]
            longer = _ending(ended, users[0], value, kernel, buffers) if len(users) == 1 else None
            if longer is None and gone and self.is_sum_of_products(reader, launch, kernel):
                targets[value] = made  # The other matmuls of the sum accumulate onto the buffer `made`.
                break
            if longer is None:
                return None
            ended, value, gone = longer, users[0].result.name, [*gone, users[0]]
        ended = replace(ended, dst=targets[value], location=gone[-1].location)
        # The shapes differ if a folded op broadcasts the result of the matmul.
        if self.uses.types[ended.dst].shape != self.uses.types[made].shape or not self.is_possible(ended):
            return None
        rest = tuple(op for op in kernel.ops if op not in gone)
        if not rest:
            return _Folded(place, ended)
        left = _left(kernel, rest, gone[-1].result)
        try:
            iteration(left)
        except NotOneKernel:
            return None
        buffers[value] = targets[value]
        srcs, dsts = (tuple((buffers | targets)[p.name] for p in parameters) for parameters in (left.inputs, left.results))
        return _Folded(place, ended, (replace(launch, srcs=srcs, dsts=dsts), left))

    def is_sum_of_products(self, place: Place, launch: ir.Launch, kernel: ir.Kernel) -> bool:
        """True if a kernel only adds tensors, and matmuls compute all of them, or all but one. If all these matmuls are folded, the kernel
        disappears."""
        return all(op.kind == "add" for op in kernel.ops) and sum(self.matmul_of(src, place) is None for src in launch.srcs) < 2

    def is_possible(self, matmul: ir.Matmul) -> bool:
        """True if cuBLASLt supports the matmul, and the result does not overwrite an operand."""
        types, root = self.uses.types, self.uses.root
        dst = types[matmul.dst]
        if not is_matrix(dst) or any(types[name] != dst for name in matmul.accumulate):
            return False
        if any(types[name].strides is not None for name in matmul.bias):
            return False
        if (matmul.bias or matmul.activation) and why_no_epilogue(types[matmul.a], types[matmul.b], dst):
            return False
        return root(matmul.dst) not in {root(name) for name in tree.names(matmul, "read")}


def _ending(matmul: ir.Matmul, op: Op, value: str, kernel: ir.Kernel, buffers: dict[str, str]) -> ir.Matmul | None:
    others = [operand for operand in op.operands if operand != value]
    if matmul.activation or len(others) != len(op.operands) - 1:
        return None
    if op.result.type.dtype.itemsize <= ir.ACTIVATIONS.get(op.kind, 0):
        return replace(matmul, activation=op.kind)
    inputs = {p.name: p.type.shape for p in kernel.inputs}
    match op.kind, *others:
        case "add", str(name) if name in inputs:
            if inputs[name] == op.result.type.shape and not matmul.accumulate:
                return replace(matmul, accumulate=(buffers[name],))
            if inputs[name] == op.result.type.shape[-1:] and not matmul.bias:
                return replace(matmul, bias=(buffers[name],))
        case ("negative",):
            return _scaled(matmul, -1.0)
        case "multiply", int(factor) | float(factor):
            return _scaled(matmul, factor)
        # Only powers of 2 have exact reciprocals.
        case "divide", int(divisor) | float(divisor) if op.operands[0] == value and abs(frexp(divisor)[0]) == 0.5:
            return _scaled(matmul, 1 / divisor)
    return None


def _scaled(matmul: ir.Matmul, factor: float) -> ir.Matmul | None:
    scale = matmul.scale * factor
    can = SMALLEST <= abs(scale) < LARGEST and not matmul.accumulate and not matmul.bias
    return replace(matmul, scale=scale) if can else None


def _left(kernel: ir.Kernel, ops: tuple[Op, ...], made: Value) -> ir.Kernel:
    """Kernel without the folded ops. The result of the matmul becomes an input if a remaining op reads this result."""
    used = {name for op in ops for name in op.tensors}
    inputs = tuple(p for p in (*kernel.inputs, ir.Parameter(made.name, made.type)) if p.name in used)
    results = tuple(result.name for result in kernel.results if result.name != made.name)
    return replace(kernel, inputs=inputs, ops=ops, returned=() if results == (ops[-1].result.name,) else results)


def _rewritten(program: ir.HostProgram, folded: dict[int, _Folded]) -> ir.HostProgram:
    kernels = {kernel.name: kernel for kernel in program.kernels}

    def edit(found: _Folded) -> tree.Body:
        if found.left is None:
            return (found.new,)
        launch, kernel = found.left
        return found.new, replace(launch, kernel=registered(kernels, kernel, kernel.descriptive_name))

    edits = {found.old.number: () for found in folded.values()} | {launch: edit(found) for launch, found in folded.items()}
    body = tree.eliminate_dead_code(tree.edited(program.body, edits))
    return replace(program, body=body, kernels=launched(kernels.values(), body))
