"""Facts about the nodes of a torch.fx graph."""

import operator
import re
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from hostweave.base.errors import Location, ProgramError
from hostweave.types.size import Size

ATTENTION = "scaled_dot_product_attention.default"
RESHARD = "hostweave.reshard.default"  # op that states the sharding of a value


def op_of(node: Node) -> str:
    """Name of the op, such as `add.Tensor`."""
    return str(node.target).removeprefix("aten.")


def is_complex(node: Any) -> bool:
    """True if a node combines the real and the imaginary part of a result, which a program returns separately."""
    return isinstance(node, Node) and op_of(node) == "hostweave.complex.default"


def is_view(node: Any) -> bool:
    """True if a node is a view of its first operand, or an element of a tuple of views."""
    if node.target is operator.getitem:
        return is_view(node.args[0])
    schema: Any = getattr(node.target, "_schema", None)
    return bool(schema) and any(one.alias_info and not one.alias_info.is_write for one in schema.arguments)


def written_by(node: Any) -> list[Node]:
    """Arguments that an op writes to."""
    schema = getattr(node.target, "_schema", None)
    passed = zip(node.args, schema.arguments, strict=False) if schema else ()
    return [value for value, argument in passed if argument.is_write and isinstance(value, Node)]


def is_size(node: Node) -> bool:
    """True if the value of a node is a symbolic number, or a condition on symbolic numbers."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat)


def shape_of(value: Any) -> tuple[int | str, ...]:
    return tuple(map(size_of, value.shape))


def size_of(size: int | torch.SymInt) -> int | str:
    """A size as an int, or a str such as `2*s0`."""
    if isinstance(size, int):
        return size
    if free_unbacked_symbols(size):
        why = "a size depends on a tensor, as in x[mask] or torch.arange(t.item()), and is known only at a call"
        raise ProgramError.here(f"{why}; use a fixed size with torch.where(mask, x, 0), or indices by topk or argsort")
    text = str(size.node.expr).replace("**", "^").replace("//", "/")
    text = f"({text})" if " " in text else text
    try:
        return int(text) if text.isdigit() else str(Size.of(text))
    except ValueError:
        why = f"a size of {text} is not supported; compile with fixed sizes, sums, products of different sizes, or quotients by an int"
        raise ProgramError.here(why) from None


def modules_of(node: Node) -> list[str]:
    """Paths of the modules of a node, or of the forward node of a derivative, outermost first."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return [path for path, _ in stack.values() if path]


def role_of(node: Any) -> str:
    """Path of the module of a value, and the role of the value: "mean" or "rstd" of a norm, "output" or "input", or the op."""
    path = next(reversed(modules_of(node)), "")
    made, index = node.args if node.target is operator.getitem else (node, 0)
    word = op_of(made).removeprefix("hostweave.").partition(".")[0].lstrip("_")
    if word.endswith("_norm") and index:
        word = "rstd" if "rms" in word else {1: "mean", 2: "rstd"}.get(index, word)
    elif path and _is_result(node, path):
        word = "output"
    elif is_view(node) and path not in modules_of(node.args[0]):
        word = "input"
    return f"{path}.{word}".lstrip(".")


def _is_result(node: Any, path: str) -> bool:
    """True if other ops of the module `path` read no element of the value. Derivatives do not count."""
    own = [user for user in node.users if "nn_module_stack" in user.meta and path in modules_of(user)]
    return all(is_view(user) and _is_result(user, path) for user in own)


_NOTE = "Gradient addition node due to"  # torch appends this note to the line of a sum of gradients


OF_TORCH = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parent}/")
_OF_PYTHON = re.compile(re.escape(sysconfig.get_path("stdlib")) + "/(?!site-packages/|dist-packages/)")


def location(node: Node) -> Location | None:
    """The user's line that created a node. Without a user's line, the last line of the stack."""
    frames = re.findall(r'File "(.+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith((*OF_TORCH, "<")) and not _OF_PYTHON.match(frame[0])] or frames
    if not own:
        return None
    path, line, text = own[-1]
    return Location(path.rpartition("/")[2], int(line), text.partition(_NOTE)[0])


_SAME_VALUES = ("unsqueeze", "squeeze", "expand", "view", "_unsafe_view", "slice", "permute", "transpose", "_to_copy", "clone", "alias")


def name_of_constant(node: Node) -> str:
    """Name of a constant: the user's variable, or torch's name."""
    of: Node = node
    while of.op == "call_function":
        line = location(of)
        if variable := re.match(r"([A-Za-z]\w*) = (?!torch\.ops\.)", line.text, re.ASCII) if line else None:
            return variable[1]
        if op_of(of).partition(".")[0] not in _SAME_VALUES:
            break
        of = of.all_input_nodes[0]
    return node.name


def name_of(target: str) -> str:
    """Converts `model.layers.3.up_proj.weight` to `model_layers_up_proj_weight_3`. Numbers are last, so that equal layers form arrays."""
    words = target.split(".")
    numbers = [word for word in words if word.isdigit()]
    return re.sub(r"\W", "_", "_".join([word for word in words if not word.isdigit()] + numbers), flags=re.ASCII)
