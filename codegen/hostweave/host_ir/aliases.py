"""Alias roots: the parameter or allocation behind a view, through any number of views."""

from __future__ import annotations

from hostweave.host_ir import ir


class AliasRoots:
    """The names that a walk over a program has come to. Bodies side by side may use one name for two buffers: the last one counts."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}  # of each view

    def define(self, instruction: ir.Instruction) -> None:
        """Notes what an instruction defines, if anything."""
        for name in ir.names(instruction, "define"):
            self._sources.pop(name, None)
            for source in ir.names(instruction, "alias"):
                self.put(name, source)

    def put(self, name: str, source: str) -> None:
        """Makes a name a view of another one."""
        self._sources[name] = source

    def source(self, name: str) -> str | None:
        """What a view was made of; None for a parameter or an allocation."""
        return self._sources.get(name)

    def of(self, name: str) -> str:
        """The parameter or allocation that a name is, or is a view of."""
        while name in self._sources:
            name = self._sources[name]
        return name
