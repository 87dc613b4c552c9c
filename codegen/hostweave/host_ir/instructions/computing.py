"""Compute and local copy instructions of the host IR."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from hostweave.fusion_ir.ops import OPS, grouped
from hostweave.fusion_ir.ops.attention import Masks, attended, differentiated
from hostweave.fusion_ir.ops.scaled import multiplied
from hostweave.host_ir.expr import Const, Expr
from hostweave.host_ir.tree import Instruction, Launched, Read, Reads, Write, Writes
from hostweave.types.blocks import Cuts, boxes
from hostweave.types.mesh import Sizes

ACTIVATIONS = ("relu", "gelu_tanh")  # activations that a matmul can apply as its epilogue
FEW_ROWS = 8  # largest number of rows of a matmul inside a kernel: hw::kFewRows
FEW_SCALED_ROWS = 16  # largest number of rows of a scaled matmul by a kernel of the runtime: hw::kFewScaledRows
PRODUCTS = 4  # largest number of matmuls in such a kernel: hw::kProducts


class Compute(Instruction):
    """Local work of a rank."""

    work = "compute"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        """NumPy reference: the written values, from a rank's sizes and the read values. Small floats are given as f32.

        A launch is computed from its kernel's ops instead.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Matmul(Compute):
    """dst = activation(scale * a b + accumulate + bias), rounded once. Equivalent to cublasLtMatmul with an epilogue.

    The product is over the last two dims; leading dims broadcast as in NumPy. `accumulate` has dst's type and may be dst. The bias is a
    vector along dst's columns. There is at most one of each.

    8-bit floats have two `scales` of f32. Then a is [M, K] with contiguous rows, and b is [K, N] with contiguous columns. Scales of a are
    [1, 1], [M, 1], [M, K/128] or [M/128, K/128], and each multiplies the elements of its block; the scales of b follow the same rules.
    Scales of blocks have the layout of cuBLASLt: see `scales_lie`.
    """

    a: Read
    b: Read
    dst: Write
    precision: str = ""  # "tf32": f32 operands are rounded to TF32 first
    scale: float = 1.0
    accumulate: Reads = ()
    bias: Reads = ()
    activation: str = ""  # one of ACTIVATIONS, or ""
    scales: Reads = ()  # scales of a and of b
    syntax = (
        "matmul %{a}, %{b} scales {scales} in {precision} scaled {scale} accumulate {accumulate} bias {bias} activation {activation}"
        " -> %{dst}"
    )
    in_place = "accumulate"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        a, b, *others = reads
        added, scales = others[: len(others) - len(self.scales)], others[len(others) - len(self.scales) :]
        product = multiplied(np, a, b, *scales) if scales else np.matmul(a, b)
        total = sum(added, product * a.dtype.type(self.scale))
        return (OPS[self.activation].numpy(np, total) if self.activation else total,)


@dataclass(frozen=True)
class Grouped(Compute):
    """Products of groups of rows. Group e has the rows with numbers from `starts[e]` to below `ends[e]`.

    The first row of the operands has number `first`. Starts and ends are contiguous [E] of i32. Rows outside of the matrix are ignored.
    Groups must not overlap. Products of 16-bit floats are summed in f32, and dst may be f32. In x and dst the elements of a row are
    contiguous.
    """

    x: Read
    other: Read
    starts: Read
    ends: Read
    dst: Write
    first: Expr | None = None
    is_outer: ClassVar[bool] = False

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        first = self.first.value if isinstance(self.first, Const) else 0  # constant once the instruction is executed
        x, other, starts, ends = reads
        return ((grouped.summed if self.is_outer else grouped.multiplied)(np, x, other, starts, ends, first),)


@dataclass(frozen=True)
class GroupedMatmul(Grouped):
    """Multiplies each group of rows of x [T, K] by its matrix of `other` [E, K, N]: dst [T, N]. Rows without a group are zeros.

    In each matrix, the rows or the columns are contiguous.
    """

    syntax = "grouped_matmul %{x}, %{other} rows %{starts} to %{ends} from {first} -> %{dst}"


@dataclass(frozen=True)
class GroupedOuter(Grouped):
    """Multiplies the transposed rows of x [T, K] by the rows of `other` [T, N], group by group: dst [E, K, N].

    Empty groups have zeros. In `other` the elements of a row are contiguous, too.
    """

    syntax = "grouped_outer %{x}, %{other} rows %{starts} to %{ends} from {first} -> %{dst}"
    is_outer = True


class _Masked(Compute):
    """Masks of attention and of its backward pass."""

    scale: float
    diagonal: Expr | None
    window: int | None
    lengths: Reads
    bias: Reads
    offsets: Reads
    corner: str
    kernels: str

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("attention", *([f"attention_{self.kernels}"] if self.kernels else []))

    @property
    def masked_by(self) -> dict[str, str]:
        """Buffers that mask the scores, by field, in the order in which they are read."""
        masks = {"lengths": self.lengths, "bias": self.bias, "offsets": self.offsets}
        return {word: name for word, names in masks.items() for name in names}

    def split(self, reads: tuple[Any, ...]) -> tuple[tuple[Any, ...], Masks]:
        """Splits the read values into operands and masks."""
        count = len(reads) - len(self.masked_by)
        diagonal = self.diagonal.value if isinstance(self.diagonal, Const) else None  # constant once the instruction is executed
        masks = dict(zip(self.masked_by, reads[count:], strict=True))
        return reads[:count], Masks(diagonal, self.window or 0, bool(self.corner), **masks)


@dataclass(frozen=True)
class Attention(_Masked):
    """dst = softmax(scale * q kT) v, by blocks of scores. q is [..., H, S, E], k [..., G, T, E], v [..., G, T, F], dst [..., H, S, F].

    Head h of the queries uses group h / (H / G). The masks are:

    - `diagonal`: row i sees columns up to i + diagonal. With `window`, it sees only the last `window` of them.
    - `lengths`, contiguous [...] of i32: the number of columns. With corner `bottom_right`, the diagonal ends in the last row at the last
      of these columns.
    - `bias`, [..., H, S, T], added to the scaled scores. Dims before the last one may be 1 or missing. -inf hides a column.
    - `offsets`, contiguous [..., N + 1] of i32: starts of N packed sequences, and the end of the last one.
      Rows see only their own sequence.

    `lse`, contiguous [..., H, S] of f32, receives the log-sum-exps. In all other buffers, the elements of a row are contiguous.

    A row that sees no column is an error, unless there are lengths, a bias or offsets, or `blind` is `zeros`. The result is then 0, and its
    lse is below -1e30. `kernels` names the kernels of this package that CUDA may need: `bf16_64` for heads of up to 64 elements. f32 always
    needs them; f16 and bf16 need them for problems that cuDNN lacks.
    """

    q: Read
    k: Read
    v: Read
    scale: float
    dst: Write
    diagonal: Expr | None = None
    window: int | None = None
    lengths: Reads = ()
    bias: Reads = ()
    offsets: Reads = ()
    corner: str = ""
    kernels: str = ""
    lse: Writes = ()
    blind: str = ""
    log_sum_exps = "gives"
    syntax = (
        "attention %{q}, %{k}, %{v} scaled {scale} diagonal {diagonal} corner {corner} window {window} lengths {lengths}"
        + " bias {bias} offsets {offsets} blind {blind} kernels {kernels} -> %{dst} lse {lse}"
    )

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        operands, masks = self.split(reads)
        return attended(np, operands, self.scale, masks)[: 1 + len(self.lse)]


@dataclass(frozen=True)
class AttentionBackward(_Masked):
    """Gradients of q, k and v from the gradient of the result. `o` and `lse` are the results of Attention.

    `dbias` receives the gradient of the bias, in its shape. Dims of size 1 are summed over.
    """

    q: Read
    k: Read
    v: Read
    o: Read
    gradient: Read
    lse: Read
    scale: float
    dq: Write
    dk: Write
    dv: Write
    diagonal: Expr | None = None
    window: int | None = None
    lengths: Reads = ()
    bias: Reads = ()
    offsets: Reads = ()
    corner: str = ""
    kernels: str = ""
    dbias: Writes = ()
    log_sum_exps = "takes"
    syntax = (
        "attention_backward %{q}, %{k}, %{v}, %{o}, %{gradient}, %{lse} scaled {scale} diagonal {diagonal} corner {corner}"
        + " window {window} lengths {lengths} bias {bias} offsets {offsets} kernels {kernels} -> %{dq}, %{dk}, %{dv} dbias {dbias}"
    )

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        operands, masks = self.split(reads)
        return differentiated(np, operands, self.scale, masks)[: 3 + len(self.dbias)]


@dataclass(frozen=True)
class Launch(Compute):
    """Launches a kernel of the program or of the user. A user kernel's buffers are contiguous."""

    kernel: Launched
    srcs: Reads
    dsts: Writes
    syntax = "launch @{kernel} {srcs} -> {dsts}"


@dataclass(frozen=True)
class Copy(Compute):
    """dst = src. Both have one shape and dtype, and any strides."""

    src: Read
    dst: Write
    syntax = "copy %{src} -> %{dst}"
    work = "move"
    copies = True

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return reads


@dataclass(frozen=True)
class Pack(Compute):
    """Packs the blocks of src into dst, in row-major order. Each block is row-major."""

    src: Read
    dst: Write
    cuts: Cuts
    syntax = "pack %{src} -> %{dst} in {cuts}"
    work = "move"

    @property
    def packed(self) -> Cuts:
        return self.cuts

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return (reads[0].ravel()[self.order(np, sizes)].reshape(reads[0].shape),)

    def order(self, np: Any, sizes: Sizes) -> Any:
        """Tensor index of each packed element."""
        shape = [cut.size.bind(sizes) for cut in self.cuts]
        places = np.arange(prod(shape)).reshape(shape)
        return np.concatenate([places[box].ravel() for box in boxes(self.cuts, sizes)])


@dataclass(frozen=True)
class Unpack(Pack):
    """Inverse of pack: dst is the tensor whose packed blocks are in src."""

    syntax = "unpack %{src} -> %{dst} in {cuts}"

    def order(self, np: Any, sizes: Sizes) -> Any:
        return np.argsort(super().order(np, sizes))


@dataclass(frozen=True)
class Fill(Compute):
    """Sets every element of dst to `value`, which the dtype must represent."""

    dst: Write
    value: int | float
    syntax = "fill %{dst} with {value}"
    work = "move"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return (self.value,)
