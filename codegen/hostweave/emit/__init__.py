"""C++ from host programs. The text depends on the program only, not on target, toolchain or machine."""

from hostweave.emit.export import export
from hostweave.emit.render import render

__all__ = ["export", "render"]
