"""Names of values: those that the user gave, of his variables, or of the op that makes the value and its operand."""

from __future__ import annotations

from collections.abc import Mapping

from hostweave.fusion_ir.frontend.trace import Tensor
from hostweave.fusion_ir.ir import Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attributes import INDEX


def names_of(tensors: Mapping[str, Tensor], needed: set[str]) -> dict[str, str]:
    """The name of each value: the user's, that of a variable, or of its op and its operand; with a number from the second on."""
    names = _Names({number: tensor._name for number, tensor in tensors.items() if tensor._name is not None})
    made = {number: tensor for number, tensor in tensors.items() if number in needed and tensor._op}
    for number, tensor in made.items():
        if tensor._variable:
            names.claim(number, tensor._variable)
    for number, tensor in made.items():
        assert tensor._op is not None
        names.derive(number, tensor._op, tensor._word)
    return names.of


class _Names:
    """Names of values by their numbers, those that the user gave first."""

    def __init__(self, given: dict[str, str]):
        self.of, self.taken = given, set(given.values())
        self.counts: dict[str, int] = {}
        self.given = set(given)  # values that are inputs, or inputs whose elements were moved: as weights are
        self.subjects: dict[str, str] = {}  # by value without a name of the user: the name that he gave to what it was made of
        self.sources: dict[str, str] = {}  # by value whose elements were moved: the name of what they were moved from

    def claim(self, number: str, wanted: str) -> None:
        """Gives a value the name, with a number where another one has it; nothing if it has a name."""
        while number not in self.of:
            self.counts[wanted] = self.counts.get(wanted, 0) + 1
            name = wanted if self.counts[wanted] == 1 else f"{wanted}_{self.counts[wanted]}"
            if name not in self.taken:
                self.of[number] = name
                self.taken.add(name)

    def derive(self, number: str, op: Op, word: str | None) -> None:
        """Names a value after its op and operand: `matmul_wq`, `matmul_wq_transposed`; `word` is the function that is made of ops."""
        moved = _movement(op)
        if moved and op.tensors[0] in self.given:
            self.given.add(number)
        if number in self.of:
            return
        # The operand that tells the op from others of its kind comes first: the weight of a matmul.
        weights = [operand for operand in op.tensors[::-1] if operand in self.given and op.kind == "matmul"]
        names = (self.subjects.get(operand, self.of[operand]) for operand in (*weights, *op.tensors))
        self.subjects[number] = next(filter(None, names), "")
        if moved and (not word or OPS[op.kind].makes):
            self.sources[number] = self.sources.get(op.tensors[0], self.of[op.tensors[0]])
            self.claim(number, f"{self.sources[number]}_{moved}")
        else:
            made = word or (op.user_kernel.name if op.user_kernel else op.callee.name if op.callee else op.kind)
            length = str(op.result.type.dims[0].size) if op.kind == "iota" else ""
            self.claim(number, "_".join(filter(str.isidentifier, (made, self.subjects[number], length))))


def _movement(op: Op) -> str:
    """What an op does that leaves the elements as they are, in a word; "" for one that computes."""
    if op.kind == "output":
        return op.callee.outputs[op[INDEX]] if op.callee else str(op[INDEX])
    if op.kind == "select":
        return str(op[INDEX]) if op[INDEX] >= 0 else "selected"
    return op.result.type.dtype.name if op.kind == "astype" else OPS[op.kind].makes
