"""Overlaps the gathers of keys and values with causal attention in zigzag, chunk by chunk, if the cost model predicts a gain.

    %y: bf16[H, S@zigzag(cp), 64] = attention(%q, %k, %v, scale=0.125, causal=top_left)        # on 2 ranks, all in zigzag

becomes, with S = 8192 and all other sizes known,

    %y_rows: bf16[H, S@cp, 64] = renumber(%q, axis=1, sources=(0, 3, 1, 2))                    # and %y_keys, %y_values
    %k_gathered: bf16[G, S, 64] stream(S, 2, put) = reshard(%y_keys)                           # and %v_gathered
    %y_attention: bf16[H, S@cp, 64] = attention(%y_rows, %k_gathered, %v_gathered, scale=0.125, causal=top_left, pieces=4)
    %y: bf16[H, S@zigzag(cp), 64] = renumber(%y_attention, axis=1, sources=(0, 2, 3, 1))
    choice %k_gathered of @f predicted: put(2) 739.8 us, none 790.7 us, p2p(2) 801.4 us

In the attention, pieces are in rank order: pieces 0 and 3 of rank 0, then pieces 1 and 2 of rank 1. All rows of a rank see the first piece
of the keys of each lower rank, but not the second piece. Only the second piece of a rank's rows sees keys of higher ranks, namely both
pieces of each higher rank.
"""

from dataclasses import replace

from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.choice import IN_SEQUENCE, Choice
from hostweave.fusion_ir.emitter import Attributes, OpRewriter
from hostweave.fusion_ir.ir import Fusion, MeshAxes, Op, Stream, Value, attributes
from hostweave.fusion_ir.key_blocks import attended_alone
from hostweave.fusion_ir.ops.attributes import CAUSAL
from hostweave.fusion_ir.sharding import Axes, layout, with_layout
from hostweave.options import Options
from hostweave.tune.overlaps import alternatives, candidates, choice_of
from hostweave.types.zigzag import Zigzag, inverse, order_of_pieces


def stream_keys_in_zigzag(fusion: Fusion, options: Options) -> Fusion:
    if options.overlap == "off":
        return fusion
    numbering = _Numbering(fusion, options)
    return replaced(numbering.rewritten(), choices=(*fusion.choices, *numbering.choices))


class _Numbering(OpRewriter):
    def __init__(self, fusion: Fusion, options: Options):
        super().__init__(fusion)
        self.options = options
        self.found = {op.result.name: beside for op, beside in attended_alone(fusion) if self.is_in_zigzag(fusion, op)}
        self.choices: list[Choice] = []
        # attention_lse op of a rewritten attention -> its new operands and attributes
        self.made: dict[str, tuple[tuple[str, ...], Attributes]] = {}

    def is_in_zigzag(self, fusion: Fusion, op: Op) -> bool:
        types = [fusion.types[name] for name in op.tensors]
        rows = {type.dims[-2] for type in (*types, op.result.type)}
        return bool(op[CAUSAL]) and len(rows) == 1 and isinstance(rows.pop().axes, Zigzag)

    def add(self, op: Op) -> None:
        choice = self.choose(op) if op.result.name in self.found else None
        self.choices += [choice] if choice else []
        if choice and choice.chosen.algorithm != IN_SEQUENCE:
            self.attend(op, self.by_rank(op, choice), (*op.attributes, *attributes(pieces=2 * choice.chosen.chunks)))
        elif op.result.name in self.made:
            (query, key, _), how = self.made[op.result.name]
            self.attend(op, (query, key), how)
        else:
            self.emit(op)

    def choose(self, op: Op) -> Choice | None:
        """Chooses between a chunk loop and gathers without overlap. None if a size is unknown, if no loop is possible, or if the fusion
        already has the choice."""
        options, gathers = self.options, [self.gather(name, op) for name in op.tensors[1:]]
        if gathers[0].result.name in {choice.value for choice in self.fusion.choices}:
            return None
        gathered = {gather.tensors[0]: gather.result.name for gather in gathers}

        def with_gathers(each: Op) -> tuple[Op, ...]:
            if each not in (op, self.found[op.result.name]):
                return (each,)
            taken = replace(each, operands=tuple(gathered.get(str(name), name) for name in each.operands))
            return (*gathers, taken) if each == op else (taken,)

        fusion = replace(self.fusion, body=tuple(made for each in self.fusion.ops for made in with_gathers(each)))
        candidate = next((found for found in candidates(fusion, options.sizes) if found.reshard == gathers[0]), None)
        if candidate is None or candidate.unknown:
            return None
        possible = alternatives(candidate, fusion, options)
        return choice_of(gathers[0], fusion, possible, options.choices)

    def gather(self, name: str, op: Op) -> Op:
        type = self.types[name]
        dim = len(type.dims) - 2
        whole = with_layout(type, tuple(() if i == dim else axes for i, axes in enumerate(layout(type))))
        how = attributes(dim=dim, axes=MeshAxes(tuple(type.dims[dim].axes)))
        return Op("all_gather", (name,), Value(self.free_name(f"{name}_gathered"), whole), how, op.location)

    def by_rank(self, op: Op, choice: Choice) -> tuple[str, ...]:
        """Operands in rank order. A loop gathers keys and values."""
        rows, *others = (self.renumbered(name, word) for name, word in zip(op.tensors, ("rows", "keys", "values"), strict=True))
        names = choice.value, self.free_name(f"{op.tensors[2]}_gathered")
        for name, wanted in zip(others, names, strict=True):
            gather = self.gather(name, op).result
            stream = Stream(len(gather.type.dims) - 2, choice.chosen.chunks, None, choice.chosen.algorithm)
            self.emit(Op("reshard", (name,), replace(gather, name=wanted, stream=stream), location=op.location))
        return rows, *names

    def renumbered(self, name: str, word: str) -> str:
        axis = len(self.types[name].dims) - 2
        return self.make("renumber", name, how=attributes(axis=axis, sources=self.order(self.types[name].dims[axis].axes)), word=word)

    def order(self, axes: Axes) -> tuple[int, ...]:
        return order_of_pieces(self.mesh.size_of(axes))

    def attend(self, op: Op, operands: tuple[str, ...], how: Attributes) -> None:
        made, axis = self.make(op.kind, *operands, how=how), len(op.result.type.dims) - (2 if op.kind == "attention" else 1)
        order = self.order(op.result.type.dims[axis].axes)
        back = attributes(axis=axis, sources=inverse(order))
        self.emit(Op("renumber", (made,), op.result, back, op.location))
        if lse := self.found.get(op.result.name):
            self.made[lse.result.name] = operands, how
