"""`argsort`, `sort`, `top_k` and `group_order` on a GPU, compared with NumPy. Rows have ties, NaNs and zeros, several dtypes, and lengths
from 1 to 1,000,003."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.fusion_ir.frontend.recording import record
from hostweave.fusion_ir.ops import OPS

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

DTYPES = ("f32", "bf16", "f16", "f64", "i32", "i64", "u8", "i8")
TORCH_DTYPES = dict(zip(DTYPES, ("float32", "bfloat16", "float16", "float64", "int32", "int64", "uint8", "int8"), strict=True))
SHAPES = ((3, 1), (5, 7), (300, 33), (2, 2048), (2, 2049), (3, 5000), (2, 40_000))
KINDS = ("random", "ties", "nan", "same", "positive")  # In positive integers, most digits of all keys are equal.
LARGE = 40_000  # elements of a row that takes long to sort completely

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def rows(dtype: str, shape: tuple[int, int], kind: str) -> Any:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * (0 if kind == "same" else 2)
    some = rng.random(shape) < 0.1
    if not dtype.startswith(("f", "b")):
        x = abs(x) if dtype == "u8" or kind == "positive" else x
        return torch.from_numpy(x * (2 if kind == "ties" else 40)).to(getattr(torch, TORCH_DTYPES[dtype]))
    x = np.where(some, -0.0, np.round(x)) if kind == "ties" else np.where(some, np.nan, x) if kind == "nan" else x
    return torch.from_numpy(x).to(getattr(torch, TORCH_DTYPES[dtype]))


def order(x: Any, descending: bool) -> Any:
    array = x.double().numpy() if x.dtype.is_floating_point else x.numpy()
    if not descending:
        return np.argsort(array, 1, kind="stable")
    return array.shape[1] - 1 - np.argsort(array[:, ::-1], 1, kind="stable")[:, ::-1]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
def test_long_rows_by_all_blocks(dtype: str) -> None:
    @hw.fusion(mesh=hw.Mesh(x=1), x=getattr(hw, dtype)["B", "N"])
    def ordered(x: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return hw.argsort(x), hw.sort(x, descending=True), hw.top_k(x, 2500)[1]

    program = hw.compile(ordered, target="cuda")
    for shape in ((1, 65_535), (1, 65_536), (2, 140_001), (3, 140_001), (40, 5000), (1, 1_000_003)):
        for kind in KINDS:
            x = rows(dtype, shape, kind)
            up, down = order(x, False), order(x, True)
            for _ in range(3):  # A launch must reset its counters for the next launch.
                first, values, some = (got.cpu() for got in program.run(x.cuda()))
            np.testing.assert_array_equal(first.numpy(), up, err_msg=f"{shape} {kind}")
            np.testing.assert_array_equal(some.numpy(), down[:, :2500], err_msg=f"{shape} {kind}")
            torch.testing.assert_close(values, torch.take_along_dim(x, torch.from_numpy(down), 1), rtol=0, atol=0, equal_nan=True)
    program.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_order(dtype: str) -> None:
    for k in (0, 1, 5, 50, 3000):

        @hw.fusion(mesh=hw.Mesh(x=1), x=getattr(hw, dtype)["B", "N"])
        def ordered(x: hw.Tensor) -> tuple[hw.Tensor, ...]:
            columns = hw.permute_dims(x, (1, 0))
            if k == 0:  # noqa: B023
                return hw.argsort(x), hw.argsort(x, descending=True), hw.argsort(columns, 0, descending=True)
            return hw.top_k(x, k, largest=False)[1], hw.top_k(x, k)[1], hw.top_k(columns, k, 0)[1]  # noqa: B023

        program = hw.compile(ordered, target="cuda")
        shapes = [shape for shape in SHAPES if k <= shape[1] and (shape[1] < LARGE or 0 < k < 3000 or dtype == "f32")]
        for shape in shapes:
            for kind in KINDS:
                x = rows(dtype, shape, kind)
                first, largest, columns = (got.cpu().numpy() for got in program.run(x.cuda()))
                for got, descending in ((first, False), (largest, True), (columns.T, True)):
                    np.testing.assert_array_equal(got, order(x, descending)[:, : k or None], err_msg=f"{k} {shape} {kind}")
        program.close()


@pytest.mark.parametrize("groups", [1, 32, 300, 10_000])
def test_group_order(groups: int) -> None:
    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.i32["B", "N"])
    def ordered(x: hw.Tensor) -> tuple[hw.Tensor, ...]:
        columns = hw.permute_dims(x, (1, 0))
        return record("group_order", x, axis=1, groups=groups), record("group_order", columns, axis=0, groups=groups)

    program = hw.compile(ordered, target="cuda")
    for shape in ((1, 1), (3, 7), (2, 1025), (1, 2048), (1, 65_537)):
        for most in (1, groups + 1):  # All elements are in group 0, or each is in a random group or in none.
            x = torch.from_numpy(np.random.default_rng(0).integers(0, most, shape).astype(np.int32))
            wanted = OPS["group_order"].numpy(np, x.numpy(), axis=1, groups=groups)
            rows, columns = (got.cpu().numpy() for got in program.run(x.cuda()))
            np.testing.assert_array_equal(rows, wanted, err_msg=f"{shape} {most}")
            np.testing.assert_array_equal(columns.T, wanted, err_msg=f"{shape} {most} by columns")
    program.close()
