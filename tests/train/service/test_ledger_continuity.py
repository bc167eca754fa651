"""A checkpoint and its ledger: one with lost lines is refused, one with a gap reports it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check import cli
from entrenar_py.shared import trace
from entrenar_py.shared.errors import CheckpointError, TraceError
from entrenar_py.shared.trace import writer
from entrenar_py.shared.trace.ledger import Reader
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.service import exit_codes, ledger_account
from entrenar_py.train.service.host import Host
from entrenar_py.train.service.run_events import Happening, Noted
from entrenar_py.train.wire.effects import Finish
from tests.train.service.members import head_of, host_of, meet, record, scenario_of, train

SCENARIO = scenario_of(num_steps=6)


class Run:
    """A run of six steps in one folder, whose coordinator dies and is started again."""

    def __init__(self, folder: Path) -> None:
        self.ledger, self.checkpoint = folder / "l", folder / "c"
        self.heard: list[Happening] = []

    def host(self) -> Host:
        """Return a new coordinator's host. The one before is dead by then."""
        return host_of(SCENARIO, checkpoint=self.checkpoint, heard=self.heard)

    def begin(self, *, steps: int = 4, save_at: int = 3, with_ledger: bool = True) -> None:
        """Make the first steps, save before one of them, and kill the coordinator."""
        host = self.host()
        written = record(host, self.ledger) if with_ledger else None
        hands = meet(host)
        train(hands, range(save_at))
        host.save(save_at)
        train(hands, range(save_at, steps))
        if written is not None:
            written.close()

    def go_on(self, *, to: int = 6, save_at: int | None = None) -> None:
        """Resume and make the steps up to `to`. The coordinator is killed unless these are all."""
        host = self.host()
        first = host.resume()
        host.write_to(*writer.reopen(self.ledger, head_of(SCENARIO), since=host.since))
        hands = meet(host, step=first)
        for step in range(first, to):
            if step == save_at:
                host.save(step)
            train(hands, [step])
        if to == SCENARIO.num_steps:
            host.finish(Finish("completed"))
        host.close()

    def lines(self) -> list[dict[str, Any]]:
        """Return the ledger's lines."""
        return [json.loads(line) for line in self.ledger.read_text().splitlines()]

    def cut(self, num_lines: int) -> None:
        """Keep only the first lines of the ledger."""
        kept = self.ledger.read_bytes().splitlines(keepends=True)[:num_lines]
        self.ledger.write_bytes(b"".join(kept))

    def noted(self, what: str) -> str:
        """Return the note with this name."""
        return next(one.text for one in self.heard if isinstance(one, Noted) and one.what == what)

    def change_note(self, change: dict[str, Any] | None) -> None:
        """Replace the checkpoint's entry for the ledger, or remove it as in an earlier build."""
        arrays, progress = checkpoint.load(self.checkpoint)
        del progress["ledger"]
        checkpoint.save(self.checkpoint, arrays, {**progress, **(change or {})})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run that has not begun."""
    return Run(tmp_path)


def verified(run: Run, capsys: pytest.CaptureFixture[str], *, replay: bool = False) -> str:
    """Verify the ledger, which must be right, and return the output."""
    assert ledger_account.verify(run.ledger, replay=replay) == exit_codes.DONE
    return capsys.readouterr().out


def test_a_checkpoint_names_the_ledgers_last_line(run: Run) -> None:
    """A checkpoint has the number and digest of the ledger's last line when it was written."""
    run.begin()
    named = checkpoint.load(run.checkpoint)[1]["ledger"]
    assert run.lines()[named["line"] - 1]["chain"] == named["chain"]
    saved = next(n for n, line in enumerate(run.lines()) if line["kind"] == "saved")
    assert named["line"] == saved, "the line before it says that it was saved"


def test_what_is_made_again_is_told(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A ledger that goes past the checkpoint is continued, and has the later steps twice."""
    run.begin(steps=5)
    run.go_on()
    said = verified(run, capsys, replay=True)
    assert "steps 3 to 4 are in it twice: the run was resumed" in said
    assert "steps 0 to 5 of 0 to 5, weights " in said
    lines = run.lines()
    assert f"{len(lines)} lines, none changed, moved or missing from the first" in said
    assert f"(digest {lines[0]['chain']}) to the last (digest {lines[-1]['chain']})" in said


@pytest.mark.parametrize("num_lines", [0, 1, 9, -1])
def test_one_that_lost_lines_is_refused(run: Run, num_lines: int) -> None:
    """A ledger without the line that the checkpoint was written after is refused and untouched."""
    run.begin()
    line = checkpoint.load(run.checkpoint)[1]["ledger"]["line"]
    run.cut(num_lines if num_lines >= 0 else line - 1)
    before = run.ledger.read_bytes()
    with pytest.raises(
        TraceError, match=r"whole line.*put back the ledger that the run has written"
    ):
        run.go_on()
    assert run.ledger.read_bytes() == before


def test_one_of_another_run_is_refused(run: Run) -> None:
    """Another run's ledger is refused even if scenario and length are the same."""
    run.begin()
    with run.ledger.open("rb") as file:
        reader = Reader(file, run.ledger)
        head, events = replace(reader.head, environment={"torch": "0"}), tuple(reader)
    run.ledger.unlink()
    other = writer.create(run.ledger, head)
    other.append(events)
    other.close()
    with pytest.raises(TraceError, match=r"the checkpoint names [0-9a-f]{32}: it is another run's"):
        run.go_on()


def test_without_its_ledger_a_new_one_says_what_it_lacks(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new ledger records the gap, `verify` reports it, and the steps in it can be retrained."""
    run.begin()
    named = checkpoint.load(run.checkpoint)[1]["ledger"]
    run.ledger.rename(run.ledger.with_name("old"))
    run.go_on()
    assert "the ledger is new: steps 0 to 2 are not in it" in run.noted("gap")
    said = verified(run, capsys, replay=True)
    lacks = f"steps 0 to 2 are not in it, but in a ledger of {named['line']} lines"
    assert f"begins anew: {lacks}, the last with digest {named['chain']}" in said
    assert "steps 3 to 5 of 0 to 5" in said
    gap = run.ledger.read_text().splitlines()[1]
    assert gap.count('"chain"') == 1, "each line's own digest is there once"
    cli.main(["--contract", "distributed-training-v1.yaml", "--judge", str(run.ledger)])
    assert "FALSIFIED" not in capsys.readouterr().out


def test_a_new_one_is_gone_on_with(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A new ledger is continued after a kill, before or after the next save."""
    run.begin()
    run.ledger.rename(run.ledger.with_name("old"))
    run.go_on(to=4)
    run.go_on(to=5, save_at=4)
    run.go_on()
    assert "step 3 is in it twice" in verified(run, capsys, replay=True)
    assert [one["kind"] for one in run.lines()].count("gap") == 1


def test_a_checkpoint_of_an_earlier_build(run: Run) -> None:
    """A checkpoint without a line is resumed with a note, and only its step is checked."""
    run.begin()
    run.change_note(None)
    run.go_on(to=4)
    assert "belongs to the checkpoint: the checkpoint was written by an earlier build" in run.noted(
        "unchecked"
    )
    run.cut(9)
    with pytest.raises(TraceError, match="it ends after 0 steps, the checkpoint is of step 3"):
        run.go_on()


def test_a_run_that_kept_no_ledger(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A ledger added on resume records since when."""
    run.begin(with_ledger=False)
    run.go_on()
    said = verified(run, capsys)
    assert "begins anew: steps 0 to 2 are not in it, no ledger was kept when" in said


@pytest.mark.parametrize(
    "note",
    [
        7,
        {"line": 0, "chain": "0" * 32},
        {"line": True, "chain": "0" * 32},
        {"line": 3, "chain": ""},
    ],
)
def test_a_note_that_is_none(run: Run, note: Any) -> None:
    """A checkpoint with a malformed entry for the ledger is refused by name."""
    run.begin()
    run.change_note({"ledger": note})
    with pytest.raises(CheckpointError, match=r"ledger=.*does not name a line of a ledger"):
        run.go_on()


def test_steps_that_are_not_there(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A chain rebuilt around missing steps is detected by the steps."""
    run.begin()
    run.go_on()
    read = trace.load(run.ledger)
    holed = [one for one in read.events if getattr(one, "step", 0) not in (1, 2)]
    trace.save(replace(read, events=tuple(holed)), run.ledger)
    assert ledger_account.verify(run.ledger, replay=False) == exit_codes.WRONG
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "incomplete: steps 1 to 2 are missing, and no gap explains it"


def test_one_that_begins_late(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A ledger that begins late without a gap, as of earlier builds, is reported as unexplained."""
    run.begin()
    run.go_on()
    read = trace.load(run.ledger)
    late = [one for one in read.events if getattr(one, "step", 9) >= 2]
    trace.save(replace(read, events=tuple(late)), run.ledger)
    assert "begins with step 2: steps 0 to 1 are missing, and no gap" in verified(run, capsys)
