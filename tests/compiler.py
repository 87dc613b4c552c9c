"""A compiler that has read the headers of the runtime before: most of what a small program takes to compile."""

from __future__ import annotations

import shlex
from pathlib import Path

from hostweave.targets.target import find_target

HEADERS = ("abi", "arena", "check", "group", "kernel", "launch", "matmul", "rank", "shards", "streams", "tensor", "types")

# The first call makes the precompiled header. What is not for the CPU target, such as a link, goes to the compiler as it is.
SCRIPT = """\
#!/bin/sh
case " $* " in
*{folders}*" -c "*)
  test -e {header}.gch || {{ {make} -o {header}.gch.$$ && mv {header}.gch.$$ {header}.gch; }} || exit
  exec {compiler} -include {header} "$@" ;;
*) exec {compiler} "$@" ;;
esac
"""


def with_precompiled_headers(folder: Path) -> Path:
    """A command in `folder` to be used as CXX."""
    toolchain, header, script = find_target("cpu").toolchain(), folder / "runtime.h", folder / "c++"
    header.write_text("".join(f'#include "hostweave/{name}.h"\n' for name in HEADERS))
    make = [part for part in toolchain.compile(str(header), "") if part not in ("-c", "-o", "", str(header))]
    folders = " ".join(f"-I{folder}" for folder in toolchain.include_folders)
    script.write_text(
        SCRIPT.format(
            folders=shlex.quote(folders),
            header=shlex.quote(str(header)),
            make=shlex.join([*make, "-x", "c++-header", str(header)]),
            compiler=shlex.quote(str(toolchain.compiler)),
        )
    )
    script.chmod(0o755)
    return script
