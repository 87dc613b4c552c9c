"""Runs a compiled program and its variants: on all ranks in this process, or on this rank of a group."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, lru_cache, partial
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from hostweave.base.errors import ArgumentError, ExecutionError
from hostweave.base.forks import reset_after_fork
from hostweave.base.interrupts import interruptibly
from hostweave.base.shortages import explains_shortages
from hostweave.compiled import Compiled
from hostweave.fusion_ir.ir import Fusion
from hostweave.host_ir.size_requirements import LoopsDoNotDivide, are_divided, undivided
from hostweave.runtime.arguments import BoundInputs, ordered_inputs
from hostweave.runtime.call import GlobalCall, make_call
from hostweave.runtime.cpu import CpuSchedule
from hostweave.runtime.group import Group, current
from hostweave.runtime.lifetime import expect_own_devices
from hostweave.runtime.lines import add_source_lines
from hostweave.runtime.local import LocalProgram, stream_of_call
from hostweave.runtime.team import Team, Timing, team_of
from hostweave.transports.transport import DEFAULT, NAMES, Transport, find_transport
from hostweave.types.machine import Machine
from hostweave.types.mesh import Sizes
from hostweave.types.tensor import shape_given

T = TypeVar("T")
Arrays = Sequence[Any]
ArraysByName = Mapping[str, Any]
GivenArrays = tuple[Arrays, ArraysByName]  # by position, and by name
Constants = tuple[tuple[str, int], ...]

MOST_PER_GROUP = 16  # maximum number of variants per owner in `at_sizes`; each variant has its own memory


@cache
def _tell_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Variants:
    """The variants of one program. A variant is compiled when a call first needs it. Iteration yields all variants that are kept. Only
    information that all ranks share selects a variant, so all ranks select the same variant."""

    def __init__(self, compiled: Compiled, running: Callable[[Compiled], Running]):
        """`running` creates the object that runs a variant."""
        self._compiled, self._running = compiled, running
        self._made: dict[Hashable, Running | None] = {}  # None if the variant would equal the program itself
        # Latest variants of `at_sizes`, by owner.
        self._at_sizes: WeakKeyDictionary[object, dict[Constants, Running | None]] = WeakKeyDictionary()
        self._compiled_at = lru_cache(MOST_PER_GROUP)(lambda sizes: compiled.at_sizes(dict(sizes)))
        self._lock = reset_after_fork(threading.Lock())

    def __iter__(self) -> Iterator[Running]:
        kept = (one for of_group in self._at_sizes.values() for one in of_group.values())
        return filter(None, dict.fromkeys((*self._made.values(), *kept)))

    def close(self) -> None:
        for variant in list(self):
            variant.close()

    def in_sequence(self) -> Running | None:
        """The program without the chunk loops that the compiler chose, or None if there are none."""
        made = self._compiled.in_sequence
        return self._get("in sequence", lambda: made) if made is not self._compiled else None

    def marked(self) -> Running:
        return self._get("marked", lambda: self._compiled.marked)

    def on(self, machine: Machine) -> Running:
        choices = self._compiled.stated_for_all_machines
        return self._get(machine, lambda: self._compiled.otherwise("without some transports", choices=choices, machine=machine))

    def for_windows(self, names: tuple[str, ...]) -> Running | None:
        """The program for arguments in windows. None if that would equal the program itself."""
        with self._lock:
            if names not in self._made:
                made = self._compiled.otherwise(f"for {', '.join(names)} in windows", windows=names)
                known = {one.compiled.host.windows: one for one in filter(None, self._made.values())}
                same = made.host.windows == self._compiled.host.windows
                self._made[names] = None if same else known.get(made.host.windows) or self._running(made)
            return self._made[names]

    def at_sizes(self, sizes: Mapping[str, int], owner: object) -> Running | None:
        """The program with constants in place of the sizes that `undivided` finds. None if `undivided` finds no sizes, or if
        `Compiled.at_sizes` returns None.

        `owner` is a group, or the runner of `Program.run`. Each owner keeps `MOST_PER_GROUP` recent variants. All ranks of a group make the
        same calls, so all ranks keep the same variants. A dropped variant is freed when no call or captured call uses it.
        """
        divided = are_divided(self._compiled.host, sizes)
        constants = tuple(undivided((self._compiled if divided else self._compiled.in_sequence).host, sizes).items())
        if not constants:
            return None
        with self._lock:
            kept = self._at_sizes.setdefault(owner, {})
            if constants in kept:
                found = kept.pop(constants)
            else:
                made = self._compiled_at(constants)
                found = self._running(made) if made else None
            kept[constants] = found
            _freed = kept.pop(next(iter(kept))) if len(kept) > MOST_PER_GROUP else None  # freed at the return, outside of the lock
        return found

    def _get(self, key: Hashable, compile: Callable[[], Compiled]) -> Running:
        with self._lock:
            if (found := self._made.get(key)) is None:
                found = self._made[key] = self._running(compile())
            return found


class Family:
    """Identity that a program shares with its variants. A reference to the identity keeps no variant alive."""


class Running:
    """Runner of a program and its variants, with their device resources. Programs that `Program.bind` returns share the runner."""

    def __init__(self, compiled: Compiled, family: Family | None = None):
        self._family = family or Family()
        self.compiled, self.name = compiled, compiled.host.name
        self._nothing_bound = BoundInputs(compiled.host, compiled.target, {})
        self.variants = Variants(compiled, partial(Running, family=self._family))
        self._locals: WeakSet[LocalProgram] = WeakSet()  # one entry per group and rank of this process
        self._closed = False
        self._lock = reset_after_fork(threading.Lock())

    def bind(self, held: BoundInputs | None, arrays: ArraysByName) -> BoundInputs:
        """Binds `arrays` in addition to the inputs that `held` binds."""
        return BoundInputs(self.compiled.host, self.compiled.target, arrays, held)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for local in list(self._locals):
                local.close()
        self.variants.close()

    def _expect_open(self) -> None:
        if self._closed:
            raise ExecutionError(f"{self.name}: the program is closed; compile it again")

    def _module(self, ranks: int) -> ModuleType:
        """Module for `ranks` ranks in this process. First checks that the process can run these ranks, because the build takes long."""
        if why := self.compiled.target.why_not_here(ranks):
            raise ExecutionError(f"{self.name}: {why}")
        return self.compiled.module

    def _or_in_sequence(self, call: Callable[[Running], T]) -> T:
        """Makes a call. If the chosen chunk loops cannot split the call's sizes evenly, the variant without these loops makes the call."""
        try:
            return call(self)
        except LoopsDoNotDivide:
            return call(self.variants.in_sequence() or self)

    def _for_sizes(self, sizes: Sizes, group: Group | None = None) -> Running:
        """Variant with constants for sizes that the ranks cannot share evenly. Returns self if no variant is needed or possible."""
        return self.variants.at_sizes(sizes, group if isinstance(group, Group) else self) or self

    def _known(self, sizes: Sizes) -> Sizes:
        return {name: size for name, size in sizes.items() if name in self.compiled.host.given_sizes()}

    def _rebound(self, held: BoundInputs | None) -> BoundInputs | None:
        """Binds to this variant the arrays that another variant has bound."""
        arrays = {name: array for name, (_, array) in held.arrays.items()} if held else {}
        return self.bind(None, arrays) if arrays else None

    def _for_windows(self, group: Group, bound: BoundInputs, arrays: Arrays, out: Any) -> Running:
        """Variant that accesses arguments in windows in place, or self."""
        host = self.compiled.host
        may_lie = not self.compiled.options.windows and isinstance(self.compiled.given, Fusion)
        if not may_lie or not host.optional_transports:
            return self
        outs = () if out is None else (out,) if len(host.results) == 1 else out
        names = group.windows.names(bound, (*zip(bound.unbound, arrays, strict=False), *zip(host.results, outs, strict=False)))
        return (self.variants.for_windows(names) if names else None) or self

    @property
    def _lacks(self) -> str:
        """Reason why the communication library is missing or too old, or "". Not cached, because a library may be loaded later."""
        return max((self.compiled.target.why_not(channel.transport) for channel in self.compiled.host.channels), default="")

    def _without(self, why: str, all_have: Callable[[Transport], bool] = lambda _: False) -> Running:
        """Variant that keeps only those optional transports for which `all_have` is true, by default none. The reason `why` is
        equal on all ranks. Raises ExecutionError unless the compiler chose to use optional transports."""
        if not self.compiled.reaches_memory:
            raise ExecutionError(f'{self.name}: ranks cannot access each other\'s memory: {why}; compile with transport="{DEFAULT}"')
        _tell_once(f"hostweave: {self.name} communicates more slowly than possible: {why}")
        figures = self.compiled.options.figures
        for transport in map(find_transport, NAMES):
            if transport.is_optional and not all_have(transport):
                figures = figures.without(transport.name, why)
        return self.variants.on(figures)

    # --- on this rank of a group ---

    @explains_shortages
    def call(
        self,
        held: BoundInputs | None,
        given: GivenArrays,
        out: Any,
        stream: Any,
        group: Group | None,
        sizes: Sizes | None,
        captures: bool,
    ) -> Any:
        bound, (arrays, named) = held or self._nothing_bound, given
        arrays = ordered_inputs(self.name, bound.unbound, bound.arrays, arrays, named) if named else arrays
        if sizes is not None:
            self.compiled.expect_sizes("sizes=", sizes)
            known = {**self.sizes_of(held, arrays, {}, whole=True), **sizes}
            if (other := self._for_sizes(known, current() if group is None else group)) is not self:
                return other.call(other._rebound(held), (arrays, {}), out, stream, group, other._known(sizes), captures)

        def call(one: Running) -> Any:
            local = one._local(group, bound, arrays, stream, out)
            try:
                return (local.capture if captures else local)(bound, arrays, out, stream, sizes)
            except ExecutionError as error:
                add_source_lines(error, local.module)
                raise

        return self._or_in_sequence(call)

    @explains_shortages
    def prepare(self, held: BoundInputs | None, sizes: Sequence[Sizes], group: Group | None) -> None:
        bound = held or self._nothing_bound
        for one in sizes:
            self.compiled.expect_sizes("prepare", one)
        own = []
        for one in sizes:
            if (other := self._for_sizes(one, current() if group is None else group)) is self:
                own.append(one)
            else:
                other.prepare(other._rebound(held), [other._known(one)], group)
        divided = [one for one in own if are_divided(self.compiled.host, one)]
        rest = [one for one in own if one not in divided]
        if divided:
            self._or_in_sequence(lambda one: one._local(group, bound, (), None).prepare(bound, divided))
        if rest:
            (self.variants.in_sequence() or self)._local(group, bound, (), None).prepare(bound, rest)

    def _local(self, group: Group | None, bound: BoundInputs, arrays: Arrays, stream: Any, out: Any = None) -> LocalProgram:
        """Program on the rank of this process or thread, in the variant for these arrays."""
        expect_own_devices()
        self._expect_open()
        group = current() if group is None else group
        if group is None:
            raise ExecutionError(f"{self.name}: this process has not joined a group; call hw.init first, or use .run to run all ranks here")
        if not isinstance(group, Group):
            raise ArgumentError(f"{self.name}: group={group!r} is not a group; pass the result of hw.init or group.split")
        if group.hosts > 1 and self.compiled.reaches_memory:
            return self.variants.on(self.compiled.options.figures.across_hosts)._local(group, bound, arrays, stream)
        if not group.can_coordinate and group.count > 1 and not all(one.has_communicator for one in self.compiled.host.optional_transports):
            why = "communicators of the application map no memory"
            return self._without(why, lambda transport: transport.has_communicator)._local(group, bound, arrays, stream)
        if group.windows.allocated and (other := self._for_windows(group, bound, arrays, out)) is not self:
            return other._local(group, bound, arrays, stream)
        local = self._local_in(group) or self._made_local(group, stream, arrays)
        if local.out_of_reach and (self.compiled.reaches_memory or self.compiled.host.optional_transports):
            return self._without(local.out_of_reach)._local(group, bound, arrays, stream)
        return local

    def _local_in(self, group: Group) -> LocalProgram | None:
        local = group.programs.get(self)
        return local if isinstance(local, LocalProgram) else None

    def _made_local(self, group: Group, stream: Any, arrays: Arrays) -> LocalProgram:
        """Creates the program on this rank once, even if several threads of the rank call it."""
        compiled = self.compiled
        with group.calling:
            if (local := self._local_in(group)) is None:
                on = stream_of_call(compiled.target, stream, arrays)
                local = LocalProgram(
                    compiled.host, compiled.target, partial(self._module, 1), compiled.options, group, on, self._lacks, self._family
                )
                with self._lock:
                    if self._closed:
                        local.close()
                    self._locals.add(local)
                group.programs[self] = local
        return local

    # --- on all ranks of this process ---

    @explains_shortages
    def run(self, held: BoundInputs | None, calls: Sequence[GivenArrays], poison: bool = False) -> list[GlobalCall]:
        """Makes calls with arrays of the same shapes on all ranks in this process."""

        def run(one: Running) -> list[GlobalCall]:
            made = [one._call_of(held, *arrays) for arrays in calls]

            interruptibly(lambda: one._on_all_ranks(lambda team, programs: team.run(programs, made, poison)))
            return made

        expect_own_devices()
        if calls and (other := self._for_sizes(self.sizes_of(held, *calls[0]))) is not self:
            return other.run(other._rebound(held), calls, poison)
        return self._here()._or_in_sequence(run)

    @explains_shortages
    def measure(
        self, what: str, held: BoundInputs | None, given: GivenArrays, warmups: int, repetitions: int
    ) -> tuple[Compiled, list[list[Timing]]]:
        """Returns the variant for these arrays, and the times of its calls. For "timeline", a copy of the variant runs, with marks."""
        marks = what == "timeline"
        if any(not isinstance(count, int) or not least <= count < 2**31 for count, least in ((warmups, 0), (repetitions, 1))):
            raise ArgumentError(
                f"{self.name}: {what}: warmups={warmups!r}, repetitions={repetitions!r}: give ints: at least 0 warmups and 1 repetition"
            )

        def run(one: Running) -> tuple[Compiled, list[list[Timing]]]:
            with_marks = one.variants.marked() if marks else one
            made = with_marks._call_of(with_marks._rebound(held) if marks else held, *given)
            call = partial(with_marks._on_all_ranks, lambda team, programs: team.measure(programs, made, warmups, repetitions))
            return one.compiled, interruptibly(call)

        expect_own_devices()
        if (other := self._for_sizes(self.sizes_of(held, *given))) is not self:
            return other.measure(what, other._rebound(held), given, warmups, repetitions)
        return self._here()._or_in_sequence(run)

    def _here(self) -> Running:
        """Returns self. If ranks of this process cannot use all optional transports, returns the variant without them."""
        reach = partial(self._on_all_ranks, lambda _, programs: programs[0].out_of_reach)
        why = self._lacks or (interruptibly(reach) if self.compiled.host.optional_transports else "")
        return self._without(why)._here() if why else self

    def sizes_of(self, held: BoundInputs | None, arrays: Arrays, named: ArraysByName, whole: bool = False) -> dict[str, int]:
        """Sizes that the given arrays determine. With `whole`, the arrays are local, and only dims that are not sharded count."""
        bound = held or self._nothing_bound
        given = zip(bound.unbound, ordered_inputs(self.name, bound.unbound, bound.arrays, arrays, named), strict=True)
        shapes = bound.shapes() | {p.name: shape for p, array in given if (shape := shape_given(array)) is not None}
        pairs = (pair for p in self.compiled.host.arguments for pair in zip(p.type.dims, shapes.get(p.name, ()), strict=False))
        return {dim.size.name: size for dim, size in pairs if dim.size.name and not (whole and dim.axes)}

    def _call_of(self, held: BoundInputs | None, arrays: Arrays, named: ArraysByName) -> GlobalCall:
        return make_call(self.compiled.host, self.compiled.target, held or self._nothing_bound, arrays, named)

    def _on_all_ranks(self, call: Callable[[Team, list[LocalProgram]], T]) -> T:
        host, target, ranks = self.compiled.host, self.compiled.target, self.compiled.host.mesh.size
        if host.windows:
            why = f"the arrays of {', '.join(host.windows)} must be in windows of a group"
            raise ArgumentError(f"{self.name}: run: {why}; call the program in a group, or omit Options(windows=...)")
        self._expect_open()
        module = self._module(ranks)
        with team_of(target, ranks) as team:
            programs = [self._local_in(group) for group in team.groups]
            if None in programs:
                with team.lease(module, target, CpuSchedule()):
                    programs = list(team.each(lambda rank: self._made_local(team.groups[rank], None, ())))
            try:
                return call(team, [program for program in programs if program])
            except ExecutionError as error:
                add_source_lines(error, module)
                raise
