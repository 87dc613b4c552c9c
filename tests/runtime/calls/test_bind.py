"""`program.bind`: inputs that are bound to a program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.runtime.arrays import ForeignBuffer
from hostweave.targets.target import CPU_DEVICE

RANDOM = np.random.default_rng(0)
X, W, B = (RANDOM.integers(-4, 5, shape).astype(np.float32) for shape in ((12, 8), (8, 12), (12,)))
NOWHERE = ForeignBuffer(0, (12,), hw.f32, CPU_DEVICE)


def affine_on(ranks: int) -> hw.Program:
    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "K"], w=hw.f32["K", "12@x"], b=hw.f32[12])
    def affine(x: hw.Tensor, w: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
        return hw.reshard(hw.matmul(x, hw.reshard(w, "K", 12)) + b, "M@x", 12)

    return hw.compile(affine)


PROGRAMS = {ranks: affine_on(ranks) for ranks in (1, 2, 4)}


def own(array: np.ndarray, rank: int, ranks: int, axis: int) -> np.ndarray:
    return np.ascontiguousarray(np.split(array, ranks, axis)[rank])


@pytest.mark.parametrize("ranks", PROGRAMS)
def test_every_call_uses_the_bound_inputs(ranks: int) -> None:
    """Inputs are bound in one or several steps. Other inputs are passed by position and by name. Calls with and without bound inputs
    alternate."""
    program = PROGRAMS[ranks]
    bound, other = program.bind(w=W).bind(b=B), program.bind(b=2 * B, w=W)
    np.testing.assert_array_equal(bound.run(X), X @ W + B)
    np.testing.assert_array_equal(other.run(x=X[:ranks]), X[:ranks] @ W + 2 * B)
    np.testing.assert_array_equal(program.bind(x=X).run(W, b=B), X @ W + B)
    np.testing.assert_array_equal(program.run(X, W, B), X @ W + B)
    everything = program.bind(x=X, w=W, b=B)
    np.testing.assert_array_equal(everything.run(), X @ W + B)
    (flight,) = bound.run_in_flight([{"x": X}])
    np.testing.assert_array_equal(np.concatenate(flight), X @ W + B)

    def on_rank(rank: int) -> None:
        hw.init(threads)
        w, b, x = own(W, rank, ranks, 1), B.copy(), own(X, rank, ranks, 0)
        mine, others = program.bind(w=w, b=b), program.bind(w=2 * w, b=b)
        for scale in (1, 3):
            b *= scale  # A bound input is not copied. A call reads the current values of the input.
            want = own(X @ W + scale * B, rank, ranks, 0)
            np.testing.assert_array_equal(mine(x), want)
            np.testing.assert_array_equal(mine(x=x, out=np.empty_like(want)), want)
            np.testing.assert_array_equal(others(x), own(2 * (X @ W) + scale * B, rank, ranks, 0))
            np.testing.assert_array_equal(program(x, w, b=b), want)
            np.testing.assert_array_equal(mine(x[:1]), want[:1])
        with pytest.raises(ArgumentError, match="affine: b: the data pointer is null"):
            program(x, w, NOWHERE)
        with pytest.raises(ArgumentError, match="out=: y and b overlap in memory"):
            program.bind(b=(shared := np.zeros(12 * len(x), np.float32))[:12])(x, w, out=shared.reshape(len(x), 12))
        np.testing.assert_array_equal(mine(x), want)

    threads = hw.Threads(ranks)
    threads.run(on_rank)


def _torch() -> Any:
    return import_module("torch")


MISTAKES: dict[str, tuple[Callable[[hw.Program], Any], str]] = {
    "unknown": (lambda p: p.bind(weight=W), "affine: bind: weight: there is no such input; use one of x, w, b"),
    "unknown, near": (lambda p: p.bind(ww=W), r"affine: bind: ww: there is no such input; did you mean w\?"),
    "twice": (
        lambda p: p.bind(w=W).bind(w=W),
        "affine: bind: w: is bound already; omit it, or bind the original program",
    ),
    "again": (
        lambda p: p.bind(w=W).run(X, b=B, w=W),
        "affine: argument w is bound; omit it, or call the program without this binding",
    ),
    "too many": (lambda p: p.bind(w=W).run(X, B, W), r"affine: 3 positional arrays for 2 inputs; the program takes x: .*, b: "),
    "missing": (lambda p: p.bind(w=W).run(X), "affine: missing argument b; the program takes x: .*, b: "),
    "fixed size": (
        lambda p: p.bind(w=W[:, :5]),
        r"affine: bind: w: dim 1 is 5; it must be 12, or 6 on a rank; pass an array of type f32\[K, 12@x\]",
    ),
    "replicated size": (lambda p: p.bind(b=B[:6]), r"affine: bind: b: dim 0 is 6; it must be 12; pass an array of type f32\[12\]"),
    "dims": (lambda p: p.bind(b=W), r"affine: bind: b: expected f32\[12\], got f32\[8, 12\]; pass an array of 1 dims"),
    "dtype": (lambda p: p.bind(b=B.astype(np.float64)), r"affine: bind: b: expected f32\[12\], got f64\[12\]; cast it"),
    "no memory": (lambda p: p.bind(b=NOWHERE), "affine: bind: b: the data pointer is null, but the array has elements; pass an array with"),
    "no array": (lambda p: p.bind(b=[1.0] * 12), "affine: bind: b: expected an array, got list; pass a NumPy"),
    "layout": (lambda p: p.bind(w=_torch().eye(8, 12).to_sparse()), r"affine: bind: w: its layout is torch.sparse_coo; call .to_dense\(\)"),
    "grad": (lambda p: p.bind(b=_torch().ones(12, requires_grad=True)), r"affine: bind: b: requires grad, but programs have no gradients"),
    "device": (lambda p: p.bind(b=_torch().ones(12, device="meta")), "affine: bind: b: it is on meta"),
    "other sizes": (lambda p: p.bind(w=W).run(X[:, :4], B), "affine: w: dim 0 is 8; it must be 4|affine: w: K is 8 here and 4 in x"),
}


OF_TORCH = ("layout", "grad", "device")


@pytest.mark.parametrize("mistake", [pytest.param(name, marks=[pytest.mark.extra("torch")] * (name in OF_TORCH)) for name in MISTAKES])
def test_mistakes(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(ArgumentError, match=f"^{message}"):
        make(PROGRAMS[2])


def test_a_wrong_block_on_one_rank() -> None:
    """All ranks raise an error. The next call works."""
    program, threads = PROGRAMS[2], hw.Threads(2)

    def on_rank(rank: int) -> list[str]:
        hw.init(threads)
        x, w = own(X, rank, 2, 0), own(W, rank, 2, 1)
        messages = []
        for wrong in (W[:, ::2], W if rank else w):
            with pytest.raises((ArgumentError, ExecutionError)) as raised:
                program.bind(w=wrong, b=B)(x)
            messages.append(str(raised.value))
        np.testing.assert_array_equal(program.bind(w=w, b=B)(x), own(X @ W + B, rank, 2, 0))
        return messages

    for strided, whole in threads.run(on_rank):
        assert "w: is not contiguous, but calls do not copy; pass a contiguous copy" in strided
        assert "w: rank" in whole or "w: expected" in whole or "rank 1 cannot continue" in whole


def test_threads_share_a_bound_program() -> None:
    bound = PROGRAMS[2].bind(w=W, b=B)
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(bound.run(X))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for result in results:
        np.testing.assert_array_equal(result, X @ W + B)


def test_calls_of_threads_of_one_rank_are_ordered() -> None:
    """Calls of several threads for the same rank run one after another. This also holds for the first calls, which have different sizes."""
    program, wrong = affine_on(1), []
    bound = program.bind(w=W, b=B)
    group = hw.init(group="of threads that take turns")

    def call(rows: int) -> None:
        x, step = X[:rows].copy(), None
        for turn in range(50):
            results = [program(x, W, B, group=group), bound(x, group=group)]
            step = step or bound.capture(x, group=group)
            wrong.extend((rows, turn) for y in (*results, step()) if not np.array_equal(y, x @ W + B))

    try:
        threads = [threading.Thread(target=call, args=(rows,)) for rows in (2, 3, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        group.close()
    assert not wrong


def test_a_bound_program_shares_its_module() -> None:
    program = affine_on(1)
    bound = program.bind(w=W, b=B)
    np.testing.assert_array_equal(bound.run(X), X @ W + B)
    assert repr(bound) == "<hostweave program affine for cpu on mesh(x=1) with 2 inputs bound>"
    assert (bound.module, bound.source) == (program.module, program.source)
    bound.close()
    with pytest.raises(ExecutionError, match="affine: the program is closed; compile it again"):
        program.run(X, W, B)
    with pytest.raises(ExecutionError, match="affine: the program is closed; compile it again"):
        bound(X)
