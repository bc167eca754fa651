"""F-DP-005 on traces broken by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence.needs import ORACLE
from entrenar_py.check.harness import companions
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Shard, Start, Tensors, Trace, Update, record_tensor
from entrenar_py.shared.verdict import Verdict
from tests.check.clauses import traces
from tests.check.clauses.traces import altered, broken, scenario, without

SUBJECT = scenario(detail="values")
LONG = scenario(workload="linear", num_steps=102, learning_rate=0.001)


NEEDS = CHECKS["parity"].needs


def oracle(subject: Scenario) -> Scenario:
    """Return the scenario of the single device's run."""
    ((model,),) = companions.of((ORACLE,), subject).beside.values()
    return model


def family(subject: Trace | None = None) -> list[Trace]:
    """Return the traces of SUBJECT's family, with `subject` in place of its own."""
    own, *others = traces.family("parity", SUBJECT)
    return [subject or own, *others]


def scaled(tensors: Tensors, factor: float) -> Tensors:
    """Return all tensors times `factor`."""
    return {
        name: record_tensor((value * np.float32(factor)).astype(np.float32), values=True)
        for name, record in tensors.items()
        if (value := record.values()) is not None
    }


def with_gradient(step: int, factor: float) -> Trace:
    """Return SUBJECT's run, promising no bits, with one step's gradient times `factor`."""
    trace = replace(traces.run(SUBJECT), promises=())
    gradient = scaled(traces.one(trace, Update, step=step).gradient, factor)
    return altered(trace, Update, {"step": step}, gradient=gradient)


@pytest.mark.parametrize("factor", [2.0, 1 / 3, 0.0, 1.002, -1.0])
def test_a_wrong_factor_on_the_gradient(factor: float) -> None:
    """A gradient averaged twice, summed, lost or a little off is found in its first step."""
    found = broken(traces.judge("parity", family(with_gradient(1, factor))))
    assert (found.step, found.rank) == (1, 0)
    assert found.tensor is not None
    assert found.element is not None
    assert "averaged gradient" in found.message


def test_a_system_s_options_are_not_the_oracle_s() -> None:
    """A training in blocks is compared with the oracle, which has no blocks."""
    subject = scenario(
        system="parameter_server_simulated", detail="values", options={"block_bytes": 40}
    )
    assert oracle(subject).options == {}
    finding = traces.judge("parity", traces.family("parity", subject))
    assert finding.verdict is Verdict.HELD
    assert finding.notes == ()


def test_rounding_is_no_alarm() -> None:
    """A gradient that is some float32 roundings off holds."""
    trace = with_gradient(1, 1 + 2.0**-20)
    assert traces.judge("parity", family(trace)).verdict is Verdict.HELD


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(bad: float) -> None:
    """NaN and inf are outside every bound, and their element is named."""
    trace = replace(traces.run(SUBJECT), promises=())
    gradient = dict(traces.one(trace, Update, step=1).gradient)
    gradient["hidden1.bias"] = traces.values(0.0, bad, 0.0)
    changed = altered(trace, Update, {"step": 1}, gradient=gradient)
    found = broken(traces.judge("parity", family(changed)))
    assert (found.step, found.tensor, found.element) == (1, "hidden1.bias", 1)


def test_a_gradient_with_a_tensor_missing() -> None:
    """A tensor that a gradient lacks is named."""
    trace = replace(traces.run(SUBJECT), promises=())
    gradient = dict(traces.one(trace, Update, step=0).gradient)
    del gradient["output.bias"]
    found = broken(
        traces.judge("parity", family(altered(trace, Update, {"step": 0}, gradient=gradient)))
    )
    assert (found.step, found.tensor) == (0, "output.bias")


def test_weights_that_moved_elsewhere() -> None:
    """A right gradient that is applied wrongly is found in the weights."""
    trace = replace(traces.run(SUBJECT), promises=())
    weights = scaled(traces.one(trace, Update, step=0).weights, 1.01)
    found = broken(
        traces.judge("parity", family(altered(trace, Update, {"step": 0}, weights=weights)))
    )
    assert found.step == 0
    assert "weights after the step" in found.message


def test_a_loss_that_is_off() -> None:
    """A first loss that is off by more than rounding is found."""
    trace = replace(traces.run(SUBJECT), promises=())
    loss = (traces.one(trace, Update, step=2).loss or 0.0) * 1.001
    found = broken(
        traces.judge("parity", family(altered(trace, Update, {"step": 2, "rank": 1}, loss=loss)))
    )
    assert (found.step, found.rank) == (2, 1)
    assert found.got == repr(loss)


@pytest.mark.parametrize(("off", "verdict"), [(1.02, "falsified"), (1.005, "held")])
def test_the_published_bound_from_step_100(off: float, verdict: str) -> None:
    """From step 100 on the loss may differ by 1 %, and no more."""
    own, *others = traces.family("parity", LONG)
    own = replace(own, promises=())
    loss = (traces.one(own, Update, step=101).loss or 0.0) * off
    changed = altered(own, Update, {"step": 101}, loss=loss)
    finding = traces.judge("parity", [changed, *others])
    assert finding.verdict == verdict
    if finding.counterexample is not None:
        assert finding.counterexample.step == 101


def test_a_promise_of_bits_is_held_to() -> None:
    """A trainer that promises bits is falsified by a difference of rounding."""
    trace = with_gradient(5, 1 + 2.0**-20)
    promised = replace(trace, promises=("bitwise",))
    found = broken(traces.judge("parity", family(promised)))
    assert found.step == 5
    assert traces.judge("parity", family(trace)).verdict is Verdict.HELD


def test_steps_that_were_never_made() -> None:
    """A run that ends early is falsified."""
    trace = without(replace(traces.run(SUBJECT), promises=()), Update, step=5)
    assert broken(traces.judge("parity", family(trace))).step == 5


def test_a_step_that_the_single_device_lacks() -> None:
    """Steps after the oracle stopped are inconclusive."""
    *others, model = family()
    short = without(model, Update, step=5)
    finding = traces.judge("parity", [*others, short])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "no step 5" in finding.reason


def test_a_single_device_that_halts_decides_nothing() -> None:
    """If the single device itself diverged, there is nothing to compare with."""
    own, *_, model = family()
    end = replace(model.end, status="halted", reason="diverged")
    events = tuple(e for e in model.events if e is not model.end and getattr(e, "step", 0) < 4)
    halted = replace(model, events=(*events, end))
    shorter = without(without(own, Update, step=5), Update, step=4)
    shorter = replace(without(shorter, Update, step=3), promises=())
    finding = traces.judge("parity", [shorter, halted])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "diverged" in finding.reason


def test_a_loss_of_the_single_device_that_is_nan() -> None:
    """A NaN loss of the single device is inconclusive, even if the run has NaN, too."""
    *others, model = family()
    finding = traces.judge("parity", [*others, altered(model, Update, {"step": 3}, loss=math.nan)])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "loss of step 3 is not finite" in finding.reason


def test_without_the_single_device_nothing_is_known() -> None:
    """A run alone is inconclusive."""
    finding = traces.judge("parity", [replace(traces.run(SUBJECT), promises=())])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "one worker" in finding.reason


def test_dropout_is_compared_only_where_masks_agree() -> None:
    """Masks drawn by shard are the oracle's. Masks of a rank's own stream, or of micro-batches, are
    not: a note says so, or the reason if nothing else was compared.
    """
    for changes, compared in (
        ({}, True),
        ({"accumulation": 2}, False),
        ({"system": "textbook"}, False),
    ):
        subject = scenario(dropout=0.3, detail="values", **changes)
        runs = [traces.run(subject), traces.run(oracle(subject))]
        finding = traces.judge("parity", runs)
        assert finding.verdict is not Verdict.FALSIFIED
        assert any("masks" in note for note in finding.notes) is not compared
        assert bool(finding.compared) is compared
        assert finding.reason.endswith("use dropout 0 in both runs") is not compared


@pytest.mark.parametrize("check", ["parity", "weighting"])
def test_masks_drawn_per_rank_are_compared_without_dropout(check: str) -> None:
    """Trainers that draw masks per rank hold by their runs without dropout; a note says so."""
    subject = scenario(system="textbook", dropout=0.3, detail="values")
    finding = traces.judge(check, traces.family(check, subject))
    assert finding.verdict is Verdict.HELD
    assert finding.notes == (
        "under dropout textbook draws its masks per rank: on one worker it is another run, and "
        "was not compared",
    )


def test_masks_from_other_generators_are_compared_without_dropout() -> None:
    """Masks drawn by shard with another generator are not the oracle's."""
    subject = scenario(dropout=0.3, detail="values")
    run = replace(traces.run(subject), promises=("bitwise", "draws"))
    subject = subject.with_(system="ddp_canonical")
    other = replace(altered(run, Shard, {}, draws="other"), scenario=subject)
    other = traces.was(other, masks="shard_apart")
    finding = traces.judge("parity", [other, traces.run(oracle(subject))])
    assert finding.compared == 0
    assert finding.notes == ("not compared with a single device, whose dropout draws other masks",)
    for dropout in (0.0, 0.3):
        calm = subject.with_(dropout=dropout)
        assert {calm, oracle(calm)} < {*companions.of(NEEDS, subject)}


def own(trace: Trace, **changes: Any) -> Trace:
    """Return `trace` as a user's own trainer recorded it, promising nothing."""
    subject = trace.scenario.with_(**{"system": "mine", "workload": "own", **changes})
    return replace(trace, scenario=subject, promises=())


def test_masks_that_nobody_recorded_are_not_taken_for_equal() -> None:
    """Two runs with dropout and unrecorded draws are not compared."""
    subject = SUBJECT.with_(dropout=0.3)
    known = [own(traces.run(subject.with_(world_size=count))) for count in (3, 1)]
    assert traces.judge("parity", known).verdict is Verdict.HELD
    unknown = [altered(trace, Shard, {}, draws=None) for trace in known]
    finding = traces.judge("parity", unknown)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "since no Shard has draws: use dropout 0" in finding.reason


def test_batch_normalisation_is_another_run_on_one_worker() -> None:
    """Batch normalisation by each rank's samples is not compared with one worker."""
    runs = [own(traces.run(SUBJECT.with_(world_size=count))) for count in (3, 1)]
    told = [traces.was(run, batch_norm=True) for run in runs]
    finding = traces.judge("parity", told)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "each rank's own samples" in finding.reason
    assert "use SyncBatchNorm" in finding.reason


@pytest.mark.parametrize("check", ["parity", "weighting"])
@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([{}], "one worker to compare with: record one with world_size=1, and all else equal"),
        ([{"world_size": 1}], "no run on several workers: record the same training with a larger"),
        (
            [{}, {"world_size": 1, "num_shards": 1, "batch_size": 4}],
            "one worker trains on batches of 4 samples, 3 on ",
        ),
        ([{}, {"world_size": 1, "seed": 9}], "nearest other trace differs in seed (9, needed 4)"),
    ],
)
def test_the_run_that_is_missing_is_named(
    check: str, runs: list[dict[str, Any]], reason: str
) -> None:
    """The reason says which run to record, and how the nearest recorded run differs from it."""
    finding = traces.judge(check, [own(traces.run(SUBJECT), **changes) for changes in runs])
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert reason in finding.reason


@pytest.mark.parametrize(
    ("population", "reason"),
    [
        ("known", "one worker has a data set of 30 samples, 3 workers one of 12: give all runs"),
        ("guessed", "one worker draws other samples than 3 workers: draw each batch for all"),
    ],
)
def test_a_data_set_of_unknown_size_is_given_none(population: str, reason: str) -> None:
    """Runs that draw other samples are told so, and how many there are only if that is known."""
    script = {"system": "command"}
    runs = [own(traces.run(SUBJECT), **script)]
    runs.append(own(traces.run(SUBJECT), **script, world_size=1, num_samples=30))
    told = [traces.was(run, population=population) for run in runs]
    finding = traces.judge("parity", told)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith(reason)


@pytest.mark.parametrize("silent", [0, 1])
def test_runs_without_steps_or_samples_are_not_compared(silent: int) -> None:
    """A run without recorded updates or samples is inconclusive."""
    runs = [own(traces.run(SUBJECT.with_(world_size=count))) for count in (3, 1)]
    for changed, missing in (
        (without(runs[silent], Update), "record an Update"),
        (altered(runs[silent], Shard, {}, ids=()), "record Shard.ids in both runs"),
    ):
        found = [*runs[:silent], changed, *runs[silent + 1 :]]
        finding = traces.judge("parity", found)
        assert finding.verdict is Verdict.INCONCLUSIVE
        assert missing in finding.reason


@pytest.mark.parametrize("part", ["gradient", "weights", "buffers"])
def test_one_comparison_excuses_no_gap(part: str) -> None:
    """Values that one rank did not record in one step are missing if others did. The others are
    judged all the same.
    """
    trace = replace(traces.run(SUBJECT), promises=())
    trace = altered(trace, Update, {"step": 2, "rank": 1}, **{part: {}})
    finding = traces.judge("parity", family(trace))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith(f"rank 1 was not compared by {part} in step 2: record Update.")
    wrong = scaled(traces.one(trace, Update, step=3, rank=2).gradient, 2.0)
    trace = altered(trace, Update, {"step": 3, "rank": 2}, gradient=wrong)
    assert broken(traces.judge("parity", family(trace))).step == 3


def test_a_start_without_values() -> None:
    """One rank's initial weights are missing if the others' are known."""
    trace = altered(traces.run(SUBJECT), Start, {"rank": 1}, weights={})
    finding = traces.judge("parity", family(trace))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith("rank 1 was not compared by weights before the first step")


def test_samples_of_one_rank_that_are_unnamed() -> None:
    """Samples without ids are unknown, and don't differ from the single device's."""
    trace = altered(traces.run(SUBJECT), Shard, {"step": 1, "rank": 1}, ids=())
    finding = traces.judge("parity", family(replace(trace, promises=())))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert finding.reason.startswith("the samples of step 1 are unknown: record Shard.ids")


@pytest.mark.parametrize("check", ["parity", "weighting"])
def test_masks_are_not_excused_by_nothing(check: str) -> None:
    """Gradients with dropout are inconclusive without a run without dropout."""
    masked = traces.family(check, scenario(system="textbook", dropout=0.3, detail="values"))[:3]
    finding = traces.judge(check, masked)
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert "under dropout textbook draws its masks per rank" in finding.reason


def test_a_planted_value_is_another_training() -> None:
    """A run halted by a planted NaN is not compared with one that went on."""
    fault = Fault(kind="non_finite_loss", step=1, rank=0, value="nan")
    finding = traces.judge("parity", traces.family("parity", scenario(faults=(fault,))))
    assert finding.verdict is not Verdict.FALSIFIED


def test_the_oracle_is_its_own() -> None:
    """A plain run of the textbook trainer on one device is its own oracle."""
    assert oracle(oracle(SUBJECT)) == oracle(SUBJECT)
    assert len([*companions.of(NEEDS, oracle(SUBJECT))]) == 1


def test_what_is_learned_away_is_no_alarm() -> None:
    """After one sample is fitted, the gradient is pure rounding, and may differ."""
    subject = scenario(
        workload="linear", num_samples=1, batch_size=1, world_size=1, num_steps=3, detail="values"
    )
    own, *_, model = traces.family("parity", subject)
    noise = {"weight": traces.values(1e-8), "bias": traces.values(-2e-8)}
    quiet = altered(model, Update, {"step": 2}, gradient=noise)
    finding = traces.judge(
        "parity", [altered(own, Update, {"step": 2}, gradient=scaled(noise, -1.0)), quiet]
    )
    assert finding.verdict is Verdict.HELD


@pytest.mark.parametrize(("step", "verdict"), [(0, "falsified"), (1, "held")])
def test_adam_is_compared_before_its_first_step(step: int, verdict: str) -> None:
    """Adam makes full steps of rounding noise, so later gradients have no tight bound."""
    own, *others = traces.family("parity", scenario(optimizer="adamw", detail="values"))
    gradient = scaled(traces.one(own, Update, step=step).gradient, 1.01)
    trace = altered(replace(own, promises=()), Update, {"step": step}, gradient=gradient)
    assert traces.judge("parity", [trace, *others]).verdict == verdict


def test_a_trainer_of_ones_own_is_compared_with_its_one_worker_run() -> None:
    """A user's trainer is compared with its own run on one worker, and a note says so."""
    mine = [
        replace(trace, scenario=trace.scenario.with_(system="mine"), promises=())
        for trace in (traces.run(SUBJECT), traces.run(SUBJECT.with_(world_size=1)))
    ]
    finding = traces.judge("parity", mine)
    assert finding.verdict is Verdict.HELD
    assert any("its own run on one worker" in note for note in finding.notes)
    off = altered(mine[0], Update, {"step": 1}, loss=9.0)
    assert traces.judge("parity", [off, mine[1]]).verdict is Verdict.FALSIFIED


@pytest.mark.parametrize("made", [True, False])
def test_a_step_on_what_was_made_of_earlier_samples(made: bool) -> None:
    """It has the samples of the step before. Without that, a step without samples is open."""
    runs = [
        altered(run, Shard, {"step": 1}, ids=(), made=made)
        for run in traces.family("parity", SUBJECT)
    ]
    finding = traces.judge("parity", runs)
    assert finding.verdict is (Verdict.HELD if made else Verdict.INCONCLUSIVE)
