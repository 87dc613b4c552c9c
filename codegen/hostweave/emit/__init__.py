"""Emission of C++ from host IR. The text depends only on the program, not on target, toolchain or machine."""

from hostweave.emit.export import export, render

__all__ = ["export", "render"]
