"""Signatures of calls, by which ranks detect that they are about to make different calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

Shape = tuple[int, ...]


class Span(NamedTuple):
    """The bytes of an argument, in the memory of the rank's process."""

    begin: int
    end: int
    rank: int
    name: str
    written: bool


@dataclass(frozen=True)
class CallSignature:
    """A program that a rank is about to make ready or to call; `error` says why it cannot."""

    program: str
    mesh: str
    digest: str  # of all that decides what the program does
    shapes: tuple[Shape, ...] = ()  # of the rank's inputs, in a call
    spans: tuple[Span, ...] = ()  # of the rank's arguments, where ranks share the memory of one process
    error: str = ""

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> CallSignature:
        fields = json.loads(text)
        return CallSignature(
            **{**fields, "shapes": tuple(map(tuple, fields["shapes"])), "spans": tuple(Span(*span) for span in fields["spans"])}
        )


def disagreement(signatures: Sequence[CallSignature]) -> str | None:
    """In what some rank differs from rank 0, or what keeps it from going on; None where they can all go on together."""
    first = signatures[0]
    for rank, signature in enumerate(signatures):
        if signature.error:
            return f"rank {rank} cannot go on: {signature.error}"
    for rank, signature in enumerate(signatures):
        if (signature.program, signature.mesh) != (first.program, first.mesh):
            return (
                f"rank {rank} calls {signature.program} on {signature.mesh}, rank 0 {first.program} on {first.mesh}; "
                "all ranks of a group call the same programs in the same order"
            )
        if signature.digest != first.digest:
            return f"rank {rank} calls another program of that name than rank 0; compile the same one, with the same options, on all ranks"
    return None
