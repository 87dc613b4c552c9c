"""Matmuls with gathered weights, shard by shard. Nothing is copied, and results equal those of NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.host_ir import ir, tree
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.machine import H200

# A machine with slow links and slow matmuls. On this machine, the cost model overlaps even gathers of small matrices.
LINKS = tuple(replace(link, points=((0, 1e-6), (1e6, 20e-3))) for link in H200.links)
SLOW = replace(H200, name="slow", multiprocessors=1, flops=2e9, wave=0.0, launch=1e-6, links=LINKS)
SIZES = {"M": 48, "K": 24, "N": 48}
WAYS = {"auto": "put", "two_sided": "all_gather"}
CASES = [(ranks, is_turned, transport) for ranks in (2, 3, 4, 8) for is_turned in (False, True) for transport in WAYS]


def layers_of(ranks: int, is_turned: bool) -> hw.Fusion:
    """Two residual MLP blocks. Weights are sharded by columns, or stored transposed as in PyTorch and sharded by rows."""
    up, down = (hw.f32["N@dp", "K"], hw.f32["K@dp", "N"]) if is_turned else (hw.f32["K", "N@dp"], hw.f32["N", "K@dp"])
    types = {"up_0": up, "down_0": down, "up_1": up, "down_1": down}

    @hw.fusion(mesh=hw.Mesh(dp=ranks), x=hw.f32["M@dp", "K"], first=hw.f32["K", "K"], bias=hw.f32["N@dp"], **types)
    def layers(x: hw.Tensor, first: hw.Tensor, bias: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
        x, bias = hw.matmul(x, first), hw.reshard(bias, "N").named("all_bias")
        for i in range(2):
            up, down = (hw.reshard(w, *w.shape).named(f"all_{name}") for name in (f"up_{i}", f"down_{i}") for w in [weights[name]])
            up, down = (up.T, down.T) if is_turned else (up, down)
            x = x + hw.matmul(hw.relu(hw.matmul(x, up) + bias), down)
        return x

    return layers


def options_of(ranks: int, transport: str) -> hw.Options:
    """Options with which matmuls process gathered weights shard by shard."""
    names = ("up_0", "down_0", "up_1", "down_1") if ranks > 1 else ()
    choices = {f"@layers %all_{name}": f"{WAYS[transport]}({ranks})" for name in names}
    return hw.Options(sizes=SIZES, machine=SLOW, transport=transport, choices=choices)


def arrays_of(sizes: dict[str, int], is_turned: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"x": "MK", "first": "KK", "bias": "N", "up_0": "KN", "down_0": "NK", "up_1": "KN", "down_1": "NK"}
    made = {name: random.integers(-1, 2, [sizes[size] for size in dims]).astype(np.float32) for name, dims in shapes.items()}
    return {name: array.T.copy() if is_turned and name[-1] in "01" else array for name, array in made.items()}


def wanted(arrays: dict[str, np.ndarray], is_turned: bool) -> np.ndarray:
    x = arrays["x"] @ arrays["first"]
    for i in range(2):
        up, down = (arrays[name].T if is_turned else arrays[name] for name in (f"up_{i}", f"down_{i}"))
        x = x + np.maximum(x @ up + arrays["bias"], 0) @ down
    return x


@pytest.mark.parametrize(("ranks", "is_turned", "transport"), [*CASES, (1, False, "auto"), (1, True, "auto")])
def test_result(ranks: int, is_turned: bool, transport: str) -> None:
    program = hw.compile(layers_of(ranks, is_turned), options=options_of(ranks, transport))
    arrays = arrays_of(SIZES, is_turned)
    for schedule in (parallel(check_dependencies=True), seeded(ranks)):
        with schedule:
            np.testing.assert_array_equal(program.run(**arrays), wanted(arrays, is_turned))
    program.close()


@pytest.mark.parametrize(("ranks", "is_turned", "transport"), CASES)
def test_nothing_is_copied(ranks: int, is_turned: bool, transport: str) -> None:
    """Neither the local shard nor received shards are copied. Matmuls keep their epilogues."""
    host = lower(layers_of(ranks, is_turned), options_of(ranks, transport))
    posted = [i for i in tree.walk(host.body) if isinstance(i, ir.Put | ir.AllGather)]
    assert not [i for i in tree.walk(host.body) if i.copies]
    assert not host.kernels
    assert len(posted) == 5
    assert [(bool(i.accumulate), i.activation) for i in tree.walk(host.body) if isinstance(i, ir.Matmul)] == [
        (False, ""),
        *[(False, "relu"), (True, "")] * 2,
    ]


@pytest.mark.parametrize("transport", WAYS)
@pytest.mark.parametrize("sizes", [{"N": 50}, {"M": 45}, {"K": 25}, {"M": 1, "N": 7, "K": 5}], ids=str)
def test_sizes_that_ranks_do_not_share_evenly(sizes: dict[str, int], transport: str) -> None:
    """If a weight has uneven shards, a call first gathers the weight into one buffer. If the stated N is uneven, the choices in `options`
    are refused."""
    fusion, options = layers_of(4, is_turned=False), options_of(4, transport)
    arrays = arrays_of({**SIZES, **sizes}, is_turned=False)
    program = hw.compile(fusion, options=options)
    np.testing.assert_array_equal(program.run(**arrays), wanted(arrays, is_turned=False))
    program.close()
    if sizes.get("N", 48) % 4:
        with pytest.raises(ProgramError, match=r"there is no choice named @layers %all_|%all_.*is not possible; use one of none"):
            hw.compile(fusion, options=replace(options, sizes={**SIZES, **sizes}))


def test_explain_names_the_choice() -> None:
    said = hw.compile(layers_of(2, is_turned=True), options=options_of(2, "auto")).explain()
    assert "overlapped with other ops on a separate stream by put, peer, and multiplied shard by shard, predicted" in said
    said = hw.compile(layers_of(2, is_turned=True), options=options_of(2, "two_sided")).explain()
    assert "overlapped with other ops on a separate stream by all_gather, two_sided, and multiplied shard by shard, predicted" in said


@pytest.mark.parametrize("transport", WAYS)
def test_columns_of_a_batch_end_with_bias_and_activation(transport: str) -> None:
    """The rows of all matrices of a batch have the same stride, so the product of the batch is one matmul."""

    @hw.fusion(mesh=hw.Mesh(dp=2), x=hw.f32[2, "M@dp", 24], first=hw.f32[24, 24], w=hw.f32["48@dp", 24], bias=hw.f32[48])
    def batch(x: hw.Tensor, first: hw.Tensor, w: hw.Tensor, bias: hw.Tensor) -> hw.Tensor:
        return hw.relu(hw.matmul(hw.matmul(x, first), hw.reshard(w, 48, 24).named("whole").T) + bias)

    choices = {"@batch %whole": f"{WAYS[transport]}(2)"}
    program = hw.compile(batch, options=hw.Options(sizes={"M": 48}, machine=SLOW, transport=transport, choices=choices))
    assert "bias %bias_i activation relu -> %y_i" in program.host_ir
    random = np.random.default_rng(0)
    x, first, w, bias = (random.integers(-2, 3, shape).astype(np.float32) for shape in ((2, 48, 24), (24, 24), (48, 24), (48,)))
    np.testing.assert_array_equal(program.run(x, first, w, bias), np.maximum(x @ first @ w.T + bias, 0))
    program.close()
