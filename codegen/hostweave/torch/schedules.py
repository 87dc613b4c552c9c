"""Schedules of pipelines: the order in which ranks compute the stages of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hostweave.base.errors import ProgramError, did_you_mean

SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved", "zero_bubble")


class Action(NamedTuple):
    """A pass of one micro-batch through one stage.

    `kind` is "forward", "backward", or one half of a backward pass: "input" for gradients of inputs, "weight" for gradients of parameters.
    """

    kind: str
    stage: int
    microbatch: int


def schedule_of(name: str, stages: int, places: int, microbatches: int) -> list[Action]:
    """The actions of all places of a pipeline in one order, in which each action follows its dependencies.

    Stage s is at place `s % places`. "auto" is 1F1B, or its interleaved form if a place has several stages.
    Raises ProgramError for a schedule that does not exist, or that does not fit these numbers.
    """
    if name not in SCHEDULES:
        raise ProgramError(f"hostweave.torch.compile: there is no schedule={name!r}; {did_you_mean(str(name), SCHEDULES)}")
    if stages % places:
        why = f"{stages} stages cannot be divided among {places} places of the mesh"
        raise ProgramError(f"hostweave.torch.compile: {why}; cut the module into a multiple of {places}")
    each = stages // places
    if name == "1f1b" and each > 1:
        why = f"each place has {each} stages, and 1f1b has one"
        raise ProgramError(f'hostweave.torch.compile: schedule="1f1b": {why}; use schedule="interleaved"')
    if name == "interleaved" and each == 1:
        why = "each place has one stage"
        raise ProgramError(f'hostweave.torch.compile: schedule="interleaved": {why}; use schedule="1f1b", or more stages')
    if each > 1 and name != "gpipe" and microbatches % places:
        why = f"{microbatches} micro-batches of {each} stages for each of {places} places"
        raise ProgramError(f"hostweave.torch.compile: {why}; use a multiple of {places}")
    return _merged([_of_place(name, place, each, places, microbatches) for place in range(places)], stages)


def _of_place(name: str, place: int, each: int, places: int, microbatches: int) -> list[Action]:
    """The actions of one place. Megatron's order of interleaved 1F1B, https://arxiv.org/abs/2104.04473; with one stage it is 1F1B.

    zero_bubble is ZB-H1, https://arxiv.org/abs/2401.10241: place p computes gradients of parameters p micro-batches later.
    """
    own = [place + number * places for number in range(each)]
    if name == "gpipe":
        forward = [Action("forward", stage, one) for stage in own for one in range(microbatches)]
        return forward + [Action("backward", stage, one) for stage in reversed(own) for one in range(microbatches)]
    groups = [range(first, min(first + places, microbatches)) for first in range(0, microbatches, places)]
    forward = [Action("forward", stage, one) for group in groups for stage in own for one in group]
    backward = [Action("backward", stage, one) for group in groups for stage in reversed(own) for one in group]
    ahead = min((places - place - 1) * (2 if each > 1 else 1) + (each - 1) * places, len(forward))
    order, later = forward[:ahead], list[Action]()
    for number, action in enumerate(backward):
        order += forward[ahead + number : ahead + number + 1]
        if name != "zero_bubble":
            order.append(action)
            continue
        order.append(action._replace(kind="input"))
        later.append(action._replace(kind="weight"))
        if len(later) > place:
            order.append(later.pop(0))
    return order + later


def _merged(orders: Sequence[Sequence[Action]], stages: int) -> list[Action]:
    """Merges the orders of all places by start time, as if all actions took equally long."""
    done: dict[tuple[bool, int, int], int] = {}  # end times of forward and backward passes
    waiting, free, merged = [list(order) for order in orders], [0] * len(orders), list[tuple[int, int, Action]]()
    while any(waiting):
        before = len(merged)
        for place, order in enumerate(waiting):
            while order and (start := _start(order[0], done, stages)) is not None:
                kind, stage, one = action = order.pop(0)
                begin = max(start, free[place])
                free[place] = begin + 1
                if kind != "weight":
                    done[kind == "forward", stage, one] = begin + 1
                merged.append((begin, place, action))
        assert len(merged) > before, "each schedule ends"
    return [action for *_, action in sorted(merged, key=lambda one: one[:2])]


def _start(action: Action, done: dict[tuple[bool, int, int], int], stages: int) -> int | None:
    """The time when the inputs of an action are ready. None if one is not computed yet."""
    kind, stage, one = action
    if kind == "forward":
        return done.get((True, stage - 1, one)) if stage else 0
    if kind == "weight":
        return done.get((False, stage, one))
    return done.get((False, stage + 1, one) if stage + 1 < stages else (True, stage, one))
