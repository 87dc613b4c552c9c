"""Moves the reduction of partial sums past linear ops, to the point where the fewest bytes are reduced.

    %a_partial: f32[M, K] partial(sum, x) = matmul(%p, %v)
    %a: f32[M, K] = reshard(%a_partial)
    %b_partial: f32[M, K] partial(sum, x) = matmul(%q, %w)
    %b: f32[M, K] = reshard(%b_partial)
    %y: f32[M, K] = add(%a, %b)

becomes

    %a_partial: f32[M, K] partial(sum, x) = matmul(%p, %v)
    %b_partial: f32[M, K] partial(sum, x) = matmul(%q, %w)
    %y_partial: f32[M, K] partial(sum, x) = add(%a_partial, %b_partial)
    %y: f32[M, K] = reshard(%y_partial)
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hostweave.base.errors import ProgramError
from hostweave.base.min_cut import INFINITE, min_cut
from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.ops import OPS, operand_types
from hostweave.fusion_ir.resharding import cost
from hostweave.fusion_ir.rewriting import consumers
from hostweave.fusion_ir.sharding import flow, layout, partial_of, with_layout
from hostweave.options import Options
from hostweave.types.tensor import TensorType

Edge = tuple[tuple[str, str], tuple[str, str], int]
TERMS, SUMS = ("terms", ""), ("sums", "")  # source and sink of the flow graph


def sink_reductions(fusion: Fusion, options: Options) -> Fusion:
    """Moves a reduction if the move saves bytes, or saves communications at equal bytes."""
    sinking = _Sinking(fusion, options)
    return sinking.rewritten(min_cut(sinking.edges(), TERMS, SUMS)) if sinking.passing else fusion


@dataclass(frozen=True)
class _Terms:
    """Terms of an op's result, and their type. Each rank applies the op to `operands`. For operands in `summed`, the rank reads its term
    instead of the sum."""

    type: TensorType
    operands: tuple[str, ...]
    summed: tuple[str, ...]


class _Sinking:
    """Decides by a minimum cut which ops are applied to terms, and which to sums."""

    def __init__(self, fusion: Fusion, options: Options):
        self.fusion, self.sizes = fusion, options.sizes
        self.types = fusion.types
        self.made = fusion.made
        self.uses = consumers(fusion)
        self.sums: dict[str, Op] = {}  # result -> reshard of a partial value
        self.passing: dict[str, _Terms] = {}  # result of an op that can be applied to terms -> its terms
        for op in fusion.ops:
            if op.kind == "reshard" and self.is_sum(op):
                self.sums[op.result.name] = op
            elif (terms := self.passed(op)) is not None:
                self.passing[op.result.name] = terms

    def is_sum(self, op: Op) -> bool:
        source, result = self.types[op.tensors[0]], op.result
        return source.partial is not None and not (result.type.partial or result.stream) and source.mesh == result.type.mesh

    def passed(self, op: Op) -> _Terms | None:
        """Terms of the op's result, computed from the terms of its operands. None if the op cannot be applied to terms."""
        summed = tuple(name for name in dict.fromkeys(op.tensors) if self.passes_on(name))
        if not summed or not OPS[op.kind].linear or op.result.stream or op.result.pinned:
            return None
        if op.result.type.partial and not all(user and user.kind == "reshard" and self.is_sum(user) for user in self.uses[op.result.name]):
            return None
        for operands in (op.tensors, tuple(name if name in summed else self.before_slice(name) for name in op.tensors)):
            types = {name: self.terms_type(name) if name in summed else self.types[name] for name in operands}
            named = op.renamed(dict(zip(op.tensors, operands, strict=True)))
            given = operand_types(named, types)
            rule = flow(named, given, self.fusion.mesh)
            try:
                partial = partial_of(named, given, rule)
            except ProgramError:
                continue
            if rule.operands(rule.result) == tuple(map(layout, given)):
                return _Terms(with_layout(op.result.type, rule.result, partial), operands, summed)
        return None

    def passes_on(self, name: str) -> bool:
        """True if ops can read the terms of a value instead of the sum. Sums with a stated sharding must be computed."""
        return name in self.passing or (name in self.sums and not self.made[name].result.pinned)

    def terms_type(self, name: str) -> TensorType:
        if name in self.passing:
            return self.passing[name].type
        (source,) = self.sums[name].tensors
        return self.terms_type(source) if source in self.passing else self.types[source]

    def before_slice(self, name: str) -> str:
        """Operand of the inserted reshard that computes a value, if operand and value have the same mesh. Otherwise the value itself."""
        op = self.made.get(name)
        is_inserted = op is not None and op.kind == "reshard" and not op.result.pinned and not op.result.stream
        return op.tensors[0] if op and is_inserted and self.types[op.tensors[0]].mesh == self.types[name].mesh else name

    def edges(self) -> Iterator[Edge]:
        """Edges of the flow graph. The cost of a cut is the cost of all reductions that the cut requires."""
        for name, op in self.sums.items():
            (source,) = op.tensors
            if source in self.passing:  # If the op of `source` is applied to sums, the reshard `op` remains.
                yield TERMS, ("value", name), self.cost(self.types[source], name)
                yield ("value", name), ("value", source), INFINITE
                yield ("value", source), ("value", name), INFINITE
            else:
                yield TERMS, ("value", name), INFINITE
            yield from self.edges_of_sum(name)
        for name, terms in self.passing.items():
            yield from ((("value", name), ("value", operand), INFINITE) for operand in terms.summed)
            if not terms.type.partial or not self.types[name].partial:
                yield from self.edges_of_sum(name)

    def edges_of_sum(self, name: str) -> Iterator[Edge]:
        """Edges for the reduction of a value's terms. A cut pays for the reduction once, if any consumer needs the sum."""
        yield ("value", name), ("sum", name), self.cost(self.terms_type(name), name)
        for user in self.uses[name]:
            is_passing = user is not None and name in (self.passing[user.result.name].summed if user.result.name in self.passing else ())
            yield ("sum", name), ("value", user.result.name) if user and is_passing else SUMS, INFINITE

    def cost(self, terms: TensorType, name: str) -> int:
        """Cost of a reduction as one int, which orders reductions by bytes, and then by number of communications."""
        moved, count = cost(terms, self.reduced_to(name).type, self.fusion.mesh, self.sizes)
        return int(moved * 2**20) + count

    def reduced_to(self, name: str) -> Value:
        """Value that a reduction produces: the result of the only consumer if this consumer is a reshard, otherwise the value itself."""
        users = self.uses[name]
        user = users[0] if len(users) == 1 else None
        is_next = user and user.kind == "reshard" and user.result.type.mesh == self.types[name].mesh and not self.made[name].result.pinned
        return user.result if user and is_next and name in self.passing else self.made[name].result

    def rewritten(self, side: set[tuple[str, str]]) -> Fusion:
        taken, ops = set(self.fusion.values()), list[Op]()
        terms: dict[str, str] = {}  # value -> its terms
        names: dict[str, str] = {}  # term without other consumers -> name of the sum, which is no longer computed
        for op in self.fusion.ops:
            name = op.result.name
            passing = self.passing.get(name) if ("value", name) in side else None
            is_needed = ("sum", name) not in side
            if passing:
                operands = tuple(terms[operand] if operand in passing.summed else operand for operand in passing.operands)
                is_term_alone = not is_needed or op.result.type.partial or self.reduced_to(name).name != name
                term = Value(name if is_term_alone else claim_unique(f"{name}_partial", taken), passing.type)
                terms[name] = term.name
                ops.append(replace(op.renamed(dict(zip(op.tensors, operands, strict=True))), result=term))
                if is_term_alone:
                    continue
                op = Op("reshard", (term.name,), op.result, location=op.location)
            elif name in self.sums and ("value", name) in side:
                (source,) = op.tensors
                terms[name] = terms.get(source, source)
                if not is_needed:
                    names |= {source: name} if source in self.made and self.uses[source] == [op] else {}
                    continue
            ops.append(op)
        body = (replaced(op.renamed(names), result=replaced(op.result, name=names.get(op.result.name, op.result.name))) for op in ops)
        return replaced(self.fusion, body=tuple(body))
