"""The HTML page: complete, without scripts or requests, and without markup from a contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy

from entrenar_py.check.reports import html
from entrenar_py.check.reports.html import Curve, training
from entrenar_py.check.reports.report import Report
from entrenar_py.shared.page import html_page
from entrenar_py.shared.scenario import Scenario
from tests.traces import broken

VOID = {"meta", "line", "circle", "polyline"}
TAGS = {
    *("html", "head", "title", "style", "body", "header", "h1", "h2", "h3", "p", "pre", "strong"),
    *("section", "article", "div", "table", "thead", "tbody", "tr", "th", "td", "a", "code"),
    *("dl", "dt", "dd", "span", "figure", "figcaption", "ul", "li", "svg", "text", "footer"),
    *VOID,
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "id", "href", "viewbox", "role"),
    *("aria-label", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "points", "stroke-width"),
    "transform",
}


class Page(HTMLParser):
    """A strict parser: every tag must be one of ours, closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.num: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        self.num[tag] = self.num.get(tag, 0) + 1
        for name, value in attrs:
            assert name in ATTRIBUTES, name
            assert name != "href" or (value or "").startswith("#"), value
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def curve(world_size: int, *distances: float, num_steps: int = 3) -> Curve:
    """Return the curve of a small run."""
    scenario = Scenario(
        system="textbook", workload="linear", world_size=world_size, seed=0, num_steps=num_steps
    )
    return Curve(
        scenario=scenario,
        training=training(scenario),
        losses=tuple((step, 2.0 / (step + 1)) for step in range(num_steps)),
        distances=tuple(enumerate(distances)),
        of_weights=True,
    )


def test_full_report(full: Report) -> None:
    """The page has every verdict, the evidence with replay commands, environment and command."""
    page = Page(html.render(full))
    for words in (
        "distributed-training-v1.yaml 1.0.0 FALSIFIED",
        "Gate QA-DT-001 (Distributed training) over 3 clauses: NOT PASSED (F-DP-002 inconclusive)",
        "at step 3, rank 1, shard 2, tensor weight[0], samples 0, 1",
        "expected 9f86d081884c7d659a2feaa0c55ad015 got 60303ae22b998861bce3b28f33eec1be",
        "note software adapter llvmpipe (LLVM 15.0.6, 256 bits)",
        "entrenar-check --contract distributed-training-v1.yaml --replay",
        f"Repeat with {full.command}",
        "torch 2.13.0",
    ):
        assert words in page.text, words
    assert page.num["article"] == len(full.entries)


@given(data=st.data())
def test_any_text_stays_text(data: DataObject, any_report: SearchStrategy[Report]) -> None:
    """No text from a contract becomes a tag, an attribute, a script or a request."""
    report = data.draw(any_report)
    page = Page(html.render(report))
    assert page.num.get("article", 0) == len(report.entries)
    html.render(report).encode()


def test_a_contract_with_a_script(full: Report) -> None:
    """The script is printed as text; the page's policy forbids scripts and requests."""
    clause = replace(full.entries[0].invariant, name='<script src="//x">"', statement="<img src=x>")
    report = replace(full, entries=(replace(full.entries[0], invariant=clause),))
    text = html.render(report)
    assert '<script src="//x">"' in Page(text).text
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text


def test_curves(full: Report) -> None:
    """Runs of one training share a chart; those at no distance from one worker are named."""
    curves = (curve(1), curve(2, 0.0, 0.0, 0.0), curve(3, 0.0, 1e-7, 1e-3))
    page = Page(html.render(replace(full, curves=curves)))
    assert page.num["svg"] == 2
    assert page.num["polyline"] == 4  # three losses, one distance
    assert "at any step: textbook, 2 workers." in page.text
    assert "max |w − w₁|" in page.text
    assert "3 runs of 1 training reported losses. Drawn: 1 training" in page.text


def test_the_falsified_run_is_drawn_first(full: Report) -> None:
    """Only a few trainings are drawn, the counterexample's first."""
    found = broken(full.entries[3].finding)
    assert found.scenario is not None
    scenario = Scenario.from_dict(found.scenario)
    own = Curve(scenario=scenario, training=training(scenario), losses=((0, 1.0),), strange=1)
    others = [one for n in range(3, 12) for one in (curve(1, num_steps=n), curve(2, num_steps=n))]
    page = Page(html.render(replace(full, curves=(*others, own))))
    assert page.num["svg"] == 6
    assert "Drawn: 6 trainings" in page.text
    labels = "reference, 3 workers, counterexample, leave, not finite at step 1"
    assert labels in page.text
    assert page.text.index(labels) < page.text.index("textbook, 1 worker")


def test_kill_matrix(full: Report) -> None:
    """The page lists the planted bugs of each clause, and says that none was planted for it."""
    clause = replace(full.entries[0].invariant, mutants=("ddp-bypass", "unheard-of"))
    report = replace(full, entries=(replace(full.entries[0], invariant=clause),))
    text = Page(html.render(report)).text
    assert "F-DP-001 ddp-bypass" in text
    assert "unheard-of" not in text
    assert "None was planted for this report" in text


def test_long_keys_break() -> None:
    """A key that is longer than its column breaks, and never runs over its value."""
    (rule,) = (line for line in html_page.STYLE.splitlines() if line.startswith("dt {"))
    assert "overflow-wrap: anywhere" in rule
