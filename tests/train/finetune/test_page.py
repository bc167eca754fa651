"""A run's page: its curves from whatever was told, everything escaped, nothing from the network."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.shared.trace.writer import Mark
from entrenar_py.train.finetune import page
from entrenar_py.train.finetune.page import NOTES_MAX, POINTS_MAX, History, Outcome
from entrenar_py.train.model.settings import Classes, Data, Settings

EVIL = "<script>alert(1)</script>\x1b[2J\"'&"
SETTINGS = Settings(
    model=Path("/models") / "<b>small",
    task="classify",
    output=Path("/out"),
    data=Data(train=Path("/rows.jsonl")),
    classes=Classes(labels=("safe", EVIL)),
)
OUTCOME = Outcome(
    status="completed",
    reason="",
    made=4,
    num_steps=4,
    num_rows=(64, 8),
    ledger=Mark(217, "0123456789abcdef"),
    digest="fedcba9876543210",
)


def step(number: int, **fields: Any) -> dict[str, Any]:
    """Return a step's line of the metrics."""
    return {"what": "step", "step": number, "loss": 1.0 / (number + 1), "grad_norm": 0.5, **fields}


def scored(made: int, f1: float | None = 0.5) -> dict[str, Any]:
    """Return an evaluation's line of the metrics."""
    one = {"recall": 0.25, "precision": None, "f1": f1}
    return {
        "what": "evaluation",
        "step": made,
        "loss": 0.75,
        "weight": 8,
        "perplexity": None,
        "accuracy": 0.875,
        "classes": [{"label": "safe", **one}, {"label": EVIL, **one}],
        "confusion": [[6, 1], [0, 1]],
    }


def note(what: str, text: str, number: int = 0) -> dict[str, Any]:
    return {"what": what, "step": number, "text": text}


def read(folder: Path, *records: object, num_steps: int = 4) -> History:
    """Return the history of metrics with these lines."""
    path = folder / "metrics.jsonl"
    lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page.read_history(path, num_steps=num_steps)


class Elements(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.values: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.values += [value or "" for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_page_says_everything(tmp_path: Path) -> None:
    told = read(tmp_path, *map(step, range(4)), scored(2), scored(4), note("spike", "very steep"))
    found = Elements(page.render(SETTINGS, OUTCOME, told))
    text = " ".join(" ".join(found.text).split())
    assert found.names.count("svg") == 3  # loss, norm, F1
    for words in (
        "4 of 4",
        "64 to train on, 8 to evaluate on",
        "217 lines, the last with digest 0123456789abcdef",
        "entrenar ledger verify /out/ledger.jsonl",
        "fedcba9876543210",
        "Validation after step 4",
        "0.8750",
        "very steep",
        "training.learning_rate 0.0002",
        "torch",
    ):
        assert words in text
    assert re.search(r"safe 6 1 <script>", text), "the confusion's rows"


def test_what_comes_from_files_is_escaped(tmp_path: Path) -> None:
    """Names of classes are a user's, and so are paths and notes."""
    told = read(tmp_path, step(0), scored(1), scored(2), note("left", EVIL))
    text = page.render(SETTINGS, OUTCOME, told)
    found = Elements(text)
    assert "script" not in found.names
    assert "b" not in found.names
    assert "\x1b" not in text
    assert [value for value in found.values if "://" in value] == []
    assert "default-src 'none'" in text


def test_a_run_without_a_step(tmp_path: Path) -> None:
    """One that was stopped before its first has no curves."""
    told = read(tmp_path, note("listening", "listens"))
    outcome = Outcome(
        status="stopped",
        reason="by SIGTERM",
        made=0,
        num_steps=4,
        num_rows=(64, 0),
        ledger=None,
        digest="",
    )
    found = Elements(page.render(SETTINGS, outcome, told))
    assert "svg" not in found.names
    assert "by SIGTERM" in found.text


# --- the history ----------------------------------------------------------------------------------


def test_a_resumed_run_is_one_curve(tmp_path: Path) -> None:
    """Steps that were made again count once; a run begun anew forgets the one before."""
    told = read(
        tmp_path,
        *(note("listening", "anew"), step(0, loss=9.0), step(3, loss=9.0), scored(3)),
        *(note("listening", "anew"), step(0), step(1), note("listening", "on", 1)),
        *(step(1), step(2), scored(2, 0.25), scored(2, 0.5)),
    )
    assert told.losses == {1: 1.0, 2: 0.5, 3: pytest.approx(1 / 3)}
    assert list(told.evaluations) == [2]
    assert told.evaluations[2]["classes"][0]["f1"] == 0.5


def test_a_long_run_is_thinned_out(tmp_path: Path) -> None:
    """Means of losses and the largest norms are left, no more than POINTS_MAX."""
    number = 10 * POINTS_MAX + 7
    steps = [step(i, loss=1.0, grad_norm=50.0 if i == 77 else 0.5) for i in range(number)]
    told = read(tmp_path, *steps, num_steps=number)
    assert len(told.losses) == len(told.norms) <= POINTS_MAX
    assert max(told.losses) == number
    assert set(told.losses.values()) == {1.0}
    assert max(told.norms.values()) == 50.0


def test_alerts_are_counted_and_the_last_are_kept(tmp_path: Path) -> None:
    notes = [note("spike", str(number)) for number in range(NOTES_MAX + 3)]
    told = read(tmp_path, *notes, note("saved", "routine"))
    assert told.num_alerts == {"spike": NOTES_MAX + 3}
    assert told.alerts == [str(number) for number in range(3, NOTES_MAX + 3)]


@pytest.mark.parametrize(
    "line",
    [
        '{"what": "step", "ste',
        "[1]",
        '{"what": "step", "step": "1"}',
        '{"what": "step", "step": 1, "loss": null}',
        '{"what": "evaluation", "step": 1, "loss": null}',
        '{"what": "spike", "step": 1}',
    ],
)
def test_a_line_that_tells_nothing(tmp_path: Path, line: str) -> None:
    """What a killed writer left, for example, is passed over."""
    told = read(tmp_path, line, step(0))
    assert (told.losses, told.evaluations, told.alerts) == ({1: 1.0}, {}, [])
