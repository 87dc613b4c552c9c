"""Public pointwise ops of one or two tensors at critical values, compared with torch, or with NumPy for floor_divide, remainder and
fmod."""

from __future__ import annotations

import contextlib
import inspect

import numpy as np
import pytest
from cuda_here import needs_cuda

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.ops import OPS, pointwise
from hostweave.fusion_ir.reference import run_reference
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

EDGES = (0.0, 0.5, 1.0, 1.5, 2.5, 3.7, 2.0**-130, 8388607.5, 2.0**31, 1e30, np.inf)
SMALL = (0, 1, 2, 3, 100)
DTYPES = {
    hw.f64: torch.float64,
    hw.f32: torch.float32,
    hw.bf16: torch.bfloat16,
    hw.i64: torch.int64,
    hw.i32: torch.int32,
    hw.i16: torch.int16,
    hw.u8: torch.uint8,
}
OF_TORCH = {"copy": "clone", "equal": "eq", "bitwise_invert": "bitwise_not"}  # ops that torch names differently
KINDS = [kind for kind, op in pointwise.OPS.items() if op.is_public]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def values(dtype: DType) -> torch.Tensor:
    if dtype.kind == "float":
        return torch.tensor([*EDGES, *(-edge for edge in EDGES), np.nan]).to(DTYPES[dtype])
    signs = (1, -1) if dtype.kind == "int" else (1,)
    largest = [2**53 + 1] if dtype == hw.i64 else []
    return torch.tensor([sign * value for sign in signs for value in (*SMALL, *largest)], dtype=DTYPES[dtype])


def expected(kind: str, operands: list[torch.Tensor]) -> np.ndarray:
    """Reference by torch or NumPy. Floats are computed in float64, and rounded to the dtype of the first operand."""
    function = getattr(torch, OF_TORCH.get(kind, kind), None) or getattr(torch.nn.functional, kind)
    wide = [operand.double() if operand.is_floating_point() else operand for operand in operands]
    # NumPy is the reference, because torch raises an error for integer division by 0.
    is_division = kind in ("floor_divide", "remainder", "fmod")
    result = torch.from_numpy(getattr(np, kind)(*(operand.numpy() for operand in wide))) if is_division else function(*wide)
    if kind == "sign":  # The sign of NaN is NaN in the array API and NumPy, and 0 in torch.
        result = torch.where(torch.isnan(wide[0]), wide[0], result)
    return (result.to(operands[0].dtype) if result.is_floating_point() else result).double().numpy()


def all_ops(dtype: DType) -> tuple[list[str], Fusion]:
    """Ops that take one or two tensors of `dtype`, and a program with all these ops."""
    kinds: list[str] = []

    @hw.fusion(a=dtype["N"], b=dtype["N"])
    def program(a, b):
        results = []
        for kind in KINDS:
            with contextlib.suppress(ProgramError):  # Ops that do not support `dtype` are skipped.
                results.append(getattr(hw, kind)(*(a, b)[: pointwise.OPS[kind].arity]))
                kinds.append(kind)
        return tuple(results)

    return kinds, program


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("optimised_kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_every_op_of_the_table(dtype: DType, target: str) -> None:
    kinds, fusion = all_ops(dtype)
    assert {"add", "abs" if dtype != hw.u8 else "relu", "floor", "less", "copy"} <= set(kinds)
    pairs = torch.cartesian_prod(values(dtype), values(dtype))
    given = dict(zip("ab", (pairs[:, i].contiguous() for i in (0, 1)), strict=True))
    arrays = {name: (t.view(torch.uint16) if dtype == hw.bf16 else t).numpy().view(numpy_dtype(dtype)) for name, t in given.items()}
    program = hw.compile(fusion, target)
    results = program.run(**arrays)
    program.close()
    rounding = {"f64": 4e-15, "f32": 4e-7, "bf16": 1e-2}.get(dtype.name, 0)
    for kind, result, reference in zip(kinds, results, run_reference(fusion, arrays), strict=True):
        want = expected(kind, [*given.values()][: pointwise.OPS[kind].arity])
        np.testing.assert_allclose(result.astype(np.float64), want, rtol=rounding, atol=rounding, err_msg=f"{kind} of {dtype}")
        with np.errstate(over="ignore"):
            rounded = reference.astype(numpy_dtype(dtype)).astype(np.float64) if dtype.kind == "float" else reference
        np.testing.assert_allclose(rounded, want, rtol=rounding, atol=rounding, err_msg=f"NumPy: {kind} of {dtype}")


def spread(low: float = -np.inf, high: float = np.inf) -> np.ndarray:
    """Every 30011th f32 from `low` to `high`. Several of these numbers have the same exponent."""
    found = np.arange(0, 2**32, 30011, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return found[(found >= low) & (found <= high)]


# Ranges of arguments of functions that are not tested with all numbers.
RANGES = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt"), (0, np.inf)),
    **dict.fromkeys(("asin", "acos", "atanh"), (-1, 1)),
    **{"log1p": (-1, np.inf), "acosh": (1, np.inf)},
    **dict.fromkeys(("sigmoid", "silu"), (-87, np.inf)),  # Below -88.7, exp(-x) is infinite and the result is 0, as in torch.
}
MORE_STEPS = {"silu": 3, "sigmoid": 3, "tanh": 2.2}  # These functions round several times, or use tanh of glibc.
OF_ONE = [kind for kind in KINDS if pointwise.OPS[kind].arity == 1]


@pytest.mark.usefixtures("optimised_kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_functions_are_exact_over_the_whole_range() -> None:
    """On the CPU target, finite results are within 2 units in the last place of f32, or within the limit in MORE_STEPS."""
    kinds = [kind for kind in OF_ONE if kind not in ("logical_not", "bitwise_invert")]
    given = {kind: spread(*RANGES.get(kind, ())) for kind in kinds}

    @hw.fusion(mesh=hw.Mesh(x=1), **{kind: hw.f32[len(x)] for kind, x in given.items()})
    def program(**inputs):
        return tuple(getattr(hw, kind)(x) for kind, x in inputs.items())

    results = hw.compile(program, "cpu").run(**given)
    worst: dict[str, float] = {}
    for kind, result, want in zip(kinds, results, run_reference(program, given), strict=True):
        normal = np.isfinite(want) & (np.abs(want) < np.finfo(np.float32).max)
        unit = np.spacing(np.maximum(np.abs(want[normal]), np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)
        off = np.abs(result[normal].astype(np.float64) - want[normal]) / unit
        worst[kind] = float(off.max())
    assert {kind: most for kind, most in worst.items() if most > MORE_STEPS.get(kind, 2)} == {}


def test_equality_rounds_its_operands(target: str) -> None:
    """A kernel rounds a value to bf16 before the comparison, as torch does. Several elements of a row then equal the maximum."""

    @hw.fusion(mesh=hw.Mesh(x=1), x=hw.bf16[8, 300])
    def program(x):
        y = hw.tanh(x * 0.01)
        return y, y == hw.max(y, 1, keepdims=True), y != hw.max(y, 1, keepdims=True)

    x = torch.linspace(200, 300, 8 * 300).to(torch.bfloat16).reshape(300, 8).T.contiguous()
    compiled = hw.compile(program, target)
    given = x.float().numpy().astype(numpy_dtype(hw.bf16))
    y, is_largest, is_smaller = (np.asarray(one, dtype=np.float64) for one in compiled.run(x=given))
    np.testing.assert_array_equal(is_largest, y == y.max(1, keepdims=True))
    np.testing.assert_array_equal(is_smaller, 1 - is_largest)
    assert (is_largest.sum(1) > 1).all()
    compiled.close()


@needs_cuda
@pytest.mark.usefixtures("kernels_together")
@pytest.mark.parametrize("dtype", [hw.f64, hw.bf16, hw.i64, hw.u32, hw.i16], ids=str)
def test_every_op_compiles_for_cuda(dtype: DType) -> None:
    program = hw.compile(all_ops(dtype)[1], target="cuda")
    assert program.module.name == "program"
    assert "warning" not in (program.folder / "build.log").read_text()


@pytest.mark.parametrize("kind", [kind for kind, op in OPS.items() if op.is_public])
def test_functions_are_those_of_their_entries(kind: str) -> None:
    """Each public function has the name of its op, a signature, a description and an example."""
    function = getattr(hw, kind)
    assert kind in hw.__all__
    assert function.__name__ == function.__qualname__ == kind
    assert len(inspect.signature(function).parameters) == (3 if OPS[kind].combine else OPS[kind].arity)
    summary, *rest = function.__doc__.split("\n\n")
    assert summary.endswith(".")
    assert ("Raises ProgramError" in "".join(rest)) == (kind != "copy")  # The op `copy` accepts all dtypes.
    assert f"`hw.{kind}(" in rest[-1]
    assert rest[-1].startswith("Example: ")
