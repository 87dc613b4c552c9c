"""Finds calls that can become one repeat (see `repeats`), and inputs and outputs that can become parameter groups.

A column has the values of one operand, or of one result, in consecutive calls. A stack is a tensor that has the values of a column along
its first dim.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise, product

from hostweave.fusion_ir.ir import Fusion, Op, Value
from hostweave.fusion_ir.ops.attributes import INDEX
from hostweave.fusion_ir.ops.shapes import is_element
from hostweave.fusion_ir.rewriting import consumers
from hostweave.types.group import ParameterGroup
from hostweave.types.tensor import TensorType

MIN_CALLS = 2  # fewest calls that become a repeat

Column = tuple[str, ...]
Roles = list[tuple[set[object], set[object], Column]]


class Unfit(Exception):
    """The run or column `what` cannot be merged. `repeat_calls` starts again without `what`."""

    def __init__(self, what: object):
        self.what = what


@dataclass(eq=False)
class CallRun:
    """Consecutive calls of one function that become a repeat."""

    function: Fusion
    calls: tuple[Op, ...]
    results: tuple[Column, ...]  # a name is "" if the result is not used
    carried: dict[int, int] = field(default_factory=dict)  # operand -> result of the previous call
    each: dict[int, Column] = field(default_factory=dict)  # operand -> a stack or group, of which call i reads tensor i
    lagged: dict[int, Column] = field(default_factory=dict)  # operand -> a stack or group, of which call i reads tensor i - 1
    placed: dict[int, tuple[Column, TensorType]] = field(default_factory=dict)  # result -> all its uses (reshards to a type), and the type
    backward: bool = False

    @property
    def key(self) -> Column:
        return tuple(call.result.name for call in self.calls)

    @property
    def columns(self) -> tuple[Column, ...]:
        return tuple(zip(*(call.tensors for call in self.calls), strict=True))

    def in_order(self, column: Column) -> Column:
        """Reverses a column if the calls are in the reverse order of stacks and groups."""
        return column[::-1] if self.backward else column

    def taken(self, operand: int) -> int:
        """Index of the repeat's result that stacks the values of an operand."""
        return len(self.results) + operand

    def given(self, result: int) -> int:
        """Index of the repeat's result that stacks the values of a function's result."""
        is_carried = result in self.carried.values()
        return len(self.results) + len(self.columns) + result if is_carried else result

    def operand_of(self, result: int) -> int:
        return next(operand for operand, carried in self.carried.items() if carried == result)

    @property
    def stacks(self) -> dict[Column, int]:
        """Stacks for later runs: maps columns to indices of the repeat's results."""
        taken = {self.in_order(self.columns[at]): self.taken(at) for at in self.carried}
        return taken | {self.in_order(self.results[at]): self.given(at) for at in (*self.carried.values(), *range(len(self.results)))}


def _counts_up(column: Column) -> bool:
    """True if the names differ only in a number, which increases by one."""
    return ParameterGroup(column[0], column[-1], "").names == column


class Runs:
    def __init__(self, fusion: Fusion, unfit: set[object], groups: dict[Column, bool], roles: dict[str, Roles]):
        """`groups` and `roles` are caches of `is_group` and `roles_after`, common to all attempts."""
        self.fusion, self.unfit, self.groups, self.roles = fusion, unfit, groups, roles
        self.values = fusion.values()
        self.inputs = {value.name for value in fusion.inputs}
        self.users = consumers(fusion)
        self.taken = {*self.values, *(name for value in self.values.values() for size in value.type.shape for name in size.symbols)}
        self.stacks: dict[Column, tuple[CallRun, int]] = {}
        self.runs: list[CallRun] = []
        self.selects = {op.result.name: op for op in fusion.ops if is_element(op)}
        self.result_of: dict[tuple[str, int], str] = {  # (call, index of a result) -> name of the result
            (op.tensors[0], op[INDEX]): op.result.name for op in fusion.ops if op.kind == "output" and op.callee
        }
        self.find()

    def find(self) -> None:
        calls: dict[str, list[Op]] = {}
        for op in self.fusion.ops:
            if op.kind == "call" and op.callee:
                calls.setdefault(op.callee.name, []).append(op)
        for of_function in calls.values():
            begin = 0
            while begin < len(of_function):
                most = self.most_alike(of_function[begin:])
                # Shorter runs are tried too, because a model may return the carried values of all layers except the last layer.
                ends = sorted({most, most - 1, *(len(column) for column in self.stacks if len(column) < most)}, reverse=True)
                run = next((run for end in ends if end >= MIN_CALLS and (run := self.run(of_function[begin : begin + end]))), None)
                if run and not (run.carried or run.each or run.lagged):
                    run = None  # the calls are equal, and `share_equal_ops` merges them
                if run:
                    self.runs.append(run)
                    run.placed = {at: placed for at in range(len(run.results)) if (placed := self.placed(run, at))}
                    self.stacks |= {column: (run, number) for column, number in run.stacks.items()}
                    self.stacks |= {run.in_order(column): (run, at) for at, (column, _) in run.placed.items()}
                begin += len(run.calls) if run else 1

    def most_alike(self, calls: Sequence[Op]) -> int:
        """Length of the longest prefix of calls in which each operand has one role: `carried`, `shared`, or `in turn`."""
        in_turn = {name for column in self.stacks for name in column} | self.inputs | self.selects.keys()
        roles: list[set[object]] = []
        for number, (before, call) in enumerate(pairwise(calls), 1):
            own = [fixed if not in_turn.isdisjoint(pair) else rest for fixed, rest, pair in self.roles_after(before, call)]
            roles = [a & b for a, b in zip(roles, own, strict=True)] if roles else own
            if not all(roles):
                return number
        return len(calls)

    def roles_after(self, before: Op, call: Op) -> Roles:
        """Three items for each operand of two consecutive calls: its possible roles if a value may be in a group or stack, its possible
        roles otherwise, and the two values if they differ. `in turn`: each call reads another tensor of a group or stack."""
        if call.result.name not in self.roles:
            given, found = self.results_of(before), Roles()
            for a, b in zip(before.tensors, call.tensors, strict=True):
                rest = {*(("carried", at) for at, name in enumerate(given) if name == b), *(("shared",) if a == b else ())}
                found.append((rest | {"in turn"}, rest, (a, b) if a != b else ()))
            self.roles[call.result.name] = found
        return self.roles[call.result.name]

    def results_of(self, call: Op) -> list[str]:
        """Names of the results of a call, or "" for an unused result."""
        return [call.result.name, *(self.result_of.get((call.result.name, at), "") for at in range(1, len(call.called.outputs)))]

    def run(self, calls: Sequence[Op]) -> CallRun | None:
        """The run of these calls, or None if the calls cannot become a repeat."""
        function = calls[0].called
        is_inner = any(op.callee and op.callee.name == function.name for other in self.fusion.functions for op in other.ops)
        if is_inner or any(type.mesh for type in function.types.values()):
            return None
        run = CallRun(function, tuple(calls), ())
        if run.key in self.unfit:
            return None
        run.results = tuple(zip(*map(self.results_of, calls), strict=True))
        before = {column[:-1]: at for at, column in enumerate(run.results)}
        in_turn = dict[int, Column]()
        for at, column in enumerate(run.columns):
            if column[1:] in before and before[column[1:]] not in run.carried.values():
                run.carried[at] = before[column[1:]]
            elif len({*column}) > 1:
                in_turn[at] = column
        for is_late, backward in product((False, True), (False, True)):
            run.backward = backward
            run.each = {at: run.in_order(column) for at, column in in_turn.items()}
            late = {at: column for at, column in run.each.items() if not (self.is_stack(column) or self.is_group(column))}
            run.each = {at: column for at, column in run.each.items() if at not in late}
            counts = len(calls) > 2 or bool(run.each)  # the number in one name alone does not show that the calls are numbered
            run.lagged = {at: whole for at, column in late.items() if is_late and (whole := self.whole(column, counts))}
            if len(run.lagged) == len(late):
                return run
        if not self.stacks:  # later attempts have fewer groups, and would fail too
            self.unfit.add(run.key)
        return None

    def placed(self, run: CallRun, at: int) -> tuple[Column, TensorType] | None:
        """The reshards of a result, and their type, if the result has no uses except reshards to one type. Otherwise None."""
        users = [[op for op in self.users.get(name, []) if op is None or op.kind != "output"] for name in run.results[at]]
        reshards = [of[0].result for of in users if len(of) == 1 and of[0] and of[0].kind == "reshard"]
        is_inner = all(None not in self.users[value.name] for value in reshards)
        if at in run.carried.values() or len(reshards) < len(users) or not is_inner or len({value.type for value in reshards}) > 1:
            return None
        return tuple(value.name for value in reshards), reshards[0].type

    def whole(self, column: Column, counts: bool) -> Column:
        """Stack, or group if `counts`, from which a lagged column reads, or (). `column[1:]` equals the stack or group without its last
        tensor."""
        rest = column[1:]
        if found := next((stack for stack in self.stacks if stack[:-1] == rest), None):
            return found
        for match in re.finditer(r"\d+", rest[-1]) if counts else ():
            following = f"{rest[-1][: match.start()]}{int(match[0]) + 1}{rest[-1][match.end() :]}"
            if self.is_group((*rest, following)):
                return (*rest, following)
        return ()

    def is_stack(self, column: Column) -> bool:
        return column in self.stacks or self.is_slice(column)

    def is_slice(self, column: Column) -> bool:
        """True if the values of the column are at consecutive indices of the outermost dim of one tensor, and this dim is unsharded."""
        ops = [self.selects[name] for name in column if name in self.selects]
        source = ops[0].tensors[0] if ops else ""
        expected = [((source,), ops[0][INDEX] + number) for number in range(len(column))] if ops else []
        return bool(ops) and [(op.tensors, op[INDEX]) for op in ops] == expected and not self.values[source].type.dims[0].axes

    def is_group(self, column: Column) -> bool:
        if column not in self.groups:
            are_inputs = all(name in self.inputs for name in column)
            self.groups[column] = (
                are_inputs and _counts_up(column) and all(self.values[name].type == self.values[column[0]].type for name in column)
            )
        return self.groups[column] and column not in self.unfit

    # --- groups of inputs and outputs ---

    def group_inputs(self) -> list[Value | tuple[Column, ...]]:
        """Inputs in order. A group is one entry, a tuple of one column. Interleaved groups, such as `w_0, v_0, w_1, v_1`, are one entry
        with several columns. Raises Unfit if the inputs of a column cannot form a group."""
        columns = (column for run in self.runs for column in (*run.each.values(), *run.lagged.values()))
        wanted = {column: column for column in columns if not self.is_stack(column)}
        counts = Counter(name for column in wanted for name in column)
        if twice := next((name for name, times in counts.items() if times > 1), None):
            raise Unfit(next(column for column in wanted if twice in column))
        return self.in_structs([value.name for value in self.fusion.inputs], wanted)

    def in_structs(self, names: list[str], wanted: Mapping[Column, object]) -> list[Value | tuple[Column, ...]]:
        """Values in the order of `names`, grouped as in `group_inputs`. Raises Unfit(wanted[column]) if a column cannot be a group."""
        found: list[Value | tuple[Column, ...]] = []
        in_column = {name: column for column in wanted for name in column}
        at = 0
        while at < len(names):
            rows = self.rows(names, at, wanted, in_column.keys())
            if rows:
                found.append(rows)
                at += len(rows) * len(rows[0])
            elif names[at] in in_column:
                raise Unfit(wanted[in_column[names[at]]])
            else:
                found.append(self.values[names[at]])
                at += 1
        return found

    def rows(self, names: list[str], begin: int, wanted: Mapping[Column, object], used: Set[str]) -> tuple[Column, ...] | None:
        """Interleaved columns from `begin`, or None. At least one column is in `wanted`. `used` has all names of columns in `wanted`."""
        for column in wanted:
            try:
                first, second = names.index(column[0], begin), names.index(column[1], begin)
            except ValueError:
                continue
            stride, length = second - first, len(column)
            if first - begin >= stride or stride < 1 or begin + stride * length > len(names):
                continue
            columns = tuple(tuple(names[begin + of : begin + stride * length : stride]) for of in range(stride))
            others = [one for one in columns if one not in wanted]
            if column in columns and all(self.is_group(one) and used.isdisjoint(one) for one in others):
                return columns
        return None

    def group_outputs(self) -> dict[Column, tuple[CallRun, int, TensorType | None]]:
        """Maps columns of returned results to the run, the index of the result, and the type of a later reshard or None."""
        found: dict[Column, tuple[CallRun, int, TensorType | None]] = {}
        for run in self.runs:
            for at, given in enumerate(run.results):
                returned = [self.returned(name) for name in given]
                is_carried = at in run.carried.values()
                if is_carried and any(returned[:-1]) and self.is_kept_otherwise(run, at):
                    raise Unfit(run.key)
                if any(returned[:-1] if is_carried else returned):
                    column = run.in_order(tuple(names[0] if len(names) == 1 else "" for names in returned))
                    types = {self.values[name].type for name in column if name}
                    if "" in column or len(types) > 1 or not _counts_up(column):
                        raise Unfit(run.key)
                    found[column] = run, at, None if column == run.in_order(given) else types.pop()
        return found

    def is_kept_otherwise(self, run: CallRun, at: int) -> bool:
        """True if carried result `at` is updated in place, or another run reads all values that the calls of `run` take."""
        operand = run.operand_of(at)
        kept = run.in_order(run.columns[operand])
        is_updated = bool(run.function.donated) and run.function.donated[at] == run.function.inputs[operand].name
        return is_updated or any(kept in other.each.values() for other in self.runs)

    def returned(self, name: str) -> list[str]:
        """Names of the outputs that are the value `name` or a reshard of `name`."""
        if not name:
            return []
        reshards = [op.result.name for op in self.users[name] if op and op.kind == "reshard" and None in self.users[op.result.name]]
        return [name] * (None in self.users[name]) + reshards
