"""The environment variables that begin with HOSTWEAVE_, and a warning about misspelt names."""

import os
import warnings
from collections.abc import Mapping

from hostweave.base.errors import closest_word

_PREFIX = "HOSTWEAVE_"
_NAMES = ("BIND", "CACHE", "CACHE_LIMIT", "COMPILER_TIMEOUT", "CUDA_ARCH", "EDIT", "FRAMES", "GRAPH_PROGRESS", "PORT", "TOKEN")
VARIABLES = tuple(_PREFIX + name for name in _NAMES)


def warn_of_misspelt(environment: Mapping[str, str] = os.environ) -> None:
    for variable in environment:
        if not variable.startswith(_PREFIX) or variable in VARIABLES:
            continue
        if suggestion := closest_word(variable.removeprefix(_PREFIX), _NAMES, 0.75):
            remedy = suggestion.replace("mean ", f"mean {_PREFIX}")
            warnings.warn(f"{variable} is set, but hostweave reads no such variable; {remedy}", stacklevel=4)
