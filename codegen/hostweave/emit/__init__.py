"""C++ from host programs. The text depends on the program alone: not on a target, a toolchain or this machine."""

from hostweave.emit.export import export
from hostweave.emit.render import render

__all__ = ["export", "render"]
