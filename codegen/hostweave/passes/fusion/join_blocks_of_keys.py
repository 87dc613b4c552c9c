"""Each rank attends to its shard of the keys. The results are merged by their log-sum-exps, so keys are not gathered.

    %y: bf16[H, S, 64] = attention(%q, %k, %v, scale=0.125)        # q: [H, S, 64], k and v: [H, T@cp, 64], on 2 ranks

becomes

    %y_blocks: bf16[2@cp, H, S, 64] = attention(%q, %k, %v, scale=0.125, blocks=2)
    %y_lse: f32[2@cp, H, S] = attention_lse(%q, %k, scale=0.125, blocks=2)
    %y_lses: f32[2, H, S] = reshard(%y_lse)
    %y_shift: f32[1, H, S] = maximum(max(%y_lses), -1e30)
    %y_sums: f32[1, H, S] = sum(exp(%y_lses - %y_shift))
    %y_weights: f32[2@cp, H, S] = exp(%y_lse - %y_shift)
    %y_divide: f32[2@cp, H, S] = %y_weights / maximum(%y_sums, 1.0)
    %y: bf16[H, S, 64] = astype(sum(where(%y_divide > 0, %y_divide * astype(%y_blocks), 0)))

The IR has a separate line for each op. The reshard gathers the log-sum-exps. The last sum is in f32, and partial over the ranks.
"""

from collections.abc import Callable
from dataclasses import replace

from hostweave.fusion_ir.emitter import Attributes
from hostweave.fusion_ir.index_map import ONE
from hostweave.fusion_ir.ir import Fusion, Op, Value, attributes
from hostweave.fusion_ir.key_blocks import FIRST, BlockWriter
from hostweave.fusion_ir.ops.attention import BOTTOM_RIGHT, masks_of
from hostweave.fusion_ir.ops.attributes import CAUSAL, HAS_BIAS, IS_PACKED, KEY_BLOCKS, SCALE, WINDOW
from hostweave.fusion_ir.sharding import Axes
from hostweave.options import Options
from hostweave.types.size import Size
from hostweave.types.tensor import Dim, TensorType, i32
from hostweave.types.zigzag import Zigzag


def join_blocks_of_keys(fusion: Fusion, options: Options) -> Fusion:
    return _Joining(fusion).rewritten()


class _Joining(BlockWriter):
    def __init__(self, fusion: Fusion):
        super().__init__(fusion)
        self.known: dict[object, tuple[str, ...]] = {}  # operands and attributes -> results of the ops made for them

    def add(self, op: Op) -> None:
        axes = self.axes_of_blocks(op)
        if not axes:
            self.emit(op)
            return
        self.blocks, masks = op.result.type.mesh_in(self.mesh).size_of(axes), masks_of(op, op.tensors)
        self.lengths, self.bias = (tuple(name for word, name in masks.items() if word == wanted) for wanted in ("lengths", "bias"))
        lengths = self.once(("lengths", self.blocks, *self.lengths, self.types[op.tensors[1]].shape[-2]), self.lengths_of_blocks)
        blocks = ""
        if op.kind == "attention":
            blocks = self.make("attention", *op.tensors[:3], *lengths[1:], *self.bias, word="blocks", how=self.how)
        lse, lses = self.once((*op.tensors[:2], *lengths, *self.bias, self.how), lambda: self.log_sum_exps(*lengths))
        self.join(lse, lses, blocks)

    def axes_of_blocks(self, op: Op) -> Axes:
        """Mesh axes that split the keys into blocks. Empty if the op cannot be rewritten."""
        if op.kind not in ("attention", "attention_lse") or op[KEY_BLOCKS] or op[WINDOW] or op[IS_PACKED] or op.result.stream:
            return ()
        q, k, *_ = (self.types[name] for name in op.tensors)
        sees_all = not op[CAUSAL] or (q.shape[-2] == ONE and op[CAUSAL] == BOTTOM_RIGHT)
        others = {*op.result.type.axes, *q.axes}
        # In zigzag, the keys of a rank are not one block. Causal rows in zigzag become two ops, which attend to gathered keys.
        if isinstance(k.dims[-2].axes, Zigzag) or (op[CAUSAL] and isinstance(q.dims[-2].axes, Zigzag)):
            return ()
        return () if ("lengths" in masks_of(op, op.tensors) and not sees_all) or others & set(k.dims[-2].axes) else k.dims[-2].axes

    @property
    def how(self) -> Attributes:
        """Attributes of attention over blocks. With lengths, each row sees all valid keys, and there is no causal mask."""
        causal = None if self.lengths else self.op[CAUSAL] or None
        return attributes(scale=self.op[SCALE], causal=causal, bias=self.op[HAS_BIAS], blocks=self.blocks)

    def once(self, key: object, make: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def log_sum_exps(self, *lengths: str) -> tuple[str, str]:
        """Log-sum-exps of this rank's block, and of all blocks. A block without valid keys has -inf."""
        lse = self.make("attention_lse", *self.op.tensors[:2], *lengths[1:], *self.bias, word="lse", how=self.how)
        if lengths:
            rows = tuple(range(len(self.types[lengths[0]].dims), len(self.types[lse].dims)))
            has_some = self.make("greater", self.make("expand_dims", lengths[0], how=attributes(axis=rows)), 0)
            lse = self.make("where", has_some, lse, float("-inf"))
        type = self.types[lse]
        whole = replace(type, dims=(Dim(type.shape[0]), *type.dims[1:]))
        lses = Value(self.free_name(f"{lse}s"), whole)
        self.emit(Op("reshard", (lse,), lses, location=self.op.location))
        return lse, lses.name

    def lengths_of_blocks(self) -> tuple[str, ...]:
        """Number of valid keys of each block, [blocks, ...], and the larger of this number and 1, because attention needs at least one key.
        Empty if there are no lengths."""
        if not self.lengths:
            return ()
        size, (lengths,) = self.types[self.op.tensors[1]].shape[-2], self.lengths
        number = self.numbers(Size(self.blocks))
        if dims := self.types[lengths].dims:
            number = self.make("expand_dims", number, how=attributes(axis=tuple(range(1, 1 + len(dims)))))
        if size.is_int:
            block: str | int = -(-int(size) // self.blocks)
        else:
            last = self.make("max", self.numbers(size), how=FIRST)
            block = self.make("floor_divide", self.make("add", last, self.blocks), self.blocks)
        left = self.make("subtract", lengths, self.make("multiply", number, block))
        valid = self.make("minimum", self.make("maximum", left, 0), block)
        return valid, self.make("maximum", valid, 1)

    def numbers(self, size: Size) -> str:
        return self.make("iota", like=TensorType(i32, (Dim(size),), mesh=self.op.result.type.mesh))
