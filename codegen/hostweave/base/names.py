"""Unique names for values and symbols."""

from collections.abc import Container


def unique_name(wanted: str, taken: Container[str]) -> str:
    """Returns `wanted`, or the first of `wanted_2`, `wanted_3`, ... that is free."""
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def claim_unique(wanted: str, taken: set[str]) -> str:
    """Makes `wanted` unique as in `unique_name`, and adds the result to `taken`."""
    name = unique_name(wanted, taken)
    taken.add(name)
    return name
