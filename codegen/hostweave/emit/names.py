"""Names of generated C++: the user's own, unless C++ or the generated program uses them for something else."""

from __future__ import annotations

import re
from collections.abc import Iterable

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class co_await co_return
co_yield compl concept const const_cast consteval constexpr constinit continue decltype default delete do double dynamic_cast else
enum explicit export extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr
operator or or_eq private protected public register reinterpret_cast requires return short signed sizeof static static_assert
static_cast struct switch template this thread_local throw true try typedef typeid typename union unsigned using virtual void
volatile wchar_t while xor xor_eq
"""
# What generated functions declare or call, and macros of the headers that they include.
_USED = """
hw std programs Program Inputs Outputs OutputShapes Sizes kMesh kWorld in out caller stream sizes memory guard check output_shapes prepare
run arena int8_t int32_t int64_t uint8_t uint32_t uint64_t size_t blockIdx blockDim threadIdx gridDim warpSize NULL EOF NAN INFINITY
INT8_MIN INT8_MAX UINT8_MAX INT32_MIN INT32_MAX UINT32_MAX INT64_MIN INT64_MAX UINT64_MAX
assert errno stdin stdout stderr
"""
_PREFIXES = ("cuda", "cublas", "nccl", "hw_", "HW_")


class Names:
    """C++ names of one scope. The same name always gives the same C++ name; different ones never share one.

    A name that cannot stay as it is gets the first free number: `int` is `int_1`. All names get `suffix`, as members do.
    """

    def __init__(self, taken: Iterable[str] = (), suffix: str = ""):
        self._suffix = suffix
        self._taken = {*_KEYWORDS.split(), *_USED.split(), *taken}
        self._given: dict[tuple[str, str], str] = {}

    def of(self, name: str, kind: str = "") -> str:
        """The C++ name of `name`. Names of different kinds are different names."""
        if (kind, name) not in self._given:
            free = self._free(name)
            self._given[kind, name] = free
            self._taken.add(free)
        return self._given[kind, name]

    def _free(self, name: str) -> str:
        # Two underscores in a row, and one in front, belong to the compiler; one at the end says that it is a member.
        base = re.sub("_+", "_", name).strip("_") or "v"
        if base.startswith(_PREFIXES):
            base = f"v_{base}"
        number = 0 if base == name else 1
        while (free := f"{base}_{number}{self._suffix}" if number else base + self._suffix) in self._taken:
            number += 1
        return free
