"""Rules that decompose ATen ops, called directly and compared with the ops on edge inputs: NaN, infinities, ties, empty tensors."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from hostweave.torch.composed import COMPOSED  # noqa: E402
from hostweave.torch.special import DERIVED, SPECIAL  # noqa: E402

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
f32, f64, bf16, i32, i64, u8 = torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8
EDGES = torch.tensor([[1.0, NAN, -0.0, 0.0, 2.0, 2.0, -INF, 1e-40], [3.0, 3.0, INF, INF, -2.5, -1e-39, -1.0, 0.5]])
CALM = torch.tensor([[1.0, 1.0, -0.0, 0.0, 2.0, 2.0, -3.0, 1e-40], [3.0, 3.0, 3.0, 0.5, -2.5, -2.5, -1.0, 0.5]])
INTS = torch.tensor([[3, -1, 3, 2, 2], [0, 0, -7, 9, 9]])
BOOLS = torch.tensor([[True, False, True], [False, False, True]])
SHAPED = (torch.tensor(-2.5), torch.tensor(NAN), torch.empty(0, 3), torch.empty(3, 0))
ALL = (EDGES, EDGES.double(), EDGES.bfloat16(), INTS, INTS.int(), *SHAPED)
Case = tuple[Any, tuple[Any, ...], dict[str, Any]]
CASES: list[Case] = []


def case(op: Any, *args: Any, **kwargs: Any) -> None:
    CASES.append((op, args, kwargs))


# --- along a dim ---
for x in ALL:
    for dim in (-1, 0):
        if x.numel() or x.ndim == 0 or x.shape[dim]:
            for op in (aten.kthvalue.default, aten.median.dim, aten.nanmedian.dim):
                k = (1,) if op == aten.kthvalue.default else ()
                case(op, x, *k, dim, False)
                case(op, x, *k, dim, True)
        for op in (aten.cummax.default, aten.cummin.default):
            case(op, x, dim)
        case(aten.cumprod.default, x, dim)
        if x.is_floating_point():
            case(aten.logcumsumexp.default, x, dim)
    case(aten.median.default, x)
    case(aten.nanmedian.default, x)
for number in (1, 2, 4, 8):
    case(aten.kthvalue.default, EDGES, number, -1, True)
case(aten.nanmedian.dim, torch.full((2, 3), NAN), -1)
case(aten.cummax.default, BOOLS, -1)
case(aten.cumprod.default, BOOLS, 0)
case(aten.cumprod.default, INTS.to(u8), 0, dtype=f64)

# --- searches. torch's result is undefined if the boundaries contain NaN, because boundaries with NaN are not sorted. ---
VALUES = torch.tensor([NAN, INF, -INF, -0.0, 0.0, 1.0, 2.5, 3.0, 1e-40])
for bounds in (torch.tensor([0.0, 1.0, 1.0, 2.5]), torch.tensor([-INF, -0.0, 0.0, INF]), torch.empty(0)):
    for right in (False, True):
        for dtype in (f32, f64, bf16):
            case(aten.bucketize.Tensor, VALUES.to(dtype), bounds.to(dtype), right=right)
            case(aten.searchsorted.Tensor, bounds.to(dtype), VALUES.to(dtype), right=right, out_int32=True)
        for value in (NAN, INF, 1, 1.0, 2.5, True):
            case(aten.bucketize.Scalar, value, bounds, right=right)
            case(aten.searchsorted.Scalar, bounds, value, right=right)
for value in (2.5, 2, NAN, -INF, 2.0, 3.7, -0.5, True, 2**24 + 1, 2.0**24 + 1):
    for right in (False, True):
        for dtype in (i64, i32, u8):
            bounds = torch.tensor([1, 2, 3] if dtype == u8 else [1, 2, 3, 2**24, 2**24 + 1], dtype=dtype)
            if dtype != u8 or value < 256:
                case(aten.bucketize.Scalar, value, bounds, right=right)
                case(aten.searchsorted.Scalar, bounds, value, right=right)
case(aten.searchsorted.Scalar, torch.tensor([0.1, 0.2], dtype=f64), 0.1, right=True)
case(aten.searchsorted.Scalar, torch.tensor([0.1, 0.2]), 0.1, right=True)
case(aten.searchsorted.Tensor, torch.tensor([1, 2, 3]), torch.tensor([2.5]))
case(aten.bucketize.Tensor, torch.tensor([2.5, NAN]), torch.tensor([1, 2, 3]))
case(aten.bucketize.Tensor, torch.tensor([2, 1]), torch.tensor([1.0, 2.0, 3.5]))
case(aten.bucketize.Tensor, torch.tensor(2.5), torch.tensor([1, 2, 3]))
case(aten.searchsorted.Tensor, torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[NAN], [0.0]]), side="right")
case(aten.searchsorted.Tensor, torch.tensor([2.0, 1.0]), VALUES, sorter=torch.tensor([1, 0]))
case(aten.searchsorted.Tensor, torch.empty(2, 0), torch.ones(2, 3))
case(aten.searchsorted.Tensor, torch.tensor([1.0]), torch.empty(0, 2))

# --- histograms. Without a range, torch raises an error for NaN and infinities. ---
for dtype in (f32, f64):
    case(aten.histc.default, CALM.to(dtype), 4)
    case(aten.histc.default, EDGES.to(dtype), 4, -1, 3)
    case(aten.histc.default, torch.empty(0, dtype=dtype), 3)
    case(aten.histc.default, torch.empty(0, dtype=dtype), 3, 0, 1)
    case(aten.histc.default, torch.ones(3, dtype=dtype), 3)
    case(aten.histc.default, torch.tensor(2.0, dtype=dtype), 3, 2, 2)
    case(aten.histc.default, torch.tensor([1.0, 5.0], dtype=dtype), 3, 2, 2)

# --- writes at indices ---
for dtype in (f32, f64, bf16, i64, i32, u8, torch.bool):
    x = torch.tensor([[1, 2, 3], [4, 0, 6]]).to(dtype)
    source = torch.tensor([[3, 0, 1, 5], [0, 7, 2, 2]]).to(dtype)
    index = torch.tensor([[0, 0, 2, 0], [2, 2, 2, 2]])
    for reduce in ("sum", "mean", "prod", "amax", "amin"):
        for own in (True, False):
            if dtype != torch.bool or reduce != "mean":
                case(aten.scatter_reduce.two, x, -1, index, source, reduce, include_self=own)
                case(aten.scatter_reduce.two, x, 0, index[:, :0], source, reduce, include_self=own)
                case(aten.scatter_reduce.two, x[0, 0], 0, index[0, 0], source[0, 0], reduce, include_self=own)
            if reduce != "sum" and dtype != torch.bool:
                case(aten.index_reduce.default, x, -1, torch.tensor([0, 0, 2, 0]), source, reduce, include_self=own)
                case(aten.index_reduce.default, x, 1, torch.empty(0, dtype=i64), source[:, :0], reduce, include_self=own)
for reduce in ("sum", "mean", "prod", "amax", "amin"):
    for own in (True, False):
        case(aten.scatter_reduce.two, EDGES, 1, torch.tensor([[0, 1, 2, 3, 4, 4, 2, 1]] * 2), EDGES.flip(0), reduce, include_self=own)
        case(aten.scatter_reduce.two, INTS - 9, 1, torch.zeros_like(INTS), INTS, reduce, include_self=own)
        case(aten.scatter_reduce.two, torch.empty(0, 3), 0, torch.empty(0, 3, dtype=i64), torch.empty(0, 3), reduce, include_self=own)
for x, mask, source in (
    (EDGES, EDGES > 0, EDGES.flip(1)),
    (torch.ones(3), BOOLS, INTS.float()),
    (torch.ones(3), torch.zeros(3, dtype=torch.bool), torch.empty(0)),
    (torch.empty(0), torch.empty(0, dtype=torch.bool), torch.ones(2)),
    (torch.tensor(1.0), torch.tensor(True), torch.tensor(2.0)),
    (INTS, INTS == 9, INTS),
):
    case(aten.masked_scatter.default, x, mask, source)
case(aten.put.default, EDGES, torch.tensor([-1, 0]), torch.tensor([NAN, INF]))
case(aten.put.default, INTS, torch.tensor([-1, 0, 0]), torch.tensor([1, 2, 3]), True)
case(aten.put.default, INTS, torch.empty(0, dtype=i64), torch.empty(0, dtype=i64))
case(aten.put.default, torch.tensor(1.0), torch.tensor(0), torch.tensor(5.0))

# --- bags of embeddings ---
TABLE = torch.tensor([[1.0, -1.0], [2.0, -2.0], [3.0, -3.0], [4.0, INF], [5.0, -5.0]])
for mode in (0, 1, 2):
    for last in (False, True):
        # With include_last_offset, the last offset must be 5, the number of indices. Otherwise, torch's sums on CPU and CUDA differ.
        for offsets in ([0, 2, 5], [0, 0, 5], [0, 5, 5], [0, 5]) if last else ([0, 2, 4], [0, 2, 2], [0, 0, 5], [0], [0, 3]):
            for padding in (-1, 2):
                case(aten._embedding_bag.default, TABLE, torch.arange(5), torch.tensor(offsets), False, mode, False, None, last, padding)
        if mode != 2:
            case(aten._embedding_bag.default, TABLE, torch.empty(0, dtype=i64), torch.tensor([0, 0]), False, mode, False, None, last)
    case(aten._embedding_bag_forward_only.default, TABLE, torch.tensor([0, 0, 3]), torch.tensor([0, 1]), False, mode)
case(aten._embedding_bag.default, TABLE, torch.arange(5), torch.tensor([0, 2, 5]), False, 0, False, torch.arange(5.0), True)

# --- sums and distances ---
for dtype in (f32, f64, i64):
    x, a, b = (torch.arange(n * m * k).reshape(n, m, k).to(dtype) for n, m, k in ((1, 2, 3), (4, 2, 5), (4, 5, 3)))
    case(aten.addbmm.default, x[0], a, b)
    case(aten.addbmm.default, x[0, 0], a, b, beta=2, alpha=3)
    case(aten.addbmm.default, x[0], a[:0], b[:0], beta=2)
    case(aten.addbmm.default, x[0], a[:, :, :0], b[:, :0])
for op, a, b in (
    (aten.addbmm.default, torch.ones(4, 2, 5), torch.ones(4, 5, 3)),
    (aten.addmv.default, torch.ones(2, 3), torch.ones(3)),
):
    x = torch.full((2, 3) if op == aten.addbmm.default else (2,), NAN)
    case(op, x, a, b, beta=0)
    case(op, x, a, b, beta=0, alpha=2)
for p in (0.0, 0.5, 1.0, 2.0, 3.0, INF):
    for a, b in (
        (torch.tensor([[1.0, 2.0], [0.0, -3.0]]), torch.tensor([[1.0, 2.0], [1e3, 0.5], [-1.0, 1.0]])),
        (torch.tensor([[NAN if 0 < p < INF else 4.0, 2.0], [INF, -3.0]]), torch.tensor([[1.0, 2.0], [1e3, 0.5]])),
        (torch.ones(2, 0), torch.ones(3, 0)),
        (torch.ones(0, 2), torch.ones(3, 2)),
        (torch.ones(2, 2, 3), torch.ones(2, 0, 3)),
    ):
        case(aten._cdist_forward.default, a, b, p, None)
        case(aten._cdist_forward.default, a.double(), b.double(), p, None)
        if a.ndim == 2:
            case(aten._pdist_forward.default, a, p)
            case(aten._pdist_forward.default, b, p)
    case(aten.dist.default, EDGES, CALM, p)
    case(aten.dist.default, CALM, CALM[:, :1], p)
    case(aten.dist.default, torch.tensor(1.0), torch.tensor(-2.0), p)
    if p != INF:  # torch has no largest element of an empty tensor.
        case(aten.dist.default, torch.empty(0), torch.empty(0), p)
for x in (*ALL, BOOLS):
    case(aten.angle.default, x)
for x in (EDGES, EDGES.double(), EDGES.bfloat16(), EDGES.half(), *SHAPED, torch.tensor([1e-45, -1.1754944e-38, 3.4e38, 5e-324, 0.5, 1.0])):
    case(aten.frexp.Tensor, x)
case(aten.frexp.Tensor, torch.tensor([5e-324, -2.3e-308, 1.7e308, 0.1, 1e-310], dtype=f64))
case(aten.frexp.Tensor, torch.tensor([6e-8, 6e-5, 65504.0], dtype=torch.float16))
case(aten.frexp.Tensor, torch.tensor([9.2e-41, 1e-38, 3e38], dtype=bf16))

# --- views ---
for shape in ((5, 3), (3, 5), (3, 3), (0, 3), (3, 0), (1, 4)):
    x = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    for offset in (-9, -4, -3, -2, 0, 1, 3, 4, 5, 9):
        case(aten.diagonal.default, x, offset, -2, -1)
        case(aten.diagonal.default, x, offset, 1, 0)
        case(aten.diagonal_scatter.default, x, torch.diagonal(x, offset) * 0 - 1, offset)
for size, step in ((1, 1), (2, 3), (0, 1), (8, 1), (3, 9)):
    case(aten.unfold.default, EDGES, -1, size, step)
for size in (0, 1):
    case(aten.unfold.default, torch.tensor(2.0), 0, size, 1)
case(aten.unfold.default, torch.empty(0, 4), 1, 2, 1)

# --- losses ---
LOGITS = torch.tensor([[1.0, -INF, 2.0], [0.0, 0.0, 0.0], [NAN, 1.0, 2.0], [INF, 0.0, 1.0]])
for reduction in (0, 1, 2):
    for smoothing in (0.0, 0.3):
        for weight in (None, torch.tensor([1.0, 0.0, 2.0])):
            for target in ([0, 1, -100, 2], [0, -100, -100, -100], [-100] * 4, [1, 1, 1, 1]):
                case(aten.cross_entropy_loss.default, LOGITS.t()[None], torch.tensor([target]), weight, reduction, -100, smoothing)
                if smoothing or weight is not None:  # Otherwise, the op is kept.
                    case(aten.cross_entropy_loss.default, LOGITS, torch.tensor(target), weight, reduction, -100, smoothing)
            case(aten.cross_entropy_loss.default, LOGITS[:2], torch.ones(2, 3) / 3, weight, reduction, -100, smoothing)
            case(aten.cross_entropy_loss.default, LOGITS[1], torch.tensor(-100), weight, reduction, -100, smoothing)
            case(aten.cross_entropy_loss.default, torch.empty(0, 3), torch.empty(0, 3), weight, reduction, -100, smoothing)
            case(aten.cross_entropy_loss.default, torch.empty(0, 3, 2), torch.empty(0, 2, dtype=i64), weight, reduction, -100, smoothing)

# --- pooling ---
IMAGE = torch.tensor([[NAN, 1.0, INF, -INF, -INF, 2.0, 2.0], [0.0, -0.0, 3.0, -INF, -INF, 5.0, 5.0], [7.0] * 7, [-1.0] * 7, [1.0] * 7])[
    None, None
]
for x in (IMAGE, IMAGE.double(), torch.full_like(IMAGE, -INF), IMAGE[:0]):
    for kernel, stride, padding, ceil in ((2, 2, 0, False), (3, 2, 1, True), (2, 1, 1, False), (2, 3, 1, True)):
        case(aten.max_pool2d_with_indices.default, x, [kernel], [stride], [padding], [1], ceil)
        for include in (False, True):
            case(aten.avg_pool2d.default, x, [kernel], [stride], [padding], ceil, include)
        case(aten.max_pool2d_with_indices.default, x, [2], [1], [1], [2], ceil)
    for out in ([3, 4], [5, 7], [1, 1], [7, 9], [2, 3]):
        case(aten._adaptive_avg_pool2d.default, x, out)
        case(aten.adaptive_max_pool2d.default, x, out)
    case(aten._adaptive_avg_pool3d.default, x.unsqueeze(0) if x.numel() else x.unsqueeze(1), [1, 2, 3])
case(aten.max_pool2d_with_indices.default, torch.full((1, 3, 3), -(2**63)), [2], [2], [1])
case(aten.avg_pool2d.default, torch.tensor([[[-7, 3], [2, 1]]]), [2], [1], [1])
case(aten.avg_pool2d.default, torch.tensor([[[-7, 3], [2, 1]]]), [2], [1], [1], False, False)
case(aten.avg_pool1d.default, EDGES, [3], [2], [1], True, False)

# --- special functions ---
POINTS = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 1e-40, 0.5, 2.0, 30.0, 1e30, -1e30, -2.5])
for op in [op for op in SPECIAL if len(op._schema.arguments) == 1]:
    for x in (POINTS, INTS[0], *SHAPED, BOOLS):
        case(op, x)
    if op in DERIVED and op not in (aten.special_ndtri.default, aten.special_erfcx.default):
        case(op, POINTS.bfloat16())
for order in range(4):
    case(aten.polygamma.default, order, POINTS[[0, 3, 5, 7, 8, 9, 10]])  # The rule differs from torch at negative poles and infinities.
# torch gives NaN for infinities at degrees above 2, and may give uninitialised values for NaN.
for op in [op for op in COMPOSED if "chebyshev" in str(op)]:
    for n in (-2, -1, 0, 1, 2, 3, 5, 7):
        x = POINTS if n < 1 else POINTS[1:] if n < 3 else POINTS[3:11]
        case(op, x, torch.tensor(float(n)) if op._overloadname == "default" else n)

# --- factorisations ---
for a in (torch.tensor([[4.0, NAN], [1.0, 3.0]]), torch.tensor([[1.0, 2.0], [2.0, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 3.0]])):
    case(aten._linalg_det.default, a)
    case(aten._linalg_slogdet.default, a)
    case(aten.linalg_lu_factor_ex.default, a)
    case(aten.linalg_inv_ex.default, a)
for a in (torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [2.0, 4.0]])):
    case(aten._linalg_det.default, a)
    case(aten._linalg_slogdet.default, a)
case(aten.linalg_cholesky_ex.default, torch.tensor([[4.0, NAN], [1.0, 3.0]]))
case(aten.linalg_solve_triangular.default, torch.tensor([[1.0, NAN], [2.0, 3.0]]), torch.tensor([[1.0], [2.0]]), upper=False)

# Number of compared results per op. Later results differ on CPU and CUDA, such as the index of a median, or serve only torch's derivative.
COMPARED = {
    aten.kthvalue.default: 1,
    aten.median.dim: 1,
    aten.nanmedian.dim: 1,
    aten._embedding_bag.default: 1,
    aten._embedding_bag_forward_only.default: 1,
    aten._linalg_det.default: 1,
    aten._linalg_slogdet.default: 2,
}


@pytest.mark.extra
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("op", dict.fromkeys(op for op, _, _ in CASES), ids=str)
def test_edges(op: Any) -> None:
    for args, kwargs in [(args, kwargs) for one, args, kwargs in CASES if one == op]:
        made, want = ((each,) if isinstance(each, torch.Tensor) else each for each in (f(*args, **kwargs) for f in (COMPOSED[op], op)))
        count = COMPARED.get(op, len(want))
        for a, b in zip(made[:count], want[:count], strict=True):
            tolerances = {"rtol": 1e-4, "atol": 1e-6} if b.dtype == f32 else {}
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda text: f"{op}{args}{kwargs}: {text}", **tolerances)  # noqa: B023
