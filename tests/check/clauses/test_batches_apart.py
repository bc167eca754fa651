"""Losses that couple the samples of a batch: no combination of the ranks' gradients is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entrenar_py.check.causes.run_comparison import Compared
from entrenar_py.check.evidence.needs import Runs
from entrenar_py.shared.trace import Event, Shard, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests.check.causes.test_presuppositions import changed, own, parity
from tests.check.clauses import traces


def coupled(trace: Trace, step: int, *, loss: float | None = None) -> Trace:
    """Return a run of one micro-batch a step, in which one has a gradient of another direction.

    Its loss is `loss`, or the same as before.
    """
    name = min(traces.one(trace, Update, step=step, rank=0).gradient)
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Shard):
            continue
        if isinstance(event, Update):
            shards = [shard for shard in trace.of(Shard) if shard.step == event.step]
            whole = Shard(
                step=event.step,
                rank=0,
                epoch=shards[0].epoch,
                shard=0,
                ids=tuple(id_ for shard in shards for id_ in shard.ids),
                loss_sum=sum(shard.loss_sum or 0.0 for shard in shards),
                weight=sum(shard.weight for shard in shards),
                finite=True,
                gradient=event.gradient,
            )
            if event.step == step:
                gradient = changed(event.gradient, name, by=1.0)
                event = replace(event, gradient=gradient, loss=loss or event.loss)
                whole = replace(whole, gradient=gradient)
            events.append(whole)
        events.append(event)
    return replace(trace, events=tuple(events))


def test_a_loss_that_couples_samples_is_not_compared() -> None:
    """No combination of the ranks' gradients is that of one worker, and the loss is another."""
    finding = parity(own(2), coupled(own(1), 0, loss=99.0))
    assert finding.verdict is Verdict.INCONCLUSIVE, finding
    assert "may not be a sum over its samples" in finding.reason
    assert 'observe(..., loss_over="batch")' in finding.reason


def over_elements(trace: Trace, counts: dict[frozenset[int], int]) -> Trace:
    """Return the run whose micro-batches of these samples have losses over so many elements."""
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Shard) and (count := counts.get(frozenset(event.ids))):
            event = replace(event, terms=((float(count), 0.1),))
        events.append(event)
    return replace(trace, events=tuple(events))


@pytest.mark.parametrize(("whole", "is_padded"), [(7, True), (4 + 7, False), (None, False)])
def test_a_loss_over_padding_is_found(whole: int | None, is_padded: bool) -> None:
    """Samples that are batched with longer ones have more elements; pairs of them are no padding.

    `whole` is the number of elements a sample in the run on one worker, where ranks have 4 and 7.
    """
    several, alone = own(2), coupled(own(1), 0, loss=99.0)
    parts = [shard for shard in several.of(Shard) if shard.step == 0]
    counts = {frozenset(p.ids): w * len(p.ids) for p, w in zip(parts, (4, 7), strict=False)}
    counts |= {frozenset(p.ids): 7 * len(p.ids) for p in parts[2:]}
    ids = frozenset(id_ for part in parts for id_ in part.ids)
    counts[ids] = (whole or 0) * len(ids)
    steps = [
        replace(run, events=tuple(e for e in run.events if getattr(e, "step", 0) < 1))
        for run in (several, alone)
    ]
    finding = parity(*(over_elements(run, counts) for run in steps))
    if not is_padded:
        assert finding.verdict is Verdict.INCONCLUSIVE, finding
        return
    broken = traces.broken(finding)
    assert broken.step == 0
    assert "padding up to the longest sample counts" in broken.message


def declared(trace: Trace, over: str) -> Trace:
    """Return the run of a script that declares of which samples its loss is."""
    return replace(trace, traits=replace(trace.traits, loss_over=over))


@pytest.mark.parametrize("over", ["batch", "micro-batch"])
def test_a_declared_loss_is_compared(over: str) -> None:
    """If all ranks are to compute one loss, other gradients are wrong."""
    several, alone = own(5), coupled(own(1), 0, loss=99.0)  # a micro-batch a rank
    assert traces.broken(parity(declared(several, over), declared(alone, over))).step == 0


def test_micro_batches_of_all_ranks_are_compared_if_they_are_the_same() -> None:
    """If each micro-batch has a loss of its own, all runs have to cut the same ones."""
    several, alone = own(2), coupled(own(1), 0, loss=99.0)
    finding = parity(declared(several, "micro-batch"), declared(alone, "micro-batch"))
    assert finding.verdict is Verdict.INCONCLUSIVE, finding
    assert "cut different ones: cut the same" in finding.reason
    assert traces.broken(parity(declared(several, "batch"), declared(alone, "batch"))).step == 0


@pytest.mark.parametrize("over", [("batch", ""), ("", "micro-batch"), ("micro-batch", "batch")])
def test_runs_that_declare_their_losses_differently(over: tuple[str, str]) -> None:
    """The reason says so, and not that micro-batches are cut otherwise."""
    several, alone = own(2), coupled(own(1), 0, loss=99.0)
    finding = parity(declared(several, over[0]), declared(alone, over[1]))
    assert finding.verdict is Verdict.INCONCLUSIVE, finding
    assert "the runs declare loss_over differently: declare the same" in finding.reason


def test_the_difference_of_two_runs_is_looked_for_once() -> None:
    """Several presuppositions ask for it, and each comparison takes long."""
    compared = Compared(runs=Runs(base=own(2)), model=coupled(own(1), 0), trace=own(2))
    assert compared.difference is not None
    assert compared.difference is compared.difference


def test_other_gradients_of_the_same_loss_are_found() -> None:
    """If the losses agree the gradients should, too."""
    broken = traces.broken(parity(own(2), coupled(own(1), 0)))
    assert broken.step == 0


def test_a_combination_of_the_ranks_gradients_is_found() -> None:
    """Gradients that are weighted wrongly, or of one rank alone, are compared."""
    trace = own(2)
    name = min(traces.one(trace, Update, step=0, rank=0).gradient)
    gradient = changed(traces.one(trace, Update, step=0, rank=0).gradient, name, times=0.5)
    wrong = traces.altered(trace, Update, {"step": 0}, gradient=gradient)
    assert traces.broken(parity(wrong, own(1))).tensor == name
