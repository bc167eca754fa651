"""F-DP-003 on traces broken by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.evidence.needs import REPEATED, Runs
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import End, Halt, Injected, Saved, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.traces import altered, falsified, held, left_open, scenario, values, without

NAN = Fault(kind="non_finite_gradient", step=2, rank=1, value="nan")
CALM = scenario()
POISONED = scenario(faults=(NAN,))


def swallowed() -> Trace:
    """Return a run that goes on after its NaN: a calm run's events, and the fault."""
    calm, fault = traces.run(CALM), traces.run(POISONED).of(Injected)[0]
    return replace(calm, scenario=POISONED, events=(*calm.events[:-1], fault, End(status="halted")))


def test_training_that_goes_on_is_falsified() -> None:
    """An update in the step of a NaN is falsified, with the NaN's place."""
    found = falsified("finiteness", swallowed())
    assert (found.step, found.rank) == (2, 1)
    assert "updated in step 2" in found.message


def test_a_micro_batch_that_was_skipped_is_not_known() -> None:
    """A user's script may go on rightly: what it skips is unknown if its samples are."""
    trace = swallowed()
    subject = trace.scenario.with_(workload="own", system="command")
    known = replace(trace, scenario=subject)
    known = altered(known, Shard, {"step": 2, "rank": 1}, ids=(10,))
    falsified("finiteness", known)
    own = altered(known, Shard, {"step": 2, "rank": 1}, ids=(), unknown="a stream")
    assert "the micro-batch of step 2 in which a value was planted is not" in left_open(
        "finiteness", own
    )
    update = traces.one(own, Update, step=2, rank=1)
    weights = {name: replace(one, digest="0" * 32) for name, one in update.weights.items()}
    alone = altered(own, Update, {"step": 2, "rank": 1}, weights=weights)
    falsified("finiteness", alone)
    without_rank = without(own, Shard, step=2, rank=1)
    falsified("finiteness", without_rank)


def test_a_gradient_that_no_optimizer_applies() -> None:
    """Of optimizers that take turns, with `--auto`, the poisoned gradient may be thrown away.

    A record that has no gradients of passes at all is that of a sharded model.
    """
    trace = traces.was(swallowed(), losses="backward")
    subject = trace.scenario.with_(workload="own", system="command")
    turns = altered(replace(trace, scenario=subject), Shard, {"step": 2}, gradient={})
    turns = altered(turns, Shard, {"step": 2, "rank": 1}, finite=False)
    assert "may be one that no optimizer applies, since several take turns" in left_open(
        "finiteness", turns
    )
    sharded = altered(turns, Shard, {}, gradient={})
    assert "take turns" not in traces.judge("finiteness", [sharded]).reason
    halted = without(turns, Update, step=2)
    assert "take turns" not in traces.judge("finiteness", [halted]).reason


def test_one_of_two_optimizers_skips_its_part_of_a_step() -> None:
    """As with a GradScaler; but not if it skips it on some ranks only, or if a NaN was applied."""
    one, other = {"a": values(1.0, 2.0)}, {"b": values(3.0, 4.0)}
    starts = [Start(step=0, rank=rank, weights={**one, **other}) for rank in range(2)]

    def made(applied: dict[int, dict[str, Any]], **fields: Any) -> Trace:
        shards = [
            event
            for rank in range(2)
            for event in (
                traces.shard(0, rank, shard=0, ids=(rank,), gradient=one, finite=bool(rank)),
                traces.shard(0, rank, shard=1, ids=(2 + rank,), gradient=other),
            )
        ]
        steps = [
            traces.update(0, rank, weights=other, gradient=gradient, **fields)
            for rank, gradient in applied.items()
        ]
        subject = scenario(system="command", workload="own", world_size=2, accumulation=2)
        return traces.hand_written(*starts, *shards, *steps, subject=subject)

    skipped = made({0: other, 1: other})
    finding = held("finiteness", skipped)
    assert any("no optimizer applied the gradient" in note for note in finding.notes)
    planted = Injected(fault=NAN.to_dict(), step=0, rank=0, shard=0)
    held("finiteness", traces.also(skipped, planted))
    falsified("finiteness", made({0: other, 1: {**one, **other}}))
    falsified("finiteness", made({0: {**one, **other}, 1: {**one, **other}}))
    falsified("finiteness", made({0: other, 1: other}, finite=False))


@pytest.mark.parametrize(
    ("is_changed", "verdict"), [(False, Verdict.INCONCLUSIVE), (True, Verdict.FALSIFIED)]
)
def test_a_value_in_a_pass_that_trains_nothing(is_changed: bool, verdict: Verdict) -> None:
    """The gradient of a probe is cleared: all ranks have the weights of a run without the value."""
    own = {"workload": "own", "system": "command"}
    struck = replace(swallowed(), scenario=POISONED.with_(**own))
    plain = [replace(traces.run(CALM), scenario=CALM.with_(repeat=n, **own)) for n in (0, 1)]
    update = traces.one(struck, Update, step=2, rank=0)
    name = next(iter(update.weights))
    if is_changed:
        weights = {**update.weights, name: replace(update.weights[name], digest="0" * 32)}
        struck = altered(struck, Update, {"step": 2, "rank": 0}, weights=weights)
    finding = traces.judge("finiteness", Runs(struck, witnesses={REPEATED: tuple(plain)}))
    assert finding.verdict is verdict
    assert ("trains nothing" in finding.reason) is not is_changed


def test_a_nan_without_a_halt() -> None:
    """A run that stops without a Halt does not name its culprit, and is falsified."""
    found = falsified("finiteness", without(traces.run(POISONED), Halt))
    assert (found.step, found.rank) == (2, 1)
    assert "training went on" in found.message


@pytest.mark.parametrize("wrong", [{"step": 1}, {"rank": 0}, {"shard": 4}])
def test_the_halt_names_the_place(wrong: dict[str, int | None]) -> None:
    """A halt that names another step, worker or shard is falsified."""
    found = falsified("finiteness", altered(traces.run(POISONED), Halt, {}, **wrong))
    assert "a different place" in found.message
    assert (found.step, found.rank) == (2, 1)


@pytest.mark.parametrize(
    ("unnamed", "missing"),
    [
        ({"rank": None}, "its rank"),
        ({"ids": ()}, "its sample ids"),
        ({"rank": None, "shard": None, "ids": ()}, "its rank, shard, sample ids"),
    ],
)
def test_what_the_halt_does_not_name_is_missing(unnamed: dict[str, Any], missing: str) -> None:
    """Fields that a halt does not name are missing, and the reason lists them."""
    trace = traces.run(scenario(faults=(replace(NAN, step=1),)))
    assert (
        left_open("finiteness", altered(trace, Halt, {}, **unnamed))
        == f"the halt in step 1 does not name {missing}: record them in it"
    )


def test_a_halt_that_names_half_a_wrong_place() -> None:
    """The part of the place that a halt names must be right."""
    trace = altered(traces.run(POISONED), Halt, {}, rank=None, shard=4)
    assert "a different place" in falsified("finiteness", trace).message


def test_the_halt_names_the_tensor() -> None:
    """The halt must name the planted fault's tensor, by default the first one."""
    named = Fault(
        kind="non_finite_gradient", step=2, rank=1, shard=2, tensor="hidden2.bias", value="nan"
    )
    for fault, right in ((NAN, "hidden1.weight"), (named, "hidden2.bias")):
        trace = traces.run(scenario(faults=(fault,)))
        held("finiteness", trace)
        wrong = altered(trace, Halt, {}, tensor="output.weight")
        found = falsified("finiteness", wrong)
        assert (found.step, found.rank, found.tensor) == (2, 1, right)
        assert (found.expected, found.got) == (right, "output.weight")
    unknown = without(wrong, Start)
    assert falsified("finiteness", unknown).tensor == "hidden2.bias"
    unplanted = without(wrong, Injected)
    held("finiteness", unplanted)


def test_the_halt_names_the_samples() -> None:
    """The halt must name the samples of the bad shard."""
    found = falsified("finiteness", altered(traces.run(POISONED), Halt, {}, ids=(99,)))
    assert "different samples" in found.message
    assert found.got == "(99,)"


def test_of_several_bad_shards_any_may_be_named() -> None:
    """If several shards overflow at once, the halt may name any of them."""
    trace = altered(traces.run(POISONED), Shard, {"step": 2}, finite=False)
    held("finiteness", trace)


def test_no_checkpoint_after_the_value() -> None:
    """A checkpoint written after a NaN is falsified."""
    trace = traces.run(POISONED)
    late = Saved(step=3, rank=0, weights={})
    found = falsified("finiteness", replace(trace, events=(*trace.events, late)))
    assert "checkpoint" in found.message


def test_a_halt_without_cause() -> None:
    """A halt of a run with finite shards is falsified, with the place it names."""
    calm = traces.run(CALM)
    halt = Halt(step=3, reason="nerves", rank=2, shard=4, tensor="output.bias")
    found = falsified("finiteness", replace(calm, events=(halt, *calm.events)))
    assert (found.step, found.rank, found.shard, found.tensor) == (3, 2, 4, "output.bias")
    assert "nerves" in found.message


@pytest.mark.parametrize(
    "wrong", [{"finite": False}, {"loss": math.nan}, {"grad_norm": math.inf}, {"loss": -math.inf}]
)
def test_finite_shards_give_finite_updates(wrong: dict[str, float]) -> None:
    """An overflow in the sum or the step of finite shards is found, with step and rank."""
    trace = altered(traces.run(CALM), Update, {"step": 4, "rank": 2}, **wrong)
    found = falsified("finiteness", trace)
    assert (found.step, found.rank) == (4, 2)


BAD = values(1.0, math.nan)


@pytest.mark.parametrize("lie", [{"loss_sum": math.nan}, {"gradient": {"w": BAD}}])
def test_a_shard_whose_flag_lies(lie: dict[str, Any]) -> None:
    """A non-finite loss or gradient counts, even if the shard's flag says finite."""
    trace = altered(traces.run(CALM), Shard, {"step": 3, "shard": 1}, **lie)
    found = falsified("finiteness", trace)
    assert (found.step, found.shard) == (3, 1)


@pytest.mark.parametrize("part", ["weights", "gradient"])
def test_an_update_whose_flag_lies(part: str) -> None:
    """The first recorded NaN of an update is named, whatever its flag says."""
    tensors = {"v": values(1.0), "w": BAD}
    trace = altered(traces.run(CALM), Update, {"step": 4, "rank": 2}, **{part: tensors})
    found = falsified("finiteness", trace)
    assert (found.step, found.rank, found.tensor, found.element) == (4, 2, "w", 1)


def test_an_update_before_the_fault_must_be_finite() -> None:
    """A non-finite update before the halt is falsified."""
    trace = altered(traces.run(POISONED), Update, {"step": 1, "rank": 0}, loss=math.inf)
    assert falsified("finiteness", trace).step == 1


def test_unknown_norms_are_no_alarm() -> None:
    """A trainer need not record its gradient norm."""
    trace = altered(traces.run(CALM), Update, {}, grad_norm=None)
    held("finiteness", trace)


@pytest.mark.parametrize("kind", ["non_finite_gradient", "non_finite_loss"])
@pytest.mark.parametrize("system", ["reference", "textbook"])
def test_halts_at_the_fault_hold(kind: str, system: str) -> None:
    """Both trainers halt at the fault, also on a worker without samples in that step."""
    fault = Fault(kind=kind, step=2, rank=2, value="inf")
    trace = traces.run(scenario(system=system, faults=(fault,)))
    assert trace.of(Injected)
    held("finiteness", trace)


def test_an_unknown_fault_is_no_culprit() -> None:
    """A fault record without a kind, from a foreign trainer, is ignored."""
    trace = traces.run(CALM)
    odd = Injected(fault={"what": "a meteorite"})
    held("finiteness", replace(trace, events=(odd, *trace.events)))


def test_a_halt_in_a_step_without_shards() -> None:
    """A halt in a step without shards is inconclusive, and the reason says what to record."""
    trace = traces.run(POISONED)
    bare = replace(trace, events=tuple(e for e in trace.events if not isinstance(e, Injected)))
    bare = without(replace(bare, scenario=CALM), Shard, step=2)
    assert "with finite=False for the one at fault" in left_open("finiteness", bare)


def halting(**named: Any) -> Trace:
    """Return a calm run that halts in step 2 and names `named`."""
    calm = traces.run(CALM)
    kept = [e for e in calm.events if getattr(e, "step", 0) <= 2]
    kept = [e for e in kept if not (isinstance(e, Update) and e.step == 2)]
    halt = Halt(step=2, reason="NaN", **named)
    return replace(calm, events=(*kept[:-1], halt, End(status="halted")))


def test_a_halt_of_a_rank_that_recorded_no_shard() -> None:
    """A halt is inconclusive if its rank recorded no shard, or, without a rank, any worker."""
    for trace, unknown in (
        (without(halting(rank=1), Shard, step=2, rank=1), "no shard of rank 1 was recorded"),
        (without(halting(), Shard, step=2, rank=1), "rank 1 recorded no shard"),
        (without(without(halting(), Shard, step=2, rank=1), Start), "rank 1 recorded no shard"),
        (halting(rank=1, shard=9), "no shard of rank 1 was recorded"),
    ):
        assert f"the run halted in step 2: {unknown}: record" in left_open("finiteness", trace)
    for trace in (halting(rank=1), halting()):
        assert "every shard was finite" in falsified("finiteness", trace).message


def test_shards_that_one_rank_did_not_record() -> None:
    """If one rank recorded no shards, it is unknown whether its gradients were finite."""
    for bare in (
        without(traces.run(CALM), Shard, rank=1),
        without(traces.run(CALM), Shard, step=3, rank=2),
    ):
        assert "record a Shard with" in left_open("finiteness", bare)


def test_updates_without_shards() -> None:
    """Finite updates without shards are inconclusive: a gradient may have lost its NaN."""
    assert "record a Shard with" in left_open("finiteness", without(traces.run(CALM), Shard))
