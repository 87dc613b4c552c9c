"""Compiler command for CMake that caches objects of the runtime for the session, because all exports have the same runtime sources."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

command, unit = sys.argv[1:], Path(sys.argv[-1])
if not re.search(r"/hostweave_(runtime|cpu_device)\.dir/Unity/[^/]+$", str(unit)):
    os.execvp(command[0], command)

text = unit.read_text()  # the unit includes the sources
found = re.search(r'#include "(.*?)/runtime/', text)
assert found, text
root, into = found[1], Path(command[command.index("-o") + 1])
files = sorted(path for path in Path(root, "runtime").rglob("*") if path.is_file())
options = [option for option in command[:-1] if not option.endswith((".o", ".o.d"))]
key = hashlib.sha256("\n".join([*options, text]).replace(root, "").encode())
for file in files:
    key.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
kept = Path(os.environ["HOSTWEAVE_CACHE"]).parent / f"{key.hexdigest()}.o"
with open(f"{kept}.lock", "w") as lock:  # other processes wait for the first one that needs the object
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not kept.exists():
        if status := subprocess.run(command).returncode:
            sys.exit(status)
        shutil.copy(into, kept)
shutil.copy(kept, into)
needed = " ".join(str(path).replace(" ", r"\ ") for path in files)
Path(command[command.index("-MF") + 1]).write_text(f"{into}: {needed}\n")
