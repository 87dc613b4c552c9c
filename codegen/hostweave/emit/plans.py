"""Plans of matmuls: what they are made with, and their names."""

from collections.abc import Sequence

from hostweave.analysis.def_use import def_use
from hostweave.host_ir import ir
from hostweave.host_ir.calls import bodies
from hostweave.types.tensor import BufferType

CUBLAS_ACTIVATIONS = {"relu": "RELU", "gelu_tanh": "GELU"}


def ends(i: ir.Matmul) -> tuple[str, ...]:
    """What a plan is made with besides dtypes: cuBLASLt's names of the epilogue and of the compute type."""
    words = [CUBLAS_ACTIVATIONS[i.activation]] if i.activation else []
    epilogue = "_".join(["CUBLASLT_EPILOGUE", *words, *(["BIAS"] if i.bias else [])])
    if i.precision:
        return (epilogue if words or i.bias else "CUBLASLT_EPILOGUE_DEFAULT", "CUBLAS_COMPUTE_32F_FAST_TF32")
    return (epilogue,) if words or i.bias else ()


class Products:
    """What the matmuls of a program make, those together that may share a plan: they differ in names alone."""

    def __init__(self, program: ir.HostProgram):
        self._results: dict[object, dict[str, str]] = {}  # one for each operand that they multiply with
        for uses in map(def_use, bodies(program)):
            for i in (place.instruction for place in uses.places):
                if isinstance(i, ir.Matmul):
                    results = self._results.setdefault(_alike(i, [uses.types[name] for name in (i.a, i.b, i.dst)]), {})
                    results.setdefault(uses.root(i.b), uses.roots.all_of(i.dst)[-1])  # where a condition decides, the last

    def name(self, i: ir.Matmul, types: Sequence[BufferType]) -> str:
        """`g_and_u`, or of more `q_and_2_others`."""
        first, *others = self._results[_alike(i, types)].values()
        return first if not others else f"{first}_and_{others[0] if len(others) == 1 else f'{len(others)}_others'}"


def _alike(i: ir.Matmul, types: Sequence[BufferType]) -> object:
    return *types, ends(i)
