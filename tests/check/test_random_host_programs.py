"""Random host programs, and random changes of them. The check agrees with a brute-force check. `pytest -m slow` tests many more."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from fusion_properties import seed_ranges
from random_host_programs import Generator, changed, unrolled
from unrolled_tasks import Offsets, clashes, faults

from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.check.sizes import minimal_sizes
from hostweave.cli.memory_plan import memory_plan
from hostweave.emit.export import render
from hostweave.host_ir import ir, tree
from hostweave.host_ir.verify import verify_host
from hostweave.types.mesh import Sizes

CHANGES = 5  # changed programs per seed
KINDS = {  # text of an error -> kind of the fault
    "they can deadlock": "channels",
    "nothing orders the": "race",
    "after its deallocate": "freed",
    "write these bytes first": "unwritten",
    "write all of every output": "output",
    "is outside of": "index",
    "whose record may not have run": "record",
    "posts no": "match",
    "of its process group": "match",
    "of the matching": "match",
    "none of them can proceed": "deadlock",
}


def kind_of(message: str) -> str:
    return next((kind for text, kind in KINDS.items() if text in message), message)


def programs(seed: int) -> Iterator[tuple[ir.HostProgram, Sizes]]:
    """The program of a seed, then changed programs that the verifier accepts."""
    generator, random = Generator(seed), Random(seed)
    program = ir.HostProgram.parse(generator.program())
    verify_host(program)
    yield program, generator.sizes
    for number in range(CHANGES):
        mutant = program
        for _ in range(1 + number % 2):
            mutant = changed(mutant, random)
        mutant = ir.HostProgram.parse(str(mutant))
        try:
            verify_host(mutant)
        except ProgramError:
            continue
        yield mutant, generator.sizes


def offsets(program: ir.HostProgram, sizes: Sizes, rank: int) -> Offsets:
    """Offsets of all buffers in the arena of a rank."""
    called, bodies = {name for i in tree.walk(program.body) for name in tree.names(i, "call")}, [program.body]
    for function in (function for function in reversed(program.functions) if function.name in called):
        called.update(name for i in tree.walk(function.body) for name in tree.names(i, "call"))
        bodies.insert(1, function.body)
    elsewhere = {id(i) for on in program.instructions() if on.ranks and rank not in on.ranks.all_ranks for i in tree.walk((on,))}
    allocates = [i for body in bodies for i in tree.walk(body) if isinstance(i, ir.Allocate) and id(i) not in elsewhere]
    rows = [row for row in memory_plan(program, sizes, rank).rows if row.type]
    return {id(i): (row.offsets, row.bytes) for i, row in zip(allocates, rows, strict=True)}


def verdict(program: ir.HostProgram, sizes: Sizes) -> str:
    """Error of the check, or ""."""
    try:
        check(program, sizes)
    except ProgramError as error:
        return str(error)
    return ""


def wrong_verdict(program: ir.HostProgram, sizes: Sizes) -> str:
    """Difference between the verdicts of the check and of the brute-force check, or "" if they agree."""
    expected, found = faults(program, sizes), verdict(program, sizes)
    if "alarm" in expected:
        expected = {*expected - {"alarm"}, *(["race"] if "may get bytes of" in found else [])}
    if found and not expected:
        return f"false alarm: {found}"
    if found and expected != {"deadlock"} and kind_of(found) not in expected:
        return f"expected {expected}: {found}"
    if expected and not found:
        return f"missed: {expected}"
    return "" if found else next(clashes(program, sizes, [offsets(program, sizes, rank) for rank in program.mesh.all_ranks]), "")


@pytest.mark.parametrize("seeds", seed_ranges(10, 10000), ids=str)
def test_the_check_agrees_with_a_brute_force_check(seeds: range) -> None:
    for seed in seeds:
        for program, sizes in programs(seed):
            assert ir.HostProgram.parse(str(program)) == program
            assert not (why := wrong_verdict(program, sizes)), f"{seed}: {why}\n{program}"


@pytest.mark.parametrize("seeds", seed_ranges(6, 4000), ids=str)
def test_a_loop_has_the_verdict_of_its_iterations(seeds: range) -> None:
    """One exception: in a loop, an allocate may reuse bytes that a later instruction of the previous iteration freed. Unrolled allocates
    have separate bytes."""
    for seed in seeds:
        for program, sizes in programs(seed):
            straight = ir.HostProgram.parse(str(unrolled(program)))
            verify_host(straight)
            of_loops, of_iterations = verdict(program, sizes), verdict(straight, sizes)
            assert bool(of_loops) == bool(of_iterations) or "may get bytes of" in of_loops, (
                f"{seed}: {of_loops or of_iterations}\n{program}"
            )


@pytest.mark.parametrize("seeds", seed_ranges(4, 2000), ids=str)
def test_every_verified_program_is_emitted(seeds: range) -> None:
    for seed in seeds:
        for program, sizes in programs(seed):
            assert "program.cpp" in render(program)
            for rank in program.mesh.all_ranks:
                memory_plan(program, sizes, rank)
            assert not (error := verdict(program, minimal_sizes(program))) or ": " in error
