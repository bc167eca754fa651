"""Later steps of right runs, which rounding alone moves apart, and of one that is wrong in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.causes import run_comparison
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import Event, Shard, Start, Trace, Update, record_tensor
from entrenar_py.shared.verdict import Tally
from tests import traces
from tests.traces import broken, in_bfloat16, scenario

Vector = np.ndarray[Any, np.dtype[np.float32]]
BATCH, ROWS, STEPS = 4, 8, 60


def regression(
    num_ranks: int,
    *,
    size: int = 16,
    optimizer: str = "sgd",
    rate: float = 0.02,
    seed: int = 0,
    distance: float = 1.0,
    uneven_step: int | None = None,
) -> Trace:
    """Return a linear regression in float32, whose data is learned before it ends.

    In `uneven_step` the first rank has one sample, and its mean counts as much as the others'.
    The first weights are off by `distance`.
    """
    given = np.random.default_rng(seed)
    inputs = given.normal(size=(ROWS, size)).astype(np.float32)
    noise = given.normal(size=ROWS)
    weights = given.normal(size=size).astype(np.float32)
    targets = (inputs @ weights + distance * noise).astype(np.float32)
    first, second = np.zeros(size, np.float32), np.zeros(size, np.float32)
    events: list[Event] = [
        Start(step=0, rank=rank, weights=record(weights)) for rank in range(num_ranks)
    ]
    for step in range(STEPS):
        batch = np.arange(step * BATCH, (step + 1) * BATCH) % ROWS
        terms = []
        pieces = np.split(batch, num_ranks if step != uneven_step else [1])
        for rank, rows in enumerate(pieces):
            off = inputs[rows] @ weights - targets[rows]
            terms.append((inputs[rows].T @ off / np.float32(len(rows))).astype(np.float32))
            events.append(
                traces.shard(
                    step,
                    rank,
                    epoch=step * BATCH // ROWS,
                    shard=rank,
                    ids=tuple(int(row) for row in rows),
                    loss_sum=None,
                    weight=float(len(rows)),
                    gradient=record(terms[-1]),
                )
            )
        gradient = np.zeros(size, np.float32)
        for term in terms:
            gradient = gradient + term
        gradient = gradient / np.float32(num_ranks)
        change = gradient
        if optimizer == "adamw":
            first = np.float32(0.9) * first + np.float32(0.1) * gradient
            second = np.float32(0.999) * second + np.float32(0.001) * gradient**2
            scale = np.sqrt(second / np.float32(1 - 0.999 ** (step + 1))) + np.float32(1e-8)
            change = first / np.float32(1 - 0.9 ** (step + 1)) / scale
        weights = weights - np.float32(rate) * change
        events += [
            traces.update(
                step,
                rank,
                loss=None,
                weight=float(BATCH),
                learning_rate=rate,
                weights=record(weights),
                gradient=record(gradient),
            )
            for rank in range(num_ranks)
        ]
    subject = scenario(
        system="command",
        workload="own",
        world_size=num_ranks,
        num_shards=num_ranks,
        optimizer=optimizer,
        num_samples=ROWS,
        batch_size=BATCH,
        num_steps=STEPS,
        detail="values",
    )
    return traces.hand_written(*events, subject=subject)


def record(values: Vector) -> Mapping[str, Any]:
    """Return one tensor's record with values."""
    return traces.records({"w": values})


def judged(trace: Trace, model: Trace) -> Tally:
    tally = Tally("", observed=True)
    run_comparison.compare(tally, model, trace, None)
    return tally


@pytest.mark.parametrize("distance", [1.0, 0.2])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize(
    ("optimizer", "rate"), [("sgd", 0.02), ("sgd", 0.04), ("sgd", 0.08), ("adamw", 0.1)]
)
def test_gradients_of_a_model_that_has_learned_its_data(
    optimizer: str, rate: float, size: int, distance: float
) -> None:
    """They are rounding, and exact sums of the ranks' gradients in any shares."""
    for seed in range(3):
        how: dict[str, Any] = {"optimizer": optimizer, "rate": rate, "size": size, "seed": seed}
        how["distance"] = distance
        assert judged(regression(4, **how), regression(1, **how)).broken is None


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_mean_of_means_in_a_later_step(optimizer: str) -> None:
    """It is found in its step, where gradients come apart at once."""
    model = regression(1, optimizer=optimizer)
    trace = regression(2, optimizer=optimizer, uneven_step=9)
    found = broken(judged(trace, model))
    assert found.step == 9
    assert found.message.endswith("which could mean: a mean of means")


def dropping(trace: Trace, step: int) -> Trace:
    """Return the run with a pass in `step` whose gradient is cleared before the others'."""
    events: list[Event] = []
    for event in trace.events:
        if isinstance(event, Shard) and event.step == step:
            events.append(replace(event, shard=50 + event.shard, ids=(90 + event.shard,)))
        if isinstance(event, Update) and event.step == step:
            kept = tuple(one.shard for one in trace.of(Shard) if one.step == step)
            event = replace(event, summed=dict.fromkeys(event.gradient, kept))
        events.append(event)
    return replace(trace, events=tuple(events))


def test_a_batch_that_one_run_alone_leaves_out_ends_the_comparison() -> None:
    """Its loss was too large in one run only. One that both leave out ends nothing."""
    model, trace = regression(1), regression(2, uneven_step=9)
    alone = judged(dropping(trace, 3), model)
    assert alone.broken is None
    assert any("drop different numbers of batches" in note for note in alone.notes)
    first = judged(dropping(trace, 0), model)
    assert any("drop different numbers of batches" in why for why in first.missing)
    both = judged(dropping(trace, 3), dropping(model, 3))
    assert not any("drop different numbers" in note for note in both.notes)


def test_a_rate_that_follows_from_the_number_of_workers() -> None:
    """It is an error, unless one worker had to load the batches of two to have as large ones."""
    model, trace = regression(1, rate=0.02), regression(2, rate=0.04)
    found = broken(judged(trace, model))
    assert found.message.startswith("the learning rate is not the single device's")
    merged = Fault(kind="merged_batches", step=0, value="2")
    model = replace(model, scenario=model.scenario.with_(faults=(merged,)))
    tally = judged(trace, model)
    assert tally.broken is None
    assert tally.missing[0].startswith(
        "one worker steps with learning rate 0.02 in step 0, 2 with 0.04: if it depends on"
    )


def one_step(num_ranks: int, *, times: float = 1.0) -> Trace:
    """Return a step of a training in bfloat16, whose bias gets two terms that nearly cancel.

    One worker rounds its sums elsewhere. The applied gradient is `times` as large as it should be.
    """
    whole = regression(num_ranks)
    drawn = np.random.default_rng(1).normal(size=(3, 64))
    terms = {"w": (drawn[0], drawn[1]), "bias": (drawn[2], -0.95 * drawn[2])}
    if num_ranks == 1:
        rounding = 1 + 0.01 * np.sign(np.random.default_rng(2).normal(size=64))
        terms = {name: (first * rounding, other) for name, (first, other) in terms.items()}
    events: list[Event] = []
    for event in whole.events:
        if isinstance(event, Shard | Update) and event.step > 0:
            continue
        if isinstance(event, Shard):
            summed = {
                name: in_bfloat16(parts[event.rank] if num_ranks == 2 else sum(parts) / 2)
                for name, parts in terms.items()
            }
            gradient = {n: record_tensor(value, values=True) for n, value in summed.items()}
            event = replace(event, gradient=gradient)
        if isinstance(event, Update):
            mean = {
                name: times * np.mean([*map(in_bfloat16, parts)], axis=0)
                for name, parts in terms.items()
            }
            gradient = {
                n: record_tensor(v.astype(np.float32), values=True) for n, v in mean.items()
            }
            event = replace(event, gradient=gradient, weights={})
        events.append(event)
    return replace(whole, scenario=whole.scenario.with_(num_steps=1), events=tuple(events))


def test_rounding_to_16_bits_is_a_share_of_terms_and_not_of_their_sum() -> None:
    """Terms that cancel leave it as large as their sum. A wrong factor is seen in other tensors."""
    assert judged(one_step(2), one_step(1)).broken is None
    found = broken(judged(one_step(2, times=2.0), one_step(1)))
    assert (found.tensor, "twice" in found.message) == ("w", True)
