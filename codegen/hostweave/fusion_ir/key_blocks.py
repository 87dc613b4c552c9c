"""Attention over blocks of keys."""

from collections.abc import Iterator
from dataclasses import dataclass

from hostweave.fusion_ir.emitter import OpRewriter
from hostweave.fusion_ir.ir import Fusion, Op, attributes
from hostweave.fusion_ir.ops.attention import COUNTS, LEAST_SCORE
from hostweave.fusion_ir.ops.attributes import CAUSAL, IS_PACKED, KEY_BLOCKS, WINDOW
from hostweave.fusion_ir.resharding import step_of
from hostweave.fusion_ir.rewriting import consumers
from hostweave.fusion_ir.sharding import Axes

FIRST, KEPT = attributes(axis=(0,)), attributes(axis=(0,), keepdims=True)


class BlockWriter(OpRewriter):
    """Emits ops that merge the results of blocks."""

    def __init__(self, fusion: Fusion):
        super().__init__(fusion)
        # log-sum-exps -> four values: the maximum, the shift, exp(lse - shift), and the sum of these exps, at least 1
        self.sums: dict[str, tuple[str, str, str, str]] = {}

    def join(self, lse: str, lses: str, blocks: str) -> None:
        """Emits the merged result or, for an attention_lse, the merged log-sum-exps. `blocks` has the result of each block, and `lse` the
        log-sum-exp of each block. `lses` is `lse`, replicated along dim 0. Dim 0 of all three tensors is the block."""
        if lses not in self.sums:
            largest = self.make("max", lses, how=KEPT)
            shift = self.make("maximum", largest, LEAST_SCORE, word="shift")
            exps = self.make("exp", self.make("subtract", lses, shift), word="weights" if lse == lses else "exp")
            sums = self.make("sum", exps, how=KEPT, word="sums")
            self.sums[lses] = largest, shift, exps, self.make("maximum", sums, 1.0)  # A row without keys would divide by 0.
        largest, shift, exps, sums = self.sums[lses]
        if self.op.kind == "attention_lse":
            total = self.make("add", self.make("log", sums), largest)
            self.emit(Op("select", (total,), self.op.result, attributes(axis=0, index=0), self.op.location))
            return
        weights = exps if lse == lses else self.make("exp", self.make("subtract", lse, shift), word="weights")
        weights = self.make("divide", weights, sums)
        weights = self.make("expand_dims", weights, how=attributes(axis=(len(self.op.result.type.dims),)))
        weighted = self.make("multiply", self.make("astype", blocks), weights)
        # For a block without valid keys, `join_blocks_of_keys` reads one invalid key, so the result may be NaN.
        weighted = self.make("where", self.make("greater", weights, 0.0), weighted, 0.0)
        self.emit(Op("astype", (self.make("sum", weighted, how=FIRST),), self.op.result, location=self.op.location))


@dataclass(frozen=True)
class GatheredKeys:
    """An attention op, and the all-gathers of its keys and values, which only this op and an attention_lse read."""

    attention: Op
    keys: Op
    values: Op

    @property
    def gathers(self) -> tuple[Op, Op]:
        return self.keys, self.values

    @property
    def axes(self) -> Axes:
        return step_of(self.keys).axes

    @property
    def dim(self) -> int:
        """Dim of the keys in the gathered tensors."""
        return len(self.keys.result.type.dims) - 2


def attended_alone(fusion: Fusion) -> Iterator[tuple[Op, Op | None]]:
    """Yields attention ops, each with the attention_lse of the same queries and keys, or None. Skips ops whose keys or values a third
    op reads, packed ops, and ops with a window, blocks or optional operands."""
    uses = consumers(fusion)
    for op in fusion.ops:
        if op.kind != "attention" or len(op.tensors) > COUNTS[op.kind] or op[KEY_BLOCKS] or op[WINDOW] or op[IS_PACKED]:
            continue
        query, key, value = op.tensors
        first, *others = uses[key]
        lse = next((user for user in others if user and user.kind == "attention_lse"), None)
        is_alike = lse is None or (lse.tensors, lse.attributes) == ((query, key), op.attributes)
        if first == op and uses[value] == [op] and others == [lse] * len(others) and len(others) < 2 and is_alike:
            yield op, lse


def gathered_keys(fusion: Fusion) -> Iterator[GatheredKeys]:
    """Yields the ops of `attended_alone` whose keys and values were sharded alike and are all-gathered. With a causal mask, rows must be
    sharded like the keys before the all-gather. Skips ops on a part of the mesh."""
    for op, _ in attended_alone(fusion):
        query, *others = op.tensors
        keys, values = map(fusion.made.get, others)
        if keys is None or values is None or not _is_of_keys(keys) or not _is_of_keys(values) or op.result.type.mesh:
            continue
        rows, of_keys, of_values = (fusion.types[name].dims[-2] for name in (query, keys.tensors[0], values.tensors[0]))
        if of_keys == of_values and (not op[CAUSAL] or rows == of_keys):
            yield GatheredKeys(op, keys, values)


def _is_of_keys(op: Op) -> bool:
    dim = len(op.result.type.dims) - 2
    return op.kind == "all_gather" and step_of(op).dim == dim and not op.result.type.dims[dim].axes
