"""Fusions as text, before and after passes, and the communications of fusions."""

from __future__ import annotations

from collections.abc import Callable

from hostweave.communication.dataflow import Dataflow
from hostweave.fusion_ir.ir import ChunkLoop, Fusion
from hostweave.fusion_ir.verify import verify_fusion
from hostweave.options import Options
from hostweave.passes.lower.lower_to_host import lower_to_host
from hostweave.pipeline import PASSES, level_of, lower

Pass = Callable[[Fusion, Options], Fusion]
# A gather before a matmul, and a reduce-scatter after a matmul: inputs and ops.
GATHER = "%x: bf16[M@x, K], %w: bf16[K, N]", "%g: bf16[M, K] = all_gather(%x, dim=0, axes=(x))\n%y: bf16[M, N] = matmul(%g, %w)"
SCATTER = (
    "%x: bf16[M, K@x], %w: bf16[K@x, N]",
    "%h: bf16[M, N] partial(sum, x) = matmul(%x, %w)\n%y: bf16[M@x, N] = reduce_scatter(%h, dim=0, axes=(x), reduction=sum)",
)


def fusion(inputs: str, ops: str, mesh: str = "x=8") -> Fusion:
    """Parses a fusion. If `ops` does not end in a line with `return`, the fusion returns the result of its last op. Lines with choices may
    follow the ops."""
    lines = [line.strip() for line in ops.strip().splitlines()]
    last = [line for line in lines if line.startswith("%")][-1].partition(":")[0]
    lines += [] if lines[-1].startswith("return") else [f"return {last}"]
    body = "".join(f"  {line}\n" for line in lines)
    return Fusion.parse(f"fusion @f({inputs}) mesh({mesh}) {{\n{body}}}\n")


def check(apply: Pass, inputs: str, before: str, after: str, mesh: str = "x=8") -> None:
    result = apply(fusion(inputs, before, mesh), Options())
    verify_fusion(result, after=level_of(apply.__name__))
    lines, wanted = ([line.strip() for line in text.splitlines()] for text in (str(result), after.strip()))
    assert lines[1 : -1 if wanted[-1].startswith("return") else -2] == wanted


def flow(inputs: str, ops: str) -> Dataflow:
    """Dataflow of a fusion on 4 ranks after the passes that precede lower_to_host."""
    result = fusion(inputs, ops, "x=4")
    for apply in PASSES[: PASSES.index(lower_to_host)]:
        result = apply(result, Options())
    return Dataflow(result)


def names_in_loops(dataflow: Dataflow) -> list[list[str]]:
    """Names of the results of each chunk loop, and of each op outside of loops."""
    return [[op.result.name for op in (item.ops if isinstance(item, ChunkLoop) else (item,))] for item in dataflow.fusion.body]


def communications(program: Fusion, options: Options | None = None) -> list[str]:
    """Kinds of the communications of a program before lowering."""
    stages: dict[str, Fusion] = {}
    lower(program, options or Options(), lambda name, stage: stages.setdefault(name, stage))
    kinds = ("all_gather", "all_reduce", "all_to_all", "permute_shards", "reduce", "reduce_scatter", "transfer")
    return [op.kind for body in (*stages["choose_overlap"].functions, stages["choose_overlap"]) for op in body.ops if op.kind in kinds]
