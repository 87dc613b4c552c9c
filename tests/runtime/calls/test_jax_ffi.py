"""Programs inside jax.jit, by `Program.as_jax_ffi`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from launched_ranks import run_processes
from processes import as_rank, free_port

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.build.cuda import gpus

jax = pytest.importorskip("jax", reason="needs JAX: pip install '.[jax]'")

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of JAX


def mlp_on(ranks: int) -> hw.Fusion:
    @hw.fusion(mesh=hw.Mesh(tp=ranks), x=hw.f32["M", "K"], w=hw.f32["K", "N@tp"], v=hw.f32["N@tp", "K"])
    def mlp(x, w, v):  # type: ignore[no-untyped-def]
        hidden = hw.relu(x @ w)
        return x + hidden @ v, hw.sum(hidden, 1)

    return mlp


MLP = hw.compile(mlp_on(1))
X, W, V = (np.random.default_rng(0).standard_normal(shape).astype("f4") for shape in ((6, 8), (8, 12), (12, 8)))


def wanted(x: Any) -> tuple[Any, Any]:
    hidden = np.maximum(x @ W, 0)
    return x + hidden @ V, hidden.sum(1)


@pytest.fixture
def group() -> Iterator[hw.Group]:
    made = hw.init(hw.Threads(1))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # Otherwise, JAX uses a GPU if there is one.
        yield made
    made.close()


@pytest.mark.usefixtures("group")
def test_a_program_in_a_jitted_function() -> None:
    mlp = MLP.as_jax_ffi()

    @jax.jit
    def function(x: Any) -> Any:
        y, total = mlp(jax.numpy.sin(x), W, V)
        again, _ = mlp(y * 2, W, V)
        return again, total

    first, total = wanted(np.sin(X))
    for got, want in zip(function(X), (wanted(2 * first)[0], total), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(mlp(X[:3], W, V)[0], wanted(X[:3])[0], rtol=1e-5, atol=1e-5)  # another size, without jit


# Script of one rank. The first weight is sharded by columns. The second and the third call depend only on the first call, so JAX may run
# these two calls in either order.
RANK = """
import sys
import jax, numpy as np
import hostweave as hw
target = "TARGET"

@hw.fusion(mesh=hw.Mesh(tp=2), x=hw.f32["M", "K"], w=hw.f32["K", "N@tp"], v=hw.f32["N@tp", "K"])
def mlp(x, w, v):
    return x + hw.relu(x @ w) @ v

group = hw.init(device=0)
call = hw.compile(mlp, target=target).as_jax_ffi()
x, w, v = (np.random.default_rng(0).standard_normal(shape).astype("f4") for shape in ((6, 8), (8, 12), (12, 8)))
of_rank = slice(6 * group.rank, 6 * group.rank + 6)

@jax.jit
def function(x, w, v):
    first = call(x, w, v)
    return call(first, w, v) - call(first * 2, w, v)

def wanted(x):
    return x + np.maximum(x @ w, 0) @ v

first = wanted(x)
want = wanted(first) - wanted(first * 2)
for _ in range(3):
    got = function(x, np.ascontiguousarray(w[:, of_rank]), v[of_rank])
    assert np.abs(got - want).max() < 1e-2 * np.abs(want).max(), np.abs(got - want).max()
print("right")
group.close()
"""


def test_one_process_per_rank() -> None:
    port = free_port()
    ranks = [as_rank(rank, 2, port) | {"JAX_PLATFORMS": "cpu"} for rank in range(2)]
    assert run_processes(RANK.replace("TARGET", "cpu"), ranks) == ["right"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(len(gpus()) < 2, reason="needs 2 GPUs")
def test_on_the_stream_of_xla() -> None:
    port = free_port()
    ranks = [as_rank(r, 2, port) | {"CUDA_VISIBLE_DEVICES": str(r), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} for r in range(2)]
    outputs = run_processes(RANK.replace("TARGET", "cuda"), ranks, timeout=120)
    assert [output.splitlines()[-1] for output in outputs] == ["right"] * 2


def donates() -> Any:
    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["M"], donate="x")
    def updated(x):  # type: ignore[no-untyped-def]
        return x + 1

    return hw.compile(updated).as_jax_ffi()


def widened(x: Any) -> Any:
    @hw.fusion(x=hw.i64["M"])
    def wide(x):  # type: ignore[no-untyped-def]
        return x + 1

    return hw.compile(wide).as_jax_ffi()(x)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: MLP.as_jax_ffi()(X.astype("i4"), W, V), r"^mlp: x: expected f32\[M, K\], got i32\[6, 8\]; cast it"),
    "dims": (lambda: MLP.as_jax_ffi()(X[0], W, V), r"^mlp: x: expected f32\[M, K\], got f32\[8\]; pass an array of 2 dims"),
    "shape": (lambda: MLP.as_jax_ffi()(X, W[:5], V), r"^mlp: w: K is 5 here and 8 in x; pass arrays that agree"),
    "count": (lambda: MLP.as_jax_ffi()(X, W), r"^mlp: takes 3 arrays \(x: f32\[M, K\], w: .*\), not 2"),
    "64 bits": (
        lambda: widened(np.arange(4)),
        r"^wide: as_jax_ffi: JAX has no arrays of 64-bit dtypes by default \(x: i64\[M\], y: i64\[M\]\);",
    ),
    "no array": (lambda: MLP.as_jax_ffi()(X, 3, V), r"^mlp: w: expected an array, got int; pass a JAX array"),
    "donated": (donates, r"^updated: as_jax_ffi: donates x, but JAX arrays cannot change; omit donate="),
    "no GPU": (
        lambda: hw.compile(mlp_on(1), target="cuda").as_jax_ffi()(X, W, V),
        r"^mlp: as_jax_ffi: is for the target cuda, but JAX has no such devices",
    ),
}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(call: Callable[[], Any], message: str) -> None:
    if "no such devices" in message and gpus():
        pytest.skip("there are GPUs here")
    with pytest.raises(ArgumentError, match=message):
        call()


def test_without_a_group() -> None:
    with pytest.raises(ExecutionError, match=r"^mlp: this process has not joined a group; call hw.init first"):
        MLP.as_jax_ffi()(X, W, V)


def test_ranks_that_are_threads() -> None:
    def rank_main(rank: int) -> str:
        hw.init(threads)
        with pytest.raises(ArgumentError, match="as_jax_ffi: ranks are threads, but JAX needs one process per device; start"):
            hw.compile(mlp_on(2)).as_jax_ffi()(X, W[:, :6], V[:6])
        return "refused"

    threads = hw.Threads(2)
    assert threads.run(rank_main) == ["refused"] * 2


def test_a_run_inside_of_jit_is_refused() -> None:
    remedy = r"mlp: x: is traced by JAX and has no values; inside jax.jit use program.as_jax_ffi\(\)"
    with pytest.raises(ArgumentError, match=remedy):
        jax.jit(MLP.run)(X, W, V)


@pytest.mark.usefixtures("group")
def test_errors_of_a_call_have_their_message() -> None:
    program = hw.compile(mlp_on(1))
    function = jax.jit(program.as_jax_ffi())
    function(X, W, V)
    program.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="mlp: the program is closed; compile it again"):
        jax.block_until_ready(function(X, W, V))


def test_each_launch_of_a_captured_call_gives_an_array() -> None:
    """JAX arrays are immutable."""

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.f32["N"], y=hw.f32["N"])
    def added(x: hw.Tensor, y: hw.Tensor) -> hw.Tensor:
        return x + y

    group = hw.init()
    x, y = jax.numpy.ones(4), np.zeros(4, np.float32)
    step = hw.compile(added).capture(x, y)
    first = step()
    y += 1
    np.testing.assert_array_equal(step(), [2] * 4)
    np.testing.assert_array_equal(first, [1] * 4)
    group.close()
