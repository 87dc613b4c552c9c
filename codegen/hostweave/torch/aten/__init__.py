"""ATen ops as functions on tensors of a fusion. `TABLE` has one entry per op."""

from hostweave.torch.aten import convolutions, gradients, pointwise, products, reductions, shapes  # noqa: F401
from hostweave.torch.aten.table import DTYPES, TABLE, Result, cast, computed, dtype_of, full, resharded

__all__ = ["DTYPES", "TABLE", "Result", "cast", "computed", "dtype_of", "full", "resharded"]
