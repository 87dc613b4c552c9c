"""Infers missing shardings, as `fusion_ir/propagation.py` describes."""

from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.propagation import with_shardings
from hostweave.options import Options


def propagate_sharding(fusion: Fusion, options: Options) -> Fusion:
    return with_shardings(fusion)
