"""A matmul program on the CPU target, compared with a direct call of the same OpenBLAS function. The two calls alternate in one process."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from functools import cache
from pathlib import Path

import numpy as np
from peers.report import print_tools

import hostweave as hw

SIZES = (1024, 1536, 2048)
LIMIT = 0.85


def main() -> None:
    print_tools("numpy", "scipy-openblas32")

    @hw.fusion(x=hw.f32["M", "K"], w=hw.f32["K", "N"])
    def matmul(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.matmul(x, w)

    program = hw.compile(matmul, target="cpu")
    for size in SIZES:
        x, w = (np.random.default_rng(i).standard_normal((size, size)).astype(np.float32) for i in range(2))
        y = np.empty_like(x)
        program.run(x=x, w=w)
        ratios, gflops = [], []
        for _ in range(7):
            _openblas().scipy_openblas_set_num_threads(os.cpu_count())  # The CPU target changes the number of threads.
            started = time.perf_counter()
            _sgemm(x, w, y)
            direct = time.perf_counter() - started
            time.sleep(0.3)  # OpenBLAS threads spin after a call, and would occupy the cores.
            times = program.measure(warmups=0, repetitions=1, x=x, w=w)
            ours = times[0][0].total_ms / 1e3
            ratios.append(direct / ours)
            gflops.append(2e-9 * size**3 / ours)
        speed = statistics.median(ratios)
        rate = statistics.median(gflops)
        print(f"matmul f32 {size}^3 on the CPU target: {speed:.2f} of OpenBLAS called directly (limit {LIMIT}), {rate:.0f} GFLOP/s")


@cache
def _openblas() -> ctypes.CDLL:
    import scipy_openblas32

    folder = Path(scipy_openblas32.get_lib_dir())
    return ctypes.CDLL(str(next(folder.glob("libscipy_openblas*"))))


def _sgemm(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    row_major, plain = 101, 111
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    pa, pb, pc = (ctypes.c_void_p(array.ctypes.data) for array in (a, b, c))
    _openblas().scipy_cblas_sgemm(row_major, plain, plain, m, n, k, one, pa, k, pb, n, zero, pc, n)


if __name__ == "__main__":
    main()
