"""Results and C++ of programs with blocks, also of nested blocks."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from cProfile import Profile

import numpy as np
import pytest
from compiled_fusions import compiled, expect, integer_arrays, random_arrays, sizes_of
from scaled_tolerance import tolerance_at_scale
from unrolling import inlined

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.base.paths import EXAMPLES
from hostweave.check.check import check
from hostweave.cli.programs import load_file
from hostweave.emit import render
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.host_ir import ir, tree
from hostweave.host_ir.ir import HostProgram
from hostweave.options import Options
from hostweave.pipeline import lower
from hostweave.runtime.cpu import parallel, seeded
from hostweave.types.numpy_dtypes import numpy_dtype
from hostweave.types.tensor import DType, block_of


def nested(ranks: int) -> Fusion:
    """A block that calls a block. `mlp` has chunk loops, two results and an unused parameter. Some arguments and parameters have different
    shardings."""

    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E", "F@x"], v=hw.f32["F@x", "E"], unused=hw.f32["E"])
    def mlp(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, unused: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        h = hw.clip(hw.matmul(x, w).stream("M", chunks=ranks, algorithm="ring"), -1, 1)
        return hw.reshard(hw.matmul(h, v), "M@x", "E").stream("M", chunks=ranks), hw.sum(h, axis="M")

    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E", "F@x"], v=hw.f32["F@x", "E"], b=hw.f32["E"])
    def layer(x: hw.Tensor, w: hw.Tensor, v: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
        y, _ = mlp(hw.clip(x + b, -1, 1), w, v, unused=b)
        return hw.clip(x + y, -1, 1)

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M", "E@x"], w=hw.f32["F@x", "E"], b=hw.f32["E@x"])
    def nested(x: hw.Tensor, w: hw.Tensor, b: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
        h = layer(x, w.T, w, b).named("h")
        y, total = mlp(h, w.T, w, b)
        return layer(h, w.T, w, b) + y, total

    return nested


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_matches_numpy_and_the_program_without_blocks(ranks: int) -> None:
    fusion = nested(ranks)
    program = compiled(fusion)
    flat = compiled(inlined(fusion)) if ranks in (2, 8) else program
    sizes = sizes_of(fusion)
    arrays = random_arrays(fusion, sizes, seed=1)
    with parallel(check_dependencies=True):
        expect(fusion, arrays, program.run(**arrays, ranks=True))
    calls = [integer_arrays(fusion, sizes, seed) for seed in range(3)]
    for seed in range(4):
        with seeded(seed):
            results, without = (p.run_in_flight(calls, poison=True) for p in (program, flat))
        for arrays, ranks_of_call in zip(calls, results, strict=True):
            expect(fusion, arrays, ranks_of_call, exact=True)
        for with_blocks, others in zip(results, without, strict=True):
            for a, b in zip(with_blocks, others, strict=True):
                assert all((x == y).all() for x, y in zip(a, b, strict=True))


def test_results_on_other_meshes() -> None:
    mesh = hw.Mesh(x=4)
    first, second = mesh.ranks([0, 1]), mesh.ranks([2, 3])
    types = {"x": hw.f32["M@x", "K"].on(first), "w": hw.f32["K", "N"].on(first)}

    @hw.block(**types)
    def stage(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, ...]:
        h = hw.matmul(x, w)
        return h, hw.reshard(h, "M@x", "N", mesh=second), hw.sum(h, axis="M")

    @hw.fusion(mesh=mesh, **types)
    def stages(x: hw.Tensor, w: hw.Tensor) -> tuple[hw.Tensor, ...]:
        h, moved, total = stage(x, w)
        _, again, _ = stage(x, w)
        return -h, moved * 2 + again, total

    assert Fusion.parse(str(stages)) == stages
    random = np.random.default_rng(1)
    x, w = random.integers(-2, 3, (8, 5)).astype(np.float32), random.integers(-2, 3, (5, 3)).astype(np.float32)
    h, moved, total = compiled(stages).run(x=x, w=w)
    np.testing.assert_array_equal(h, -(x @ w))
    np.testing.assert_array_equal(moved, 3 * (x @ w))
    np.testing.assert_array_equal(total, (x @ w).sum(0))


def test_each_block_is_one_function() -> None:
    source = compiled(nested(4)).source
    assert [source.count(f"void Program::{name}(") for name in ("mlp", "layer")] == [1, 1]
    assert [source.count(f"  {name}(") for name in ("mlp", "layer")] == [2, 2]


@pytest.mark.parametrize("name", ["run", "int", "M"])
def test_names_of_blocks_that_mean_something_else_in_cpp(name: str) -> None:
    """The name of a block may be a C++ keyword. A block may also have the name of a member, size or buffer of the generated program."""

    def body(x: hw.Tensor) -> hw.Tensor:
        return x * 2

    body.__name__ = name
    block = hw.block(x=hw.f32["M"])(body)
    fusion = hw.fusion(x=hw.f32["M"], **{name: hw.f32["M"]})(lambda x, **others: block(block(x)) + others[name])
    arrays = random_arrays(fusion, {"M": 5}, seed=1)
    expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True))


# --- Llama ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "dtype"), [(2, hw.f32), (4, hw.bf16)])
def test_llama(ranks: int, dtype: DType) -> None:
    """Logits and cache for a prompt with uneven shards, compared with NumPy, on ranks in a seeded order and on parallel ranks."""
    module = load_file(EXAMPLES / "llama.py")
    counts = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    fusion = module.program(module.Config(vocab_size=20, hidden_size=24, intermediate_size=32, **counts, dtype=dtype), ranks)
    sizes, random = {"S": 13, "B": 2, "L": 15}, np.random.default_rng(1)
    arrays = {}
    for value in fusion.arguments:
        shape = tuple(size.bind(sizes) for size in value.type.shape)
        drawn = random.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) == 2 else 1 + random.standard_normal(shape) / 8
        arrays[value.name] = drawn.astype(numpy_dtype(value.type.dtype))
    arrays |= {"ids": random.integers(0, 20, (13, 2)).astype(np.int32), "position": np.array([11, 4], np.int32)}
    want = run_reference(fusion, arrays)
    program = compiled(fusion)
    outputs = lower(fusion, Options()).results
    for order in (seeded(1), parallel()):
        given = {name: array.copy() for name, array in arrays.items()}
        with order:
            ranked = program.run(**given, ranks=True)
        for index in range(1, len(outputs)):  # Tokens are not compared, because logits may have ties.
            allowed = tolerance_at_scale(fusion, outputs[index].name, sizes)
            for rank, results in enumerate(ranked):
                block = want[index][block_of(outputs[index].type, fusion.mesh, rank, want[index].shape)]
                np.testing.assert_allclose(
                    results[index].astype(np.float64), block, allowed.rtol, allowed.atol, err_msg=f"rank {rank}, {index}"
                )


def test_32_layers_of_llama() -> None:
    """All layers are one function with two gathers and two reduce-scatters. A loop calls the function. Lowering takes less than 5 seconds
    of CPU time."""
    fusion = load_file(EXAMPLES / "llama.py").llama
    started = time.process_time()  # CPU time does not depend on other processes.
    host = lower(fusion, Options())
    assert time.process_time() - started < 5
    assert [block.name for block in host.functions] == ["layer"]
    communications = Counter(type(i).__name__ for i in tree.walk(host.functions[0].body) if isinstance(i, ir.Communication))
    assert communications == {"AllGather": 2, "ReduceScatter": 2}  # Uneven rows need no additional communication.
    source = render(host)["program.cpp"]
    assert source.count("void Program::layer(") == 1
    assert source.count("  layer(") == 1  # The call is in a loop.
    assert "layer(x_i, in.layers[i], cos_angles_, sin_angles_, x_2_i, out.layers[i], caller);" in source


def test_programs_do_not_grow_with_the_number_of_layers() -> None:
    """Both IRs have as many lines for 128 layers as for 8 layers. Lowering and checking 128 layers takes less than 1.5 times the Python
    calls of 8 layers."""
    module = load_file(EXAMPLES / "llama.py")
    lines, calls = [], []
    for count in (8, 128):
        fusion = module.program(module.Config(num_hidden_layers=count), 8)
        with Profile() as profile:
            host = lower(fusion, Options(sizes={"B": 1}))
            check(host)
        calls.append(sum(entry.callcount for entry in profile.getstats()))
        lines.append((str(fusion).count("\n"), str(host).count("\n")))
        assert HostProgram.parse(str(host)) == host
        assert Fusion.parse(str(fusion)) == fusion
    assert lines[0] == lines[1]
    assert lines[0][0] < 150
    assert calls[1] < 1.5 * calls[0]


def test_time_to_trace_is_linear_in_the_number_of_layers() -> None:
    """Tracing 128 layers, each with two donated caches, takes less than 8 times the Python calls of 8 layers."""
    module = load_file(EXAMPLES / "llama.py")
    calls = []
    for count in (8, 128):
        with Profile() as profile:
            module.program(module.Config(num_hidden_layers=count), 8)
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[1] < 8 * calls[0]


def deep(ranks: int, w: str = "w_{}", b: str = "b_{}", numbers: Sequence[int] = range(1, 6)) -> Fusion:
    """Five calls with different weights, and two calls with the same weights. Ranks may have different numbers of rows."""

    @hw.block(x=hw.f32["M@x", "E"], b=hw.f32["E"], scale=hw.f32[1], w=hw.f32["E", "E@x"])
    def layer(x: hw.Tensor, b: hw.Tensor, scale: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.clip(x + hw.reshard(hw.matmul(hw.reshard(x, "M", "E"), w), "M@x", "E") * scale + b, -1, 1)

    @hw.block(x=hw.f32["M@x", "E"], b=hw.f32["E"])
    def last(x: hw.Tensor, b: hw.Tensor) -> hw.Tensor:
        return hw.clip(x * 2 + b, -1, 1)

    inputs = {name.format(i): type for i in numbers for name, type in ((w, hw.f32["E", "E@x"]), (b, hw.f32["E"]))}

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.f32["M@x", "E"], scale=hw.f32[1], **inputs)
    def deep(x: hw.Tensor, scale: hw.Tensor, **given: hw.Tensor) -> hw.Tensor:
        for i in numbers:
            x = layer(x, given[b.format(i)], scale, given[w.format(i)])
        for _ in range(2):
            x = last(x, given[b.format(1)])
        return x

    return deep


@pytest.mark.parametrize("ranks", [1, 4])
def test_calls_with_different_weights_are_a_loop_over_structs(ranks: int) -> None:
    fusion = deep(ranks, w="w2_{}_t")
    program = compiled(fusion)
    assert re.search(r"LayerInputs layers\[5\]; +// w2_1_t to b_5", program.sources["program.h"])
    lines = [line.strip() for line in program.source.splitlines()]
    loop = lines.index("for (int64_t i = 0; i < 5; ++i) {", lines.index("HW_CHECK(arena_.begin_call(caller));"))
    assert "layer(x_i, in.layers[i], scale, x_2_i, caller);" in lines[loop:]
    assert "last(x_i, in.layers[0], y_i, caller);" in lines[loop:]  # `last` reads b_1, which is in the struct of the first layer.
    for rows in (8, 7, 1):
        arrays = random_arrays(fusion, {"M": rows, "E": 12}, seed=rows)
        with parallel(check_dependencies=True):
            expect(fusion, arrays, program.run(**arrays, ranks=True))


@pytest.mark.parametrize("ranks", [2])
def test_calls_in_reverse_order_are_a_loop_that_counts_down(ranks: int) -> None:
    """A backward pass calls layers in reverse order, and reads results of earlier calls. Three functions read members of the same
    structs."""

    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E"], table=hw.f32["E"])
    def layer(x: hw.Tensor, w: hw.Tensor, table: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return hw.clip(x * w + table, -1, 1), x * 2

    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E"], table=hw.f32["E"], saved=hw.f32["M@x", "E"])
    def back(x: hw.Tensor, w: hw.Tensor, table: hw.Tensor, saved: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return hw.clip(x * w - saved, -1, 1), hw.sum(x * saved, axis="M") + table

    @hw.block(donate={"w": 0, "moment": 1}, w=hw.f32["E"], moment=hw.f32["E"], gradient=hw.f32["E"])
    def update(w: hw.Tensor, moment: hw.Tensor, gradient: hw.Tensor) -> tuple[hw.Tensor, ...]:
        moment = moment / 2 + hw.clip(gradient, -1, 1)
        return w - moment / 8, moment

    def program_of(count: int) -> Fusion:
        types = {f"{name}_{i}": hw.f32["E"] for i in range(count) for name in ("w", "moment")}
        types |= {f"table_{i}": hw.f32["E"] for i in range(count)}
        donated = {f"{name}_{i}": 1 + 2 * i + at for i in range(count) for at, name in enumerate(("w", "moment"))}

        @hw.fusion(mesh=hw.Mesh(x=ranks), donate=donated, x=hw.f32["M@x", "E"], **types)
        def step(x: hw.Tensor, **given: hw.Tensor) -> tuple[hw.Tensor, ...]:
            saved, gradients, updated = [], {}, []
            for i in range(count):
                x, kept = layer(x, given[f"w_{i}"], given[f"table_{i}"])
                saved.append(kept)
            for i in reversed(range(count)):
                x, gradients[i] = back(x, given[f"w_{i}"], given[f"table_{i}"], saved[i])
            for i in range(count):
                updated += update(given[f"w_{i}"], given[f"moment_{i}"], gradients[i])
            return x, *updated

        return step

    fusion = program_of(5)
    program = compiled(fusion)
    code = re.sub(r"\s+", " ", program.source[program.source.index("HW_CHECK(arena_.begin_call(caller));") :])
    assert "layer(x_i, in.layers[i], in.layers_2[i], x_2_i," in code
    assert "back(x_i, in.layers[4 - i], in.layers_2[4 - i]," in code
    assert "update(in.layers[i], back_add_x_ + i * E, out.updates[i], caller); }" in code
    assert code.count("for (int64_t i = 0; i < 5; ++i) {") == 3
    for rows in (7, 2):
        arrays = random_arrays(fusion, {"M": rows, "E": 5}, seed=rows)
        with parallel(check_dependencies=True):
            expect(fusion, arrays, program.run(**{name: array.copy() for name, array in arrays.items()}, ranks=True))
    of_run = [re.sub("//.*", "", hw.compile(program_of(count)).source.split("void Program::enqueue(")[1]).count("\n") for count in (5, 32)]
    assert of_run[1] <= of_run[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_of_consecutive_calls_are_a_loop_over_structs(ranks: int) -> None:
    """Each call computes one output of the program, in the memory of a donated input. In the program, one output precedes these outputs,
    and one output follows. One result has a second consumer."""

    @hw.block(donate={"kept": 1}, x=hw.f32["M@x", "E"], w=hw.f32["E"], kept=hw.f32["M@x", "E"])
    def layer(x: hw.Tensor, w: hw.Tensor, kept: hw.Tensor) -> tuple[hw.Tensor, ...]:
        kept = kept / 2 + x * w
        return hw.clip(x + kept, -1, 1), kept, hw.sum(kept, axis="E")

    types = {"w": hw.f32["E"], "kept": hw.f32["M@x", "E"]}
    inputs = {f"{name}_{i}": type for i in range(4) for name, type in types.items()}

    @hw.fusion(mesh=hw.Mesh(x=ranks), donate={f"kept_{i}": 1 + i for i in range(4)}, x=hw.f32["M@x", "E"], **inputs)
    def stateful(x: hw.Tensor, **given: hw.Tensor) -> tuple[hw.Tensor, ...]:
        kept, sums = [], []
        for i in range(4):
            x, state, total = layer(x, given[f"w_{i}"], given[f"kept_{i}"])
            kept.append(state)
            sums.append(total)
        return x, *kept, sums[3] + kept[2][:, 0]

    program = compiled(stateful)
    lines = [line.strip() for line in program.source.splitlines()]
    assert f"layer(x_i, in.layers[i], x_5_i, out.layers[i], layer_sum_kept_ + i * {'M' if ranks == 1 else 'M_x'}, caller);" in lines
    hand_over = 'HW_CHECK(hw::take_over({"kept_", member, "_updated"}, in.layers[member].kept, each.kept_updated, caller));'
    assert [lines.count("take_over(in, out, caller);"), lines.count(hand_over)] == [1, 1]
    assert "LayerOutputs layers[4];" in program.sources["program.h"]
    for rows in (7, 6, 1):
        arrays = random_arrays(stateful, {"M": rows, "E": 5}, seed=rows)
        with parallel(check_dependencies=True):
            expect(stateful, arrays, program.run(**{name: array.copy() for name, array in arrays.items()}, ranks=True))
    wrong = {**random_arrays(stateful, {"M": 6, "E": 5}, seed=1), "kept_2": np.zeros((6, 4), np.float32)}
    with pytest.raises(ArgumentError, match="kept_2"):
        program.run(**wrong)


@pytest.mark.parametrize("of_states", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2), (1, 3), (1, 0, 3, 2)])
def test_some_results_of_calls_are_in_memory_of_inputs(of_states: tuple[int, ...]) -> None:
    """Calls write results to the memory of donated inputs: in the order of the inputs, in reverse, permuted, or only some results."""

    @hw.block(x=hw.f32["M"], kept=hw.f32["M"])
    def layer(x: hw.Tensor, kept: hw.Tensor) -> tuple[hw.Tensor, ...]:
        return hw.clip(x + kept, -1, 1), kept * x

    inputs = {f"kept_{i}": hw.f32["M"] for i in range(4)}

    @hw.fusion(mesh=hw.Mesh(x=2), donate={f"kept_{i}": 1 + of for i, of in enumerate(of_states)}, x=hw.f32["M"], **inputs)
    def stateful(x: hw.Tensor, **given: hw.Tensor) -> tuple[hw.Tensor, ...]:
        states = []
        for i in range(4):
            x, state = layer(x, given[f"kept_{i}"])
            states.append(state)
        return x, *states

    arrays = random_arrays(stateful, {"M": 6}, seed=1)
    with parallel(check_dependencies=True):
        expect(stateful, arrays, compiled(stateful).run(**{name: array.copy() for name, array in arrays.items()}, ranks=True))


@pytest.mark.parametrize("order", [("w", "scale"), ("scale", "w"), ("w", "", "scale"), ("scale", "", "w")])
def test_inputs_between_the_weights_of_calls(order: tuple[str, ...]) -> None:
    """Other inputs of the program are before, after or between the weights of the calls."""

    @hw.block(x=hw.f32["M@x", "E"], w=hw.f32["E"])
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.clip(x + w, -1, 1)

    names = [f"{name}_{i}" for name in order if name for i in range(4)]
    if "" not in order:
        names = [f"{name}_{i}" for i in range(4) for name in order]

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"], **dict.fromkeys(names, hw.f32["E"]))
    def scaled(x: hw.Tensor, **given: hw.Tensor) -> hw.Tensor:
        for i in range(4):
            x = layer(x, given[f"w_{i}"])
        for i in range(4):
            x = x * given[f"scale_{i}"]
        return x

    program = compiled(scaled)
    assert "in.layers[i], x_2_i, caller)" in program.source
    assert ("in.layers[3].scale" in program.source) == ("" not in order)
    arrays = random_arrays(scaled, {"M": 6, "E": 5}, seed=1)
    expect(scaled, arrays, program.run(**arrays, ranks=True))


def test_names_of_arrays_are_unique() -> None:
    """An array of structs is named after the function that reads the array. Several arrays of a function are numbered."""

    @hw.block(x=hw.f32["M@x", "E"], **dict.fromkeys("abcd", hw.f32["E"]))
    def layer(x: hw.Tensor, **w: hw.Tensor) -> hw.Tensor:
        return hw.clip(x * w["a"] + w["b"] - w["c"] * w["d"], -1, 1)

    @hw.block(x=hw.f32["M@x", "E"], **dict.fromkeys("abcd", hw.f32["E"]))
    def last(x: hw.Tensor, **w: hw.Tensor) -> hw.Tensor:
        return hw.clip(x * w["b"] + w["a"] - w["c"] * w["d"], -1, 1)

    rows = [("a", "b"), ("c", "d"), ("moment_a", "moment_b"), ("moment_c", "moment_d")]
    names = [f"{name}_{i}" for row in rows for i in range(3) for name in row]

    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "E"], **dict.fromkeys(names, hw.f32["E"]))
    def both(x: hw.Tensor, **given: hw.Tensor) -> hw.Tensor:
        for i in range(3):
            x = layer(x, **{name: given[f"{name}_{i}"] for name in "abcd"})
        for i in range(3):
            x = last(x, **{name: given[f"moment_{name}_{i}"] for name in "abcd"})
        return x

    program = compiled(both)
    for field in ("LayerInputs layers[3]", "Layer2Inputs layers_2[3]", "LastInputs lasts[3]", "Last2Inputs lasts_2[3]"):
        assert f"{field};" in program.sources["program.h"]
    arrays = random_arrays(both, {"M": 6, "E": 5}, seed=1)
    expect(both, arrays, program.run(**arrays, ranks=True))


def test_weights_without_consecutive_numbers_are_separate_inputs() -> None:
    fusion = deep(2, numbers=(1, 2, 3, 4, 6))
    header = compiled(fusion).sources["program.h"]
    assert re.search(r"LayerInputs layers\[4\]; +// w_1 to b_4\n +hw::Tensor w_6\b", header)
    arrays = random_arrays(fusion, {"M": 4, "E": 6}, seed=1)
    expect(fusion, arrays, compiled(fusion).run(**arrays, ranks=True))
