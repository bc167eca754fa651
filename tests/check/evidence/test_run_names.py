"""Handwritten runs with a turned knob, compared with the usual run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.check.evidence import run_names
from entrenar_py.check.harness import companions
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Event, Start, Trace, Update, record_tensor
from entrenar_py.shared.verdict import Verdict
from tests import traces
from tests.traces import broken, falsified, held, left_open, scenario

IDS = (3, 0, 2, 1)
USUAL = scenario(
    system="command",
    workload="own",
    world_size=1,
    num_shards=1,
    num_samples=4,
    batch_size=4,
    num_steps=2,
)
SLOPE = np.random.default_rng(0).normal(size=24).astype(np.float32)
VALUES = {"accumulation": "2", "clip": "0.5", "loss_scale": "1024", "permute": "1"}
UNTURNED = {"accumulation": "1", "clip": "1e9", "loss_scale": "1", "permute": "0"}


def run(
    knob: str = "",
    *,
    factor: float = 1.0,
    ids: Sequence[int] = IDS,
    micro_batches: int = 1,
    local: float = 1.0,
    slope: np.ndarray[Any, Any] = SLOPE,
    dtype: Any = np.float32,
) -> Trace:
    """Return two steps with the gradient `slope` times `factor`, and `local` times it in shards."""
    subject = USUAL
    if knob:
        changes = {"accumulation": micro_batches, "num_shards": micro_batches}
        changed = USUAL.with_(**changes, batch_size=len(ids))
        subject = run_names.with_turned(
            changed, knob=knob, value=VALUES[knob], usual=UNTURNED[knob]
        )
    weights = {"w": record_tensor(np.ones(24, np.float32), values=True)}
    events: list[Event] = [Start(step=0, rank=0, weights=weights, trainable=("w",))]
    own = (local * slope).astype(dtype).astype(np.float32)
    for step in range(2):
        events += [
            traces.shard(
                step,
                epoch=step,
                shard=number,
                ids=tuple(ids[number::micro_batches]),
                loss_sum=len(ids) / micro_batches,
                weight=len(ids) / micro_batches,
                gradient={"w": record_tensor(own, values=True)},
            )
            for number in range(micro_batches)
        ]
        gradient = (factor * slope).astype(np.float32)
        events.append(
            traces.update(
                step,
                loss=None,
                weight=4.0,
                learning_rate=USUAL.learning_rate,
                weights=weights,
                gradient={"w": record_tensor(gradient, values=True)},
            )
        )
    return traces.was(traces.hand_written(*events, subject=subject), clipping="other")


def test_the_usual_run_is_known() -> None:
    """The usual run's scenario follows from the turned one, also after storing it."""
    turned = run("accumulation", micro_batches=2).scenario
    stored = Scenario.from_dict(json.loads(json.dumps(turned.to_dict())))
    (need,) = CHECKS["step_rule"].needs
    scenarios = {"usual": USUAL, "other": USUAL.with_(seed=7), "turned": stored}
    assert companions.among((need,), "turned", scenarios).base == "turned"
    runs = companions.among(CHECKS["parity"].needs, "turned", scenarios)
    assert (runs.base, [*runs.turned()]) == ("usual", [("accumulation", "turned")])
    assert [*companions.among(CHECKS["parity"].needs, "usual", scenarios)] == ["usual"]


@pytest.mark.parametrize("check", ["parity", "weighting"])
@pytest.mark.parametrize(
    "turned",
    [
        run("accumulation", micro_batches=2, local=0.5),
        run("loss_scale", local=1024.0),
        run("permute", ids=IDS[::-1]),
    ],
)
def test_a_turn_that_changes_nothing(check: str, turned: Trace) -> None:
    """A knob that changes nothing holds, and a note says what was compared."""
    finding = held(check, turned, run())
    assert any(note.startswith("compared ") for note in finding.notes)


@pytest.mark.parametrize("factor", [2.0, 0.5, 0.999])
@pytest.mark.parametrize("knob", ["accumulation", "loss_scale", "permute"])
def test_another_gradient(knob: str, factor: float) -> None:
    """A changed gradient is found at its place, and the message names the knob."""
    turned = run(knob, factor=factor, micro_batches=2, local=1024.0, ids=IDS[::-1])
    found = falsified("parity", turned, run())
    assert (found.step, found.rank, found.tensor) == (0, 0, "w")
    words = f"with {knob}={VALUES[knob]}: averaged gradient is not that of {knob}="
    assert found.message.startswith(words)


def test_a_step_for_every_micro_batch() -> None:
    """Half of the samples in as many micro-batches: the optimizer steps too often."""
    found = falsified("parity", run("accumulation", ids=IDS[:2]), run())
    assert found.step == 0
    assert "the optimizer steps after every micro-batch" in found.message


@pytest.mark.parametrize(
    ("turned", "reason"),
    [
        (run("accumulation"), "steps have as many micro-batches as the run with accumulation=1"),
        (run("accumulation", micro_batches=2, ids=(0, 1)), "keep the global batch"),
        (run("loss_scale"), "the loss was not scaled"),
        (run("permute"), "nothing was permuted"),
        (run("clip", factor=0.5, ids=(0, 1)), "step 0 draws different samples"),
        (run("clip", factor=1.0, slope=SLOPE / 100), ""),
    ],
)
def test_a_knob_that_does_something_else(turned: Trace, reason: str) -> None:
    """A knob without effect, or with another one, is inconclusive, with the difference."""
    usual = run(slope=SLOPE / 100) if not reason else run()
    assert (reason or "which needs no clipping") in left_open("parity", turned, usual)


def test_without_the_usual_run() -> None:
    """Without the usual run there is nothing to compare with."""
    assert "no run with loss_scale=1 to compare with" in left_open(
        "parity", run("loss_scale", local=1024.0)
    )


@pytest.mark.parametrize("check", ["parity", "step_rule"])
def test_clipped_as_it_should_be(check: str) -> None:
    """A gradient of the same direction and of the limit's norm holds."""
    factor = 0.5 / (float(np.linalg.norm(SLOPE)) + 1e-6)
    finding = traces.judge(check, [run("clip", factor=factor), run()])
    assert "with clip" not in finding.reason
    assert finding.compared > 0


@pytest.mark.parametrize(
    ("check", "longer", "allowed"), [("parity", 1.001, True), ("step_rule", 1.01, False)]
)
def test_a_norm_in_float32_of_a_large_tensor(check: str, longer: float, allowed: bool) -> None:
    """A norm of 2**19 elements is off by 0.2 % at most; clipping by it holds."""
    slope = np.tile(SLOPE[:16], 2**15)
    factor = longer * 0.5 / float(np.linalg.norm(slope))
    finding = traces.judge(check, [run("clip", factor=factor, slope=slope), run(slope=slope)])
    assert ("with clip" not in finding.reason) is allowed


@pytest.mark.parametrize("longer", [1.00013, 0.9999])
def test_the_direction_of_a_large_tensor(longer: float) -> None:
    """Its length may be off by the rounding of a norm. Its elements may not, by more than usual."""
    slope = np.tile(SLOPE[:16], 2**15)
    other = slope * np.tile(np.array([1.001, 0.999], np.float32), 2**18)
    factor = longer * 0.5 / float(np.linalg.norm(slope))
    right, wrong = (run("clip", factor=factor, slope=one) for one in (slope, other))
    assert "with clip" not in traces.judge("parity", [right, run(slope=slope)]).reason
    finding = traces.judge("parity", [wrong, run(slope=slope)])
    assert "clipped to this norm: w is off by 0.00085" in broken(finding).message


def test_clipped_by_a_norm_of_more_than_is_recorded() -> None:
    """A norm counts gradients that aren't recorded, of parameters that move all the same."""
    seen = np.where(np.arange(24) < 12, SLOPE, 0).astype(np.float32)
    factor = 0.5 / float(np.linalg.norm(SLOPE))
    runs = [run("clip", factor=factor, slope=seen), run(slope=seen)]
    assert "clipped to this norm" in falsified("parity", *runs).message
    v = [{"v": record_tensor(np.full(2, x, np.float32), values=True)} for x in (0, 1)]

    def moved(trainable: tuple[str, ...]) -> list[Trace]:
        more = []
        for one in runs:
            start = one.of(Start)[0]
            begun = traces.altered(
                one,
                Start,
                {},
                weights={**start.weights, **v[0]},
                trainable=(*start.trainable, *trainable),
            )
            more.append(traces.altered(begun, Update, {}, weights={**start.weights, **v[1]}))
        return more

    assert "norm of the gradient is unknown: the gradient of v was not recorded" in left_open(
        "parity", *moved(("v",))
    )
    # A moving average has no gradient to count.
    average = traces.judge("parity", moved(()))
    assert "clipped to this norm" in broken(average).message


@pytest.mark.parametrize(("applied", "is_clipped"), [(0.5, True), (1.0, False)])
def test_a_gradient_that_was_reported_before_clipping(applied: float, is_clipped: bool) -> None:
    """After `obs.reduced()` the recorded gradient is the unclipped one; both norms are known."""
    whole = float(np.linalg.norm(SLOPE))
    turned = run("clip")
    norms = {"grad_norm": whole, "applied_norm": min(applied, whole)}
    reduced = traces.altered(turned, Update, {}, **norms)
    finding = traces.judge("parity", [reduced, run()])
    assert ("with clip=0.5: the norm of the applied" in finding.reason) is not is_clipped


@pytest.mark.parametrize("check", ["parity", "step_rule"])
@pytest.mark.parametrize(
    ("factor", "bent", "words"),
    [
        (1.0, False, "the norm of the applied gradient is larger than the limit"),
        (0.4, False, "clipped to this norm"),
        (0.5, True, "clipped to this norm"),
    ],
)
def test_clipped_otherwise(check: str, factor: float, bent: bool, words: str) -> None:
    """A gradient not clipped, clipped too far, or turned to another direction is falsified."""
    slope = np.where(np.arange(24) < 12, 2 * SLOPE, SLOPE) if bent else SLOPE
    turned = run("clip", factor=factor / float(np.linalg.norm(slope)), slope=slope)
    found = falsified(check, turned, run())
    assert found.step == 0
    assert words in found.message


def test_sixteen_bits_are_given_their_rounding() -> None:
    """Float16 results may differ by some float16 roundings, but not by a factor."""
    half: dict[str, Any] = {"slope": SLOPE, "dtype": np.float16}
    held("parity", run("permute", ids=IDS[::-1], factor=0.999, **half), run(**half))
    far = traces.judge("parity", [run("permute", ids=IDS[::-1], factor=0.9, **half), run(**half)])
    assert far.verdict is Verdict.FALSIFIED
