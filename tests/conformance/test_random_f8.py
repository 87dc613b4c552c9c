"""Random programs with 8-bit floats: quantisation and scaled matmuls with random shardings. Programs pass the check, and the results of the
interpreter are close to those of NumPy.

Programs cover both 8-bit dtypes, all granularities of scales, even and uneven sizes, and chunk loops with every algorithm. Norms,
activations and gathers may precede the products. Epilogues and reductions may follow the products. Absolute values of inputs are 0, 2^i or
5 * 2^i, so that a quotient of an element and a scale is not near a tie. Then the reference in f64 and the program in f32 round to the same
value. If quantised values may be near a tie, `Writer.is_rounded` is set.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from interpret import interpret

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.check.check import check
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.fusion_ir.rewriting import at_sizes
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.size_requirements import undivided
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.types.machine import H200
from hostweave.types.numpy_dtypes import numpy_dtype

pytestmark = pytest.mark.filterwarnings("ignore::hostweave.base.errors.OverlapWarning")
Array = np.ndarray[Any, Any]
MESHES: tuple[dict[str, int], ...] = ({"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 8}, {"x": 2, "y": 2}, {"x": 2, "y": 4})
GATHERS = ("p2p", "ring", "broadcast", "all_gather", "put")
SCATTERS = ("p2p", "ring", "reduce", "reduce_scatter", "put")
UNIT = {hw.f32: 2.0**-20, hw.f16: 2.0**-10, hw.bf16: 2.0**-7}  # tolerance relative to the largest element
OLD = replace(H200, no_scales=tuple((kind, "the GPU is old") for kind in ("tensor", "row", "block")))


class Writer:
    """Writes one program. Rows x [M, K] pass through layers. Each layer quantises the rows, and multiplies the rows by weights."""

    def __init__(self, seed: int):
        self.draw = draw = random.Random(seed)
        self.mesh = hw.Mesh(**draw.choice(MESHES))
        self.scaling = draw.choice(["row", "tensor", "block"])
        step = 128 if self.scaling == "block" else draw.choice([16, 16, 16, 12])
        even = draw.random() < 0.5
        times = [self.mesh.size, 2 * self.mesh.size] if even else [1, 2, 3, 5]
        self.sizes = {name: step * draw.choice(times if step < 128 else times[:3]) for name in "KN"}
        self.sizes["M"] = draw.choice([8 * self.mesh.size, 24 * self.mesh.size] if even else [1, 5, 7, 18, 33])
        self.is_rounded = False  # True if values may be near a tie
        self.named = {"M"} if draw.random() < 0.5 else set()
        is_whole = step == 16 and self.sizes["N"] % (16 * self.mesh.size) == 0  # Each rank has a multiple of 16 columns.
        self.named |= {"N"} if draw.random() < 0.2 and is_whole else set()
        self.named |= {"K", "N"} if even and self.scaling == "block" and random.Random(~seed).random() < 0.5 else set()
        self.inputs: dict[str, hw.TensorType] = {}
        self.results: list[hw.Tensor] = []
        self.layers = draw.choice([1, 1, 2])
        for i in range(self.layers):
            self.declare(i)

    def size(self, name: str) -> Any:
        return name if name in self.named else self.sizes[name]

    def sharded(self, *sizes: Any, chance: float = 0.5) -> tuple[Any, ...]:
        dims = [str(size) for size in sizes]
        for axis in self.draw.sample([name for name, _ in self.mesh.axes], len(self.mesh.axes)):
            if self.draw.random() < chance:
                i = self.draw.randrange(len(dims))
                dims[i] += ("," if "@" in dims[i] else "@") + axis
        return tuple(dims)

    # --- inputs of a layer ---

    def dims(self, i: int) -> tuple[str, str]:
        return ("K", "N") if i % 2 == 0 else ("N", "K")

    def declare(self, i: int) -> None:
        """Declares the inputs of layer i. The weights are [n, k]. Weights of 8 bits have scales."""
        draw, (k, n), m = self.draw, map(self.size, self.dims(i)), self.size("M")
        wide = draw.choice([hw.f32, hw.bf16])
        if i == 0:
            self.inputs["x"] = wide[self.sharded(m, k)]
        is_known = self.scaling != "block" or not isinstance(k, str)  # Sizes of inputs must not be quotients.
        if draw.random() < 0.5 and is_known:
            blocks = {"row": (n, 1), "tensor": (1, 1)}.get(self.scaling) or draw.choice([(n // 128, k // 128), (n, k // 128)])
            self.inputs[f"w{i}"] = draw.choice([hw.f8e4m3, hw.f8e4m3, hw.f8e5m2])[self.sharded(n, k)]
            self.inputs[f"t{i}"] = hw.f32[self.sharded(*blocks, chance=0.3)]
        else:
            self.inputs[f"w{i}"] = wide[self.sharded(n, k)]
        self.inputs[f"b{i}"] = hw.f32[self.sharded(n, chance=0.3)]
        self.inputs[f"g{i}"] = wide[(k,)]
        if is_known:
            self.inputs[f"s{i}"] = hw.f32[(1, 1) if self.scaling == "tensor" else (m, 1 if self.scaling == "row" else k // 128)]

    # --- ops ---

    def maybe(self, chance: float) -> bool:
        return self.draw.random() < chance

    def kept(self, t: hw.Tensor) -> hw.Tensor:
        if self.maybe(0.15):
            self.results.append(t)
        return t

    def moved(self, t: hw.Tensor, chance: float = 0.5) -> hw.Tensor:
        return hw.reshard(t, *self.sharded(*t.shape)) if self.maybe(chance) else t

    def before(self, x: hw.Tensor, i: int, given: dict[str, hw.Tensor]) -> hw.Tensor:
        kind = self.draw.choice(["none", "none", "negative", "relu", "double", "rms_norm", "silu", "residual"])
        self.is_rounded |= kind in ("rms_norm", "silu")
        match kind:
            case "negative":
                return -x
            case "relu":
                return hw.relu(x)
            case "double":
                return x + x
            case "rms_norm":
                return hw.rms_norm(x, hw.astype(given[f"g{i}"], x.dtype))
            case "silu":
                return hw.silu(x) * x
            case "residual":
                return hw.maximum(x, self.moved(x))
        return x

    def quantized(self, x: hw.Tensor, i: int, given: dict[str, hw.Tensor]) -> tuple[hw.Tensor, hw.Tensor]:
        dtype, delayed = self.draw.choice([hw.f8e4m3, hw.f8e4m3, hw.f8e5m2]), self.maybe(0.2)
        if self.maybe(0.2):  # Rows [m, k] become [1, m, k].
            split = hw.reshape(x, 1, *x.shape)
            values, scales = hw.quantize(split, self.scaling, dtype)
            return hw.reshape(values, *x.shape), hw.reshape(scales, *scales.shape[1:])
        if not delayed or f"s{i}" not in given:
            return hw.quantize(x, self.scaling, dtype)
        values, now = hw.quantize(x, self.scaling, hw.f8e4m3, given[f"s{i}"])
        self.results.append(now)
        return values, given[f"s{i}"]

    def weights(self, i: int, given: dict[str, hw.Tensor]) -> tuple[hw.Tensor, hw.Tensor]:
        w = given[f"w{i}"]
        if w.dtype.itemsize == 1:
            return w, given[f"t{i}"]
        scaling = self.draw.choice(["block2d", "block"]) if self.scaling == "block" else self.scaling
        return hw.quantize(w, scaling)

    def product(self, x: hw.Tensor, i: int, given: dict[str, hw.Tensor]) -> hw.Tensor:
        draw, is_last = self.draw, i == self.layers - 1
        a, s = self.quantized(self.kept(self.before(x, i, given)), i, given)
        a, s = self.moved(self.kept(a), 0.6), self.moved(self.kept(s), 0.3)
        w, t = self.weights(i, given)
        w, t = self.moved(w, 0.3), self.moved(t, 0.3)
        out = draw.choice([hw.f32, hw.bf16, hw.f16 if self.layers == 1 else hw.f32]) if is_last else hw.f32
        y = hw.scaled_matmul(a, w.T, s, t.T, out_dtype=out)
        end = draw.choice(["none", "none", "scaled", "bias", "relu", "both", "residual", "twice"])
        if end in ("bias", "both"):
            y = y + hw.astype(given[f"b{i}"], out)
        if end in ("relu", "both"):
            y = hw.relu(y)
        if end == "scaled":
            y = y * 0.5
        if end == "residual":
            y = y + hw.astype(hw.reshape(given[f"b{i}"], 1, -1), out)
        if end == "twice":
            y = y + hw.scaled_matmul(a, w.T, s, t.T, out_dtype=out) * 2.0
        return self.streamed(self.moved(y))

    def streamed(self, y: hw.Tensor) -> hw.Tensor:
        if not self.loops or not self.maybe(0.5):
            return y
        size = self.draw.choice(self.mesh.axes)[1]
        chunks = self.draw.choice([None, 2, size, 2 * size])
        return y.stream(self.draw.choice([0, 0, 0, 1]), chunks, algorithm=self.draw.choice([None, None, *GATHERS, *SCATTERS]))

    def fusion(self, loops: bool) -> Fusion:
        """Returns the program, with chunk loops if `loops`. Each call starts from the same random state."""
        self.loops, self.results = loops, []
        state = self.draw.getstate()

        @hw.fusion(mesh=self.mesh, **self.inputs)
        def random_f8(**given: hw.Tensor) -> tuple[hw.Tensor, ...]:
            x = given["x"]
            for i in range(self.layers):
                x = self.product(x, i, given)
                self.is_rounded |= i < self.layers - 1
            return x, *self.results

        self.draw.setstate(state)
        return random_f8

    # --- arrays ---

    def arrays(self, seed: int) -> dict[str, Array]:
        draw = np.random.default_rng(seed)
        made = {}
        for name, type in self.inputs.items():
            shape = tuple(int(size.bind(self.sizes)) for size in type.shape)
            array = np.exp2(draw.integers(-4, 1, shape))
            if name[0] not in "st":  # Scales are powers of two.
                array *= draw.choice([0, 1, 5, -1, -5, 1], shape)
            made[name] = array.astype(numpy_dtype(type.dtype))
        return made


def lowered(writer: Writer, options: Options) -> tuple[Fusion, HostProgram]:
    """Lowers the program with its chunk loops, or without loops if the loops are refused."""
    with contextlib.suppress(ProgramError):
        fusion = writer.fusion(loops=True)
        return fusion, lower(fusion, options)
    fusion = writer.fusion(loops=False)
    return fusion, lower(fusion, options)


def expect_near(got: Array, want: Array, dtype: hw.DType, is_rounded: bool, message: str) -> None:
    """Compares each element or, if `is_rounded`, only the norm of the difference. Quantised values may then round to either neighbour."""
    assert got.shape == want.shape, message
    errors = np.abs(got.astype(np.float64) - want)
    if is_rounded:
        assert np.linalg.norm(errors) <= 0.03 * np.linalg.norm(want) + 1e-6, message
    else:
        assert errors.max(initial=0) <= UNIT.get(dtype, 0.0) * np.abs(want).max(initial=1e-9), message


def expect_results(fusion: Fusion, writer: Writer, host: HostProgram, given: dict[str, Array], results: Any) -> None:
    for output, whole in zip(host.outputs, run_reference(fusion, given), strict=True):
        for rank, blocks in enumerate(results):
            want = output.type.shard(whole, rank, fusion.mesh)
            message = f"%{output.name} on rank {rank} of {given['x'].shape}\n{fusion}"
            expect_near(blocks[output.name], want, output.type.dtype, writer.is_rounded, message)


def options(seed: int) -> Options:
    draw = random.Random(~seed)
    return Options(
        transport=draw.choice(["auto", "auto", "one_sided"]),
        overlap=draw.choice(["auto", "off"]),
        machine=OLD if draw.random() < 0.1 else None,
    )


# In seed 25, only one rank has a row. In seed 40, several ranks have parts of one block. In seed 87, blocks have named sizes.
@pytest.mark.parametrize("seed", [*range(16), 25, 40, 87, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 700))])
def test_results_of_every_rank_equal_those_of_numpy(seed: int) -> None:
    writer = Writer(seed)
    fusion, host = lowered(writer, options(seed))
    assert hw.Fusion.parse(str(fusion)) == fusion
    assert HostProgram.parse(str(host)) == host
    check(host, fusion=fusion)
    if ints := undivided(host, {name: writer.sizes[name] for name in host.symbols() if name in writer.sizes}):
        fusion = at_sizes(fusion, ints, [output.type for output in host.outputs])  # A call with uneven sizes runs this variant.
        host = lower(fusion, options(seed))
        check(host, fusion=fusion)
    given = writer.arrays(seed)
    expect_results(fusion, writer, host, given, interpret(host, given))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_compiled_programs(seed: int) -> None:
    writer = Writer(seed)
    fusion, host = lowered(writer, options(seed))
    given, program = writer.arrays(seed), hw.compile(fusion, options=options(seed))
    results = program.run(**given)
    for output, want, got in zip(host.outputs, run_reference(fusion, given), results if len(host.outputs) > 1 else (results,), strict=True):
        expect_near(got, want, output.type.dtype, writer.is_rounded, f"%{output.name} of {given['x'].shape}\n{fusion}")
    program.close()
