"""Options of `hw.compile`."""

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

    - `streams`: number of CUDA streams of a chunk loop, used round robin.
    - `check`: proves the host program free of races and deadlocks, and compares its results with those of the fusion. By default on
      meshes of up to 16 ranks.
    - `sizes`: typical sizes of dims by name; 4096 for others. Among several ways to reshard a tensor, the one that moves the fewest
      bytes at these sizes is chosen.
    - `overlap`: "auto" pipelines a reshard with its matmuls in a chunk loop if the cost model predicts a gain. For this all relevant
      sizes must be known, from `sizes` or as ints. It also overlaps other communication with independent computation if that is
      faster at the typical sizes. "search" runs the best-ranked alternatives on all ranks in this process and keeps the fastest, also
      for later compiles; all sizes must be stated. "off" keeps communication in sequence. A `.stream(...)` in the program always
      holds. Calls whose sizes a chosen loop does not divide run in sequence. `Program.explain` shows the choices.
    - `ways`: overrides choices of the cost model, by the names in `Program.explain`: `{"@ag_matmul %x_gathered": "put(8)"}`, or
      "none" for sequential execution.
    - `machine`: figures for the cost model. By default the figures that `hostweave calibrate` measured on this machine, else the figures of
      H100 or H200, by the name of the GPU. Other GPUs get the figures of H200, and `Program.explain` reports this.
    - `partial_dtype`: `hw.f32` computes and sends partial sums of 16-bit floats in f32, and rounds once. By default each rank rounds
      its partial sum to the dtype of the result.
    - `tf32`: f32 matmuls round their operands to TF32, with 10 bits of mantissa, and accumulate in f32. This is several times faster
      on tensor cores. The CPU target computes in f32.
    - `transport`: the way bytes travel between ranks. With peer and one_sided, chunk loops use put, ring, or slices of every rank's
      shard, on the mesh of all ranks.
        - two_sided: collectives, sends and recvs of the communication library. Works everywhere.
        - peer: ranks of one host copy to and from each other's memory, which leaves all multiprocessors to the matmuls. Signals are
          stream memory operations. Needs peer access between the GPUs, and no communication library.
        - one_sided: the same through windows and signals of the library. Needs version 2.29 or later (2.32 for moves between meshes).
        - auto: two_sided, and peer for chunk loops with `.stream(..., algorithm="put")` or by choice of the cost model. Falls back to
          one_sided, then to two_sided, if the ranks cannot use peer; a line on stderr gives the reason. All-reduces of few bytes are
          fused into the kernels that consume them.
    - `windows`: names of inputs and outputs that are arrays of `group.empty`, so that one-sided communication accesses them in place.
      A call detects such arrays and compiles a variant for them. Arrays that are named here must be in windows.
    - `graph`: "auto" captures a call of `program(...)` as a CUDA graph if its inputs and outputs are in the same memory as in an
      earlier call. Later calls with these arrays launch the graph. Use it for programs of many short operations, where host time
      shows. By default no call is captured automatically.

      The last 16 sets of arrays are kept; other calls run as usual. Outputs repeat if `out=` gives them, or if the library's
      allocator returns freed memory.

      With transport one_sided, calls are graphs on all ranks or on none. The ranks meet before calls 3, 5, 9, 17 and so on, at least
      every 4096 calls. If nearly all calls since the last meeting had repeated arrays on every rank, calls are graphs until the next
      meeting, also for new arrays.

    - `stages`: "auto" reorders the stages of a pipeline over meshes, if the cost model predicts a gain. "as_written" keeps their order.
    - `tune`: measures the algorithms that cuBLASLt recommends for every matmul and its sizes, with the program's epilogue, and uses the
      fastest instead of the first. This happens when the program is prepared for the sizes. The workspace of a matmul limits the
      algorithms. All ranks use the same ones. Results are kept in the cache folder, by GPU and cuBLASLt version. The CPU target has
      one algorithm, so nothing is measured.
    - `verify_calls`: ranks that are processes compare programs and shapes before every call, which takes a round trip through the
      store. Ranks that are threads always do.

    Raises ProgramError for an invalid `overlap`, `partial_dtype`, `transport`, `graph` or `machine`, and for `streams` or sizes below 1.

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
    stages: str = "auto"
    tune: bool = False
    machine: Machine | None = field(default=None, repr=False)
    ways: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def figures(self) -> Machine:
        """Figures of the machine that the program is compiled for."""
        return self.machine or H200

    @property
    def transports(self) -> tuple[Transport, ...]:
        """Allowed transports: the preferred transport first, and transports that the machine refuses last."""
        names = PREFERRED if self.transport == "auto" else (self.transport,)
        return tuple(sorted(map(find_transport, names), key=lambda transport: bool(transport.why_not(self.figures))))

    def transport_carrying(self, *needs: Set[str]) -> Transport | None:
        """Preferred transport that carries all of at least one of these sets of needs."""
        return first_carrying(self.transports, *needs)

    def __post_init__(self) -> None:
        if not isinstance(self.streams, int) or self.streams < 1:
            raise ProgramError(f"Options: streams={self.streams!r} must be an int of at least 1")
        if self.transport not in TRANSPORTS:
            raise ProgramError(f"Options: there is no transport={self.transport!r}; {did_you_mean(str(self.transport), TRANSPORTS)}")
        if not isinstance(self.machine, Machine | None):
            raise ProgramError(f"Options: machine={self.machine!r} is not an hw.Machine; leave it out, or use Machine.from_json")
        for name in ("check", "tf32", "tune", "verify_calls"):
            if (value := getattr(self, name)) not in (True, False) and (name, value) != ("check", None):
                raise ProgramError(f"Options: {name}={value!r} is neither True nor False; write one of them")
        for name in ("sizes", "ways"):
            if not isinstance(value := getattr(self, name), Mapping) or not all(isinstance(key, str) for key in value):
                raise ProgramError(f"Options: {name}={value!r} is not a dict of names; write {name}={{...}}")
        for name, size in self.sizes.items():
            if not isinstance(size, Integral) or size < 1:
                raise ProgramError(f"Options: sizes: {name}={size!r}: a typical size is an int of at least 1; correct it, or leave it out")
        if self.overlap not in OVERLAPS:
            raise ProgramError(f"Options: there is no overlap={self.overlap!r}; {did_you_mean(str(self.overlap), OVERLAPS)}")
        if self.stages not in ("auto", "as_written"):
            raise ProgramError(f'Options: stages={self.stages!r} is neither "auto" nor "as_written"; write one of them')
        if self.graph not in (None, "auto"):
            raise ProgramError(f'Options: graph={self.graph!r} is neither "auto" nor None; program.capture captures one call')
        if not isinstance(self.windows, tuple) or not all(isinstance(name, str) for name in self.windows):
            raise ProgramError(f'Options: windows={self.windows!r} is not a tuple of names; write windows=("x",)')
        if self.partial_dtype not in (None, f32):
            raise ProgramError(f"Options: partial_dtype={self.partial_dtype!r} is neither f32 nor None; use hw.f32")


def options_of(options: object, program: str) -> Options:
    """The options, or the usual ones if None. Raises ProgramError, which names the program, if they are not hw.Options."""
    if not isinstance(options, Options | None):
        raise ProgramError(f"{program}: options must be hw.Options, got {type(options).__name__}; write hw.Options(streams=4)")
    return options or Options()
