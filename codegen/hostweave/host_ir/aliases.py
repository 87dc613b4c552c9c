"""Alias roots: the parameters or allocations behind a view, through any number of views: more than one where a view chooses."""

from __future__ import annotations

from hostweave.host_ir import tree


class AliasRoots:
    """The names that a walk over a program has come to. Bodies side by side may use one name for two buffers: the last one counts."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}  # of each view, the first of two
        self._roots: dict[str, tuple[str, ...]] = {}  # of each view

    def define(self, instruction: tree.Instruction) -> None:
        """Notes what an instruction defines, if anything."""
        for name in tree.names(instruction, "define"):
            self._sources.pop(name, None)
            self._roots.pop(name, None)
            if sources := tree.names(instruction, "alias"):
                self._sources[name] = sources[0]
                self._roots[name] = tuple(dict.fromkeys(root for source in sources for root in self.all_of(source)))

    def put(self, name: str, source: str) -> None:
        """Makes a name a view of another one."""
        self._sources[name], self._roots[name] = source, self.all_of(source)

    def source(self, name: str) -> str | None:
        """What a view was made of, the first of two; None for a parameter or an allocation."""
        return self._sources.get(name)

    def of(self, name: str) -> str:
        """The parameter or allocation that a name is, or is a view of; the first of several."""
        while name in self._sources:
            name = self._sources[name]
        return name

    def all_of(self, name: str) -> tuple[str, ...]:
        """All parameters and allocations that a name may be a view of."""
        return self._roots.get(name, (name,))
