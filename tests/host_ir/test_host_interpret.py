"""The interpreter gives NumPy's results for the examples and for handwritten host programs, on every rank, and reports faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import host_text
import ml_dtypes
import numpy as np
import pytest
from interpret import interpret
from lowered_fusions import NAMES, RANKS, program
from numpy.typing import NDArray

from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.check.sizes import minimal_sizes
from hostweave.host_ir.ir import HostProgram
from hostweave.types.tensor import block_of, global_shape

Array = NDArray[Any]


def matmul(x: Array, w: Array) -> Array:
    return x @ w


REFERENCE: dict[str, Callable[..., Array]] = {
    "allgather": lambda x: x,
    "allreduce": lambda x: x.sum(axis=1),
    "reduce_scatter": lambda x: x.sum(axis=1),
    "ag_matmul": matmul,
    "matmul_ar": lambda x, w: (x @ w).sum(axis=1),
    "matmul_rs_through_bcast": lambda x, w: (x @ w[None, :, None]).sum(axis=1),
    "allgather_p2p": lambda x: x,
    "ag_matmul_p2p": matmul,
    "ag_matmul_flat": matmul,
    "ag_matmul_flat_chunked": matmul,
    "ag_matmul_flat_across": matmul,
    "matmul_ar_flat": matmul,
    "matmul_rs_flat": matmul,
    "ag_matmul_ring": matmul,
    "matmul_rs_ring": matmul,
    "set": lambda x: x,
    "add": lambda a, b: a + b,
    "row_sum": lambda x: x.sum(axis=1),
    "matmul_m": matmul,
    "matmul_n": matmul,
    "matmul_batch": matmul,
    "two_ops": lambda x: -x * x,
    "three_ops": lambda x: -x * x + x,
    "allreduce_rows": lambda x: x.sum(axis=0),
}


def arguments(host: HostProgram, sizes: dict[str, int]) -> dict[str, Array]:
    """Small integers, so that bf16 sums are exact."""
    random = np.random.default_rng(0)
    return {p.name: random.integers(-1, 2, global_shape(p.type, sizes)).astype(np.float32) for p in host.inputs}


def test_every_program_has_a_reference() -> None:
    assert set(NAMES) == set(REFERENCE)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", NAMES)
def test_matches_numpy(name: str, ranks: int, times: int) -> None:
    host = program(name, ranks)
    sizes = {symbol: size * times for symbol, size in minimal_sizes(host).items()}
    inputs = arguments(host, sizes)
    want = REFERENCE[name](*inputs.values())
    given = {key: array.astype(ml_dtypes.bfloat16) for key, array in inputs.items()}
    (parameter,) = host.outputs
    for rank, outputs in enumerate(interpret(host, given)):
        block = want[block_of(parameter.type, host.mesh, rank, want.shape)]
        np.testing.assert_array_equal(outputs[parameter.name].astype(np.float32), block)


def test_local_arrays_as_inputs() -> None:
    host = program("ag_matmul_flat", 2)
    x, w = np.arange(8.0).reshape(4, 2), np.ones((2, 3))
    first, second = interpret(host, {"x": [x[:2], x[2:]], "w": [w, w]})
    np.testing.assert_array_equal(first["y"].astype(np.float64), x @ w)
    np.testing.assert_array_equal(second["y"].astype(np.float64), x @ w)


def test_shape_that_the_ranks_cannot_share() -> None:
    with pytest.raises(ArgumentError) as caught:
        interpret(program("ag_matmul_flat", 4), {"x": [np.zeros((2, 2))] * 4, "w": [np.zeros((3, 2))] * 4})
    assert str(caught.value) == "ag_matmul_flat: w: K is 3 here and 2 in x; pass arrays that agree"


PAIR = """
host @pair(%x: f32[2@x, 4]) -> (%y: f32[2@x, 4]) mesh(x=2) {
  send %x to 1 - rank.x on x
  recv %y from 1 - rank.x on x
}
"""


def test_ranks_that_wait_for_one_another_are_a_deadlock() -> None:
    with pytest.raises(ExecutionError) as caught:
        interpret(host_text.parse(PAIR), {"x": np.zeros((2, 4))})
    assert str(caught.value) == (
        "deadlock: no rank can proceed:\n"
        "  rank 0, the caller's stream: send %x to 1 - rank.x on x\n"
        "  rank 1, the caller's stream: send %x to 1 - rank.x on x"
    )


def test_a_group_is_one_operation() -> None:
    grouped = PAIR.replace("  send", "  group {\n  send").replace("\n}", "\n}\n}")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    outputs = interpret(host_text.parse(grouped), {"x": x})
    np.testing.assert_array_equal(np.concatenate([o["y"] for o in outputs]), x[::-1])


def test_a_send_without_a_recv() -> None:
    host = host_text.parse(PAIR.replace("  recv %y from 1 - rank.x on x\n", ""))
    with pytest.raises(ExecutionError) as caught:
        interpret(host, {"x": np.zeros((2, 4))})
    assert str(caught.value) == (
        "text:3: rank 0, the caller's stream: send %x to 1 - rank.x on x: rank 1 posts no recv for it: add the recv, or drop this send"
    )


def test_memory_that_nothing_wrote_is_nan() -> None:
    host = host_text.parse("host @none(%x: f16[N]) -> (%y: f16[N], %n: i32[N]) mesh(x=1) {\n}\n")
    (outputs,) = interpret(host, {"x": np.zeros(3)})
    assert np.isnan(outputs["y"]).all()
    assert (outputs["n"] == -1).all()


COLLECTIVES = """
host @all(%x: f32[2@x, 4]) -> (%s: f32[4], %g: f32[2, 4], %r: f32[4@x], %b: f32[1, 4], %a: f32[2@x, 4], %m: f32[4]) mesh(x=2) {
  all_reduce sum %x -> %s on x
  all_gather %x -> %g on x
  reduce_scatter max %x -> %r on x
  broadcast %x -> %b from 1 on x
  all_reduce avg %x -> %m on x
  fill %a with 2.5
}
"""


def test_collectives() -> None:
    x = np.array([[1, 2, 3, 4], [8, 7, 1, 0]], np.float32)
    for rank, outputs in enumerate(interpret(host_text.parse(COLLECTIVES), {"x": x})):
        np.testing.assert_array_equal(outputs["s"], x.sum(0))
        np.testing.assert_array_equal(outputs["g"], x)
        np.testing.assert_array_equal(outputs["r"], x.max(0)[2 * rank : 2 * rank + 2])
        np.testing.assert_array_equal(outputs["b"], x[1:])
        np.testing.assert_array_equal(outputs["m"], x.mean(0))
        np.testing.assert_array_equal(outputs["a"], np.full((1, 4), 2.5))
