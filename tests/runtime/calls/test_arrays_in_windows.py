"""Arrays of `group.empty`, which peers access in place. Other arrays are copied if peers access them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_counters import counted

import hostweave as hw
from hostweave.base.errors import ArgumentError, ExecutionError, ProgramError
from hostweave.check.check import check
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.runtime import windows
from hostweave.runtime.cpu import seeded
from hostweave.runtime.windows import WindowArray
from hostweave.types.tensor import block_of

M, K = 12, 24
PEER = hw.Options(transport="peer")


@cache
def shared(ranks: int) -> tuple[Any, hw.Program]:
    """Returns a fusion and its program, which gather an input, an output, and the weights of a block that is called twice."""

    @hw.block(x=hw.f32["M", "K"], w=hw.f32["K@x", "K"])
    def layer(x, w):  # type: ignore[no-untyped-def]
        return hw.clip(hw.matmul(x, hw.reshard(w, "K", "K")), -1, 1)

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "K"], w=hw.f32["K@x", "K"], v=hw.f32["K@x", "K"])
    def shared(x, w, v):  # type: ignore[no-untyped-def]
        h = hw.relu(x)
        return layer(layer(hw.reshard(x, "M", "K"), w), v), h, hw.reshard(h, "M", "K")

    return shared, hw.compile(shared, options=PEER)


def arrays_of(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.integers(-1, 2, shape).astype("f4") for name, shape in {"x": (M, K), "w": (K, K), "v": (K, K)}.items()}


def call(ranks: int, seed: int, in_windows: Sequence[str], group: hw.Group, bound: Sequence[str] = ()) -> None:
    """Makes one call of a rank, and compares the results. The inputs and outputs named by `in_windows` are in windows."""
    fusion, program = shared(ranks)
    arrays = arrays_of(seed)
    made = {name: group.empty((K // ranks if name in "wv" else M // ranks, K), hw.f32) for name in in_windows}
    given = {}
    for value in fusion.inputs:
        block = arrays[value.name][block_of(value.type, fusion.mesh, group.rank, arrays[value.name].shape)]
        given[value.name] = made.get(value.name, np.empty_like(block))
        given[value.name][...] = block
    out = np.empty((M, K), "f4"), made.get("h", np.empty((M // ranks, K), "f4")), np.empty((M, K), "f4")
    program.bind(**{name: given.pop(name) for name in bound})(**given, out=out)
    want = run_reference(fusion, arrays)
    rows = slice(group.rank * M // ranks, (group.rank + 1) * M // ranks)
    for got, wanted in zip(out, (want[0], want[1][rows], want[2]), strict=True):
        np.testing.assert_array_equal(got, wanted)


def copied(ranks: int, *more: Any, seed: int = 0) -> int:
    """Number of bytes that all ranks together copy in one call."""
    shared(ranks)  # Without this call, each thread would compile the program.
    provider, before = hw.Threads(ranks), counted()["copied_bytes"]
    provider.run(lambda rank: call(ranks, seed, *more[:1], hw.init(provider), *more[1:]))
    return counted()["copied_bytes"] - before


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_arrays_in_windows_are_not_copied(ranks: int) -> None:
    """Ranks send inputs from any memory, so inputs are never copied. Peers read the output %h, so %h is copied unless it is in a window."""
    all_of_them, h = copied(ranks, ()), 4 * M * K if ranks > 1 else 0
    if ranks == 2:
        assert copied(ranks, ("x", "h")) == all_of_them - h
    assert copied(ranks, ("x", "w", "v", "h")) == all_of_them - h
    assert copied(ranks, ("x", "w", "v", "h"), ("w", "v")) == all_of_them - h
    assert copied(ranks, ("w",)) == all_of_them  # w is an input.


def test_in_random_schedules() -> None:
    """Ranks may be in different calls while windows are written and freed."""
    shared(3)  # Without this call, each thread would compile the program.
    provider = hw.Threads(3)

    def rank(rank: int) -> None:
        group = hw.init(provider)
        for seed in range(3):
            call(3, seed, ("x", "w", "v", "h"), group)
            call(3, seed, (), group)

    for seed in range(4):
        with seeded(seed, check_dependencies=True):
            provider.run(rank)


def test_the_ir_names_arrays_in_windows() -> None:
    fusion, program = shared(2)
    host = hw.compile(fusion, options=hw.Options(transport="peer", windows=("x", "v", "w", "h"))).host
    assert host.windows == ("x", "w", "v", "h")
    assert HostProgram.parse(str(host)) == host
    check(host)
    assert "function @layer(%x: f32[M, K], %w: f32[K@x, K] in window)" in str(host)
    assert "get %x at" in str(host)
    assert "packed" not in str(host)
    elsewhere = str(host).replace("%v: f32[K@x, K] in window)", "%v: f32[K@x, K])")
    with pytest.raises(ProgramError) as caught:
        hw.compile(HostProgram.parse(elsewhere))
    assert "%v is not in a window, but @layer takes %w in a window: use allocate_window" in str(caught.value)
    assert not program.host.windows


def test_captured_calls_and_calls_with_views() -> None:
    provider = hw.Threads(2)

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K", "K"])
    def gather(x, w):  # type: ignore[no-untyped-def]
        return hw.matmul(hw.reshard(x, "M", "K"), w)

    program = hw.compile(gather, options=PEER)

    def rank(rank: int) -> None:
        group = hw.init(provider)
        both = group.empty((2, 3, 4), hw.f32)
        both[...] = np.arange(24).reshape(2, 3, 4) + 100 * rank
        second = both[1]  # The array has the same offset on both ranks.
        want = np.concatenate([np.arange(12, 24).reshape(3, 4) + 100 * other for other in range(2)])
        eye = np.eye(4, dtype="f4")
        np.testing.assert_array_equal(program(second, eye), want)
        step = program.capture(second, eye)
        second += 1
        np.testing.assert_array_equal(step(), want + 1)
        del both
        gc.collect()
        np.testing.assert_array_equal(program(second, eye), want + 1)

    provider.run(rank)
    assert [one.compiled.variant for one in program.variants] == ["for x in windows"]


def test_lifetime_of_memory() -> None:
    provider = hw.Threads(2)
    kept: list[np.ndarray] = []

    def rank(rank: int) -> None:
        group = hw.init(provider)
        group.empty((1,), hw.u8)
        before = counted()["live_bytes"] if rank == 0 else 0
        array = group.empty((1 << 20,), hw.f32)
        array[:] = rank
        group.empty((0, 3), hw.bf16, "cpu")
        part = array[5:]
        del array
        assert (part == rank).all()
        kept.append(part)
        group.close()
        assert before >= 0
        assert (part == rank).all()

    provider.run(rank)
    with_both = counted()["live_bytes"]
    kept.clear()
    gc.collect()
    again = hw.Threads(1)
    again.run(lambda _: hw.init(again).empty((1,), hw.f32).fill(0))  # Another group can allocate after the memory was freed.
    assert counted()["live_bytes"] <= with_both - 2 * (4 << 20) + (2 << 20)


def test_dlpack() -> None:
    """Exports an array in a window to other libraries, by DLPack and by `__cuda_array_interface__`. Host memory replaces GPU memory."""

    class OnHost(WindowArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    memory, module = np.arange(6, dtype=np.int16), windows.memory_module("cpu")
    owner = SimpleNamespace(address=memory.ctypes.data)
    array = OnHost(owner, module, (2, 3), hw.i16, 0)
    np.testing.assert_array_equal(np.from_dlpack(array), memory.reshape(2, 3))
    assert repr(array) == "<array i16[2, 3] in a window, on GPU 0>"
    assert array.__cuda_array_interface__["typestr"] == "<i2"
    references = sys.getrefcount(owner)
    array.__dlpack__(stream=1)  # Nothing consumes this capsule.
    assert sys.getrefcount(owner) == references
    with pytest.raises(AttributeError, match=r"bf16 has no typestr of __cuda_array_interface__; use __dlpack__"):
        _ = WindowArray(owner, module, (2, 3), hw.bf16, 0).__cuda_array_interface__


# --- mistakes ---------------------------------------------------------------------------------------------------------


def message_of(ranks: int, mistake: Any, error: type[Exception] = ArgumentError) -> str:
    """All ranks must raise an error. Returns the message of the first error."""
    provider, told = hw.Threads(ranks), list[str]()

    def rank(rank: int) -> None:
        with pytest.raises(error) as caught:
            mistake(hw.init(provider, timeout=20))
        told.append(str(caught.value))

    provider.run(rank)
    return told[0]


WRONG = {
    "a text": (
        lambda group: group.empty("ab", hw.f32),
        "shape='ab' is not a tuple of ints of at least 0; pass the shape of this rank's array",
    ),
    "a negative size": (lambda group: group.empty((2, -1), hw.f32), "shape=(2, -1) is not a tuple of ints of at least 0"),
    "no shape": (lambda group: group.empty(None, hw.f32), "shape=None is not a tuple of ints of at least 0"),
    "a dtype of NumPy": (lambda group: group.empty(3, np.float32), "is not a dtype of Hostweave; pass one such as hw.f32 or hw.bf16"),
    "an unknown target": (lambda group: group.empty(3, hw.f32, target="rocm"), "there is no target 'rocm'; the targets are cpu and cuda"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    mistake, message = WRONG[case]
    assert message in message_of(1, mistake)


def test_ranks_that_disagree() -> None:
    told = message_of(2, lambda group: group.empty(3, hw.f32 if group.rank else hw.f16), ExecutionError)
    assert "rank 1 calls group.empty of f32 for cpu on default, and rank 0 calls group.empty of f16 for cpu on default" in told

    def crossed(group: hw.Group) -> None:
        x, other = (group.empty((M // 2, K), hw.f32) for _ in range(2))
        weights = {name: np.zeros((K // 2, K), "f4") for name in "wv"}
        shared(2)[1](x=other if group.rank else x, **weights)

    told = message_of(2, crossed, ExecutionError)
    assert "rank 1 and rank 0 pass arrays from different calls of group.empty; pass arrays of one call, with equal offsets" in told


def test_a_program_for_windows_refuses_other_arrays() -> None:
    fusion = shared(2)[0]
    program = hw.compile(fusion, options=hw.Options(transport="peer", windows=("x", "h")))
    plain = [np.zeros((size // 2, K), "f4") for size in (M, K, K)]
    remedy = "is not in a window, but the program was compiled for an array in a window; pass an array of group.empty"
    assert f"shared: x: {remedy}" in message_of(2, lambda group: program(*plain))
    told = message_of(2, lambda group: program(group.empty(plain[0].shape, hw.f32), *plain[1:]))
    assert f"shared: out=: h: {remedy}" in told
    with pytest.raises(ArgumentError) as caught:
        program.run(**arrays_of(0))
    assert str(caught.value) == (
        "shared: run: the arrays of x, h must be in windows of a group; call the program in a group, or omit Options(windows=...)"
    )
    with pytest.raises(ProgramError, match="shared: Options: windows: there is no input or output z; omit it"):
        hw.compile(fusion, options=hw.Options(windows=("z",)))
    with pytest.raises(ProgramError, match=r"Options: windows='x' is not a tuple of names; write windows=\(\"x\",\)"):
        hw.Options(windows="x")  # type: ignore[arg-type]


def test_communicators_of_the_application() -> None:
    group = hw.init(hw.Communicators({}, 0, 2), group="adopted")
    with pytest.raises(ArgumentError) as caught:
        group.empty(3, hw.f32)
    assert str(caught.value) == ("group.empty: hw.Communicators has no store; create the group by another provider")
    group.close()
