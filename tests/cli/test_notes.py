"""`hostweave inspect` prints a note for each large copy to contiguous memory (pack), and for each large gather that the program does not
request. A note names the line."""

from __future__ import annotations

from pathlib import Path

import pytest

import hostweave as hw
from hostweave.base.paths import EXAMPLES
from hostweave.cli.main import main
from hostweave.cli.notes import costly_choices
from hostweave.cli.programs import load_file, programs_in
from hostweave.fusion_ir.ir import Fusion
from hostweave.options import Options
from hostweave.pipeline import lower

MESH = hw.Mesh(x=4)
X = {"x": hw.f32["B", "S@x", "E"], "w": hw.f32["E", "N@x"]}
AT = {"B": 8, "S": 64, "E": 32, "N": 64}


def notes_of(program: Fusion, **sizes: int) -> list[str]:
    stages: list[object] = []
    host = lower(program, Options(), lambda _, stage: stages.append(stage))
    return costly_choices([stage for stage in stages if isinstance(stage, Fusion)][-1], host, sizes)


@hw.fusion(mesh=MESH, **X)
def gathered(x, w):
    return hw.matmul(x, w)


@hw.fusion(mesh=MESH, **X)
def stated(x, w):
    return hw.matmul(hw.reshard(x, "B", "S", "E"), w)


@hw.fusion(mesh=MESH, x=hw.f32["S@x", "B", "E"], w=hw.f32["E", "N@x"])
def outermost(x, w):
    return hw.matmul(hw.reshard(x, "S", "B", "E"), w)


@hw.fusion(mesh=MESH, x=hw.f32["M@x", "K"], w=hw.f32["K", "N"])
def streamed(x, w):
    return hw.matmul(x, w).stream("M", chunks=4)


def test_a_gather_and_a_pack() -> None:
    gather, pack = notes_of(gathered, **AT)
    size = 8 * 64 * 32 * 4
    total = size // 4 + 32 * 16 * 4 + 8 * 64 * 16 * 4
    of = f"{size:,} bytes a rank, {size / total:.0%} of the program's inputs and outputs at B=8, S=64, E=32, N=64"
    assert gather == (
        "test_notes.py:32: %x: f32[B, S@x, E] is gathered to f32[B, S, E], which is not annotated; "
        f"shard its consumer, or request the gather by hw.reshard: {of}"
    )
    assert pack == (
        "test_notes.py:32: %x_gathered_packed is copied to %x_gathered, because a communication needs contiguous memory; "
        f"make the sharded dim the outermost one: {of}"
    )


def test_requested_gathers_have_no_note() -> None:
    assert [note.partition(" is ")[2].partition(" ")[0] for note in notes_of(stated, **AT)] == ["copied"]
    assert not notes_of(outermost, **AT)
    assert not notes_of(streamed)


def test_small_gathers_have_no_note() -> None:
    assert not notes_of(gathered, B=8, S=64, E=4, N=64 * 64)


def test_calls_of_a_block_are_counted_together() -> None:
    file = EXAMPLES / "llama.py"
    llama = programs_in(load_file(file))["llama"]
    assert isinstance(llama, Fusion)
    notes = notes_of(llama)
    lines = [file.read_text().splitlines()[int(note.split(":")[1]) - 1].strip() for note in notes]
    assert [line.partition("(")[0] for line in lines] == ["q, k = ", "y = h + hw.linear"]
    assert all(" bytes a rank in 32 instances, " in note for note in notes)


def test_inspect_prints_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"{__file__}:gathered", "--after", "input", "--sizes", "B=8,S=64,E=32,N=64"]) == 0
    out, err = capsys.readouterr()
    assert out == str(gathered)
    assert [line.partition(f"note: {Path(__file__).name}:32: ")[0] for line in err.splitlines()] == ["", ""]
