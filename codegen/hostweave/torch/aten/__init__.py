"""ATen ops as functions on tensors of a fusion. `TABLE` has one entry per op."""

from hostweave.torch.aten import convolutions, gradients, pointwise, products, reductions, shapes  # noqa: F401
from hostweave.torch.aten.table import DTYPES as DTYPES
from hostweave.torch.aten.table import TABLE as TABLE
from hostweave.torch.aten.table import Result as Result
from hostweave.torch.aten.table import cast as cast
from hostweave.torch.aten.table import computed as computed
from hostweave.torch.aten.table import dtype_of as dtype_of
from hostweave.torch.aten.table import full as full
from hostweave.torch.aten.table import resharded as resharded
