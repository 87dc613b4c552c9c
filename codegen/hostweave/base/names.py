"""Unique names for values and symbols."""

from collections.abc import Container


def unique_name(base: str, used: Container[str]) -> str:
    """Returns `base`, or the first of `base_2`, `base_3`, ... that is free."""
    name, number = base, 1
    while name in used:
        number += 1
        name = f"{base}_{number}"
    return name


def claim_unique(base: str, used: set[str]) -> str:
    """Makes `base` unique as in `unique_name`, and adds the result to `used`."""
    name = unique_name(base, used)
    used.add(name)
    return name
