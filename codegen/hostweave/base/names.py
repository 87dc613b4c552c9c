"""Unique names."""

from collections.abc import Container


def unique_name(wanted: str, taken: Container[str]) -> str:
    """`wanted`, or the first of `wanted_2`, `wanted_3`, ... that is not taken."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def claim_unique(wanted: str, taken: set[str]) -> str:
    """A free name, which is taken from now on."""
    name = unique_name(wanted, taken)
    taken.add(name)
    return name
