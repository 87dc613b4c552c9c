"""Gathers, scatters, sorts, scans, bit operations and slices, compared with torch and NumPy on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_here import needs_cuda
from interpret import interpret
from numpy.typing import NDArray

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError, ProgramError
from hostweave.build.cuda import gpus
from hostweave.check.check import check as check_host
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.pipeline import lower

Array = NDArray[Any]
torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
SIZES = {"M": 6, "N": 5, "B": 3, "S": 2, "T": 7, "W": 5}  # All sizes are uneven on 4 ranks. Some leave the last rank without elements.
INPUTS = {
    "x": hw.f32["M", "N"],
    "rows": hw.f32["M@x", "N"],
    "columns": hw.f32["M", "N@x"],
    "half": hw.bf16["M@x", "N"],
    "flags": hw.bool_["M@x", "N"],
    "small": hw.i16["M@x", "N"],
    "ids": hw.i64["B", "S"],
    "shared_ids": hw.i32["B@x", "S"],
    "one": hw.u8[()],
    "places": hw.i64["T"],
    "shared_places": hw.u16["T@x"],
    "terms": hw.f32["T", "N"],
    "shared_terms": hw.f32["T@x", "N"],
    "across": hw.i64["M", 3],
    "table": hw.f64["W@x", "N"],
    "grid": hw.i64[9, 2],
    "single": hw.f32[1, "N"],
    "words": hw.u32["M@x", "N"],
    "short": hw.u16["M@x", "N"],
    "long": hw.u64["M@x", "N"],
}


def arrays(seed: int = 0) -> dict[str, Array]:
    """Inputs whose sums are exact, with equal numbers and NaNs."""
    random = np.random.default_rng(seed)

    def shape(name: str) -> list[int]:
        return [int(size) if size.is_int else SIZES[str(size)] for size in INPUTS[name].shape]

    def numbers(name: str, low: int = -3, high: int = 4) -> Array:
        return random.integers(low, high, shape(name))

    given = {name: numbers(name) for name in ("x", "rows", "columns", "terms", "shared_terms", "single", "table", "half")}
    result: dict[str, Array] = {name: array.astype(np.float32) for name, array in given.items()}
    result["x"][1, 2] = result["x"][4, 2] = result["x"][1, 4] = np.nan
    result |= {"table": given["table"].astype(np.float64), "half": given["half"].astype(ml_dtypes.bfloat16)}
    result |= {"flags": numbers("flags") > 0, "small": numbers("small", -(2**15), 2**15).astype(np.int16)}
    result |= {name: numbers(name, 0, SIZES["N"]) for name in ("ids", "shared_ids", "one", "places", "shared_places", "across", "grid")}
    result |= {
        name: random.integers(0, 2**bits, shape(name), f"u{bits // 8}") for name, bits in (("short", 16), ("words", 32), ("long", 64))
    }
    kinds = {"shared_ids": np.int32, "one": np.uint8, "shared_places": np.uint16}
    return {name: np.asarray(array).astype(kinds.get(name, array.dtype)) for name, array in result.items()}


def t(array: Array) -> Any:
    return torch.from_numpy(array)


def along(x: Array, axis: int, descending: bool = False) -> Array:
    return torch.sort(t(x), dim=axis, descending=descending, stable=True).indices.numpy()


def added(x: Array, places: Array, terms: Array) -> Array:
    return torch.index_add(t(x), 0, t(places.astype(np.int64)), t(terms)).numpy()


def put(x: Array, places: Array, terms: Array) -> Array:
    result = x.copy()
    for place, term in zip(places, terms, strict=True):
        result[place] = term
    return result


WRAPS = {(kind, name): {"dtype": dtype} for kind in ("sum", "prod") for name, dtype in (("small", "i2"), ("short", "u2"), ("long", "u8"))}

# For each case: a function of tensors `v`, and the same function of arrays `v`.
CASES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "take": (lambda v: hw.take(v.x, v.ids, 1), lambda v: np.take(v.x, v.ids, 1)),
    "take_one": (lambda v: hw.take(v.rows, v.one, 0), lambda v: v.rows[v.one]),
    "take_row": (lambda v: hw.take(v.single, v.one * 0, 0), lambda v: v.single[0]),
    "take_of_vector": (lambda v: hw.take(v.x[0], v.shared_places), lambda v: v.x[0][v.shared_places]),
    "take_sharded": (lambda v: hw.take(v.rows, v.shared_ids, 0) * 2, lambda v: v.rows[v.shared_ids] * 2),
    "take_columns": (lambda v: hw.take(v.columns, v.ids, 0) + v.columns[0], lambda v: v.columns[v.ids] + v.columns[0]),
    "take_sharded_columns": (lambda v: hw.take(v.columns, v.places, 1), lambda v: v.columns[:, v.places]),
    "take_bf16": (lambda v: hw.take(v.half, v.ids, 0), lambda v: v.half[v.ids]),
    "take_bools": (lambda v: hw.take(v.flags, v.ids, 0), lambda v: v.flags[v.ids]),
    "take_i16": (lambda v: hw.take(v.small, v.ids, 0), lambda v: v.small[v.ids]),
    "take_of_what_is_made": (lambda v: hw.take(v.x * 2, v.ids, 0), lambda v: v.x[v.ids] * 2),
    "sum_of_taken": (lambda v: hw.sum(hw.take(v.rows, v.ids, 0), -1), lambda v: v.rows[v.ids].sum(-1)),
    "embedding": (lambda v: hw.embedding(v.shared_ids, v.table), lambda v: v.table[v.shared_ids]),
    "along": (lambda v: hw.take_along_axis(v.rows, v.across, 1), lambda v: np.take_along_axis(v.rows, v.across, 1)),
    "along_sharded": (lambda v: hw.take_along_axis(v.columns, v.across, 1), lambda v: np.take_along_axis(v.columns, v.across, 1)),
    "along_broadcast": (lambda v: hw.take_along_axis(v.x, v.places[:, None], 0), lambda v: v.x[v.places]),
    "gather": (
        lambda v: hw.gather(v.grid, 0, v.places[:5, None]),
        lambda v: torch.gather(t(v.grid), 0, t(v.places[:5, None])).numpy(),
    ),
    "gather_from_one_row": (lambda v: hw.gather(v.single, 1, v.grid), lambda v: v.single[0][v.grid]),
    "one_hot": (lambda v: hw.one_hot(v.ids, "N"), lambda v: torch.nn.functional.one_hot(t(v.ids), 5).numpy()),
    "one_hot_floats": (lambda v: hw.one_hot(v.shared_ids, 7, hw.f32), lambda v: np.eye(7)[v.shared_ids]),
    "scatter": (lambda v: hw.scatter(v.x, 0, v.places[:, None], v.terms), lambda v: put(v.x, v.places, v.terms)),
    "scatter_sharded": (
        lambda v: hw.scatter(v.rows, 0, v.shared_places[:, None], v.shared_terms),
        lambda v: put(v.rows, v.shared_places, v.shared_terms),
    ),
    "scatter_columns": (
        lambda v: hw.scatter(v.columns, 1, v.across, hw.astype(v.across, hw.f32)),
        lambda v: put_along(v.columns, v.across),
    ),
    "add": (lambda v: hw.scatter_add(v.x, 0, v.places[:, None], v.terms), lambda v: added(v.x, v.places, v.terms)),
    "add_rows": (
        lambda v: hw.scatter_add(v.rows, 0, v.shared_places[:, None], v.shared_terms),
        lambda v: added(v.rows, v.shared_places, v.shared_terms),
    ),
    "add_columns": (
        lambda v: hw.scatter_add(v.columns, 1, v.across, hw.astype(v.across, hw.f32)),
        lambda v: torch.scatter_add(t(v.columns), 1, t(v.across), t(v.across.astype(np.float32))).numpy(),
    ),
    "cumsum": (lambda v: hw.cumsum(v.x, 1), lambda v: np.cumsum(v.x, 1)),
    "cumsum_rows": (lambda v: hw.cumsum(v.rows, 0), lambda v: np.cumsum(v.rows, 0)),
    "cumsum_bf16": (lambda v: hw.cumsum(v.half, 1), lambda v: np.cumsum(v.half.astype(np.float64), 1)),
    "cumsum_i16": (lambda v: hw.cumsum(v.small.T, 0), lambda v: np.cumsum(v.small.T, 0, np.int16)),
    "sort": (lambda v: hw.sort(v.x, 0), lambda v: np.sort(v.x, 0)),
    "argsort": (lambda v: hw.argsort(v.x), lambda v: np.argsort(v.x, stable=True)),
    "argsort_descending": (lambda v: hw.argsort(v.rows, 0, True), lambda v: along(v.rows, 0, True)),
    "argsort_bools": (lambda v: hw.argsort(v.flags, "N"), lambda v: np.argsort(v.flags, 1, stable=True)),
    "argsort_half": (lambda v: hw.argsort(v.half, 0), lambda v: np.argsort(v.half.astype(np.float32), 0, stable=True)),
    "sort_of_one": (lambda v: hw.sort(v.single, 0), lambda v: v.single),
    "sort_words": (lambda v: hw.sort(v.words, 1, True), lambda v: np.sort(v.words, 1)[:, ::-1]),
    "top": (lambda v: hw.top_k(v.x, 2)[0], lambda v: torch.topk(t(v.x), 2).values.numpy()),
    "top_of": (lambda v: hw.top_k(v.columns, 3)[1], lambda v: along(v.columns, 1, True)[:, :3]),
    "least": (lambda v: hw.top_k(v.rows, 2, 0, largest=False)[0], lambda v: np.sort(v.rows, 0)[:2]),
    "any": (lambda v: hw.any(v.x > 2, 1), lambda v: (v.x > 2).any(1)),
    "any_sharded": (lambda v: hw.any(v.flags, 0), lambda v: v.flags.any(0)),
    "all_sharded": (lambda v: hw.all(v.rows, (0, 1), keepdims=True), lambda v: v.rows.all(keepdims=True)),
    "all_numbers": (lambda v: hw.all(v.columns), lambda v: v.columns.all()),
    "and": (lambda v: hw.reduce_and(v.words | 7, 0), lambda v: np.bitwise_and.reduce(v.words | 7, 0)),
    "or": (lambda v: hw.reduce_or(v.words & 0xFF00, 0), lambda v: np.bitwise_or.reduce(v.words & 0xFF00, 0)),
    "xor": (lambda v: hw.reduce_xor(v.words ^ (v.words >> 3), (0, 1)), lambda v: np.bitwise_xor.reduce(v.words ^ (v.words >> 3), (0, 1))),
    "or_resharded": (lambda v: hw.reshard(hw.reduce_or(v.small, 0), "N@x"), lambda v: np.bitwise_or.reduce(v.small, 0)),
    "xor_i16": (lambda v: hw.reduce_xor(~v.small << 2, 0), lambda v: np.bitwise_xor.reduce(~v.small << 2, 0)),
    "xor_bools": (lambda v: hw.reduce_xor(v.flags, 0), lambda v: np.bitwise_xor.reduce(v.flags, 0)),
    "divided": (lambda v: (v.small // 7) % 5 - v.small % -3, lambda v: (v.small // 7) % 5 - v.small % -3),
    **{
        f"{kind}_{name}": (
            lambda v, kind=kind, name=name: getattr(hw, kind)(getattr(v, name), 0),
            lambda v, kind=kind, name=name: getattr(np, kind)(getattr(v, name), 0, **WRAPS.get((kind, name), {})),
        )
        for kind in ("sum", "prod", "max", "min")
        for name in ("small", "short", "long")
    },
    "cast_i16": (lambda v: hw.astype(v.small, hw.u64) + (2**64 - 1), lambda v: v.small.astype(np.uint64) + np.uint64(2**64 - 1)),
    "cast_u16": (lambda v: hw.astype(v.short, hw.i16) * 3, lambda v: v.short.astype(np.int16) * np.int16(3)),
    "cast_u64": (lambda v: hw.astype(v.long, hw.f32) / 2.0**60, lambda v: v.long.astype(np.float32) / 2.0**60),
    "cast_to_u16": (lambda v: hw.astype(v.words, hw.u16) // 7, lambda v: v.words.astype(np.uint16) // np.uint16(7)),
    "stack": (lambda v: hw.stack([v.x, -v.x, v.rows], 1), lambda v: np.stack([v.x, -v.x, v.rows], 1)),
    "split": (lambda v: hw.split(v.across, 2, 1)[1], lambda v: torch.split(t(v.across), 2, 1)[1].numpy()),
    "split_by": (lambda v: hw.split(v.across, [1, 2], 1)[1] + 1, lambda v: v.across[:, 1:] + 1),
    "squeeze": (lambda v: hw.squeeze(v.single, 0) + v.x, lambda v: v.single[0] + v.x),
    "loss": (
        lambda v: hw.cross_entropy(v.columns, hw.astype(v.across[:, 0], hw.i32)),
        lambda v: torch.nn.functional.cross_entropy(t(v.columns), t(v.across[:, 0])).numpy(),
    ),
    "losses": (
        lambda v: hw.cross_entropy(v.half, v.across[:, 1], ignore_index=2, reduction="none"),
        lambda v: torch.nn.functional.cross_entropy(
            t(v.half.astype(np.float32)), t(v.across[:, 1]), ignore_index=2, reduction="none"
        ).numpy(),
    ),
    "sum_of_losses": (
        lambda v: hw.cross_entropy(v.rows, hw.where(v.across[:, 2] < 3, v.across[:, 2], -100), reduction="sum"),
        lambda v: torch.nn.functional.cross_entropy(
            t(v.rows), t(np.where(v.across[:, 2] < 3, v.across[:, 2], -100)), reduction="sum"
        ).numpy(),
    ),
}


def put_along(x: Array, places: Array) -> Array:
    result = x.copy()
    for k in range(places.shape[1]):
        np.put_along_axis(result, places[:, k : k + 1], places[:, k : k + 1].astype(x.dtype), 1)
    return result


class Values:
    def __init__(self, values: dict[str, Any]):
        self.__dict__.update(values)


def program(ranks: int, cases: Sequence[str] = tuple(CASES)) -> Fusion:
    def indices(**inputs: Any) -> Any:
        return tuple(CASES[case][0](Values(inputs)) for case in cases)

    return hw.fusion(mesh=hw.Mesh(x=ranks), **INPUTS)(indices)


def check(cases: Sequence[str], given: dict[str, Array], results: Sequence[Array]) -> None:
    for case, result in zip(cases, results, strict=True):
        want = np.asarray(CASES[case][1](Values(given)))
        assert result.shape == want.shape, case
        if result.dtype.kind in "iub":
            np.testing.assert_array_equal(result, want, err_msg=case)
        else:
            np.testing.assert_allclose(result.astype(np.float64), want.astype(np.float64), rtol=1e-5, atol=1e-5, err_msg=case)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ops(ranks: int, target: str) -> None:
    """Tests all cases on GPUs and on 4 CPU ranks, and some cases on 1 to 3 CPU ranks."""
    if target == "cuda" and len(gpus()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    cases = [*CASES] if ranks == 4 or target == "cuda" else [*CASES][ranks::7]
    given = arrays(ranks)
    compiled = hw.compile(program(ranks, cases), target)
    results = compiled.run(**given)
    compiled.close()
    check(cases, given, results)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_references(ranks: int) -> None:
    """Tests the NumPy references of ops on global arrays, and on local blocks. Some blocks are empty."""
    fusion, given = program(ranks), arrays(ranks)
    check([*CASES], given, run_reference(fusion, given))
    host = lower(fusion, hw.Options())
    check_host(host, SIZES)
    blocks = interpret(host, given)
    check([*CASES], given, [out.type.unshard([block[out.name] for block in blocks], fusion.mesh) for out in host.outputs])


def test_nothing_large_is_communicated_for_a_sharded_vocabulary() -> None:
    @hw.fusion(mesh=hw.Mesh(tp=4), ids=hw.i64["T"], table=hw.bf16["V@tp", "E"], logits=hw.bf16["T", "V@tp"])
    def model(ids, table, logits):  # type: ignore[no-untyped-def]
        return hw.embedding(ids, table), hw.cross_entropy(logits, ids)

    host = str(lower(model, hw.Options(partial_dtype=hw.f32)))
    sent = [" ".join(line.split()[:2]) for line in host.splitlines() if line.endswith(" on tp")]
    assert sorted(sent) == ["all_reduce max", *2 * ["all_reduce sum"]]  # One sum is for the loss, and one for the embedding.
    assert "f32[V" not in host  # The table is not cast.


def test_bit_reductions_over_ranks_gather_partial_results() -> None:
    fusion = hw.fusion(mesh=hw.Mesh(x=4), words=hw.i16["M@x", "N"])(lambda words: hw.reduce_xor(words, 0))
    body = [line.split(" on ")[0] for line in str(lower(fusion, hw.Options(transport="two_sided"))).splitlines() if "->" in line][1:]
    assert [line.strip() for line in body] == [
        "launch @reduce_xor_y_partial %words -> %y_partial",
        "all_gather %y_partial -> %y_partial_terms",
        "launch @reduce_xor_y %y_partial_terms -> %y",
    ]


def test_bit_reductions_in_a_loop_and_on_another_mesh() -> None:
    mesh = hw.Mesh(x=4)

    @hw.fusion(mesh=mesh, words=hw.u64["M@x", "N"])
    def moved(words):  # type: ignore[no-untyped-def]
        streamed = hw.reduce_xor(words, 0).stream("N", 5)
        return hw.reshard(hw.reduce_or(words, 0), "N", mesh=mesh.ranks([2])).named("there"), streamed.named("here")

    words = np.random.default_rng(0).integers(0, 2**60, (6, 5)).astype(np.uint64)
    ranks = interpret(lower(moved, hw.Options()), {"words": words})
    assert ["there" in blocks for blocks in ranks] == [False, False, True, False]
    np.testing.assert_array_equal(ranks[2]["there"], np.bitwise_or.reduce(words, 0))
    for blocks in ranks:
        np.testing.assert_array_equal(blocks["here"], np.bitwise_xor.reduce(words, 0))


def test_top_k_orders_only_the_first_elements() -> None:
    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["B", "V"])
    def sampled(x):  # type: ignore[no-untyped-def]
        return hw.top_k(x, 5)

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["B", "V"])
    def many(x):  # type: ignore[no-untyped-def]
        return hw.top_k(x, 2049)

    compiled = hw.compile(sampled)
    assert "i64[B, 5]" in compiled.host_ir
    assert "i64[B, V]" not in compiled.host_ir
    assert "allocate i64[B, V]" in str(lower(many, hw.Options()))  # A GPU cannot sort so many elements partially.
    assert "grid_of_orders(B, V, 5)" in compiled.source
    assert "grid_of_orders(B, V, V)" in hw.compile(many).source
    x = np.random.default_rng(0).integers(-3, 4, (4, 5)).astype(np.float32)
    np.testing.assert_array_equal(compiled.run(x)[1], np.argsort(-x, 1, stable=True))
    with pytest.raises(ArgumentError, match=r"V - 5"):
        compiled.run(x[:, :4].copy())


def test_an_index_that_is_out_of_range() -> None:
    @hw.fusion(mesh=hw.Mesh(x=2), ids=hw.i32["T"], table=hw.f32["V@x", "E"])
    def looked_up(ids, table):  # type: ignore[no-untyped-def]
        return hw.embedding(ids, table)

    compiled, line = hw.compile(looked_up), rf"test_indices\.py:{looked_up.ops[0].location.line}"
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    for wrong, rows in ((4, 4), (-1, 4), (2**31 - 1, 4), (-(2**31), 4), (0, 0)):
        ids, message = np.array([wrong], np.int32), f"index {wrong} is out of range for a dim of {rows} elements"
        with pytest.raises(ExecutionError, match=rf"rank \d .*kernel \w+ \({line}, program.cpp:\d+\): {message}"):
            compiled.run(ids=ids, table=table[:rows])
        with pytest.raises(IndexError, match=message):
            run_reference(looked_up, {"ids": ids, "table": table[:rows]})
    np.testing.assert_array_equal(compiled.run(ids=np.array([3, 0], np.int32), table=table), table[[3, 0]])

    ranks = hw.Threads(2)

    def rank(number: int) -> None:
        hw.init(ranks)
        compiled(np.array([4], np.int32), table[2 * number : 2 * number + 2])

    with pytest.raises(ExecutionError, match=rf"\({line}, program.cpp:\d+\): index 4 is out of range"):
        ranks.run(rank)
    compiled.close()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_gpus_use_the_nearest_valid_index(ranks: int) -> None:
    if len(gpus()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")

    @hw.fusion(mesh=hw.Mesh(x=ranks), ids=hw.i32["T"], table=hw.f32["V@x", "E"], whole=hw.f32["V", "E"], terms=hw.f32["T", "E"])
    def looked_up(ids, table, whole, terms):  # type: ignore[no-untyped-def]
        rows = hw.expand_dims(ids, 1)
        return hw.embedding(ids, table), hw.gather(whole, 0, rows), hw.scatter_add(whole, 0, rows, terms)

    compiled = hw.compile(looked_up, "cuda")
    ids = np.array([3, 4, 0, -1, 2**31 - 1, -(2**31)], np.int32)
    table, terms = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(18, dtype=np.float32).reshape(6, 3)
    nearest = np.clip(ids, 0, 3)
    np.add.at(added := table.copy(), nearest, terms)
    results = compiled.run(ids, table, table, terms)
    for got, want in zip(results, (table[nearest], table[nearest][:, :1], added), strict=True):
        np.testing.assert_array_equal(got, want)


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "axis of take": (lambda v: hw.take(v.x, v.ids), "take: f32[M, N] has 2 dims; choose one by axis="),
    "float indices": (lambda v: hw.take(v.x, v.terms, 0), "take: not defined for f32; use hw.astype to a dtype that is int or uint"),
    "dims of gather": (
        lambda v: hw.gather(v.x, 0, v.places),
        "gather: f32[M, N] and i64[T] differ in their number of dims; use hw.expand_dims",
    ),
    "rows of gather": (
        lambda v: hw.gather(v.grid[:3], 1, v.grid),
        "gather: shapes do not broadcast: i64[3, 1] and i64[9, 1] differ in dim",
    ),
    "dims of take_along_axis": (
        lambda v: hw.take_along_axis(v.x, v.places, 0),
        "take_along_axis: i64[T] is not an i64 tensor with as many dims as",
    ),
    "shape of indices": (lambda v: hw.take_along_axis(v.x, v.terms.T > 0, 0), "take_along_axis: not defined for bool"),
    "table": (lambda v: hw.embedding(v.ids, v.x[0]), "embedding: a weight of f32[N] is not [V, E]; reshape it"),
    "classes": (lambda v: hw.one_hot(v.ids, "1 2"), "one_hot: "),
    "source": (lambda v: hw.scatter(v.x, 0, v.places, v.terms), "scatter: i64[T] is not an i64 tensor with as many dims as f32[T, N]"),
    "lengths": (
        lambda v: hw.scatter_add(v.x, 0, v.across, v.terms),
        "scatter_add: i64[M, 3] does not have an index for each element of dim 0 of f32[T, N]; make these dims equal",
    ),
    "into": (lambda v: hw.scatter(v.across, 0, v.places[:, None], v.terms), "scatter: cannot scatter f32[T, N] to i64[M, 3]"),
    "sums of bools": (lambda v: hw.cumsum(v.flags, 0), "cumsum: not defined for bool; use hw.astype"),
    "k": (lambda v: hw.top_k(v.across, 4), "top_k: k=4 is not an int from 1 to 3, the size of dim 1 of i64[M, 3]"),
    "no list": (lambda v: hw.stack(v.x), "is not a list of tensors of this fusion; write hw.stack([a, b])"),
    "axis of stack": (lambda v: hw.stack([v.x], 3), "stack: axis 3 is out of range: the result has 3 dims"),
    "split of a name": (lambda v: hw.split(v.x, 2), "split: M, dim 0 of f32[M, N], is not known at compile time"),
    "split into nothing": (lambda v: hw.split(v.across, 0, 1), "split: parts of 0 elements are not possible; give at least 1"),
    "parts": (
        lambda v: hw.split(v.across, [1, 1], 1),
        "split: lengths [1, 1] of dim 1 of i64[M, 3] must be at least 1, and add up to 3",
    ),
    "squeeze": (lambda v: hw.squeeze(v.x, 0), "squeeze: dim 0 of f32[M, N] does not have size 1"),
    "reduction": (lambda v: hw.cross_entropy(v.x, v.across[:, 0], reduction="max"), "reduction='max' is not 'mean', 'sum' or 'none'"),
    "target": (lambda v: hw.cross_entropy(v.x, v.places), "f32[M, N] and a target of i64[T] are not floats [..., V] and ints [...]"),
    "bits of floats": (lambda v: v.x << v.x, "bitwise_left_shift: not defined for f32; use hw.astype to a dtype that is int or uint"),
    "stream": (
        lambda v: hw.take(v.x, v.ids, 0).stream(0),
        "stream: dim 0 of f32[B, S, N] is looked up by a take, so no loop can iterate over it",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str) -> None:
    function, message = MISTAKES[case]
    with pytest.raises(ProgramError) as caught:
        hw.fusion(mesh=hw.Mesh(x=2), **INPUTS)(lambda **inputs: function(Values(inputs)))
    assert "test_indices.py:" in str(caught.value)
    assert message in str(caught.value)


@needs_cuda
@pytest.mark.usefixtures("kernels_together")
def test_all_ops_compile_for_cuda() -> None:
    compiled = hw.compile(program(2), target="cuda")
    assert compiled.module.name == "indices"
    assert "warning" not in (compiled.folder / "build.log").read_text()
