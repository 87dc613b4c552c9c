"""Compiler launcher for CMake that caches objects. All exports have the same sources of the runtime and of the CPU device."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = "<root>"  # stands for the folder of the export in kept lists of files
command = sys.argv[1:]


def after(option: str) -> str:
    return command[command.index(option) + 1] if option in command else ""


unit, into, needed = (Path(after(option)) for option in ("-c", "-o", "-MF"))
text = unit.read_text() if unit.is_file() else ""
sources = [unit, *map(Path, re.findall(r'#include "(/.*?)"', text))]  # A unit of a unity build includes sources by absolute path.
root = next((folder for source in sources for folder in source.parents if Path(folder, ".hostweave-export").is_file()), None)
if not root or "-MF" not in command:
    os.execvp(command[0], command)

of_runtime = re.search(r"/hostweave_(runtime|cpu_device)\.dir/", f"/{into}")
names = sorted(line.split("  ", 1)[1] for line in Path(root, ".hostweave-export").read_text().splitlines())
# Objects of the runtime and of the CPU device depend only on files in `runtime`. Only wheels have the folder `runtime/wheel`.
files = [Path(root, name) for name in names if not of_runtime or (name.startswith("runtime/") and "/wheel/" not in name)]
options = [option for option in command[1:] if option != str(unit) and not option.endswith((".o", ".o.d"))]
compiler = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
key = hashlib.sha256("\n".join([compiler, *options, text]).replace(str(root), "").encode())
for file in files:
    if file.is_file():
        key.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
escaped = str(root).replace(" ", r"\ ")
kept = Path(os.environ["HOSTWEAVE_TESTS_OBJECTS"], f"{key.hexdigest()}.o")
with open(f"{kept}.lock", "w") as lock:  # Other processes wait until the first process has made the object.
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not kept.exists():
        if status := subprocess.run(command).returncode:
            sys.exit(status)
        kept.with_suffix(".d").write_text(needed.read_text().partition(":")[2].replace(escaped, ROOT))
        shutil.copy(into, kept.with_suffix(".part"))
        kept.with_suffix(".part").rename(kept)
shutil.copy(kept, into)
needed.write_text(f"{into}:{kept.with_suffix('.d').read_text().replace(ROOT, escaped)}")
