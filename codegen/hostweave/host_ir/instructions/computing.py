"""Instructions of the host IR for computation and local copies."""

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

# Epilogues of a matmul, and the largest dtype, in bytes, whose rounding error exceeds the error of cuBLASLt (for gelu_tanh, about 5e-6).
ACTIVATIONS = {"relu": 8, "gelu_tanh": 2}
FEW_ROWS = 8  # maximum number of rows of a matmul inside a kernel: hw::kFewRows
FEW_SCALED_ROWS = 16  # maximum number of rows of a scaled matmul that a kernel of the runtime computes: hw::kFewScaledRows
PRODUCTS = 4  # maximum number of matmuls in one kernel, all with one common operand


class Compute(Instruction):
    work = "compute"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        """NumPy reference: returns the written values for the values that a rank reads. Floats of at most 16 bits are passed as f32.
        Launches have no reference."""
        raise NotImplementedError


@dataclass(frozen=True)
class Matmul(Compute):
    """dst = activation(scale * a b + accumulate + bias), rounded once. Usually one call of cublasLtMatmul.

    Multiplies the last two dims. Leading dims broadcast as in NumPy. `accumulate` has at most one buffer, with dst's type and layout. This
    buffer may be dst. `bias` has at most one buffer, with one element per column of dst.

    If a and b are 8-bit floats, `scales` has the f32 scales of a and of b. a is then [M, K] with contiguous rows, and b is [K, N] with
    contiguous columns. Each scale multiplies one block of a or b. The scales have the shapes that `hw.scaled_matmul` states, in the layout
    that cuBLASLt requires.
    """

    a: Read
    b: Read
    dst: Write
    precision: str = ""  # "tf32": f32 operands are first rounded to TF32
    scale: float = 1.0
    accumulate: Reads = ()
    bias: Reads = ()
    activation: str = ""
    scales: Reads = ()
    rest: tuple[int, ...] = ()  # parts of the sizes k, m and n that other matmuls compute, so that the sizes of this matmul are aligned
    syntax = (
        "matmul %{a}, %{b} scales {scales} in {precision} scaled {scale} accumulate {accumulate} bias {bias} activation {activation}"
        " rest {rest} -> %{dst}"
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
    """Matmuls of groups of rows. Group e has the rows `starts[e]` to `ends[e]` - 1.

    `starts` and `ends`, contiguous i32 [E], are global row numbers. `first` is the global number of this rank's first row, by default 0.
    Rows of other ranks are ignored. Groups must not overlap. Products of 16-bit floats are summed in f32, and dst may then be f32. Each row
    of x and dst must be contiguous.
    """

    x: Read
    other: Read
    starts: Read
    ends: Read
    dst: Write
    first: Expr | None = None
    is_outer: ClassVar[bool] = False

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        first = self.first.value if isinstance(self.first, Const) else 0  # In a check, `first` is a constant.
        x, other, starts, ends = reads
        return ((grouped.summed if self.is_outer else grouped.multiplied)(np, x, other, starts, ends, first),)


@dataclass(frozen=True)
class GroupedMatmul(Grouped):
    """Multiplies each group of rows of x [T, K] by one matrix of `other` [E, K, N]: dst [T, N].

    Rows outside of all groups become zeros. The rows or the columns of the matrices must be contiguous.
    """

    syntax = "grouped_matmul %{x}, %{other} rows %{starts} to %{ends} from {first} -> %{dst}"


@dataclass(frozen=True)
class GroupedOuter(Grouped):
    """For each group, multiplies the transposed rows of x [T, K] by the rows of `other` [T, N]: dst [E, K, N].

    Products of empty groups are zeros. Each row of `other` must be contiguous.
    """

    syntax = "grouped_outer %{x}, %{other} rows %{starts} to %{ends} from {first} -> %{dst}"
    is_outer = True


@dataclass(frozen=True, kw_only=True)
class _Masked(Compute):
    diagonal: Expr | None = None
    window: int | None = None
    lengths: Reads = ()
    bias: Reads = ()
    offsets: Reads = ()
    corner: str = ""
    kernels: str = ""

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("attention", *([f"attention_{self.kernels}"] if self.kernels else []))

    @property
    def masked_by(self) -> dict[str, str]:
        masks = {"lengths": self.lengths, "bias": self.bias, "offsets": self.offsets}
        return {word: name for word, names in masks.items() for name in names}

    def split(self, reads: tuple[Any, ...]) -> tuple[tuple[Any, ...], Masks]:
        diagonal = self.diagonal.value if isinstance(self.diagonal, Const) else None  # In a check, `diagonal` is a constant.
        masks = dict(zip(self.masked_by, reads, strict=False))
        return reads[len(masks) :], Masks(diagonal, self.window or 0, bool(self.corner), **masks)


@dataclass(frozen=True)
class Attention(_Masked):
    """dst = softmax(scale * q kT) v, without materialising the scores. q is [..., H, S, E], k [..., G, T, E], v [..., G, T, F], dst [...,
    H, S, F].

    Query head h uses key head h / (H / G). The masks are:

    - `diagonal`: row i sees columns up to i + diagonal. With `window`, row i sees only the last `window` of these columns.
    - `lengths`, contiguous i32 [...]: the number of valid columns. With corner `bottom_right`, row i sees columns up to i + diagonal + the
      number of valid columns.
    - `bias`, [..., H, S, T], is added to the scaled scores. Dims before the last dim may be 1, and dims before S may be missing. -inf hides
      a column.
    - `offsets`, contiguous i32 [..., N + 1]: the starts of N packed sequences, and the end of the last sequence. Rows see only columns of
      their sequence.

    `lse`, contiguous f32 [..., H, S], receives the log-sum-exps. Each row of every buffer must be contiguous.

    Each row must see a column, unless there are lengths, a bias or offsets, or `blind` is `zeros`. A row that sees no column gives 0, and
    an lse below -1e30.

    `kernels` names a library of this package, such as `bf16_64` for heads of up to 64 elements. CUDA uses the library if cuDNN does not
    support the op.
    """

    q: Read
    k: Read
    v: Read
    scale: float
    dst: Write
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
    """Gradients of q, k and v from `gradient`, the gradient of the result.

    `o` and `lse` are the results of Attention. `dbias` receives the gradient of the bias. If the bias was broadcast, its gradient is summed
    over the broadcast dims.
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
    """Launches a generated kernel or a user kernel. Buffers of a user kernel must be contiguous.

    If `sent_on` names a channel, a launch_reduce_scatter of the only result follows on this channel. With peer access, the launch stores
    each block in the memory of the rank that receives the block.
    """

    kernel: Launched
    srcs: Reads
    dsts: Writes
    sent_on: str = ""
    syntax = "launch @{kernel} {srcs} -> {dsts} sent on {sent_on}"


@dataclass(frozen=True)
class Copy(Compute):
    """dst = src. Both buffers have the same shape and dtype. Any strides are possible."""

    src: Read
    dst: Write
    syntax = "copy %{src} -> %{dst}"
    work = "move"
    copies = True

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return reads


@dataclass(frozen=True)
class Pack(Compute):
    """Writes the blocks of src to dst, one after another. The blocks, and the elements of each block, are in row-major order."""

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
        """Index in src of each element of dst."""
        shape = [cut.size.bind(sizes) for cut in self.cuts]
        positions = np.arange(prod(shape)).reshape(shape)
        return np.concatenate([positions[box].ravel() for box in boxes(self.cuts, sizes)])


@dataclass(frozen=True)
class Unpack(Pack):
    """Inverse of Pack: src has the packed blocks of dst."""

    syntax = "unpack %{src} -> %{dst} in {cuts}"

    def order(self, np: Any, sizes: Sizes) -> Any:
        return np.argsort(super().order(np, sizes))


@dataclass(frozen=True)
class Fill(Compute):
    dst: Write
    value: int | float
    syntax = "fill %{dst} with {value}"
    work = "move"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return (self.value,)
