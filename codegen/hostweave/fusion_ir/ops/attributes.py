"""Attributes of ops: name in the text, type, and default if the attribute is optional."""

from hostweave.fusion_ir.ir import Attribute, MeshAxes
from hostweave.types.blocks import Transfer
from hostweave.types.size import Size

AXIS = Attribute("axis", int)
AXES = Attribute[tuple[int, ...]]("axis", tuple)
KEEPDIMS = Attribute("keepdims", bool, False)
ORDER = Attribute[tuple[int, ...]]("axes", tuple)
DESCENDING, FIRST = Attribute("descending", bool, False), Attribute("first", int, 0)  # first: number of elements to keep per row; 0: all
INDEX = Attribute("index", int)
GROUPS = Attribute("groups", int, 0)
CONTRACTED = Attribute("contracted", int, 1)
START, STEP = Attribute("start", int), Attribute("step", int)
LOW, HIGH = Attribute[tuple[int, ...]]("low", tuple), Attribute[tuple[int, ...]]("high", tuple)
OFFSET = Attribute("offset", Size, Size(0))  # first element of an iota
COUNT = Attribute("count", Size, Size(0))  # divisor of a mean; 0: the number of reduced elements
DEPTH = Attribute("depth", Size, Size(0))  # number of calls of a repeat; 0: no repeat
_NONE: tuple[int, ...] = ()
EACH = Attribute[tuple[int, ...]]("each", tuple, _NONE)  # operands of which call i reads tensor i
CARRIED, RETURNED = Attribute[tuple[int, ...]]("carried", tuple, _NONE), Attribute[tuple[int, ...]]("returned", tuple, _NONE)
LAGGED = Attribute[tuple[int, ...]]("lagged", tuple, _NONE)  # operands of which call i reads tensor i - 1
BACKWARD = Attribute("backward", bool, False)  # the first call reads the last tensors
VALUE = Attribute("value", float, 0.0)  # int for integer dtypes, because floats cannot represent all ints
SCALE, CAUSAL, WINDOW = Attribute("scale", float), Attribute("causal", str, ""), Attribute("window", int, 0)
HAS_BIAS, IS_PACKED = Attribute("bias", bool, False), Attribute("packed", bool, False)
KEY_BLOCKS = Attribute("blocks", int, 0)  # number of blocks of keys; 0: one result over all keys
PIECES = Attribute("pieces", int, 0)  # number of pieces of rows and keys in zigzag order; 0: plain order
REVERSED = Attribute("reversed", int, 0)  # number of blocks of rows in reversed order; 0: plain order
HALVES = Attribute("halves", int)
COMPOSED = Attribute("composed", str, "")  # one of `scaled.LACKING`, if cuBLASLt cannot compute a scaled matmul
SOURCES = Attribute[tuple[int, ...]]("sources", tuple)

# Attributes of reshard steps.
DIM, TO, ROOT = Attribute("dim", int), Attribute("to", int), Attribute("root", int)
MESH_AXES = Attribute("axes", MeshAxes)
REDUCTION = Attribute("reduction", str)
BLOCKS = Attribute("blocks", Transfer)
