"""What a rank is about to do, and where ranks do not agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Intent:
    """A program that a rank is about to make ready or to call; `error` says why it cannot."""

    program: str
    mesh: str
    digest: str  # of all that decides what the program does
    shapes: tuple[Shape, ...] = ()  # of the rank's inputs, in a call
    error: str = ""

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Intent:
        fields = json.loads(text)
        return Intent(**{**fields, "shapes": tuple(map(tuple, fields["shapes"]))})


def disagreement(intents: Sequence[Intent]) -> str | None:
    """In what some rank differs from rank 0, or what keeps it from going on; None where they can all go on together."""
    first = intents[0]
    for rank, intent in enumerate(intents):
        if intent.error:
            return f"rank {rank} cannot go on: {intent.error}"
    for rank, intent in enumerate(intents):
        if (intent.program, intent.mesh) != (first.program, first.mesh):
            return (
                f"rank {rank} calls {intent.program} on {intent.mesh}, rank 0 {first.program} on {first.mesh}; "
                "all ranks of a group call the same programs in the same order"
            )
        if intent.digest != first.digest:
            return f"rank {rank} calls another program of that name than rank 0; compile the same one, with the same options, on all ranks"
    return None
