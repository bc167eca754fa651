"""Placeholders of a command: a worker's share of the batch, epochs, and what is refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entrenar_py.check.clauses import step_rule
from entrenar_py.check.command import placeholders, run_plan
from entrenar_py.check.command.run_settings import RunSettings
from entrenar_py.check.evidence.needs import ALONE, KILLED, RESUMED, turned
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Ruled, Trace, Traits

NEEDS = (ALONE, RESUMED, turned("accumulation"))


def plan(*command: str, **changes: Any) -> run_plan.Plan:
    command = (*command, "{world_size}")
    return run_plan.Plan(command=command, folder=Path(), **{"needs": NEEDS, **changes})


def usual(*, num_steps: int, **traits: Any) -> Trace:
    """Return the first run of a command on two workers."""
    like = Scenario(system="command", workload="own", world_size=2, seed=0, num_steps=num_steps)
    end = End(status="completed")
    return Trace(scenario=like, environment={}, promises=(), events=(end,), traits=Traits(**traits))


def filled(word: str, **values: object) -> str:
    command = ["train", word, "{accumulation}"] if "accumulation" in values else ["train", word]
    texts = {"world_size": "1", **{name: str(value) for name, value in values.items()}}
    return placeholders.fill(command, texts, {})[1]


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({"world_size": 1}, "16"),
        ({"world_size": 2}, "8"),
        ({"world_size": 2, "accumulation": 4}, "2"),
        ({"world_size": 1, "accumulation": 1}, "16"),
    ],
)
def test_a_share_is_a_worker_s_micro_batch(values: dict[str, int], share: str) -> None:
    """The global batch is divided by the workers, and by micro-batches if the command has those."""
    assert filled("--batch={share:16}", **values) == f"--batch={share}"


def test_micro_batches_that_a_command_does_not_turn_divide_nothing() -> None:
    """Without {accumulation} in the command only the workers divide the batch."""
    values = {"world_size": "2", "accumulation": "4"}
    assert placeholders.fill(["{share:16}"], values, {}) == ["8"]


def test_a_share_is_that_of_a_plain_run_before_any_run_is_made() -> None:
    """A process that the runs share is made by a command whose knobs have no values yet."""
    command = ["{share:16}", "{accumulation}"]
    assert placeholders.fill(command, {"world_size": "2"}, {}) == ["8", "{accumulation}"]


@pytest.mark.parametrize(
    ("command", "changes", "words"),
    [
        (("{share:9}",), {}, "9 samples can't be divided evenly among 2 workers.* multiple of 2$"),
        (
            ("{share:12}", "{accumulation}"),
            {},
            "12 samples .* among 2 workers, 4 micro-batches each.* multiple of 8$",
        ),
        (("{share:16}",), {"world_sizes": (3, 2)}, "16 samples .* 3 workers.* multiple of 6$"),
    ],
)
def test_a_batch_that_can_t_be_cut_is_refused(
    command: tuple[str, ...], changes: dict[str, Any], words: str
) -> None:
    """Before anything runs, the numbers of workers and micro-batches are named, and what works."""
    with pytest.raises(UsageError, match=words):
        plan(*command, **changes)


def test_a_batch_is_cut_only_as_runs_need() -> None:
    """A check that compares with no other run doesn't ask for a batch that all of them can cut."""
    plan("{share:6}", "{accumulation}", needs=(ALONE,))
    plan("{share:8}", "{accumulation}")


@pytest.mark.parametrize("word", ["{share}", "{share:}", "{share:0}", "{share:-4}", "{share:x}"])
def test_a_share_of_nothing_is_refused(word: str) -> None:
    """The global batch is a whole number of samples."""
    with pytest.raises(UsageError, match=r"say how many samples that has, \{share:16\}"):
        placeholders.require_known([word])


def test_a_command_is_stopped_between_epochs() -> None:
    """With {epochs} and no {steps} a run is stopped after each epoch, if these are equally long."""
    told = plan("{epochs}", "{workdir}", num_epochs=3)
    like = usual(num_steps=12)
    [resumed] = [
        settings for name, settings in told.others(like).items() if name.endswith("-resumed")
    ]
    assert resumed.stops == (4, 8)
    assert [epochs for _, epochs in told.lengths(resumed)] == [1, 2, 3]
    assert not resumed.interrupted
    unequal = [settings for settings in told.others(usual(num_steps=11)).values() if settings.stops]
    assert [settings.interrupted for settings in unequal] == [True]
    by_steps = plan("{epochs}", "{steps}", "{workdir}")
    assert by_steps.lengths(resumed) == [(4, 2), (8, 2), (8, 2)]


@pytest.mark.parametrize(
    ("likely", "names"),
    [
        ({"restarts": "nothing"}, ("2-workers", "1-worker")),
        ({}, ("2-workers", "1-worker", "2-workers-killed")),
        (
            {"restarts": "nothing", "saves": "weights"},
            ("2-workers", "1-worker", "2-workers-interrupted"),
        ),
        (
            {"restarts": "nothing", "saves": "weights", "loads": "nothing"},
            ("2-workers", "1-worker"),
        ),
    ],
)
def test_the_runs_to_come_are_named(likely: dict[str, str], names: tuple[str, ...]) -> None:
    """A killed and a resumed run are foreseen where launcher and script are likely to have one."""
    made = plan(needs=(ALONE, KILLED, RESUMED), source=Path())
    assert made.foreseen(Traits(**likely))[0] == names  # type: ignore[arg-type]


@pytest.mark.parametrize(("restarts", "is_killed"), [("", True), ("nothing", False)])
def test_no_worker_is_killed_that_nobody_starts_again(restarts: str, is_killed: bool) -> None:
    """The first run shows whether the launcher restarts workers; a launch is saved."""
    names = plan(needs=(KILLED,)).others(usual(num_steps=8, restarts=restarts))
    assert ("2-workers-killed" in names) is is_killed


def test_an_optimizer_of_ones_own_is_built_in_another_order() -> None:
    """On one worker, which suffices; and only if the optimizer's rule is nobody else's."""
    rule = Ruled(step=0, rank=0, rule="", names=(*"abcd",), constants={}, derived=True)
    first = usual(num_steps=8, rule="own")
    own = replace(first, events=(rule, *first.events))
    told = plan(needs=(ALONE, step_rule.REORDERED))
    order = RunSettings(world_size=1, seed=0, faults=(Fault(kind="reordered_groups", step=0),))
    assert told.others(own) == {"1-worker-reordered": order}
    assert told.others(first) == {}
    assert plan(needs=(ALONE,)).others(own) == {}


SAVED = {"saves": "weights", "saved_after": (4, 8)}


@pytest.mark.parametrize(
    ("seen", "stops"),
    [
        (SAVED, (4, 6, 7)),  # at the end of the epoch of four steps, and in the next one
        ({**SAVED, "saved_after": (8,)}, ()),  # only when all steps were made
        ({**SAVED, "saved_after": ()}, (3, 4, 6)),  # nobody knows when
        ({**SAVED, "loads": "nothing"}, ()),
        ({"saves": "nothing"}, ()),
    ],
)
def test_a_run_is_stopped_where_it_has_a_checkpoint(
    seen: dict[str, Any], stops: tuple[int, ...]
) -> None:
    """Without {workdir} too, by the same command in a folder of its own, if it may load one."""
    first = usual(num_steps=8, **seen)
    first = replace(first, scenario=first.scenario.with_(num_samples=32, batch_size=8))
    found = [one for one in plan(source=Path("/home")).others(first).values() if one.stops]
    assert [(one.stops, one.interrupted) for one in found] == ([(stops, True)] if stops else [])
    assert not any(one.stops for one in plan().others(first).values()), "in the user's own folder"


def test_a_run_that_the_command_says_how_to_resume() -> None:
    """It is stopped whether its checkpoint was seen or not, unless it comes later."""
    told = plan("{resume:--resume last.pt}", source=Path("/home"))
    assert any(one.stops for one in told.others(usual(num_steps=8)).values())
    late = usual(num_steps=8, saves="nothing", unreached="train.py:7")
    assert not any(one.stops for one in told.others(late).values())


def test_options_of_a_resume_are_filled_in_after_a_stop(tmp_path: Path) -> None:
    """They are words of their own, and a pattern stands for its newest file."""
    for number, name in enumerate(("step-9.pt", "step-10.pt")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
    command = ["train", "{resume:--resume step-*.pt --at {seed}}", "sh {resume:-r}"]
    values = {"world_size": "1", "seed": "7"}
    first = placeholders.fill(command, values, {})
    assert first == ["train", "sh "]
    later = placeholders.fill(command, values, {}, resumes_in=tmp_path)
    newest = str(tmp_path / "step-10.pt")
    assert later == ["train", "--resume", newest, "--at", "7", "sh -r"]


def test_a_resume_without_options_is_refused() -> None:
    """What is to be filled in has to be said."""
    with pytest.raises(UsageError, match=r"\{resume\} needs the options"):
        placeholders.require_known(["{resume}"])


def test_braces_of_others_stay() -> None:
    """A shell's or Hydra's ${...} is no placeholder, and doubled braces become single ones."""
    word = "exp_${seed}_{{epoch}}_{{seed}}_{seed}_{{'a': {seed}}}"
    values = {"world_size": "1", "seed": "7", "accumulation": "4"}
    filled_in = placeholders.fill([word, "${accumulation}", "{share:8}"], values, {})
    assert filled_in == ["exp_${seed}_{epoch}_{seed}_7_{{'a': 7}}", "${accumulation}", "8"]
    assert placeholders.has([word], "seed")
    for other in ("${seed}", "{{seed}}", "${resume:x}"):
        assert not placeholders.has([other], "seed")
        assert not placeholders.has([other], placeholders.RESUME)
