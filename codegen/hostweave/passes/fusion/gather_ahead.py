"""Gathers weights of a repeat ahead: moves gathers of parameters out of functions that repeats call, into the callers.

    function @layer(%x: bf16[M@x, K], %w: bf16[K@x, K]) {
      %wg: bf16[K, K] = all_gather(%w, dim=0, axes=(x))
      %y: bf16[M@x, K] = matmul(%x, %wg)
      return %y
    }
    fusion @model(%x: bf16[M@x, K], %w: bf16[L, K@x, K] as w_0 to w_31 of layers) mesh(x=8) {
      %y: bf16[M@x, K] = repeat @layer(%x, %w, depth=L, each=(1,), carried=(0,), returned=(0,))

becomes

    function @layer(%x: bf16[M@x, K], %w: bf16[K, K]) {
      %y: bf16[M@x, K] = matmul(%x, %w)
      return %y
    }
    fusion @model(%x: bf16[M@x, K], %w: bf16[L, K@x, K] as w_0 to w_31 of layers) mesh(x=8) {
      %w_gathered: bf16[L, K, K] async = all_gather(%w, dim=1, axes=(x))
      %y: bf16[M@x, K] = repeat @layer(%x, %w_gathered, depth=L, each=(1,), carried=(0,), returned=(0,))

The lowering of the repeat gathers one tensor of the stack for each call, during the previous call, and stores only two gathered tensors.
If all calls read the same tensor, it is gathered once, before the repeat.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hostweave.base.names import claim_unique
from hostweave.base.unchanged import replaced
from hostweave.fusion_ir.ir import ChunkLoop, Fusion, Op, Value
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import CARRIED, DEPTH, DIM, EACH, INDEX, LAGGED
from hostweave.fusion_ir.ops.calls import is_repeat, stacked
from hostweave.fusion_ir.rewriting import consumers
from hostweave.options import Options
from hostweave.tune.cost import seconds
from hostweave.tune.overlaps import HIDDEN_SECONDS, is_better_inside


def gather_ahead(fusion: Fusion, options: Options) -> Fusion:
    """Moves the gathers of a function if every caller can gather instead, and if the gathers take long enough to be worth a fork and a
    wait. Gathers in chunk loops stay. Gathers with an alternative in `options.choices` stay too, because choices name the function. With
    tensors on meshes of some ranks, nothing changes: other ranks would record no event."""
    if options.overlap == "off" or any(op.result.type.mesh for op in fusion.all_ops):
        return fusion
    bodies, repeated = (*fusion.functions, fusion), set[str]()
    for body in reversed(bodies):  # Callers come before callees.
        repeated |= {op.callee.name for op in body.ops if op.callee and (is_repeat(op) or body.name in repeated)}
    done, moved = dict[str, Fusion](), dict[str, list[_MovedGather]]()
    for body in bodies:
        body = replaced(body, body=tuple(_CallingBody(body, done, moved).items()))
        if body.name in repeated:
            calls = [op for other in bodies for op in other.ops if op.callee and op.callee.name == body.name]
            gathers = [gather for gather in _movable(body, calls) if f"@{body.name} %{gather.result.name}" not in options.choices]
            times = seconds(body, options.sizes, options.figures, options.tf32)
            ahead = [gather for gather in gathers if not is_better_inside(gather, gathers, body, options, times)]
            if sum(times[gather.result.name] for gather in ahead) >= HIDDEN_SECONDS:
                body, moved[body.name] = _without(body, ahead)
        done[body.name] = body
    return done[fusion.name]


@dataclass(frozen=True)
class _MovedGather:
    """A gather of a function's parameter that the callers do. If the function also reads the parameter itself, the gathered tensor is a
    further parameter."""

    gather: Op
    parameter: int
    is_further: bool


def _movable(function: Fusion, calls: Sequence[Op]) -> list[Op]:
    """Gathers of parameters that all calls can do: the parameters must not depend on an earlier call of the same repeat."""
    fixed = {at for op in calls if is_repeat(op) for at in (*op[CARRIED], *op[LAGGED])}
    names = {value.name for at, value in enumerate(function.inputs) if at not in fixed}
    gathers = (op for op in function.ops if OPS[op.kind].gathers_shards and not op.result.stream and op.tensors[0] in names)
    return [op for op in gathers if op.result.name not in function.outputs]


def _without(function: Fusion, gathers: Sequence[Op]) -> tuple[Fusion, list[_MovedGather]]:
    inputs, users, moved, names = list(function.inputs), consumers(function), list[_MovedGather](), dict[str, str]()
    numbers = {value.name: at for at, value in enumerate(inputs)}
    for gather in gathers:
        (name,), gathered = gather.tensors, gather.result.name
        is_further = len(users[name]) > 1 or name in function.donated
        names[gathered] = gathered if is_further else name
        if is_further:
            inputs.append(Value(gathered, gather.result.type, pinned=True))
        else:
            inputs[numbers[name]] = Value(name, gather.result.type, pinned=True)
        moved.append(_MovedGather(gather, numbers[name], is_further))
    kept = (item for item in function.body if not (isinstance(item, Op) and item.result.name in names))
    body = (
        item.renamed(names) if isinstance(item, Op) else replace(item, ops=tuple(op.renamed(names) for op in item.ops)) for item in kept
    )
    choices = tuple(choice for choice in function.choices if choice.value not in names)
    return replace(function, inputs=tuple(inputs), body=tuple(body), choices=choices), moved


class _CallingBody:
    """Adds the gathers that moved out of callees to a body."""

    def __init__(self, body: Fusion, done: Mapping[str, Fusion], moved: Mapping[str, list[_MovedGather]]):
        self.given, self.done, self.moved = body, done, moved
        self.taken = set(body.values())

    def items(self) -> Iterator[Op | ChunkLoop]:
        for item in self.given.body:
            if not isinstance(item, Op) or not item.callee:
                yield item
            elif item.kind == "output":
                yield self.output(item, item.callee)
            else:
                yield from self.call(item, item.callee)

    def output(self, op: Op, function: Fusion) -> Op:
        """Adjusts the index of a stack of results: these indices follow those of the parameters."""
        further = sum(each.is_further for each in self.moved.get(function.name, ()))
        is_shifted = further and op[INDEX] >= len(function.outputs) + len(function.inputs)
        op = op.with_attribute(INDEX, op[INDEX] + further) if is_shifted else op
        return replaced(op, callee=self.done[function.name])

    def call(self, op: Op, function: Fusion) -> Iterator[Op]:
        operands, further, each = list(op.operands), list[str](), list[int]()
        for one in self.moved.get(function.name, ()):
            source, is_stack = str(op.operands[one.parameter]), is_repeat(op) and one.parameter in op[EACH]
            gather = one.gather if not is_stack else one.gather.with_attribute(DIM, one.gather[DIM] + 1)
            type = stacked(gather.result.type, op[DEPTH]) if is_stack else gather.result.type
            result = Value(claim_unique(f"{source}_gathered", self.taken), type, is_async=is_stack)
            yield replace(gather, operands=(source,), result=result)
            if not one.is_further:
                operands[one.parameter] = result.name
                continue
            each += [len(function.inputs) + len(further)] if is_stack else []
            further.append(result.name)
        end = len(function.inputs)  # The first operands of lagged parameters follow.
        op = replaced(op, operands=(*operands[:end], *further, *operands[end:]), callee=self.done[function.name])
        yield op.with_attribute(EACH, (*op[EACH], *each)) if each else op
