"""`hw.Options`, the options of `hw.compile`."""

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
    """Options of `hw.compile`.

    - `streams`: largest number of CUDA streams of a chunk loop. Iteration i runs on stream i modulo the number of streams.
    - `check`: True proves that the host program has no races and no deadlocks, and compares the results with the results of the fusion.
      False skips the check. The default checks programs for up to 16 ranks.
    - `sizes`: typical sizes of dims by name. The compiler optimises for these sizes. Other sizes count as 4096.
    - `overlap`: with "auto", a chunk loop overlaps a reshard with matmuls or attention if the cost model predicts a gain. The prediction
      needs known sizes: ints in the program, or names in `sizes`. "auto" also overlaps other communication with independent computation if
      the cost model predicts a gain. "search" runs the best alternatives on all ranks in this process, and keeps the fastest. Later
      compiles reuse the result. "search" needs all sizes. "off" runs all communication in sequence, except in loops that the program states
      by `.stream(...)`. If the chunks of a chosen loop do not divide a size of a call, this call runs without chosen loops.
      `Program.explain` shows the choices.
    - `choices`: algorithms that replace the choices of the cost model, such as `{"@ag_matmul %x_gathered": "put(8)"}`. The keys are the
      names that `Program.explain` shows. "none" means no loop.
    - `machine`: figures for the cost model. By default, `machine` has the figures that `hostweave calibrate` measured on this machine.
      Without measured figures, an H100 or H200 uses the figures that come with the package. Other GPUs use the figures of H200, and
      `Program.explain` says so. The default on the CPU target is always H200.
    - `partial_dtype`: `hw.f32` computes and sends partial sums of 16-bit floats in f32, and rounds only the total. By default each rank
      rounds its partial sum to the dtype of the result.
    - `tf32`: f32 matmuls on GPUs round their operands to TF32 (10 bits of mantissa), and accumulate in f32. TF32 is several times faster.
      The CPU target does not round.
    - `transport`: how ranks transfer data.
      - two_sided: collectives, sends and recvs of the communication library.
      - peer: copy engines copy between the GPUs of one host, so that all multiprocessors compute. Signals are stream memory operations.
        Needs peer access between the GPUs, but no communication library.
      - one_sided: puts, gets and signals of the communication library. Needs version 2.29 or later (2.32 for moves between meshes).
      - auto: two_sided for most communication. A chunk loop uses peer if it has `.stream(..., algorithm="put")`, or if the cost model
        chooses peer. Kernels do small all-reduces, reduce-scatters and all-gathers through peer memory, without the library. If the ranks
        cannot use peer, as in a group of `hw.Communicators`, the compiler's choices use one_sided if possible, otherwise two_sided.

      With peer or one_sided, every rank must have a shard in a chunk loop, and the shards must have equal sizes. The algorithm must be put,
      ring, or a collective of a slice of every shard.

    - `windows`: names of inputs and outputs whose arrays are allocated by `group.empty`. One-sided communication accesses these arrays in
      place. Without this option, a call with such arrays compiles a variant for these arrays. With the option, other arrays are refused for
      the inputs and outputs that peers access.
    - `graph`: "auto" captures a call of `program(...)` as a CUDA graph if inputs and outputs are in the same memory as in an earlier call.
      Later calls with these arrays launch the graph. Use "auto" if the host takes longer to enqueue a call than the GPU takes to run the
      call. The default captures no call.

      The program keeps graphs for the last 16 sets of arrays. Calls with other arrays run without a graph. Outputs are in the same memory
      if `out=` names the same arrays, or if the allocator reuses freed memory.

      With transports two_sided and one_sided, either all ranks run a call as a graph or none does. The ranks decide together before calls
      3, 5, 9, 17 and so on, and at least every 4096 calls. The ranks choose graphs if nearly all calls since the last decision used arrays
      of earlier calls, on every rank. Until the next decision, calls with new arrays are then captured too.

    - `stages`: "auto" reorders the stages of a pipeline over meshes if the cost model predicts a gain. "as_written" keeps the order of the
      program, as do `overlap="off"` and chunk loops.
    - `tune`: measures the algorithms that cuBLASLt recommends for each matmul, and uses the fastest. Without `tune`, the first algorithm is
      used. The first call at new sizes, or `Program.prepare`, measures. Algorithms that need more than the workspace of the matmul are
      skipped. All ranks use the same algorithms. Results are stored in the cache folder, by GPU and cuBLASLt version. `tune` has no effect
      on the CPU target.
    - `verify_calls`: ranks that are processes compare their programs and shapes before every call. Ranks that are threads always compare
      programs and shapes.

    Raises ProgramError for an option with an invalid value.

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
    choices: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def figures(self) -> Machine:
        return self.machine or H200

    @property
    def transports(self) -> tuple[Transport, ...]:
        """Allowed transports, in order of preference. Unsupported transports come last."""
        names = PREFERRED if self.transport == "auto" else (self.transport,)
        return tuple(sorted(map(find_transport, names), key=lambda transport: bool(transport.why_not(self.figures))))

    def transport_carrying(self, *needs: Set[str]) -> Transport | None:
        return first_carrying(self.transports, *needs)

    def __post_init__(self) -> None:
        if not isinstance(self.streams, int) or self.streams < 1:
            raise ProgramError(f"Options: streams={self.streams!r} must be an int of at least 1")
        if self.transport not in TRANSPORTS:
            raise ProgramError(f"Options: there is no transport={self.transport!r}; {did_you_mean(str(self.transport), TRANSPORTS)}")
        if not isinstance(self.machine, Machine | None):
            raise ProgramError(f"Options: machine={self.machine!r} is not an hw.Machine; omit it, or use Machine.from_json")
        for name in ("check", "tf32", "tune", "verify_calls"):
            if (value := getattr(self, name)) not in (True, False) and (name, value) != ("check", None):
                raise ProgramError(f"Options: {name}={value!r} is neither True nor False; write one of them")
        for name in ("sizes", "choices"):
            if not isinstance(value := getattr(self, name), Mapping) or not all(isinstance(key, str) for key in value):
                raise ProgramError(f'Options: {name}={value!r} is not a dict of names; write {name}={{"NAME": ...}}')
        for name, size in self.sizes.items():
            if not isinstance(size, Integral) or size < 1:
                raise ProgramError(f"Options: sizes: {name}={size!r}: a typical size is an int of at least 1; correct it, or omit it")
        if self.overlap not in OVERLAPS:
            raise ProgramError(f"Options: there is no overlap={self.overlap!r}; {did_you_mean(str(self.overlap), OVERLAPS)}")
        if self.stages not in ("auto", "as_written"):
            raise ProgramError(f'Options: stages={self.stages!r} is neither "auto" nor "as_written"; write one of them')
        if self.graph not in (None, "auto"):
            raise ProgramError(f'Options: graph={self.graph!r} is neither "auto" nor None; omit it, or use program.capture')
        if not isinstance(self.windows, tuple) or not all(isinstance(name, str) for name in self.windows):
            raise ProgramError(f'Options: windows={self.windows!r} is not a tuple of names; write windows=("x",)')
        if self.partial_dtype not in (None, f32):
            raise ProgramError(f"Options: partial_dtype={self.partial_dtype!r} is neither f32 nor None; use hw.f32")


def options_of(options: object, program: str) -> Options:
    if not isinstance(options, Options | None):
        raise ProgramError(f"{program}: options must be hw.Options, got {type(options).__name__}; write hw.Options(streams=4)")
    return options or Options()
