"""Instructions of the host IR that compute, or move what is there."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from hostweave.fusion_ir.ops import OPS
from hostweave.fusion_ir.ops.attention import Masks, attended, differentiated
from hostweave.fusion_ir.ops.scaled import multiplied
from hostweave.host_ir.expr import Const, Expr
from hostweave.host_ir.tree import Instruction, Launched, Read, Reads, Write, Writes
from hostweave.types.blocks import Cuts, boxes
from hostweave.types.mesh import Sizes

ACTIVATIONS = ("relu", "gelu_tanh")  # ops that a matmul may end with
FEW_ROWS = 8  # at most, of products that a kernel computes: hw::kFewRows
PRODUCTS = 4  # at most, of such a kernel: hw::kProducts


class Compute(Instruction):
    """Work of this rank alone."""

    work = "compute"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        """What it writes, by NumPy, from a rank's sizes and what it reads (small floats as f32). A launch does what its kernel says."""
        raise NotImplementedError


@dataclass(frozen=True)
class Matmul(Compute):
    """dst = activation(scale * a b + accumulate + bias), rounded once. Equivalent to cublasLtMatmul with its epilogue.

    The product is over the last two dims, leading dims broadcast as NumPy does. `accumulate` is of dst's type and may be dst, the bias
    a vector along dst's columns; there is at most one of each. Two `scales`, of f32, go with operands of 8-bit floats, of which a is
    [M, K] row by row and b [K, N] column by column: scales of a are [1, 1], [M, 1], [M, K/128] or [M/128, K/128], those of b alike, and
    each multiplies the elements of its block. Those of blocks lie as cuBLASLt takes them: see `scales_lie`.
    """

    a: Read
    b: Read
    dst: Write
    precision: str = ""  # "tf32": f32 operands are rounded to TF32 first
    scale: float = 1.0
    accumulate: Reads = ()
    bias: Reads = ()
    activation: str = ""  # one of ACTIVATIONS
    scales: Reads = ()  # of a, and of b
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


class _Masked(Compute):
    """Attention, or its backward pass: what masks its scores."""

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
        """The buffers that mask the scores, by what they are, in the order in which it reads them."""
        masks = {"lengths": self.lengths, "bias": self.bias, "offsets": self.offsets}
        return {word: name for word, names in masks.items() for name in names}

    def split(self, reads: tuple[Any, ...]) -> tuple[tuple[Any, ...], Masks]:
        """What every one reads, and the masks, by their values."""
        count = len(reads) - len(self.masked_by)
        diagonal = self.diagonal.value if isinstance(self.diagonal, Const) else None  # an execution has its value
        masks = dict(zip(self.masked_by, reads[count:], strict=True))
        return reads[:count], Masks(diagonal, self.window or 0, bool(self.corner), **masks)


@dataclass(frozen=True)
class Attention(_Masked):
    """dst = softmax(scale * q kT) v, by blocks of scores. q is [..., H, S, E], k [..., G, T, E], v [..., G, T, F], dst [..., H, S, F].

    Head h of the queries is of group h / (H / G). With a `diagonal` row i sees columns up to i + diagonal, and with a window only the
    last so many of them. `lengths`, contiguous [...] of i32, say how many columns there are; diagonals of the corner `bottom_right` begin
    there. The `bias`, [..., H, S, T] whose dims before the last one may be 1 or missing, is added to the scaled scores, and -inf hides a
    column. `offsets`, contiguous [..., N + 1] of i32, say where N sequences begin that are packed into one, and where the last one ends:
    rows see columns of their own sequence alone. `lse`, contiguous [..., H, S] of f32, gets the logarithms of the sums of exp.
    The elements of a row of all else lie side by side. A row that sees no column is an error, but with lengths, a bias or offsets, or
    where `blind` says `zeros`: it gets these, and an lse below -1e30. `kernels` names those of this package that CUDA may need for it, as
    `bf16_64` for heads of up to 64 elements: all for f32, what cuDNN has not for f16 and bf16.
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
    syntax = (
        "attention %{q}, %{k}, %{v} scaled {scale} diagonal {diagonal} corner {corner} window {window} lengths {lengths}"
        + " bias {bias} offsets {offsets} blind {blind} kernels {kernels} -> %{dst} lse {lse}"
    )

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        operands, masks = self.split(reads)
        return attended(np, operands, self.scale, masks)[: 1 + len(self.lse)]


@dataclass(frozen=True)
class AttentionBackward(_Masked):
    """The gradients of q, k and v from that of the result, by blocks of scores; `o` and `lse` are what Attention gave.

    `dbias` gets that of the bias, of its shape: dims that this has once are summed over.
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
    syntax = (
        "attention_backward %{q}, %{k}, %{v}, %{o}, %{gradient}, %{lse} scaled {scale} diagonal {diagonal} corner {corner}"
        + " window {window} lengths {lengths} bias {bias} offsets {offsets} kernels {kernels} -> %{dq}, %{dk}, %{dv} dbias {dbias}"
    )

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        operands, masks = self.split(reads)
        return differentiated(np, operands, self.scale, masks)[: 3 + len(self.dbias)]


@dataclass(frozen=True)
class Launch(Compute):
    """Runs a kernel of the program, or one of the user's, whose buffers are contiguous."""

    kernel: Launched
    srcs: Reads
    dsts: Writes
    syntax = "launch @{kernel} {srcs} -> {dsts}"


@dataclass(frozen=True)
class Copy(Compute):
    """dst = src, of one shape and dtype, strided or not."""

    src: Read
    dst: Write
    syntax = "copy %{src} -> %{dst}"
    work = "move"
    copies = True

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return reads


@dataclass(frozen=True)
class Pack(Compute):
    """dst holds the blocks of src, which is cut along its dims: one after another in row-major order, each row-major in itself."""

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
        """Of each element of the blocks the place that it has in the tensor."""
        shape = [cut.size.bind(sizes) for cut in self.cuts]
        places = np.arange(prod(shape)).reshape(shape)
        return np.concatenate([places[box].ravel() for box in boxes(self.cuts, sizes)])


@dataclass(frozen=True)
class Unpack(Pack):
    """dst is what pack has made src of."""

    syntax = "unpack %{src} -> %{dst} in {cuts}"

    def order(self, np: Any, sizes: Sizes) -> Any:
        return np.argsort(super().order(np, sizes))


@dataclass(frozen=True)
class Fill(Compute):
    """Every element of dst = value, which the dtype must represent."""

    dst: Write
    value: int | float
    syntax = "fill %{dst} with {value}"
    work = "move"

    def computed(self, np: Any, sizes: Sizes, *reads: Any) -> tuple[Any, ...]:
        return (self.value,)
