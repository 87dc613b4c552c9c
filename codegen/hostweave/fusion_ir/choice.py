"""The compiler's choice of an algorithm for a reshard, and the alternatives with predicted or measured times.

The text of a choice is one line:

    choice %x_gathered of @ag_matmul predicted: put(8) 1239.1 us, none 1516.0 us, p2p(8) 1612.4 us

The number in parentheses is the number of chunks. One chunk means an asynchronous communication without a loop.
"""

from dataclasses import dataclass

from hostweave.types.text import Reader

IN_SEQUENCE = "none"


@dataclass(frozen=True)
class Alternative:
    """An algorithm with chunks, or no overlap. `micros` is predicted for the reshard and the ops that may overlap with the reshard, or
    measured for the whole program."""

    algorithm: str
    chunks: int
    micros: float

    @property
    def name(self) -> str:
        return self.algorithm if self.algorithm == IN_SEQUENCE else f"{self.algorithm}({self.chunks})"


@dataclass(frozen=True)
class Choice:
    """Choice for the reshard that produces `value`. The first alternative is chosen; the other alternatives follow, fastest first."""

    value: str
    function: str
    alternatives: tuple[Alternative, ...]
    is_measured: bool = False

    @property
    def name(self) -> str:
        """Key of the choice in `Options.choices`, as `@function %value`."""
        return f"@{self.function} %{self.value}"

    @property
    def chosen(self) -> Alternative:
        return self.alternatives[0]

    def __str__(self) -> str:
        return f"choice %{self.value} of @{self.function} {self.times}"

    @property
    def times(self) -> str:
        alternatives = ", ".join(f"{one.name} {one.micros:.1f} us" for one in self.alternatives)
        return f"{'measured' if self.is_measured else 'predicted'}: {alternatives}"


def parse_choice(reader: Reader) -> Choice:
    value = reader.named()
    reader.expect("of")
    function, by = reader.global_name("a function"), reader.peek()
    if by not in ("measured", "predicted"):
        reader.fail(f"expected measured or predicted, found {reader.found()}")
    reader.take()
    reader.expect(":")

    def alternative() -> Alternative:
        algorithm = reader.word("an algorithm")
        chunks = reader.within(reader.integer) if reader.peek() == "(" else 0
        micros = round(float(reader.number("a time")), 1)
        reader.expect("us")
        return Alternative(algorithm, chunks, micros)

    return Choice(value, function, reader.separated(alternative), by == "measured")
