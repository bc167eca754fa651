"""Ledger verification: whole ledgers, broken ones, contradictions, and other files."""

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
from entrenar_py.shared import trace
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Attempt, Trace, writer
from entrenar_py.train.service import exit_codes, ledger_account, retraining
from entrenar_py.train.wire.effects import Finish
from tests.shared.trace.samples import WHOLE, any_event
from tests.train.service.members import host_of, meet, record, scenario_of, train

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
    host = host_of(scenario_of(**changes))
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
    written = writer.create(path, WHOLE)
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
    assert said.endswith(f", the ledger has {'0' * 32}")


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
            "; but it was computed on a loom, this is ",
        ),
        (
            lambda read: replace(_poison(read), environment={"torch": "0.1"}),
            "; but it was recorded with torch 0.1, this is ",
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
        "inconclusive: computed on cuda, which is not here: no such thing",
    )


def test_a_halted_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Retraining must halt in the same step. A halt without a cause is detected."""
    diverges = {"learning_rate": 1e18, "num_steps": 40}
    scenario = scenario_of(**diverges)
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
    assert said == "different: the ledger halts in step 2, training again does not"


def _quiet() -> np.errstate:
    """Ignore overflow warnings, since these tests overflow on purpose."""
    return np.errstate(all="ignore")


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(system="own", workload="own", world_size=2, seed=0),
        scenario_of(mutant="something"),
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
