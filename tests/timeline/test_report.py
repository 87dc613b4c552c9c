"""Reports of a timeline: the page, the Perfetto trace, the picture, the graph of the program, and the changes of passes."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import hostweave as hw
from hostweave.base.errors import ArgumentError
from hostweave.timeline.graph import changes_of, graph_of
from hostweave.timeline.picture import in_units, ticks
from hostweave.timeline.report import Report

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def report() -> Report:
    @hw.fusion(mesh=hw.Mesh(x=2), x=hw.bf16["M", "K@x"], w=hw.bf16["K@x", "N"])
    def down_proj(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        y = hw.matmul(x, w)
        return hw.reshard(y, "M@x", "N")

    sizes = {"M": 8192, "K": 7168, "N": 8192}
    return hw.compile(down_proj, options=hw.Options(check=False, sizes=sizes)).predict(sizes)


class Page(HTMLParser):
    """Collects the resources that a page would load, and the text outside of scripts and styles."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.text, self.inside = list[str](), "", [""]
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside.append(tag)
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data if self.inside[-1] not in ("script", "style") else ""


def test_the_page_fetches_nothing_and_has_all_totals(report: Report) -> None:
    page = Page(report.html())
    assert page.links == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", report.html())
    for total in report.predicted.totals:
        assert f"{total.busy:.1f} us" in page.text
        assert f"{total.sent:,}" in page.text
    assert "matmul y_2_i" in page.text


def test_names_are_escaped_in_the_page() -> None:
    """A file name may contain any character."""
    import dataclasses

    report = hw.compile(hw.fusion(mesh=hw.Mesh(), x=hw.f32["M"])(lambda x: -x)).predict({"M": 64})
    event = dataclasses.replace(report.predicted.events[0], name="</script><script>x", source="<b>&")
    page = Report(dataclasses.replace(report.predicted, events=(event,))).html()
    assert page.count("</script>") == 2
    assert "<b>&<" not in page


def test_the_picture_is_xml_with_one_box_per_event(report: Report) -> None:
    root = ElementTree.fromstring(report.svg())
    boxes = [box for box in root.iter(f"{SVG}rect") if "event" in box.get("class", "")]
    assert len(boxes) == len(report.predicted.events)
    width = float(root.get("width", 0))
    assert all(float(box.get("x", -1)) >= 0 and float(box.get("x", 0)) + float(box.get("width", 0)) <= width for box in boxes)
    kinds = [box.get("class", "").split()[1] for box in boxes]
    assert kinds == [event.kind for event in report.predicted.events]
    critical = {int(box.get("data-n", -1)) for box in boxes if "critical" in box.get("class", "")}
    assert critical == set(report.predicted.critical_path)
    by_name = {text.text for text in root.iter(f"{SVG}text")}
    assert {"rank 0, caller", "rank 1, peer_copies[0]", "matmul y_2_i", "0 us"} <= by_name


def test_boxes_of_one_track_do_not_overlap(report: Report) -> None:
    root = ElementTree.fromstring(report.svg())
    tracks: dict[str, list[tuple[float, float]]] = {}
    for box in root.iter(f"{SVG}rect"):
        if "compute" in box.get("class", ""):
            x = float(box.get("x", 0))
            tracks.setdefault(box.get("y", ""), []).append((x, x + float(box.get("width", 0))))
    # Each rank computes in two tracks: the stream of the loop's matmuls, and the caller's stream with the kernel after the loop.
    assert len(tracks) == 4
    for spans in tracks.values():
        assert all(end <= start + 0.02 for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:], strict=False))


def test_perfetto_has_one_process_per_rank_and_one_thread_per_stream(report: Report) -> None:
    trace = json.loads(report.perfetto())
    events: list[dict[str, Any]] = trace["traceEvents"]
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {name for (_, tid), name in named.items() if tid is None} == {"rank 0, predicted", "rank 1, predicted"}
    assert {name for (_, tid), name in named.items() if tid is not None} == set(report.predicted.streams)
    slices = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [(e.name, e.start, e.micros) for e in report.predicted.events]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys() != set()
    assert all(starts[id]["ts"] <= ends[id]["ts"] + 1e-6 or "wait" in id for id in starts)


def test_memory_is_a_bar_between_two_changes(report: Report) -> None:
    root = ElementTree.fromstring(report.svg())
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.get("class") == "bytes"]
    assert bars[-1][0].text == f"{report.predicted.memory[-1][1]:,} bytes"
    heights = [float(bar.get("height", 0)) for bar in bars]
    assert max(heights) == 48
    assert min(heights) > 0
    assert [in_units(size) for size in (0, 999, 67_108_864, 5 * 10**12)] == ["0 bytes", "999 bytes", "67.1 MB", "5 TB"]


# --- the program ------------------------------------------------------------------------------------------------------


def test_the_graph_has_a_row_for_each_value(report: Report) -> None:
    graph = report.graph
    assert graph
    assert graph.axes == ("x",)
    head, x, w, product, result = graph.rows
    assert (head.text, x.text, x.dtype, x.dims) == ("fusion @down_proj", "%x", "bf16", (("M", ()), ("K", ("x",))))
    assert (product.text, product.operands, product.kind) == ("%y_2 = matmul(%x, %w)", (1, 2), "compute")
    assert "partial(sum, x)" in product.note
    assert (result.operands, result.kind, result.dims) == ((3,), "communication", (("M", ("x",)), ("N", ())))
    assert result.text.startswith("%y = reduce_scatter(%y_2, ")
    assert result.source.startswith("test_report.py:")
    assert [(operand, user) for operand, user, _ in graph.arcs] == [(1, 3), (2, 3), (3, 4)]
    assert w.source == ""


def test_functions_have_separate_rows() -> None:
    @hw.block(x=hw.f32["M", "E"], w=hw.f32["E", "E"])
    def layer(x: hw.Tensor, w: hw.Tensor) -> hw.Tensor:
        return hw.relu(hw.matmul(x, w))

    fusion = hw.fusion(mesh=hw.Mesh(), x=hw.f32["M", "E"], w=hw.f32["E", "E"])(lambda x, w: layer(layer(x, w), w))
    rows = graph_of(fusion).rows
    heads = [row.text.split()[0] for row in rows if row.kind == "head"]
    assert heads == ["function", "fusion"]
    assert all(operand > 5 for row in rows[7:] for operand in row.operands)  # Each body has separate values.


def test_changes_of_a_pass() -> None:
    stages = [("input", "a\nb\n"), ("first", "a\nb\n"), ("second", "a\nc\nd\n")]
    (change,) = changes_of(stages)
    assert (change.name, change.added, change.removed) == ("second", 2, 1)
    assert change.lines[-3:] == ("-b", "+c", "+d")


def test_the_page_shows_the_program_and_its_passes(report: Report) -> None:
    page = Page(report.html()).text
    assert [change.name for change in report.changes][-1] in page
    assert any(change.name == "lower_to_host" for change in report.changes)
    assert "+  %y_2: bf16[M, N] partial(sum, x) = matmul(%x, %w)" in page
    assert "%y = reduce_scatter(%y_2, dim=0, axes=(x), reduction=sum)" in page


def test_files(report: Report, tmp_path: Path) -> None:
    for suffix, text in {"html": "<!doctype html>", "json": "traceEvents", "svg": "<svg"}.items():
        report.save(tmp_path / f"t.{suffix}")
        assert text in (tmp_path / f"t.{suffix}").read_text()
    with pytest.raises(
        ArgumentError, match=r"t\.pdf: a timeline cannot be saved in this format; use one of the endings \.html, \.json, \.svg"
    ):
        report.save(tmp_path / "t.pdf")
    with pytest.raises(ArgumentError, match="No such file"):
        report.save(tmp_path / "none" / "t.svg")


def test_a_notebook_shows_the_picture(report: Report) -> None:
    assert report._repr_html_().startswith("<svg")


def test_nothing_was_measured(report: Report) -> None:
    with pytest.raises(ArgumentError, match="nothing was measured; pass arrays"):
        _ = report.error
    nothing = replace(report.predicted, events=())
    assert "predicted / measured: 1" in str(Report(nothing, nothing))


def test_ticks_are_few_and_round() -> None:
    for span in (0.7, 3.0, 99.0, 1234.0, 5e6):
        found = list(ticks(span))
        assert 4 <= len(found) <= 9
        assert found[0] == 0
        assert found[-1] <= span
    assert list(ticks(0)) == []


# --- in a browser -----------------------------------------------------------------------------------------------------

# Runs in the page. Records the contents of the page at first, when hovering over an event, and after zooming.
PROBE = """<script>
const seen = {boxes: events.length, texts: [...texts.values()].filter(text => text.style.display === "").length};
const put = events.find(box => data.timelines[0].events[box.dataset.n].name.startsWith("put"));
put.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
seen.detail = detail.textContent; seen.linked = svg.querySelectorAll(".linked").length; seen.faded = svg.querySelectorAll(".faded").length;
const wide = events.find(box => box.getAttribute("width") > 100), before = +wide.getAttribute("width");
const place = frame.getBoundingClientRect();
frame.dispatchEvent(new WheelEvent("wheel", {deltaY: -1, clientX: place.x + left, cancelable: true}));
seen.grown = wide.getAttribute("width") / before;
frame.dispatchEvent(new MouseEvent("dblclick"));
seen.again = wide.getAttribute("width") / before;
seen.ticks = svg.querySelectorAll("g.axis text").length;
seen.backgrounds = [getComputedStyle(document.body).backgroundColor, getComputedStyle(svg.querySelector(".paper")).fill];
document.body.insertAdjacentHTML("beforeend", `<pre id="seen">${JSON.stringify(seen)}</pre>`);
</script></body>"""


@pytest.mark.extra("chromium")
@pytest.mark.parametrize(("scheme", "background"), [(0, "rgb(30, 33, 41)"), (1, "rgb(255, 255, 255)")], ids=["dark", "light"])
def test_the_page_in_a_browser(report: Report, tmp_path: Path, scheme: int, background: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(report.html().replace("</body>", PROBE))
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    browser += [f"--blink-settings=preferredColorScheme={scheme}", page.as_uri()]
    run = subprocess.run(browser, capture_output=True, text=True, timeout=120, check=True)
    *_, found = re.findall(r'<pre id="seen">(.*?)</pre>', run.stdout)  # The text of the script is skipped.
    seen = json.loads(found.replace("&gt;", ">").replace("&amp;", "&"))
    assert seen["boxes"] == len(report.predicted.events)
    assert seen["texts"] >= 4
    assert seen["detail"].startswith("put y_landing_i, rank 0, peer_copies[0]: predicted ")
    assert "waits for " in seen["detail"]
    assert seen["linked"] >= 1
    assert seen["faded"] == seen["boxes"] - 1 - seen["linked"]
    assert seen["grown"] == pytest.approx(1.25, rel=0.02)
    assert seen["again"] == pytest.approx(1)
    assert seen["ticks"] >= 4
    assert seen["backgrounds"] == [background, background]
