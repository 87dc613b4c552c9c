"""What a user may set for one compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Options:
    """Options of `hw.compile`.

    `streams` is the number of CUDA streams that a stream loop walks, round robin. `check` says whether the host program is
    checked for races and deadlocks on every rank; by default it is on meshes of up to 16 ranks. `sizes` gives the usual
    sizes of dims by name, for others 4096: of several ways to reshard a tensor the one that moves the fewest bytes at these
    sizes is taken. With `verify_calls`, ranks that are processes tell each other before every call what they call and with
    what shapes; ranks that are threads always do.
    """

    streams: int = 4
    check: bool | None = None
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    verify_calls: bool = False
