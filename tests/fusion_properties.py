"""Properties of each random fusion. Hostweave refuses the fusion, or lowers it to a program that passes the check. If the interpreter can
run the program, the results equal NumPy's results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from interpret import interpret
from random_fusions import Array, Generator

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.check.check import check
from hostweave.check.sizes import sizes_to_check
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.reference import run_reference
from hostweave.fusion_ir.rewriting import at_sizes, map_functions
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.size_requirements import undivided
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.tensor import block_of, holds

# Reasons to refuse a random fusion. Any other error is a defect of a pass.
REFUSALS = "|".join(
    (
        "is not possible here; ",
        "a zigzag sharding cannot move between meshes; ",
        "reorders the pieces of a dim; ",
        "a kernel on a mesh of some of the ranks needs an even split; ",
        "state a size that is divisible",
        "choose sizes that divide without a remainder",
    )
)


def without_kernels(fusion: Fusion) -> Fusion:
    """Replaces user kernels by built-in ops, for NumPy."""

    def of_body(body: Fusion) -> Fusion:
        read = {op.result.name: op.tensors[0] for op in body.ops if op.user_kernel}

        def replaced(op: Op) -> Op:
            if op.user_kernel:
                return replace(op, kind="multiply", operands=(read[op.result.name], 2), user_kernel=None)
            if op.kind == "output" and op.tensors[0] in read:
                return replace(op, kind="negative", operands=(read[op.tensors[0]],), attributes=())
            return op

        return replace(body, body=tuple(map(replaced, body.ops)))

    return map_functions(fusion, of_body)


def computes(generator: Generator, fusion: Fusion, seed: int, options: Options | None = None) -> bool:
    """Compares the results of the program with NumPy's results. A fusion with user kernels is lowered and checked. Then built-in ops
    replace the kernels in a copy of the fusion. The copy is lowered and checked, and the interpreter executes it.

    A program may be impossible at the sizes of the generator, for example if the program needs `M/2` and M is 7. Then the results are
    compared at other sizes. Returns False if nothing was compared.
    """
    options = options or Options(transport="auto" if seed % 5 else "one_sided")
    host = checked(fusion, options)
    plain = without_kernels(fusion)
    if host and plain != fusion:
        host = checked(plain, options)
    if not host:
        return False
    others = [sizes for sizes in sizes_to_check(host) if max(sizes.values(), default=0) <= 4096]  # Larger arrays may not fit in memory.
    for sizes in (generator.sizes, *(others[(seed + i) % len(others)] for i in range(len(others)))):
        generator.sizes |= sizes
        if computes_at(generator, host, plain, options, seed):
            return True
    return False


def computes_at(generator: Generator, host: HostProgram, plain: Fusion, options: Options, seed: int) -> bool:
    """Returns True if the program is possible at the sizes of the generator. Fails if the results are wrong."""
    arrays = generator.arrays(plain, seed)
    if ints := undivided(host, {name: generator.sizes[name] for name in host.symbols() if name in generator.sizes}):
        try:  # A call with uneven sizes runs a variant in which these sizes are ints.
            plain = at_sizes(plain, ints, [output.type for output in host.outputs])
            rest = {name: size for name, size in options.sizes.items() if name not in ints}
            made = checked(plain, replace(options, sizes=rest, choices={}))
        except ProgramError as error:
            if re.search(r"zigzag|is not an int|expected a size, found '-'|indices go from 0 to -1", str(error)):
                return False  # The fusion is impossible at these sizes.
            raise
        if made is None:
            return False
        host = made
    try:
        ranks = interpret(host, arrays)
    except (ArgumentError, ProgramError):
        return False  # The program does not support these uneven sizes.
    compare(host, plain, arrays, ranks, f"seed {seed}, {generator.sizes}\n{host}")
    return True


def checked(fusion: Fusion, options: Options) -> HostProgram | None:
    """Lowers the fusion and runs the check. Returns None if the fusion is refused for one of the `REFUSALS`, or if no sizes fit."""
    assert Fusion.parse(str(fusion)) == fusion
    try:
        host = lower(fusion, options)
    except ProgramError as error:
        if re.search(REFUSALS, str(error)):
            return None
        raise
    assert HostProgram.parse(str(host)) == host
    try:
        check(host, fusion=fusion)
    except ProgramError as error:
        # No sizes satisfy all requirements of the program, for example if N and N - 1 must be even.
        if "choose sizes that divide without a remainder" in str(error):
            return None
        raise
    return host


def compare(
    host: HostProgram,
    plain: Fusion,
    arrays: dict[str, Array],
    ranks: Sequence[Mapping[str, Array | None]],
    message: str,
    tolerance: float = 1e-12,
) -> None:
    """Tests that every rank has its block of each of NumPy's results, and None for a result whose mesh excludes the rank. `plain` has no
    user kernels."""
    with np.errstate(all="ignore"):
        wanted = run_reference(plain, arrays)
    for parameter, want in zip(host.results, wanted, strict=True):
        for rank, results in enumerate(ranks):
            if not holds(parameter.type, host.mesh, rank):
                assert results.get(parameter.name) is None
                continue
            block = want[block_of(parameter.type, host.mesh, rank, want.shape)]
            np.testing.assert_allclose(results[parameter.name], block, tolerance, tolerance, err_msg=f"rank {rank}, {message}")


def seed_ranges(count: int, many: int) -> list[Any]:
    """Divides the seeds into ranges for the workers: two ranges that run by default, two that `-m more` runs, and the ranges that only
    `-m slow` runs."""
    some = [pytest.param(range(count)[i::4], marks=[pytest.mark.more] * (i % 2)) for i in range(4)]
    return [*some, *(pytest.param(range(i, i + 1000), marks=pytest.mark.slow) for i in range(count, many, 1000))]


# A warning that a `.stream` has no overlap does not affect the results.
IGNORED = ("ignore:Mean of empty slice", "ignore:invalid value encountered", "ignore::hostweave.base.errors.OverlapWarning")
