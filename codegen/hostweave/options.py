"""What a user may set for one compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked_arguments
from hostweave.types.tensor import DType, f32


@checked_arguments
@dataclass(frozen=True)
class Options:
    """Options of `hw.compile`.

    `streams` is the number of CUDA streams that a stream loop walks, round robin. `check` says whether the host program
    is checked for races and deadlocks on every rank; by default it is on meshes of up to 16 ranks. `sizes` gives the
    usual sizes of dims by name, for others 4096: of several ways to reshard a tensor the one that moves the fewest
    bytes at these sizes is taken. `partial_dtype`, `hw.f32` or nothing, is the dtype in which partial sums of 16-bit
    floats are computed and sent: without it each is rounded to the dtype of the result first. With `tf32`,
    matmuls of f32 round their operands to TF32, of 10 bits after the point, and add up in f32: several times faster on
    tensor cores (the CPU target computes in f32). With `verify_calls`, ranks that are processes tell each other before
    every call what they call and with what shapes; ranks that are threads always do.

    Raises ProgramError for another `partial_dtype`, and for `streams` below 1.
    """

    streams: int = 4
    check: bool | None = None
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    partial_dtype: DType | None = None
    tf32: bool = False
    verify_calls: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.streams, int) or self.streams < 1:
            raise ProgramError(f"Options: streams={self.streams!r} must be an int of at least 1")
        if self.partial_dtype not in (None, f32):
            raise ProgramError(
                f"Options: partial_dtype={self.partial_dtype} is neither f32 nor None, and no other dtype is wider; use hw.f32"
            )
