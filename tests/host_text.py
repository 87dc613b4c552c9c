"""Parses host programs whose text lacks channel declarations."""

from __future__ import annotations

import re
from itertools import permutations

from hostweave.host_ir.ir import HostProgram
from hostweave.types.mesh import Mesh
from hostweave.types.text import Reader


def parse(text: str) -> HostProgram:
    """Parses a program, and declares the channels that its communications name, such as `x`, `dp_tp` or `x_of_ranks_2_3`."""
    return HostProgram.parse(declared(text))


def declared(text: str) -> str:
    if " channels(" in text:
        return text
    head = text.index("host @")
    found = re.compile(r"\) (mesh\([^)]*\))").search(text, head)
    assert found
    program = Reader(found[1]).mesh()
    meshes = [program, *(Reader(mesh).mesh() for mesh in dict.fromkeys(re.findall(r"mesh\([^)]* of [^)]*\)", text)))]
    known = {name: channel for mesh in meshes for name, channel in _channels(mesh, program).items()}
    used = [name for name in dict.fromkeys(re.findall(r"\bon (\w+)", text)) if name in known]
    channels = f" channels({', '.join(f'{name}: {known[name]} two_sided' for name in used)})" if used else ""
    return text[: found.end()] + channels + text[found.end() :]


def _channels(mesh: Mesh, program: Mesh) -> dict[str, str]:
    """Declarations of all channels along one axis or along two axes of the mesh, in either order."""
    of, on = ("", "") if mesh == program else (f"_of_{mesh.label}", f" on {mesh}")
    axes = (along for count in range(1, 3) for along in permutations([name for name, _ in mesh.axes], count))
    return {"_".join(along) + of: ", ".join(along) + on for along in axes}
