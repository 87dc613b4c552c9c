"""NVTX ranges. An injected profiler records each function of a program and each library call in the function, correctly nested."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cuda_here import needs_cuda

from hostweave.base.paths import RUNTIME, RUNTIME_INCLUDES
from hostweave.build.cuda import find_cuda

PROFILER = r"""
#include <nvtx3/nvToolsExt.h>

#include <cstdio>

namespace {
int depth = 0;
int push(const char* name) { return std::printf("%*s%s\n", 2 * depth++, "", name), depth; }
int pop() { return --depth; }
}  // namespace

extern "C" int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (!callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}
"""
PROGRAM = r"""
#include "hostweave/check.h"

#include <cstdio>
#include <stdexcept>

namespace hw {
void fail(cudaError_t, const char* call, const char*, int) { throw std::runtime_error(call); }
constinit thread_local CallLog* CallLog::current_ = nullptr;  // no call is logged
void CallLog::line(const char*, const char*, int) {}
}  // namespace hw

cudaError_t multiply(const char* x) { return x ? cudaSuccess : cudaErrorInvalidValue; }

void layer(const char* h) {
  const hw::Range range("layer");
  HW_CHECK(multiply(h));
  HW_CHECK(multiply("w"));
}

int main() {
  const hw::Range range("model");
  layer("x");
  try {
    layer(nullptr);
  } catch (const std::runtime_error&) {
  }
  HW_CHECK(multiply("y"));
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, cuda = tmp_path_factory.mktemp("ranges"), find_cuda()
    assert cuda.nvtx.path, f"pip install {cuda.nvtx.package}"
    include = [f"-I{path}" for path in (*RUNTIME_INCLUDES, *cuda.include_folders)]
    for name, text, more in (
        ("profiler", PROFILER, ["-shared", "-fPIC"]),
        ("program", PROGRAM, [str(RUNTIME / "src" / "range_cuda.cpp"), "-ldl"]),
    ):
        (folder / f"{name}.cpp").write_text(text)
        subprocess.run(["g++", "-std=c++20", *include, f"{folder / name}.cpp", *more, "-o", folder / name], check=True)
    return folder


@needs_cuda
def test_a_profiler_sees_functions_and_calls(built: Path) -> None:
    profiled = {**os.environ, "NVTX_INJECTION64_PATH": str(built / "profiler")}
    seen = subprocess.run([built / "program"], env=profiled, capture_output=True, text=True, check=True).stdout
    assert seen.splitlines() == [
        "model",
        "  layer",
        "    multiply(h)",
        '    multiply("w")',
        "  layer",
        "    multiply(h)",
        '  multiply("y")',
    ]


@needs_cuda
def test_without_a_profiler_nothing_happens(built: Path) -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("NVTX_")}
    run = subprocess.run([built / "program"], env=alone, capture_output=True, text=True, check=True)
    assert (run.stdout, run.stderr) == ("", "")
