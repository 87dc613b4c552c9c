"""Predicted times of chunk loops and links, compared with measured times."""

from __future__ import annotations

import pytest
from fusion_text import GATHER, SCATTER, fusion

from hostweave.communication.cost import communication
from hostweave.options import Options
from hostweave.passes.fusion.stream_by_cost import stream_by_cost
from hostweave.tune.cost import seconds
from hostweave.types.machine import H200, Link

# Measured on 2 H200 by `hostweave bench overlap`: rows, inner dim and columns of one rank; microseconds of the matmul and, by
# number of chunks, of put loops.
MEASURED = [
    (GATHER, 8192, 8192, 7168, 1200, {2: 1223, 4: 1320, 8: 1344}),
    (GATHER, 8192, 8192, 1280, 221, {2: 319, 4: 335}),
    (GATHER, 8192, 4096, 3584, 310, {2: 340, 4: 367, 8: 359}),
    (GATHER, 2048, 8192, 7168, 324, {2: 352, 4: 349}),
    (SCATTER, 8192, 3584, 8192, 630, {2: 689, 4: 701, 8: 707}),
    (SCATTER, 8192, 1024, 8192, 201, {2: 359, 4: 318, 8: 312}),
    (SCATTER, 8192, 1792, 4096, 166, {2: 229, 4: 206, 8: 220}),
    (SCATTER, 2048, 3584, 8192, 164, {2: 182, 4: 190, 8: 222}),
]


@pytest.mark.parametrize(("program", "rows", "inner", "columns", "matmul", "loops"), MEASURED)
def test_times(program: tuple[str, str], rows: int, inner: int, columns: int, matmul: float, loops: dict[int, float]) -> None:
    """Predicted times are within 15% of the measurements."""
    sizes = {"M": rows, "K": inner * (2 if program is SCATTER else 1), "N": columns}
    given = fusion(*program, "x=2")
    times = seconds(given, sizes)
    assert times["y" if program is GATHER else "h"] * 1e6 == pytest.approx(matmul, rel=0.15)
    (choice,) = stream_by_cost(given, Options(sizes=sizes)).choices
    predicted = {one.chunks: one.micros for one in choice.alternatives if one.algorithm == "put"}
    for chunks, micros in loops.items():
        assert predicted[chunks] == pytest.approx(micros, rel=0.15)


# Causal attention with sharded rows and keys, head size 128. Rows, heads, groups; microseconds without a loop, with put(2) and with p2p(2).
ATTENDED = [
    (8192, 32, 8, 838, 729, 788),
    (8192, 32, 32, 1165, 752, 994),
    (32768, 32, 8, 11141, 10746, 11045),
    (4096, 32, 32, 467, 283, 375),
]


@pytest.mark.parametrize(("rows", "heads", "groups", *("none", "put", "p2p")), ATTENDED)
def test_times_of_attention(rows: int, heads: int, groups: int, none: float, put: float, p2p: float) -> None:
    keys = f"bf16[{groups}, S@x, 128]"
    gathers = "\n".join(f"%{name}: bf16[{groups}, S, 128] = all_gather(%{name[0]}, dim=1, axes=(x))" for name in ("k_all", "v_all"))
    attention = f"%y: bf16[{heads}, S@x, 128] = attention(%q, %k_all, %v_all, scale=0.1, causal=top_left)"
    given = fusion(f"%q: bf16[{heads}, S@x, 128], %k: {keys}, %v: {keys}", f"{gathers}\n{attention}", "x=2")
    (choice,) = stream_by_cost(given, Options(sizes={"S": rows})).choices
    predicted = {one.name: one.micros for one in choice.alternatives}
    assert (predicted["put(2)"], predicted["p2p(2)"]) == pytest.approx((put, p2p), rel=0.15)
    assert predicted["none"] == pytest.approx(none, rel=0.2)


OF_FEW_ROWS = [  # Sizes, the alternative that the model should choose, and measured microseconds of this alternative and of `none`.
    *((GATHER, 512, 8192, 7168, "put(2)", 99, 127), (GATHER, 16, 8192, 7168, "none", 49.5, 49.5)),
    *((SCATTER, 512, 3584, 8192, "put(2)", 68, 79), (SCATTER, 16, 3584, 8192, "none", 31, 31)),
]


@pytest.mark.parametrize(("program", "rows", "inner", "columns", "alternative", "micros", "none"), OF_FEW_ROWS)
def test_times_of_few_rows(
    program: tuple[str, str], rows: int, inner: int, columns: int, alternative: str, micros: float, none: float
) -> None:
    sizes = {"M": rows, "K": inner * (2 if program is SCATTER else 1), "N": columns}
    (choice,) = stream_by_cost(fusion(*program, "x=2"), Options(sizes=sizes)).choices
    assert choice.chosen.name == alternative
    assert choice.chosen.micros == pytest.approx(micros, rel=0.15)
    assert next(other.micros for other in choice.alternatives if other.name == "none") == pytest.approx(none, rel=0.1)


def test_links() -> None:
    link = Link("put", 2, ((0, 1.0), (10, 2.0), (20, 4.0)))
    assert [link.seconds(size) for size in (0, 5, 10, 15, 20, 40)] == [1.0, 1.5, 2.0, 3.0, 4.0, 8.0]
    assert H200.link("collective", 3).ranks == 4
    assert H200.link("get", 8).ranks == 2
    assert communication(H200, "all_reduce", 2, 2**26) > 1.5 * communication(H200, "reduce_scatter", 2, 2**26)
