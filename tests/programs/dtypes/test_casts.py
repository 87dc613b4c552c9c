"""Casts, and bools with any nonzero byte, compared with torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.fusion_ir.reference import run_reference
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

pytestmark = pytest.mark.usefixtures("optimised_kernels")

FLOATS = {
    hw.f64: torch.float64,
    hw.f32: torch.float32,
    hw.f16: torch.float16,
    hw.bf16: torch.bfloat16,
    hw.f8e4m3: torch.float8_e4m3fn,
    hw.f8e5m2: torch.float8_e5m2,
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def limits(dtype: torch.dtype) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Critical values of a dtype: the largest number, larger numbers, ties, numbers near ties, very small numbers, and 0."""
    info = torch.finfo(dtype)
    largest, step = info.max, info.max * info.eps / 2
    near = [largest + step * part for part in (0, 0.25, 0.5, 0.75, 0.99, 1, 1.01, 2)]
    ties = [(1 + info.eps * (k + 0.5)) * (1 + sign * 2.0**-power) for k in range(4) for sign in (-1, 0, 1) for power in (20, 40)]
    return np.array([*near, *ties, info.smallest_normal * info.eps / 2, info.tiny / 3, 0.0])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_floats_are_cast_as_torch_does(dtype: DType, target: str) -> None:
    """A cast from f64 to 16 or 8 bits rounds to f32 first, which may turn a number near a tie into a tie. f8e4m3 has no infinities."""
    values = np.concatenate([limits(torch_dtype) for torch_dtype in FLOATS.values()] + [[np.inf, np.nan, 1e300]])
    values = np.concatenate([values, -values])

    @hw.fusion(x=dtype["N"])
    def casts(x):
        return tuple(hw.astype(hw.astype(x, to), hw.f64) for to in FLOATS if to != dtype)

    given = torch.from_numpy(values).to(FLOATS[dtype])
    program = hw.compile(casts, target)
    results = program.run(x=given.view(torch.uint8).numpy().view(numpy_dtype(dtype)))
    program.close()
    references = run_reference(casts, {"x": given.double().numpy()})
    others = [to for to in FLOATS if to != dtype]
    for to, result, reference in zip(others, results, references, strict=True):
        want = given.to(FLOATS[to]).double().numpy()
        if to == hw.f8e4m3:  # On overflow, torch 2.11 gives NaN. torch 2.13 saturates, as Hostweave does.
            too_large = np.isnan(want) & ~np.isnan(given.double().numpy())
            want = np.where(too_large, np.copysign(448.0, given.double().numpy()), want)
        np.testing.assert_array_equal(result, want, err_msg=f"{dtype} to {to}")
        np.testing.assert_array_equal(np.signbit(result[result == 0]), np.signbit(want[want == 0]), err_msg=f"{dtype} to {to}")
        np.testing.assert_array_equal(reference, want, err_msg=f"NumPy, {dtype} to {to}")


@pytest.mark.parametrize("count", [67, 256])
def test_any_byte_but_0_is_true(count: int, target: str) -> None:
    @hw.fusion(b=hw.bool_["N"], c=hw.bool_["N"], x=hw.i32["N"])
    def logic(b, c, x):
        rows = hw.reshape(b, 1, "N")
        return (
            *(hw.astype(b, dtype) for dtype in (hw.u8, hw.i32, hw.f32, hw.bf16)),
            *(~b, b & c, b | c, b == c, b != c, b < c, hw.where(b, x, -1), b == (x != 0)),
            *(hw.max(b), hw.min(b), hw.sum(hw.astype(rows, hw.i32), 1)),
        )

    random = np.random.default_rng(0)
    b, c = (torch.from_numpy(random.choice(np.array([0, 1, 2, 128, 255], np.uint8), count)).view(torch.bool) for _ in "bc")
    x = torch.arange(count, dtype=torch.int32)
    program = hw.compile(logic, target)
    results = program.run(b=b, c=c, x=x)
    program.close()
    b, c = b.view(torch.uint8) != 0, c.view(torch.uint8) != 0
    wanted = (
        *(b.to(dtype) for dtype in (torch.uint8, torch.int32, torch.float32, torch.bfloat16)),
        *(~b, b & c, b | c, b == c, b != c, b < c, torch.where(b, x, -1), b == (x != 0)),
        *(b.max(), b.min(), b.sum(dtype=torch.int32).reshape(1)),
    )
    for number, (result, want) in enumerate(zip(results, wanted, strict=True)):
        if want.dtype == torch.bool:
            result, want = result.view(torch.uint8), want.view(torch.uint8)  # The bytes of results must be 0 or 1.
        assert torch.equal(result.cpu(), want), f"result {number}"
