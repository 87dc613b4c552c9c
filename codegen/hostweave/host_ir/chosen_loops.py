"""Which calls the chunk loops that the compiler has chosen can take: the others are made by the same program in sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hostweave.base.errors import ArgumentError
from hostweave.host_ir import ir
from hostweave.host_ir.calls import dedupe_functions
from hostweave.host_ir.size_requirements import multiples
from hostweave.types.size import Size


class LoopsDoNotDivide(ArgumentError):
    """A call of sizes that chosen loops do not divide. Nothing was done."""


def expect_divided(program: ir.HostProgram, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises LoopsDoNotDivide for global inputs of these shapes, `()` for those that are not known, where loops were chosen."""
    if wanted := _multiples(program):
        held = [(p.type.shape, shape) for p, shape in zip(program.inputs, shapes, strict=True) if shape]
        sizes = {dim.name: size for dims, shape in held for dim, size in zip(dims, shape, strict=True) if dim.name}
        if size := _first_undivided(wanted, sizes):
            raise LoopsDoNotDivide(f"{program.name}: {size} = {size.bind(sizes)}: no multiple of {wanted[size]}, as chosen loops want it")


def are_divided(program: ir.HostProgram, sizes: Mapping[str, int]) -> bool:
    """Whether no size that is given, or that follows from these, is one that chosen loops do not divide."""
    return _first_undivided(_multiples(program), sizes) is None


def _first_undivided(multiples: Mapping[Size, int], sizes: Mapping[str, int]) -> Size | None:
    known = (size for size in multiples if sizes.keys() >= set(size.symbols))
    return next((size for size in known if size.bind(sizes) % multiples[size]), None)


@ir.analysis
def _multiples(program: ir.HostProgram) -> dict[Size, int]:
    """What must divide the sizes of a call; nothing where no loop was chosen, so that all is as the user has stated it."""
    if not any(choice.taken.chunks for choice in program.choices):
        return {}
    found = {Size(1, (factor,)): multiple for factor, multiple in multiples(dedupe_functions(program)).items()}
    return {size: multiple for size, multiple in found.items() if multiple > 1 and size.symbols == size.atoms}
