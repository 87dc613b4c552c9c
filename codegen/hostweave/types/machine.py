"""Machines: speeds of GPUs and of the links between GPUs for the cost model, and limits of GPUs for the schedule of kernels."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

from hostweave.base.errors import ProgramError
from hostweave.base.signatures import checked, checked_arguments

Points = tuple[tuple[float, float], ...]  # (bytes, seconds), by increasing bytes

LINKS = ("collective", "put", "get")
GPUS_PER_HOST = 8  # default


@dataclass(frozen=True)
class Link:
    """Measured times of one kind of transfer, by the bytes that a rank receives. For a put or get, only the bytes from one rank count."""

    by: str  # one of LINKS
    ranks: int
    points: Points

    def seconds(self, size: float) -> float:
        """Seconds for `size` bytes: linear between and above the points, and constant below the first point or for a single point."""
        if len(self.points) == 1 or size <= self.points[0][0]:
            return self.points[0][1]
        (x0, y0), (x1, y1) = next((pair for pair in pairwise(self.points) if size <= pair[1][0]), self.points[-2:])
        return y0 + (size - x0) * (y1 - y0) / (x1 - x0)


@checked_arguments
@dataclass(frozen=True)
class Network:
    """Network between hosts, each with consecutive ranks. All GPUs can use the full `bandwidth` at the same time, in each direction.

    `source` is the origin of the figures, such as "NVIDIA DGX H100: 8 ports of 400 Gb/s".

    Raises ProgramError if an argument has the wrong type, or a figure is not above 0.

    Example: `dataclasses.replace(machine, network=hw.Network(bandwidth=45e9, latency=5e-6, source="measured on our cluster"))`.
    """

    bandwidth: float  # bytes per second that a GPU sends to other hosts
    latency: float  # seconds per message
    source: str
    ranks: int = GPUS_PER_HOST  # GPUs per host

    def __post_init__(self) -> None:
        numbers = {"bandwidth": self.bandwidth, "latency": self.latency, "ranks": self.ranks}
        for name, value in numbers.items():
            if not isinstance(value, int if name == "ranks" else int | float) or isinstance(value, bool) or not value > 0:
                raise ProgramError(
                    f"Network: {name}={value!r} is not {'an int' if name == 'ranks' else 'a number'} above 0; "
                    "bandwidth is in bytes per second, latency in seconds, and ranks is the number of GPUs per host"
                )
        if not isinstance(self.source, str):
            raise ProgramError(f"Network: source={self.source!r} is not a string; pass the origin of the figures")

    def seconds(self, size: float, messages: int = 1) -> float:
        """Seconds to send `size` bytes from one GPU, in `messages` consecutive messages."""
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """Speeds and limits of one kind of GPU, and speeds of its links. `hostweave calibrate` measures most of the speeds, and writes all
    figures as JSON.

    A matmul runs in waves, in which each multiprocessor computes one tile. A wave takes `wave` seconds, plus the time of its floating-point
    operations at `flops`. The passes of `kernel_ir` schedule kernels by the figures from `warp` to `line_bytes`. `refused` has transports
    that the ranks cannot use, each with the reason. `no_peers` is the reason why ranks cannot access each other's memory, or "".
    `no_scales` has unsupported kinds of scales (tensor, row or block) of 8-bit matmuls, each with the reason.
    """

    name: str
    multiprocessors: int
    flops: float  # floating-point operations per second of 16-bit matmuls
    wave: float  # seconds of overhead per wave
    memory: float  # bytes per second, read and written
    launch: float  # seconds to launch an empty kernel
    links: tuple[Link, ...] = field(repr=False)
    cache: float = 50e6  # bytes of the L2 cache
    unaligned: float = 6.0  # slowdown of 16-bit matmuls if a row is not a multiple of 16 bytes
    warp: int = 32  # threads
    block_threads: int = 1024  # maximum threads of a block
    cluster_blocks: int = 8  # maximum blocks of a cluster
    registers: int = 2**16  # registers of a multiprocessor, of 4 bytes each
    access_bytes: int = 16  # maximum bytes that a thread loads or stores at once
    line_bytes: int = 128  # bytes of a cache line
    refused: tuple[tuple[str, str], ...] = ()
    no_peers: str = ""
    no_scales: tuple[tuple[str, str], ...] = ()
    network: Network | None = None  # None: one host
    stands_for: str = ""  # name of the actual GPU, if the figures are those of another GPU

    def hosts_of(self, ranks: Iterable[int]) -> int:
        return len({rank // self.network.ranks for rank in ranks}) if self.network else 1

    def for_ranks(self, ranks: Iterable[int]) -> Machine:
        """The machine for these ranks of a program. Ranks of several hosts cannot access each other's memory."""
        return self.across_hosts if self.hosts_of(ranks) > 1 else self

    @property
    def across_hosts(self) -> Machine:
        return replace(self, no_peers="the ranks are on several hosts")

    def link(self, by: str, ranks: int) -> Link:
        """The link of kind `by` whose number of ranks is closest to `ranks`, or the larger of two equally close ones."""
        return min((link for link in self.links if link.by == by), key=lambda link: (abs(link.ranks - ranks), -link.ranks))

    def without(self, transport: str, why: str) -> Machine:
        return replace(self, refused=(*self.refused, (transport, why)))

    def without_scales(self, scaling: str, why: str) -> Machine:
        return replace(self, no_scales=(*self.no_scales, (scaling, why)))

    def with_limits(self, limits: Mapping[str, Any]) -> Machine:
        return replace(self, **limits)

    def to_json(self) -> str:
        of_this_host = ("refused", "no_peers", "no_scales", "stands_for")
        return json.dumps({name: value for name, value in asdict(self).items() if name not in of_this_host}, indent=1) + "\n"

    @staticmethod
    @checked
    def from_json(text: str, where: str) -> Machine:
        """Parses the text of `to_json`.

        Raises ProgramError if the text is invalid. The message names the file `where`.
        """
        try:
            facts: dict[str, Any] = json.loads(text)
            network = Network(**facts.pop("network")) if facts.get("network") else None
            links = tuple(
                Link(link["by"], int(link["ranks"]), tuple((float(x), float(y)) for x, y in link["points"])) for link in facts.pop("links")
            )
            machine = Machine(**{**facts, "links": links, "network": network})
            if {link.by for link in links} != set(LINKS) or not all(link.points for link in links):
                raise ValueError(f"the links are not {', '.join(LINKS)}")
            if any(a >= b for link in links for (a, _), (b, _) in pairwise(link.points)):
                raise ValueError("the bytes of a link do not increase")
            figures = machine.multiprocessors, machine.flops, machine.memory, machine.warp, machine.access_bytes
            if not all(figure > 0 for figure in figures):
                raise ValueError("a figure is not above 0")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"contains no valid figures of a machine ({error})"
            raise ProgramError(f"{where}: {why}; remove it, and run hostweave calibrate") from None
        return machine


KB, MB = 2**10, 2**20

# H200 in one host with NVLink.
H200 = Machine(
    name="NVIDIA H200",
    multiprocessors=132,
    flops=850e12,
    wave=1e-6,
    memory=4.29e12,
    launch=2e-6,
    links=(
        Link("collective", 2, ((16 * KB, 9.5e-6), (MB, 19.2e-6), (16 * MB, 92e-6), (64 * MB, 292e-6), (256 * MB, 1049e-6))),
        Link("collective", 4, ((16 * KB, 12e-6), (MB, 23e-6), (24 * MB, 106e-6), (48 * MB, 184e-6), (96 * MB, 335e-6))),
        Link("collective", 8, ((16 * KB, 15e-6), (MB, 23e-6), (16 * MB, 77e-6), (64 * MB, 236e-6), (256 * MB, 834e-6))),
        Link("put", 2, ((16 * KB, 20.7e-6), (MB, 22.5e-6), (16 * MB, 60.4e-6), (64 * MB, 190e-6), (256 * MB, 703e-6))),
        Link("put", 4, ((16 * KB, 35e-6), (MB, 38e-6), (8 * MB, 51e-6), (16 * MB, 80e-6), (32 * MB, 128e-6))),
        Link("get", 2, ((16 * KB, 10.1e-6), (MB, 14.5e-6), (16 * MB, 55.6e-6), (64 * MB, 191e-6), (256 * MB, 729e-6))),
    ),
)
# H100 SXM with 80 GB, measured at a power limit of 700 W. The H200 has the same NVLink.
H100 = replace(H200, name="NVIDIA H100 80GB HBM3", flops=845e12, memory=3.03e12)

SHIPPED = {machine.name: machine for machine in (H200, H100)}


def shipped(name: str) -> Machine:
    """Figures of a GPU. An unknown GPU gets the figures of H200, with `stands_for` set to the name of the unknown GPU."""
    return SHIPPED.get(name) or replace(H200, stands_for=name)
