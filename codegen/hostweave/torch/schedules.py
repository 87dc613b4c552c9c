"""Schedules of pipelines."""

from collections.abc import Sequence
from typing import NamedTuple

from hostweave.base.errors import ProgramError, did_you_mean

SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved", "zero_bubble")


class Action(NamedTuple):
    """A pass of a micro-batch through a stage. `kind` is "forward", "backward", or half of a backward pass: "input" computes gradients of
    inputs, and "weight" those of parameters."""

    kind: str
    stage: int
    microbatch: int


def schedule_of(name: str, stages: int, submeshes: int, microbatches: int) -> list[Action]:
    """Actions of all parts of the mesh, each after the actions on which it depends.

    Stage s is at coordinate `s % parts`. "auto" is 1F1B, or interleaved 1F1B if a coordinate has several stages.
    `passes/fusion/order_stages.py` may then change the order of "auto".
    """
    if name not in SCHEDULES:
        raise ProgramError(f"hostweave.torch.compile: there is no schedule={name!r}; {did_you_mean(str(name), SCHEDULES)}")
    if stages % submeshes:
        why = f"{stages} stages cannot be divided evenly among the {submeshes} parts of the mesh"
        raise ProgramError(f"hostweave.torch.compile: {why}; cut the module into a multiple of {submeshes}")
    each = stages // submeshes
    if name == "1f1b" and each > 1:
        why = f"each part of the mesh has {each} stages, but 1f1b supports one"
        raise ProgramError(f'hostweave.torch.compile: schedule="1f1b": {why}; use schedule="interleaved"')
    if name == "interleaved" and each == 1:
        why = "each part of the mesh has only one stage"
        raise ProgramError(f'hostweave.torch.compile: schedule="interleaved": {why}; use schedule="1f1b", or more stages')
    if each > 1 and name != "gpipe" and microbatches % submeshes:
        why = f"each part of the mesh runs micro-batches in groups of {submeshes}, but there are {microbatches}"
        raise ProgramError(f"hostweave.torch.compile: {why}; use a multiple of {submeshes}")
    return _merged([_of_submesh(name, coordinate, each, submeshes, microbatches) for coordinate in range(submeshes)], stages)


def _of_submesh(name: str, coordinate: int, each: int, submeshes: int, microbatches: int) -> list[Action]:
    """Actions of one part of the mesh, in the order of execution.

    gpipe runs all forward passes before all backward passes. auto, 1f1b and interleaved are Megatron's interleaved 1F1B
    (https://arxiv.org/abs/2104.04473), which is 1F1B if the part has one stage. In zero_bubble, coordinate c computes gradients of
    parameters c backward passes later than gradients of inputs. With one stage per part, zero_bubble is ZB-H1
    (https://arxiv.org/abs/2401.10241).
    """
    own = [coordinate + number * submeshes for number in range(each)]
    if name == "gpipe":
        forward = [Action("forward", stage, one) for stage in own for one in range(microbatches)]
        return forward + [Action("backward", stage, one) for stage in reversed(own) for one in range(microbatches)]
    groups = [range(first, min(first + submeshes, microbatches)) for first in range(0, microbatches, submeshes)]
    forward = [Action("forward", stage, one) for group in groups for stage in own for one in group]
    backward = [Action("backward", stage, one) for group in groups for stage in reversed(own) for one in group]
    ahead = min((submeshes - coordinate - 1) * (2 if each > 1 else 1) + (each - 1) * submeshes, len(forward))
    order, later = forward[:ahead], list[Action]()
    for number, action in enumerate(backward):
        order += forward[ahead + number : ahead + number + 1]
        if name != "zero_bubble":
            order.append(action)
            continue
        order.append(action._replace(kind="input"))
        later.append(action._replace(kind="weight"))
        if len(later) > coordinate:
            order.append(later.pop(0))
    return order + later


def _merged(orders: Sequence[Sequence[Action]], stages: int) -> list[Action]:
    """Merges the orders of all parts of the mesh by start time. Assumes that all actions take equally long."""
    done: dict[tuple[bool, int, int], int] = {}  # (is a forward pass, stage, micro-batch) -> end time
    waiting, free, merged = [list(order) for order in orders], [0] * len(orders), list[tuple[int, int, Action]]()
    while any(waiting):
        before = len(merged)
        for coordinate, order in enumerate(waiting):
            while order and (start := _start(order[0], done, stages)) is not None:
                kind, stage, one = action = order.pop(0)
                begin = max(start, free[coordinate])
                free[coordinate] = begin + 1
                if kind != "weight":
                    done[kind == "forward", stage, one] = begin + 1
                merged.append((begin, coordinate, action))
        assert len(merged) > before, "each schedule ends"
    return [action for *_, action in sorted(merged, key=lambda one: one[:2])]


def _start(action: Action, done: dict[tuple[bool, int, int], int], stages: int) -> int | None:
    """Time at which the inputs of an action are ready, or None if an input is not computed yet."""
    kind, stage, one = action
    if kind == "forward":
        return done.get((True, stage - 1, one)) if stage else 0
    if kind == "weight":
        return done.get((False, stage, one))
    return done.get((False, stage + 1, one) if stage + 1 < stages else (True, stage, one))
