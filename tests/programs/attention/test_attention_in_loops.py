"""Attention in chunk loops that receive blocks of keys from other ranks. A program requests a loop and its algorithm, or the compiler
chooses the loop. Heads may be sharded."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from attention_cases import by_torch
from compiled_fusions import compiled, expect, expect_every_way, lowered, random_arrays
from cuda_here import nccl

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.build.cuda import gpus
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir, tree
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.machine import H200
from hostweave.types.tensor import DType

ALGORITHMS = ("p2p", "put", "ring", "broadcast")


@cache
def in_loops(ranks: int, t: DType, algorithm: str, tp: int = 1) -> Fusion:
    """Causal attention with log-sum-exps, and unmasked attention of `rows` with smaller value heads."""
    heads, groups = f"{4 * tp}@tp", f"{2 * tp}@tp"

    @hw.fusion(
        mesh=hw.Mesh(tp=tp, cp=ranks),
        q=t["B", heads, "S@cp", 16],
        k=t["B", groups, "S@cp", 16],
        v=t["B", groups, "S@cp", 16],
        rows=t[heads, "U@cp", 16],
        keys=t[groups, "T@cp", 16],
        values=t[groups, "T@cp", 8],
    )
    def in_loops(q, k, v, rows, keys, values):  # type: ignore[no-untyped-def]
        def gathered(x, size):  # type: ignore[no-untyped-def]
            dims = [f"{2 * tp}@tp" if dim == x.ndim - 3 else x.type.shape[dim] for dim in range(x.ndim)]
            return hw.reshard(x, *map(str, dims)).stream(size, chunks=ranks, algorithm=algorithm)

        y, lse = hw.attention(q, gathered(k, "S"), gathered(v, "S"), "top_left", enable_gqa=True)
        z = hw.scaled_dot_product_attention(rows, gathered(keys, "T"), gathered(values, "T"), enable_gqa=True)
        return y, lse, z

    return in_loops


def sizes_for(ranks: int) -> dict[str, int]:
    return {"B": 2, "S": 8 * ranks, "U": 3 * ranks, "T": 5 * ranks}


def expected(arrays: dict[str, Any]) -> tuple[Any, ...]:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    q, k, v, rows, keys, values = (torch.from_numpy(array.astype(np.float64)) for array in arrays.values())
    y, lse, *_ = by_torch(q, k, v, "top_left")
    return y.numpy(), lse.numpy(), by_torch(rows, keys, values)[0].numpy()


CASES = [
    *((ranks, 1, by) for ranks in (2, 3) for by in ALGORITHMS),
    (1, 1, "p2p"),
    (4, 1, "put"),
    (8, 1, "p2p"),
    (2, 2, "put"),
    (2, 2, "p2p"),
]


@pytest.mark.extra("torch")
@pytest.mark.parametrize(("ranks", "tp", "algorithm"), CASES)
def test_matches_torch(ranks: int, tp: int, algorithm: str) -> None:
    fusion = in_loops(ranks, hw.bf16 if ranks < 4 else hw.f32, algorithm, tp)
    loops = [i for i in tree.walk(lowered(fusion).body) if isinstance(i, ir.For)]
    calls = (sum(isinstance(i, ir.Attention) for i in tree.walk(loop.body)) for loop in loops)
    assert list(filter(None, calls)) == ([2, 1] if ranks > 1 else [])
    arrays = random_arrays(fusion, sizes_for(ranks), seed=ranks)
    expect_every_way(fusion, arrays, expected(arrays), ranks)


@pytest.mark.gpu
@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("size", [8, 512])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_on_gpus(algorithm: str, size: int) -> None:
    if algorithm == "put" and nccl() < 22900:
        pytest.skip("needs NCCL 2.29 or later: set NCCL_HOME to its folder")
    fusion = in_loops(2, hw.bf16, algorithm)
    arrays = random_arrays(fusion, {name: times * size for name, times in sizes_for(2).items()} | {"B": 2}, seed=0)
    expect(fusion, arrays, compiled(fusion, "cuda").run(**arrays, ranks=True))


@pytest.mark.gpu
@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
def test_blocks_at_once_on_gpus() -> None:
    """Without a mask, all blocks use the same plan of cuDNN, on two streams. The results equal those without a loop."""
    fusion, sizes = context_parallel(2, causal=None), {"S": 16384}
    arrays = random_arrays(fusion, sizes, seed=0)
    results = []
    for alternative in ("none", "p2p(2)"):
        program = compiled(fusion, "cuda", Options(sizes=sizes, choices={"@context_parallel %k_gathered": alternative}))
        results += [program.run(**arrays).astype(np.float32) for _ in range(3)]
    for got in results[1:]:
        np.testing.assert_allclose(got, results[0], atol=2e-2 * np.abs(results[0]).max())


@cache
def in_zigzag(ranks: int, t: DType) -> Fusion:
    rows = "S@zigzag(cp)"

    @hw.fusion(mesh=hw.Mesh(cp=ranks), q=t["B", 4, rows, 16], k=t["B", 2, rows, 16], v=t["B", 2, rows, 24])
    def in_zigzag(q, k, v):  # type: ignore[no-untyped-def]
        return hw.attention(q, k, v, "top_left", enable_gqa=True)

    return in_zigzag


@pytest.mark.extra("torch")
@pytest.mark.parametrize(("ranks", "alternative"), [(2, "put(2)"), (2, "p2p(2)"), (3, "put(3)"), (4, "p2p(4)")])
def test_rows_in_zigzag(ranks: int, alternative: str) -> None:
    """With the keys of another rank, a rank computes only half of the scores. Either all rows use the first half of the keys, or the
    second half of the rows uses all keys."""
    fusion, options = in_zigzag(ranks, hw.bf16), Options(sizes={"B": 2, "S": 8 * ranks}, choices={"@in_zigzag %k_gathered": alternative})
    program = compiled(fusion, options=options)
    arrays = random_arrays(fusion, {"B": 2, "S": 8 * ranks}, seed=ranks)
    assert sum(isinstance(i, ir.Attention) for i in tree.walk(program.host.body)) == 3
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
    wanted = by_torch(*(torch.from_numpy(array.astype(np.float64)) for array in arrays.values()), "top_left")
    for got, want in zip(run_reference(fusion, arrays), wanted, strict=False):
        np.testing.assert_allclose(got, want, 1e-9, 1e-9)
    stages: dict[str, Any] = {}
    lower(fusion, options, stages.__setitem__)
    for name, precision in (("stream_keys_in_zigzag", 1e-9), ("attend_by_blocks", 2e-2)):  # The second stage adds casts to bf16.
        assert Fusion.parse(str(stages[name])) == stages[name]
        for got, want in zip(run_reference(stages[name], arrays), wanted, strict=False):
            np.testing.assert_allclose(got, want, precision, precision)
    for schedule in (parallel(check_dependencies=True), seeded(ranks)):
        with schedule:
            expect(fusion, arrays, program.run(**arrays, ranks=True))
    program.check()


@pytest.mark.gpu
@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("alternative", ["put(2)", "p2p(2)"])
def test_rows_in_zigzag_on_gpus(alternative: str) -> None:
    if alternative == "put(2)" and nccl() < 22900:
        pytest.skip("needs NCCL 2.29 or later: set NCCL_HOME to its folder")
    fusion, options = in_zigzag(2, hw.bf16), Options(sizes={"B": 2, "S": 4096}, choices={"@in_zigzag %k_gathered": alternative})
    arrays = random_arrays(fusion, {"B": 2, "S": 4096}, seed=0)
    expect(fusion, arrays, compiled(fusion, "cuda", options).run(**arrays, ranks=True))


def context_parallel(ranks: int, **how: Any) -> Fusion:
    row = "S@cp"

    @hw.fusion(mesh=hw.Mesh(cp=ranks), q=hw.bf16[8, row, 128], k=hw.bf16[8, row, 128], v=hw.bf16[8, row, 128])
    def context_parallel(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        return hw.attention(q, k, v, **{"causal": "top_left", **how})[0]

    return context_parallel


def test_the_loop_is_chosen_if_it_is_faster() -> None:
    """The cost model chooses the loop. Calls of other sizes, with even or uneven shards, are right too."""
    large = {"S": 2**14}
    program = hw.compile(context_parallel(2), options=Options(sizes=large))
    (choice,) = program.choices
    assert choice.chosen.name == "put(2)"
    assert [one.name for one in choice.alternatives[1:]] == ["p2p(2)", "none"]
    text = program.explain()
    assert "%k_gathered = all_gather of %y_kv: 2 chunks by put, peer, predicted" in text
    assert "; the keys of 2 ranks are used as they arrive, and the results are combined by log-sum-exps" in text
    fusion = context_parallel(2)
    for rows in (6, 7):
        arrays = random_arrays(fusion, {"S": rows}, seed=rows)
        expect(fusion, arrays, program.run(**arrays, ranks=True))
    program.close()


def test_the_loop_is_not_chosen_if_it_is_slower() -> None:
    (few,) = lower(context_parallel(2), Options(sizes={"S": 256})).choices
    assert few.chosen.name == "none"
    uneven = lower(context_parallel(2), Options(sizes={"S": 2**14 - 1})).choices
    assert [[one.name for one in choice.alternatives] for choice in uneven] == [["none"]]
    text = hw.compile(context_parallel(2), options=Options(sizes={"S": 256})).explain()
    assert "%v_gathered = all_gather of %v: like %k_gathered, with which it would share a loop" in text
    slow = lower(context_parallel(4), Options(sizes={"S": 8192}, machine=H200.without("peer", "here").without("one_sided", "here"))).choices
    assert [choice.chosen.name for choice in slow] == ["none"]


def test_stated_alternative() -> None:
    host = lower(context_parallel(3), Options(sizes={"S": 768}, choices={"@context_parallel %k_gathered": "p2p(3)"}))
    assert sum(isinstance(i, ir.Attention) for i in tree.walk(host.body)) == 2
    with pytest.raises(ProgramError, match=r"put\(6\) is not possible; use one of put\(3\), none, p2p\(3\)"):
        lower(context_parallel(3), Options(sizes={"S": 768}, choices={"@context_parallel %k_gathered": "put(6)"}))


def test_p2p_has_one_block_per_stream() -> None:
    """With p2p, each stream of a loop has one buffer for received keys and values, for any number of ranks."""
    host = lower(in_loops(8, hw.bf16, "p2p"), Options(streams=2))
    blocks = [i for i in tree.walk(host.body) if isinstance(i, ir.OnStream)]
    assert [sum(isinstance(i, ir.Recv) for i in tree.walk(block.body)) for block in blocks] == [1, 1]
    for block in blocks:
        (received,) = (i.dst for i in tree.walk(block.body) if isinstance(i, ir.Recv))
        assert received in [i.out for i in tree.walk(block.body) if isinstance(i, ir.Allocate)]


def test_other_masks_see_all_keys_at_once() -> None:
    """Attention is not in a loop if it has a window, or if another op uses the gathered keys. Attention is also not in a loop if the number
    of chunks differs from the number of ranks."""
    options = Options(sizes={"S": 2**14})
    assert not lower(context_parallel(2, window=8), options).choices
    rows = "S@cp"

    @hw.fusion(mesh=hw.Mesh(cp=2), q=hw.bf16[8, rows, 16], k=hw.bf16[8, rows, 16], v=hw.bf16[8, rows, 16], dy=hw.bf16[8, rows, 16])
    def trained(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor, dy: hw.Tensor) -> tuple[hw.Tensor, ...]:
        y, lse = hw.attention(q, k, v)
        return y, *hw.attention_backward(q, k, v, y, dy, lse)

    assert not lower(trained, options).choices

    @hw.fusion(mesh=hw.Mesh(cp=2), q=hw.bf16[8, rows, 16], k=hw.bf16[8, rows, 16], v=hw.bf16[8, rows, 16])
    def in_pieces(q: hw.Tensor, k: hw.Tensor, v: hw.Tensor) -> hw.Tensor:
        gathered = (hw.reshard(x, 8, "S", 16).stream("S", chunks=4) for x in (k, v))
        return hw.attention(q, *gathered)[0]

    host = lower(in_pieces, Options())
    assert [i.lse for i in tree.walk(host.body) if isinstance(i, ir.Attention)] == [()]
