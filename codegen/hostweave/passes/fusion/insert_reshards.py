"""Inserts reshards of operands that a consumer needs in another sharding, and of partial results.

    %y: bf16[M, N] stream(M, 8) = matmul(%x, %w)        # x: [M@x, K], w: [K, N]

becomes

    %x_gathered: bf16[M, K] = reshard(%x)
    %y: bf16[M, N] stream(M, 8) = matmul(%x_gathered, %w)
"""

import re
from dataclasses import replace

from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.emitter import OpRewriter
from hostweave.fusion_ir.ir import Fusion, Op, Stream, Value
from hostweave.fusion_ir.ops import OPS, RESHARDS, operand_types
from hostweave.fusion_ir.ops.reductions import as_term, widens
from hostweave.fusion_ir.resharding import plan, zigzag_changes
from hostweave.fusion_ir.rewriting import consumers
from hostweave.fusion_ir.sharding import Layout, flow, layout, partial_of, with_layout
from hostweave.options import Options
from hostweave.transports.transport import DEFAULT, find_transport
from hostweave.types.tensor import DTYPES, DType, Partial, TensorType
from hostweave.types.zigzag import Zigzag


def insert_reshards(fusion: Fusion, options: Options) -> Fusion:
    """Inserts reshards. Also inserts casts of partial values if the transport cannot reduce their dtype, or if `partial_dtype` asks for
    another dtype. After this pass, the operands of every op except reshards have the layouts that the op needs."""
    return _Insertion(fusion, options).rewritten()


class _Insertion(OpRewriter):
    def __init__(self, fusion: Fusion, options: Options):
        super().__init__(fusion)
        self.options = options
        self.consumers = consumers(fusion)
        self.done: dict[tuple[str, Layout], str] = {}  # (value, layout) -> the same value in this layout
        self.carried: dict[str, DType] = {}  # partial value that was cast -> its dtype in the program
        self.renamed: dict[str, str] = {}  # result of a reshard that has no name of the user -> its new name

    def add(self, op: Op) -> None:
        if op.kind in RESHARDS:
            op = self.named_by_step(op)
            if (made := self.indexed(op.tensors[0], op.result.type)) and not op.result.stream:
                self.emit(replace(made, result=op.result))
            else:
                self.resolve(op)
            return
        op = op.renamed(self.renamed)
        operands = operand_types(op, self.types)
        passed = flow(op, operands, self.mesh)
        computed = passed.computed(layout(op.result.type))
        pairs = zip(op.operands, passed.operands(computed), strict=True)
        op = replaced(op, operands=tuple([self.resharded(o, needed, op) if isinstance(o, str) else o for o, needed in pairs]))
        if passed.partial_axes:
            op = as_term(op, operands[0])
        partial = partial_of(op, operands, passed)
        type = with_layout(op.result.type, computed, partial)
        if partial and (carrier := self.carrier(op, type, partial)):
            op, type = self.carry(op, type, carrier)
        if partial is None or self.is_resolved_by_reshard(op.result):
            self.emit(replaced(op, result=replaced(op.result, type=type)))
            return
        term = Value(self.free_name(f"{op.result.name}_partial"), type)
        self.carried |= {term.name: self.carried[op.result.name]} if op.result.name in self.carried else {}
        self.emit(replace(op, result=term))
        self.resolve(Op("reshard", (term.name,), op.result, location=op.location))

    def named_by_step(self, op: Op) -> Op:
        """Names the result of the user's reshard after the last step, as results of inserted reshards: `x_resharded` becomes `x_gathered`.
        Keeps names that the user chose, and names of results."""
        (source,), name = op.tensors, op.result.name
        op = replaced(op, operands=(self.renamed.get(source, source),))
        (given,) = op.tensors
        unnamed = re.fullmatch(rf"(.+)_{OPS['reshard'].makes}(_\d+)?", name)
        if not unnamed or name in self.fusion.outputs or zigzag_changes(self.types[given], op.result.type):
            return op
        if steps := plan(self.types[given], op.result.type, self.mesh, self.options.sizes, op.location):
            self.renamed[name] = self.free_name(f"{self.renamed.get(unnamed[1], unnamed[1])}_{OPS[steps[-1].kind].makes}")
            self.consumers[self.renamed[name]] = self.consumers[name]
        return replaced(op, result=replaced(op.result, name=self.renamed.get(name, name)))

    def resolve(self, op: Op) -> None:
        """Emits a reshard. If its operand is a partial value that was cast to another dtype, casts the result back."""
        (source,) = op.tensors
        if source not in self.carried:
            self.emit(op)
            return
        carrier, result, stream = self.types[source].dtype, op.result, op.result.stream
        carried = Value(self.free_name(f"{result.name}_{carrier}"), replace(result.type, dtype=carrier), stream)
        self.emit(replace(op, result=carried))
        if stream:  # The cast runs in the loop, unless a shard is complete only after the last iteration.
            stream = None if result.type.dims[stream.dim].axes else Stream(stream.dim, stream.chunks)
        self.emit(Op("astype", (carried.name,), replace(result, stream=stream), location=op.location))

    def carrier(self, op: Op, type: TensorType, partial: Partial) -> DType | None:
        """Dtype in which ranks reduce terms. None if the result has the same dtype."""
        transport = find_transport(DEFAULT)
        needed = transport.reduced_as.get(type.dtype.name) if partial.op in transport.reduces else None
        if needed:
            return DTYPES[needed]
        wanted = self.options.partial_dtype
        rounds = partial.op in ("sum", "prod") and type.dtype.name in ("f16", "bf16") and not OPS[op.kind].is_exact
        return wanted if wanted and rounds else None

    def carry(self, op: Op, type: TensorType, carrier: DType) -> tuple[Op, TensorType]:
        """Makes an op compute its result in `carrier`. Casts the operands of the old dtype, unless a matmul can write `carrier`."""
        if not (OPS[op.kind].is_product and widens(type.dtype, carrier)):
            cast = {name for name in op.tensors if self.types[name].dtype == type.dtype}
            operands = tuple(self.cast(str(operand), carrier, op) if operand in cast else operand for operand in op.operands)
            op = replace(op, operands=operands)
        self.carried[op.result.name] = type.dtype
        return op, replace(type, dtype=carrier)

    def cast(self, name: str, dtype: DType, op: Op) -> str:
        """Returns the value in `dtype`. Emits a cast, unless a matmul computes the value only for `op` and can write `dtype`."""
        made = next((made for made in self.ops if made.result.name == name), None)
        if made and OPS[made.kind].is_product and widens(made.result.type.dtype, dtype) and len(self.consumers[name]) == 1:
            wide = replace(made.result, type=replace(made.result.type, dtype=dtype))
            self.ops[self.ops.index(made)] = replace(made, result=wide)
            self.types[name] = wide.type
            return name
        value = Value(self.free_name(f"{name}_{dtype}"), replace(self.types[name], dtype=dtype))
        self.emit(Op("astype", (name,), value, location=op.location))
        return value.name

    def is_resolved_by_reshard(self, value: Value) -> bool:
        """True if the only consumer of a partial value is the user's reshard, and the value is not computed in a chunk loop."""
        users = self.consumers[value.name]
        return len(users) == 1 and users[0] is not None and users[0].kind in RESHARDS and value.stream is None

    def indexed(self, name: str, want: TensorType) -> Op | None:
        """The op that makes a value whose elements depend only on their index, if each rank can compute its shard of type `want`."""
        made = next((made for made in self.ops if made.result.name == name), None)
        is_in_order = want.mesh == self.types[name].mesh and not any(isinstance(axes, Zigzag) for axes in layout(want))
        return made if made and is_in_order and OPS[made.kind].arity == 0 else None

    def resharded(self, name: str, needed: Layout, op: Op) -> str:
        if layout(self.types[name]) == needed:
            return name
        if (name, needed) not in self.done:
            want = with_layout(self.types[name], needed)
            if made := self.indexed(name, want):
                value = replace(made.result, name=self.free_name(f"{name}_{OPS['shard'].makes}"), type=want)
                self.emit(replace(made, result=value))
            else:
                steps = plan(self.types[name], want, self.mesh, self.options.sizes, op.location)
                value = Value(self.free_name(f"{name}_{OPS[steps[-1].kind].makes}"), want)
                self.emit(Op("reshard", (name,), value, location=op.location))
            self.done[name, needed] = value.name
        return self.done[name, needed]
