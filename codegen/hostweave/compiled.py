"""A compiled program: its host IR, its C++, and the module that is built from the C++."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from hostweave.base.errors import ArgumentError, ProgramError
from hostweave.base.forks import importing
from hostweave.base.interrupts import interruptibly
from hostweave.base.progress import log
from hostweave.build.toolchain import MODULE_FILE
from hostweave.check.sizes import default_sizes
from hostweave.communication.algorithms import need_optional_transport
from hostweave.emit import render
from hostweave.fusion_ir.choice import IN_SEQUENCE
from hostweave.fusion_ir.ir import Fusion
from hostweave.fusion_ir.rewriting import at_sizes, names_of_choices, on_mesh, without_loops
from hostweave.host_ir.ir import HostProgram
from hostweave.host_ir.size_requirements import MAX_SIZE, are_divided
from hostweave.options import Options
from hostweave.pipeline import lower, stages
from hostweave.targets.target import Target, find_target
from hostweave.timeline.events import Timeline
from hostweave.timeline.graph import changes_of, graph_of
from hostweave.timeline.measure import marked
from hostweave.timeline.report import Report
from hostweave.types.machine import Machine
from hostweave.types.mesh import Sizes

NOTHING_CHECKED = "everything: the program was compiled without a check"
NO_FUSION = "the results: the program was compiled from host IR, which has no fusion to compare with"
ASKED_FACTOR = 10  # multiplies MAX_ELEMENTS in a check that the user requests
MAX_CHECKED_RANKS = 16  # largest mesh that is checked by default
OPTIONS_OF_RUN = ("ranks", "warmups", "repetitions")  # parameters of methods that also take arrays by name


@dataclass(eq=False)
class Compiled:
    """A compiled program. Each variant of a program, see `Variants`, is a separate object of this class."""

    given: Fusion | HostProgram
    host: HostProgram
    target: Target
    options: Options
    unchecked: tuple[str, ...] = (NOTHING_CHECKED,)  # parts that the check at compile time did not cover
    variant: str = ""  # difference of a variant from the user's program, such as "in sequence"

    @property
    def title(self) -> str:
        return f"{self.host.name} {self.variant}".rstrip()

    def check(self, sizes: Sizes | None = None, is_asked: bool = True) -> tuple[str, ...]:
        from hostweave.check.check import MAX_ELEMENTS, check  # NumPy is imported only for a check.

        if not isinstance(self.given, Fusion):
            return (*check(self.host, sizes), NO_FUSION)
        most = MAX_ELEMENTS * (ASKED_FACTOR if is_asked else 1)
        return check(self.host, sizes, self.given, lambda: stages(self.given, self.options), most)

    def otherwise(self, variant: str = "", **options: Any) -> Compiled:
        return compiled(self.given, self.target.name, replace(self.options, **options), variant)

    @cached_property
    def in_sequence(self) -> Compiled:
        """The same program without the chunk loops and the copies by copy engines that the compiler chose."""
        made, choices = self, dict[str, str]()
        while loops := [choice.name for choice in made.host.choices if choice.chosen.chunks and choice.name not in choices]:
            choices |= dict.fromkeys(loops, IN_SEQUENCE)  # The compiler may then choose other loops for the same matmuls.
            made = self.otherwise("in sequence", choices=choices)
        return made

    @property
    def stated_sequential(self) -> dict[str, str]:
        """The user's choices of "none", the only alternative that each variant has."""
        return {name: chosen for name, chosen in self.options.choices.items() if chosen == IN_SEQUENCE}

    @property
    def stated_for_all_machines(self) -> dict[str, str]:
        """The user's choices that need no optional transport."""
        made = (choice for choice in self.host.choices if choice.name in self.options.choices)
        return {choice.name: choice.chosen.name for choice in made if not need_optional_transport((choice,), self.options)}

    @cached_property
    def marked(self) -> Compiled:
        """The same program with marks, which measure when its instructions run."""
        program = marked(self.host)
        return replace(self, given=program, host=program, variant="with marks")

    def at_sizes(self, sizes: Mapping[str, int]) -> Compiled | None:
        """The same program with constants in place of the symbols in `sizes`. None if no such program can be compiled."""
        if not isinstance(self.given, Fusion) or self.given.user_kernels:
            return None
        rest = {name: size for name, size in self.options.sizes.items() if name not in sizes}
        try:
            made = at_sizes(self.given, sizes, [parameter.type for parameter in self.host.outputs])
            variant = f"at {', '.join(f'{name}={size}' for name, size in sizes.items())}"
            return compiled(made, self.target.name, replace(self.options, sizes=rest, choices=self.stated_sequential), variant)
        except ProgramError:
            return None

    def on_ranks(self, ranks: int | Mapping[str, int] | None, figures: Machine) -> Compiled:
        """Compiles the same program for other sizes of mesh axes, without a check. An int is the size of the mesh's only axis. Without
        `ranks`, returns this program, unless the ranks of `figures` cannot access each other's memory as this program does."""
        changes = isinstance(self.given, Fusion) and self.reaches_memory and figures.hosts_of(self.host.mesh.all_ranks) > 1
        if ranks is None and not changes:
            return self
        if not isinstance(self.given, Fusion):
            raise ProgramError(f"{self.host.name}: was compiled from host IR, which is only for {self.host.mesh}; omit ranks=")
        given, choices = self.given, self.options.choices
        if ranks is not None:
            given, choices = on_mesh(given, given.mesh.with_sizes(ranks)), self.stated_sequential
        options = replace(self.options, check=False, choices=choices, windows=(), machine=figures)
        return compiled(given, self.target.name, options, "for a prediction")

    def report(self, predicted: Timeline, measured: Timeline | None = None) -> Report:
        """Report of the timelines, of the fusion as a graph, and of the changes that each pass made."""
        seen: list[tuple[str, Fusion | HostProgram]] = []
        lower(self.given, self.options, lambda name, stage: seen.append((name, stage)))
        fusions = [stage for _, stage in seen if isinstance(stage, Fusion)]
        changes = changes_of([(name, str(stage)) for name, stage in seen])
        return Report(predicted, measured, graph_of(fusions[-1]) if fusions else None, changes)

    def for_call(self, what: str, sizes: Mapping[str, int]) -> tuple[Compiled, dict[str, int]]:
        """Returns this program, or `in_sequence` if the chunks of a loop do not divide a size, and the values of all sizes. A size that
        neither the caller nor the options give gets the value of `default_sizes`."""
        self.expect_sizes(what, sizes)
        known = default_sizes(self.host, {**self.options.sizes, **sizes})
        return (self if are_divided(self.host, known) else self.in_sequence), known

    @property
    def reaches_memory(self) -> bool:
        """True if the compiler chose an overlap or kernels in which ranks access each other's memory."""
        return need_optional_transport(self.host.choices, self.options) or any(kernel.exchanges for kernel in self.host.kernels)

    @cached_property
    def sources(self) -> Mapping[str, str]:
        return interruptibly(lambda: render(self.host, self.options.figures))

    @cached_property
    def folder(self) -> Path:
        return interruptibly(self._build)

    @cached_property
    def module(self) -> ModuleType:
        return interruptibly(self._load)

    def _build(self) -> Path:
        with importing:
            from hostweave.build.program import build

        libraries = partial(self.target.runtime_libraries, requested=self.host.libraries)
        figures = self.options.figures.name
        return build(self.host.name, self.host.code, self.target.toolchain(), libraries, lambda: self.sources, self.title, figures)

    def _load(self) -> ModuleType:
        with importing:
            from hostweave.build.program import load

        folder = self.folder
        self.target.expect_memory()
        return load(folder / MODULE_FILE, self.target.dlopen_flags)

    def expect_sizes(self, what: str, sizes: Mapping[str, int]) -> None:
        """Raises ArgumentError for unknown names, and for sizes that no call of the program can have."""
        if not isinstance(sizes, Mapping):
            raise ArgumentError(f'{self.host.name}: {what}: {sizes!r} is not a dict of names; write {{"M": 8}}')
        if unknown := sizes.keys() - set(self.host.given_sizes()):
            named, known = ", ".join(sorted(map(str, unknown))), ", ".join(self.host.given_sizes()) or "none"
            raise ArgumentError(f"{self.host.name}: {what}: there is no size named {named}; the sizes of the program: {known}")
        if wrong := [f"{name}={size!r}" for name, size in sizes.items() if not isinstance(size, Integral) or size < 0]:
            raise ArgumentError(f"{self.host.name}: {what}: {', '.join(wrong)}: a size is an int of at least 0")
        if large := [f"{name}={size}" for name, size in sizes.items() if size > MAX_SIZE]:
            raise ArgumentError(f"{self.host.name}: {what}: {', '.join(large)}: no memory holds so many elements; pass a smaller size")


def compiled(given: Fusion | HostProgram, target: str, options: Options, variant: str = "") -> Compiled:
    begin = perf_counter()
    options = replace(options, machine=options.figures.for_ranks(given.mesh.all_ranks))
    if isinstance(given, Fusion):  # The text of a fusion may have choices of an earlier compilation.
        recorded = names_of_choices(given)
        replaced = {name for name, chosen in options.choices.items() if recorded.get(name, chosen) != chosen}
        given = without_loops(given, replaced) if replaced else given
    host = lower(given, options)
    made = Compiled(given, host, find_target(target), options, variant=variant)
    count, seconds = len(list(host.instructions())), perf_counter() - begin
    log.info("%s on %s: lowered to %d instructions in %.2f s", made.title, host.mesh, count, seconds)
    for choice in host.choices:
        log.info("%s", choice)
    known = [choice.name for choice in host.choices]
    if not variant and (unknown := [name for name in options.choices if name not in known]):
        why = f"there is no choice named {unknown[0]}"
        raise ProgramError(f"{host.name}: Options: choices: {why}; choices at these sizes: {', '.join(known) or 'none'}")
    if unknown := [name for name in options.windows if name not in {p.name for p in (*host.arguments, *host.results)}]:
        raise ProgramError(f"{host.name}: Options: windows: there is no input or output {unknown[0]}; omit it")
    made.target.expect_kernels(host.user_kernels)
    for parameter in host.arguments:
        if parameter.name in OPTIONS_OF_RUN:
            raise ProgramError(f"{host.name}: input {parameter.name} has the name of a parameter of run or measure; rename the input")
    if options.check if options.check is not None else host.mesh.size <= MAX_CHECKED_RANKS:
        made.unchecked = made.check(is_asked=options.check is True)
    return made
