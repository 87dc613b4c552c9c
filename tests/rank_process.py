"""Runs one rank as a process. Tests start this script once per rank, by torchrun, mpirun or directly.

    python rank_process.py SET PROVIDER [TARGET]            runs the programs of SET, and prints a line
    python rank_process.py PROGRAM PROVIDER [TARGET]        calls PROGRAM until a call fails or is interrupted, and prints why; then reads
                                                            the variables of a new world from stdin, and calls PROGRAM in this world
    python rank_process.py once:PROGRAM PROVIDER [TARGET]   calls PROGRAM once, and prints that the result is right, or why the call failed
    python rank_process.py graphs PROVIDER [TARGET]         runs programs with signals, whose calls become graphs on all ranks

SET is `all`, `kinds`, `few` or `everything` (see `programs_for`). With provider `torch`, a SET runs twice, and prints two lines.
PROGRAM may be `chosen`: a chunk loop of puts that Options.choices selects. `chosen` is called with two sizes M. Only the first M is a
multiple of the number of chunks. With the prefix `captured:`, calls are launches of a capture. If the variable ENDS is set, a rank calls
PROGRAM once, reads a line from stdin, and exits: by an exception if ENDS is `exception`, and otherwise with ENDS as the exit status.
PROVIDER is `environment`, `mpi`, `torch` (under torchrun), or `store` (a torch.distributed store without a process group). TARGET is
`cuda` (by default) or `cpu`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
from compiled_fusions import EXCHANGES, ONE_SIDED, PIPELINES, Arrays, fusion_of, integer_arrays, programs_of, sizes_of

import hostweave as hw
from hostweave.base.errors import ExecutionError
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.reference import run_reference
from hostweave.runtime.launchers import LaunchedRank
from hostweave.runtime.providers import Provider
from hostweave.types.tensor import block_of, holds

# Collectives; sends and recvs in loops; puts in loops; two meshes; two axes; all_to_all; and permutations.
KINDS = ("matmul_ar", "ag_matmul_p2p", "matmul_rs_ring", "mlp_put", "two_stages_streamed", "three_layers", "exchanges", "permutes")


FEW = ("ag_matmul_p2p", "mlp_put")  # Sends and signals, for tests of launchers.
SIGNALLED = ("mlp_put", "exchanges")
IN_WINDOWS = "mlp_put"  # the program that is also called with arrays of `group.empty`
OF_SOME = ("exchanges", "residual_put")  # These programs use max, so every rank needs at least one element.


def named(name: str, ranks: int) -> Fusion:
    return fusion_of(name, ranks, 3, hw.bf16)


def programs_for(ranks: int, which: str) -> dict[str, Fusion]:
    """Programs of a set. `few` has two programs. `kinds` has a program for each kind of communication. `all` has the programs of
    `all_fusions` and `more_fusions` for this number of ranks. `everything` adds programs with one-sided transfers, exchanges and
    pipelines."""
    if which in ("few", "kinds"):
        return {name: named(name, ranks) for name in (KINDS if which == "kinds" else FEW)}
    more = {name: named(name, ranks) for name in (*ONE_SIDED, *EXCHANGES, *PIPELINES)} if which == "everything" else {}
    return programs_of(ranks) | {name: fusion for name, fusion in more.items() if fusion.mesh.size == ranks}


def provider_of(name: str) -> Provider:
    if name == "mpi":
        return hw.MPI()
    if name == "environment":
        return hw.Environment()
    import torch

    if name == "torch":
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return hw.TorchStore()
    if name == "store":
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return hw.TorchStore(torch.distributed.TCPStore(*address, count, rank == 0, timedelta(seconds=60)), rank, count)
    raise SystemExit(f"no provider {name}")


class Rank:
    def __init__(self, provider: Provider, target: str, local_rank: int):
        self.target = target
        # torch is not imported on CPUs, because the import takes seconds.
        self.torch = import_module("torch") if target == "cuda" else sys.modules.get("torch")
        self.device = f"cuda:{local_rank}" if target == "cuda" else "cpu"
        if target == "cuda":
            self.torch.cuda.set_device(self.device)
        self.group = hw.init(provider, timeout=120, call_timeout=float(os.environ.get("CALL_TIMEOUT", "60")), device=local_rank)

    def array(self, block: np.ndarray, dtype: str) -> Any:
        """A PyTorch tensor if PyTorch is loaded, and otherwise a NumPy array."""
        if self.torch is None:
            return np.ascontiguousarray(block)
        of_torch = getattr(self.torch, {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "i32": "int32"}[dtype])
        return self.torch.from_numpy(np.ascontiguousarray(block.astype(np.float32))).to(self.device, of_torch)

    def in_window(self, fusion: Fusion, arrays: Arrays) -> list[Any]:
        made = []
        for value, array in zip(fusion.arguments, self.local(fusion, arrays), strict=True):
            own = self.group.empty(tuple(array.shape), value.type.dtype, self.target)
            made.append(self.torch.from_dlpack(own) if self.target == "cuda" else own)
            made[-1][...] = array
        return made

    def local(self, fusion: Fusion, arrays: Arrays) -> list[Any]:
        rank, mesh = self.group.rank, fusion.mesh
        return [
            self.array(arrays[v.name][block_of(v.type, mesh, rank, arrays[v.name].shape)], v.type.dtype.name)
            if holds(v.type, mesh, rank)
            else None
            for v in fusion.arguments
        ]

    def check(self, fusion: Fusion, program: hw.Program, arrays: Arrays, results: Any) -> None:
        """Tests that every output equals the local block of the reference. Inputs are small integers, so results are exact."""
        outputs = results if isinstance(results, tuple) else (results,)
        for parameter, want, got in zip(program.host.results, run_reference(fusion, arrays), outputs, strict=True):
            if not holds(parameter.type, fusion.mesh, self.group.rank):
                assert got is None
                continue
            block = want[block_of(parameter.type, fusion.mesh, self.group.rank, want.shape)]
            where = f"{fusion.name}, {parameter.name}, rank {self.group.rank}"
            values = got if self.torch is None else got.double().cpu().numpy()
            np.testing.assert_array_equal(values.astype(np.float64), block.astype(np.float64), err_msg=where)


def run_all(rank: Rank, which: str) -> None:
    programs = programs_for(rank.group.count, which)
    both = ("peer", "one_sided") if rank.target == "cpu" else ("peer",)  # On CUDA, one_sided needs a recent NCCL.
    for (name, fusion), transport in ((item, by) for item in programs.items() for by in (both if item[0] in EXCHANGES else ("auto",))):
        # The fixture `all_built` has checked the programs. The check takes as long as the rest of the compilation.
        options = hw.Options(transport=transport, check=False)
        program = hw.compile(fusion, target=rank.target, options=options)
        sizes = sizes_of(program.host, more=1)
        calls = [integer_arrays(fusion, sizes, seed) for seed in range(3)]
        is_told = program.host.uneven or any(value.type.mesh for value in fusion.inputs)  # Local shapes do not determine the sizes.
        known = {size: sizes[size] for size in program.host.given_sizes()} if is_told else None
        if name not in OF_SOME:
            nothing = dict.fromkeys(program.host.given_sizes(), 0)
            none = integer_arrays(fusion, sizes | nothing, seed=0)
            rank.check(fusion, program, none, program(*rank.local(fusion, none), sizes=nothing if is_told else None))
        results = [program(*rank.local(fusion, arrays), sizes=known) for arrays in calls]  # On CUDA, no call waits for its results.
        for arrays, result in zip(calls, results, strict=True):
            rank.check(fusion, program, arrays, result)
        if fusion.name == IN_WINDOWS and (rank.torch is None or rank.target == "cuda"):
            rank.check(fusion, program, calls[0], program(*rank.in_window(fusion, calls[0]), sizes=known))
            assert any(other.compiled.host.windows for other in program.variants)
        program.close()
    say(f"rank {rank.group.rank} of {rank.group.count}: {len(programs)} programs are right")


def beside_torch(rank: Rank, which: str) -> None:
    torch = rank.torch
    for _ in range(2):
        ones = torch.ones(1000, device=rank.device)
        torch.distributed.all_reduce(ones)
        assert (ones == rank.group.count).all()
        run_all(rank, which)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_until_it_fails(rank: Rank, name: str, local_rank: int) -> None:
    calls = Calls(rank, name)
    calls.make()
    say("ready")
    if end := os.environ.get("ENDS"):
        sys.stdin.readline()  # Waits until the other ranks have made their first call.
        if end == "exception":
            raise ValueError("a mistake")
        sys.exit(int(end))
    test = os.getppid()
    try:
        while True:
            if os.getppid() != test:
                sys.exit("the test is gone")  # The test has exited, so this process ends.
            calls.make()
    except ExecutionError as error:
        say(f"failed: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        say(f"interrupted: {rank.group.failure}")
    # environment variables of this rank in the new world
    world: Mapping[str, str] = dict(word.split("=") for word in sys.stdin.readline().split())
    again = Rank(hw.Environment(world), rank.target, local_rank)
    Calls(again, name).make()
    say(f"rank {again.group.rank} of {again.group.count} is right")


def run_graphs(rank: Rank) -> None:
    """Tests that calls of programs with signals become graphs. The 2 ranks pass three sets of arrays in different orders. Only call 1 of
    both ranks and call 18 of rank 1 pass the fourth set."""
    for name in SIGNALLED:
        fusion = named(name, rank.group.count)
        program = hw.compile(fusion, target=rank.target, options=hw.Options(graph="auto", transport="one_sided"))
        values = integer_arrays(fusion, sizes_of(program.host), 0)
        sets = [rank.local(fusion, values) for _ in range(4)]
        out = program(*sets[3])
        for call in range(2, 20):
            which = 3 if call == 18 and rank.group.rank else call * (rank.group.rank + 1) % 3
            rank.check(fusion, program, values, program(*sets[which], out=out))
        (local,) = (one for running, one in rank.group.programs.items() if running.compiled is program.compiled)
        assert local.common_graphs.agreed
        assert local.native.graphs == (4 if rank.group.rank else 3)
        program.close()
    say(f"rank {rank.group.rank} of {rank.group.count}: calls are graphs")


def run_once(rank: Rank, name: str) -> None:
    try:
        calls = Calls(rank, name)
        calls.make()
        say(f"rank {rank.group.rank} of {rank.group.count} is right")
        rank.group.close()  # The group must close before its programs and graphs are freed.
    except ExecutionError as error:
        say(f"failed: {' '.join(str(error).split())}")


def program_of(name: str, ranks: int, target: str) -> tuple[Fusion, hw.Program]:
    if name != "chosen":
        fusion = named(name, ranks)
        return fusion, hw.compile(fusion, target=target)

    @hw.fusion(mesh=hw.Mesh(x=ranks), x=hw.bf16["M@x", "K"], w=hw.bf16["K", "N"])
    def chosen(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.matmul(hw.reshard(x, "M", "K").named("g"), w)

    options = hw.Options(sizes={"M": 16 * ranks, "K": 16, "N": 16}, choices={"@chosen %g": f"put({2 * ranks})"})
    return chosen, hw.compile(chosen, target=target, options=options)


class Calls:
    """Calls of one program with fixed arrays. The method `make` makes all calls once, and checks the results."""

    def __init__(self, rank: Rank, name: str):
        self.rank, ranks = rank, rank.group.count
        self.fusion, self.program = program_of(name.removeprefix("captured:"), ranks, rank.target)
        sizes = [{"M": rows * ranks, "K": 16, "N": 16} for rows in (16, 3)] if name == "chosen" else [sizes_of(self.program.host, times=16)]
        self.arrays = [integer_arrays(self.fusion, one, seed=0) for one in sizes]
        call = self.program.capture if name.startswith("captured:") else partial(partial, self.program)
        self.calls = [call(*self.rank.local(self.fusion, arrays)) for arrays in self.arrays]

    def make(self) -> None:
        for arrays, call in zip(self.arrays, self.calls, strict=True):
            result = call()
            if self.rank.target == "cuda":
                self.rank.torch.cuda.synchronize()
                self.rank.group.check()  # The check comes before the comparison, because an aborted call has no results.
            self.rank.check(self.fusion, self.program, arrays, result)


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # One write is used, because ranks share torchrun's output.


def main(what: str, provider: str, target: str = "cuda") -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs start without this handler.
    local_rank = LaunchedRank(os.environ).local_rank or 0
    rank = Rank(provider_of(provider), target, local_rank)
    if what.startswith("once:"):
        run_once(rank, what.removeprefix("once:"))
    elif what == "graphs":
        run_graphs(rank)
    elif what not in ("all", "few", "kinds", "everything"):
        run_until_it_fails(rank, what, local_rank)
    elif provider == "torch":
        beside_torch(rank, what)
    else:
        run_all(rank, what)


if __name__ == "__main__":
    main(*sys.argv[1:])
