"""Unique names for values and symbols."""

import itertools
from collections.abc import Container


def unique_name(base: str, used: Container[str]) -> str:
    """Returns `base`, or the first unused name of `base_2`, `base_3`, ... If `y` and `y_2` are used, `y_2` becomes `y_3`."""
    if base not in used:
        return base
    stem, _, number = base.rpartition("_")
    if not number.isdecimal() or stem not in used:
        stem, number = base, "1"
    return next(name for count in itertools.count(int(number) + 1) if (name := f"{stem}_{count}") not in used)


def claim_unique(base: str, used: set[str]) -> str:
    name = unique_name(base, used)
    used.add(name)
    return name
