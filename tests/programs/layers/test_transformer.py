"""Transformer layers, forward and backward: communication, and results on every rank, compared with NumPy in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from compiled_fusions import compiled, lowered
from cuda_here import needs_cuda
from scaled_tolerance import tolerance_at_scale
from transformer_reference import Array, Reference

import hostweave as hw
from hostweave.base.paths import EXAMPLES
from hostweave.build.cuda import gpus
from hostweave.cli.programs import load_file, programs_in
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir import ir, tree
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType, block_of

HEADS, GROUPS, SIZE = 16, 8, 4
SIZES = {"S": 16, "B": 2, "E": 40, "F": 48, "T": 32, "K": 24, "N": 16}


@dataclass(frozen=True)
class Variant:
    dp: int  # 0 for a mesh with only tp.
    tp: int
    dtype: DType

    def __str__(self) -> str:
        return f"{f'{self.dp}x' if self.dp else ''}{self.tp}-{self.dtype}"


@cache
def programs(variant: Variant) -> Mapping[str, Fusion]:
    mesh = hw.Mesh(dp=variant.dp, tp=variant.tp) if variant.dp else hw.Mesh(tp=variant.tp)
    shared = {"B": "B@dp", "T": "T@dp", "TS": "T@dp,tp"} if variant.dp else {"B": "B", "T": "T", "TS": "T@tp"}
    constants = {**shared, "mesh": mesh, "dtype": variant.dtype, "H": HEADS, "G": GROUPS, "D": SIZE}
    return {name: p for name, p in programs_in(load_file(EXAMPLES / "transformer.py", constants)).items() if isinstance(p, Fusion)}


VARIANTS = (Variant(0, 1, hw.f32), Variant(0, 2, hw.bf16), Variant(2, 2, hw.f32), Variant(0, 8, hw.f32), Variant(2, 4, hw.bf16))
NAMES = tuple(programs(VARIANTS[0]))
# Indices of the variants of a program. Programs that are not listed use variant 2 if they are sequence-parallel, and variant 1 otherwise.
RUN = {
    "gpt_tp": (0, 4),
    "gpt_sp": (1, 3),
    "llama_tp": (1,),
    "llama_sp": (2, 4),
    "mlp_backward_tp": (2,),
    "mlp_backward_sp": (4,),
}
BY_LAYOUT = {"tp": (1,), "sp": (2,), "backward": (1,)}
CASES = [
    pytest.param(name, VARIANTS[i], id=f"{name}-{VARIANTS[i]}") for name in NAMES for i in RUN.get(name, BY_LAYOUT[name.rpartition("_")[2]])
]


def arrays_of(fusion: Fusion, sizes: Mapping[str, int]) -> dict[str, Array]:
    """Activations with a magnitude of about 1, and weights that preserve this magnitude. All arrays are rounded to their dtypes."""
    random = np.random.default_rng(len(fusion.name))
    arrays = {}
    for value in fusion.inputs:
        name, shape = value.name, tuple(size.bind(sizes) for size in value.type.shape)
        if name in ("cos", "sin"):
            angles = np.arange(shape[0])[:, None] * 100.0 ** (-np.arange(shape[1]) / shape[1])
            drawn = np.cos(angles) if name == "cos" else np.sin(angles)
        elif name == "seed":
            drawn = np.asarray(7)
        elif name.startswith("w"):
            drawn = random.standard_normal(shape) / np.sqrt(shape[0])
        elif name.startswith(("n", "b")):
            drawn = random.standard_normal(shape) / 8 + (name[0] == "n")
        else:
            drawn = random.standard_normal(shape)
        if name == "dy":  # Gradients of weights are sums over tokens.
            drawn = drawn / np.sqrt(shape[0])
        arrays[name] = np.asarray(drawn).astype(numpy_dtype(value.type.dtype))
    return arrays


def base(name: str) -> str:
    return name.removesuffix("_tp").removesuffix("_sp")


def wanted(fusion: Fusion, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    exact = {name: array if array.dtype == np.uint32 else array.astype(np.float64) for name, array in arrays.items()}
    result = getattr(Reference(SIZE), base(fusion.name))(**exact)
    return result if isinstance(result, tuple) else (result,)


def schedules() -> Iterator[object]:
    yield parallel(check_dependencies=True)
    yield seeded(0)


def compare(fusion: Fusion, sizes: Mapping[str, int], target: str = "cpu") -> None:
    arrays = arrays_of(fusion, sizes)
    want = wanted(fusion, arrays)
    for schedule in schedules() if target == "cpu" else [nullcontext()]:
        with schedule:  # type: ignore[attr-defined]
            ranks = compiled(fusion, target=target).run(**arrays, ranks=True)
        for index, output in enumerate(lowered(fusion).outputs):
            allowed = tolerance_at_scale(fusion, output.name, sizes)
            for rank, results in enumerate(ranks):
                got = results[index] if isinstance(results, tuple) else results
                block = want[index][block_of(output.type, fusion.mesh, rank, want[index].shape)]
                assert got.dtype == numpy_dtype(output.type.dtype)
                np.testing.assert_allclose(got.astype(np.float64), block, allowed.rtol, allowed.atol, err_msg=f"rank {rank}, {output.name}")


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_matches_numpy(name: str, variant: Variant) -> None:
    compare(programs(variant)[name], SIZES)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS[:4], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_matches_numpy_on_gpus(name: str, variant: Variant) -> None:
    fusion = programs(variant)[name]
    if fusion.mesh.size > len(gpus()):
        pytest.skip(f"needs {fusion.mesh.size} GPUs, and there are {len(gpus())}")
    compare(fusion, SIZES, target="cuda")


@pytest.mark.parametrize("name", ["gpt_sp", "llama_sp"])
def test_sequences_that_ranks_share_unevenly(name: str) -> None:
    compare(programs(VARIANTS[2])[name], SIZES | {"S": 7, "B": 3, "F": 9})


@needs_cuda
@pytest.mark.parametrize("name", ["gpt_sp", "llama_tp"])
def test_compiles_for_cuda(name: str) -> None:
    program = compiled(programs(VARIANTS[4])[name], target="cuda")
    assert program.module.name == name
    assert "warning" not in (program.folder / "build.log").read_text()


# --- communications ---------------------------------------------------------------------------------------------------


def communications(body: tree.Body) -> Counter[str]:
    """Number of communication instructions by kind and channel. An instruction in a loop counts once."""
    counts: Counter[str] = Counter()
    for instruction in body:
        if isinstance(instruction, ir.Communication):
            counts[f"{type(instruction).__name__} {instruction.channel}"] += 1
        else:
            for inner in tree.bodies(instruction):
                counts += communications(inner)
    return counts


@pytest.mark.parametrize("variant", [VARIANTS[1], pytest.param(VARIANTS[2], marks=pytest.mark.more), *VARIANTS[3:]], ids=str)
@pytest.mark.parametrize("name", ["mlp", "swiglu", "multi_head", "grouped_query", "gpt", "llama"])
def test_communications_of_a_forward_pass(name: str, variant: Variant) -> None:
    blocks = 2 if name in ("gpt", "llama") else 1
    tp, sp = (lowered(programs(variant)[f"{name}_{kind}"]).body for kind in ("tp", "sp"))
    assert communications(tp) == {"AllReduce tp": blocks}
    assert communications(sp) == {"AllGather tp": blocks, "ReduceScatter tp": blocks}


GRADIENTS = {
    "linear_columns_backward": {"AllReduce tp": 1, "AllReduce dp": 2},
    "linear_rows_backward": {"AllReduce dp": 2},
    "mlp_backward_tp": {"AllReduce tp": 1, "AllReduce dp": 2},
    "mlp_backward_sp": {"AllGather tp": 2, "ReduceScatter tp": 1, "AllReduce dp": 2},
    "swiglu_backward_tp": {"AllReduce tp": 1, "AllReduce dp": 3},
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_communications_of_a_backward_pass(name: str) -> None:
    """Gradients of weights are reduced over dp on a separate stream."""
    host = lowered(programs(VARIANTS[2])[name])
    assert communications(host.body) == GRADIENTS[name]
    beside = [
        i for block in tree.walk(host.body) if isinstance(block, ir.OnStream) and block.stream == "comm" for i in tree.walk(block.body)
    ]
    assert sum(isinstance(i, ir.AllReduce) and i.channel == "dp" for i in beside) == GRADIENTS[name]["AllReduce dp"]
    first = next(place for place, i in enumerate(host.body) if isinstance(i, ir.OnStream))
    joined = next(place for place, i in enumerate(host.body) if isinstance(i, ir.Join))
    assert any(isinstance(i, ir.Matmul) for i in host.body[first:joined])


@pytest.mark.parametrize("name", [name for name in NAMES if base(name) in ("mlp", "swiglu")])
def test_layers_have_no_copies(name: str) -> None:
    host = lowered(programs(VARIANTS[2])[name])
    assert not [i for i in tree.walk(host.body) if isinstance(i, ir.Copy)]


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "weights"), [("mlp", ("w1", "w2")), ("swiglu", ("wg", "wu", "wd"))])
def test_gradients_are_those_of_the_forward_pass(name: str, weights: tuple[str, ...]) -> None:
    """Compares the gradients of the reference with finite differences in float64."""
    random, reference = np.random.default_rng(0), Reference(SIZE)
    p = {w: random.standard_normal((5, 6) if w not in ("w2", "wd") else (6, 5)) for w in weights}
    x, dy = random.standard_normal((4, 5)), random.standard_normal((4, 5))
    forward, backward = getattr(reference, name), getattr(reference, f"{name}_backward")
    between = {"h": x @ p["w1"]} if name == "mlp" else {"g": x @ p["wg"], "u": x @ p["wu"]}
    for wanted, target in zip(backward(x=x, dy=dy, **between, **p), ("x", *weights), strict=True):
        values = {"x": x, **p}
        way = random.standard_normal(values[target].shape) * 1e-5
        ends = [np.sum(dy * forward(**{**values, target: values[target] + sign * way})) for sign in (1, -1)]
        np.testing.assert_allclose(np.sum(wanted * way), (ends[0] - ends[1]) / 2, rtol=1e-6)
