"""Reasons name the facts that a trace lacks."""

from __future__ import annotations

from dataclasses import replace

from entrenar_py.check.evidence import facts, missing
from entrenar_py.shared.trace import End, Update
from entrenar_py.shared.verdict import Tally
from tests.check.evidence.test_evidence import shard, update
from tests.traces import hand_written, scenario


def test_what_to_record_is_asked_for_once() -> None:
    """Gaps that the same recording would fill are reported once, for the first place."""
    tally = Tally("F-XX-001")
    for step in range(3):
        missing.ask(tally, f"nothing in step {step}", facts.IDS)
    missing.ask(tally, "no loss", facts.LOSS)
    assert tally.missing == [
        "nothing in step 0: record Shard.ids",
        "no loss: record Shard.loss_sum",
    ]


def test_steps_without_updates_or_shards() -> None:
    """A completed run must have steps with shards; a halted run may have none."""
    for trace, reason in (
        (hand_written(), "no step was recorded"),
        (hand_written(shard(0, 0), update(0, 0)), ""),
        (
            hand_written(shard(0, 0), update(0, 0), update(3, 0)),
            "no micro-batch of step 3 was recorded",
        ),
    ):
        tally = Tally("F-XX-001")
        assert missing.require_updates(tally, trace) == bool(trace.of(Update))
        missing.require_shards(tally, trace)
        assert [one.partition(":")[0] for one in tally.missing] == ([reason] if reason else [])
    halted = replace(hand_written(), events=(End(status="halted"),))
    assert missing.require_updates(Tally("F-XX-001"), halted)


def test_fields_that_one_run_never_fills_in() -> None:
    """Fields empty in one run are not compared, and are missing if the other run has them."""
    drawn = replace(shard(0, 0), draws="d", ids=())
    for dropout, bare, reasons in (
        (0.0, {"gradient": {}, "ids": ()}, ["only one run has known samples"]),
        (
            0.3,
            {"gradient": {}, "ids": (), "draws": None},
            ["only one run has known samples", "only one run has known random draws"],
        ),
    ):
        subject, tally = scenario(dropout=dropout), Tally("F-XX-001")
        runs = [hand_written(one, subject=subject) for one in (shard(0, 0), drawn)]
        assert missing.bare_fields(tally, *runs) == bare
        assert [reason.partition(":")[0] for reason in tally.missing] == reasons


def test_the_step_before_the_first() -> None:
    """Reasons say `before the first step` for step -1."""
    assert [missing.when(step) for step in (-1, 0)] == ["before the first step", "in step 0"]
