"""Parser of the loops of a kernel: `parse_loops(str(loops), kernel) == loops`."""

from collections.abc import Collection
from dataclasses import replace

from hostweave.analysis.kernel_indices import epilogue, iteration
from hostweave.host_ir import ir
from hostweave.kernel_ir.loops import ONE, OUTERMOST, ZERO, Distribution, FewRows, Fiber, LoopDim, Loops, Walk
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType
from hostweave.types.text import Reader


def parse_loops(text: str, kernel: ir.Kernel) -> Loops:
    """Parses loops of `kernel`. Raises ParseError if the text is malformed."""
    reader = Reader(text)
    reader.expect("loops")
    start, name = reader.at, reader.global_name("a kernel")
    if name != kernel.name:
        reader.fail(f"these are loops of @{name}, not of @{kernel.name}", start)
    reader.expect("{")
    operands = {name: buffer for op in kernel.products for name, buffer in _parse_product(reader, op.result.name)}
    heads = [reader.separated(lambda: _parse_dim(reader)) if reader.accept(verb) else () for verb in ("keep", "reduce")]
    outer = _after(reader, "=").size() if reader.accept(OUTERMOST) else None
    memory, fibers, strides = dict[str, BufferType](), dict[str, Fiber](), dict[str, dict[str, Size]]()
    while reader.peek() == "%":
        access = _parse_access(reader)
        if reader.accept(":"):
            memory[access] = _parse_buffer(reader)
        strides[access] = _parse_offset(_after(reader, "at"), {dim.letter for dims in heads for dim in dims})
        if reader.accept(","):
            fibers[access] = Fiber(_after(reader, "fiber", "of").size(), _after(reader, "every").size())
    kept, reduced = (
        tuple(replace(dim, strides=tuple(own.get(dim.letter, ZERO) for own in strides.values())) for dim in dims) for dims in heads
    )
    end = epilogue(kernel)
    walks = reader.repeated("walk", lambda: _parse_walk(reader, end))
    products = FewRows(kernel, operands) if operands else None
    loops = Loops(end, iteration(end), memory, tuple(strides), fibers, kept, reduced, products, outer, walks)
    if reader.accept("distribute"):
        loops = _parse_distribution(_after(reader, ":"), loops)
    if reader.accept("vectors"):
        loops = replace(loops, width=_after(reader, "of").integer())
        _after(reader, "along", loops.along.letter)
    outside, prepared, held = (reader.separated(reader.named) if reader.accept(word) else () for word in ("outside", "prepare", "hold"))
    loops = replace(loops, outside=outside, prepared=prepared, held=held)
    if reader.accept("number"):
        loops = replace(loops, index=_after(reader, "elements", "by").word("a C++ type"))
    reader.expect("}")
    if reader.peek():
        reader.fail(f"expected the end of the text, found {reader.found()}")
    return loops


def _after(reader: Reader, *tokens: str) -> Reader:
    for token in tokens:
        reader.expect(token)
    return reader


def _parse_product(reader: Reader, result: str) -> list[tuple[str, BufferType]]:
    """Parses `%y = multiply %x: bf16[4, K] by %w: bf16[K, N]`."""

    def operand() -> tuple[str, BufferType]:
        return reader.named(), _parse_buffer(_after(reader, ":"))

    _after(reader, "%", result, "=", "multiply")
    return [operand(), *reader.repeated("by", operand)]


def _parse_dim(reader: Reader) -> LoopDim:
    """Parses `i in M` or `i in 2*M over x.0 and x.1`, without strides."""

    def index() -> str:
        return f"{reader.word('a value')}.{_after(reader, '.').integer()}"

    letter, size = reader.word("a loop index"), _after(reader, "in").size()
    return LoopDim(size, (), letter, (index(), *reader.repeated("and", index)) if reader.accept("over") else ())


def _parse_access(reader: Reader) -> str:
    """Parses the name of an access, such as `%x`, `%y stored` or `%y 0`."""
    words = [reader.named()]
    while reader.peek() == "stored" or reader.peek().isdigit():
        words.append(reader.take())
    return " ".join(words)


def _parse_buffer(reader: Reader) -> BufferType:
    dtype, shape = reader.dtype(), reader.enclosed(reader.size, "[]")
    return BufferType(dtype, shape, reader.enclosed(reader.size, "[]") if reader.accept("strides") else None)


def _parse_offset(reader: Reader, letters: Collection[str]) -> dict[str, Size]:
    """Parses `i * 4096 + j` as strides by loop index."""

    def term() -> tuple[str, Size]:
        if reader.peek() not in letters:
            reader.fail(f"{reader.found()} is not a loop index; use one of {', '.join(sorted(letters))}")
        return reader.take(), reader.size() if reader.accept("*") else ONE

    return {} if reader.accept("0") else dict((term(), *reader.repeated("+", term)))


def _parse_walk(reader: Reader, kernel: ir.Kernel) -> Walk:
    """Parses `0: reduce %m; store %y`."""
    reader.integer()
    start = _after(reader, ":").at
    reduced = reader.separated(reader.named) if reader.accept("reduce") else ()
    if unknown := [name for name in reduced if name not in kernel.made]:
        reader.fail(f"kernel @{kernel.name} does not compute %{unknown[0]}", start)
    reader.accept(";")
    return Walk(tuple(kernel.made[name] for name in reduced), reader.separated(reader.named) if reader.accept("store") else ())


def _parse_distribution(reader: Reader, loops: Loops) -> Loops:
    """Parses `a block shares a row, 128 threads of each of 2 blocks, 8 blocks per multiprocessor`."""
    start, line, words = reader.at, reader.line(), list[str]()
    while reader.line() == line and reader.peek() not in (",", ""):
        words.append(reader.take())
    if (chosen := " ".join(words)) not in [*Distribution]:
        reader.fail(f"unknown distribution {chosen!r}; use one of: {'; '.join(Distribution)}", start)
    loops = replace(loops, distribution=Distribution(chosen))
    while reader.accept(","):
        number, what = reader.integer(), reader.word("threads or blocks")
        if what == "threads":
            blocks = _after(reader, "each", "of").integer() if reader.accept("of") else 1
            loops = replace(loops, threads=number, blocks=blocks)
            _after(reader, *(("blocks",) if blocks > 1 else ()))
        else:
            loops = replace(loops, resident=number)
            _after(reader, "per", "multiprocessor")
    return loops
