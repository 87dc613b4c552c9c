"""Modules that are compiled for training."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.fx import Node

import hostweave as hw
from hostweave.api import Program
from hostweave.api import compile as compile_program
from hostweave.runtime.group import Group
from hostweave.torch.bound import BoundProgram
from hostweave.torch.compiled import CompiledModule
from hostweave.torch.exported import Exported
from hostweave.torch.held import placed_like, tensor_of
from hostweave.torch.joint import Joint
from hostweave.torch.ops import keep, kept
from hostweave.torch.transforms import expect_eager, inference_tensor
from hostweave.torch.updates import local

Compile = Callable[..., Program]  # (graph, end of the program's name)


class Differentiated(CompiledModule):
    def __init__(self, module: nn.Module, exported: Exported, joint: Joint, *programs: BoundProgram):
        super().__init__(module, exported, joint.outer, *programs)
        self._joint = joint
        # The lists have an entry for each argument of the joint graph: the parameter or None, and True for a parameter that requires grad.
        self._held = [tensor_of(module, origin.name) if origin.kind == "parameter" else None for origin in joint.origins]
        self._wants = [held is not None and held.requires_grad for held in self._held]

    def capture(self, *args: Any, **kwargs: Any) -> NoReturn:
        remedy = 'pass options=hw.Options(graph="auto"), or compile it again without gradients'
        raise self._refused(f"capture: a module compiled for training cannot be captured; {remedy}")

    def _expect_unchanged(self) -> None:
        super()._expect_unchanged()
        for origin, held, wanted in zip(self._joint.origins, self._held, self._wants, strict=True):
            if held is not None and (now := held.requires_grad) != wanted:
                raise self._refused(f"{origin.name} has requires_grad={now}, but had {wanted} at compile time; compile again")

    def _given(self, number: int, arrays: dict[str, torch.Tensor]) -> Any:
        """Tensor for an argument of the joint graph. None for a buffer or a constant."""
        origin = self._joint.origins[number]
        if origin.kind not in ("argument", "seeds"):
            return self._held[number]
        tensor = arrays[self._joint.outer.names[self._joint.sources[number]]]
        if tensor.requires_grad and torch.is_grad_enabled() and not self._joint.needs_gradient.get(origin.name):
            remedy = "compile with example_inputs that require grad, or detach() it"
            raise self._refused(f"{origin.name} requires grad, but did not at compile time; {remedy}")
        return tensor

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[Node, torch.Tensor], tuple[Any, ...]]:
        """Arguments of a call by node, and arguments of the joint graph."""
        arrays = self._arrays(args, kwargs)
        expect_eager(self._name, [*self._held_tensors.tensors, *arrays.values()])
        self._expect_unchanged()
        self._expect_apart(arrays)
        if torch.is_grad_enabled() and (found := inference_tensor(arrays.items())):
            raise self._refused(found)
        passed = {node: arrays[self._graph.names[node]] for node in self._graph.arguments if node in self._graph.names}
        return passed, tuple(self._given(number, arrays) for number in range(len(self._joint.origins)))

    def _ended(self, passed: dict[Node, torch.Tensor], results: Sequence[Any]) -> Any:
        """Builds the module's result. Updates buffers, such as running statistics."""
        known = {**passed, **dict(zip(self._joint.results, results, strict=True))}
        self._expect_valid(known)
        for node, value in self._graph.written.items():
            buffer = tensor_of(self._module, self._graph.origins[node].name)
            local(buffer).copy_(known[value] if value in known else self._graph.constants[value])
            if not isinstance(buffer, DTensor):
                known[value] = buffer
        return self._returned(known)


class TrainingModule(Differentiated):
    """A module that was compiled with `training=True`. `backward()` of an output adds to `.grad` of the parameters. `program` computes the
    outputs and the saved values. The program `backward` computes the gradients. A TrainingModule is a CompiledModule without `capture`."""

    def __init__(self, module: nn.Module, exported: Exported, joint: Joint, compile: Compile):
        graph = joint.forward_graph(joint.shared)
        forward = BoundProgram(graph, module, compile, joint.numbers_of(graph))
        backward_graph = joint.backward_graph(graph, [output.type for output in forward.program.host.results])
        self._backward = BoundProgram(backward_graph, module, partial(compile, end="_backward"), joint.numbers_of(backward_graph))
        super().__init__(module, exported, joint, forward, self._backward)
        tensors = {*backward_graph.parameters.values()}
        self._read = {*joint.numbers_of(backward_graph).values()}  # arguments of the joint graph that `backward` reads
        self._read |= {number for number, origin in enumerate(joint.origins) if origin.name in tensors}
        self._lock = threading.Lock()
        self._gather: Program | None = None

    @property
    def backward(self) -> Program:
        """The compiled program of the backward pass."""
        return self._backward.program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module, and records the call for gradients. Raises ArgumentError if arguments or the module differ from compile
        time."""
        passed, given = self._leaves(args, kwargs)
        made = _Step.apply(self, self._group(), *given)  # type: ignore[no-untyped-call]
        return self._ended(passed, made)

    def _compute(self, group: Group | None, given: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Results, and values saved for the backward pass."""
        values = self._bound(self._bound.taken(given), group)
        results, others = values[: len(self._joint.results)], iter(values[len(self._joint.results) :])
        shared = self._joint.shared
        return results, [results[shared[node]].detach() if node in shared else next(others) for node in self._joint.saved]

    def _gradients(self, group: Group | None, given: Any, saved: Any, tangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradient of each argument of the joint graph, or None."""
        bound, joint = self._backward, self._joint
        named = dict(zip((node.name for node in joint.saved), saved, strict=True))
        named |= {f"tangents_{number + 1}": tangent.contiguous() for number, tangent in enumerate(tangents)}
        unbound = {node.name: name for node, name in bound.graph.names.items() if name not in bound.graph.bound}
        arrays = bound.taken(given) | {name: named[of] for of, name in unbound.items() if of in named}
        made = zip(bound.graph.returned, bound(arrays, group), strict=True)
        found = [one.clone() if node in bound.graph.constants else one for node, one in made]
        return self._whole(found, group) if group else found

    def _whole(self, found: list[torch.Tensor | None], group: Group) -> list[torch.Tensor | None]:
        """Makes a gradient a DTensor if its parameter is a DTensor, and gathers a gradient if its parameter is whole on each rank."""
        made: list[Any] = list(found)
        if self._sharded:
            whole = self._gather_program()(*(found[number] for number in self._sharded), group=group)
            for number, gathered in zip(self._sharded, whole if isinstance(whole, tuple) else (whole,), strict=True):
                made[number] = gathered
        return [placed_like(parameter, gradient) for parameter, gradient in zip(self._held, made, strict=True)]

    @cached_property
    def _sharded(self) -> list[int]:
        """Indices of parameters that require grad, and are whole on each rank although the plan shards them."""
        plain = [number for number, held in enumerate(self._held) if self._wants[number] and not isinstance(held, DTensor)]
        return [number for number in plain if any(self._joint.axes_of(self._joint.origins[number]))]

    def _gather_program(self) -> Program:
        """Program that gathers the gradients of the parameters `_sharded`."""
        with self._lock:  # ranks may be threads
            if self._gather is None:
                joint = self._joint
                given: dict[str, Any] = {
                    f"gradient_{number}": joint.outer.type_of(joint.sources[number], joint.axes_of(joint.origins[number]))
                    for number in self._sharded
                }

                def gather(**gradients: hw.Tensor) -> tuple[hw.Tensor, ...]:
                    return tuple(hw.reshard(gradient, *gradient.shape) for gradient in gradients.values())

                gather.__name__ = f"{self.program.name}_gather"
                fusion = hw.fusion(mesh=self.program.mesh, **given)(gather)
                options = replace(self.program.compiled.options, sizes={}, choices={})
                self._gather = compile_program(fusion, target=self.program.target.name, options=options)
            return self._gather


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, model: TrainingModule, group: Group | None, *given: Any) -> Any:
        results, saved = model._compute(group, given)
        ctx.model, ctx.group, ctx.kept = model, group, len(saved)
        copied = () if model._joint.shared else model._joint.results_saved.values()
        of_results = [_version_of(results[number]) for number in copied]
        keep(ctx, (*saved, *(one if number in model._read else None for number, one in enumerate(given)), *of_results))
        ctx.mark_non_differentiable(*(one for one, has in zip(results, model._joint.differentiable, strict=True) if not has))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor) -> Any:
        model: TrainingModule = ctx.model
        expect_eager(model._name, tangents)
        if torch.is_grad_enabled():
            raise model._refused("second derivatives are not compiled; call backward without create_graph=True")
        try:
            values = kept(ctx)
        except RuntimeError as error:
            if "second time" in str(error):
                why = "backward is called a second time, and its saved tensors are freed"
                raise model._refused(f"{why}; call the module again, or the first backward with retain_graph=True") from error
            why = "a parameter, an argument or a result was written to after the call, and backward needs the old values"
            raise model._refused(f"{why}; call backward before the write, or call the module again") from error
        wanted = [tangent for tangent, has in zip(tangents, model._joint.differentiable, strict=True) if has]
        given = values[ctx.kept : ctx.kept + len(model._joint.origins)]
        return None, None, *model._gradients(ctx.group, given, values[: ctx.kept], wanted)


def _version_of(result: torch.Tensor) -> torch.Tensor:
    """Empty tensor with the version counter of a result. Autograd saves the empty tensor, and so reports writes to the result. The backward
    pass reads a copy of the result."""
    with torch.no_grad():
        made = result.detach()
        made.data = made.new_empty(0)
    return made
