"""Compiles each program once per process, makes inputs, and compares the outputs of every rank with NumPy."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from fusions_from_files import all_fusions, exchange_fusions, more_fusions, one_sided_fusions, pipelines
from interpret import interpret
from numpy.typing import NDArray
from unrolling import inlined, unrolled

import hostweave as hw
from hostweave.check.sizes import minimal_sizes
from hostweave.cli.tolerance import Tolerance, tolerance_of
from hostweave.fusion_ir.ir import Fusion, Value
from hostweave.fusion_ir.reference import run_reference
from hostweave.fusion_ir.rewriting import map_functions
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.passes.fusion.propagate_sharding import propagate_sharding
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import Dim, DType, TensorType, bf16, bind_sizes, block_of, global_shape, holds

Array = NDArray[Any]
Arrays = dict[str, Array]

ONE_DEVICE = tuple(name for name, fusion in all_fusions().items() if fusion.mesh.size == 1)
ONE_SIDED = tuple(one_sided_fusions())
EXCHANGES = tuple(exchange_fusions())
PIPELINES = tuple(pipelines())
SEVERAL = tuple(name for name, fusion in {**all_fusions(), **more_fusions()}.items() if fusion.mesh.size > 1)


def with_transports(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Returns each case with transport peer and with one_sided. The IRs of both programs differ only in the names of transports, so one of
    the two is marked slow: one_sided for the first case, peer for the second, and so on."""
    # pytest takes a third of the import time. rank_process.py imports this module in many processes, so the import is not at the top.
    import pytest

    return [
        pytest.param(*case, transport, marks=[pytest.mark.slow] * ((number + at) % 2))
        for number, case in enumerate(cases)
        for at, transport in enumerate(("peer", "one_sided"))
    ]


def fusion_of(name: str, ranks: int, chunks: int, dtype: DType) -> Fusion:
    found = {**all_fusions(ranks, chunks, dtype), **more_fusions(ranks, dtype), **one_sided_fusions(ranks, dtype)}
    found |= exchange_fusions(ranks, dtype)
    return found[name] if name in found else pipelines(ranks, chunks, dtype)[name]


def programs_of(ranks: int) -> dict[str, Fusion]:
    found = {name: fusion_of(name, ranks, 3, bf16) for name in SEVERAL}
    return {name: fusion for name, fusion in found.items() if fusion.mesh.size == ranks}


def lowered(fusion: Fusion) -> HostProgram:
    return compiled(fusion).host


def compiled(program: Fusion | HostProgram, target: str = "cpu", options: Options | None = None) -> hw.Program:
    return _compiled(program, target, options or Options())


@cache
def _compiled(program: Fusion | HostProgram, target: str, options: Options) -> hw.Program:
    return hw.compile(program, target=target, options=options)


_references: deque[tuple[Fusion, Arrays, Sequence[Array]]] = deque(maxlen=8)


def reference(fusion: Fusion, arrays: Arrays) -> Sequence[Array]:
    """Returns NumPy's results. Caches the last 8, because a test may run the same arrays in many schedules."""
    found = next((want for of, given, want in _references if of is fusion and given is arrays), None)
    if found is None:
        found = run_reference(fusion, arrays)
        _references.append((fusion, arrays, found))
    return found


@cache
def inferred_results(fusion: Fusion) -> tuple[Value, ...]:
    """Results with the shardings that the compiler infers. To compile the program would take much longer."""
    return map_functions(fusion, lambda body: propagate_sharding(body, Options())).results


def sizes_of(program: Fusion | HostProgram, times: int = 3, more: int = 0) -> dict[str, int]:
    """Returns a value for every named size: `times` times the minimal size of the check. Adds `more` to sizes that may be uneven."""
    host = lowered(program) if isinstance(program, Fusion) else program
    return {name: max(1, size * times + (more if name in host.uneven else 0)) for name, size in minimal_sizes(host).items()}


def at_sizes(fusion: Fusion, sizes: Mapping[str, int]) -> Fusion:
    """Replaces symbolic sizes by ints, except sizes that count the tensors of a parameter group."""
    given = {name: size for name, size in sizes.items() if name not in fusion.depths}

    def known(type: TensorType) -> TensorType:
        return replace(type, dims=tuple(Dim(dim.size.at(given), dim.axes) for dim in type.dims))

    def bound(body: Fusion) -> Fusion:
        return replace(
            body,
            inputs=tuple(replace(value, type=known(value.type)) for value in body.inputs),
            body=tuple(replace(op, result=replace(op.result, type=known(op.result.type))) for op in body.ops),
        )

    return map_functions(fusion, bound)


def random_arrays(program: Fusion | HostProgram, sizes: Mapping[str, int], seed: int) -> Arrays:
    random = np.random.default_rng(seed)
    return {v.name: random.standard_normal(global_shape(v.type, sizes)).astype(numpy_dtype(v.type.dtype)) for v in program.arguments}


def integer_arrays(program: Fusion | HostProgram, sizes: Mapping[str, int], seed: int) -> Arrays:
    """Inputs of -1, 0 and 1. At the sizes of tests, sums of such integers are exact."""
    random = np.random.default_rng(seed)
    return {v.name: random.integers(-1, 2, global_shape(v.type, sizes)).astype(numpy_dtype(v.type.dtype)) for v in program.arguments}


def run_in_flight_on_gpus(program: hw.Program, calls: Sequence[Arrays], device: str = "cuda:0") -> list[list[Any]]:
    """Results of calls in flight, as NumPy arrays. The calls use tensors on GPUs, because a call with outputs in host memory ends before
    the next call begins. Memory is filled with NaN before each call."""
    import pytest

    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

    def tensor(array: Array) -> Any:
        if array.dtype != numpy_dtype(bf16):
            return torch.from_numpy(array).to(device)
        return torch.from_numpy(array.view(np.int16)).to(device).view(torch.bfloat16)

    def array(result: Any) -> Any:
        if result is None or isinstance(result, tuple):
            return result and tuple(map(array, result))
        is_bf16 = result.dtype == torch.bfloat16
        return result.view(torch.int16).cpu().numpy().view(numpy_dtype(bf16)) if is_bf16 else result.cpu().numpy()

    made = program.run_in_flight([{name: tensor(x) for name, x in call.items()} for call in calls], poison=True)
    return [list(map(array, ranks)) for ranks in made]


def expect(fusion: Fusion, arrays: Arrays, ranks: Sequence[Any], exact: bool = False) -> None:
    """Compares every output of every rank with the rank's block of NumPy's result. Allows the tolerance of the output, unless `exact`.

    The output must be None on ranks that are not in the mesh of the output.
    """
    assert len(ranks) == fusion.mesh.size
    shapes = {name: array.shape for name, array in arrays.items()}
    sizes = bind_sizes(fusion.name, fusion.mesh, {v.name: v.type for v in fusion.arguments}, shapes, uneven=None)
    for index, (output, want) in enumerate(zip(inferred_results(fusion), reference(fusion, arrays), strict=True)):
        allowed = Tolerance(0.0, 0.0) if exact else tolerance_of(inlined(fusion), output.name, sizes)
        for rank, results in enumerate(ranks):
            got = results[index] if isinstance(results, tuple) else results
            if not holds(output.type, fusion.mesh, rank):
                assert got is None
                continue
            block = want[block_of(output.type, fusion.mesh, rank, want.shape)]
            assert (got.dtype, got.shape) == (numpy_dtype(output.type.dtype), block.shape)
            np.testing.assert_allclose(got.astype(want.dtype), block, allowed.rtol, allowed.atol, err_msg=f"rank {rank}, {output.name}")


def expect_every_way(
    fusion: Fusion, arrays: Arrays, wanted: Sequence[Array], seed: int, allowed: float = 1e-9, interprets: bool = True
) -> None:
    """Compares the NumPy reference with `wanted`, and the results of the program with the reference. Runs the program on parallel ranks, on
    ranks in a seeded order, and, if `interprets`, in the interpreter.

    Also tests that the text of both IRs parses to the same program, and that the program passes the check.
    """
    program, host = compiled(fusion), lowered(fusion)
    assert HostProgram.parse(str(host)) == host
    assert Fusion.parse(str(fusion)) == fusion
    for index, (got, want) in enumerate(zip(reference(fusion, arrays), wanted, strict=True)):
        np.testing.assert_allclose(got, want, allowed, allowed, err_msg=f"result {index}")
    for schedule in (parallel(check_dependencies=True), seeded(seed)):
        with schedule:
            expect(fusion, arrays, program.run(**arrays, ranks=True))
    if interprets:
        expect(fusion, arrays, [tuple(rank[output.name] for output in host.results) for rank in interpret(host, arrays)])
    program.check()


def unrolled_ir(program: hw.Program) -> str:
    """Fusion IR in which separate calls replace every repeat."""
    return str(unrolled(hw.Fusion.parse(program.fusion_ir)))
