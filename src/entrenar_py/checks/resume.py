"""F-TI-003: a run that was stopped and resumed is the same run, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

from entrenar_py.checks import evidence, same_bits
from entrenar_py.contract import Invariant
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Shard, Start, Trace
from entrenar_py.verdict import Finding, Tally


def family(scenario: Scenario) -> list[Scenario]:
    """The run with its stops, and the straight run."""
    return evidence.distinct([scenario, scenario.with_(stops=())])


def judge(invariant: Invariant, traces: Sequence[Trace]) -> Finding:
    """Samples, random draws, learning rates, losses and states of every step."""
    tally = Tally(invariant.id)
    for group in evidence.groups(evidence.usable(traces, tally), "stops"):
        straight = [trace for trace in group if not trace.scenario.stops]
        for trace in group:
            if not any(start.resumed for start in trace.of(Start)):
                continue
            if not straight:
                tally.miss("no straight run of the same training to compare with")
                continue
            _same_data(tally, straight[0], trace)
            message = "the resumed run is another run"
            same_bits.compare_steps(tally, straight[0], trace, message)
            _same_rates(tally, straight[0], trace)
    return tally.finding(nothing="no run was stopped and resumed")


def _same_data(tally: Tally, straight: Trace, trace: Trace) -> None:
    expected = {(shard.step, shard.rank, shard.shard): shard for shard in straight.of(Shard)}
    for shard in trace.of(Shard):
        model = expected.get((shard.step, shard.rank, shard.shard))
        if model is None:
            continue
        place = {
            "step": shard.step,
            "rank": shard.rank,
            "shard": shard.shard,
            "scenario": trace.scenario.to_dict(),
        }
        moved = tuple(sorted(set(model.ids) ^ set(shard.ids))) or shard.ids
        if shard.ids != model.ids:
            tally.check(
                False, "after the resume other samples are drawn", sample_ids=moved, **place
            )
        tally.equal(
            model.draws, shard.draws, "after the resume other random numbers are drawn", **place
        )


def _same_rates(tally: Tally, straight: Trace, trace: Trace) -> None:
    expected = evidence.updates(straight)
    for step, by_rank in evidence.ranks_by_step(trace):
        for rank, update in by_rank.items():
            if step in expected:
                tally.equal(
                    evidence.any_rank(expected[step]).learning_rate,
                    update.learning_rate,
                    "the resumed run has another learning rate",
                    step=step,
                    rank=rank,
                    scenario=trace.scenario.to_dict(),
                )
