"""Generated kernels at the shapes of Llama 3 on one GPU, compared with torch.compile and with a device copy of as many bytes.

Kernel, copy and torch are timed alternately. Calls cycle through sets of buffers that together exceed the cache of the GPU. A case that
alone exceeds the cache several times has one set. A line ends with MISSED if a limit is missed. The limits are the time relative to
torch.compile and, from 2048 rows on, the bandwidth relative to the copy. Arguments are names of cases. Unknown names are ignored. All cases
run if no name is known.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from math import prod
from typing import Any

from peers.report import print_machine, spread

import hostweave as hw

COLD_BYTES = 256 << 20  # smallest total bytes of the sets of buffers; several times the cache of an H200
CALLS = 20  # calls per measurement
TIMINGS = 7  # measurements of each variant, after two that are discarded
COPY_SHARE = 0.90  # smallest allowed fraction of the bandwidth of a copy, for at least MANY_ROWS rows
TORCH_TIMES = 1.02  # largest allowed ratio to the time of torch.compile
MANY_ROWS = 2048
ROWS = (1, 16, 256, 2048, 8192)
WIDTHS = {"8B": (4096, 14336), "70B": (8192, 28672)}  # hidden size, inner size of the MLP
HEAD = 128
# Rounds bf16 to 8 bits without a scale. The kernel is a reference for kernels that also scale. Each thread loads 64 bytes before its first
# store.
NARROW = """
__global__ void __launch_bounds__(256) narrow(const hw::bf16* x, hw::f8e4m3* y, int64_t rows, int64_t columns) {
  constexpr int kWidth = 8, kParts = 4;
  const int64_t first = (256 * kParts * int64_t{blockIdx.x} + threadIdx.x) * kWidth, n = rows * columns;
  hw::Values<hw::bf16, kWidth> loaded[kParts];
  for (int part = 0; part < kParts; ++part) {
    if (const int64_t i = first + 256 * kWidth * part; i < n) loaded[part] = hw::load<kWidth>(x + i);
  }
  for (int part = 0; part < kParts; ++part) {
    hw::Values<float, kWidth> values;
    for (int e = 0; e < kWidth; ++e) values[e] = loaded[part].f32(e);
    if (const int64_t i = first + 256 * kWidth * part; i < n) hw::store(y + i, values);
  }
}
"""
# A reference for kernels that also write the transpose: the kernel `narrow` with two results, neither transposed.
NARROW_TWICE = (
    NARROW.replace("narrow(", "narrow_twice(")
    .replace("hw::f8e4m3* y,", "hw::f8e4m3* y, hw::f8e4m3* z,")
    .replace(
        "if (const int64_t i = first + 256 * kWidth * part; i < n) hw::store(y + i, values);",
        "if (const int64_t i = first + 256 * kWidth * part; i < n) hw::store(y + i, values), hw::store(z + i, values);",
    )
)


@dataclass(frozen=True)
class Case:
    """A kernel to measure. `compute` takes Hostweave or torch as `ops`, so that both compute the same."""

    name: str
    compute: Callable[..., Any]
    inputs: tuple[str, ...]  # shapes: M rows, widths H and F, N heads of D elements, C is half of D, "1" is size 1
    outputs: tuple[str, ...]  # shapes; a prefix, also of an input, gives the dtype: "8" for 8-bit floats, "f" for f32, and none for bf16


def _norm(ops: Any, x: Any, weight: Any) -> Any:
    return ops.rms_norm(x, weight)


def _layer_norm(ops: Any, x: Any, weight: Any, bias: Any) -> Any:
    return ops.layer_norm(x, weight, bias)


def _residual_norm(ops: Any, x: Any, r: Any, weight: Any) -> Any:
    h = x + r
    return h, ops.rms_norm(h, weight)


def _bias_gelu(ops: Any, x: Any, bias: Any) -> Any:
    return ops.gelu(x + bias)


def _swiglu(ops: Any, gate: Any, up: Any) -> Any:
    return ops.silu(gate) * up


def _quantized_norm(ops: Any, x: Any, weight: Any) -> Any:
    return ops.quantize(ops.rms_norm(x, weight), "row")


def _quantized_swiglu(ops: Any, gate: Any, up: Any) -> Any:
    return ops.quantize(ops.silu(gate) * up, "row")


def _narrowed(ops: Any, x: Any) -> Any:
    return ops.narrowed(x)


def _narrowed_twice(ops: Any, x: Any) -> Any:
    return ops.narrowed_twice(x)


def _quantized(ops: Any, x: Any, scale: Any) -> Any:
    return ops.quantized(x, scale)


def _quantized_columns(ops: Any, x: Any, scale: Any) -> Any:
    """Operand for the gradient of a weight: the transpose of `x`, quantised with the scale of the previous step."""
    return ops.quantized(x, scale).T


def _quantized_both(ops: Any, x: Any, scale: Any) -> Any:
    """Operands for both gradients of a linear layer: the quantised values and their transpose."""
    values = ops.quantized(x, scale)
    return values, values.T


def _softmax(ops: Any, x: Any) -> Any:
    return ops.softmax(x)


def _rotary(ops: Any, x: Any, cos: Any, sin: Any) -> Any:
    return ops.rotary_embedding(x, cos, sin)


def _row_sum(ops: Any, x: Any) -> Any:
    return ops.sum(x, 1)


def _column_sum(ops: Any, x: Any) -> Any:
    return ops.sum(x, 0)


def _squares(ops: Any, x: Any) -> Any:
    return ops.sum(x * x)


def _chain(ops: Any, x: Any, y: Any) -> Any:
    return ops.tanh(x * 0.5 + y) * x - y


CASES = (
    Case("chain", _chain, ("MH", "MH"), ("MH",)),
    Case("bias + gelu", _bias_gelu, ("MF", "F"), ("MF",)),
    Case("SwiGLU", _swiglu, ("MF", "MF"), ("MF",)),
    Case("RMSNorm", _norm, ("MH", "H"), ("MH",)),
    Case("residual + RMSNorm", _residual_norm, ("MH", "MH", "H"), ("MH", "MH")),
    Case("RMSNorm of heads", _norm, ("MND", "D"), ("MND",)),
    Case("LayerNorm", _layer_norm, ("MH", "H", "H"), ("MH",)),
    Case("RMSNorm + quantise", _quantized_norm, ("MH", "H"), ("8MH", "fM1")),
    Case("SwiGLU + quantise", _quantized_swiglu, ("MF", "MF"), ("8MF", "fM1")),
    Case("narrow by hand", _narrowed, ("MH",), ("8MH",)),
    Case("narrow by hand, twice", _narrowed_twice, ("MH",), ("8MH", "8MH")),
    Case("quantise", _quantized, ("MH", "f11"), ("8MH",)),
    Case("quantise, transpose", _quantized_columns, ("MH", "f11"), ("8HM",)),
    Case("quantise, both", _quantized_both, ("MH", "f11"), ("8MH", "8HM")),
    Case("softmax", _softmax, ("MH",), ("MH",)),
    Case("rotary", _rotary, ("NMD", "MC", "MC"), ("NMD",)),
    Case("row sum", _row_sum, ("MH",), ("M",)),
    Case("column sum", _column_sum, ("MH",), ("H",)),
    Case("sum of squares", _squares, ("MH",), ("",)),
)


class Ours:
    """The functions of Hostweave that cases use, quantisation with a given scale, and two handwritten kernels."""

    def __getattr__(self, name: str) -> Any:
        return getattr(hw, name)

    def quantized(self, x: Any, scale: Any) -> Any:
        return hw.astype(hw.astype(x, hw.f32) / scale, hw.f8e4m3)

    def narrowed(self, x: Any) -> Any:
        rows, columns = x.shape
        return hw.kernel(NARROW, "narrow", (rows, columns), [x, hw.f8e4m3[rows, columns], rows, columns], per=8192)

    def narrowed_twice(self, x: Any) -> Any:
        rows, columns = x.shape
        results = [hw.f8e4m3[rows, columns], hw.f8e4m3[rows, columns]]
        return hw.kernel(NARROW_TWICE, "narrow_twice", (rows, columns), [x, *results, rows, columns], per=8192)


class Torch:
    """Functions of torch under the names that the cases use. Norms and softmax are over the last dim."""

    def __init__(self) -> None:
        import torch
        import torch.nn.functional as functional

        self.sum, self.tanh, self.gelu, self.silu = torch.sum, torch.tanh, functional.gelu, functional.silu
        self.softmax = lambda x: functional.softmax(x, -1)
        self.rms_norm = lambda x, weight: functional.rms_norm(x, weight.shape, weight, 1e-6)
        self.layer_norm = lambda x, weight, bias: functional.layer_norm(x, weight.shape, weight, bias, 1e-5)
        self.concat = lambda *parts: torch.cat(parts, -1)

    def quantize(self, x: Any, scaling: str) -> tuple[Any, Any]:
        scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return self.quantized(x, scale), scale

    def quantized(self, x: Any, scale: Any) -> Any:
        import torch

        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    def narrowed(self, x: Any) -> Any:
        return self.quantized(x, 1)

    def narrowed_twice(self, x: Any) -> Any:
        values = self.narrowed(x)
        return values, values.clone()

    def rotary_embedding(self, x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, -1)
        return self.concat(first * cos - second * sin, second * cos + first * sin)


def main(words: Sequence[str]) -> None:
    print_machine()
    import torch

    group = hw.init()
    torch.cuda.set_device(0)
    print(f"{torch.cuda.get_device_name(0)}, bf16; limit for at least {MANY_ROWS} rows: {COPY_SHARE} of a copy's bandwidth")
    for case in [case for case in CASES if case.name in words] or CASES:
        for model, (hidden, inner) in WIDTHS.items():
            program = hw.compile(fusion_of(case, hidden, inner), target="cuda")
            for rows in ROWS:
                timed = _times(_calls(case, {"M": rows, **_widths(hidden, inner)}, program, group))
                us = {name: statistics.median(each) for name, each in timed.items()}
                share, times = us["copy"] / us["ours"], us["ours"] / us["torch"]
                missed = (rows >= MANY_ROWS and share < COPY_SHARE) or times > TORCH_TIMES
                print(
                    f"{case.name:20} {model:4} {rows:5} rows {spread(timed['ours'], 1):>24} us, {share:5.2f} of a copy, "
                    f"{times:5.2f} times torch.compile's {spread(timed['torch'], 1)} us{'  MISSED' if missed else ''}",
                    flush=True,
                )
            program.close()


def _widths(hidden: int, inner: int) -> dict[str, int]:
    return {"H": hidden, "F": inner, "N": hidden // HEAD, "D": HEAD, "C": HEAD // 2, "1": 1}


def fusion_of(case: Case, hidden: int, inner: int) -> hw.Fusion:
    """Fusion of a case, whose program is one kernel."""
    dims = {"M": "M", **_widths(hidden, inner)}
    names = "abcdefgh"[: len(case.inputs)]
    types = {"8": hw.f8e4m3, "f": hw.f32}
    specs = {
        name: types.get(shape[:1], hw.bf16)[tuple(dims[letter] for letter in shape.lstrip("8f"))]
        for name, shape in zip(names, case.inputs, strict=True)
    }

    @hw.fusion(**specs)
    def kernel(**arrays: hw.Tensor) -> Any:
        return case.compute(Ours(), *arrays.values())

    return kernel


def _calls(case: Case, sizes: dict[str, int], program: hw.Program, group: Any) -> dict[str, list[Callable[[], Any]]]:
    """Calls to time, as one list per variant. Each call of a list has separate buffers. Raises AssertionError if results differ."""
    import torch

    def filled(shape: str) -> Any:
        dtype = {"8": torch.float8_e4m3fn, "f": torch.float32}.get(shape[:1], torch.bfloat16)
        made = torch.randn([sizes[letter] for letter in shape.lstrip("8f")], device="cuda")
        return (made.abs() + 0.1 if dtype == torch.float32 else made).to(dtype)

    torch._dynamo.reset()  # Otherwise, torch stops compiling after a few sizes.
    compiled = torch.compile(lambda *arrays: case.compute(Torch(), *arrays), dynamic=False)
    kept: dict[int, Any] = {}  # Results stay alive, so that torch's allocator does not reuse memory that is in the cache of the GPU.

    def ours() -> Callable[[], Any]:
        given, made = [filled(shape) for shape in case.inputs], tuple(filled(shape) for shape in case.outputs)
        out = made[0] if len(made) == 1 else made
        return lambda: program(*given, out=out, group=group)

    def theirs(number: int) -> Callable[[], Any]:
        given = [filled(shape) for shape in case.inputs]

        def call() -> Any:
            kept[number] = compiled(*given)
            return kept[number]

        return call

    def copy() -> Callable[[], Any]:
        half = -(-moved // 8192) * 4096  # A multiple of 4 KiB. A copy of 48 MiB and 16 bytes takes 7% longer than a copy of 48 MiB.
        source, target = (torch.empty(half, dtype=torch.uint8, device="cuda") for _ in range(2))
        return lambda: target.copy_(source)

    given = [filled(shape) for shape in case.inputs]
    expected = case.compute(Torch(), *given)
    for results in (program(*given, group=group), compiled(*given)):
        for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (results, expected)), strict=True):
            relative = 0.13 if one.dtype == torch.float8_e4m3fn else 3e-2  # Neighbours in f8e4m3 differ by at most 1/8 of the smaller one.
            one, other = one.float(), other.float()
            torch.testing.assert_close(one, other, rtol=relative, atol=3e-2 * max(1.0, float(other.abs().max())))
    shapes = (*case.inputs, *case.outputs)
    moved = sum({"8": 1, "f": 4}.get(shape[:1], 2) * prod(sizes[letter] for letter in shape.lstrip("8f")) for shape in shapes)
    count = -(-COLD_BYTES // moved)
    return {
        "ours": [ours() for _ in range(count)],
        "torch": [theirs(number) for number in range(count)],
        "copy": [copy() for _ in range(count)],
    }


def _times(calls: dict[str, list[Callable[[], Any]]]) -> dict[str, list[float]]:
    """Microseconds per call on the GPU, from alternating measurements.

    Each call uses the next set of buffers. The GPU spins while the calls of a measurement are enqueued. Host time is not included if the
    GPU spins until all calls are enqueued. The first two measurements are discarded.
    """
    import torch

    timings: dict[str, list[float]] = {name: [] for name in calls}
    turns = {name: cycle(every) for name, every in calls.items()}
    for _ in range(TIMINGS + 2):
        for name, turn in turns.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(20_000_000)
            begin.record()
            for call in islice(turn, CALLS):
                call()
            end.record()
            end.synchronize()
            timings[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    return {name: us[2:] for name, us in timings.items()}


if __name__ == "__main__":
    main(sys.argv[1:])
