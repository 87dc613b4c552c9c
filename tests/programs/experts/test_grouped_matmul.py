"""Grouped matmuls and their gradients with several routings, layouts and shardings, compared with NumPy. Also hw.bincount, hw.nonzero and
hw.repeat_interleave."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_here import needs_cuda
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ExecutionError, ProgramError
from hostweave.base.paths import RUNTIME
from hostweave.build import nvrtc
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded
from hostweave.targets.target import find_target
from hostweave.types.tensor import block_of

Array = np.ndarray[Any, Any]
T, E, K, N = 24, 5, 12, 8
ROUTINGS = {
    "even": [5, 10, 14, 19, 24],
    "skewed": [1, 21, 22, 23, 24],
    "empty groups": [0, 0, 24, 24, 24],
    "rows without a group": [4, 4, 9, 9, 13],
    "all to the last": [0, 0, 0, 0, 24],
    "no rows": [0, 0, 0, 0, 0],
    "beyond the end": [10, 20, 24, 30, 99],
}
SHARDINGS = {  # sharded dims of x, of w and its gradient, and of y and its gradient
    "replicated": ((), (), ()),
    "rows": (("T",), (), ("T",)),
    "experts": ((), ("E",), ()),
    "depth": (("K",), ("K",), ()),
    "columns": ((), ("N",), ("N",)),
    "columns of experts": (("T",), ("N",), ()),
}


def dims(names: str, sharded: tuple[str, ...], axis: str = "x") -> list[str]:
    return [f"{name}@{axis}" if name in sharded else name for name in names]


def whole(x: Array, w: Array, y: Array, ends: Array) -> tuple[Array, Array, Array]:
    """Reference on one rank: the product x @ w by groups, and the gradients of x and w for the gradient y of the product."""
    made, of_x, of_w = (np.zeros(shape) for shape in ((len(x), w.shape[2]), x.shape, w.shape))
    for e, (start, end) in enumerate(pairwise([0, *np.minimum(ends, len(x))])):
        made[start:end] = x[start:end] @ w[e]
        of_x[start:end] = y[start:end] @ w[e].T
        of_w[e] = x[start:end].T @ y[start:end]
    return made, of_x, of_w


def program(sharding: str, ranks: int, dtype: hw.DType = hw.f64) -> Fusion:
    of_x, of_w, of_y = SHARDINGS[sharding]

    @hw.fusion(
        mesh=hw.Mesh(x=ranks), x=dtype[*dims("TK", of_x)], w=dtype[*dims("EKN", of_w)], dy=dtype[*dims("TN", of_y)], ends=hw.i32["E"]
    )
    def grouped(x: hw.Tensor, w: hw.Tensor, dy: hw.Tensor, ends: hw.Tensor) -> tuple[hw.Tensor, ...]:
        y = hw.grouped_matmul(x, w, ends)
        dx = hw.grouped_matmul(dy, hw.permute_dims(w, (0, 2, 1)), ends)
        return hw.reshard(y, *dims("TN", of_y)), dx, hw.reshard(hw.grouped_matmul(x.T, dy, ends), *dims("EKN", of_w))

    return grouped


def arrays(ends: list[int], t: int = T, k: int = K, n: int = N) -> dict[str, Array]:
    random = np.random.default_rng(t + k + n)
    made = {name: random.standard_normal(shape) for name, shape in (("x", (t, k)), ("w", (len(ends), k, n)), ("dy", (t, n)))}
    return made | {"ends": np.array(ends, np.int32)}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_routing_and_sharding(sharding: str, ranks: int) -> None:
    fusion = program(sharding, ranks)
    host = lower(fusion, Options())
    check(host, fusion=fusion)
    for ends in ROUTINGS.values():
        given = arrays(ends)
        wanted = whole(*(given[name] for name in ("x", "w", "dy", "ends")))
        for rank, results in enumerate(interpret(host, given)):
            for output, want in zip(host.outputs, wanted, strict=True):
                block = want[block_of(output.type, host.mesh, rank, want.shape)]
                np.testing.assert_allclose(results[output.name], block, atol=1e-12)


@pytest.mark.parametrize("dtype", [hw.f64, hw.f32, hw.bf16], ids=str)
def test_compiled(dtype: hw.DType) -> None:
    compiled = hw.compile(program("rows", 2, dtype))
    numpy = {hw.f64: np.float64, hw.f32: np.float32, hw.bf16: ml_dtypes.bfloat16}[dtype]
    tolerance = {hw.f64: 1e-12, hw.f32: 1e-4, hw.bf16: 0.2}[dtype]
    for number, ends in enumerate([*ROUTINGS.values(), [2, 3, 9, 23, 23]]):
        given = arrays(ends, t=23 if number == 7 else T)
        rounded = {name: array.astype(numpy) if name != "ends" else array for name, array in given.items()}
        wanted = whole(*(rounded[name].astype(np.float64 if name != "ends" else np.int32) for name in ("x", "w", "dy", "ends")))
        for schedule in (parallel(check_dependencies=True), seeded(number)):
            with schedule:
                results = compiled.run(**rounded)
            for result, want in zip(results, wanted, strict=True):
                np.testing.assert_allclose(np.asarray(result, np.float64), want, atol=tolerance)


def test_sums_of_ranks_in_f32() -> None:
    """The partial sums of 16-bit operands are f32, and the operands are not cast."""
    host = lower(program("depth", 2, hw.bf16), Options(partial_dtype=hw.f32))
    text = str(host)
    assert "y_partial: f32" in text or "allocate f32[T, N]" in text
    assert "astype(%x" not in text
    assert "astype(%w" not in text


def test_ranks_reduce_tokens_and_not_choices() -> None:
    """The only all-reduce follows the sum over the choices of each token."""

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["T", "K"], w=hw.f32["E@x", "K", "N"], ends=hw.i32["E"], order=hw.i64["T"])
    def combined(x: hw.Tensor, w: hw.Tensor, ends: hw.Tensor, order: hw.Tensor) -> hw.Tensor:
        return hw.sum(hw.reshape(hw.take(hw.grouped_matmul(x, w, ends), order, axis=0), "T/2", 2, "N"), axis=1)

    host = lower(combined, Options())
    check(host, fusion=combined)
    assert [host.outputs[0].name] == [i.dst for i in tree.walk(host.body) if isinstance(i, ir.AllReduce)]


@pytest.mark.parametrize("ends", [[4, 2, 9, 9, 9], [-3, 3, 1, 5, 8], [3, 1, 1, 1, 1]])
def test_groups_that_overlap(ends: list[int]) -> None:
    with pytest.raises((IndexError, ExecutionError), match="groups overlap"):
        interpret(lower(program("replicated", 1), Options()), arrays(ends))


def test_operands_with_wrong_shapes_or_dtypes() -> None:
    def fails(message: str, **types: Any) -> None:
        usual = {"x": hw.f32["T", "K"], "w": hw.f32["E", "K", "N"], "ends": hw.i32["E"]}
        with pytest.raises(ProgramError, match=message):
            hw.fusion(**(usual | types))(lambda x, w, ends: hw.grouped_matmul(x, w, ends))

    fails("inner dims differ", w=hw.f32["E", "N", "K"])
    fails("offsets are i64", ends=hw.i64["E"])
    fails("is not one i32 for each group", ends=hw.i32["K"])
    fails("not defined for i32", x=hw.i32["T", "K"], w=hw.i32["E", "K", "N"])
    fails("are not", x=hw.f32["T", "K", 2])
    fails("differ in their number of rows", x=hw.f32["K", "T"], w=hw.f32["K", "N"])
    with pytest.raises(ProgramError, match="cut into groups"):
        hw.compile(hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["T@x", "K"], w=hw.f32["E", "K", "N"], ends=hw.i32["E"])(
            lambda x, w, ends: hw.grouped_matmul(x, w, ends).stream("T", chunks=2)
        ))  # fmt: skip


def build_log(name: str, folder: Path) -> str:
    """Output of NVRTC for a grouped matmul on Hopper, with the default options."""
    found = find_target("cuda").toolchain().kernel_compiler
    assert isinstance(found, nvrtc.Nvrtc)
    head, *kernels = (RUNTIME / "src" / "grouped.cu").read_text().split("\n\nHW_")
    (kernel,) = (text for text in kernels if text.startswith(f"BY_WARPGROUPS({name}_by_warpgroups, bf16"))
    text = "HW_" + re.split(r"\n\n", kernel)[0] + "\n}  // namespace hw\n"
    replace(found, arch="sm_90a").compile(nvrtc.Unit("grouped", 1, head, text), folder)
    return (folder / "build.log").read_text()


@needs_cuda
def test_products_of_warpgroups_are_asynchronous(tmp_path: Path) -> None:
    """CUDA's compiler serialises wgmma instructions, with a warning, if a branch around them may diverge within a warp.

    With the quick options of tests, the compiler always serialises these instructions. NVRTC 13.0 keeps these options for the whole
    process, so this test compiles in another process.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        for name in ("multiply_groups", "multiply_groups_transposed", "multiply_rows_of_groups"):
            log = process.submit(build_log, name, tmp_path).result()
            assert "nvrtc" in log
            assert "serialized" not in log, f"{name}: {log}"


# --- counts and results of stated sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_counts(ranks: int) -> None:
    fusion = hw.fusion(mesh=hw.Mesh(x=ranks), ids=hw.i64["T@x", 2])(lambda ids: hw.bincount(ids, 7))
    host = lower(fusion, Options())
    check(host, fusion=fusion)
    ids = np.random.default_rng(0).integers(-1, 9, (24, 2))
    wanted = np.bincount(ids[(ids >= 0) & (ids < 7)], minlength=7)
    for results in interpret(host, {"ids": ids}):
        np.testing.assert_array_equal(results[host.outputs[0].name], wanted)


@pytest.mark.parametrize("size", [3, 9, 40])
@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 3, 2)])
def test_nonzero(shape: tuple[int, ...], size: int) -> None:
    fusion = hw.fusion(x=hw.f32[shape])(lambda x: hw.nonzero(x, size=size, fill_value=-5))
    host = lower(fusion, Options())
    check(host, fusion=fusion)
    x = np.random.default_rng(1).integers(0, 2, shape).astype(np.float32)
    wanted = np.full((size, len(shape)), -5)
    found = np.argwhere(x)[:size]
    wanted[: len(found)] = found
    np.testing.assert_array_equal(interpret(host, {"x": x})[0][host.outputs[0].name], wanted)


def test_repeat_interleave() -> None:
    x, counts = np.arange(12.0).reshape(4, 3), np.array([2, 0, 3, 1])
    fusion = hw.fusion(x=hw.f64[4, 3], counts=hw.i64[4])(lambda x, counts: hw.repeat_interleave(x, counts, total=6))
    host = lower(fusion, Options())
    check(host, fusion=fusion)
    np.testing.assert_array_equal(interpret(host, {"x": x, "counts": counts})[0][host.outputs[0].name], np.repeat(x, counts, 0))
    by_number = lower(hw.fusion(x=hw.f64["M", "N"])(lambda x: hw.repeat_interleave(x, 3, axis=1)), Options())
    np.testing.assert_array_equal(interpret(by_number, {"x": x})[0][by_number.outputs[0].name], np.repeat(x, 3, 1))
    with pytest.raises(ProgramError, match="pass its upper bound as total="):
        hw.fusion(x=hw.f64[4, 3], counts=hw.i64[4])(lambda x, counts: hw.repeat_interleave(x, counts))
