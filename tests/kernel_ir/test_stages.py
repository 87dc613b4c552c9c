"""Golden files of kernels: the ops, and the loops after each pass that changes the loops. `pytest --update-golden` rewrites the files."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kernel_changes import kernel_of
from lowered_fusions import GOLDEN

import hostweave as hw
from hostweave.base.errors import ParseError, ProgramError
from hostweave.fusion_ir.ir import Op, Value
from hostweave.host_ir.text import parse_kernel
from hostweave.kernel_ir.loops import Loops
from hostweave.kernel_ir.pipeline import PASSES, stages
from hostweave.kernel_ir.text import parse_loops
from hostweave.types.machine import H200, Machine
from hostweave.types.text import Reader

FOLDER = GOLDEN / "kernels"
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "chain": (lambda x, y: hw.tanh(x * 0.5 + y) * x, {"x": hw.bf16["M", 4096], "y": hw.bf16["M", 4096]}),
    "bias": (lambda x, b: x + b, {"x": hw.bf16["M", "N"], "b": hw.bf16["N"]}),
    "odd_rows": (lambda x: hw.permute_dims(x, (1, 0, 2)) * 2, {"x": hw.f32["M", 3, 63]}),
    "multiples": (lambda x, b: x + b, {"x": hw.f32["B", 4, "T", 64], "b": hw.f32["T", 64]}),
    "rms_norm": (hw.rms_norm, {"x": hw.bf16["M", 4096], "weight": hw.bf16[4096]}),
    "norm_of_heads": (lambda x: hw.rms_norm(x), {"x": hw.bf16["M", 32, 128]}),
    "transposed": (lambda x: hw.permute_dims(x, (1, 0)) * 2, {"x": hw.bf16["M", 4096]}),
    "softmax": (lambda x: hw.softmax(x), {"x": hw.f32["M", "N"]}),
    "quantized_norm": (lambda x, w: hw.quantize(hw.rms_norm(x, w), "row"), {"x": hw.bf16["M", 4096], "w": hw.bf16[4096]}),
    "quantized_swiglu": (lambda x, y: hw.quantize(hw.silu(x) * y, "row"), {"x": hw.bf16["M", 14336], "y": hw.bf16["M", 14336]}),
    "softmax_of_few": (lambda x: hw.softmax(x), {"x": hw.f32["M", 8]}),
    "column_sum": (lambda x: hw.sum(x, 0), {"x": hw.bf16["M", 4096]}),
    "argmax": (lambda x: hw.argmax(x, 1), {"x": hw.f32["M", "N"]}),
    "lookup": (lambda ids, table: hw.embedding(ids, table), {"ids": hw.i32["T"], "table": hw.bf16["V", 4096]}),
    "few_rows": (
        lambda x, v, w: hw.silu(hw.matmul(x, v)) * hw.matmul(x, w),
        {"x": hw.bf16[4, 4096], "v": hw.bf16[4096, 14336], "w": hw.bf16[4096, 14336]},
    ),
    "cumulative": (lambda x: hw.cumsum(x, 1), {"x": hw.f32["M", "N"]}),
    "update": (
        lambda cache, x, at: hw.dynamic_update_slice(cache, x, (0, at, 0)),
        {"cache": hw.f32["B", "L", 64], "x": hw.f32["B", 1, 64], "at": hw.i32[()]},
    ),
}


def stages_of(name: str, machine: Machine = H200) -> list[tuple[str, Loops]]:
    function, specs = CASES[name]
    return stages(*kernel_of(function, **specs), machine)


@pytest.mark.parametrize("name", CASES)
def test_stages_are_golden(name: str, request: pytest.FixtureRequest) -> None:
    function, specs = CASES[name]
    kernel, buffers = kernel_of(function, **specs)
    found = stages(kernel, buffers, H200)
    assert found == stages(kernel, buffers, H200)
    text = "".join([*(f"{line}\n" for line in kernel.lines()), *(f"// {stage}\n{loops}" for stage, loops in found)])
    path = FOLDER / f"{name}.loops"
    if request.config.getoption("--update-golden"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name}: run pytest --update-golden and read the difference"


@pytest.mark.parametrize("name", CASES)
def test_passes_read_text(name: str) -> None:
    """The passes turn the text of the loops before them into the text of the loops after them."""
    ops, *texts = re.split(r"^// (\w+)\n", (FOLDER / f"{name}.loops").read_text(), flags=re.MULTILINE)
    reader = Reader(ops)
    reader.expect("kernel")
    kernel = parse_kernel(reader)
    wanted = dict(zip(texts[::2], texts[1::2], strict=True))
    loops = parse_loops(wanted.pop("index_space"), kernel)
    for apply in PASSES:
        text = wanted.pop(apply.__name__, str(loops))
        assert str(apply(loops, H200)) == text
        loops = parse_loops(text, kernel)
    assert not wanted


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("loops @fused_y {", "loops @y {", "these are loops of @y, not of @fused_y"),
        ("at i * 4096 + j", "at k * 4096 + j", "'k' is not a loop index; use one of i, j"),
        (
            "a block shares a row",
            "a block has a row",
            "unknown distribution 'a block has a row'; use one of: each thread",
        ),
        ("reduce %mean_x", "reduce %total", "kernel @fused_y does not compute %total"),
        ("vectors of 8 along j", "vectors of 8 along i", "expected 'j', found 'i'"),
        ("hold %x, %weight\n}", "hold %x, %weight\n} }", "expected the end of the text, found '}'"),
    ],
)
def test_wrong_text_is_refused(old: str, new: str, why: str) -> None:
    function, specs = CASES["rms_norm"]
    kernel, buffers = kernel_of(function, **specs)
    text = str(stages(kernel, buffers, H200)[-1][1])
    assert old in text
    with pytest.raises(ParseError, match=re.escape(why)):
        parse_loops(text.replace(old, new, 1), kernel)


def test_every_pass_changes_a_kernel_and_no_file_is_left_over() -> None:
    seen = {stage for name in CASES for stage, _ in stages_of(name)}
    assert seen == {"index_space", *(apply.__name__ for apply in PASSES)}
    assert {path.stem for path in FOLDER.iterdir()} == set(CASES), "remove files that no case has"


@pytest.mark.parametrize(
    ("name", "figures", "line"),
    [
        # 4096 columns are 128 tiles.
        ("column_sum", {"multiprocessors": 127}, "distribute: a block reduces a tile of columns, 512 threads"),
        ("column_sum", {"block_threads": 512}, "distribute: a block reduces a tile of columns, 512 threads, 1 block per multiprocessor"),
        ("softmax_of_few", {"warp": 8}, "distribute: a part of a warp shares a row, 2 threads"),
        ("norm_of_heads", {"line_bytes": 64}, "distribute: a part of a warp shares a row, 4 threads"),
        ("quantized_swiglu", {"registers": 2**15}, "distribute: a block shares a row, 448 threads, 1 block per multiprocessor"),
        ("rms_norm", {"registers": 2**13}, "distribute: a block shares a row, 64 threads"),
        ("chain", {"access_bytes": 32}, "vectors of 16 along i"),
    ],
    ids=str,
)
def test_the_schedule_asks_the_machine(name: str, figures: dict[str, int], line: str) -> None:
    (_, usual), (_, loops) = stages_of(name)[-1], stages_of(name, replace(H200, **figures))[-1]
    assert line in [*loops.lines()]
    assert line not in [*usual.lines()]


def test_ops_that_need_two_kernels_are_refused() -> None:
    function, specs = CASES["column_sum"]
    kernel, buffers = kernel_of(function, **specs)
    sums = Op("cumsum", ("y",), Value("z", kernel.results[0].type), (("axis", 0),))
    with pytest.raises(ProgramError, match="kernel @sum_y: %z needs all elements along a dim at once; split it"):
        stages(replace(kernel, ops=(*kernel.ops, sums)), buffers, H200)
