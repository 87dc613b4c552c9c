"""Compares the programs that this checkout generates with the programs of another commit: `python tests/compare_generated.py COMMIT`.

Each checkout emits programs of examples/, benchmarks/ and tests/, for several numbers of ranks. Programs are compiled with default options,
with one-sided transport, and with values of symbolic sizes. If files differ, the first lines of each diff are printed, and the exit status
is 1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHECKOUT = Path(__file__).parent.parent
RANKS = (1, 2, 3, 4, 8)
SEEDS = 100  # number of random programs
SIZE = 8192  # value of every named dim, if sizes are stated
SHOWN = 12  # lines shown per diff


def main(commit: str) -> int:
    with TemporaryDirectory() as folder:
        other, ours, theirs = Path(folder, "other"), Path(folder, "ours"), Path(folder, "theirs")
        git("worktree", "add", "--detach", "--quiet", str(other), commit)
        try:
            emit_in(CHECKOUT, ours)
            emit_in(other, theirs)
        finally:
            git("worktree", "remove", "--force", str(other))
        files = sorted({path.relative_to(root) for root in (ours, theirs) for path in root.rglob("*") if path.is_file()})
        different = [file for file in files if show(file, theirs / file, ours / file)]
    print(f"{len(different)} of {len(files)} files differ")
    return bool(different)


def git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(CHECKOUT), *arguments], check=True)


def emit_in(checkout: Path, folder: Path) -> None:
    """Runs this script with the package of `checkout`. Option -S omits the finder of an editable install, because the
    finder would import the installed package."""
    path = os.pathsep.join([*(str(checkout / part) for part in ("codegen", "tests")), *sys.path])
    command = [sys.executable, "-S", "-P", __file__, "--emit", str(checkout), str(folder)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True)


def emit(checkout: Path, folder: Path) -> None:
    import hostweave
    from hostweave.base.errors import ProgramError
    from hostweave.emit import render
    from hostweave.options import Options
    from hostweave.pipeline import lower

    assert Path(hostweave.__file__).is_relative_to(checkout), hostweave.__file__
    for name, program in programs(checkout):
        symbols = {name for value in program.values().values() for size in value.type.shape for name in size.symbols}
        cases = {"auto": Options(), "one_sided": Options(transport="one_sided"), "sized": Options(sizes=dict.fromkeys(symbols, SIZE))}
        for case, options in cases.items() if symbols else list(cases.items())[:2]:
            try:
                texts = render(lower(program, options))
            except ProgramError as error:  # A program may be refused.
                texts = {"error.txt": str(error)}
            for path, text in texts.items():
                file = folder / name / case / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)


def programs(checkout: Path) -> Iterator[tuple[str, Any]]:
    """Programs by path. In the path `seeds/4/ag_matmul_p2p`, 4 is the value of D. Omits files that cannot be loaded with a value of D."""
    import parts_of_transformers
    import random_fusions

    from hostweave.base.errors import ProgramError
    from hostweave.cli.programs import load_file, programs_in
    from hostweave.types.tensor import bf16

    tests = (Path(__file__).with_name(name) for name in ("fusions_beyond_examples.py", "fusions_with_puts.py", "fusions_without_loops.py"))
    for file in (*sorted((checkout / "examples").glob("*.py")), *tests):
        constants = set(re.findall(r"^(D|S) = ", file.read_text(), re.MULTILINE))
        for ranks in RANKS if "D" in constants else (0,):
            try:
                found = programs_in(load_file(file, {name: value for name, value in (("D", ranks), ("S", 3)) if name in constants}))
            except ProgramError:
                continue
            yield from ((f"{file.stem}/{ranks}/{name}", program) for name, program in found.items())
    sys.path.insert(0, str(checkout / "benchmarks"))
    benchmark = load_file(checkout / "benchmarks" / "sequence_parallel.py")
    for ranks in RANKS:
        yield f"benchmarks/{ranks}/sequence_parallel", benchmark.fusion_of(ranks)
        for make in (parts_of_transformers.mlp, parts_of_transformers.attention, parts_of_transformers.layers):
            yield f"parts_of_transformers/{ranks}/{make.__name__}", make(ranks, bf16)
    for seed in range(SEEDS):
        yield f"random_programs/{seed}", random_fusions.Generator(seed).fusion()


def show(file: Path, theirs: Path, ours: Path) -> bool:
    """Prints the diff of a file. Returns True if the two versions differ."""
    before, after = (path.read_text().splitlines() if path.exists() else [] for path in (theirs, ours))
    lines = list(unified_diff(before, after, f"theirs/{file}", f"ours/{file}", n=0, lineterm=""))
    print("\n".join([*lines[:SHOWN], *([f"... {len(lines) - SHOWN} more lines"] if len(lines) > SHOWN else [])]), end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--emit"]:
        emit(Path(sys.argv[2]), Path(sys.argv[3]))
    elif len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit(f"usage: {sys.argv[0]} COMMIT")
