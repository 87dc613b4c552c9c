"""Arguments and names of matmul and attention plans."""

import re
from collections.abc import Callable, Iterator, Sequence

from hostweave.analysis.def_use import DefUse, def_use
from hostweave.emit.cpp import CUDA_TYPES, CppExprPrinter
from hostweave.emit.layout import braced
from hostweave.fusion_ir.ops.scaled import ROW, TENSOR, scaling
from hostweave.host_ir import ir, tree
from hostweave.host_ir.calls import bodies
from hostweave.host_ir.expr import Const
from hostweave.types.size import Size
from hostweave.types.tensor import BufferType

CUBLAS_ACTIVATIONS = {"relu": "RELU", "gelu_tanh": "GELU"}


def operands_of(i: ir.Matmul) -> tuple[str, ...]:
    """Buffers whose types determine a matmul plan."""
    return i.a, i.b, i.dst, *i.scales


def plan_arguments(i: ir.Matmul, types: Sequence[BufferType]) -> tuple[str, ...]:
    """Constructor arguments of a matmul plan after the dtypes. The first argument is the cuBLASLt epilogue. With TF32, the compute type
    follows. With scales, the dtype of b and the scale modes follow. Defaults at the end are omitted."""
    words = [CUBLAS_ACTIVATIONS[i.activation]] if i.activation else []
    epilogue = "_".join(["CUBLASLT_EPILOGUE", *words, *(["BIAS"] if i.bias else [])])
    if i.precision:
        return (epilogue if words or i.bias else "CUBLASLT_EPILOGUE_DEFAULT", "CUBLAS_COMPUTE_32F_FAST_TF32")
    if i.scales:
        return (epilogue if words or i.bias else "CUBLASLT_EPILOGUE_DEFAULT", braced([CUDA_TYPES[types[1].dtype.name], *_scales(types)]))
    return (epilogue,) if words or i.bias else ()


def _scales(types: Sequence[BufferType]) -> Iterator[str]:
    a, b, _, *scales = types
    kind = scaling(a.shape, b.shape, scales[0].shape, scales[1].shape)
    for type, scale, outer in ((a, scales[0], 0), (b, scales[1], 1)):
        of_blocks = "VEC128_32F" if scale.shape[outer] == type.shape[outer] else "BLK128x128_32F"
        yield f"CUBLASLT_MATMUL_MATRIX_SCALE_{ {TENSOR: 'SCALAR_32F', ROW: 'OUTER_VEC_32F'}.get(kind, of_blocks) }"


class Products:
    """Results of a program's matmuls, grouped by plan. Matmuls with equal types and constructor arguments share a plan."""

    def __init__(self, program: ir.HostProgram):
        self._results: dict[object, dict[str, str]] = {}  # plan signature -> {right operand: result}
        for uses in map(def_use, bodies(program)):
            for _, i in uses.instructions(ir.Matmul):
                results = self._results.setdefault(_alike(i, [uses.types[name] for name in operands_of(i)]), {})
                results.setdefault(uses.root(i.b), self.result(i.dst, uses))

    def name(self, i: ir.Matmul, types: Sequence[BufferType]) -> str:
        """Name of a plan, made of the names of results: `g_and_u`, or `q_and_2_others`. Numbered names such as `q_7` are not others."""
        first, *others = self._results[_alike(i, types)].values()
        others = [name for name in others if not re.fullmatch(rf"{first}_\d+", name)]
        return first if not others else f"{first}_and_{others[0] if len(others) == 1 else f'{len(others)}_others'}"

    @staticmethod
    def result(name: str, uses: DefUse) -> str:
        """Part of a plan's name that stands for a result: the result's name if the result is in a view at a constant index, otherwise the
        name of the whole buffer."""
        at = name
        while (place := uses.views.get(at)) and not (place.instruction.span and isinstance(place.instruction.span[1], Const)):
            *_, at = tree.names(place.instruction, "alias")
        return uses.root(at) if at not in uses.views else name


def _alike(i: ir.Matmul, types: Sequence[BufferType]) -> object:
    return *types, plan_arguments(i, types)


EitherAttention = ir.Attention | ir.AttentionBackward
OperandNames = tuple[str, ...]
OptionalOperands = Sequence[tuple[str, str]]  # (role, name) of optional operands


def attention_made_with(i: EitherAttention, type: BufferType, blind: str, streams: int) -> tuple[str, str]:
    """Constructor arguments of an attention plan, valid for every size: the dtype, and fields such as the window and the scale."""
    pattern = {
        "scale": repr(i.scale) if i.scale != 1 else "",
        "causal": i.diagonal is not None,
        "window": str(i.window) if i.window else "",
        "has_lse": bool(i.lse),
        "has_lengths": bool(i.lengths),
        "from_end": bool(i.corner),
        "has_bias": bool(i.bias),
        "is_packed": bool(i.offsets),
        "blind_zeros": bool(blind),
        "streams": str(streams) if streams > 1 else "",
        "kernels": f"&hw::attention_{i.kernels}" if i.kernels else "",
    }
    words = [f".{name} = {'true' if value is True else value}" for name, value in pattern.items() if value]
    return CUDA_TYPES[type.dtype.name], braced(words)


def attention_prepared_with(
    i: EitherAttention, operands: OperandNames, beside: OptionalOperands, type_of: Callable[[str], BufferType], integers: CppExprPrinter
) -> OperandNames:
    """Arguments of an attention plan's `prepare`: shapes, the diagonal, layouts of optional operands, number of packed sequences."""

    def view(name: str) -> str:
        type = type_of(name)
        return f"hw::Strided{integers.shape(type.shape)}" if type.strides is None else integers.strided(type)

    def sequences(name: str) -> str:
        return integers.size(type_of(name).shape[-1] - Size(1))

    shown = {"bias": view, "offsets": sequences, "bias_gradient": view}
    fields = [f".{'sequences' if what == 'offsets' else what} = {shown[what](name)}" for what, name in beside if what in shown]
    diagonal = [integers.expr(i.diagonal or Const(0))] if fields or i.diagonal not in (None, Const(0)) else []
    shapes = (integers.strided(type_of(name)) for name in operands)
    return (*shapes, *diagonal, *([braced(fields)] if fields else []))
