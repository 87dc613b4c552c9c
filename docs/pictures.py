"""The pictures of the documentation: `python docs/pictures.py` writes docs/images/*.svg.

speed.svg shows the measurements in figures.json, and layer.svg shows those in layer.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

import hostweave as hw
from hostweave.cli.memory_plan import memory_plan
from hostweave.cli.programs import load_program
from hostweave.fusion_ir.ir import Fusion
from hostweave.pipeline import lower

HERE = Path(__file__).parent
IMAGES, ROOT = HERE / "images", HERE.parent
WIDTH = 900
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; } .small { font-size: 11px; fill: #57606a; } .title { font-weight: 600; }
.a { fill: #3b6fb6; } .b { fill: #e8871e; } .c { fill: #2e9e73; } .d { fill: #9467bd; } .none { fill: #c9ced6; }
.line { stroke: #57606a; stroke-width: 1.3; fill: none; } .box { fill: #f6f8fa; stroke: #8c959f; } .on { fill: #fff; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .small { fill: #9da7b3; } .none { fill: #4b535d; } .line { stroke: #9da7b3; }
.box { fill: #22272e; stroke: #6e7681; }
}
"""
RANKS = "abcd"  # class of each rank in STYLE


def svg(title: str, height: float, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title, quote=True)}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def rect(x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> str:
    inner = f"<title>{escape(hint)}</title></rect>" if hint else "</rect>"
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}" rx="2" class="{kind}">{inner}'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    head = (
        f"M {x2 - 7:g} {y2 - 4:g} L {x2:g} {y2:g} L {x2 - 7:g} {y2 + 4:g}"
        if x2 != x1
        else f"M {x2 - 4:g} {y2 - 7:g} L {x2:g} {y2:g} L {x2 + 4:g} {y2 - 7:g}"
    )
    return f'<path class="line" d="M {x1:g} {y1:g} L {x2:g} {y2:g} {head}"/>'


# --- measured and predicted -------------------------------------------------------------------------------------------


def speed() -> str:
    """Bars of the speed of Hostweave relative to the best of PyTorch, one for each row of figures.json."""
    figures = json.loads((HERE / "figures.json").read_text())
    rows, left, scale = figures["rows"], 400, 340
    parts = [text(10, 22, "times as fast as the best of PyTorch in the same run", "title")]
    for number, row in enumerate(rows):
        y = 40 + 30 * number
        parts += [text(10, y + 15, row["what"]), rect(left, y, scale, 20, "none"), rect(left, y, scale * row["ratio"], 20, "a")]
        parts.append(text(left + scale * row["ratio"] + 8, y + 15, f"{row['ratio']:.2f} x"))
        parts.append(f'<text x="{left + 8}" y="{y + 15}" class="on" style="fill:#fff">{row["ms"]:g} ms</text>')
    end = 40 + 30 * len(rows)
    parts += [f'<path class="line" d="M {left + scale} 32 V {end}"/>', text(left + scale, end + 14, "PyTorch", "small", "middle")]
    parts.append(text(10, end + 32, figures["machine"], "small"))
    return svg("Speed over the best of PyTorch", end + 42, parts)


def layer() -> str:
    """Timelines of a layer in Hostweave and in the fastest mode of PyTorch, with one line per stream. torch.profiler recorded one call of
    each on rank 0.

    `python benchmarks/sequence_parallel.py profile docs/layer.json` measures the times.
    """
    found = json.loads((HERE / "layer.json").read_text())
    end = max(event[3] for events in found["calls"].values() for event in events)
    parts, y = list[str](), 10.0
    for name, events in sorted(found["calls"].items()):
        title = "Hostweave" if name == "ours" else f"PyTorch, {name.removeprefix('torch ')}"
        parts.append(text(10, y + 14, f"{title}: {max(event[3] for event in events) / 1e3:.2f} ms", "title"))
        lines, height = _tracks(events, y + 24, end)
        parts += lines
        y += height + 40
    legend = ((10, "a", "computes"), (110, "b", "communicates, or copies between GPUs"))
    for x, kind, words in legend:
        parts += [rect(x, y, 12, 12, kind), text(x + 18, y + 11, words, "small")]
    gpus, _, torch, nccl, *_ = found["machine"].split("; ")
    about = f"{gpus.split(', driver')[0]}, {torch}, {nccl}"
    parts.append(text(10, y + 32, f"layer of Llama 3 70B at TP 8 shapes, {found['tokens']} tokens, measured on {about}", "small"))
    return svg("Timeline of one layer, measured: Hostweave above, PyTorch below", y + 46, parts)


def _tracks(events: Sequence[tuple[int, str, float, float]], y: float, end: float) -> tuple[list[str], float]:
    streams = list(dict.fromkeys(event[0] for event in events))
    left, scale, parts = 90, (WIDTH - 100) / end, list[str]()
    for stream, name, begin, stop in events:
        kind = "b" if any(word in name for word in ("PtoP", "nccl", "barrier")) else "a"
        if stop - begin > 0.2:
            at = y + 20 * streams.index(stream)
            parts.append(rect(left + begin * scale, at, (stop - begin) * scale, 16, kind, f"{name}: {stop - begin:.0f} us"))
    parts += [text(10, y + 20 * number + 12, f"stream {number}", "small") for number in range(len(streams))]
    return parts, 20.0 * len(streams)


def memory() -> str:
    """Offsets and live ranges of the temporaries of an MLP."""
    program = load_program("transformer:swiglu_tp", {"dtype": hw.bf16})
    assert isinstance(program, Fusion)
    sizes = dict.fromkeys({name for value in program.inputs for dim in value.type.shape for name in dim.symbols}, 4096) | {"B": 2}
    plan = memory_plan(lower(program, hw.Options()), sizes)
    first, last = min(row.lines[0] for row in plan.rows), max(row.lines[1] for row in plan.rows)
    left, across, down = 70, (WIDTH - 90) / (last - first + 1), 220 / plan.peak
    parts = [text(10, 20, "memory of temporaries over the instructions of the program", "title"), text(10, 44, "offset", "small")]
    for number, row in enumerate(plan.rows):
        begin, end = row.lines
        for offset in row.offsets:
            x, y = left + (begin - first) * across, 34 + offset * down
            width, height = (end - begin + 1) * across, row.bytes * down
            parts.append(rect(x, y, width - 1, height - 1, RANKS[number % 4], f"{row.name}: {row.bytes / 1e6:.0f} MB"))
            if height > 14 and width > 8 * len(row.name):
                parts.append(f'<text x="{x + 6:.1f}" y="{y + 15:.1f}" style="fill:#fff">{escape(row.name)}</text>')
    parts.append(
        text(
            WIDTH - 10, 274, f"instructions; peak {plan.peak / 1e6:.0f} MB, in use at one moment {plan.bound / 1e6:.0f} MB", "small", "end"
        )
    )
    return svg("Memory over time", 286, parts)


# --- terms ------------------------------------------------------------------------------------------------------------


def shardings() -> str:
    """A matrix on four ranks: sharded by rows, by columns and by both, and replicated."""
    parts = list[str]()
    kinds: Sequence[tuple[str, str, Callable[[int], tuple[float, float, float, float]]]] = (
        ('["M@x", "K"]', "mesh(x=4): rows", lambda r: (0, r / 4, 1, 1 / 4)),
        ('["M", "K@x"]', "mesh(x=4): columns", lambda r: (r / 4, 0, 1 / 4, 1)),
        ('["M@dp", "K@tp"]', "mesh(dp=2, tp=2)", lambda r: (r % 2 / 2, r // 2 / 2, 1 / 2, 1 / 2)),
        ('["M", "K"]', "replicated", lambda r: (0, 0, 1, 1)),
    )
    size, step = 110, 215
    for number, (type, title, block) in enumerate(kinds):
        x = 20 + step * number
        parts += [text(x, 20, type, "title"), text(x, 36, title, "small")]
        for r in range(4):
            ax, ay = x + (r % 2) * (size / 2 + 34), 50 + (r // 2) * (size / 2 + 26)
            bx, by, bw, bh = block(r)
            side = size / 2
            parts.append(rect(ax, ay, side, side, "box"))
            parts.append(rect(ax + bx * side, ay + by * side, bw * side, bh * side, RANKS[r]))
            parts.append(text(ax, ay + side + 13, f"rank {r}", "small"))
    return svg("Shardings of a matrix on four ranks", 222, parts)


def partial() -> str:
    """A contraction over a sharded dim: each rank computes a term, and a reduction adds the terms."""
    parts = [text(20, 22, "x: [M, K@x] and w: [K@x, N]; x @ w is a partial sum on each rank", "title")]
    for r in range(4):
        y = 40 + 44 * r
        parts += [text(20, y + 20, f"rank {r}", "small"), rect(70, y, 80, 32, "box"), rect(70 + 20 * r, y, 20, 32, RANKS[r])]
        parts += [text(166, y + 20, "@"), rect(190, y, 60, 32, "box"), rect(190, y + 8 * r, 60, 8, RANKS[r]), text(266, y + 20, "=")]
        parts += [rect(290, y, 60, 32, RANKS[r]), arrow(356, y + 16, 440, 112)]
    parts += [
        rect(446, 80, 130, 64, "box"),
        text(511, 108, "reduce_scatter", "", "middle"),
        text(511, 126, "or all_reduce", "small", "middle"),
    ]
    for r in range(4):
        parts += [rect(640, 60 + 26 * r, 60, 24, RANKS[r]), text(710, 76 + 26 * r, f"rank {r} has its rows of the sum", "small")]
    parts.append(arrow(582, 112, 632, 112))
    return svg("Partial sums and their reduction", 222, parts)


def compiler() -> str:
    """Stages of the compiler, from a Python function to a program."""
    steps = (
        ("Python", "math on", "global tensors"),
        ("fusion IR", "math +", "shardings"),
        ("host IR", "streams, buffers,", "loops, channels"),
        ("C++/CUDA", "ncclSend, kernels,", "cublasLtMatmul"),
        ("program", "Python module, or", "CMake library"),
    )
    doing = ("trace", "infer, reshard", "lower, plan", "compile")
    parts = list[str]()
    for number, (title, one, other) in enumerate(steps):
        x = 10 + 180 * number
        parts += [rect(x, 30, 130, 74, "box"), text(x + 65, 54, title, "title", "middle")]
        parts += [text(x + 65, 74, one, "small", "middle"), text(x + 65, 90, other, "small", "middle")]
        if number < len(doing):
            parts += [arrow(x + 134, 67, x + 176, 67), text(x + 155, 20, doing[number], "small", "middle")]
    return svg("The compiler: from Python to a program", 116, parts)


def pipeline() -> str:
    """An all-gather and a matmul: sequential, and shard by shard on two streams that are ordered by events."""
    parts = [text(10, 20, "in sequence", "title"), rect(90, 30, 240, 24, "b"), rect(330, 30, 400, 24, "a")]
    parts += [text(10, 47, "stream", "small"), _on(100, 47, "all_gather x"), _on(340, 47, "x @ w")]
    parts += [text(10, 92, "in a loop: shard i is multiplied while shard i + 1 arrives", "title")]
    for track, words in enumerate(("transfers", "matmuls")):
        parts.append(text(10, 121 + 50 * track, words, "small"))
    for i in range(4):
        begin = 90 + 102 * i
        parts += [rect(begin, 154, 100, 24, "a"), _on(begin + 8, 171, f"x[{i}] @ w")]
        if i:
            parts += [rect(90 + 80 * (i - 1), 104, 78, 24, "b"), _on(96 + 80 * (i - 1), 121, f"shard {i}")]
            parts.append(
                arrow(90 + 80 * i - 2, 130, 90 + 80 * i - 2, 150) if i == 1 else arrow(168 + 80 * (i - 1), 130, 168 + 80 * (i - 1), 150)
            )
    parts += [
        text(520, 121, "the local shard needs no transfer, so its matmul starts at once", "small"),
        text(520, 171, "each matmul waits for the event of its shard", "small"),
    ]
    return svg("An all-gather and its matmul over time", 194, parts)


def _on(x: float, y: float, words: str) -> str:
    return f'<text x="{x}" y="{y}" style="fill:#fff">{escape(words)}</text>'


PICTURES = (speed, layer, memory, shardings, partial, compiler, pipeline)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for picture in PICTURES:
        (IMAGES / f"{picture.__name__}.svg").write_text(picture())
