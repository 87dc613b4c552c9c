"""Cost model: predicts the time of ops and of their chunks on one rank.

- A matmul takes the time of its waves of tiles. If the memory traffic takes longer, the matmul takes the time of the memory traffic.
- Attention takes the time of its matmuls, or of its memory traffic if the traffic takes longer.
- Pointwise ops and reductions take the time of their memory traffic (Williams, Waterman and Patterson, "Roofline", 2009).

`tune/overlaps.py` predicts chunk loops. `communication/cost.py` predicts communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod, sqrt

from hostweave.communication.cost import communication
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attention import GRADIENTS, is_by_kernels
from hostweave.fusion_ir.ops.attributes import CAUSAL, CONTRACTED, WINDOW
from hostweave.fusion_ir.ops.calls import times_called
from hostweave.fusion_ir.ops.grouped import GROUPED, OUTER
from hostweave.fusion_ir.resharding import local_dims, step_of
from hostweave.host_ir import ir
from hostweave.types.machine import H200, Machine
from hostweave.types.size import product
from hostweave.types.tensor import BufferType, DType
from hostweave.types.zigzag import Zigzag

# Tiles of a matmul's result: (rows, columns, speed relative to a tile of 128 x 256).
TILES = (
    *((128, 256, 1.0), (256, 128, 1.0), (128, 192, 0.98), (192, 128, 0.98), (256, 192, 1.0), (256, 160, 1.0)),
    *((128, 128, 0.93), (64, 256, 0.85), (64, 128, 0.7), (64, 64, 0.5), (64, 32, 0.36)),
)
SPLITS = (1, 2, 4, 8)  # split-K: possible numbers of parts of the inner dim
# Tiles of Hostweave's kernels for grouped matmuls. The second tile is for groups of few rows. The kernel for outer products is slower,
# because this kernel transposes the rows.
GROUPED_TILES = ((128, 256, 0.85), (16, 128, 0.2))
OUTER_TILES = ((128, 256, 0.72),)
SATURATING_SHARE = 0.85  # fraction of the multiprocessors that saturates the memory
MATMUL_READ_BANDWIDTH = 0.93  # read bandwidth of a memory-bound matmul, relative to a copy kernel
MAX_WEIGHT_ELEMENTS = 2**26  # largest weight, in elements, that the kernel for few rows accepts: hw::kMostWeights
EXCHANGE_SECONDS = 5.5e-6  # time until a kernel has received the first data of its peers
BLOCK_BANDWIDTH = 300e9  # bytes per second from a kernel to its peers, in blocks
PACKET_BANDWIDTH = 190e9  # bytes per second from a kernel to its peers, in packets; half of the bytes are payload
ATTENTION_PEAK = 0.74  # fraction of the tensor cores' peak that cuDNN reaches
ATTENTION_ROWS = 128  # rows of a head in one thread block


@dataclass(frozen=True)
class Product:
    """The matmul of one rank: `count` products of [rows, inner] and [inner, columns]."""

    count: float
    rows: float
    inner: float
    columns: float
    dtype: DType
    tf32: bool = False
    tiles: tuple[tuple[int, int, float], ...] = TILES
    splits: tuple[int, ...] = SPLITS

    @property
    def rate(self) -> float:
        """Peak throughput for the dtype, relative to 16-bit floats."""
        return {1: 2.0, 2: 1.0, 4: 0.5 if self.tf32 else 1 / 16}.get(self.dtype.itemsize, 1 / 16)

    def seconds(self, machine: Machine) -> float:
        if not self.count * self.rows * self.columns:
            return 0.0
        return machine.launch + self._fastest(machine)[0]

    def share(self, machine: Machine) -> float:
        """Fraction of the multiprocessors that the matmul uses, or fraction of the memory bandwidth if that is larger."""
        if not self.count * self.rows * self.columns:
            return 1.0
        _, blocks, computed = self._fastest(machine)
        moved = self._moved(machine)
        return min(1.0, max(blocks / machine.multiprocessors, moved / max(computed, moved)))

    @property
    def is_of_few_rows(self) -> bool:
        """True if the model assumes Hostweave's kernel for few rows."""
        few = self.rows <= ir.FEW_ROWS and self.inner * self.columns <= MAX_WEIGHT_ELEMENTS
        return self.count == 1 and few and self.dtype.itemsize > 1 and self.tiles is TILES

    def _fastest(self, machine: Machine) -> tuple[float, float, float]:
        """(seconds, thread blocks, seconds of computation) with the fastest tiles."""
        return min(self._in_tiles(machine, *tile, splits) for tile in self.tiles for splits in self.splits)

    def _moved(self, machine: Machine) -> float:
        elements = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return self.count * elements * self.dtype.itemsize / (machine.memory * (1.0 if self.is_of_few_rows else MATMUL_READ_BANDWIDTH))

    def chunk(self, chunks: int, rows: bool, is_own: bool) -> Product:
        """One of `chunks` equal parts of the matmul. Splits the rows if `rows`, otherwise the columns."""
        return replace(self, rows=self.rows / chunks) if rows else replace(self, columns=self.columns / chunks)

    def _in_tiles(self, machine: Machine, m: int, n: int, fast: float, splits: int) -> tuple[float, float, float]:
        """(seconds, thread blocks, seconds of computation) for tiles of m x n. `fast` is the relative speed of the tiles.

        If `splits` > 1, `splits` thread blocks compute f32 partial sums of one tile (split-K). A second kernel adds the partial sums. A few
        thread blocks do not saturate the memory, except in the kernel for few rows.
        """
        blocks = self.count * ceil(self.rows / m) * ceil(self.columns / n) * splits
        waves = ceil(blocks / machine.multiprocessors)
        work = 2 * m * n * self.inner / splits * machine.multiprocessors / (machine.flops * self.rate * fast)
        added = machine.launch + 8 * splits * self.count * self.rows * self.columns / machine.memory if splits > 1 else 0.0
        computed = waves * (work + machine.wave * sqrt(m * n / (128 * 256)))
        if self.is_of_few_rows:
            return max(computed + added, self._moved(machine)), blocks, computed + added
        reads = self._moved(machine) * max(1.0, SATURATING_SHARE * machine.multiprocessors / blocks)
        return max(computed, reads) + added, blocks, computed


def product_of(op: Op, fusion: Fusion, sizes: Mapping[str, int], tf32: bool) -> Product:
    types = fusion.types
    if op.kind in GROUPED:
        x, other, groups = (list(map(float, local_dims(types[op.tensors[i]], fusion.mesh, sizes))) for i in (0, 1, 2))
        product = grouped_product(groups[-1], x[-2:], other, op.kind == OUTER, types[op.tensors[0]].dtype)
        return replace(product, count=product.count * prod(groups[:-1]))
    left, result = (list(map(float, local_dims(types[name], fusion.mesh, sizes))) for name in (op.tensors[0], op.result.name))
    inner = prod(left[-op[CONTRACTED] :])
    # If all batches share one matrix, their rows form one matmul.
    is_one = len(types[op.tensors[1]].dims) == op[CONTRACTED] + 1
    rows = prod(result[:-1]) if is_one else result[-2]
    return Product(1.0 if is_one else prod(result[:-2]), rows, inner, result[-1], types[op.tensors[0]].dtype, tf32)


def grouped_product(groups: float, x: Sequence[float], other: Sequence[float], is_outer: bool, dtype: DType) -> Product:
    """The grouped matmul of one rank. All groups have the same number of rows."""
    rows = x[0] / max(groups, 1)
    shape = (x[1], rows) if is_outer else (rows, x[1])
    return Product(float(groups), *shape, float(other[-1]), dtype, tiles=OUTER_TILES if is_outer else GROUPED_TILES, splits=(1,))


@dataclass(frozen=True)
class AttentionWork:
    """Attention on one rank. Under a causal mask, the rows are the last rows of the sequence."""

    heads: float
    rows: float  # number of queries
    columns: float  # number of keys
    width: float  # elements of one key and one value together
    is_causal: bool
    is_balanced: bool = False  # True if the mask is causal and the rows are in zigzag order
    speed: float = ATTENTION_PEAK
    products: float = 2.0  # number of matmuls of the size of q kT: 2 forward, and 5 backward

    def seconds(self, machine: Machine) -> float:
        if self.is_balanced:  # The first rank has the first and the last piece of the sequence.
            piece = replace(self, rows=self.rows / 2, is_balanced=False)
            return replace(piece, columns=piece.rows).seconds(machine) + piece.seconds(machine)
        seen = max(self.columns - self.rows / 2, self.columns / 2) if self.is_causal else self.columns
        of_score = self.products * self.width / (machine.flops * self.speed)
        waits = ATTENTION_ROWS / 2 * min(self.rows, self.columns) * machine.multiprocessors if self.is_causal else 0.0
        # With at most ATTENTION_ROWS rows, several thread blocks share the keys.
        longest = ATTENTION_ROWS * self.columns * machine.multiprocessors if self.rows > ATTENTION_ROWS else 0.0
        return machine.launch + of_score * max(self.heads * self.rows * seen + waits, longest)

    def chunk(self, chunks: int, rows: bool, is_own: bool) -> AttentionWork:
        """Attention to one block of keys. Only the block of this rank has a causal mask. In zigzag order, half of each block of another
        rank is masked."""
        columns = self.columns / chunks / (2 if self.is_balanced and not is_own else 1)
        return replace(self, columns=columns, is_causal=self.is_causal and is_own, is_balanced=False)


def attention_of(op: Op, fusion: Fusion, sizes: Mapping[str, int]) -> AttentionWork:
    """Attention of one rank. The gradients of q, k and v each count as a third of the backward pass."""
    types = [fusion.types[name] for name in op.tensors[:3]]
    q, k, v = (list(map(float, local_dims(type, fusion.mesh, sizes))) for type in types)
    products, by = 5 / 3 if op.kind in GRADIENTS[:3] else 2.0, 32 if is_by_kernels(op, *types) else 1
    columns = min(op[WINDOW], k[-2]) if op[WINDOW] else k[-2]
    is_causal = bool(op[CAUSAL]) and not op[WINDOW]
    is_balanced = is_causal and isinstance(types[0].dims[-2].axes, Zigzag)
    return AttentionWork(prod(q[:-2]), q[-2], columns, q[-1] + v[-1], is_causal, is_balanced, ATTENTION_PEAK / by, products)


def around_attention(machine: Machine, ranks: int, gathered: float, result: float) -> tuple[float, float]:
    """Returns the extra seconds of attention with sharded keys, as a pair: with gathered keys, and in a loop over blocks of keys.

    With gathered keys, the values need a second gather, and keys and values are copied to the layout of attention. In a loop, a rank packs
    its keys and values, and combines the results of the blocks. `gathered` and `result` are in bytes.
    """
    begins = machine.link("collective", ranks).seconds(0)
    in_sequence = begins + 2 * (machine.launch + gathered / machine.memory)
    packed, joined = 2 * gathered / ranks, (ranks + 1) * result
    return in_sequence, 5 * machine.launch + (packed + joined) / machine.memory


def seconds(fusion: Fusion, sizes: Mapping[str, int], machine: Machine = H200, tf32: bool = False) -> dict[str, float]:
    """Predicts the time of each op alone, in seconds, by the name of its result.

    A size missing in `sizes` counts as 4096. A view takes no time. A call takes the time of its ops. A repeat takes the time of its calls.
    """
    functions: dict[str, float] = {}
    for body in fusion.functions:
        functions[body.name] = sum(_of_body(body, sizes, machine, tf32, functions).values())
    return _of_body(fusion, sizes, machine, tf32, functions)


def _of_body(fusion: Fusion, sizes: Mapping[str, int], machine: Machine, tf32: bool, functions: Mapping[str, float]) -> dict[str, float]:
    types = fusion.types
    dims = {name: local_dims(type, fusion.mesh, sizes) for name, type in types.items()}
    bytes_of = {name: float(prod(dims[name]) * type.dtype.itemsize) for name, type in types.items()}

    def of_op(op: Op) -> float:
        if op.callee:
            return times_called(op, {**sizes, **fusion.depths}) * functions[op.callee.name]
        if OPS[op.kind].is_view:
            return 0.0
        moved = [bytes_of[name] for name in (*op.tensors, op.result.name)]
        if OPS[op.kind].is_reshard_step:
            axes = step_of(op).axes
            ranks = types[op.tensors[0]].mesh_in(fusion.mesh).size_of(axes) if axes else 2  # a step without axes counts as 2 ranks
            return communication(machine, op.kind, ranks, max(moved), hosts_of(op, fusion, machine))
        if OPS[op.kind].is_product:
            return product_of(op, fusion, sizes, tf32).seconds(machine)
        if op.kind == "attention" or op.kind in GRADIENTS:
            return max(attention_of(op, fusion, sizes).seconds(machine), machine.launch + sum(moved) / machine.memory)
        return machine.launch + sum(moved) / machine.memory

    return {op.result.name: of_op(op) for op in fusion.ops}


def hosts_of(reshard: Op, fusion: Fusion, machine: Machine) -> int:
    """Number of hosts of a process group of a reshard step."""
    mesh = fusion.types[reshard.tensors[0]].mesh_in(fusion.mesh)
    return machine.hosts_of(mesh.process_group(mesh.all_ranks[0], step_of(reshard).axes)) if machine.network else 1


def in_kernel(kind: str, ranks: int, size: float) -> float:
    """Seconds of a collective inside the kernel that reads its result. Each rank sends `size` bytes to each peer."""
    sent = size * (ranks - 1)
    return EXCHANGE_SECONDS + (2 * sent / PACKET_BANDWIDTH if OPS[kind].reduces_to_all else sent / BLOCK_BANDWIDTH)


def most_in_kernel(machine: Machine, kind: str, ranks: int) -> int:
    """Largest power of 2, in bytes, for which `in_kernel` is faster than the library. 0 if there is none."""
    most, blocks = (ir.EXCHANGE_BYTES, 1) if OPS[kind].reduces_to_all else (ir.BLOCK_BYTES // ranks, ranks)
    sizes = (1 << bit for bit in reversed(range(most.bit_length())))
    return next((size for size in sizes if in_kernel(kind, ranks, size) < communication(machine, kind, ranks, size * blocks)), 0)


def most_terms(machine: Machine, kind: str, ranks: int, type: BufferType) -> int:
    """Largest block, in elements, that kernels should exchange without the library. 0 if there is none."""
    if (OPS[kind].reduces and type.dtype.name not in ir.EXCHANGED) or not 1 < ranks <= ir.EXCHANGE_RANKS:
        return 0
    size, most = product(type.shape), most_in_kernel(machine, kind, ranks) // type.dtype.itemsize
    # A size with several factors or a divisor would need a complex condition at run time.
    is_one = not size.factors or (len(size.factors) == 1 and isinstance(size.factors[0], str))
    return most if is_one and size.divisor == 1 and 0 < size.coefficient <= most else 0


def cost_of_copies(machine: Machine, ranks: int, size: float, is_outermost: bool) -> tuple[float, float]:
    """Returns the extra seconds of a gather by copy engines, as a pair: to copy this rank's shard, and to rearrange all shards. Copy
    engines do not move this rank's shard, and cannot interleave the shards of an inner dim."""
    laid_out = 0.0 if is_outermost else machine.launch + 2 * size / machine.memory
    return machine.launch + 2 * size / ranks / machine.memory, laid_out


def cost_by_shards(machine: Machine, whole: Product, ranks: int) -> float:
    """Extra seconds if one matmul for each shard of the columns replaces a single matmul."""
    return max(0.0, ranks * whole.chunk(ranks, rows=False, is_own=False).seconds(machine) - whole.seconds(machine))
