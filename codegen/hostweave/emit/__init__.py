"""C++ from host programs. The text depends on the program only, not on target, toolchain or machine."""

from hostweave.emit.export import export, render

__all__ = ["export", "render"]
