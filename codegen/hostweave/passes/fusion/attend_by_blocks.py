"""Computes attention block by block, in the chunk loop that gathers the keys and values. The loop has one chunk per rank.

    %k_gathered: bf16[G, T, 64] stream(T, 2, put) = all_gather(%k, dim=1, axes=(cp))      # q: [H, S@cp, 64], k and v: [G, T@cp, 64]
    %v_gathered: bf16[G, T, 64] stream(T, 2, put) = all_gather(%v, dim=1, axes=(cp))
    %y: bf16[H, S@cp, 64] = attention(%q, %k_gathered, %v_gathered, scale=0.125)

becomes

    %y_kv: bf16[G, T@cp, 128] = concat(%k, %v, axis=2)
    %k_gathered: bf16[G, T, 128] stream(T, 2, put) = all_gather(%y_kv, dim=1, axes=(cp))
    %y_keys: bf16[G, T, 64] stream(T, 2) = slice(%k_gathered, axis=2, start=0, step=1)
    %y_values: bf16[G, T, 64] stream(T, 2) = slice(%k_gathered, axis=2, start=64, step=1)
    %y_blocks: bf16[2, H, S@cp, 64] stream(0, 2) = attention(%q, %y_keys, %y_values, scale=0.125, blocks=2)
    %y_lse: f32[2, H, S@cp] stream(0, 2) = attention_lse(%q, %y_keys, scale=0.125, blocks=2)

Ops that merge the results of the blocks by log-sum-exps follow. One transfer sends the keys and values of a rank.
"""

from collections.abc import Sequence
from dataclasses import replace

from hostweave.fusion_ir.ir import Fusion, Op, Stream, Value, attributes
from hostweave.fusion_ir.key_blocks import BlockWriter, GatheredKeys, gathered_keys
from hostweave.options import Options
from hostweave.types.tensor import TensorType


def attend_by_blocks(fusion: Fusion, options: Options) -> Fusion:
    found = [each for each in gathered_keys(fusion) if _is_by_blocks(each, fusion)]
    return _Attending(fusion, found).rewritten() if found else fusion


def _is_by_blocks(keys: GatheredKeys, fusion: Fusion) -> bool:
    streams, ranks = [gather.result.stream for gather in keys.gathers], fusion.mesh.size_of(keys.axes)
    stream = streams[0]
    if stream is None or stream != streams[1] or stream.algorithm == keys.keys.kind:  # A collective gathers a slice of every shard.
        return False
    return stream.chunks == ranks and stream.chunking in (None, "by_shard")


class _Attending(BlockWriter):
    def __init__(self, fusion: Fusion, found: Sequence[GatheredKeys]):
        super().__init__(fusion)
        self.by_keys = {each.keys.result.name: each for each in found}
        self.gathers = {gather.result.name for each in found for gather in each.gathers}
        self.done: dict[str, tuple[str, str]] = {}  # gathered keys -> results and log-sum-exps of the blocks

    def add(self, op: Op) -> None:
        if keys := next((self.by_keys[name] for name in op.tensors if name in self.by_keys), None):
            self.attend(keys)
        elif op.result.name not in self.gathers:
            self.emit(op)

    def attend(self, keys: GatheredKeys) -> None:
        """Rewrites an attention or attention_lse op. The first of two ops on the same keys emits the blocks that both read."""
        name = keys.keys.result.name
        if name not in self.done:
            self.done[name] = self.blocks(keys)
        blocks, lse = self.done[name]
        self.join(lse, lse, blocks)

    def blocks(self, keys: GatheredKeys) -> tuple[str, str]:
        gather, (query, *_) = keys.keys, keys.attention.tensors
        stream = gather.result.walked
        assert stream.chunks is not None
        operands = [each.tensors[0] for each in keys.gathers]
        last = len(self.types[operands[0]].dims) - 1
        packed = self.make("concat", *operands, how=attributes(axis=last), word="kv")
        dims = (*gather.result.type.dims[:-1], self.types[packed].dims[-1])
        gathered = Value(gather.result.name, replace(gather.result.type, dims=dims), stream)
        self.emit(replace(gather, operands=(packed,), result=gathered))

        def sliced(word: str, start: int, like: TensorType) -> str:
            how = attributes(axis=last, start=start, step=1)
            return self.make("slice", gathered.name, how=how, word=word, like=like, stream=Stream(keys.dim, stream.chunks))

        key = sliced("keys", 0, keys.keys.result.type)
        value = sliced("values", int(self.types[key].shape[-1]), keys.values.result.type)
        how, of_blocks = (*keys.attention.attributes, *attributes(blocks=stream.chunks)), Stream(0, stream.chunks)
        blocks = self.make("attention", query, key, value, how=how, word="blocks", stream=of_blocks)
        return blocks, self.make("attention_lse", query, key, how=how, word="lse", stream=of_blocks)
