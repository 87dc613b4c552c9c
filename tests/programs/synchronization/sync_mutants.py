"""Counts the mutants that the proof of order rejects. A mutant is a program in which one synchronisation is removed or changed.

`PYTHONPATH=tests python tests/programs/synchronization/sync_mutants.py` prints a table of docs/check-tests.md. Most programs of
`test_mutations.py` and `test_one_sided_mutations.py` are included. The tests in these two files also run the accepted mutants, whose
results must be right.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import compiled_fusions
import test_mutations as streams
import test_one_sided_mutations as signals
from attention_cases import keys_in_a_loop

import hostweave as hw
from hostweave.options import Options
from hostweave.pipeline import lower


def verdicts() -> Iterator[tuple[str, bool]]:
    """The kind of each mutant, and True if the proof of order accepts the mutant."""
    variants = (
        (streams.SMALL, (*compiled_fusions.SEVERAL, *compiled_fusions.ONE_DEVICE)),
        *((v, compiled_fusions.SEVERAL) for v in streams.MORE),
    )
    for variant, names in variants:
        for row in streams.table(variant, names):
            mutant = streams.without_idle_waits(row.values[1])
            kind = re.sub(r".*-\d+ (\w+) .*", r"a dropped \1", str(row.id))
            yield kind, streams.is_accepted(mutant)
    hosts = [
        lower(
            compiled_fusions.fusion_of(name, 3, 3, hw.bf16), Options(streams=4, transport="auto" if name in signals.LOOPS else "one_sided")
        )
        for name in (*signals.LOOPS, *signals.WHOLLY)
    ]
    for host in (*hosts, lower(keys_in_a_loop(3, "put", hw.bf16), Options())):
        for what, mutant in signals.mutants(host):
            line, change = what.rsplit(": ", 1)
            yield f"a {line.split()[0]} {change}" if change != "dropped" else f"a dropped {line.split()[0]}", signals.is_accepted(mutant)


def main() -> None:
    table: dict[str, Counter[bool]] = defaultdict(Counter)
    for kind, is_accepted in verdicts():
        table[kind][is_accepted] += 1
    print("| mutants of synchronisation | in all | rejected | accepted, and harmless |\n|---|---|---|---|")
    for kind, counts in [*sorted(table.items()), ("in all", sum(table.values(), Counter()))]:
        print(f"| {kind} | {counts.total()} | {counts[False]} | {counts[True]} |")


if __name__ == "__main__":
    main()
