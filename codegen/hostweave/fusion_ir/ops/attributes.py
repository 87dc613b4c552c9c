"""The attributes that ops may have, each with its name in the text and its type: `op[AXIS]` is an int to a type checker, too."""

from hostweave.fusion_ir.ir import Attribute, MeshAxes
from hostweave.types.blocks import Transfer
from hostweave.types.size import Size

AXIS = Attribute("axis", int)
AXES = Attribute[tuple[int, ...]]("axis", tuple)
KEEPDIMS = Attribute("keepdims", bool, False)
ORDER = Attribute[tuple[int, ...]]("axes", tuple)
DESCENDING, FIRST = Attribute("descending", bool, False), Attribute("first", int, 0)  # so many of them; 0: all
INDEX = Attribute("index", int)
CONTRACTED = Attribute("contracted", int, 1)
START, STEP = Attribute("start", int), Attribute("step", int)
LOW, HIGH = Attribute[tuple[int, ...]]("low", tuple), Attribute[tuple[int, ...]]("high", tuple)
COUNT = Attribute("count", Size, Size(0))  # of a mean: what the sum is divided by; 0 for how many elements it has
VALUE = Attribute("value", float, 0.0)  # of an integer dtype an int: a float does not have all of them
SCALE, CAUSAL, WINDOW = Attribute("scale", float), Attribute("causal", str, ""), Attribute("window", int, 0)
HAS_BIAS, IS_PACKED = Attribute("bias", bool, False), Attribute("packed", bool, False)  # of attention: whether it has such an operand
KEY_BLOCKS = Attribute("blocks", int, 0)  # of attention: so many results, of a block of the keys each; 0: one of all
PIECES = Attribute("pieces", int, 0)  # of attention: rows and keys lie in so many, as ranks have them in zigzag; 0: in order
REVERSED = Attribute("reversed", int, 0)  # of attention: of so many blocks of rows, one a rank, the last one comes first; 0: in order
HALVES = Attribute("halves", int)
COMPOSED = Attribute("composed", str, "")  # of a scaled matmul: why cuBLASLt does not compute it, one of LACKING; "" if it does
SOURCES = Attribute[tuple[int, ...]]("sources", tuple)

# Of the steps of a reshard.
DIM, TO, ROOT = Attribute("dim", int), Attribute("to", int), Attribute("root", int)
MESH_AXES = Attribute("axes", MeshAxes)
REDUCTION = Attribute("reduction", str)
BLOCKS = Attribute("blocks", Transfer)
