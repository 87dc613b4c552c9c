"""Registers a compiled program as a custom op of torch."""

import re
from typing import Any

import torch

from hostweave.api import Program
from hostweave.base.errors import ArgumentError
from hostweave.runtime.group import current
from hostweave.torch.aten.table import TORCH_DTYPES
from hostweave.types.tensor import bind_sizes, global_shape, local_outputs


def as_torch_op(program: Program, name: str) -> Any:
    """Registers a program as the custom op `name`, such as "mylib::mlp", and returns the op. The arguments of the op are the program's
    inputs in order.

    The op works under torch.compile(fullgraph=True), torch.export and make_fx, and in CUDA graphs. In a process or thread that is a rank of
    the default group, a call runs the program on this rank, like `program(...)`. Otherwise a call runs all ranks in this process, like
    `program.run(...)`. The op has no gradient. Use torch.library.register_autograd to attach a program that computes gradients.

    Raises ArgumentError if `program` is not a compiled program, or donates inputs, or if the name has no namespace or is taken.

    Example: `mlp = hostweave.torch.as_torch_op(program, "mylib::mlp")`, then `y = torch.compile(lambda x, w: mlp(x.relu(), w))(x, w)`.
    """
    if not isinstance(program, Program):
        raise ArgumentError(f"as_torch_op: {program!r} is not a compiled program; pass hw.compile(...)")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*::[A-Za-z_]\w*", name):
        raise ArgumentError(f"as_torch_op: {name!r} is not the name of an op; write it with a namespace, such as 'mylib::{program.name}'")
    namespace, _, op = name.partition("::")
    if hasattr(getattr(torch.ops, namespace), op):
        raise ArgumentError(f"as_torch_op: op {name} already exists; choose another name")
    host = program.host
    if donated := [output.memory for output in host.results if output.memory]:
        raise ArgumentError(f"as_torch_op: {program.name} donates {', '.join(donated)}; a torch op cannot change its inputs; remove donate")
    parameters = ", ".join(f"Tensor {parameter.name}" for parameter in host.arguments)
    schema = f"({parameters}) -> ({', '.join(['Tensor'] * len(host.results))})"

    def call(*arrays: torch.Tensor) -> Any:
        made = program(*arrays) if current() else program.run(*arrays)
        return tuple(made) if isinstance(made, tuple) else made

    def fake(*arrays: torch.Tensor) -> Any:
        given = {parameter.name: tuple(array.shape) for parameter, array in zip(host.arguments, arrays, strict=True)}
        group, inputs = current(), {parameter.name: parameter.type for parameter in host.arguments}
        outputs = [output.type for output in host.results]
        if group:
            shapes = local_outputs(program.name, program.mesh, inputs, outputs, given, group.rank)
        else:
            sizes = bind_sizes(program.name, program.mesh, inputs, given, None)
            shapes = [global_shape(type_, sizes) for type_ in outputs]
        pairs = zip(outputs, shapes, strict=True)
        made = tuple(arrays[0].new_empty(shape, dtype=TORCH_DTYPES[output.dtype]) for output, shape in pairs)
        return made if len(made) > 1 else made[0]

    made = torch.library.custom_op(name, call, mutates_args=(), schema=schema)
    made.register_fake(fake)
    return made
