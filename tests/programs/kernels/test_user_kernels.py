"""User kernels: text in both IRs, sources for both targets, results on CPU ranks, and error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compiled_fusions import compiled, lowered
from cuda_here import needs_cuda
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ArgumentError, BuildError, ExecutionError, ProgramError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded

# A kernel over rows that runs on both targets.
ROWS = """
__device__ float scaled(float x, float factor) { return x * factor; }  // scaled(a, b)

__global__ void scale_rows(const float* __restrict__ x, float factor, int64_t rows, int64_t columns, float* y,
                           float* sums) {
  for (int64_t row : hw::over_blocks(rows)) {
    float total = 0.0f;
    for (int64_t j : hw::over_threads(columns)) {
      y[row * columns + j] = scaled(x[row * columns + j], factor);
      total += x[row * columns + j];
    }
    total = hw::reduce_block(total, hw::Add());
    if (hw::first_thread()) sums[row] = total;
  }
}
"""

# A kernel in plain CUDA, and its version for the CPU target.
TWICE = """#include <cuda_bf16.h>
extern "C" __global__ void __launch_bounds__(128) twice(const __nv_bfloat16* x, __nv_bfloat16* y, int64_t n) {
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __float2bfloat16(2 * __bfloat162float(x[i]));
}"""
TWICE_ON_CPU = """
extern "C" void twice(const hw::bf16* x, hw::bf16* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = hw::bf16(2 * float(x[i]));
}"""


def rows(ranks: int) -> Fusion:
    """A user kernel on resharded values, and a second launch of this kernel with an unused output."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "N"], z=hw.f32["N", "K@x"])
    def rows(x, z):  # type: ignore[no-untyped-def]
        args = [2.0, "M@x", "N", hw.f32["M@x", "N"], hw.f32["M@x"]]
        y, sums = hw.kernel(ROWS, "scale_rows", grid="M@x", args=[hw.reshard(x + 1, "M@x", "N"), *args])
        whole, _ = hw.kernel(ROWS, "scale_rows", "N", args=[z.T[:, :].T * 1, -1, "N", "K", hw.f32["N", "K"], hw.f32["N"]])
        return hw.exp(y * 0.1), hw.sum(sums), whole

    return rows


def flat(ranks: int) -> Fusion:
    """Kernels on a shard, on a view, and on a gathered tensor."""

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["M@x"], z=hw.bf16["M", 2])
    def flat(x, z):  # type: ignore[no-untyped-def]
        def doubled(x, dim):  # type: ignore[no-untyped-def]
            return hw.kernel(TWICE, "twice", dim, [x, hw.bf16[dim], dim], per=128, block=128, cpu=TWICE_ON_CPU)

        gathered = hw.reshard(x, "M")
        return doubled(x, "M@x"), doubled(z[:, 1], "M"), doubled(gathered, "M") + hw.reshard(x, "M")

    return flat


@pytest.mark.parametrize("ranks", [1, 4])
def test_rows(ranks: int) -> None:
    fusion = rows(ranks)
    random = np.random.default_rng(0)
    for shared in (8, 7):
        x, z = random.standard_normal((shared, 5)).astype(np.float32), random.standard_normal((5, 8)).astype(np.float32)
        for schedule in (parallel(check_dependencies=True), seeded(1)):
            with schedule:
                y, total, whole = compiled(fusion).run(x=x, z=z)
            np.testing.assert_allclose(y, np.exp((x + 1) * 0.2), rtol=1e-5)
            np.testing.assert_allclose(total, (x + 1).sum(), rtol=1e-5)
            np.testing.assert_array_equal(whole, -z)


def test_flat() -> None:
    x = np.arange(7).astype(ml_dtypes.bfloat16)
    z = np.arange(14).reshape(7, 2).astype(ml_dtypes.bfloat16)
    for schedule in (parallel(check_dependencies=True), seeded(0)):
        with schedule:
            first, second, third = compiled(flat(3)).run(x=x, z=z)
        np.testing.assert_array_equal(first, 2 * x)
        np.testing.assert_array_equal(second, 2 * z[:, 1])
        np.testing.assert_array_equal(third, 3 * x)


@pytest.mark.parametrize("transport", ["two_sided", "one_sided"])
def test_on_one_rank_nothing_is_communicated(transport: str) -> None:
    """On one rank, there are no channels, although the types of the kernels name a mesh axis."""
    for fusion in (rows(1), flat(1)):
        assert lower(fusion, Options(transport=transport)).channels == ()


def test_blocks_share_sources() -> None:
    @hw.block(x=hw.bf16["N"])
    def inner(x):  # type: ignore[no-untyped-def]
        return hw.kernel(TWICE, "twice", "N", [x, hw.bf16["N"], "N"], per=128, block=128, cpu=TWICE_ON_CPU)

    @hw.fusion(x=hw.bf16["N"], z=hw.bf16["M"])
    def outer(x, z):  # type: ignore[no-untyped-def]
        return inner(inner(x)), hw.kernel(TWICE, "twice", "M", [z, hw.bf16["M"], "M"], per=128, block=128, cpu=TWICE_ON_CPU)

    assert [source.name for source in outer.user_kernels] == ["twice", "twice_2"]
    assert Fusion.parse(str(outer)) == outer
    assert HostProgram.parse(str(lowered(outer))) == lowered(outer)
    x, z = np.arange(5).astype(ml_dtypes.bfloat16), np.arange(3).astype(ml_dtypes.bfloat16)
    first, second = compiled(outer).run(x=x, z=z)
    np.testing.assert_array_equal(first, 4 * x)
    np.testing.assert_array_equal(second, 2 * z)


@pytest.mark.parametrize("make", [rows, flat])
def test_both_irs_contain_the_source(make: Any) -> None:
    fusion = make(2)
    assert Fusion.parse(str(fusion)) == fusion
    host = lowered(fusion)
    assert HostProgram.parse(str(host)) == host
    again = hw.compile(HostProgram.parse(str(host)))
    assert again.sources["kernels.h"] == compiled(fusion).sources["kernels.h"]


def test_the_text_of_a_source() -> None:
    source = '__global__ void f(const float* x, float* y, int64_t n) { /* "# } */ }'

    @hw.fusion(x=hw.f32["M", "N"])
    def one(x):  # type: ignore[no-untyped-def]
        return hw.kernel(source, "f", ("M", "N"), [x, hw.f32["M", "N"], "M"], per=64, cpu="void f(const float*, float*, int64_t) {}")

    assert str(one) == (
        "user_kernel @f = f(in f32[M, N], out f32[M, N], size M) grid(M, N by 64) block(256) {\n"
        '  "__global__ void f(const float* x, float* y, int64_t n) { /* \\"# } */ }"\n'
        "} cpu {\n"
        '  "void f(const float*, float*, int64_t) {}"\n'
        "}\n"
        "fusion @one(%x: f32[M, N]) {\n"
        "  %y: f32[M, N] = kernel @f(%x)\n"
        "  return %y\n"
        "}\n"
    )
    assert Fusion.parse(str(one)) == one


@needs_cuda
@pytest.mark.parametrize("make", [rows, flat])
def test_compiles_for_cuda(make: Any) -> None:
    program = compiled(make(2), target="cuda")
    assert program.module.name == make.__name__
    assert "warning" not in (program.folder / "build.log").read_text()


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG = """
__global__ void wrong(const float* x, float* y) {
  y[0] = nothing;
}
"""
LINE = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "= nothing" in line)


def one(source: str | Path, name: str = "f", grid: Any = 1, args: Any = None, **how: Any) -> Fusion:
    def program(x: hw.Tensor) -> Any:
        return hw.kernel(source, name, grid, [x, hw.f32["M"]] if args is None else [a if a != "x" else x for a in args], **how)

    return hw.fusion(mesh=hw.Mesh(d=2), x=hw.f32["M"])(program)


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_a_kernel_that_does_not_compile(target: str) -> None:
    """The error has the message of the compiler, and the file and line of the user."""
    with pytest.raises(BuildError) as caught:
        hw.compile(one(WRONG, "wrong"), target=target).build()
    assert f": test_user_kernels.py:{LINE}:" in str(caught.value)
    assert "nothing" in str(caught.value)


def test_a_file_of_kernels(tmp_path: Path) -> None:
    path = tmp_path / "mine.cu"
    path.write_text("// mine\n" + WRONG)
    with pytest.raises(BuildError, match=r": mine.cu:4:"):
        hw.compile(one(path, "wrong")).build()
    with pytest.raises(ProgramError, match=r"kernel: .*/none.cu: No such file or directory; give the path of a file of CUDA C\+\+$"):
        one(tmp_path / "none.cu")


FILES = ('a"b.cu', "a\\", 'x.cu"\n}\nint planted() { return system("false"); }\n#line 1 "', "größe.cu", "\udcff.cu", "a\tb.cu")


OF_TARGETS = [("cpu", file) for file in FILES] + [pytest.param("cuda", file, marks=needs_cuda) for file in FILES[:3]]


@pytest.mark.parametrize(("target", "file"), OF_TARGETS)
def test_the_name_of_a_file_is_not_code(target: str, file: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text(GOOD)
    hw.compile(one(path), target=target).build()
    path.write_text(WRONG)
    with pytest.raises(BuildError, match=r":3:.*nothing"):
        hw.compile(one(path, "wrong"), target=target).build()


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "latin.cu"
    path.write_bytes(b"// \xff")
    with pytest.raises(ProgramError, match=r"latin.cu: is not UTF-8; give the path of a file of CUDA C\+\+$"):
        one(path)


GOOD = "__global__ void f(const float* x, float* y) {}"
REFUSED = {
    "threads": (
        (TWICE.replace("__nv_bfloat16", "float"), "twice", "M", ["x", hw.f32["M"], "M"]),
        "kernel: twice uses blockIdx, but on the CPU target one thread runs a kernel; "
        "pass cpu= with a function for that target, or iterate by hw::over_grid",
    ),
    "no function": ((GOOD, "g"), "kernel: the source has no `__global__ void g(...)`; set name= to the function to launch"),
    "no name": ((GOOD, "f()"), "kernel: name='f()' is not the name of a C++ function; set name= to the function to launch"),
    "no tensor": ((GOOD, "f", 1, [hw.f32["M"], 2]), "kernel: f takes no tensor of this fusion; pass one in args"),
    "no output": ((GOOD, "f", 1, ["x"]), "kernel: f writes nothing; put the spec of an output, such as hw.f32['M'], in args"),
    "an arg": (
        (GOOD, "f", 1, ["x", None]),
        "kernel: None is not an argument; pass a tensor, a spec such as hw.f32['M'], a dim such as 'M' or a number",
    ),
    "number of args": ((GOOD, "f", 1, ["x", hw.f32["M"], 3]), "kernel: f takes 2 parameters, but 3 args are given"),
    "dtype": ((GOOD, "f", 1, ["x", hw.i32["M"]]), "kernel: `float* y` of f takes i32[M]; write int32_t*"),
    "const": (
        (GOOD.replace("const ", ""),),
        "kernel: `float* x` of f takes f32[M], which is read; write const float*",
    ),
    "written": (
        (GOOD.replace("float* y", "const float* y"),),
        "kernel: `const float* y` of f takes f32[M], which is written; write float*",
    ),
    "a number for a pointer": (
        (GOOD.replace("float* y", "float* y, float* z"), "f", 1, ["x", hw.f32["M"], 2]),
        "kernel: `float* z` of f is a pointer, and its arg is 2; pass a tensor or a spec",
    ),
    "grid": ((GOOD, "f", "Q"), "kernel: Q is not a dim of the tensors of f; theirs are M"),
    "dim": ((GOOD, "f", "M@"), "kernel: not a dim: 'M@'; write it like 'M', 'M@x' or 'M@dp,tp'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(ProgramError) as caught:
        hw.compile(one(*given))
    assert str(caught.value).partition(": ")[2] == message


def test_launch_of_threads_and_blocks() -> None:
    with pytest.raises(ProgramError, match=r"kernel: block=2048 must be 1 to 1024 threads, per=1 at least 1, and grid at least one dim$"):
        one(GOOD, block=2048)
    with pytest.raises(ProgramError, match=r"kernel: the source for the CPU has no `void f\(...\)`; define it with the same parameters$"):
        one(GOOD, cpu="void g() {}")
    with pytest.raises(
        ProgramError, match=r"stream: dim 0 of f32\[M\] is made by a kernel, so no loop can iterate over it; stream an earlier tensor$"
    ):
        hw.fusion(x=hw.f32["M"])(lambda x: hw.kernel(GOOD, "f", 1, [x, hw.f32["M"]]).stream(0))


def test_the_numpy_reference_refuses_user_kernels() -> None:
    fusion, x = one(GOOD), np.zeros(4, np.float32)
    wanted = "NumPy cannot compute the user's C\\+\\+"
    with pytest.raises(ArgumentError, match=f"kernel: {wanted}; compare the program with a NumPy function that you write$"):
        run_reference(fusion, {"x": x})
    with pytest.raises(ExecutionError, match=f"launch @f: {wanted}; run the compiled program$"):
        interpret(lowered(fusion), {"x": x})


def test_a_kernel_on_some_of_the_ranks() -> None:
    """A kernel runs on the mesh of its operands, and uses the axes of this mesh."""
    mesh = hw.Mesh(x=4)

    @hw.fusion(mesh=mesh, x=hw.f32["M@r", "N"].on(mesh.ranks([2, 3], r=2)))
    def on_some(x):  # type: ignore[no-untyped-def]
        return hw.kernel(ROWS, "scale_rows", grid="M@r", args=[x, 2.0, "M@r", "N", hw.f32["M@r", "N"], hw.f32["M@r"]])

    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    program = hw.compile(on_some)
    assert HostProgram.parse(program.host_ir) == lowered(on_some)
    scaled, sums = program.run(x=x)
    np.testing.assert_array_equal(scaled, 2 * x)
    np.testing.assert_array_equal(sums, x.sum(1))


def test_a_kernel_on_some_of_the_ranks_reads_a_reshaped_value() -> None:
    some = hw.Mesh(x=4).ranks([1, 3], u=2)
    source = "__global__ void twice(const float* x, float* y, int64_t n) { for (int64_t i : hw::over_grid(4 * n)) y[i] = 2 * x[i]; }"

    @hw.fusion(mesh=hw.Mesh(x=4), x=hw.f32["M", 4].on(some))
    def reshaped(x):  # type: ignore[no-untyped-def]
        args = [hw.reshape(x + 1, 4, "M"), hw.f32[4, "M"].on(some), "M"]
        return hw.kernel(source, "twice", (4, "M"), args, per=256)

    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(compiled(reshaped).run(x), 2 * (x + 1).reshape(4, 3))


def test_outputs_are_on_the_mesh_of_the_operands() -> None:
    """Outputs are on the mesh of the operands, even if the specs of the outputs state no mesh. A spec with another mesh is refused."""
    world = hw.Mesh(x=4)
    here, there = world.ranks([1, 2]), world.ranks([0, 3])

    def scaled(on: Any) -> Fusion:
        @hw.fusion(mesh=world, x=hw.f32["M@x", "N"].on(here))
        def rows(x):  # type: ignore[no-untyped-def]
            return hw.kernel(ROWS, "scale_rows", "M@x", [x, 2.0, "M@x", "N", on(hw.f32["M@x", "N"]), on(hw.f32["M@x"])])

        return rows

    assert scaled(lambda spec: spec.on(here)) == scaled(lambda spec: spec)
    with pytest.raises(
        ProgramError,
        match=r"kernel: f32\[M@x, N\] on mesh\(x=2 of ranks 0, 3\): outputs are on the mesh of its tensors, mesh\(x=2 of ranks 1, 2\); "
        r"remove \.on, and reshard the output$",
    ):
        scaled(lambda spec: spec.on(there))
