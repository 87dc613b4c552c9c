"""Output of commands. A mistake gives one line on stderr and status 1."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lowered_fusions import GOLDEN, STAGES, golden

import hostweave as hw
from hostweave.base.paths import EXAMPLES
from hostweave.build import cache
from hostweave.cli.demo import repetitions_in
from hostweave.cli.highlight import has_colours
from hostweave.cli.main import main
from hostweave.kernel_ir.pipeline import STAGES as STAGES_OF_KERNELS

SEEDS = EXAMPLES / "seeds.py"
P2P = f"{SEEDS}:ag_matmul_p2p"
AT_FOUR = ("--set", "D=4", "--set", "S=3")
Captured = pytest.CaptureFixture[str]


def golden_source(name: str, path: str) -> str:
    return (GOLDEN / name / path).read_text()


def output_of(capsys: Captured, *arguments: str) -> str:
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert all(line.startswith("note: ") for line in err.splitlines())
    return out


def mistake_of(capsys: Captured, *arguments: str) -> str:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("hostweave: ")
    return err.removeprefix("hostweave: ").removesuffix("\n")


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo(capsys: Captured) -> None:
    out = output_of(capsys, "demo", "--ranks", "4", "--target", "cpu")
    assert golden("ag_matmul_p2p", "input") in out
    shown = textwrap.dedent(
        golden_source("ag_matmul_p2p", "program.cpp").partition("begin_call(caller));\n")[2].partition("  HW_CHECK(arena_")[0]
    )
    assert shown.count("\n") > 10
    assert shown in out
    first = out.splitlines()[:6]
    assert first[2].startswith("y [4, 256, 256] matches NumPy on 4 ranks (largest error ")
    assert first[3].startswith("a call: ")
    assert "simulated" in first[4]
    folder = Path(out.split("all generated files: ")[1].splitlines()[0])
    assert (folder / "program.cpp").is_file()


def test_output_of_the_default_demo_fits_on_a_screen(capsys: Captured) -> None:
    assert len(output_of(capsys, "demo").splitlines()) <= 40


def test_demo_measures_slow_calls_less_often() -> None:
    assert [repetitions_in(2.0, a_call) for a_call in (1e-5, 0.25, 2.8)] == [20, 8, 1]


@pytest.mark.parametrize("name", ["matmul_rs_flat", "allreduce"])
def test_demo_of_another_program(capsys: Captured, name: str) -> None:
    out = output_of(capsys, "demo", "--program", name, "--ranks", "3", "--target", "cpu")
    assert "matches NumPy on 3 ranks" in out


def test_demo_of_a_wrong_result(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_EDIT", str(tmp_path))
    command = ("demo", "--program", "allreduce", "--ranks", "2", "--target", "cpu")
    assert main(command) == 0
    source = tmp_path / "allreduce" / "program.cpp"
    source.write_text(source.read_text().replace("ncclSum", "ncclMax"))
    capsys.readouterr()
    assert main(command) == 1
    assert capsys.readouterr().out.count("DIFFERS from NumPy") == 2


def test_demo_of_an_unknown_program(capsys: Captured) -> None:
    message = mistake_of(capsys, "demo", "--program", "nothing")
    assert message.startswith("demo: there is no program 'nothing'; use one of allgather, allreduce, ")


# --- inspect ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_inspect_after_each_pass(capsys: Captured, stage: str) -> None:
    assert output_of(capsys, "inspect", P2P, *AT_FOUR, "--after", stage) == golden("ag_matmul_p2p", stage)


def test_inspect_shows_the_changes_of_every_stage(capsys: Captured, tmp_path: Path) -> None:
    """The output has the program before the passes, and then the difference that each pass makes. The differences, applied in order, give
    the final program. A pass without changes has one line."""
    out = output_of(capsys, "inspect", P2P, *AT_FOUR, "--after", "all")
    stages = list(STAGES)
    titles = re.findall(r"^# ---- (\w+)(.*)$", out, re.M)
    assert [name for name, _ in titles] == stages
    texts = {stage: golden("ag_matmul_p2p", stage) for stage in stages}
    assert out.startswith(f"# ---- input\n{texts['input']}")
    for (before, after), (_, said) in zip(itertools.pairwise(stages), titles[1:], strict=True):
        assert said == (": nothing changed" if texts[before] == texts[after] else "")
    whole = tmp_path / "stage.hw"
    whole.write_text(texts["input"])
    for stage, part in zip(stages[1:], re.split(r"^# ---- .*\n", out, flags=re.M)[2:], strict=True):
        if part.strip():
            subprocess.run(["patch", "-s", str(whole)], input=part, text=True, check=True)
        assert whole.read_text() == texts[stage]


def test_inspect_finds_the_examples_of_the_package(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_of(capsys, "inspect", "seeds:ag_matmul_p2p", *AT_FOUR, "--after", "input") == golden("ag_matmul_p2p", "input")


def test_inspect_shows_one_file(capsys: Captured) -> None:
    assert output_of(capsys, "inspect", P2P, *AT_FOUR, "--only", "program.h") == golden_source("ag_matmul_p2p", "program.h")
    files = "program.hw, program.h, program.cpp, binding.cpp"
    assert (
        mistake_of(capsys, "inspect", P2P, *AT_FOUR, "--only", "kernels.cu")
        == f"--only kernels.cu: there is no such file; use one of {files}"
    )


def test_inspect_shows_one_function(capsys: Captured) -> None:
    llama = f"{EXAMPLES / 'llama.py'}:llama"
    host = output_of(capsys, "inspect", llama, "--after", "plan_memory")
    of_each_kind = dict(re.findall(r"^(kernel|function|host) @(\w+)", host, re.M))
    assert of_each_kind.keys() == {"kernel", "function", "host"}
    for name in of_each_kind.values():
        one = output_of(capsys, "inspect", llama, "--after", "plan_memory", "--only", name)
        assert one in host
        assert len(re.findall(rf"@{name}\(", one.splitlines()[0])) == 1
        assert one.count("{") == one.count("}")
    mistake = mistake_of(capsys, "inspect", llama, "--after", "input", "--only", "nothing")
    assert mistake == "--only nothing: there is no such function; use one of layer, prefill"
    assert "-  %" in output_of(capsys, "inspect", llama, "--after", "all", "--only", "layer")


def test_inspect_shows_the_loops_of_kernels(capsys: Captured) -> None:
    llama = f"{EXAMPLES / 'llama.py'}:llama"
    first, last = (output_of(capsys, "inspect", llama, "--after", stage) for stage in ("index_space", "number_elements"))
    assert re.findall(r"^loops @(\w+) {", first, re.M) == re.findall(r"^loops @(\w+) {", last, re.M)
    assert "distribute:" not in first
    one = output_of(capsys, "inspect", llama, "--after", "number_elements", "--only", "dynamic_update_slice_x")
    assert one.count("loops @dynamic_update_slice_x {\n  keep i in ") == 2  # for the two layouts of the written part
    assert one.count("loops @") == one.count("  distribute: ") == 2
    assert one in last


def test_inspect_shows_the_sources(capsys: Captured) -> None:
    out = output_of(capsys, "inspect", P2P, *AT_FOUR)
    for path in ("program.h", "program.cpp", "binding.cpp"):
        assert f"// ==== {path}\n{golden_source('ag_matmul_p2p', path)}" in out


def test_inspect_memory(capsys: Captured) -> None:
    out = output_of(capsys, "inspect", P2P, *AT_FOUR, "--memory", "--sizes", "m=128,K=1024")
    assert out.endswith(
        """
   7        %x_gathered = allocate bf16[m, K]
   8        if %i != 0 {
   9          group {
  10            recv %x_gathered from %p on x
  11            send %x_i to (rank.x - %i) % 4 on x
  12          }
  13        }
  14        %y_i = select %y[0: %p]
  15        %x_chunk = choose %x_i if %i == 0 else %x_gathered
  16        matmul %x_chunk, %w -> %y_i
  17      }
  18    }
  19    join loop
  20  }

memory of @ag_matmul_p2p at m=128, K=1024, N=4096, rank 0
buffer       type        bytes        offset                     lines  streams
%x_gathered  bf16[m, K]  4 x 262,144  0 262,144 524,288 786,432  10-16  loop
peak 1,048,576 bytes, lower bound 1,048,576, ratio 1.000
"""
    )


def test_inspect_memory_of_a_program_without_temporaries(capsys: Captured) -> None:
    out = output_of(capsys, "inspect", f"{SEEDS}:allgather", *AT_FOUR, "--memory")
    assert out.endswith("\nmemory of @allgather at N=4096, rank 0\nno temporaries\n")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("K", "--sizes K: 'K' is not a size; write NAME=NUMBER, with commas between several"),
        ("M=" + 5000 * "9", f"--sizes M={20 * '9'}: no memory holds so many elements; pass a smaller size"),
        ("m=²", "--sizes m=²: 'm=²' is not a size; write NAME=NUMBER, with commas between several"),
        ("=4", "--sizes =4: '=4' is not a size; write NAME=NUMBER, with commas between several"),
        ("m=1,K=x", "--sizes m=1,K=x: 'K=x' is not a size; write NAME=NUMBER, with commas between several"),
        ("M=8", "ag_matmul_p2p: Options: sizes: there is no size named M; the sizes of the program: m, K, N"),
    ],
)
def test_inspect_memory_at_wrong_sizes(capsys: Captured, sizes: str, message: str) -> None:
    assert mistake_of(capsys, "inspect", P2P, "--memory", "--sizes", sizes) == message
    wrong = mistake_of(capsys, "inspect", P2P, "--memory", "--after", "all")
    assert wrong == "--memory: prints the final program; omit --after and --only"


def test_sizes_that_a_program_cannot_have(capsys: Captured) -> None:
    message = mistake_of(capsys, "inspect", f"{SEEDS}:ag_matmul_flat", *AT_FOUR, "--memory", "--sizes", "M=6")
    assert (
        message
        == "seeds.py:67: %x_gathered = allocate bf16[M/4, K]: M/4: 4 does not divide 6: choose sizes that divide without a remainder"
    )


def test_inspect_reads_the_host_ir_of_a_program_folder(capsys: Captured, tmp_path: Path) -> None:
    text = output_of(capsys, "inspect", P2P, *AT_FOUR, "--only", "program.hw")
    assert text == golden("ag_matmul_p2p", list(STAGES)[-1])
    file = tmp_path / "program.hw"
    file.write_text(text)
    assert output_of(capsys, "inspect", str(file), "--only", "program.hw") == text


@pytest.mark.parametrize("stage", ["input", "choose_overlap", "propagate_copies"])
def test_inspect_continues_from_ir_text(capsys: Captured, stage: str) -> None:
    file = GOLDEN / "ag_matmul_p2p" / f"{stage}.hw"
    without_lines = re.sub(r" *// \w+\.py:.*\n", "", golden_source("ag_matmul_p2p", "program.cpp"))
    assert without_lines in output_of(capsys, "inspect", str(file))


def test_streams(capsys: Captured) -> None:
    assert "streams(loop[2])" in output_of(capsys, "inspect", P2P, "--streams", "2", "--after", "lower_to_host")


def test_inspect_shows_the_choices_of_a_search(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(program: Any, options: hw.Options) -> Any:
        return SimpleNamespace(compiled=SimpleNamespace(options=replace(options, streams=2)))

    monkeypatch.setattr(hw, "compile", searched)
    assert "streams(loop[2])" in output_of(capsys, "inspect", P2P, "--overlap", "search", "--after", "lower_to_host")


def test_the_only_program_of_a_file_needs_no_name(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "one.py"
    file.write_bytes("\ufeffimport hostweave as hw\n\nN: int = 8\n@hw.fusion(x=hw.f32[N])\ndef one(x):\n    return -x\n".encode())
    assert "fusion @one(%x: f32[4])" in output_of(capsys, "inspect", str(file), "--after", "input", "--set", "N = 4")


def test_a_file_is_run_as_python_runs_it(capsys: Captured, tmp_path: Path) -> None:
    """A file can import other files of its folder, and can define dataclasses with any annotations. Afterwards, even after an error,
    sys.path is the same as before, and sys.modules does not contain the file."""
    (tmp_path / "sizes_of_one.py").write_text("from dataclasses import dataclass\n\n\n@dataclass\nclass Sizes:\n    n: int = 8\n")
    text = "import hostweave as hw\nfrom sizes_of_one import *\n\n\n@dataclass\nclass More(Sizes):\n    m: object = int\n\n\n"
    text += "one = hw.fusion(x=hw.f32[More().n])(lambda x: -x)\n"
    file = tmp_path / "one_of_them.py"
    for future in ("", "from __future__ import annotations\n"):
        file.write_text(future + text)
        before = list(sys.path)
        assert "(%x: f32[8])" in output_of(capsys, "inspect", str(file), "--after", "input")
    file.write_text("import hostweave as hw\nhw.none\n")
    assert "hostweave has no none" in mistake_of(capsys, "inspect", str(file))
    assert sys.path == before
    assert "one_of_them" not in sys.modules


def test_programs_that_cannot_be_loaded(capsys: Captured, tmp_path: Path) -> None:
    missing, broken, text, empty = (tmp_path / name for name in ("missing.py", "broken.py", "text.hw", "empty.py"))
    broken.write_text("import hostweave as hw\nfusion = = 3\n")
    text.write_text("fusion @f(%x: f33[N]) mesh() {\n")
    empty.write_text("x = 1\n")
    remedy = "give FILE.py:FUSION, or FILE.hw with the text of an IR"
    assert mistake_of(capsys, "inspect", str(missing)) == f"{missing}: No such file or directory; {remedy}"
    text.write_bytes(b"\xef\xbb\xbf" + text.read_bytes())  # with a byte order mark
    (latin := tmp_path / "latin.hw").write_bytes(b"\xe9")
    assert mistake_of(capsys, "inspect", str(latin)) == f"{latin}: byte 0 is not UTF-8; give the text of an IR"
    assert mistake_of(capsys, "inspect", "missing.hw") == f"missing.hw: No such file or directory; {remedy}"
    (null := tmp_path / "null.py").write_bytes(b"\0")
    assert mistake_of(capsys, "inspect", str(null)) == f"{null}:1: source code string cannot contain null bytes"
    assert mistake_of(capsys, "inspect", str(broken)) == f"{broken}:2: invalid syntax"
    assert mistake_of(capsys, "inspect", str(text)).startswith(f"{text}: line 1, column 15: unknown dtype 'f33'; use one of ")
    assert mistake_of(capsys, "inspect", str(empty)) == f"{empty}: defines no program; decorate a function with @hw.fusion"
    assert mistake_of(capsys, "inspect", f"{SEEDS}:nothing").startswith(
        f"{SEEDS}: there is no program 'nothing'; give {SEEDS}:NAME with one of allgather, "
    )
    assert mistake_of(capsys, "inspect", str(SEEDS)).startswith(
        f"{SEEDS}: there are several programs; give {SEEDS}:NAME with one of allgather, "
    )


def test_constants_that_cannot_be_set(capsys: Captured) -> None:
    def set_to(setting: str, program: str = P2P) -> str:
        return mistake_of(capsys, "inspect", program, "--set", setting)

    assert set_to("D") == "--set D: there is no '='; write NAME=VALUE"
    assert set_to("Q=1") == "seeds.py: there is no top-level constant 'Q' to set"
    assert set_to("D=x") == "--set D=x: x is not a Python literal; quote a string twice, as in NAME='\"text\"'"
    assert set_to("D=0").endswith("mesh axis x has size 0: it must be an int of at least 1")
    file = str(GOLDEN / "add" / "input.hw")
    assert set_to("D=1", file) == f"{file}: IR text has no constant 'D' to set; edit the text"


def test_no_such_pass(capsys: Captured) -> None:
    stages = ", ".join((*STAGES, *STAGES_OF_KERNELS))
    assert mistake_of(capsys, "inspect", P2P, "--after", "magic") == f"--after magic: there is no such stage; use one of {stages}, all"


# --- timeline ---------------------------------------------------------------------------------------------------------


def test_timeline(capsys: Captured, tmp_path: Path) -> None:
    for suffix, start in {"html": "<!doctype html>", "json": '{"traceEvents"', "svg": "<svg"}.items():
        out = output_of(capsys, "timeline", P2P, *AT_FOUR, "--sizes", "m=128", "--output", str(tmp_path / f"t.{suffix}"))
        assert out.startswith("ag_matmul_p2p on mesh(x=4) at m=128, K=4096, N=4096: ")
        assert out.count("  rank ") == 4
        assert out.endswith(f"{tmp_path / f't.{suffix}'}\n")
        assert (tmp_path / f"t.{suffix}").read_text().startswith(start)
    to = ("--output", str(tmp_path / "t.svg"))
    assert output_of(capsys, "timeline", "transformer:mlp_tp", "--ranks", "dp=2,tp=2", *to).count("  rank ") == 4
    assert mistake_of(capsys, "timeline", P2P, "--sizes", "Q=8", *to).startswith("ag_matmul_p2p: Options: sizes: there is no size named Q")
    measured = ("timeline", P2P, *AT_FOUR, "--measure", *to)
    out = output_of(capsys, *measured, "--sizes", "m=32,K=64,N=16")
    assert "measured on cpu, the median of 20 calls" in out
    assert "  matmul y_i: predicted " in out
    assert mistake_of(capsys, *measured, "--sizes", "m=32") == "--measure: no size is given for K, N; give --sizes K=1024,N=1024"
    assert mistake_of(capsys, *measured, "--ranks", "2").startswith("--measure: runs the program on its own mesh; omit --ranks")
    hosts = ("timeline", "transformer:mlp_tp", "--ranks", "dp=4,tp=4", *to)
    assert "and 45 GB/s between hosts (--network)" in output_of(capsys, *hosts, "--network", "45e9,5e-6")
    assert "or --network 45e9,5e-6 on the command line" in mistake_of(capsys, *hosts)
    assert mistake_of(capsys, *hosts, "--network", "fast") == "--network fast: write two numbers, as in --network 45e9,5e-6"
    assert mistake_of(capsys, "timeline", P2P, "--ranks", "x", *to).startswith("--ranks x: 'x' is not a size; write NAME=NUMBER")
    assert mistake_of(capsys, "timeline", P2P, "--ranks", "0", *to).endswith("mesh axis x has size 0: it must be an int of at least 1")
    assert "has no axis tp; its axes: x" in mistake_of(capsys, "timeline", P2P, "--ranks", "tp=4", *to)


# --- compile, export, doctor, cache -----------------------------------------------------------------------------------


def test_compile_and_cache(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_CACHE", str(tmp_path))
    monkeypatch.delenv("HOSTWEAVE_CACHE_LIMIT", raising=False)
    folder = Path(output_of(capsys, "compile", P2P, *AT_FOUR).strip())
    assert folder.parent == tmp_path
    assert (folder / "program.cpp").read_text() == golden_source("ag_matmul_p2p", "program.cpp")
    assert (folder / "hostweave_program.so").is_file()
    assert output_of(capsys, "cache", "path") == f"{tmp_path}\n"
    (tmp_path / ".killed-0123456789abcdef.01234567").mkdir()  # A killed build leaves a folder with such a name.
    (tmp_path / ".killed-0123456789abcdef.01234567" / "SHA256SUMS").touch()
    assert {entry.kind for entry in cache.entries()} == {"program", "object", "unfinished build"}
    program, objects, removed, total = output_of(capsys, "cache").splitlines()
    assert re.fullmatch(rf" +[\d.]+ [kM]B +now  {folder}", program)
    count = int(re.fullmatch(r" +[\d.]+ [kM]B  (\d+) objects?", objects)[1])  # type: ignore[index]
    assert removed == "removed 1 folder of interrupted builds"
    assert re.fullmatch(rf"{tmp_path}: {count + 1} entries, [\d.]+ MB of at most 10000 MB", total)
    assert output_of(capsys, "cache", "size") == f"{total}\n"
    listed = json.loads(output_of(capsys, "cache", "--json"))
    assert [entry["name"] for entry in listed["entries"] if entry["kind"] == "program"] == ["ag_matmul_p2p"]
    assert output_of(capsys, "cache", "clear") == f"removed {count + 1} entries from {tmp_path}\n"
    assert not cache.entries()


def test_an_unfinished_build_is_not_removed(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTWEAVE_CACHE", str(tmp_path))

    def make(folder: Path) -> None:
        assert "1 unfinished build" in output_of(capsys, "cache")
        assert folder.is_dir()

    cache.get_or_make(cache.name_of("slow"), make)


def test_json_of_a_compile_a_check_and_an_explanation(capsys: Captured, tmp_path: Path) -> None:
    made = json.loads(output_of(capsys, "compile", P2P, *AT_FOUR, "--json"))
    assert (made["name"], made["target"]) == ("ag_matmul_p2p", "cpu")
    assert Path(made["module"]).parent == Path(made["folder"])
    found = json.loads(output_of(capsys, "check", P2P, *AT_FOUR, "--sizes", "m=3", "--json"))
    assert found == {"name": "ag_matmul_p2p", "mesh": "mesh(x=4)", "sizes": {"m": 3}, "unchecked": []}
    program, sizes = tmp_path / "chosen.py", ("--sizes", "M=8192,K=8192,N=57344")
    types = 'x=hw.bf16["M@x", "K"], w=hw.bf16["K", "N@x"]'
    program.write_text(f"import hostweave as hw\n\nf = hw.fusion(mesh=hw.Mesh(x=8), {types})(lambda x, w: hw.matmul(x, w))\n")
    chosen = json.loads(output_of(capsys, "explain", str(program), *sizes, "--json"))
    (choice,) = chosen["choices"]
    assert choice["alternatives"][0]["chunks"] > 1
    assert json.loads(output_of(capsys, "explain", str(program), *sizes, "--overlap", "off", "--json"))["choices"] == []


def test_check_prints_the_proven_properties(capsys: Captured) -> None:
    out = output_of(capsys, "check", P2P, *AT_FOUR).splitlines()
    assert out[0] == "ag_matmul_p2p on mesh(x=4): no race, no deadlock, no unmatched communication on any rank"
    assert out[1] == "its results equal those of the fusion"
    out = output_of(capsys, "check", P2P, *AT_FOUR, "--sizes", "m=64,K=65536,N=65536").splitlines()
    assert out[1] == "some or all results are not compared; the others equal those of the fusion"


def test_help_and_mistakes_of_commands(capsys: Captured) -> None:
    assert output_of(capsys).startswith("usage: hostweave ")
    assert mistake_of(capsys, "dmeo") == "there is no command dmeo; did you mean demo?"
    assert mistake_of(capsys, "bench", "overlapp") == "bench: there is no benchmark 'overlapp'; did you mean overlap?"
    assert "overlap " in output_of(capsys, "bench", "--list")
    assert {one["name"] for one in json.loads(output_of(capsys, "bench", "--list", "--json"))} >= {"overlap", "compiler"}
    assert json.loads(output_of(capsys, "doctor", "--json"))[0]["name"] == "python"
    assert mistake_of(capsys, "bench", "decode", "--list") == "bench --list: lists all benchmarks; omit the names, or remove --list"
    assert mistake_of(capsys, "bench", "--json") == "bench --json: only the list of benchmarks is JSON; add --list, or remove --json"
    for action in ("path", "clear"):
        assert mistake_of(capsys, "cache", action, "--json") == f"cache {action} --json: only list and size print JSON; remove --json"


def test_shells_complete_commands_and_options(capsys: Captured) -> None:
    """The test executes the script for bash. zsh and fish may not be installed, so the test only finds a line in the script for each of
    these shells."""
    completed = "COMP_WORDS=({}); COMP_CWORD={}; _hostweave; echo ${{COMPREPLY[@]}}"
    lines = [completed.format("hostweave ti", 1), completed.format("hostweave demo --ra", 2), completed.format("hostweave cache c", 2)]
    script = output_of(capsys, "completion", "bash") + "\n".join(lines)
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["timeline", "--ranks", "clear"]
    assert "demo) found=(-h --help --program --ranks --target) ;;" in output_of(capsys, "completion", "zsh")
    assert "__fish_seen_subcommand_from demo' -l ranks -d 'number of ranks (default 8)'" in output_of(capsys, "completion", "fish")


@pytest.mark.parametrize("setting", [("NO_COLOR", "1"), ("TERM", "dumb"), None])
def test_colours_depend_on_the_terminal(setting: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if setting:
        monkeypatch.setenv(*setting)
    assert has_colours() == (setting is None)


def test_doctor(capsys: Captured) -> None:
    lines = output_of(capsys, "doctor", "--target", "cpu").splitlines()
    assert {line.split()[0] for line in lines} >= {"python", "compiler", "cpu", "gpus", "cuda", "cache"}
    assert any(line.startswith("cpu") and "target cpu is ready" in line for line in lines)


def test_export_to_a_file(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert main(["export", P2P, str(tmp_path / "file")]) == 1
    error = capsys.readouterr().err
    assert error == f"hostweave: ag_matmul_p2p: export: {tmp_path}/file: File exists; choose a writable folder\n"


@pytest.mark.parametrize("version", ["", "1 0", '1"0'])
def test_export_of_a_wrong_version(capsys: Captured, tmp_path: Path, version: str) -> None:
    error = mistake_of(capsys, "export", P2P, str(tmp_path / "folder"), "--wheel", version)
    assert error.startswith(f"ag_matmul_p2p: export: version={version!r} is not a version of a Python package; write one such as 1.0")
    assert not (tmp_path / "folder").exists()


def test_doctor_without_a_compiler(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    missing = "no C++ compiler: none of c++, g++ and clang++ is on PATH; apt install g++"
    assert f"missing: {missing}" in output_of(capsys, "doctor")
    assert main(["doctor", "--target", "cpu"]) == 1
    assert capsys.readouterr().err == f"hostweave: {missing}\n"


def test_the_help_lists_all_commands() -> None:
    result = subprocess.run([sys.executable, "-m", "hostweave", "--help"], capture_output=True, text=True, check=True)
    for command in ("demo", "compile", "check", "explain", "inspect", "timeline", "export", "bench", "doctor", "cache"):
        assert f"\n    {command} " in result.stdout
