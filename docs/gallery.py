"""The page "Gallery": programs of examples/ with source, predicted timeline, and C++ if the C++ is short. The build of the documentation
generates the page."""

import ast
import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import hostweave as hw
from hostweave.cli.demo import enqueued
from hostweave.cli.programs import load_program

ROOT = Path(__file__).parents[1]
MOST_LINES = 60  # longer C++ is omitted


@dataclass(frozen=True)
class Entry:
    title: str
    words: str
    file: str
    name: str
    sizes: Mapping[str, int]
    constants: Mapping[str, int] = field(default_factory=dict)
    transport: str = "auto"


SEED = {"m": 2048, "K": 8192, "N": 8192}
ENTRIES = (
    Entry(
        "All-gather and matmul, shard by shard",
        "Each rank sends its shard to its peers. It multiplies its own shard first, and each other shard after its arrival.",
        "seeds",
        "ag_matmul_p2p",
        SEED,
        {"D": 4},
    ),
    Entry(
        "All-gather and matmul in a ring",
        "Each rank sends the shard that it multiplies to the next rank.",
        "seeds",
        "ag_matmul_ring",
        {"M": 8192, "K": 8192, "N": 8192},
        {"D": 4},
    ),
    Entry(
        "Matmul and reduce-scatter in a ring",
        "Each rank adds its term to a partial sum, and sends the partial sum to the next rank.",
        "seeds",
        "matmul_rs_ring",
        {"M": 8192, "K": 8192, "N": 8192},
        {"D": 4},
    ),
    Entry(
        "Matmul and all-reduce in chunks",
        "While one chunk of the product is reduced, the next chunk is computed.",
        "seeds",
        "matmul_ar",
        {"m": 4096, "K": 4096, "N": 8192},
        {"D": 4},
    ),
    Entry(
        "Sequence-parallel MLP",
        "The sharding of the input requires a gather and a reduce-scatter. Copies and signals access the memory of the peers directly.",
        "transformer",
        "mlp_sp",
        {"S": 4096, "B": 2, "E": 8192, "F": 28672},
        transport="peer",
    ),
    Entry(
        "Sequence-parallel attention with grouped queries",
        "The heads are sharded. Rows are gathered before the first projections and reduce-scattered after the last one.",
        "transformer",
        "grouped_query_sp",
        {"S": 4096, "B": 2, "E": 4096},
        transport="peer",
    ),
)


def gallery() -> str:
    return "\n".join(line for entry in ENTRIES for line in shown(entry))


def shown(entry: Entry) -> Iterator[str]:
    path = ROOT / "examples" / f"{entry.file}.py"
    fusion = load_program(f"{path}:{entry.name}", dict(entry.constants))
    program = hw.compile(fusion, target="cuda", options=hw.Options(sizes=dict(entry.sizes), transport=entry.transport, check=False))
    report = program.predict(dict(entry.sizes))
    at = ", ".join(f"{name} = {size}" for name, size in entry.sizes.items())
    picture = base64.b64encode(report.svg().encode()).decode()
    settings = "".join(f" --set {name}={value}" for name, value in entry.constants.items()) + f" --transport {entry.transport}"
    sizes = ",".join(f"{name}={size}" for name, size in entry.sizes.items())
    yield from (f"## {entry.title}", "", entry.words, "", "```python", source_of(path, entry.name), "```", "")
    yield from (f"![Predicted timeline of {entry.name}](data:image/svg+xml;base64,{picture})", "")
    yield from (f"Predicted on {program.figures.name} at {at}: {report.predicted.micros / 1000:.2f} ms.", "")
    lines = enqueued(program.source).strip("\n").splitlines()
    if len(lines) <= MOST_LINES:
        yield from ("```cpp", *lines, "```", "")
    yield from ("    " + f"hostweave inspect examples/{entry.file}.py:{entry.name} --sizes {sizes}{settings}", "")


def source_of(path: Path, name: str) -> str:
    text = path.read_text()
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return "\n".join(text.splitlines()[found.decorator_list[0].lineno - 1 : found.end_lineno])
