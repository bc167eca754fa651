"""Training with many workers is training with one, also where random numbers differ."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.causes import copies
from entrenar_py.check.clauses import CHECKS, knobs
from entrenar_py.check.evidence.needs import ALONE, CONTROLLED, ORACLE, Runs
from entrenar_py.check.harness import companions
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Drawn, Event, Noticed, Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.check.causes.test_presuppositions import changed, own
from tests.check.clauses.test_contents import coupled
from tests.traces import altered, falsified, left_open, scenario, undecided, without

SUBJECT = scenario(detail="values")
LONG = scenario(workload="linear", num_steps=102, learning_rate=0.001)


NEEDS = CHECKS["parity"].needs


def oracle(subject: Scenario) -> Scenario:
    """Return the scenario of the single device's run."""
    ((model,),) = companions.of((ORACLE,), subject).beside.values()
    return model


def family(subject: Trace | None = None) -> list[Trace]:
    """Return the traces of SUBJECT's family, with `subject` in place of its own."""
    of_a_script, *others = traces.family("parity", SUBJECT)
    return [subject or of_a_script, *others]


def scaled(tensors: Tensors, factor: float) -> Tensors:
    known = {name: record.values() for name, record in tensors.items()}
    return traces.records(
        {n: one * np.float32(factor) for n, one in known.items() if one is not None}
    )


def with_gradient(step: int, factor: float) -> Trace:
    """Return SUBJECT's run, promising no bits, with one step's gradient times `factor`."""
    return off_in({"step": step}, gradient=lambda update: scaled(update.gradient, factor))


def off_in(at: dict[str, Any], **changes: Any) -> Trace:
    """Return SUBJECT's run, promising no bits, with these updates changed."""
    return altered(replace(traces.run(SUBJECT), promises=()), Update, at, **changes)


@pytest.mark.parametrize("factor", [2.0, 1 / 3, 0.0, 1.002, -1.0])
def test_a_wrong_factor_on_the_gradient(factor: float) -> None:
    """A gradient averaged twice, summed, lost or a little off is found in its first step."""
    found = falsified("parity", *family(with_gradient(1, factor)))
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
    finding = traces.held("parity", *traces.family("parity", subject))
    assert finding.notes == ()


def test_rounding_is_no_alarm() -> None:
    """A gradient that is some float32 roundings off holds."""
    traces.held("parity", *family(with_gradient(1, 1 + 2.0**-20)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite(bad: float) -> None:
    """NaN and inf are outside every bound, and their element is named."""
    swapped = traces.swapping("gradient", "hidden1.bias", traces.values(0.0, bad, 0.0))
    found = falsified("parity", *family(off_in({"step": 1}, **swapped)))
    assert (found.step, found.tensor, found.element) == (1, "hidden1.bias", 1)


def test_a_gradient_with_a_tensor_missing() -> None:
    """A tensor that a gradient lacks is named."""
    gradient = dict(traces.one(traces.run(SUBJECT), Update, step=0).gradient)
    del gradient["output.bias"]
    found = falsified("parity", *family(off_in({"step": 0}, gradient=gradient)))
    assert (found.step, found.tensor) == (0, "output.bias")


def test_weights_that_moved_elsewhere() -> None:
    """A right gradient that is applied wrongly is found in the weights."""
    moved = off_in({"step": 0}, weights=lambda update: scaled(update.weights, 1.01))
    found = falsified("parity", *family(moved))
    assert found.step == 0
    assert "weights after the step" in found.message


def test_a_loss_that_is_off() -> None:
    """A first loss that is off by more than rounding is found."""
    loss = (traces.one(traces.run(SUBJECT), Update, step=2).loss or 0.0) * 1.001
    found = falsified("parity", *family(off_in({"step": 2, "rank": 1}, loss=loss)))
    assert (found.step, found.rank) == (2, 1)
    assert found.got == repr(loss)


@pytest.mark.parametrize(("off", "verdict"), [(1.02, "falsified"), (1.005, "held")])
def test_the_published_bound_from_step_100(off: float, verdict: str) -> None:
    """From step 100 on the loss may differ by 1 %, and no more."""
    of_a_script, *others = traces.family("parity", LONG)
    of_a_script = replace(of_a_script, promises=())
    loss = (traces.one(of_a_script, Update, step=101).loss or 0.0) * off
    changed = altered(of_a_script, Update, {"step": 101}, loss=loss)
    finding = traces.judge("parity", [changed, *others])
    assert finding.verdict == verdict
    if finding.counterexample is not None:
        assert finding.counterexample.step == 101


def test_a_promise_of_bits_is_held_to() -> None:
    """A trainer that promises bits is falsified by a difference of rounding."""
    trace = with_gradient(5, 1 + 2.0**-20)
    promised = replace(trace, promises=("bitwise",))
    assert falsified("parity", *family(promised)).step == 5
    traces.held("parity", *family(trace))


def test_steps_that_were_never_made() -> None:
    """A run that ends early is falsified."""
    trace = without(replace(traces.run(SUBJECT), promises=()), Update, step=5)
    assert falsified("parity", *family(trace)).step == 5


def test_a_step_that_the_single_device_lacks() -> None:
    """Steps after the oracle stopped are inconclusive."""
    *others, model = family()
    short = without(model, Update, step=5)
    assert "no step 5" in left_open("parity", *others, short)


def test_a_single_device_that_halts_decides_nothing() -> None:
    """If the single device itself diverged, there is nothing to compare with."""
    of_a_script, *_, model = family()
    end = replace(model.end, status="halted", reason="diverged")
    events = tuple(e for e in model.events if e is not model.end and getattr(e, "step", 0) < 4)
    halted = replace(model, events=(*events, end))
    shorter = without(without(of_a_script, Update, step=5), Update, step=4)
    shorter = replace(without(shorter, Update, step=3), promises=())
    assert "diverged" in left_open("parity", shorter, halted)


def test_a_loss_of_the_single_device_that_is_nan() -> None:
    """A NaN loss of the single device is inconclusive, even if the run has NaN, too."""
    *others, model = family()
    assert "loss of step 3 is not finite" in left_open(
        "parity", *others, altered(model, Update, {"step": 3}, loss=math.nan)
    )


def test_without_the_single_device_nothing_is_known() -> None:
    """A run alone is inconclusive."""
    assert "one worker" in left_open("parity", replace(traces.run(SUBJECT), promises=()))


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
    finding = traces.held(check, *traces.family(check, subject))
    assert finding.notes == (
        "under dropout textbook draws its masks per rank: on one worker the training is a "
        "different one, and was not compared",
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
    assert finding.notes == (
        "not compared with a single device: there dropout draws different masks",
    )
    for dropout in (0.0, 0.3):
        calm = subject.with_(dropout=dropout)
        assert {calm, oracle(calm)} < {*companions.of(NEEDS, subject)}


def of_a_script(trace: Trace, **changes: Any) -> Trace:
    """Return `trace` as a user's own trainer recorded it, promising nothing."""
    subject = trace.scenario.with_(**{"system": "mine", "workload": "own", **changes})
    return replace(trace, scenario=subject, promises=())


def test_masks_that_nobody_recorded_are_not_taken_for_equal() -> None:
    """Two runs with dropout and unrecorded draws are not compared."""
    subject = SUBJECT.with_(dropout=0.3)
    known = [of_a_script(traces.run(subject.with_(world_size=count))) for count in (3, 1)]
    traces.held("parity", *known)
    unknown = [altered(trace, Shard, {}, draws=None) for trace in known]
    assert "since no Shard has draws: use dropout 0" in left_open("parity", *unknown)


def test_batch_normalisation_is_another_run_on_one_worker() -> None:
    """Batch normalisation by each rank's samples is not compared with one worker."""
    runs = [of_a_script(traces.run(SUBJECT.with_(world_size=count))) for count in (3, 1)]
    told = [traces.was(run, batch_norm=True) for run in runs]
    reason = left_open("parity", *told)
    assert "each rank's own samples" in reason
    assert "use SyncBatchNorm" in reason


@pytest.mark.parametrize("traits", [{"batch_norm": True}, {}])
def test_a_command_on_one_worker_has_the_same_batches_again(traits: dict[str, Any]) -> None:
    """Nothing is divided differently: neither batch normalisation nor dropout keeps them apart."""
    alone = SUBJECT.with_(world_size=1, dropout=0.0 if traits else 0.3)
    run, again = (traces.was(of_a_script(traces.run(alone)), **traits) for _ in range(2))
    many = [replace(r, scenario=r.scenario.with_(accumulation=2)) for r in (run, again)]
    assert knobs.same_masks(*many)
    assert not knobs.same_masks(run, many[0])


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
    assert reason in left_open(
        check, *[of_a_script(traces.run(SUBJECT), **changes) for changes in runs]
    )


@pytest.mark.parametrize(
    ("population", "reason"),
    [
        ("known", "one worker has a data set of 30 samples, 3 workers one of 12: give all runs"),
        ("guessed", "one worker draws different samples from 3 workers: draw each batch for all"),
    ],
)
def test_a_data_set_of_unknown_size_is_given_none(population: str, reason: str) -> None:
    """Runs that draw other samples are told so, and how many there are only if that is known."""
    script = {"system": "command"}
    runs = [of_a_script(traces.run(SUBJECT), **script)]
    runs.append(of_a_script(traces.run(SUBJECT), **script, world_size=1, num_samples=30))
    told = [traces.was(run, population=population) for run in runs]
    assert left_open("parity", *told).startswith(reason)


@pytest.mark.parametrize("silent", [0, 1])
def test_runs_without_steps_or_samples_are_not_compared(silent: int) -> None:
    """A run without recorded updates or samples is inconclusive."""
    runs = [of_a_script(traces.run(SUBJECT.with_(world_size=count))) for count in (3, 1)]
    for partial, missing in (
        (without(runs[silent], Update), "record an Update"),
        (altered(runs[silent], Shard, {}, ids=()), "record Shard.ids in both runs"),
    ):
        found = [*runs[:silent], partial, *runs[silent + 1 :]]
        assert missing in left_open("parity", *found)


@pytest.mark.parametrize("part", ["gradient", "weights", "buffers"])
def test_one_comparison_excuses_no_gap(part: str) -> None:
    """Values that one rank did not record in one step are missing if others did. The others are
    judged all the same.
    """
    trace = replace(traces.run(SUBJECT), promises=())
    trace = altered(trace, Update, {"step": 2, "rank": 1}, **{part: {}})
    assert left_open("parity", *family(trace)).startswith(
        f"rank 1 was not compared by {part} in step 2: record Update."
    )
    wrong = scaled(traces.one(trace, Update, step=3, rank=2).gradient, 2.0)
    trace = altered(trace, Update, {"step": 3, "rank": 2}, gradient=wrong)
    assert falsified("parity", *family(trace)).step == 3


def test_a_start_without_values() -> None:
    """One rank's initial weights are missing if the others' are known."""
    trace = altered(traces.run(SUBJECT), Start, {"rank": 1}, weights={})
    assert left_open("parity", *family(trace)).startswith(
        "rank 1 was not compared by weights before the first step"
    )


def test_samples_of_one_rank_that_are_unnamed() -> None:
    """Samples without ids are unknown, and don't differ from the single device's."""
    trace = altered(traces.run(SUBJECT), Shard, {"step": 1, "rank": 1}, ids=())
    assert left_open("parity", *family(replace(trace, promises=()))).startswith(
        "the samples of step 1 are unknown: record Shard.ids"
    )


@pytest.mark.parametrize("check", ["parity", "weighting"])
def test_masks_are_not_excused_by_nothing(check: str) -> None:
    """Gradients with dropout are inconclusive without a run without dropout."""
    masked = traces.family(check, scenario(system="textbook", dropout=0.3, detail="values"))[:3]
    assert "under dropout textbook draws its masks per rank" in left_open(check, *masked)


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
    of_a_script, *_, model = traces.family("parity", subject)
    noise = {"weight": traces.values(1e-8), "bias": traces.values(-2e-8)}
    quiet = altered(model, Update, {"step": 2}, gradient=noise)
    traces.held(
        "parity", altered(of_a_script, Update, {"step": 2}, gradient=scaled(noise, -1.0)), quiet
    )


@pytest.mark.parametrize(("step", "verdict"), [(0, "falsified"), (1, "held")])
def test_adam_is_compared_before_its_first_step(step: int, verdict: str) -> None:
    """Adam makes full steps of rounding noise, so later gradients have no tight bound."""
    of_a_script, *others = traces.family("parity", scenario(optimizer="adamw", detail="values"))
    gradient = scaled(traces.one(of_a_script, Update, step=step).gradient, 1.01)
    trace = altered(replace(of_a_script, promises=()), Update, {"step": step}, gradient=gradient)
    assert traces.judge("parity", [trace, *others]).verdict == verdict


def test_a_trainer_of_ones_own_is_compared_with_its_one_worker_run() -> None:
    """A user's trainer is compared with its own run on one worker, and a note says so."""
    mine = [
        replace(trace, scenario=trace.scenario.with_(system="mine"), promises=())
        for trace in (traces.run(SUBJECT), traces.run(SUBJECT.with_(world_size=1)))
    ]
    finding = traces.held("parity", *mine)
    assert any("its own run on one worker" in note for note in finding.notes)
    off = altered(mine[0], Update, {"step": 1}, loss=9.0)
    falsified("parity", off, mine[1])


@pytest.mark.parametrize("made", [True, False])
def test_a_step_on_what_was_made_of_earlier_samples(made: bool) -> None:
    """It has the samples of the step before. Without that, a step without samples is open."""
    runs = [
        altered(run, Shard, {"step": 1}, ids=(), made=made)
        for run in traces.family("parity", SUBJECT)
    ]
    finding = traces.judge("parity", runs)
    assert finding.verdict is (Verdict.HELD if made else Verdict.INCONCLUSIVE)


# --- controlled pairs -----------------------------------------------------------------------------

NAME = min(copies.known_names(own(1)))


def planned(trace: Trace, kind: str, value: str | None = None) -> Trace:
    """Return a run of the same numbers in which a control was planned."""
    fault = Fault(kind=kind, step=0, value=value)
    return replace(trace, scenario=trace.scenario.with_(faults=(fault,)))


def by_rank(trace: Trace, where: str = "forward") -> Trace:
    """Return a run whose ranks draw their own numbers in the forward pass of step 0."""
    ranks = range(trace.scenario.world_size)
    size = trace.scenario.world_size
    drawn = [
        Drawn(
            step=0,
            rank=rank,
            micro_batch=0,
            where=where,
            generator="torch",
            before=f"{rank}",
            after=f"{rank}-{size}",
        )
        for rank in ranks
    ]
    return replace(trace, events=(*drawn, *trace.events))


def off(trace: Trace, times: float = 1.0, by: float = 0.0) -> Trace:
    """Return a run whose applied gradient of one tensor is another one in step 0."""
    gradient = changed(traces.one(trace, Update, step=0).gradient, NAME, times=times, by=by)
    return traces.altered(trace, Update, {"step": 0}, gradient=gradient)


def with_other_loss(trace: Trace) -> Trace:
    """Return a run whose samples act on each other: its loss in step 0 is another one."""
    return altered(
        trace,
        Shard,
        {"step": 0, "loss_sum": lambda loss_sum: loss_sum is not None},
        loss_sum=lambda event: 2 * event.loss_sum,
    )


def judged(plain: Trace, alone: Trace, *controlled: Trace) -> Finding:
    """Return the finding of F-DP-005, with the runs that are `controlled` as witnesses."""
    runs = Runs(plain, {ALONE: (alone,)}, witnesses={CONTROLLED: controlled})
    return traces.judge("parity", runs)


MASKED = by_rank(off(own(2), by=0.3)), by_rank(own(1))


def numbered(trace: Trace) -> Trace:
    return planned(trace, "common_numbers")


def test_masks_by_rank_are_no_excuse() -> None:
    """Without them the same script is compared: it holds, or it is broken."""
    assert judged(*MASKED).verdict is Verdict.INCONCLUSIVE
    held = judged(*MASKED, numbered(own(2)), numbered(own(1)))
    assert held.verdict is Verdict.HELD, held
    assert "compared with the same random numbers for all samples" in held.notes
    place = traces.broken(judged(*MASKED, numbered(off(own(2), times=2.0)), numbered(own(1))))
    assert (place.step, place.tensor) == (0, NAME)
    assert place.message.startswith("with the same random numbers for all samples: ")


def reordered(trace: Trace) -> Trace:
    """Return a run whose samples have the numbers of others."""
    return altered(trace, Shard, {}, ids=lambda event: tuple((id_ + 1) % 12 for id_ in event.ids))


def test_another_order_on_one_worker_is_no_excuse() -> None:
    """Some samplers cut other batches for each number of workers; loaders can have one order."""
    plain = own(2), reordered(own(1))
    assert "draws different samples" in judged(*plain).reason
    two, one = (planned(own(size), "common_order") for size in (2, 1))
    held = judged(*plain, two, one)
    assert held.verdict is Verdict.HELD, held
    assert "compared with one order of samples for any number of workers" in held.notes
    wrong = planned(off(own(2), times=2.0), "common_order")
    assert "with one order of samples" in traces.broken(judged(*plain, wrong, one)).message
    still = judged(*plain, two, planned(reordered(own(1)), "common_order"))
    assert "draws different samples" in still.reason, "not fetched by a loader"
    again = traces.altered(own(2), Shard, {"step": 0, "rank": 1, "shard": 3}, ids=(0,))
    shared = traces.altered(own(2), Shard, {"step": 0}, ids=(0,))
    for run, verdict in ((again, Verdict.HELD), (shared, Verdict.INCONCLUSIVE)):
        finding = judged(run, reordered(own(1)), two, one)
        assert finding.verdict is verdict, "with replacement, and ranks that share a batch"


def test_draws_that_could_not_be_made_alike() -> None:
    """A generator that still moves by rank keeps the question open."""
    assert "draws random numbers in the model's forward pass" in undecided(
        judged(*MASKED, numbered(by_rank(off(own(2), by=0.3))), numbered(by_rank(own(1))))
    )


def test_a_control_that_leaves_no_gradient_compares_nothing() -> None:
    """Advantages over answers that are alike are zero, in any trainer; the next control is tried.

    What is left may also be their rounding.
    """
    for times in (0.0, 1e-9):
        nothing = [numbered(shrunk(own(size), times)) for size in (2, 1)]
        assert judged(*MASKED, *nothing).verdict is Verdict.INCONCLUSIVE
        ordered = [planned(own(size), "common_order") for size in (2, 1)]
        held = judged(*MASKED, *nothing, *ordered)
        assert held.verdict is Verdict.HELD
        assert "compared with one order of samples for any number of workers" in held.notes
    mirrored_ones = [mirrored(own(1)), alone(own(1)), repeated(own(1))]
    undecided(judged(*COUPLED, *map(traces.without_gradients, mirrored_ones)))


def shrunk(trace: Trace, times: float) -> Trace:
    """Return a run whose gradients are so many times as large."""
    return altered(trace, Shard | Update, {}, gradient=lambda event: _times(event.gradient, times))


def _times(tensors: Tensors, times: float) -> Tensors:
    for name in tensors:
        tensors = changed(tensors, name, times=times)
    return tensors


def test_plain_runs_that_can_be_compared_are() -> None:
    """Controlled runs decide nothing that the plain ones do."""
    wrong = numbered(off(own(2), times=2.0)), numbered(own(1))
    assert judged(own(2), own(1), *wrong).verdict is Verdict.HELD
    traces.broken(judged(off(own(2), times=2.0), own(1), numbered(own(2)), numbered(own(1))))


def test_a_training_that_only_the_control_breaks() -> None:
    """NaNs that come from equal numbers are no finding."""
    spoiled = traces.altered(own(2), Update, {"step": 3}, finite=False)
    undecided(judged(*MASKED, numbered(spoiled), numbered(own(1))))


# --- mirrored ranks -------------------------------------------------------------------------------
UNCOUPLED = own(2), coupled(own(1), 0, loss=99.0)
COUPLED = with_other_loss(UNCOUPLED[0]), UNCOUPLED[1]


def mirrored(share: Trace) -> Trace:
    """Return a run on two workers that both train as `share` does."""

    def doubled(event: Event) -> list[Event]:
        twin: Any = event
        return [event, replace(twin, rank=1)] if hasattr(event, "rank") else [event]

    events = tuple(one for event in share.events for one in doubled(event))
    scenario = share.scenario.with_(world_size=2)
    return planned(replace(share, scenario=scenario, events=events), "mirrored_ranks", "2")


def alone(share: Trace) -> Trace:
    return planned(share, "mirrored_ranks", "2")


def repeated(share: Trace) -> Trace:
    """Return the run of one worker on two copies of each share."""
    return planned(
        altered(share, Shard, {}, ids=lambda event: event.ids * 2), "repeated_share", "2"
    )


def test_ranks_with_one_share_train_as_one_worker_on_it() -> None:
    """By either meaning of a loss that couples samples: those of a rank, or those of all."""
    assert judged(*COUPLED).verdict is Verdict.INCONCLUSIVE
    by_one = judged(*COUPLED, mirrored(own(1)), alone(own(1)))
    assert by_one.verdict is Verdict.HELD, by_one
    assert "compared with the same samples on all ranks" in by_one.notes
    other = alone(off(own(1), by=0.7))
    by_all = judged(*COUPLED, mirrored(own(1)), other, repeated(own(1)))
    assert by_all.verdict is Verdict.HELD, by_all


def test_equal_ranks_say_nothing_of_a_loss_that_couples_no_samples() -> None:
    """What each rank does to its own gradient (clipping by value) is alike for equal ranks."""
    shares = mirrored(own(1)), alone(own(1))
    assert judged(*UNCOUPLED, *shares).verdict is Verdict.INCONCLUSIVE
    assert judged(*COUPLED, *shares).verdict is Verdict.HELD


def test_a_term_that_counts_once_for_each_rank() -> None:
    """Ranks that train as neither does are wrong, if both meanings are one."""
    wrong = mirrored(off(own(1), by=0.7))
    place = traces.broken(judged(*COUPLED, wrong, alone(own(1)), repeated(own(1))))
    assert (place.step, place.tensor) == (0, NAME)
    assert "a term of the loss may count once for each rank: " in place.message
    undecided(judged(*COUPLED, wrong, alone(own(1)), repeated(off(own(1), by=0.3))))
    assert judged(*COUPLED, wrong, alone(own(1))).verdict is Verdict.INCONCLUSIVE, "not run"


def test_ranks_that_were_not_mirrored() -> None:
    """A script that cuts its batches by hand gives each rank a share of its own."""
    cut = planned(own(2), "mirrored_ranks", "2")
    assert "may not be a sum over its samples" in undecided(judged(*COUPLED, cut, alone(own(1))))


@pytest.mark.parametrize("shards", [0, 3])
def test_a_run_without_shards_has_no_share(shards: int) -> None:
    """Nothing is compared if no micro-batches were recorded, or of one rank only."""
    run = traces.without(mirrored(own(1)), Shard, **({} if not shards else {"rank": 1}))
    undecided(judged(*COUPLED, run, alone(own(1))))


OF_SEVERAL = ("optimizer_state", "randomness", "recovery", "replica_identity")


def of_one_worker(world_size: int = 1, **seen: str) -> Trace:
    return traces.observed(
        scenario(world_size=world_size, optimizer="momentum"),
        **{"starts": "one", "sample_ids": "content", **seen},
    )


@pytest.mark.parametrize("check", OF_SEVERAL)
def test_a_clause_on_several_workers_does_not_apply_to_a_command_that_starts_one(
    check: str,
) -> None:
    """It does where the command can be told to start more, and where a run had more."""
    assert (
        CHECKS[check]
        .absent([of_one_worker()])
        .startswith("the command starts one worker, so nothing")
    )
    assert CHECKS[check].absent([of_one_worker(starts="")]) == ""
    assert CHECKS[check].absent([of_one_worker(), of_one_worker(world_size=2)]) == ""


def test_streams_of_one_worker_are_judged_if_it_draws() -> None:
    """Dropout and a shuffled data set have to differ by step and by epoch on one worker, too."""
    dropped = traces.observed(scenario(world_size=1, dropout=0.5), starts="one")
    assert CHECKS["randomness"].absent([dropped]) == ""
    assert CHECKS["randomness"].absent([of_one_worker(sample_ids="known")]) == ""


def test_copies_of_a_tied_tensor_are_judged_on_one_worker() -> None:
    """They are compared within a rank."""
    ran = of_one_worker()
    first, second, *_ = next(event for event in ran.events if hasattr(event, "weights")).weights
    noticed = Noticed(step=0, rank=0, shared=((first, second),))
    tied = traces.hand_written(noticed, *ran.events[:-1], subject=ran.scenario)
    assert CHECKS["replica_identity"].absent([traces.was(tied, starts="one")]) == ""
