from __future__ import annotations

import pytest

import hostweave as hw
from hostweave.emit.cpp import CppExprPrinter, number
from hostweave.host_ir.expr import Const, Coordinate, Expr, Symbol, Var, binary, opposite
from hostweave.types.mesh import Mesh
from hostweave.types.size import Size
from hostweave.types.tensor import bf16, bool_, f32, f64, i32


def integers() -> CppExprPrinter:
    result = CppExprPrinter(Mesh(x=4), {"M": "M", "K": "K_1"}, {"M": 12, "K": 4}, depths={"D": 6})
    result.coordinates[result.mesh, "x"] = "rank_x"
    result.define("i", "i", (0, 3))
    result.define("n", "n", (None, None))
    return result


@pytest.mark.parametrize(
    ("size", "cpp"),
    [
        ("8", "8"),
        ("M", "M"),
        ("M/4", "M / 4"),
        ("K*M/4", "M / 4 * K_1"),
        ("3*K*M/4", "M / 4 * 3 * K_1"),
        ("K*M/48", "M / 12 * (K_1 / 4)"),  # M is a multiple of 12, and K of 4.
        ("M/5", "M / 5"),
        ("2*K*M", "2 * M * K_1"),
        ("(K - 1)", "K_1 - 1"),
        ("(K + M)*2", "2 * (K_1 + M)"),
        ("(K + M)/2", "(K_1 + M) / 2"),
        ("(2*K + M)", "2 * K_1 + M"),
    ],
)
def test_products_of_sizes(size: str, cpp: str) -> None:
    assert integers().size(Size.of(size)) == cpp


def test_a_sum_that_is_a_factor_has_parentheses() -> None:
    total = Size.of("(K + M)")
    assert (integers().factor(total), integers().first_factor(total)) == ("(K_1 + M)", "(K_1 + M)")
    assert [integers().factor(Size.of(size)) for size in ("2*M", "2*M*K", "M/2")] == ["2 * M", "2 * M * K_1", "(M / 2)"]
    x = hw.f32["B", "H", "S", 64]
    packed = hw.fusion(mesh=hw.Mesh(), q=x, k=x, v=x, offsets=hw.i32["B", "N"])(
        lambda q, k, v, offsets: hw.attention(q, k, v, offsets=offsets)
    )
    assert ".sequences = N - 1}" in hw.compile(packed).source
    rows = hw.fusion(mesh=hw.Mesh(), x=hw.f32["M"], y=hw.f32["K"])(lambda x, y: hw.cumsum(hw.concat([x, y]) + 1, 0) + 1)
    source = hw.compile(rows).source
    assert ", K + M" in source
    assert "((" not in source.replace("HW_CHECK((", "")


I, N, RANK = Var("i"), Var("n"), Coordinate("x")  # noqa: E741


@pytest.mark.parametrize(
    ("expr", "cpp"),
    [
        ((RANK + I) % 4, "(rank_x + i) % 4"),
        ((RANK - I) % 4, "(rank_x - i + 4) % 4"),  # The dividend is at least -3.
        ((RANK - 1 - I) % 4, "(rank_x - i + 3) % 4"),  # The dividend is at least -4.
        ((RANK - 1) % 4, "(rank_x + 3) % 4"),
        ((RANK - I * 2) % 4, "(rank_x - i * 2 + 8) % 4"),  # The dividend is at least -6.
        (RANK * 2 + I % 2, "rank_x * 2 + i % 2"),
        (N % 4, "hw::mod(n, 4)"),
        ((RANK - I) % Symbol("M"), "hw::mod(rank_x - i, M)"),
        (I // 2, "i / 2"),
        ((I - 1) // 2, "hw::floor_div(i - 1, 2)"),
        (I.equals(RANK), "i == rank_x"),
        ((Symbol("D") - 1 - I).equals(0), "i == 5"),
        (opposite((Symbol("D") - 1 - I).equals(0)), "i != 5"),
        (I.less(3), "i < 3"),
        ((I + 1) * 3, "(i + 1) * 3"),
        (RANK - (I - 1), "rank_x - (i - 1)"),
    ],
)
def test_remainders_are_never_negative(expr: Expr, cpp: str) -> None:
    assert integers().expr(expr) == cpp


@pytest.mark.parametrize(
    ("value", "dtype", "cpp"),
    [
        (1, f32, "1.0f"),
        (0.5, bf16, "0.5f"),
        (1e-30, f64, "1e-30"),
        (float("-inf"), f32, "-INFINITY"),
        (float("nan"), f32, "NAN"),
        (1e300, f32, "INFINITY"),
        (-1e300, bf16, "-INFINITY"),
        (-1e300, f64, "-1e+300"),
        (3.4028234e38, f32, "3.4028234e+38f"),
        (1e-46, f32, "0.0f"),
        (-1e-46, bf16, "-0.0f"),
        (1e-46, f64, "1e-46"),
        (-3, i32, "-3"),
        (True, bool_, "true"),
    ],
)
def test_numbers(value: float, dtype: object, cpp: str) -> None:
    assert number(value, dtype) == cpp  # type: ignore[arg-type]


def test_a_branch_uses_its_condition() -> None:
    text, i, n = integers(), Var("i"), Var("n")
    assert text.expr((i + 3) % 4) == "(i + 3) % 4"
    for condition in (binary(">", i, 0), binary(">=", i, 1), opposite(i.equals(0))):
        with text.given(condition):
            assert text.expr((i + 3) % 4) == "i - 1"
            assert text.expr((Const(6) - i) % 4) == "(6 - i) % 4"
            assert text.expr((Const(5) - (i - 2)) % 4) == "3 - i"
    assert text.expr((i - 1) % 4) == "(i + 3) % 4"
    with text.given(i.less(2)):
        assert text.expr((i + 1) % 2) == "1 - i"
        assert text.expr((i + 1) % 2 * 3) == "(1 - i) * 3"
    with text.given(i.equals(2)):
        assert text.expr((i + 1) % 2) == "1"
    with text.given(i.less(2)):
        assert text.range(i) == (0, 1)
    with text.given(binary(">", n, 2)):
        assert text.range(n) == (3, None)
    with text.given(n.less(i)):
        assert text.range(n) == (None, None)
