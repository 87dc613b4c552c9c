"""Golden files of every program: its IR after each pass that changes the program, and its C++.

`pytest --update-golden` rewrites them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from attention_cases import in_zigzag, keys_in_a_loop, trained_in_zigzag
from fusions_from_files import all_fusions, more_fusions, one_sided_fusions, pipelines
from kernel_changes import expect_loops_to_parse
from lowered_fusions import GOLDEN, STAGES, golden

import hostweave as hw
from hostweave.base.paths import HOST_IR
from hostweave.emit import render
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.ir import HostProgram
from hostweave.pipeline import lower
from hostweave.types.tensor import bf16

ONE_SIDED = {name: one_sided_fusions(ranks=4)[name] for name in ("ag_matmul_put", "ag_matmul_pull", "matmul_rs_put")}
ATTENTION = {
    "keys_put": keys_in_a_loop(4, "put", bf16, head=64),
    "zigzag": trained_in_zigzag(4, bf16),
    "zigzag_keys_put": in_zigzag(2, bf16),
}


@hw.fusion(mesh=hw.Mesh(dp=4), x=bf16["M@dp", "K"], up=bf16["N@dp", "K"], down=bf16["N", "K@dp"])
def weights_by_columns(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
    """Two weights that are sharded by columns: `up` is transposed, and the gather of `down` can overlap with a matmul."""
    h = hw.relu(hw.matmul(x, hw.reshard(up, "N", "K").named("all_up").T))
    return x + hw.matmul(h, hw.reshard(down, "N", "K").named("all_down"))


@hw.fusion(mesh=hw.Mesh(x=4), x=bf16["M@x", "K"], dh=bf16["M", "N@x"])
def weights_gradient(x: hw.Tensor, dh: hw.Tensor) -> hw.Tensor:
    """Gradient of a weight: sharded rows are gathered in their stored layout, and transposed by a view of the result."""
    return hw.matmul(x.T, dh)


@hw.fusion(mesh=hw.Mesh(tp=4), table=bf16["V@tp", "D"], ids=hw.i32["T"], scores=hw.f32["T@tp", "S"])
def vocabulary(table: hw.Tensor, ids: hw.Tensor, scores: hw.Tensor) -> tuple[hw.Tensor, hw.Tensor]:
    """An embedding of a sharded vocabulary, and a causal mask of sharded rows, for which each rank needs the indices of its rows."""
    is_past = hw.iota(scores, 0)[:, None] >= hw.iota(scores, 1)[None, :]
    return hw.embedding(ids, table), hw.where(is_past, scores, float("-inf"))


@hw.block(x=bf16["M@dp", "E"], up=bf16["E@dp", "F"], down=bf16["F@dp", "E"])
def sharded_layer(x: hw.Tensor, up: hw.Tensor, down: hw.Tensor) -> hw.Tensor:
    return x + hw.matmul(hw.relu(hw.matmul(x, hw.reshard(up, "E", "F"))), hw.reshard(down, "F", "E"))


@hw.fusion(
    mesh=hw.Mesh(dp=4),
    x=bf16["M@dp", "E"],
    **{f"{name}_{i}": bf16["E@dp", "F"] if name == "up" else bf16["F@dp", "E"] for i in range(4) for name in ("up", "down")},
)
def sharded_layers(x: hw.Tensor, **weights: hw.Tensor) -> hw.Tensor:
    """Layers with sharded weights. The weights of a layer are gathered during the layer before."""
    for i in range(4):
        x = sharded_layer(x, weights[f"up_{i}"], weights[f"down_{i}"])
    return x


FURTHER = {
    "weights_by_columns": weights_by_columns,
    "weights_gradient": weights_gradient,
    "vocabulary": vocabulary,
    "sharded_layers": sharded_layers,
}
FUSIONS = {**all_fusions(ranks=4, chunks=3), **more_fusions(ranks=4), **ONE_SIDED, **pipelines(ranks=4), **ATTENTION, **FURTHER}
OPTIONS = {
    "zigzag_keys_put": hw.Options(sizes={"S": 4096}, choices={"@in_zigzag %k_gathered": "put(2)"}),
    "weights_by_columns": hw.Options(
        sizes={"M": 4096, "N": 4096, "K": 4096}, choices={f"@weights_by_columns %all_{w}": "put(4)" for w in ("up", "down")}
    ),
}


@dataclass(frozen=True)
class Lowered:
    """A program, its IR after each pass that changes it, and its C++."""

    name: str
    stages: dict[str, Fusion | HostProgram]
    host: HostProgram

    def files(self) -> dict[str, str]:
        """Text of each file in the folder of the program: C++ sources, and one file per pass that changes the program."""
        cpp = {path: text for path, text in render(self.host).items() if path != HOST_IR}  # the host IR is the last stage
        return {**{f"{stage}.hw": str(program) for stage, program in self.stages.items()}, **cpp}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(f"golden {name}")) for name in FUSIONS])
def lowered(request: pytest.FixtureRequest) -> Lowered:
    stages: dict[str, Fusion | HostProgram] = {}

    def observe(name: str, program: Fusion | HostProgram) -> None:
        if not stages or program != next(reversed(stages.values())):
            stages[name] = program

    host = lower(FUSIONS[request.param], OPTIONS.get(request.param, hw.Options()), observe)
    return Lowered(request.param, stages, host)


def test_every_stage(lowered: Lowered, request: pytest.FixtureRequest) -> None:
    folder, wanted = GOLDEN / lowered.name, lowered.files()
    if request.config.getoption("--update-golden"):
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            path.unlink()
        for path, text in wanted.items():
            (folder / path).write_text(text)
    for path, text in wanted.items():
        assert text == (folder / path).read_text(), f"{lowered.name}/{path}: run pytest --update-golden and read the difference"
    assert {path.name for path in folder.iterdir()} == set(wanted), "files are left over; run pytest --update-golden"


def test_every_stage_parses_back_equal(lowered: Lowered) -> None:
    for stage in lowered.stages.values():
        assert type(stage).parse(str(stage)) == stage


def test_loops_of_kernels_parse_back_equal(lowered: Lowered) -> None:
    expect_loops_to_parse(lowered.host)


def test_text_with_loops_compiles_from_there(lowered: Lowered) -> None:
    formed = [stage for stage in lowered.stages.values() if isinstance(stage, Fusion) and any(op.result.stream for op in stage.all_ops)]
    again = lower(Fusion.parse(str(formed[-1])), OPTIONS.get(lowered.name, hw.Options())) if formed else lowered.host
    assert str(again) == str(lowered.host)


def test_no_folder_is_left_over() -> None:
    assert {path.parent.name for path in GOLDEN.glob("*/*.hw")} == set(FUSIONS), "no program has these; remove them"


def test_a_stage_without_a_file_equals_the_previous_stage() -> None:
    assert golden("add", "insert_reshards") == golden("add", "input")
    assert golden("add", STAGES[-1]) == str(lower(FUSIONS["add"], hw.Options()))
