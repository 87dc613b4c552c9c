"""Distributes the iterations of a kernel over clusters, blocks and threads.

    keep i in M over x.0
    reduce j in N over x.1
    %x: f32[M, N] at i * N + j

gets

    distribute: a block reduces an element

because %x is contiguous along j. If %x is contiguous along i, a block usually reduces a tile of columns instead.
"""

from dataclasses import replace

from hostweave.fusion_ir.ops import OPS
from hostweave.kernel_ir.loops import ONE, ZERO, Distribution, Loops, stored
from hostweave.types.machine import Machine

TILE = 32  # columns in the tile of a block: hw::kTile
TILE_THREADS = 512  # threads per tile, if a multiprocessor has several tiles
PRODUCT_BLOCKS = 2  # blocks per multiprocessor that multiply few rows: hw::blocks_at_once


def distribute(loops: Loops, machine: Machine) -> Loops:
    """Chooses the distribution, and the number of threads of a tile. With at most one tile per multiprocessor, a tile gets all threads and
    registers of the multiprocessor."""
    if loops.products:
        return replace(loops, distribution=Distribution.PRODUCTS, resident=PRODUCT_BLOCKS)
    chosen = _of_fibers(loops) if loops.takes_fibers else _of_elements(loops, machine)
    if chosen != Distribution.COLUMNS:
        return replace(loops, distribution=chosen)
    is_alone = loops.count.is_int and int(loops.count) <= machine.multiprocessors * TILE
    return replace(loops, distribution=chosen, threads=machine.block_threads if is_alone else TILE_THREADS, resident=int(is_alone))


def _of_fibers(loops: Loops) -> Distribution:
    if loops.fibers[stored(loops.results[0])].stride == ONE:
        return Distribution.CLUSTER_FIBERS if any(OPS[op.kind].in_clusters for op in loops.kernel.ops) else Distribution.BLOCK_FIBERS
    return Distribution.FIBER_PARTS if any(OPS[op.kind].splits_fibers for op in loops.kernel.ops) else Distribution.FIBERS


def _of_elements(loops: Loops, machine: Machine) -> Distribution:
    inputs, reduced = loops.inputs, loops.reduced
    if not reduced or (reduced[-1].size.is_int and int(reduced[-1].size) < machine.warp):  # More threads would have no element.
        return Distribution.THREAD
    whole = [name for name in inputs if all(any(loops.stride(name, dim) != ZERO for dim in of) for of in (loops.kept, reduced))]
    if any(loops.stride(name, reduced[-1]) == ONE for name in whole or inputs):
        return Distribution.BLOCK
    # In a tile that is not full, threads after the end read the last columns again. Other threads may already have overwritten these
    # columns in place, if a result varies along the reduced dims.
    in_tiles = loops.count.is_int and int(loops.count) % TILE == 0
    return Distribution.COLUMNS if in_tiles or not any(map(loops.space.is_whole, loops.results)) else Distribution.THREAD
