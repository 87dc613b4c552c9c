"""The options of one compile."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from numbers import Integral

from hostweave.base.errors import ProgramError, did_you_mean
from hostweave.base.signatures import checked_arguments
from hostweave.transports.transport import NAMES, PREFERRED, Transport, find_transport, first_carrying
from hostweave.types.machine import H200, Machine
from hostweave.types.tensor import DType, f32

TRANSPORTS = ("auto", *NAMES)
OVERLAPS = ("auto", "off", "search")


@checked_arguments
@dataclass(frozen=True)
class Options:
    """Options of one `hw.compile`.

    - `streams`: number of CUDA streams of a stream loop, used round robin.
    - `check`: whether the host program is proven free of races and deadlocks, and its results are compared with those of the fusion; by
      default on meshes of up to 16 ranks.
    - `sizes`: typical sizes of dims by name, 4096 for others. Of several ways to reshard a tensor the one that moves the fewest
      bytes at these sizes is taken.
    - `overlap`: "auto" computes matmuls beside a reshard in a chunk loop, where all sizes that count are known, by `sizes` or as ints,
      and where that is faster there by the cost model; and it runs other communication beside what does not need it, where that pays
      at the typical sizes. "search" runs the ways that the model ranks first on all ranks, in this process, and keeps the fastest, for
      later compiles, too: all sizes must be stated. "off" leaves it where it is needed. A `.stream(...)` that the user states holds
      either way. Calls of sizes that loops so chosen do not divide are made in sequence. `Program.explain` says what was chosen.
    - `ways`: what is done instead of what the cost model chooses, by the names that `Program.explain` has:
      `{"@ag_matmul %x_gathered": "put(8)"}`, or "none" for in sequence.
    - `machine`: the figures of the cost model; by default those that `hostweave calibrate` has measured on this machine, else an H200's.
    - `partial_dtype`: `hw.f32` computes and sends partial sums of 16-bit floats in f32, and rounds once; by default each rank rounds
      its partial sum to the dtype of the result.
    - `tf32`: matmuls of f32 round their operands to TF32, with 10 bits of mantissa, and add in f32: several times faster on tensor cores.
      The CPU target computes in f32.
    - `transport`: how bytes travel between ranks.
        - two_sided: collectives, sends and recvs of the communication library. It works everywhere.
        - peer: ranks of one host copy to and from each other's memory, which leaves all multiprocessors to the matmuls. Streams write and
          await the words that signal. It needs peer access between the GPUs, and no communication library.
        - one_sided: the same through windows and signals of the library, from version 2.29 on (2.32 for moves between meshes).
        - auto: two_sided, and peer for chunk loops that say `.stream(..., algorithm="put")` or that the cost model chooses. Falls back to
          one_sided, then to two_sided, if the ranks cannot use it; a line on stderr says why. All-reduces of few bytes are done by the
          kernels that use them.

      With peer and one_sided, chunk loops are by put, by ring, or over slices of every rank's shard, on the mesh of all ranks.
    - `windows`: names of inputs and outputs that lie in arrays of `group.empty`, so that one-sided communication reads and writes them
      where they lie. A call finds that out by itself, and uses a program that is compiled for it; what is named here has to lie there.
    - `graph`: "auto" captures a call of `program(...)` as a CUDA graph where its arrays, inputs and outputs, are the same memory as those
      of a call before, and launches that from then on, for the last 16 such sets of arrays; other calls are made as usual. Outputs
      are the same where `out=` gives them, or where the library's allocator returns what was freed. It is for programs of many
      short operations, where the time of the host shows. Of programs on transport one_sided calls are graphs on all ranks or on
      none: the ranks meet before calls 3, 5, 9, 17 and so on, and every 4096 calls at least. Where since the last time all of them
      had nearly always arrays of a call before, calls are graphs until the next, of new arrays, too. By default nothing is captured
      by itself.
    - `tune`: measures for every product and its sizes, when the program is prepared for them, the algorithms that cuBLASLt recommends, with
      the epilogue of the program, and takes the fastest instead of the first; the memory of a product's workspace bounds them. All ranks
      take the same ones. What was found is kept in the cache folder, by GPU and version of cuBLASLt, for later runs. On the CPU target
      there is one algorithm, and nothing to measure.
    - `verify_calls`: ranks that are processes compare programs and shapes before every call, which takes a round trip through the
      store; ranks that are threads always do.

    Raises ProgramError for another `overlap`, `partial_dtype`, `transport`, `graph` or `machine`, and for `streams` or sizes below 1.

    Example: `hw.compile(f, target="cuda", options=hw.Options(tf32=True, sizes={"M": 8192}))`.
    """

    streams: int = 4
    check: bool | None = None
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    overlap: str = "auto"
    partial_dtype: DType | None = None
    tf32: bool = False
    transport: str = "auto"
    verify_calls: bool = False
    windows: tuple[str, ...] = ()
    graph: str | None = None
    tune: bool = False
    machine: Machine | None = field(default=None, repr=False)
    ways: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def figures(self) -> Machine:
        """Of the machine that the program is for."""
        return self.machine or H200

    @property
    def transports(self) -> tuple[Transport, ...]:
        """Allowed transports: the preferred one first, those that the machine refuses last."""
        names = PREFERRED if self.transport == "auto" else (self.transport,)
        return tuple(sorted(map(find_transport, names), key=lambda transport: bool(transport.why_not(self.figures))))

    def transport_carrying(self, *needs: Set[str]) -> Transport | None:
        """The preferred transport that carries all of any one of these."""
        return first_carrying(self.transports, *needs)

    def __post_init__(self) -> None:
        if not isinstance(self.streams, int) or self.streams < 1:
            raise ProgramError(f"Options: streams={self.streams!r} must be an int of at least 1")
        if self.transport not in TRANSPORTS:
            raise ProgramError(f"Options: there is no transport={self.transport!r}; {did_you_mean(str(self.transport), TRANSPORTS)}")
        if not isinstance(self.machine, Machine | None):
            raise ProgramError(f"Options: machine={self.machine!r} is no hw.Machine; leave it out, or use Machine.from_json")
        for name in ("check", "tf32", "tune", "verify_calls"):
            if (value := getattr(self, name)) not in (True, False) and (name, value) != ("check", None):
                raise ProgramError(f"Options: {name}={value!r} is neither True nor False; write one of them")
        for name in ("sizes", "ways"):
            if not isinstance(value := getattr(self, name), Mapping) or not all(isinstance(key, str) for key in value):
                raise ProgramError(f"Options: {name}={value!r} is no mapping of names; write {name}={{...}}")
        for name, size in self.sizes.items():
            if not isinstance(size, Integral) or size < 1:
                raise ProgramError(f"Options: sizes: {name}={size!r}: a typical size is an int of at least 1; correct it, or leave it out")
        if self.overlap not in OVERLAPS:
            raise ProgramError(f"Options: there is no overlap={self.overlap!r}; {did_you_mean(str(self.overlap), OVERLAPS)}")
        if self.graph not in (None, "auto"):
            raise ProgramError(f'Options: graph={self.graph!r} is neither "auto" nor None; program.capture captures one call')
        if not isinstance(self.windows, tuple) or not all(isinstance(name, str) for name in self.windows):
            raise ProgramError(f'Options: windows={self.windows!r} is no tuple of names; write windows=("x",)')
        if self.partial_dtype not in (None, f32):
            raise ProgramError(
                f"Options: partial_dtype={self.partial_dtype!r} is neither f32 nor None, and no other dtype is wider; use hw.f32"
            )
