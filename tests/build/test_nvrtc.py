"""Kernels compiled by NVRTC: dtypes, constants, units and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_here import needs_cuda

import hostweave as hw
from hostweave.base.errors import BuildError
from hostweave.build.nvrtc import Nvrtc, units_of
from hostweave.targets.target import find_target


@needs_cuda
@pytest.mark.parametrize("dtype", [hw.f32, hw.f16, hw.bf16, hw.i64, hw.i32, hw.i16, hw.i8, hw.u64, hw.u32, hw.u16, hw.u8], ids=str)
def test_nvrtc_finds_the_kernels_of_every_dtype(dtype: Any, tmp_path: Path) -> None:
    @hw.fusion(mesh=hw.Mesh(x=1), x=dtype["M", "K"])
    def extremes(x):
        return hw.max(x, axis=0), hw.min(x, axis=1)

    found = find_target("cuda").toolchain()
    assert isinstance(found.kernel_compiler, Nvrtc)
    units = units_of(hw.compile(extremes).sources["kernels.cu"])
    assert [unit.name for unit in units] == ["max_x_kernel", "min_x_kernel"]
    for unit in units:
        assert unit.name.encode() in replace(found.kernel_compiler, arch="sm_90").compile(unit, tmp_path)


@needs_cuda
@pytest.mark.parametrize("dtype", [hw.f32, hw.bf16, hw.f64], ids=str)
def test_nvrtc_compiles_all_constants(dtype: Any, tmp_path: Path) -> None:
    @hw.fusion(x=dtype[64])
    def constants(x):
        for value in (float("nan"), float("inf"), 1e300, -1e39, 1e-46, -1e-300, 3.4e38, 1e-40):
            x = hw.where(x > value, x, hw.pad(x, (1, 1), value=value)[1:65])
        return x

    found = find_target("cuda").toolchain().kernel_compiler
    assert isinstance(found, Nvrtc)
    for unit in units_of(hw.compile(constants, "cuda").sources["kernels.cu"]):
        assert unit.name.encode() in replace(found, arch="sm_90").compile(unit, tmp_path)


def test_the_kernels_of_a_file_that_was_edited_stay_together() -> None:
    kernels = hw.compile(hw.fusion(x=hw.f32["M", 8])(lambda x: (hw.sum(x, 0), hw.sum(x, 1))), "cuda").sources["kernels.cu"]
    assert [unit.name for unit in units_of(kernels)] == ["sum_x_kernel", "sum_x_2_kernel"]
    for before, after in (
        ("}\n\n// %sum_x_2", "}\n\n__device__ float twice(float x) {\n  return x + x;\n}\n\n// %sum_x_2"),
        ("\n\n// %sum_x_2", "\n\n// mine"),
        ("}  // namespace", "}"),
    ):
        assert before in kernels
        (unit,) = units_of(kernels.replace(before, after))
        assert (unit.name, unit.text) == ("kernels", kernels.replace(before, after))


@needs_cuda
def test_an_error_in_a_kernel_names_its_line(tmp_path: Path) -> None:
    found = find_target("cuda").toolchain()
    assert isinstance(found.kernel_compiler, Nvrtc)
    kernels = hw.compile(hw.fusion(x=hw.f32["M", 8])(lambda x: (hw.sum(x, 0), hw.sum(x, 1))), "cuda").sources["kernels.cu"]
    lines = kernels.splitlines()
    line = max(i for i, text in enumerate(lines, 1) if "hw::griddep_wait();" in text)
    lines[line - 1] = "  hw::wait_for_strom();"
    unit = units_of("\n".join(lines))[1]
    with pytest.raises(BuildError, match=rf"nvrtc failed: kernels\.cu:{line}: error: .*wait_for_strom"):
        replace(found.kernel_compiler, arch="sm_90").compile(unit, tmp_path)
