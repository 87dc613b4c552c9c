"""Emission of C++ from host IR. The text depends only on the program, not on target, toolchain or machine."""

from hostweave.emit.export import export, render
from hostweave.emit.wheel import Wheel

__all__ = ["Wheel", "export", "render"]
