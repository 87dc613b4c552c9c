"""A compiled training step. With accumulation, a second program adds up gradients."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import hostweave as hw
from hostweave.base.errors import ProgramError
from hostweave.runtime.group import Group
from hostweave.runtime.group import current as current_group
from hostweave.torch.bound import BoundProgram
from hostweave.torch.exported import Exported
from hostweave.torch.graph import GradientUpdate, Graph
from hostweave.torch.held import tensor_of
from hostweave.torch.joint import Joint
from hostweave.torch.loss_scale import SCALE, LossScale, unscaled
from hostweave.torch.training import Compile, Differentiated
from hostweave.torch.updates import Updates, clipped, copied_to, local, squares, updated_by
from hostweave.types.tensor import TensorType

_SUM = "sum"  # suffix of the names of accumulated gradients
_IS_FIRST = "is_first"  # input of the accumulating program: 1 in the first of N calls, otherwise 0


class TrainingStep(Differentiated):
    """A training step: the result of `hostweave.torch.compile` with `optimizer=`. A call returns the module's results, and updates
    parameters.

    The program `program` computes both passes, and updates parameters and the tensors in `optimizer.state` in place. Before each update,
    the optimizer's code computes numbers such as learning rates on the host. A TrainingStep is a CompiledModule without `capture`.

    With `clip_grad_norm`, `grad_norm` is the gradient norm of the last update, before clipping. With `scaler`, the update is skipped if a
    gradient is not finite: parameters and optimizer state do not change.
    """

    def __init__(
        self,
        module: nn.Module,
        exported: Exported,
        joint: Joint,
        compile: Compile,
        optimizer: torch.optim.Optimizer,
        clip_grad_norm: float | None = None,
        accumulate: int = 1,
        scaler: torch.amp.GradScaler | None = None,
    ):
        self._joint, self._clip, self._accumulate = joint, clip_grad_norm, accumulate
        device = next((one.device for one in module.parameters()), torch.device("cpu"))
        self._scale = LossScale.of(scaler, device)
        graph = joint.step_graph(SCALE if self._scale else "")
        self.grad_norm: torch.Tensor | None = None
        self._added, self._sums = 0, dict[str, torch.Tensor]()
        self._updates = Updates(optimizer, updated_by(optimizer, _with_gradients(module, joint, graph)), graph.input_types)
        graph.update = self._update(graph)
        programs = [BoundProgram(graph, module, partial(compile, end="_step"), joint.numbers_of(graph))]
        if accumulate > 1:
            graph = joint.step_graph(SCALE if self._scale else "")
            graph.update = self._addition(graph)
            programs.append(BoundProgram(graph, module, partial(compile, end="_accumulate"), joint.numbers_of(graph)))
        super().__init__(module, exported, joint, *programs)
        self._adding = programs[-1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step, or adds gradients. Returns the module's results from before the update.

        Raises ArgumentError if arguments do not fit, or if the module or the optimizer has changed since compile time. In a group, also
        raises ArgumentError if the plan shards a parameter that is not a DTensor.
        """
        passed, given = self._leaves(args, kwargs)
        group = current_group()
        self._updates.expect_held(self._name, self._bound.graph.input_types if group else {})
        results = (self._add if self._added + 1 < self._accumulate else self._step)(given, group)
        return self._ended(passed, results)

    def _step(self, given: Sequence[Any], group: Group | None) -> list[Any]:
        bound, updates = self._bound, self._updates
        had_state = updates.has_state()
        numbers, hosts = updates.next(self._name, self._device)
        made = bound({**self._taken(bound, given), **updates.entries(), **numbers}, group)
        count, self._added = len(self._joint.results), 0
        if self._clip is not None:
            self.grad_norm = made[count]
        if self._scale and self._scale.update(made[count + (self._clip is not None)]):
            updates.skipped(had_state)
        else:
            updates.ended(hosts)
        return made[:count]

    def _add(self, given: Sequence[Any], group: Group | None) -> list[Any]:
        is_first = copied_to(self._device, torch.tensor(float(self._added == 0)))
        made = self._adding({**self._taken(self._adding, given), _IS_FIRST: is_first}, group)
        self._added += 1
        return made[: len(self._joint.results)]

    def _taken(self, bound: BoundProgram, given: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Inputs that both programs have, including the accumulated gradients and the loss scale."""
        if self._accumulate > 1 and not self._sums:
            self._sums = {f"{one.name}_{_SUM}": torch.zeros_like(local(one.parameter)) for one in self._updates.parameters}
        return {**bound.taken(given), **self._sums, **({SCALE: self._scale.now()} if self._scale else {})}

    def _update(self, graph: Graph) -> GradientUpdate:
        updates = self._updates
        of_name = {one.name: one for one in updates.parameters}
        types: dict[str, TensorType] = {}
        for name, stated in graph.input_types.items():  # state follows its parameter, so that the inputs of a layer are adjacent
            types |= of_name[name].types(stated) if name in of_name else {name: stated}
            types |= {f"{name}_{_SUM}": stated} if name in of_name and self._accumulate > 1 else {}
        types |= updates.numbers()
        first = self._count_of_results(graph) + (self._clip is not None) + (self._scale is not None)
        donated = {name: number for number, name in enumerate(updates.written, first)}
        return GradientUpdate(types, donated, len(updates.parameters), self._compute)

    def _addition(self, graph: Graph) -> GradientUpdate:
        own = {f"{one.name}_{_SUM}": graph.input_types[one.name] for one in self._updates.parameters}
        donated = {name: number for number, name in enumerate(own, self._count_of_results(graph))}

        def add(inputs: Mapping[str, hw.Tensor], gradients: Sequence[hw.Tensor]) -> list[hw.Tensor]:
            is_first = inputs[_IS_FIRST] > 0
            return [gradient + hw.where(is_first, 0, inputs[name]) for name, gradient in zip(own, gradients, strict=True)]

        return GradientUpdate({**graph.input_types, **own, _IS_FIRST: hw.f32[()]}, donated, len(own), add)

    def _count_of_results(self, graph: Graph) -> int:
        return sum(node not in graph.constants for node in graph.outputs[: len(self._joint.results)])

    def _compute(self, inputs: Mapping[str, hw.Tensor], gradients: Sequence[hw.Tensor]) -> list[hw.Tensor]:
        """Returns a list: with clipping, the gradient norm; with a scaler, the number of gradient elements that are not finite; then the
        new parameters and state."""
        if self._accumulate > 1:
            gradients = [inputs[f"{one.name}_{_SUM}"] + g for one, g in zip(self._updates.parameters, gradients, strict=True)]
        norm, found_odd = list[hw.Tensor](), list[hw.Tensor]()
        if self._scale:
            gradients, odd = unscaled(gradients, inputs[SCALE])
            found_odd = [odd]
        if self._clip is not None:
            norm = [hw.sqrt(squares(gradients))]
            gradients = clipped(gradients, norm[0], self._clip)
        return norm + found_odd + self._updates.compute(inputs, gradients, *found_odd)


def _with_gradients(module: nn.Module, joint: Joint, graph: Graph) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Parameters with gradients, in the order of the gradients: (input of the graph, path, tensor)."""
    names = {of: name for name, of in graph.parameters.items()}
    for node, origin in zip(graph.returned[len(joint.results) :], joint.origins, strict=True):
        if node is None:
            continue
        if origin.kind != "parameter":
            raise ProgramError(f"optimizer: the argument {origin.name} requires grad; detach() it in example_inputs, or omit optimizer=")
        if node in graph.constants:
            raise ProgramError(f"optimizer: the gradient of {origin.name} does not depend on the inputs; freeze it, or omit optimizer=")
        yield names[origin.name], origin.name, tensor_of(module, origin.name)
