"""The page and the trace of a plan: as files, and the page in a browser, in a narrow and a wide window."""

from __future__ import annotations

import html
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from planned import check_trace, llama, tokens
from polyreme.cli import report
from polyreme.cli.plan import Answer, render
from polyreme.planner.over_time import kinds
from polyreme.planner.plan import Plan, plan
from polyreme.planner.trace import CATEGORIES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CONFIG = {
    "mesh": {"pp": 2},
    "batch": {"size": 16, "micro": 2},
    "data": {"path": "</pre><b>&.txt"},
    "memory": {"states": "host"},
}
ASKED = """<script>
for (const plot of document.querySelectorAll(".plot")) {
  const box = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2 }));
}
parent.document.body.dataset.widths = document.documentElement.scrollWidth + " " + innerWidth;
parent.document.querySelector("pre").textContent = document.body.innerText;
console.error("said on purpose");
</script></body>"""
"""What a test adds to the page: it points at each plot, and tells how wide the page is, and its text."""


@pytest.fixture(scope="module")
def made() -> Plan:
    return plan(llama, CONFIG, 4, "cpu", batch=tokens)


@pytest.fixture(scope="module")
def page(made: Plan, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "plan.html"
    report.save(made, file, None)
    return file.read_text("utf-8")


def test_the_page_has_the_figures_and_loads_nothing(made: Plan, page: str) -> None:
    assert made.details is not None and len(made.details.traces) == 2
    for each in made.details.traces:
        assert f"({each.memory.peak:,} bytes)" in page and f"<h3>rank {each.rank}, stage" in page
        assert each.memory.module in page
    for axis, verbs in made.details.worst.traffic.items():
        for verb, (calls, _) in verbs.items():
            assert re.search(rf'<td>{axis}</td><td>{verb}</td><td class="n">{calls:,}</td>', page)
    assert not re.findall(r"(?:src|href)=|url\(|@import|https?:", page)
    assert 'path = "</pre><b>&.txt"' in html.unescape(page) and "</pre><b>" not in page


def test_the_trace_has_a_process_for_each_kind_of_rank(made: Plan, tmp_path: Path) -> None:
    report.save(made, None, tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    check_trace(found, made.details.timeline.seconds)
    events = found["traceEvents"]
    assert {each["pid"] for each in events} == {each.rank for each in made.details.traces}
    lasts = max(each["ts"] + each["dur"] for each in events if each["ph"] == "X")
    assert lasts == pytest.approx(made.details.timeline.seconds * 1e6, abs=0.003)
    for trace in made.details.traces:
        counted = [each["args"] for each in events if each["ph"] == "C" and each["pid"] == trace.rank]
        assert {*counted[0]} == {*CATEGORIES}
        assert max(sum(each.values()) for each in counted) >= trace.memory.peak


def test_memory_over_time_has_the_peak_that_is_told(made: Plan) -> None:
    """Here all micro-batches were run, so that nothing is put in for others."""
    assert made.details is not None
    for kind in kinds(made.details, made.cluster):
        assert max(sum(each.live) for each in kind.memory) >= kind.trace.memory.peak
        assert max(map(sum, kind.highest(7))) == max(sum(each.live) for each in kind.memory)


def test_a_terminal_of_ascii_gets_ascii_of_80_columns(made: Plan) -> None:
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, "ascii", write_through=True)
    Console(file=terminal, width=80).print(render(Answer(made, made.fits), True))
    lines = written.getvalue().decode("ascii").splitlines()
    assert 0 < max(map(len, lines)) <= 80
    busy = [re.search(r"\| (compute|host in|axis pp|bubble) +\| ([ .:=#]{36}) \|", line) for line in lines]
    assert {each[1] for each in busy if each and each[2].strip()} >= {"compute", "host in", "bubble"}
    assert made.details is not None
    folded = "".join(line.split("|")[-2].strip() for line in lines if line.count("|") == 5)
    assert all(each.memory.module in folded for each in made.details.traces)


@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_shows_the_page(made: Plan, page: str, width: int, tmp_path: Path) -> None:
    """It says no errors beside the one that is said on purpose, so that they are seen; nothing is wider than
    the window; the peak is there, and so is what a pointer asks for. The page stands in a frame, as a
    browser's own windows have a least width."""
    if BROWSER is None:
        pytest.skip("there is no Chromium on this machine")
    assert made.details is not None
    inner = html.escape(page.replace("</body>", ASKED))
    frame = f'<iframe srcdoc="{inner}" style="width: {width}px; height: 900px; border: 0"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!DOCTYPE html><body><pre></pre>{frame}</body>", "utf-8")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        "--enable-logging=stderr",
        "--v=0",
    ]
    command = [BROWSER, *options, f"--user-data-dir={tmp_path / 'user'}", (tmp_path / "frame.html").as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    assert len(said) == 1 and "said on purpose" in said[0], found.stderr
    widths = re.search(r'data-widths="(\d+) (\d+)"', found.stdout)
    assert widths is not None and int(widths[1]) <= int(widths[2]) == width
    shown = re.search(r"<pre>(.*?)</pre>", found.stdout, re.DOTALL)
    assert shown is not None and f"({made.details.worst.memory.peak:,} bytes)" in shown[1]
    assert len(re.findall(r"^[\d.e-]+ s: [\d.]+ MiB = \w+ ", shown[1], re.MULTILINE)) == 2
