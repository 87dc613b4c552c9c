"""Names that nothing else has."""

from __future__ import annotations

from collections.abc import Container


def free_name(wanted: str, taken: Container[str]) -> str:
    """`wanted`, or the first of `wanted_2`, `wanted_3`, ... that is not taken."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def take_name(wanted: str, taken: set[str]) -> str:
    """A free name, which is taken from now on."""
    name = free_name(wanted, taken)
    taken.add(name)
    return name
