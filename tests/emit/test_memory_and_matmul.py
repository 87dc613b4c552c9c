"""Copies, fills and matmuls on views, on the CPU device, compared with NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from interpret import interpret

from hostweave.api import compile
from hostweave.host_ir.ir import HostProgram

COPIES = """
host @copies(%x: f32[M, N], %t: f32[K, M, N]) -> (
    %all: f32[M, N], %half: f32[M, N/2], %odd: f32[M], %turned: f32[N, M], %inner: f32[K, N, M/3], %set: f32[M, N], %band: f32[K, M, N]
) mesh() {
  copy %x -> %all
  %right = chunk %x[1: 1 of 2]
  copy %right -> %half
  %column = select %x[1: 1]
  copy %column -> %odd
  %xt = permute %x by [1, 0]
  copy %xt -> %turned
  %tm = chunk %t[1: 2 of 3]
  %tt = permute %tm by [0, 2, 1]
  copy %tt -> %inner
  fill %set with 0.0
  %left = chunk %set[1: 0 of 2]
  fill %left with 2.5
  fill %band with -0.0
  %middle = chunk %band[1: 1 of 3]
  %source = chunk %t[1: 0 of 3]
  copy %source -> %middle
}
"""


def test_copies_and_fills_of_views() -> None:
    x = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    t = np.arange(5 * 6 * 8, dtype=np.float32).reshape(5, 6, 8)
    program = compile(HostProgram.parse(COPIES))
    all_, half, odd, turned, inner, set_, band = program.run(x=x, t=t)
    program.close()
    np.testing.assert_array_equal(all_, x)
    np.testing.assert_array_equal(half, x[:, 4:])
    np.testing.assert_array_equal(odd, x[:, 1])
    np.testing.assert_array_equal(turned, x.T)
    np.testing.assert_array_equal(inner, t[:, 4:].transpose(0, 2, 1))
    np.testing.assert_array_equal(set_, np.hstack([np.full((6, 4), 2.5), np.zeros((6, 4))]))
    np.testing.assert_array_equal(band[:, 2:4], t[:, :2])
    assert np.signbit(band[:, 4:]).all()


LOOPS = """host @loops(%p: f32[2], %x: f32[M, 4], %e: f32[M, 0]) -> (%q: f32[2], %y: f32[M, 4], %f: f32[M, 0]) mesh() streams(loop[4]) {
  fork loop first 2
  for %i in 0..2 {
    stream loop[%i] {
      %p_i = select %p[0: %i]
      %q_i = select %q[0: %i]
      copy %p_i -> %q_i
    }
  }
  join loop first 2
  fork loop
  for %i in 0..M {
    stream loop[%i] {
      %b = allocate f32[4]
      %x_i = select %x[0: %i]
      %y_i = select %y[0: %i]
      copy %x_i -> %b
      copy %b -> %y_i
      %e_i = select %e[0: %i]
      %f_i = select %f[0: %i]
      copy %e_i -> %f_i
    }
  }
  join loop
}
"""


def test_loops_with_one_index_name_and_different_trips() -> None:
    """The second loop has a buffer for each stream, although the first loop has fewer iterations than streams."""
    program = compile(HostProgram.parse(LOOPS))
    p, x, e = np.arange(2, dtype=np.float32), np.arange(28, dtype=np.float32).reshape(7, 4), np.zeros((7, 0), np.float32)
    for got, want in zip(program.run(p=p, x=x, e=e), (p, x, e), strict=True):
        np.testing.assert_array_equal(got, want)
    assert "std::array<float*, 4>" in program.sources["program.h"]


MATMULS = """
host @matmuls(
    %a: {t}[M, K], %at: {t}[K, M], %b: {t}[K, N], %bt: {t}[N, K], %s: {t}[B, C, M, K], %v: {t}[B, 1, K, N], %e: {t}[M, 0], %f: {t}[0, N]
) -> (
    %plain: {t}[M, N], %both: {t}[M, N], %turned: {t}[N, M], %tall: {t}[B, C, M, N], %batched: {t}[B, C, M, N], %split: {t}[C, B, M, N],
    %row: {t}[B, C, 1, N], %part: {t}[M, N], %empty: {t}[M, N], %twice: {t}[M, N], %turned_twice: {t}[N, M], %batched_twice: {t}[C, B, M, N]
) mesh(x=1) streams(loop[2]) {
  matmul %a, %b -> %plain
  %a_of_t = permute %at by [1, 0]
  %b_of_t = permute %bt by [1, 0]
  matmul %a_of_t, %b_of_t -> %both
  %turned_t = permute %turned by [1, 0]
  matmul %a, %b_of_t -> %turned_t
  matmul %s, %b -> %tall
  matmul %s, %v -> %batched
  %s_swapped = permute %s by [1, 0, 2, 3]
  %v_swapped = permute %v by [1, 0, 2, 3]
  matmul %s_swapped, %v_swapped -> %split
  %first = chunk %s[2: 0 of M]
  matmul %first, %b -> %row
  fork loop
  for %i in 0..2 {
    stream loop[%i] {
      %b_i = chunk %b[1: %i of 2]
      %part_i = chunk %part[1: %i of 2]
      matmul %a, %b_i -> %part_i
    }
  }
  join loop
  matmul %e, %f -> %empty
  matmul %a, %b -> %twice
  matmul %a_of_t, %b_of_t accumulate %twice -> %twice
  %turned_twice_t = permute %turned_twice by [1, 0]
  matmul %a, %b scaled -2 accumulate %turned_t -> %turned_twice_t
  matmul %s_swapped, %v_swapped scaled 0.5 accumulate %split -> %batched_twice
}
"""


@pytest.mark.parametrize(("name", "dtype"), [("f64", np.float64), ("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_matmul_of_views(name: str, dtype: type) -> None:
    random = np.random.default_rng(1)
    shapes = {"a": (6, 5), "at": (5, 6), "b": (5, 4), "bt": (4, 5), "s": (2, 3, 6, 5), "v": (2, 1, 5, 4), "e": (6, 0), "f": (0, 4)}
    x = {key: random.integers(-2, 3, shape).astype(dtype) for key, shape in shapes.items()}
    program = compile(HostProgram.parse(MATMULS.replace("{t}", name)))
    results = program.run(**x)
    program.close()
    w = {key: value.astype(np.float64) for key, value in x.items()}
    wanted = {
        "plain": w["a"] @ w["b"],
        "both": w["at"].T @ w["bt"].T,
        "turned": (w["a"] @ w["bt"].T).T,
        "tall": w["s"] @ w["b"],
        "batched": w["s"] @ w["v"],
        "split": (w["s"] @ w["v"]).swapaxes(0, 1),
        "row": w["s"][:, :, :1] @ w["b"],
        "part": w["a"] @ w["b"],
        "empty": np.zeros((6, 4)),
        "twice": w["a"] @ w["b"] + w["at"].T @ w["bt"].T,
        "turned_twice": (w["a"] @ w["bt"].T - 2 * w["a"] @ w["b"]).T,
        "batched_twice": 1.5 * (w["s"] @ w["v"]).swapaxes(0, 1),
    }
    for (key, want), result in zip(wanted.items(), results, strict=True):
        np.testing.assert_array_equal(np.asarray(result, np.float64), want, err_msg=key)


EPILOGUES = """
host @epilogues(%a: {t}[B, M, K], %b: {t}[K, N], %r: {t}[B, M, N], %v: {t}[N], %e: {t}[M, 0], %f: {t}[0, N]) -> (
    %biased: {t}[B, M, N], %all: {t}[B, M, N], %smooth: {t}[B, M, N], %nothing: {t}[M, N], %part: {t}[M, N]
) mesh() {
  matmul %a, %b bias %v -> %biased
  matmul %a, %b scaled 0.5 accumulate %r bias %v activation relu -> %all
  matmul %a, %b accumulate %r activation gelu_tanh -> %smooth
  matmul %e, %f bias %v activation relu -> %nothing
  %a_0 = select %a[0: 0]
  %r_0 = select %r[0: 0]
  for %i in 0..2 {
    %b_i = chunk %b[1: %i of 2]
    %v_i = chunk %v[0: %i of 2]
    %r_i = chunk %r_0[1: %i of 2]
    %part_i = chunk %part[1: %i of 2]
    matmul %a_0, %b_i accumulate %r_i bias %v_i activation relu -> %part_i
  }
}
"""


@pytest.mark.parametrize(("name", "dtype"), [("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_epilogues(name: str, dtype: type) -> None:
    random = np.random.default_rng(2)
    shapes = {"a": (3, 6, 5), "b": (5, 4), "r": (3, 6, 4), "v": (4,), "e": (6, 0), "f": (0, 4)}
    x = {key: random.integers(-2, 3, shape).astype(dtype) for key, shape in shapes.items()}
    host = HostProgram.parse(EPILOGUES.replace("{t}", name))
    program = compile(host)
    results = program.run(**x)
    program.close()
    w = {key: value.astype(np.float64) for key, value in x.items()}
    sums = w["a"] @ w["b"] + w["r"]
    wanted = {
        "biased": w["a"] @ w["b"] + w["v"],
        "all": np.maximum(0.5 * w["a"] @ w["b"] + w["r"] + w["v"], 0),
        "smooth": sums / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (sums + 0.044715 * sums**3))),
        "nothing": np.maximum(np.broadcast_to(w["v"], (6, 4)), 0),
        "part": np.maximum(sums[0] + w["v"], 0),
    }
    (interpreted,) = interpret(host, x)
    for (key, want), result in zip(wanted.items(), results, strict=True):
        rtol = float(ml_dtypes.finfo(dtype).eps) if key == "smooth" else 0
        np.testing.assert_allclose(np.asarray(result, np.float64), want, rtol=rtol, atol=rtol, err_msg=key)
        np.testing.assert_allclose(np.asarray(interpreted[key], np.float64), want, rtol=rtol, atol=rtol, err_msg=key)
