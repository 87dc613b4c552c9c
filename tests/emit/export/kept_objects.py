"""Compiler launcher for CMake that caches objects of the runtime and the CPU device. All exports have the same sources of both."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

command = sys.argv[1:]


def after(option: str) -> str:
    return command[command.index(option) + 1] if option in command else ""


unit, into = Path(after("-c")), Path(after("-o"))
if not re.search(r"/hostweave_(runtime|cpu_device)\.dir/", f"/{into}"):
    os.execvp(command[0], command)

text = unit.read_text()
found = re.search(r'#include "(.*?)/runtime/', text) or re.search("(.*?)/runtime/", str(unit))  # The unit includes sources, or is a source.
assert found, text
root = found[1]
files = sorted(path for path in Path(root, "runtime").rglob("*") if path.is_file())
options = [option for option in command[1:] if option != str(unit) and not option.endswith((".o", ".o.d"))]
compiler = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=True).stdout
key = hashlib.sha256("\n".join([compiler, *options, text]).replace(root, "").encode())
for file in files:
    if file.parent.name != "wheel":  # Only wheels have this folder.
        key.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
kept = Path(os.environ["HOSTWEAVE_TESTS_OBJECTS"], f"{key.hexdigest()}.o")
with open(f"{kept}.lock", "w") as lock:  # Other processes wait until the first process has made the object.
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not kept.exists():
        if status := subprocess.run(command).returncode:
            sys.exit(status)
        shutil.copy(into, kept)
shutil.copy(kept, into)
needed = " ".join(str(path).replace(" ", r"\ ") for path in files)
Path(after("-MF")).write_text(f"{into}: {needed}\n")
