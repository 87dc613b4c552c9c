"""Programs of `examples/` and of the files fusions_*.py of the tests, for any number of ranks, chunks and dtype."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hostweave.base.paths import EXAMPLES
from hostweave.cli.programs import load_file, programs_in
from hostweave.fusion_ir.ir import Fusion
from hostweave.types.tensor import DType, bf16

FILES = ("beyond_examples", "with_puts", "without_loops", "of_features")
MORE, ONE_SIDED, EXCHANGES, FEATURES = (Path(__file__).with_name(f"fusions_{name}.py") for name in FILES)


@cache
def fusions(file: str, ranks: int = 8, chunks: int | None = None, dtype: DType = bf16) -> dict[str, Fusion]:
    """Fusions of a file by name. Replaces the constants D and dtype of the file, and S if `chunks` is given."""
    constants = {"D": ranks, "dtype": dtype} | ({"S": chunks} if chunks else {})
    programs = programs_in(load_file(EXAMPLES / file, constants))
    return {name: program for name, program in programs.items() if isinstance(program, Fusion)}


def all_fusions(ranks: int = 8, chunks: int | None = None, dtype: DType = bf16) -> dict[str, Fusion]:
    return {**fusions("seeds.py", ranks, chunks, dtype), **fusions("single_device.py", ranks, chunks, dtype)}


def pipelines(ranks: int = 8, chunks: int | None = None, dtype: DType = bf16) -> dict[str, Fusion]:
    """Pipelines of two stages. Each stage runs on half of the ranks, so `ranks` is at least 2."""
    return fusions("pipeline.py", ranks, chunks, dtype)


def one_sided_fusions(ranks: int = 8, dtype: DType = bf16) -> dict[str, Fusion]:
    """Fusions in which ranks access each other's memory."""
    return fusions(str(ONE_SIDED), ranks, None, dtype)


def exchange_fusions(ranks: int = 8, dtype: DType = bf16) -> dict[str, Fusion]:
    return fusions(str(EXCHANGES), ranks, None, dtype)


def more_fusions(ranks: int = 8, dtype: DType = bf16) -> dict[str, Fusion]:
    return fusions(str(MORE), ranks, None, dtype)


def fusions_of_features(ranks: int = 8, dtype: DType = bf16) -> dict[str, Fusion]:
    """Fusions with indices, joined tensors, 8-bit floats, random numbers, orders, loops of layers, and grouped matmuls."""
    return fusions(str(FEATURES), ranks, None, dtype)
