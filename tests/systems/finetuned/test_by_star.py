"""The systems that fine-tune: what they accept, what they record, what they need."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.check.harness.runner import Runner
from entrenar_py.shared import mutants, package_data, trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import SYSTEMS
from entrenar_py.shared.verdict import Finding, Verdict
from entrenar_py.systems.finetuned.small_run import Request
from tests.conftest import OF_CHECKPOINTS, shipped_invariants


def subject(**changes: Any) -> Scenario:
    usual: dict[str, Any] = {
        "system": "finetuned",
        "workload": "finetune",
        "world_size": 2,
        "seed": 3,
        "num_shards": 4,
        "num_samples": 8,
        "batch_size": 4,
        "num_steps": 1,
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "detail": "values",
    }
    return Scenario(**{**usual, **changes})


def finding(clause: str, scenario: Scenario, runner: Runner | None = None) -> Finding:
    from entrenar_py.check import clauses as checks

    invariant = shipped_invariants()[clause]
    check = checks.bind(invariant)
    assert check is not None
    return (runner or Runner()).try_scenario(invariant, check, scenario)


def test_the_table_has_the_options() -> None:
    names = {field.name for field in fields(Request)} - {"packing"}  # of distillations alone
    pairs = {"beta", "label_smoothing"}
    others = {
        "finetuned": {"strategy", "cuts"},
        "finetuned_by_peer": {"strategy", "cuts", "facts", "recompute", *pairs},
        "finetuned_by_ranks": {"cuts", "facts", "recompute", *pairs},
    }
    for system, left_out in others.items():
        assert set(SYSTEMS[system].options) == names - left_out
        assert not SYSTEMS[system].trains
    staged = {*names, "network_seed"} - {"strategy"}
    assert set(SYSTEMS["finetuned_by_stages"].options) == staged


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"task": "poems"}, "options task='poems': allowed are instruct, classify, text"),
        ({"rank": 0}, "options rank=0: use a whole number >= 1"),
        ({"rank": True}, "options rank=True: use a whole number >= 1"),
        ({"alpha": -1}, "options alpha=-1: use a number > 0"),
        ({"oversample": 1}, "options oversample=1: use true or false"),
        (
            {"task": "classify", "oversample": True, "class_weights": "inverse"},
            "options class_weights='inverse': with oversample, use none",
        ),
        ({"facts": "samples"}, "options facts='samples': use a list"),
        ({"facts": ["truth"]}, "options facts='truth': allowed are samples"),
        ({"family": "mine"}, "options family='mine': allowed are qwen3"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        Request.of(subject(options=options))
    assert str(caught.value).startswith(problem)
    ended = systems.run(subject(options=options)).end
    assert ended.status == "failed"
    assert problem in ended.reason


@pytest.mark.parametrize("lacking", ["peft", "transformers"])
@pytest.mark.parametrize("clause", ["F-FT-001", "F-FT-006", "F-FT-010", "F-FT-011"])
def test_without_the_extra_a_clause_is_open(
    monkeypatch: pytest.MonkeyPatch, lacking: str, clause: str
) -> None:
    """The reason says what to install; nothing is held and nothing crashes."""
    monkeypatch.setitem(sys.modules, lacking, None)
    monkeypatch.delitem(sys.modules, "entrenar_py.train.model.libraries", raising=False)
    found = finding(clause, subject(options={"facts": ["samples"]}))
    assert found.verdict is Verdict.INCONCLUSIVE, found
    assert package_data.extra_advice("finetune") in found.reason


def test_without_accelerate_the_peer_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    found = finding("F-FT-010", subject())
    assert found.verdict is Verdict.INCONCLUSIVE, found
    assert f"needs accelerate; {package_data.extra_advice('integrations')}" in found.reason


def test_facts_are_recorded_as_asked() -> None:
    pytest.importorskip("peft")
    bare = systems.run(subject())
    assert bare.end.status == "completed", bare.end
    assert not bare.of(trace.Encoded)
    assert not bare.of(trace.ReadBack)
    told = systems.run(subject(options={"facts": ["samples", "outputs"]}))
    assert [one.sample for one in told.of(trace.Encoded)] == list(range(8))
    assert len({one.tokens for one in told.of(trace.Encoded)}) == 8, "each row is its own"
    assert len({len(one.tokens) for one in told.of(trace.Encoded)}) > 1, "of unequal lengths"
    [read] = told.of(trace.ReadBack)
    assert read.by == "peft"
    weights = [one.weights for one in (told.of(trace.Update)[-1], bare.of(trace.Update)[-1])]
    assert weights[0] == weights[1], "facts change no bit"


def test_no_planted_bug_is_in_what_is_kept_between_runs() -> None:
    """Graphs and results of the textbook outlive a run with a mutant."""
    kept = ("entrenar_py.systems.finetuned.", "entrenar_py.compute.", "transformers.")
    tuned = [one for one in mutants.catalogue().values() if one.scenario.system in OF_CHECKPOINTS]
    assert len(tuned) > 50
    assert [path for one in tuned for path in one.plants if path.startswith(kept)] == []


def test_an_odd_number_can_not_be_oversampled() -> None:
    pytest.importorskip("peft")
    asked = {"task": "classify", "oversample": True}
    ended = systems.run(subject(num_samples=9, options=asked)).end
    assert "num_samples=9 with oversample: use an even number" in ended.reason


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_samples": 10}, "use whole batches and whole epochs"),
        ({"num_steps": 3}, "use whole batches and whole epochs"),
        ({"warmup_steps": 1}, "no warm-up and no stops with strategies"),
        ({"optimizer": "sgd"}, "use adamw"),
        ({"options": {"strategy": "horovod"}}, "options strategy='horovod': allowed are ddp"),
    ],
)
def test_ranks_refuse_what_they_would_not_do(changes: dict[str, Any], problem: str) -> None:
    pytest.importorskip("peft")
    given = {"system": "finetuned_by_ranks", "num_steps": 2, **changes}
    ended = systems.run(subject(**given)).end
    assert ended.status == "failed"
    assert problem in ended.reason
