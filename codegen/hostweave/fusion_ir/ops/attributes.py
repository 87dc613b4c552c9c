"""The attributes that ops may have, each with its name in the text and its type: `op[AXIS]` is an int to a type checker, too."""

from __future__ import annotations

from hostweave.fusion_ir.ir import Attribute, MeshAxes
from hostweave.types.routes import Transfer

AXIS = Attribute("axis", int)
AXES = Attribute[tuple[int, ...]]("axis", tuple)
KEEPDIMS = Attribute("keepdims", bool, False)
ORDER = Attribute[tuple[int, ...]]("axes", tuple)
INDEX = Attribute("index", int)
START, STEP = Attribute("start", int), Attribute("step", int)
LOW, HIGH = Attribute[tuple[int, ...]]("low", tuple), Attribute[tuple[int, ...]]("high", tuple)
VALUE = Attribute("value", float, 0.0)
SCALE, CAUSAL, WINDOW = Attribute("scale", float), Attribute("causal", str, ""), Attribute("window", int, 0)
SOURCES = Attribute[tuple[int, ...]]("sources", tuple)

# Of the steps of a reshard.
DIM, TO, ROOT = Attribute("dim", int), Attribute("to", int), Attribute("root", int)
MESH_AXES = Attribute("axes", MeshAxes)
REDUCTION = Attribute("reduction", str)
BLOCKS = Attribute("blocks", Transfer)
