"""Schedules of kernels: vector widths, and rows in registers. Results must not depend on the schedule."""

from __future__ import annotations

import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hostweave as hw

pytestmark = pytest.mark.usefixtures("optimised_kernels")


def kernels(function: Any, **specs: Any) -> str:
    return hw.compile(hw.fusion(**specs)(function), target="cuda").sources["kernels.cu"]


def added(a, b):
    return a + b


def normed(x):
    return hw.rms_norm(x)


def column_sums(x):
    return hw.sum(x, 0)


@pytest.mark.parametrize(
    ("spec", "is_wide", "width"),
    [
        (hw.bf16["M", 4096], "elements % 8 == 0 && hw::aligned(a, b, y)", 8),
        (hw.f32["M", 4096], "elements % 4 == 0 && hw::aligned(a, b, y)", 4),
        (hw.bf16["M", "N"], "elements % 8 == 0 && hw::aligned(a, b, y)", 8),
        (hw.bf16[6, 8], "elements % 8 == 0 && hw::aligned(a, b, y)", 8),
        (hw.bf16[6, 10], "hw::aligned(a, b, y)", 4),
    ],
    ids=str,
)
def test_vector_width_is_that_of_the_widest_access(spec: Any, is_wide: str, width: int) -> None:
    text = kernels(added, a=spec, b=spec)
    assert f"  if ({is_wide}) {{\n    compute(hw::Width<{width}>());" in text
    assert "  } else {\n    compute(hw::Width<1>());" in text


def test_an_odd_number_of_elements_is_not_vectorised() -> None:
    text = kernels(added, a=hw.bf16[3, 5], b=hw.bf16[3, 5])
    assert "kWidth" not in text
    assert "y[i] = hw::bf16(float(a[i]) + float(b[i]));" in text


def test_a_broadcast_row_is_vectorised() -> None:
    text = kernels(added, a=hw.bf16["M", "N"], b=hw.bf16["N"])
    assert "const int64_t j = element % Index(N);" in text
    assert "const auto b_j = hw::load<kWidth>(b + j);" in text
    assert "if (N % 8 != 0 || !hw::aligned(a, b, y)) {" in text


@pytest.mark.parametrize(
    ("rows", "columns", "index", "ways"),
    [
        (
            "M",
            64,
            "Index",
            [
                "!hw::aligned(a, b, y): hw::Width<1>(), int64_t()",
                "hw::fits_int32(64 * M): hw::Width<4>(), uint32_t()",
                "hw::Width<4>(), int64_t()",
            ],
        ),
        ("M", 63, "Index", ["hw::fits_int32(63 * M): uint32_t()", "int64_t()"]),
        (8, 64, "uint32_t", ["hw::aligned(a, b, y): hw::Width<4>()", "hw::Width<1>()"]),
        (1 << 16, 1 << 15, "int64_t", ["hw::aligned(a, b, y): hw::Width<4>()", "hw::Width<1>()"]),
    ],
)
def test_divided_indices_have_32_bits_if_they_fit(rows: Any, columns: int, index: str, ways: list[str]) -> None:
    text = kernels(added, a=hw.f32[rows, columns], b=hw.f32[columns])
    assert f"for ({index} element : hw::over_grid" in text
    found = re.findall(r"(?:if \((.*)\) )?\{\n +compute\((.*)\);", text)
    assert [f"{condition}: {way}" if condition else way for condition, way in found] == ways


def test_a_broadcast_column_is_read_once() -> None:
    text = kernels(added, a=hw.f32["M", 64], b=hw.f32["M", 1])
    assert text.index("= b[i];") < text.index("for (int e = 0")
    assert "if (!hw::aligned(a, y)) {" in text


def test_strided_elements_are_read_one_by_one() -> None:
    text = kernels(lambda x: hw.permute_dims(x, (2, 1, 0)) * 2.0, x=hw.f32["M", 3, 64])
    assert "[j * 64 + (k + e) * 192 + i] * 2.0f;" in text
    assert "if (M % 4 != 0 || 3 * M % 4 != 0 || !hw::aligned(y)) {" in text


def test_a_transposed_result_is_written_by_tiles() -> None:
    text = kernels(lambda x: hw.permute_dims(x, (1, 0)) * 2.0, x=hw.f32["M", 64])
    assert "hw::transpose<kWidth>(M, 64, y, M, [&](int64_t j, int64_t i) {" in text
    assert "const auto x_transposed_ij = hw::load<kWidth>(x_transposed + j * 64 + i);" in text
    assert "if (hw::aligned(x_transposed)) {" in text


@pytest.mark.parametrize("columns", [8, "N"])
def test_narrow_or_mixed_transposes_have_no_tiles(columns: Any) -> None:
    text = kernels(lambda x, y: hw.permute_dims(x, (1, 0)) + y, x=hw.f32["M", columns], y=hw.f32[columns, "M"])
    assert "hw::transpose" not in text


@pytest.mark.parametrize(("length", "threads"), [(4096, 128), (5120, 160), (8192, 256)])
def test_a_row_of_known_length_is_in_registers(length: int, threads: int) -> None:
    text = kernels(normed, x=hw.bf16["M", length])
    for width in (8, 1):
        assert f"compute(hw::Row<{length}, {threads}, {width}>());" in text
    assert "const auto x_ij = row.load(x + i * " in text
    assert "hw::load<" not in text
    assert f"__launch_bounds__({threads}{', 4' if threads == 256 else ''})" in text


@pytest.mark.parametrize(("length", "condition"), [("N", "N % 8 != 0 || !hw::aligned(x, y)"), (4104, "!hw::aligned(x, y)")])
def test_a_row_of_uneven_length_is_in_registers_if_it_fits(length: Any, condition: str) -> None:
    text = kernels(normed, x=hw.bf16["M", length])
    ways = re.findall(r"(?:if \((.*)\) )?\{\n +compute\((hw::\w+<\d>)", text)
    assert ways == [(condition, "hw::LongRow<1>"), (f"hw::RowUpTo<8>::fits({length})", "hw::RowUpTo<8>"), ("", "hw::LongRow<8>")]
    assert "__launch_bounds__(hw::kRowThreads)" in text


def test_a_row_of_unknown_length_that_is_read_once_is_not_held() -> None:
    assert "for (int64_t j : hw::over_threads<kWidth>(N)) {" in kernels(lambda x: hw.sum(x, 1), x=hw.bf16["M", "N"])


@pytest.mark.parametrize(
    ("length", "dtype", "held"),
    [
        (4096, hw.bf16, ["x_ij", "weight_j", "bias_j"]),
        (8192, hw.bf16, ["x_ij", "weight_j"]),  # The bias is not prefetched, because the prefetched rows would exceed 16 KB.
        (8192, hw.f32, ["x_ij"]),
        (32768, hw.bf16, ["x_ij"]),
    ],
)
def test_operands_of_later_loops_are_loaded_with_the_row(length: int, dtype: Any, held: list[str]) -> None:
    text = kernels(hw.layer_norm, x=dtype["M", length], weight=dtype[length], bias=dtype[length])
    assert re.findall(r"auto (\w+) = row\.load\(", text) == held
    assert text.index(f"{held[-1]} = row.load(") < text.index("row.reduce(")


def test_held_values_leave_registers_for_several_blocks() -> None:
    @hw.fusion(x=hw.bf16["M", 4096], w=hw.bf16[4096])
    def quantized(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        return hw.quantize(hw.rms_norm(x, w), "row")

    sources = hw.compile(quantized, target="cuda").sources
    text = sources["kernels.cu"]
    assert text.index("row.of(M)") < text.index("x_ij = row.load(x") < text.index("w_j = row.load(w)") < text.index("row.reduce(")
    assert "hw::Grid{M, 128}" in sources["program.cpp"]  # There is one block per row: blocks start in the order of rows.
    assert "__launch_bounds__(128, 8)" in text


@pytest.mark.parametrize(
    ("length", "dtype", "threads"),
    [(32, hw.bf16, 4), (64, hw.bf16, 8), (96, hw.bf16, 4), (128, hw.bf16, 8), (768, hw.bf16, 32), (1024, hw.bf16, 32), (128, hw.f32, 8)],
)
def test_a_warp_has_several_short_rows(length: int, dtype: Any, threads: int) -> None:
    program = hw.compile(hw.fusion(x=dtype["M", length])(normed), target="cuda")
    assert f"compute(hw::Row<{length}, {threads}, " in program.sources["kernels.cu"]
    assert f"hw::grid_of_elements({threads} * M)" in program.sources["program.cpp"]


def test_operands_of_only_the_first_loop_are_not_in_registers() -> None:
    text = kernels(lambda x, r: x / hw.sum(x * r, 1, keepdims=True), x=hw.bf16["M", 4096], r=hw.bf16["M", 4096])
    assert re.findall(r"auto (\w+) = row\.load\(", text) == ["x_ij"]


def test_a_row_of_known_length_that_is_read_once_is_shared_evenly() -> None:
    text = kernels(lambda x: hw.sum(x, 1), x=hw.bf16["M", 4096])
    assert "compute(hw::Row<4096, 128, 8>());" in text
    assert "row.load(" not in text


@pytest.mark.parametrize(("columns", "threads", "bounds"), [("N", "512", "512"), (4096, "1024", "1024, 1"), (8192, "512", "512")])
def test_columns_are_reduced_by_tiles(columns: Any, threads: str, bounds: str) -> None:
    text = kernels(column_sums, x=hw.bf16["M", columns])
    assert f"for (const hw::Column j : hw::over_columns<kWidth>({columns})) {{" in text
    assert f"for (int64_t i : hw::over_rows<{threads}, kWidth>(M)) {{" in text
    assert f"__launch_bounds__({bounds})" in text
    assert "if (j.stores()) {" in text


def scaled_sums(x, scales):
    return hw.sum(x * hw.expand_dims(scales, 1), 0)


def squares_and_sums(x, scales):
    y = x * x
    return y, hw.sum(y * hw.expand_dims(scales, 1), 0)


@pytest.mark.parametrize("function", [scaled_sums, squares_and_sums])
def test_columns_are_reduced_by_tiles_with_other_operands(function: Any) -> None:
    """The kernel reads x along the rows of x, even if other operands are contiguous along the columns of x."""
    text = kernels(function, x=hw.bf16["M", 4096], scales=hw.bf16["M"])
    assert "hw::over_columns<kWidth>(4096)" in text
    assert "over_blocks" not in text


def test_partial_tiles_of_columns_are_stored_by_one_thread() -> None:
    assert "over_columns" not in kernels(squares_and_sums, x=hw.bf16["M", 4088], scales=hw.bf16["M"])


def test_sums_of_few_terms_are_vectorised() -> None:
    text = kernels(column_sums, x=hw.bf16[4, "N"])
    assert "for (int64_t j : hw::over_grid<kWidth>(N)) {\n      auto sum = hw::filled<kWidth, hw::Sum<float>>({});" in text
    assert "const auto x_ij = hw::load<kWidth>(x + i * N + j);" in text


def test_sums_of_gathered_rows_are_vectorised() -> None:
    """The kernel reads the index and the factor of a row once for all elements of a vector. The kernel reads the operand only at the
    gathered rows."""

    def combined(x, places, weights):
        rows = hw.take_along_axis(hw.expand_dims(x, 1), hw.expand_dims(places, 2), 0)
        return hw.sum(rows * hw.expand_dims(weights, 2), 1)

    text = kernels(combined, x=hw.f32["M", "N"], places=hw.i64["T", 3], weights=hw.f32["T", 3])
    vectors = text[text.index("hw::filled<kWidth") : text.index("hw::store(y")]
    rows, elements = vectors.split("#pragma unroll")[:2]
    assert (rows.count("[i * 3 + j]"), elements.count("[i * 3 + j]")) == (2, 0)
    assert rows.count("hw::load<kWidth>(x") == 1


def test_values_of_a_term_stay_in_the_loop_over_terms() -> None:
    """A value that is equal for all terms of a sum is read before the loop. A divisor per term is read once per iteration."""

    text = kernels(lambda x, a, b, c: hw.sum(x / b * (a / b) * c, 0), x=hw.f32[4, "N"], a=hw.f32[4, 1], b=hw.f32[4, 1], c=hw.f32[1, 1])
    before, inside = text.split("for (int64_t i = 0; i < 4; ++i) {")
    of_term, of_element = inside.split("#pragma unroll")[:2]
    assert [part.count("c[0]") for part in (before, of_term, of_element)] == [1, 0, 0]
    assert [part.count("b[i]") for part in (before, of_term, of_element)] == [0, 1, 0]


def test_sums_of_few_contiguous_terms_are_not_vectorised() -> None:
    assert "kWidth" not in kernels(lambda x: hw.sum(x, 1), x=hw.bf16["M", 4])


@pytest.mark.parametrize(("dtype", "prefix", "suffix"), [(hw.bf16, "hw::fast_", ""), (hw.f16, "hw::fast_", ""), (hw.f32, "", "f")])
def test_exp_and_erf_are_as_exact_as_the_elements_are(dtype: Any, prefix: str, suffix: str) -> None:
    silu = "hw::fast_sigmoid(" if prefix else "expf("
    calls = ((hw.silu, silu), (hw.exp, f"{prefix}exp{suffix}("), (hw.erf, f"{prefix}erf{suffix}("), (hw.gelu, f"{prefix or 'hw::'}gelu("))
    for op, call in calls:
        for function in (op, lambda x, op=op: (op(x), hw.astype(x, hw.f32))):  # The second function also has a result in f32.
            text = kernels(function, x=dtype["M", 8])
            assert call in text
            assert ("fast" in text) == bool(prefix)


def test_a_kernel_waits_for_the_stream_before_it_does_anything_else() -> None:
    program = hw.compile(hw.fusion(x=hw.bf16["M", "N"])(column_sums), target="cuda")
    heads = re.findall(r"__global__.*\{\n  HW_TOUCHES\(.*\);\n(.*)\n", program.sources["kernels.cu"])
    assert heads == ["  hw::griddep_wait();"]
    assert "hw::launch_pdl(" in program.sources["program.cpp"]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize(
    "length", [32, 96, 128, 1000, 1024, 5120, 20000, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 256, 8192))]
)
def test_rows(length: int, is_known: bool, target: str) -> None:
    """Norms, a softmax, maxima and quantisation of rows. The rows are in registers of a few threads of a warp, in registers of a block, or
    in memory."""
    bf16, dim = ml_dtypes.bfloat16, length if is_known else "N"

    @hw.fusion(x=hw.bf16["M", dim], r=hw.bf16["M", dim], weight=hw.bf16[dim], bias=hw.bf16[dim])
    def rows(x, r, weight, bias):
        h = x + r
        normed = h, hw.rms_norm(h, weight), hw.layer_norm(x, weight, bias), hw.softmax(x), hw.argmax(x, 1), hw.max(x, 1)
        return *normed, *hw.quantize(hw.silu(x) * r, "row")

    random = np.random.default_rng(1)
    given = {name: random.standard_normal(shape).astype(bf16) for name, shape in (("x", (5, length)), ("r", (5, length)))}
    given |= {name: random.standard_normal(length).astype(bf16) for name in ("weight", "bias")}
    program = hw.compile(rows, target)
    *results, quantized, scale = program.run(**given)
    program.close()
    x, r, weight, bias = (np.asarray(given[name], np.float64) for name in ("x", "r", "weight", "bias"))
    h = x + r
    powers = np.exp(x - x.max(1, keepdims=True))
    wanted = (
        h,
        h / np.sqrt((h * h).mean(1, keepdims=True) + 1e-6) * weight,
        (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * weight + bias,
        powers / powers.sum(1, keepdims=True),
        x.argmax(1),
        x.max(1),
    )
    for result, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(result, np.float64), want, rtol=2**-7, atol=1e-2 if want is not wanted[3] else 1e-6)
    gated = x / (1 + np.exp(-x)) * r
    largest = np.abs(gated).max(1, keepdims=True)
    np.testing.assert_allclose(scale, largest / 448, rtol=1e-3)
    np.testing.assert_allclose(np.asarray(quantized, np.float64) * scale, gated, rtol=2**-3.9, atol=2**-10 * largest.max() / 448)


def test_an_expensive_value_is_computed_once() -> None:
    text = kernels(lambda x, y: hw.quantize(hw.silu(x) * y, "row"), x=hw.bf16["M", 4096], y=hw.bf16["M", 4096])
    assert text.count("fast_sigmoid(") == 1
    assert "const auto multiply_x_row = row.hold([&](const hw::Chunk j) {" in text
    assert "row.load(" not in text


@pytest.mark.parametrize(("length", "threads", "blocks"), [(4096, 128, 8), (14336, 448, 2), (28672, 896, 1)])
def test_a_long_row_of_held_values_has_many_threads(length: int, threads: int, blocks: int) -> None:
    text = kernels(lambda x, y: hw.quantize(hw.silu(x) * y, "row"), x=hw.bf16["M", length], y=hw.bf16["M", length])
    assert f"__launch_bounds__({threads}, {blocks})" in text
    assert f"hw::Row<{length}, {threads}, 8>()" in text


def test_only_computed_scales_are_known_to_have_normal_reciprocals() -> None:
    of_own = kernels(lambda x: hw.quantize(x, "row"), x=hw.bf16["M", 4096])
    assert "const hw::Divisor<hw::kNormal> by_scale" in of_own
    of_given = kernels(lambda x, s: hw.astype(x, hw.f32) / hw.maximum(s, 1e-12), x=hw.bf16["M", 4096], s=hw.f32["M", 1])
    assert "hw::kNormal" not in of_given


def test_bf16_elements_of_a_vector_are_converted_in_pairs() -> None:
    text = kernels(lambda x: hw.silu(x) * x, x=hw.bf16["M", 64])
    assert "x_i.f32(e)" in text
    assert "float(x_i[e])" not in text


def test_vectors_of_8_bit_floats_are_rounded_by_their_store() -> None:
    text = kernels(lambda x: hw.astype(x * 2, hw.f8e4m3), x=hw.bf16["M", 64])
    assert "hw::Values<float, kWidth> y_i;" in text
    assert "hw::f8e4m3(" not in text


def test_a_rounded_value_is_computed_once() -> None:
    text = kernels(lambda x, w: hw.quantize(hw.rms_norm(x, w), "row"), x=hw.bf16["M", 4096], w=hw.bf16[4096])
    assert "const auto rms_norm_x_row = row.hold([&](const hw::Chunk j) {" in text
    assert text.count("hw::rounded<hw::bf16>(") == 1


def test_a_cheap_value_is_computed_again() -> None:
    text = kernels(hw.layer_norm, x=hw.bf16["M", 4096], weight=hw.bf16[4096], bias=hw.bf16[4096])
    assert "row.hold(" not in text


TINY, LARGEST = 2.0**-149, float(np.finfo(np.float32).max)
ORDINARY = (1, 3, -7.7, 2.0**-100, 2.0**126, LARGEST)
DIVISORS = np.array([*ORDINARY, -(2.0**-126), TINY, 5 * TINY, 0, -0.0, math.inf, -math.inf, math.nan], np.float32)


def test_divisions_by_one_divisor_are_divisions(target: str) -> None:
    @hw.fusion(x=hw.f32["M", "N"], by=hw.f32["M", 1])
    def quotients(x, by):
        return x / by

    random = np.random.default_rng(4)
    x = (random.standard_normal(64) * 2.0 ** random.integers(-149, 127, 64)).astype(np.float32)
    x = np.tile(np.concatenate([x, [0, math.inf, -math.inf, math.nan, TINY, LARGEST, 1, -1]]).astype(np.float32), (len(DIVISORS), 1))
    program = hw.compile(quotients, target)
    result = program.run(x=x, by=DIVISORS[:, None])
    program.close()
    assert "const hw::Divisor by_by(by_i);" in program.sources["kernels.cu"]
    with np.errstate(all="ignore"):
        wanted = x / DIVISORS[:, None]
    if target == "cpu":
        np.testing.assert_array_equal(result, wanted)
    np.testing.assert_allclose(result, wanted, rtol=2.0**-22, atol=2 * TINY)


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("shape", [(1, 16), (64, 128), (200, 72), (130, 33)], ids=str)
def test_transposed_results(shape: tuple[int, int], is_known: bool, target: str) -> None:
    """Results have whole tiles, partial tiles, or unaligned rows. Elements have 1, 2, 4 or 8 bytes."""
    columns = shape[1] if is_known else "N"

    @hw.fusion(x=hw.bf16["M", columns], y=hw.f32["M", columns], z=hw.f64["M", columns], bias=hw.bf16[columns], scale=hw.f32["M", 1])
    def results(x, y, z, bias, scale):
        x_t, y_t = hw.permute_dims(x, (1, 0)), hw.permute_dims(y, (1, 0))
        quantized = hw.astype(hw.astype(x, hw.f32) / scale, hw.f8e4m3)
        return x_t * 2, hw.permute_dims(x + bias, (1, 0)), y_t, hw.permute_dims(z, (1, 0)), quantized, hw.permute_dims(quantized, (1, 0))

    random = np.random.default_rng(5)
    x, y, z = (random.standard_normal(shape).astype(dtype) for dtype in (ml_dtypes.bfloat16, np.float32, np.float64))
    bias = random.standard_normal(shape[1]).astype(x.dtype)
    scale = (2.0 ** random.integers(-2, 3, (shape[0], 1))).astype(np.float32)  # A GPU divides by powers of 2 exactly.
    program = hw.compile(results, target)
    found = program.run(x=x, y=y, z=z, bias=bias, scale=scale)
    program.close()
    quantized = (x.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn)
    for result, wanted in zip(found, (x.T * x.dtype.type(2), (x + bias).T, y.T, z.T, quantized, quantized.T), strict=True):
        np.testing.assert_array_equal(np.asarray(result, np.float64), np.asarray(wanted, np.float64))


@pytest.mark.parametrize("shape", [(1, 8), (3, 24), (2000, 40), (70, 33), (2, 0), (0, 8)])
def test_columns_of_any_number(shape: tuple[int, int], target: str) -> None:
    """Shapes are smaller than a tile, or span several tiles, or have no rows or no columns."""

    @hw.fusion(x=hw.f32["M", "N"])
    def columns(x):
        return hw.sum(x, 0), hw.mean(x * x, 0), hw.var(x, 0), hw.argmax(x, 0) if shape[0] else hw.prod(x, 0)

    x = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    program = hw.compile(columns, target)
    total, squares, variance, largest = program.run(x=x)
    program.close()
    np.testing.assert_allclose(total, x.sum(0, dtype=np.float64), rtol=1e-4, atol=1e-3)
    if shape[0]:
        np.testing.assert_allclose(squares, np.square(x).mean(0, dtype=np.float64), rtol=1e-4)
        np.testing.assert_allclose(variance, x.var(0, dtype=np.float64), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(largest, x.argmax(0))


@pytest.mark.parametrize("columns", [8, 64, 4096])
def test_column_sums_of_any_width(columns: int, target: str) -> None:
    @hw.fusion(x=hw.f32["M", columns], scales=hw.f32["M"])
    def both(x, scales):
        return (*squares_and_sums(x, scales), scaled_sums(x, scales))

    random = np.random.default_rng(3)
    x, scales = random.standard_normal((70, columns)).astype(np.float32), random.standard_normal(70).astype(np.float32)
    program = hw.compile(both, target)
    squares, of_squares, total = program.run(x=x, scales=scales)
    program.close()
    np.testing.assert_allclose(squares, x * x, rtol=1e-6)
    np.testing.assert_allclose(of_squares, scales.astype(np.float64) @ (x * x), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(total, scales.astype(np.float64) @ x, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 1023])
def test_more_elements_than_32_bit_indices_can_address(columns: int) -> None:
    @hw.fusion(a=hw.u8["M", columns], b=hw.u8[columns])
    def sums(a, b):
        return a + b

    a = np.resize(np.arange(251, dtype=np.uint8), ((1 << 32) // columns + 3, columns))
    b = np.arange(columns, dtype=np.uint8)
    program = hw.compile(sums, "cuda")
    result = program.run(a=a, b=b)
    program.close()
    a += b
    assert np.array_equal(result, a)  # assert_array_equal would take a minute for its report.


@pytest.mark.parametrize("spec", [hw.bf16, hw.f16], ids=str)
def test_gelu_of_every_float_of_16_bits(spec: Any, target: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits.view(ml_dtypes.bfloat16 if spec == hw.bf16 else np.float16)
    program = hw.compile(hw.fusion(x=spec["M"])(lambda x: hw.gelu(x)), target)
    result = np.asarray(program.run(x=x), np.float64)
    program.close()
    with np.errstate(invalid="ignore"):  # Some of the NaNs are signaling.
        is_nan, is_finite = np.isnan(x), np.isfinite(x)
    assert np.isnan(result[is_nan]).all()
    x, result = x[is_finite], result[is_finite]
    want = np.array([v / 2 * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64)])
    info = ml_dtypes.finfo(x.dtype)
    spacing = np.maximum(np.abs(want) * float(info.eps), max(float(info.smallest_subnormal), 1.2e-38))  # smallest normal f32
    np.testing.assert_array_less(np.abs(result - want), 0.6 * spacing)
