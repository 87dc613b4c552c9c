"""How long ops and chunk loops take on one rank, by what is known of a machine.

A matmul takes as many waves of tiles as it has, but not less than its operands take to be read; another op what it reads and
writes (the roofline of Williams, Waterman and Patterson, "Roofline", 2009). A chunk loop is played through: its matmuls follow one
another, and so do its communications, each as soon as what it needs is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod, sqrt

from hostweave.communication.cost import communication
from hostweave.fusion_ir.ir import Fusion, Op
from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attention import GRADIENTS, is_by_kernels
from hostweave.fusion_ir.ops.attributes import CAUSAL, CONTRACTED, WINDOW
from hostweave.fusion_ir.resharding import local_dims, step_of
from hostweave.host_ir import ir
from hostweave.types.machine import H200, Machine
from hostweave.types.mesh import Mesh
from hostweave.types.size import product
from hostweave.types.tensor import BufferType, DType
from hostweave.types.zigzag import Zigzag

# Tiles of one matmul's result: rows, columns, and how fast they are beside those of 128 x 256.
TILES = (
    *((128, 256, 1.0), (256, 128, 1.0), (128, 192, 0.98), (192, 128, 0.98), (256, 192, 1.0), (256, 160, 1.0)),
    *((128, 128, 0.93), (64, 256, 0.85), (64, 128, 0.7), (64, 64, 0.5)),
)
SPLITS = (1, 2, 4, 8)  # into which the inner dim is cut, where there are few tiles
READS = 0.85  # how fast a matmul reads its operands, where nothing else takes its time, beside a kernel that copies
EXCHANGE = 5.5e-6  # seconds in which a kernel has the first terms of others
PACKETS = 190e9  # bytes in a second that it sends, of which half are its term
ATTENTION = 0.74  # of what tensor cores do, that attention of 16-bit floats reaches; kernels of ours take about 32 times as long
ATTENTION_ROWS = 128  # of a head that a multiprocessor takes together; the last ones under a diagonal see more, and others wait for them


# --- matmuls ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A matmul of one rank: as many products of [rows, inner] and [inner, columns]."""

    count: float
    rows: float
    inner: float
    columns: float
    dtype: DType
    tf32: bool = False

    @property
    def rate(self) -> float:
        """How fast its dtype is beside 16-bit floats."""
        return {1: 2.0, 2: 1.0, 4: 0.5 if self.tf32 else 1 / 16}.get(self.dtype.itemsize, 1 / 16)

    def seconds(self, machine: Machine) -> float:
        if not self.count * self.rows * self.columns:
            return 0.0
        computed = min(self._in_tiles(machine, *tile, parts) for tile in TILES for parts in SPLITS)
        elements = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return machine.launch + max(computed, self.count * elements * self.dtype.itemsize / (machine.memory * READS))

    def share(self, machine: Machine) -> float:
        """How much of the multiprocessors it keeps busy, from 0 to 1: the last wave of tiles may be few."""
        if not (work := self.count * self.rows * self.inner * self.columns):
            return 0.0
        return min(1.0, 2 * work / (machine.flops * self.rate * self.seconds(machine)))

    def chunk(self, chunks: int, rows: bool, is_own: bool) -> Product:
        """One of so many parts of its rows, or of its columns."""
        return replace(self, rows=self.rows / chunks) if rows else replace(self, columns=self.columns / chunks)

    def _in_tiles(self, machine: Machine, m: int, n: int, fast: float, parts: int) -> float:
        """Each tile by as many multiprocessors as the inner dim has parts, which are added in f32 afterwards."""
        waves = ceil(self.count * ceil(self.rows / m) * ceil(self.columns / n) * parts / machine.multiprocessors)
        work = 2 * m * n * self.inner / parts * machine.multiprocessors / (machine.flops * self.rate * fast)
        added = machine.launch + 8 * parts * self.count * self.rows * self.columns / machine.memory if parts > 1 else 0.0
        return waves * (work + machine.wave * sqrt(m * n / (128 * 256))) + added


def product_of(op: Op, fusion: Fusion, sizes: Mapping[str, int], tf32: bool) -> Product:
    """The matmul of one rank."""
    values = fusion.values()
    left, result = (list(map(float, local_dims(values[name].type, fusion.mesh, sizes))) for name in (op.tensors[0], op.result.name))
    contracted = op[CONTRACTED] if op.kind == "matmul" else 1
    inner = prod(left[len(left) - contracted :])
    is_one = len(values[op.tensors[1]].type.dims) == contracted + 1  # matrix for all: its rows follow one another
    rows = prod(result[:-1]) if is_one else result[-2]
    return Product(1.0 if is_one else prod(result[:-2]), rows, inner, result[-1], values[op.tensors[0]].type.dtype, tf32)


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attended:
    """An attention of one rank: the rows of so many heads to columns, under a causal mask those of the last rows."""

    heads: float
    rows: float
    columns: float
    width: float  # of a row of keys and a row of values
    is_causal: bool
    is_balanced: bool = False  # rows are in zigzag: they see half of each block, and gathered columns in two calls
    speed: float = ATTENTION
    products: float = 2.0  # of the scores' size, for every element of a row: of a gradient more

    def seconds(self, machine: Machine) -> float:
        if self.is_balanced:  # the first piece of the first rank, and the last one
            piece = replace(self, rows=self.rows / 2, is_balanced=False)
            return replace(piece, columns=piece.rows).seconds(machine) + piece.seconds(machine)
        seen = max(self.columns - self.rows / 2, self.columns / 2) if self.is_causal else self.columns
        of_score = self.products * self.width / (machine.flops * self.speed)
        waits = ATTENTION_ROWS / 2 * min(self.rows, self.columns) * machine.multiprocessors if self.is_causal else 0.0
        longest = ATTENTION_ROWS * self.columns * machine.multiprocessors if self.rows > ATTENTION_ROWS else 0.0  # of fewer, keys are cut
        return machine.launch + of_score * max(self.heads * self.rows * seen + waits, longest)

    def chunk(self, chunks: int, rows: bool, is_own: bool) -> Attended:
        """A block of the columns. All rows see those that others have, or in zigzag half of them."""
        columns = self.columns / chunks / (2 if self.is_balanced and not is_own else 1)
        return replace(self, columns=columns, is_causal=self.is_causal and is_own, is_balanced=False)


def attended_of(op: Op, fusion: Fusion, sizes: Mapping[str, int]) -> Attended:
    """The attention of one rank, or a third of its gradients."""
    types = [value.type for value in map(fusion.values().__getitem__, op.tensors[:3])]
    q, k, v = (list(map(float, local_dims(type, fusion.mesh, sizes))) for type in types)
    products, by = 5 / 3 if op.kind in GRADIENTS[:3] else 2.0, 32 if is_by_kernels(op, *types) else 1
    columns = min(op[WINDOW], k[-2]) if op[WINDOW] else k[-2]
    is_causal = bool(op[CAUSAL]) and not op[WINDOW]
    is_balanced = is_causal and isinstance(types[0].dims[-2].axes, Zigzag)
    return Attended(prod(q[:-2]), q[-2], columns, q[-1] + v[-1], is_causal, is_balanced, ATTENTION / by, products)


def around_attention(machine: Machine, ranks: int, gathered: float, result: float) -> tuple[float, float]:
    """Of keys and values of so many bytes that travel to an attention, and of its result: in sequence a second gather begins, and what
    is gathered is laid out; with blocks a rank's own keys and values are packed, and all results joined."""
    begins = machine.link("collective", ranks).seconds(0)
    in_sequence = begins + 2 * (machine.launch + gathered / machine.memory)
    packed, joined = 2 * gathered / ranks, (ranks + 1) * result
    return in_sequence, 5 * machine.launch + (packed + joined) / machine.memory


# --- ops --------------------------------------------------------------------------------------------------------------


def seconds(fusion: Fusion, sizes: Mapping[str, int], machine: Machine = H200, tf32: bool = False) -> dict[str, float]:
    """The time of each op, by its result's name, at these sizes (4096 for dims that have none), alone on the machine.

    A view takes none, a call what the ops of its function do.
    """
    functions: dict[str, float] = {}
    for body in fusion.functions:
        functions[body.name] = sum(_of_body(body, sizes, machine, tf32, functions).values())
    return _of_body(fusion, sizes, machine, tf32, functions)


def _of_body(fusion: Fusion, sizes: Mapping[str, int], machine: Machine, tf32: bool, functions: Mapping[str, float]) -> dict[str, float]:
    types = {name: value.type for name, value in fusion.values().items()}
    dims = {name: local_dims(type, fusion.mesh, sizes) for name, type in types.items()}
    bytes_of = {name: float(prod(dims[name]) * type.dtype.itemsize) for name, type in types.items()}

    def of_op(op: Op) -> float:
        if op.callee:
            return 0.0 if op.kind == "output" else functions[op.callee.name]
        if OPS[op.kind].is_view:
            return 0.0
        moved = [bytes_of[name] for name in (*op.tensors, op.result.name)]
        if OPS[op.kind].is_reshard_step:
            return communication(machine, op.kind, _ranks(op, types[op.tensors[0]].mesh_in(fusion.mesh)), max(moved))
        if OPS[op.kind].is_product:
            return product_of(op, fusion, sizes, tf32).seconds(machine)
        if op.kind == "attention" or op.kind in GRADIENTS:
            return max(attended_of(op, fusion, sizes).seconds(machine), machine.launch + sum(moved) / machine.memory)
        return machine.launch + sum(moved) / machine.memory

    return {op.result.name: of_op(op) for op in fusion.ops}


def _ranks(op: Op, mesh: Mesh) -> int:
    """How many communicate, of the mesh that the operand is on."""
    axes = step_of(op).axes
    return mesh.size_of(axes) if axes else 2


def in_kernel(ranks: int, size: float) -> float:
    """An all_reduce of so many bytes by the kernel that uses it: each rank sends its term to each other one."""
    return EXCHANGE + 2 * size * (ranks - 1) / PACKETS


def most_in_kernel(machine: Machine, ranks: int) -> int:
    """Up to how many bytes that takes less time than a collective; a power of 2, or 0."""
    sizes = (ir.EXCHANGE_BYTES >> halved for halved in range(ir.EXCHANGE_BYTES.bit_length()))
    return next((size for size in sizes if in_kernel(ranks, size) < communication(machine, "all_reduce", ranks, size)), 0)


def most_terms(machine: Machine, ranks: int, type: BufferType) -> int:
    """Up to how many elements the kernel that uses a sum over the ranks adds it up, of what each of them has as such a term; or 0."""
    if type.dtype.name not in ir.EXCHANGED or not 1 < ranks <= ir.EXCHANGE_RANKS:
        return 0
    size, most = product(type.shape), most_in_kernel(machine, ranks) // type.dtype.itemsize
    is_one = not size.factors or (len(size.factors) == 1 and isinstance(size.factors[0], str))  # for a simple condition
    return most if is_one and size.divisor == 1 and 0 < size.coefficient <= most else 0


def cost_of_copies(machine: Machine, ranks: int, size: float, is_outermost: bool) -> tuple[float, float]:
    """Of a gather to one buffer: of a rank's own shard, which copy engines do not bring, and of all shards, which no transport lays side
    by side along a dim that is not the outermost one."""
    laid_out = 0.0 if is_outermost else machine.launch + 2 * size / machine.memory
    return machine.launch + 2 * size / ranks / machine.memory, laid_out


def cost_by_shards(machine: Machine, whole: Product, ranks: int) -> float:
    """How much longer products take of which each has the columns of one rank, one after the other, than the one of all columns."""
    return max(0.0, ranks * whole.chunk(ranks, rows=False, is_own=False).seconds(machine) - whole.seconds(machine))
