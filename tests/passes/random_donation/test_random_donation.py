"""Random programs and blocks that donate inputs, and that return views of inputs and of results. `pytest -m slow` tests many more
programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fusion_properties import IGNORED, checked, compare, computes, seed_ranges, without_kernels
from random_donations import Donating

import hostweave as hw
from hostweave.analysis.def_use import def_use
from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.check.check import check
from hostweave.host_ir import tree
from hostweave.host_ir.calls import bodies, joined
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.runtime.cpu import parallel


def is_right(seed: int) -> bool:
    generator = Donating(seed)
    return computes(generator, generator.fusion(), seed)


@pytest.mark.parametrize("seeds", seed_ranges(80, 20000), ids=str)
@pytest.mark.filterwarnings(*IGNORED)
def test_random_donations(seeds: range) -> None:
    assert sum(map(is_right, seeds)) > 0.6 * len(seeds)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 300))])
@pytest.mark.filterwarnings(*IGNORED)
def test_compiled_donations(seed: int) -> None:
    generator = Donating(seed)
    fusion = generator.fusion()
    host, arrays = checked(fusion, Options()), generator.arrays(fusion, seed)
    if host is None:
        return
    program = hw.compile(fusion)
    names = [output.name for output in host.outputs]
    with parallel(check_dependencies=True):
        try:
            ranks = program.run(**{name: array.copy() for name, array in arrays.items()}, ranks=True)
        except ArgumentError:
            return  # The program does not support these sizes.
    results = [dict(zip(names, own if isinstance(own, tuple) else (own,), strict=True)) for own in ranks]
    compare(host, without_kernels(fusion), arrays, results, f"seed {seed}\n{program.source}")


# --- broken orders ----------------------------------------------------------------------------------------------------


def late_copies(host: HostProgram) -> Iterator[HostProgram]:
    """Yields programs in which one copy of donated memory is moved to the end of the body, after the memory was overwritten."""
    parts = bodies(host)
    for at, part in enumerate(parts):
        uses, donated = def_use(part), {output.memory for output in part.outputs}
        for copy in (place for place in uses.places if place.instruction.copies and not place.around):
            (root,), (dst,) = (map(uses.root, tree.names(copy.instruction, role)) for role in ("read", "write"))
            later = [touch.instruction for touch in uses.touches[root] if touch.number > copy.number]
            is_last = uses.touches[dst][-1].number == copy.number  # Nothing reads the copy.
            if root in donated and is_last and dst in {output.name for output in part.outputs} and root in uses.writes(later):
                body = (*uses.edited({copy.number}, {}), copy.instruction)
                yield joined([*parts[:at], replace(part, body=body), *parts[at + 1 :]])


@pytest.mark.filterwarnings(*IGNORED)
def test_copies_after_an_overwrite_are_refused() -> None:
    refused = 0
    for seed in range(60):
        host = checked(Donating(seed).fusion(), Options())
        for mutant in late_copies(host) if host else ():
            with pytest.raises(ProgramError, match=r"reads %\w+ after %\w+ has overwritten bytes .*, which is donated: read %\w+ before"):
                check(mutant)
            refused += 1
    assert refused > 15
