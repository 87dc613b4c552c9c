"""A program on two ranks that are processes."""

from __future__ import annotations

from launched_ranks import run_processes
from processes import free_port

PROGRAM = """
import os, sys, time
from random import Random
import numpy as np
import hostweave as hw
from hostweave.base.errors import HostweaveError
from hostweave.runtime.group import Group

if os.environ.get("BY") == "store":  # as if ranks were on two hosts
    Group.make_barrier = lambda group: (None,)

rank, transport = int(os.environ["RANK"]), os.environ["TRANSPORT"]
options = hw.Options(transport=transport, check=False)  # Tests of the transports check similar programs.

@hw.fusion(mesh=hw.Mesh(x=2), x=hw.f32["M@x", "K"], w=hw.f32["K"])
def gathered(x, w):
    return hw.reshard(x * w, "M", "K")

def anew(attempt, **more):
    return hw.init(hw.Environment({**os.environ, "TORCHELASTIC_RUN_ID": str(attempt)}), timeout=60, **more)

def call(program, rows, columns=3, **more):
    x = np.full((rows, columns), rank + 1, np.float32)
    return program(x, np.ones(columns, np.float32), **more)

def said(call):
    try:
        result = call()
        print("right", *(result[:, 0] if isinstance(result, np.ndarray) else []))
    except HostweaveError as error:
        print(type(error).__name__, *str(error).split())
"""


def on_two_ranks(script: str, transport: str, **more: str) -> list[list[str]]:
    """Runs a script after PROGRAM on two ranks. Returns the lines that each rank prints, without messages of Hostweave."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TRANSPORT": transport, **more}
    outputs = run_processes(PROGRAM + script, [common | {"RANK": str(rank)} for rank in range(2)])
    return [[line for line in output.splitlines() if not line.startswith(("hostweave:", "  "))] for output in outputs]
