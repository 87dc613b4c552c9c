"""Attributes of ops, with their name in the text and their type. To a type checker `op[AXIS]` is an int."""

from hostweave.fusion_ir.ir import Attribute, MeshAxes
from hostweave.types.blocks import Transfer
from hostweave.types.size import Size

AXIS = Attribute("axis", int)
AXES = Attribute[tuple[int, ...]]("axis", tuple)
KEEPDIMS = Attribute("keepdims", bool, False)
ORDER = Attribute[tuple[int, ...]]("axes", tuple)
DESCENDING, FIRST = Attribute("descending", bool, False), Attribute("first", int, 0)  # number of elements to keep; 0: all
INDEX = Attribute("index", int)
GROUPS = Attribute("groups", int, 0)
CONTRACTED = Attribute("contracted", int, 1)
START, STEP = Attribute("start", int), Attribute("step", int)
LOW, HIGH = Attribute[tuple[int, ...]]("low", tuple), Attribute[tuple[int, ...]]("high", tuple)
OFFSET = Attribute("offset", Size, Size(0))  # first number of an iota
COUNT = Attribute("count", Size, Size(0))  # divisor of a mean; 0: the number of elements
DEPTH = Attribute("depth", Size, Size(0))  # number of calls of a repeat, and of the tensors that it gives; 0: one tensor
_NONE: tuple[int, ...] = ()
EACH = Attribute[tuple[int, ...]]("each", tuple, _NONE)  # operands of which each call takes the next tensor
CARRIED, RETURNED = Attribute[tuple[int, ...]]("carried", tuple, _NONE), Attribute[tuple[int, ...]]("returned", tuple, _NONE)
LAGGED = Attribute[tuple[int, ...]]("lagged", tuple, _NONE)  # operands of which each call takes the previous tensor
BACKWARD = Attribute("backward", bool, False)  # the first call takes the last tensors
VALUE = Attribute("value", float, 0.0)  # an int for integer dtypes, since floats cannot represent all of them
SCALE, CAUSAL, WINDOW = Attribute("scale", float), Attribute("causal", str, ""), Attribute("window", int, 0)
HAS_BIAS, IS_PACKED = Attribute("bias", bool, False), Attribute("packed", bool, False)  # attention has such an operand
KEY_BLOCKS = Attribute("blocks", int, 0)  # number of blocks of keys, each with a result; 0: one result of all keys
PIECES = Attribute("pieces", int, 0)  # number of pieces of rows and keys, in the order in which ranks hold them in zigzag; 0: in order
REVERSED = Attribute("reversed", int, 0)  # number of blocks of rows in reverse order, one per rank; 0: in order
HALVES = Attribute("halves", int)
COMPOSED = Attribute("composed", str, "")  # reason why cuBLASLt does not compute a scaled matmul, one of LACKING; "" if it does
SOURCES = Attribute[tuple[int, ...]]("sources", tuple)

# Attributes of reshard steps.
DIM, TO, ROOT = Attribute("dim", int), Attribute("to", int), Attribute("root", int)
MESH_AXES = Attribute("axes", MeshAxes)
REDUCTION = Attribute("reduction", str)
BLOCKS = Attribute("blocks", Transfer)
