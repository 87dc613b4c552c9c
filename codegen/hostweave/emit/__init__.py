"""Emission of C++ from host IR. The C++ depends on the program and on the figures of a machine. All targets compile the same C++."""

from hostweave.emit.export import export, render
from hostweave.emit.wheel import Wheel

__all__ = ["Wheel", "export", "render"]
