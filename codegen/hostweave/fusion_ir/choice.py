"""What the compiler has chosen for a reshard beside matmuls, out of what, and by which times: a line of the text of both IRs.

choice %x_gathered of @ag_matmul predicted: put(8) 1239.1 us, none 1516.0 us, p2p(8) 1612.4 us

Of a gather outside of loops put(1) is to one buffer, and put(8) leaves 8 shards apart, for a product that takes one after another.
"""

from dataclasses import dataclass

from hostweave.types.text import Reader

IN_SEQUENCE = "none"


@dataclass(frozen=True)
class Way:
    """By an algorithm in so many chunks, or in sequence, and the microseconds with the matmuls beside it."""

    algorithm: str
    chunks: int
    micros: float

    @property
    def name(self) -> str:
        return self.algorithm if self.algorithm == IN_SEQUENCE else f"{self.algorithm}({self.chunks})"

    @property
    def is_loop(self) -> bool:
        """Whether chunks take turns with those of other ops: one chunk is a copy outside of loops."""
        return self.chunks > 1


@dataclass(frozen=True)
class Choice:
    """Of the reshard that makes a value. `ways` has the one that was taken first, then the others, the fastest first."""

    value: str
    function: str
    ways: tuple[Way, ...]
    is_measured: bool = False  # else the cost model has predicted the times

    @property
    def name(self) -> str:
        """As `Options.ways` has it."""
        return f"@{self.function} %{self.value}"

    @property
    def taken(self) -> Way:
        return self.ways[0]

    def __str__(self) -> str:
        return f"choice %{self.value} of @{self.function} {self.times}"

    @property
    def times(self) -> str:
        """Lists the ways, the taken one first, with their times: `predicted: p2p 812.0 us, sequential 1024.5 us`."""
        ways = ", ".join(f"{way.name} {way.micros:.1f} us" for way in self.ways)
        return f"{'measured' if self.is_measured else 'predicted'}: {ways}"


def parse_choice(reader: Reader) -> Choice:
    """The rest of the line, after its first word."""
    value = reader.named()
    reader.expect("of")
    function, by = reader.global_name("a function"), reader.peek()
    if by not in ("measured", "predicted"):
        reader.fail(f"expected measured or predicted, found {reader.found()}")
    reader.take()
    reader.expect(":")

    def way() -> Way:
        algorithm = reader.word("an algorithm")
        chunks = reader.within(reader.integer) if reader.peek() == "(" else 0
        micros = float(reader.number("a time"))
        reader.expect("us")
        return Way(algorithm, chunks, micros)

    return Choice(value, function, reader.separated(way), by == "measured")
