"""The passes that lower a fusion to a host program, in order. Each pass is a function in a file with the same name."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from hostweave.analysis.facts import conditions_are_open, kernels_are_single, nothing_is_freed, updates_are_in_place
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.rewriting import map_functions, needs_ranks, on_one_device
from hostweave.fusion_ir.verify import LEVELS, verify_fusion
from hostweave.host_ir.calls import on_each_body
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.verify import verify_host
from hostweave.options import Options
from hostweave.passes.fusion.attend_by_blocks import attend_by_blocks
from hostweave.passes.fusion.attend_in_halves import attend_in_halves
from hostweave.passes.fusion.choose_overlap import choose_overlap
from hostweave.passes.fusion.compose_scaled_matmuls import compose_scaled_matmuls
from hostweave.passes.fusion.decompose_reshards import decompose_reshards
from hostweave.passes.fusion.drop_unit_axes import drop_unit_axes
from hostweave.passes.fusion.gather_ahead import gather_ahead
from hostweave.passes.fusion.insert_reshards import insert_reshards
from hostweave.passes.fusion.join_blocks_of_keys import join_blocks_of_keys
from hostweave.passes.fusion.keep_groups_apart import keep_groups_apart
from hostweave.passes.fusion.merge_contractions import merge_contractions
from hostweave.passes.fusion.multiply_shards import multiply_shards
from hostweave.passes.fusion.order_stages import order_stages
from hostweave.passes.fusion.overlap_communication import overlap_communication
from hostweave.passes.fusion.permute_after_resharding import permute_after_resharding
from hostweave.passes.fusion.propagate_sharding import propagate_sharding
from hostweave.passes.fusion.regroup_pointwise import regroup_pointwise
from hostweave.passes.fusion.share_equal_ops import share_equal_ops
from hostweave.passes.fusion.sink_reductions import sink_reductions
from hostweave.passes.fusion.stream_by_cost import stream_by_cost
from hostweave.passes.fusion.stream_keys_in_zigzag import stream_keys_in_zigzag
from hostweave.passes.fusion.take_first import take_first
from hostweave.passes.fusion.unstack import unstack
from hostweave.passes.host.copy_updated import copy_updated
from hostweave.passes.host.fold_conditions import fold_conditions
from hostweave.passes.host.fold_epilogues import fold_epilogues
from hostweave.passes.host.fuse_kernels import fuse_kernels
from hostweave.passes.host.group_communications import group_communications
from hostweave.passes.host.multi_buffer import multi_buffer
from hostweave.passes.host.multiply_few_rows import multiply_few_rows
from hostweave.passes.host.plan_memory import plan_memory
from hostweave.passes.host.privatize_per_stream import privatize_per_stream
from hostweave.passes.host.propagate_copies import propagate_copies
from hostweave.passes.host.reduce_few_rows import reduce_few_rows
from hostweave.passes.host.reduce_in_kernels import reduce_in_kernels
from hostweave.passes.host.reuse_in_place import reuse_in_place
from hostweave.passes.host.serialize_channels import serialize_channels
from hostweave.passes.host.sink_allocations import sink_allocations
from hostweave.passes.host.sink_views import sink_views
from hostweave.passes.host.sink_waits import sink_waits
from hostweave.passes.host.software_pipeline import software_pipeline
from hostweave.passes.host.split_reductions import split_reductions
from hostweave.passes.host.split_unaligned import split_unaligned
from hostweave.passes.host.transpose_beside import transpose_beside
from hostweave.passes.host.widen_rows import widen_rows
from hostweave.passes.lower.lower_to_host import lower_to_host
from hostweave.types.size import Size
from hostweave.types.tensor import DType

PASSES: tuple[Callable[[Any, Options], Any], ...] = (
    drop_unit_axes,
    merge_contractions,
    keep_groups_apart,
    propagate_sharding,
    join_blocks_of_keys,
    stream_keys_in_zigzag,
    attend_in_halves,
    insert_reshards,
    permute_after_resharding,
    sink_reductions,
    unstack,
    decompose_reshards,
    share_equal_ops,
    regroup_pointwise,
    take_first,
    compose_scaled_matmuls,
    stream_by_cost,
    attend_by_blocks,
    choose_overlap,
    gather_ahead,
    overlap_communication,
    multiply_shards,
    order_stages,
    lower_to_host,
    widen_rows,
    split_reductions,
    fuse_kernels,
    transpose_beside,
    reduce_few_rows,
    fold_epilogues,
    group_communications,
    sink_waits,
    software_pipeline,
    serialize_channels,
    multi_buffer,
    privatize_per_stream,
    sink_allocations,
    reduce_in_kernels,
    reuse_in_place,
    copy_updated,
    split_unaligned,
    sink_views,
    plan_memory,
    propagate_copies,
    multiply_few_rows,
    fold_conditions,
)

_STAGES = ("input", *(apply.__name__ for apply in PASSES))

# These passes take the whole program. Every other pass runs on each function as a separate program, then on the main body.
WHOLE: tuple[Callable[[Any, Options], Any], ...] = (gather_ahead, overlap_communication, lower_to_host, reduce_in_kernels)

# Invariants of the host IR. The first pass of an entry establishes the invariant. The second pass, if any, may break the invariant. A
# user's host program need not satisfy the invariants. `LEVELS` has the rules of the fusion IR.
FACTS: tuple[tuple[Callable[[HostProgram], None], Callable[..., Any], Callable[..., Any] | None], ...] = (
    (kernels_are_single, lower_to_host, multiply_few_rows),
    (nothing_is_freed, lower_to_host, plan_memory),
    (updates_are_in_place, copy_updated, None),
    (conditions_are_open, fold_conditions, None),
)

Observer = Callable[[str, Fusion | HostProgram], None]


def lower(program: Fusion | HostProgram, options: Options, observe: Observer | None = None) -> HostProgram:
    """Lowers a fusion to a host program. If the fusion already has chunk loops, skips all passes up to and including `choose_overlap`. A
    host program is only verified.

    `observe(name, program)` is called first for the input, with the name "input", then for the result of each pass.
    """
    stage: Fusion | HostProgram = program
    _verified("input", stage, None, observe)
    passes = PASSES if isinstance(program, Fusion) else ()
    if isinstance(program, Fusion):
        _expect_possible(program, options.sizes)
        if any(body.loop_of for body in (*program.functions, program)):
            verify_fusion(program, after=choose_overlap.__name__)
            passes = PASSES[PASSES.index(choose_overlap) + 1 :]
    for apply in passes:
        before = stage
        stage = apply(stage, options) if apply in WHOLE else _on_each_body(apply, stage, options)
        _verified(apply.__name__, stage, before, observe)
    assert isinstance(stage, HostProgram)
    return stage


def stages(program: Fusion | HostProgram, options: Options) -> list[tuple[str, Fusion | HostProgram]]:
    """Name and result of each pass that changed the program."""
    found: list[tuple[str, Fusion | HostProgram]] = []
    lower(program, options, lambda name, stage: found.append((name, stage)))
    return [after for before, after in pairwise(found) if after[1] != before[1]]


def _expect_possible(program: Fusion, sizes: Mapping[str, int]) -> None:
    """Raises ProgramError if the program lacks one of the sizes, or for an impossible dim, such as M/2 for M = 7."""
    if not sizes:
        return
    types = [value.type for value in (*program.inputs, *(op.result for op in program.all_ops))]
    known = dict.fromkeys(name for type in types for size in type.shape for name in size.symbols if name not in program.depths)
    if unknown := [name for name in sizes if name not in known]:
        here, there = ", ".join(unknown), ", ".join(known) or "none"
        raise ProgramError(f"{program.name}: Options: sizes: there is no size named {here}; the sizes of the program: {there}")
    for op in program.all_ops:
        for size in op.result.type.shape:
            if sizes.keys() >= set(size.symbols) and (why := _why_impossible(size, sizes)):
                raise ProgramError(f"Options: sizes: %{op.result.name} of {op.result.type}: {why}", op.location)


def _why_impossible(size: Size, sizes: Mapping[str, int]) -> str:
    try:
        number = size.bind(sizes)
    except ValueError as error:
        return f"{error}; state a size that is divisible"
    return "" if number >= 0 else f"{size} = {number}; state larger sizes"


def _on_each_body(apply: Callable[[Any, Options], Any], stage: Fusion | HostProgram, options: Options) -> Fusion | HostProgram:
    if isinstance(stage, Fusion):
        return map_functions(stage, lambda body: apply(body, options))
    return on_each_body(stage, lambda body: apply(body, options))


def _verified(name: str, program: Fusion | HostProgram, before: Fusion | HostProgram | None, observe: Observer | None) -> None:
    """Verifies a stage, unless it equals the stage before, and passes it to `observe`. Verifies an unchanged fusion too if stricter rules
    apply from this stage on."""
    if isinstance(program, HostProgram):
        if program != before:
            verify_host(program)
            for fact in facts_at(name):
                fact(program)
    elif program != before or name in LEVELS:
        verify_fusion(program, after=level_of(name))
    if observe:
        observe(name, program)


def level_of(stage: str) -> str:
    """Last stage up to `stage` that has an entry in LEVELS."""
    return next(name for name in _STAGES[_STAGES.index(stage) :: -1] if name in LEVELS)


def facts_at(stage: str) -> list[Callable[[HostProgram], None]]:
    at, number = _STAGES.index(stage), {name: at for at, name in enumerate(_STAGES)}
    return [fact for fact, first, end in FACTS if number[first.__name__] <= at and (end is None or at < number[end.__name__])]


def reference_of(program: Fusion | HostProgram, options: Options) -> tuple[HostProgram | str, set[DType]]:
    """The same computation on one device, and the dtypes of its values. If impossible, returns the reason and an empty set."""
    if not isinstance(program, Fusion):
        return "it was compiled from host IR", set()
    if why := needs_ranks(program):
        return why, set()
    alone = on_one_device(program)
    return lower(alone, options), {type.dtype for body in (*alone.functions, alone) for type in body.types.values()}
