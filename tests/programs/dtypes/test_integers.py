"""Integers have NumPy's semantics: large values stay exact, and sums and products wrap around."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType

LARGE = [(hw.i64, 2**53 + 1), (hw.i64, 2**63 - 1), (hw.i64, -(2**63)), (hw.u64, 2**64 - 1), (hw.u32, 2**32 - 1), (hw.i8, -128)]


@pytest.mark.parametrize(("dtype", "value"), LARGE, ids=str)
def test_pad_keeps_every_integer(dtype: DType, value: int) -> None:
    fusion = hw.fusion(x=dtype["M"])(lambda x: hw.pad(x, (1, 0), value=value))
    assert Fusion.parse(str(fusion)) == fusion
    program = hw.compile(fusion)
    assert str(hw.HostProgram.parse(program.host_ir)) == program.host_ir
    x = np.array([1], numpy_dtype(dtype))
    np.testing.assert_array_equal(program.run(x), np.array([value, 1], x.dtype))


def test_a_slice_cannot_begin_beyond_64_bits() -> None:
    with pytest.raises(hw.errors.ProgramError, match=r"dim 0 cannot start at 9223372036854775808; pass an int"):
        hw.fusion(x=hw.f32[4])(lambda x: hw.dynamic_slice(x, (2**63,), (2,)))


WRAPPING: tuple[Callable[[Any], Any], ...] = (
    lambda x: x + 1 > x,
    lambda x: x * 2 // 2 == x,
    lambda x: abs(x) >= 0,
    lambda x: (x + x) // 2 * x,
)


TARGETS = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not gpus(), reason="needs a GPU")])]
INTS = (hw.i8, hw.i16, hw.i32, hw.i64, hw.u8, hw.u16, hw.u32, hw.u64)


@pytest.mark.usefixtures("optimised_kernels")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [hw.i8, hw.i32, hw.i64], ids=str)
def test_integers_wrap_around(target: str, dtype: DType) -> None:
    """Integers within one kernel also wrap around, although signed overflow is undefined in C++."""
    kind = np.iinfo(numpy_dtype(dtype))
    x = np.array([kind.max, kind.min, 5, -1, kind.max // 2 + 1], kind.dtype)
    fusion = hw.fusion(x=dtype["M"])(lambda x: (*(make(x) for make in WRAPPING), hw.sum(x * 3), hw.prod(x)))
    with np.errstate(over="ignore"):
        wanted = [*(make(x) for make in WRAPPING), np.sum(x * x.dtype.type(3), dtype=x.dtype), np.prod(x, dtype=x.dtype)]
    for number, (result, want) in enumerate(zip(hw.compile(fusion, target=target).run(x), wanted, strict=True)):
        np.testing.assert_array_equal(result, want, err_msg=str(number))


@pytest.mark.usefixtures("optimised_kernels")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_reductions_wrap_around(target: str, dtype: DType) -> None:
    """Sums and products over rows, over columns and over all dims, cumulative sums, and sums at indices."""
    kind = np.iinfo(numpy_dtype(dtype))
    x = np.random.default_rng(0).integers(kind.min, kind.max, (70, 300), kind.dtype, endpoint=True)
    index = np.arange(70) % 3

    @hw.fusion(x=dtype["M", "N"], i=hw.i64["M"])
    def program(x: hw.Tensor, i: hw.Tensor) -> tuple[hw.Tensor, ...]:
        reduced = (reduce(x, axis) for reduce in (hw.sum, hw.prod) for axis in (0, 1, (0, 1)))
        return *reduced, hw.cumsum(x, 0), hw.cumsum(x, 1), hw.scatter_add(x[:3], 0, hw.reshape(i, "M", 1), x), hw.sum(x, 1) // 2

    wanted = [reduce(x, axis, x.dtype) for reduce in (np.sum, np.prod) for axis in (0, 1, (0, 1))]
    wanted += [np.cumsum(x, 0, x.dtype), np.cumsum(x, 1, x.dtype)]
    wanted += [x[:3] + np.array([x[index == row].sum(0, x.dtype) for row in range(3)]), x.sum(1, x.dtype) // 2]
    for number, (result, want) in enumerate(zip(hw.compile(program, target).run(x=x, i=index), wanted, strict=True)):
        np.testing.assert_array_equal(result, want, err_msg=str(number))


NUMBERS = [0.0, 0.9, 1.9, 255.7, 256.0, 2.0**31, 2.0**31 + 2**8, 2.0**32 + 2**10, 2.0**53, 2.0**62, 2.0**63, 2.0**63 + 2**40, 2.0**64, 1e38]


@pytest.mark.usefixtures("optimised_kernels")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [hw.f64, hw.f32, hw.f16, hw.bf16, hw.f8e5m2], ids=str)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_floats_become_ints_by_i64(target: str, dtype: DType) -> None:
    def truncated(number: float) -> int:
        whole = int(number) if np.isfinite(number) else 2**64
        return whole if -(2**63) <= whole < 2**64 else -(2**63)

    x = np.array([*NUMBERS, *(-number for number in NUMBERS), np.inf, -np.inf, np.nan]).astype(numpy_dtype(dtype))
    fusion = hw.fusion(x=dtype["N"])(lambda x: tuple(hw.astype(x, to) for to in INTS))
    wanted = [np.array([truncated(float(one)) % 2**64 for one in x], np.uint64).astype(numpy_dtype(to)) for to in INTS]
    computed = x.astype(np.float64)
    for to, result, reference, want in zip(
        INTS, hw.compile(fusion, target).run(x=x), run_reference(fusion, {"x": computed}), wanted, strict=True
    ):
        np.testing.assert_array_equal(result, want, err_msg=f"to {to}")
        np.testing.assert_array_equal(reference, want, err_msg=f"NumPy, to {to}")


def test_nothing_overflows_by_the_rules_of_cpp(tmp_path: Path) -> None:
    """The test compiles kernels so that signed overflow, or the cast of a float beyond the range of the integer, aborts the process. NVRTC
    has no option that defines signed overflow, so kernels must not overflow."""
    compiler = tmp_path / "c++"
    sanitized = "-fno-wrapv -fsanitize=signed-integer-overflow,float-cast-overflow -fsanitize-undefined-trap-on-error"
    ordinary = shlex.quote(os.environ["CXX"])
    compiler.write_text(f'#!/bin/sh\ncase " $* " in *" kernels.cu "*) exec c++ "$@" {sanitized};; *) exec {ordinary} "$@";; esac\n')
    compiler.chmod(0o700)
    calls = "for to in (hw.i32, hw.i64): test_reductions_wrap_around('cpu', to), test_integers_wrap_around('cpu', to)\n"
    calls += "for of in (hw.f64, hw.f32): test_floats_become_ints_by_i64('cpu', of)"
    script = f"import warnings; warnings.simplefilter('ignore')\nimport hostweave as hw\nfrom test_integers import *\n{calls}"
    folders = os.pathsep.join((str(Path(__file__).parent), str(Path(__file__).parents[2])))
    environment = os.environ | {"CXX": str(compiler), "HOSTWEAVE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": folders}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(1, hw.i64), (2, hw.i8), (2, hw.u64), (3, hw.u8), (4, hw.i16), (4, hw.u32), (8, hw.i32)], ids=str
)
def test_products(ranks: int, dtype: DType) -> None:
    """Matmuls of large values wrap around, also in loops, over sharded dims, and with views as operands."""

    @hw.fusion(
        mesh=hw.Mesh(x=ranks),
        **{"x": dtype["M@x", "K"], "w": dtype["K", "N"], "k": dtype["N", "K@x"], "l": dtype["K@x", 3], "b": dtype["B", "M", "K"]},
        **{"rows": dtype[f"{2 * ranks}@x", 4], "columns": dtype[4, 5]},
    )
    def products(x, w, k, l, b, rows, columns):  # type: ignore[no-untyped-def]  # noqa: E741
        whole = hw.reshard(x, "M", "K")
        looped = (hw.reshard(rows, 2 * ranks, 4) @ columns).stream(0, chunks=2 * ranks, algorithm="p2p" if ranks > 1 else None)
        return (
            *(x @ w, k @ l, hw.reshard(k @ l, "N@x", 3), x.T @ hw.reshard(x, "M@x", "K"), b @ w, looped),
            *(hw.einsum("bmk,bnk->mnb", b, b), hw.einsum("bmk,kn->bnm", b, w), hw.einsum("bmk,mk->b", b, whole)),
        )

    random, kind = np.random.default_rng(ranks), np.iinfo(numpy_dtype(dtype))
    shapes = {value.name: [size.bind({"M": 5, "K": 6, "N": 7, "B": 2}) for size in value.type.shape] for value in products.inputs}
    arrays = {name: random.integers(kind.min, kind.max, shape, kind.dtype, endpoint=True) for name, shape in shapes.items()}
    for got, want in zip(hw.compile(products).run(**arrays), run_reference(products, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def test_bits_of_products() -> None:
    """The check of results computes matmuls of integers exactly, so that ops on the bits of the results agree."""

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.i64["M@x", "K"])
    def bits(x: hw.Tensor) -> tuple[hw.Tensor, ...]:
        product = x @ hw.reshard(x.T, "K", "M")
        return hw.reduce_xor(product, 1), hw.reduce_or(product, 1, keepdims=True), product & 6, product << 1

    x = np.random.default_rng(0).integers(-9, 9, (4, 3))
    for got, want in zip(hw.compile(bits).run(x), run_reference(bits, {"x": x}), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_ring_reduces_only_floats() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.i32[4, "4@x"], w=hw.i32["4@x", 4])
    def summed(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.reshard(x @ w, "4@x", 4).stream(0, chunks=2, algorithm="ring")

    with pytest.raises(
        hw.errors.ProgramError, match="can only reduce the result of a matmul of floats in the same loop; use algorithm='p2p'"
    ):
        hw.compile(summed)
