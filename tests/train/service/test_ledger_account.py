"""Ledgers: what one account says, how it is verified, and its link to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py import compute as backends
from entrenar_py.check import cli
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable, CheckpointError, TraceError, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Trace, writer
from entrenar_py.shared.trace.ledger import Reader
from entrenar_py.train.arithmetic import checkpoint
from entrenar_py.train.service import exit_codes, ledger_account, retraining
from entrenar_py.train.service.host import Host
from entrenar_py.train.service.run_events import Happening, Noted
from entrenar_py.train.wire.effects import Finish
from tests.shared.trace.samples import WHOLE, any_event
from tests.train.service.members import head_of, host_of, meet, plan_of, record, train

CPU = Attempt(backend="cpu", served=True, device="here")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one torch thread, as in the service, since threads change the order of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def ledger(path: Path, *, steps: int = 4, end: Finish | None = None, **changes: Any) -> Path:
    """Return the ledger of a real run of `steps` steps, ended or not."""
    host = host_of(plan_of(**changes))
    written = record(host, path)
    train(meet(host), range(steps))
    if end is not None:
        host.finish(end)
    written.close()
    return path


def changed(path: Path, change: Callable[[Trace], Trace]) -> Path:
    """Return the file after a change, with its chain recomputed."""
    trace.save(change(trace.load(path)), path)
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Return a complete run's ledger."""
    return ledger(tmp_path / "l", end=Finish("completed"))


@settings(max_examples=25)
@given(batches=st.lists(st.lists(any_event(), max_size=3), max_size=3))
def test_no_event_breaks_the_ledger_that_it_is_written_to(
    batches: list[list[trace.Event]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever events come, a ledger is whole. Events come into it together, or not at all."""
    path, due = tmp_path_factory.mktemp("any") / "l", list[trace.Event]()
    written = writer.create(path, head_of(WHOLE.scenario))
    for batch in batches:
        with suppress(UsageError):
            written.append(batch)
            due += batch
    written.close()
    account = ledger_account.read(path)
    assert account.num_lines == 1 + len(due)
    assert any(sentence.startswith(f"{1 + len(due)} lines") for sentence in account.sentences())
    assert all(first <= last for first, last in [*account.missing(), *account.twice()])


def verdict(
    path: Path, capsys: pytest.CaptureFixture[str], *, replay: bool = False
) -> tuple[int, str]:
    """Return the exit code and the last line of the verification."""
    code = ledger_account.verify(path, replay=replay)
    return code, capsys.readouterr().out.splitlines()[-1]


# --- the chain ----------------------------------------------------------------------------------


def test_a_whole_one(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output says how far the run came."""
    code, said = verdict(whole, capsys)
    assert code == exit_codes.DONE
    assert "steps 0 to 3 of 0 to 3, weights " in said
    assert said.endswith(" after step 3; completed")


def test_one_that_is_not_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed coordinator leaves a ledger that is valid as far as it goes."""
    code, said = verdict(ledger(tmp_path / "l"), capsys)
    assert code == exit_codes.DONE
    assert said.endswith(" after step 3; the run is not over")


def _edit(lines: list[str]) -> None:
    lines[9] = lines[9].replace('"step":', '"step": ', 1)


def _lose(lines: list[str]) -> None:
    del lines[9]


def _swap(lines: list[str]) -> None:
    lines[9], lines[10] = lines[10], lines[9]


def _repeat(lines: list[str]) -> None:
    lines.insert(10, lines[9])


def _cut(lines: list[str]) -> None:
    lines[-1] = lines[-1][:-5]


def _reseed(lines: list[str]) -> None:
    lines[0] = lines[0].replace('"seed":0', '"seed":1')


@pytest.mark.parametrize(
    ("damage", "line"),
    [(_edit, 10), (_lose, 10), (_swap, 10), (_repeat, 11), (_cut, -1), (_reseed, 1)],
)
def test_a_broken_one(
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[list[str]], None],
    line: int,
) -> None:
    """The output names the first bad line."""
    lines = whole.read_text().splitlines(keepends=True)
    damage(lines)
    whole.write_text("".join(lines))
    code, said = verdict(whole, capsys)
    assert code == exit_codes.WRONG
    assert said.startswith(f"broken: {whole}:{line if line > 0 else len(lines)}: ")


@pytest.mark.parametrize("content", ["", "{}\n", "GIF89a", '{"version":9,"chain":"00"}\n'])
def test_no_ledger(tmp_path: Path, content: str) -> None:
    """A file that is no ledger, or one of another version, is a usage error."""
    path = tmp_path / "l"
    path.write_text(content)
    with pytest.raises(UsageError):
        ledger_account.verify(path, replay=False)


def test_one_that_contradicts_itself(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers hold different weights after one step in a valid chain."""

    def forge(read: Trace) -> Trace:
        events = list(read.events)
        at = max(
            n for n, one in enumerate(events) if isinstance(one, trace.Update) and one.step == 2
        )
        update = events[at]
        assert isinstance(update, trace.Update)
        name = next(iter(update.weights))
        weights = {**update.weights, name: trace.TensorRecord("0" * 32)}
        events[at] = replace(update, weights=weights)
        return replace(read, events=tuple(events))

    code, said = verdict(changed(whole, forge), capsys)
    assert code == exit_codes.WRONG
    assert said.startswith("different: worker 1 holds weights ")
    assert "after step 2" in said


# --- training again -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"workload": "mlp", "optimizer": "adamw", "dropout": 0.2, "schedule": "cosine"},
        {"workload": "decoder", "clip_norm": 0.1, "num_samples": 20, "batch_size": 7},
    ],
)
def test_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    """Retraining gives the ledger's bits for any workload and number of workers."""
    code, said = verdict(ledger(tmp_path / "l", **changes), capsys, replay=True)
    assert code == exit_codes.DONE, said
    assert said.startswith("verified: trained again on cpu (")
    assert said.endswith("), 4 steps, the same bits")


def _poison(read: Trace) -> Trace:
    """Give all workers the same weights, but not those of the training."""
    events = tuple(
        replace(one, weights={**one.weights, "weight": trace.TensorRecord("0" * 32)})
        if isinstance(one, trace.Update) and one.step == 2
        else one
        for one in read.events
    )
    return replace(read, events=events)


def test_other_bits(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output names the first differing step and tensor, although the chain is valid."""
    code, said = verdict(changed(whole, _poison), capsys, replay=True)
    assert code == exit_codes.WRONG
    assert said.startswith("different: step 2, tensor weight: training again gives ")
    assert said.endswith(f", but the ledger has {'0' * 32}")


@pytest.mark.parametrize("change", [{"seed": 1}, {"learning_rate": 0.051}, {"num_samples": 49}])
def test_another_scenario(
    whole: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    """A ledger with another run's scenario in its header is detected."""
    claimed = changed(whole, lambda read: replace(read, scenario=read.scenario.with_(**change)))
    code, said = verdict(claimed, capsys, replay=True)
    assert code == exit_codes.WRONG
    assert said.startswith("different: step 0, tensor ")


def _served(*attempts: Attempt) -> Callable[[Trace], Trace]:
    return lambda read: replace(read, events=(*attempts, *read.events))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            _served(CPU, replace(CPU, backend="cuda", device="H100")),
            "inconclusive: computed on cpu, cuda: kernels round differently",
        ),
        (
            lambda read: replace(read, scenario=read.scenario.with_(backends=("auto",))),
            "inconclusive: computed on auto: kernels round differently",
        ),
        (
            lambda read: _served(replace(CPU, device="a loom"))(_poison(read)),
            "; but it was computed on a loom, and this machine has ",
        ),
        (
            lambda read: replace(_poison(read), environment={"torch": "0.1"}),
            "; but it was recorded with torch 0.1, and this machine has ",
        ),
        (lambda read: replace(read, events=read.events[-1:]), "inconclusive: no step was made"),
    ],
    ids=["mixed", "auto", "device", "version", "empty"],
)
def test_what_can_not_be_decided(
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Trace], Trace],
    said: str,
) -> None:
    """A ledger whose bits can't be repeated here, or without steps, is inconclusive."""
    code, line = verdict(changed(whole, change), capsys, replay=True)
    assert code == exit_codes.INCONCLUSIVE
    assert said in line
    assert line.startswith("inconclusive: ")


def test_a_backend_that_is_not_here(
    whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output names the missing backend."""

    def absent() -> backends.Backend:
        raise BackendUnavailable("no such thing")

    monkeypatch.setitem(backends.BACKENDS, "cuda", absent)
    served = changed(whole, _served(replace(CPU, backend="cuda")))
    code, said = verdict(served, capsys, replay=True)
    assert (code, said) == (
        exit_codes.INCONCLUSIVE,
        "inconclusive: computed on cuda, which this machine doesn't have: no such thing",
    )


def test_a_halted_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Retraining must halt in the same step. A halt without a cause is detected."""
    diverges = {"learning_rate": 1e18, "num_steps": 40}
    scenario = plan_of(**diverges)
    path = tmp_path / "l"
    with _quiet():
        again = list(retraining._updates(scenario, "cpu", 40))
    assert 1 < len(again) < 40, "it halts"
    host = host_of(scenario)
    record(host, path)
    with _quiet():
        train(meet(host), range(len(again)))
    halt = trace.Halt(step=len(again), reason="non-finite", rank=0, shard=0)
    host.server.recorder.emit(halt)
    host.finish(Finish("halted", "non-finite"))
    with _quiet():
        assert verdict(path, capsys, replay=True)[0] == exit_codes.DONE
    idle = ledger(tmp_path / "m", steps=2, end=Finish("completed"))
    halted = replace(halt, step=2)
    idle = changed(
        idle, lambda read: replace(read, events=(*read.events[:-1], halted, read.events[-1]))
    )
    code, said = verdict(idle, capsys, replay=True)
    assert code == exit_codes.WRONG
    assert said == "different: the ledger halts in step 2, but training again does not"


def _quiet() -> np.errstate:
    """Ignore overflow warnings, since these tests overflow on purpose."""
    return np.errstate(all="ignore")


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(system="own", workload="own", world_size=2, seed=0),
        Scenario.of(plan_of()).with_(mutant="something"),
    ],
    ids=["own", "mutant"],
)
def test_no_service_made_it(tmp_path: Path, scenario: Scenario) -> None:
    """A trace of another trainer is refused, and the message names the command for it."""
    path = tmp_path / "l"
    events = (
        trace.Update(
            step=0, rank=0, loss=1.0, weight=1.0, learning_rate=1.0, finite=True, weights={}
        ),
        trace.End(status="completed"),
    )
    trace.save(Trace(scenario=scenario, environment={}, promises=(), events=events), path)
    with pytest.raises(UsageError, match="judge it with `entrenar-check --judge`"):
        ledger_account.verify(path, replay=True)


def test_lines_are_json(whole: Path) -> None:
    """Every line of the ledger is JSON."""
    assert all(json.loads(line) for line in whole.read_text().splitlines())


SCENARIO = plan_of(num_steps=6)


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
        TraceError, match=r"complete line.*restore the ledger that the run has written"
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
    with pytest.raises(
        TraceError, match=r"the checkpoint names [0-9a-f]{32}: it belongs to a different run"
    ):
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
    assert f"starts over: {lacks}, the last with digest {named['chain']}" in said
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
    with pytest.raises(TraceError, match="it ends after 0 steps, but the checkpoint is of step 3"):
        run.go_on()


def test_a_run_that_kept_no_ledger(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A ledger added on resume records since when."""
    run.begin(with_ledger=False)
    run.go_on()
    said = verified(run, capsys)
    assert "starts over: steps 0 to 2 are not in it, no ledger was kept when" in said


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
