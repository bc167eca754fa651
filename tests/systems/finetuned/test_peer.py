"""Twelve steps beside `transformers.Trainer`: warm-up, decay, clipping, a linear schedule."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.check.causes import rounding_bounds
from entrenar_py.check.harness.runner import Runner
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Verdict
from tests.systems.finetuned.test_by_star import finding, subject


def twelve_steps(**options: Any) -> Scenario:
    return subject(
        num_samples=20,
        batch_size=6,  # so that the last batch of an epoch is short
        num_steps=12,
        learning_rate=0.003,
        schedule="linear",
        warmup_steps=5,
        weight_decay=0.1,
        clip_norm=0.5,
        options=options,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"task": "classify", "class_weights": "inverse"},
        {"task": "instruct", "method": "qlora"},
        {"task": "text", "method": "full", "family": "llama"},
    ],
    ids=["classes", "nf4", "full"],
)
def test_losses_follow_the_trainer(options: dict[str, Any]) -> None:
    """Within the bound that the contract derives, and the losses within two roundings of a sum."""
    pytest.importorskip("accelerate")
    pytest.importorskip("peft")
    if options.get("method") == "qlora":
        pytest.importorskip("bitsandbytes")
    scenario, runner = twelve_steps(**options), Runner()
    found = finding("F-FT-010", scenario, runner)
    assert found.verdict is Verdict.HELD, found
    peer = scenario.with_(system="finetuned_by_peer", world_size=1)
    ours, theirs = (_losses(runner.run(one)) for one in (scenario, peer))
    assert len(ours) == len(theirs) == 12
    apart = [abs(x - y) / y for x, y in zip(ours, theirs, strict=True)]
    assert max(apart) <= 2 * rounding_bounds.LOSS_BOUND, apart
    assert ours[-1] < ours[0]


def _losses(ran: trace.Trace) -> list[float]:
    return [one.loss or 0.0 for one in ran.of(trace.Update) if one.rank == 0]


def test_the_trainer_refuses_what_it_would_not_do() -> None:
    pytest.importorskip("peft")
    for changes in ({"optimizer": "sgd"}, {"dropout": 0.1}):
        ended = systems.run(subject(system="finetuned_by_peer", **changes)).end
        assert ended.status == "failed"
        assert next(iter(changes)) in ended.reason
