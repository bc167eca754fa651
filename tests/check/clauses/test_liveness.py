"""F-TI-004 on handwritten traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from entrenar_py.shared.scenario import OBSERVED
from entrenar_py.shared.trace import Declared, Ruled, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.traces import (
    altered,
    broken,
    falsified,
    held,
    judge,
    left_open,
    scenario,
    values,
    without,
)


def moving(
    weights: Sequence[float],
    gradients: Sequence[float] | None = None,
    frozen: Sequence[float] | None = None,
    learning_rate: float = 0.1,
) -> Trace:
    """Return a run of one worker whose only weight takes `weights`, the first before step 0."""
    frozen = frozen or [5.0] * len(weights)
    events = traces.reaching(
        [{"w": values(w), "e": values(e)} for w, e in zip(weights, frozen, strict=True)],
        trainable=("w",),
        frozen=("e",),
        learning_rate=learning_rate,
        gradient=lambda step: {} if gradients is None else {"w": values(gradients[step])},
    )
    return traces.hand_written(*events)


def passes() -> list[Shard]:
    """Return three steps' micro-batches, which gave the weight a gradient."""
    return [traces.shard(step, ids=(0,), gradient={"w": values(0.5)}) for step in range(3)]


def test_a_weight_that_never_moves() -> None:
    """A trainable tensor that the optimizer does not hold never changes, and is named."""
    trace = moving([1, 1, 1, 1, 1], gradients=[0.5] * 4)
    found = falsified("liveness", trace)
    assert (found.step, found.rank, found.tensor) == (2, 0, "w")
    assert found.got == values(1).digest


def test_a_weight_without_elements() -> None:
    """Nothing of it can move."""
    still = moving([1, 1, 1, 1, 1], gradients=[0.5] * 4)
    started = traces.altered(still, Start, {}, shapes={"w": (0, 3)})
    assert judge("liveness", [started]).verdict is not Verdict.FALSIFIED


def test_steps_that_a_scaler_skips() -> None:
    """They show nothing of a weight; a step with a pass's gradient would have moved it."""
    still = moving([1, 1, 1, 1])
    own = replace(still, scenario=still.scenario.with_(workload="own"))
    assert "none of 3 steps changed any weight" in left_open("liveness", own)
    falsified("liveness", traces.also(own, *passes()))


@pytest.mark.parametrize(("names", "is_told"), [(("e",), True), (("e", "w"), False), ((), False)])
def test_a_weight_that_is_in_no_group(names: tuple[str, ...], is_told: bool) -> None:
    """That no optimizer has it is the cause, if it is known what they have."""
    trace = moving([1, 1, 1, 1, 1], gradients=[0.5] * 4)
    rule = Ruled(step=0, rank=0, rule="SGD", names=names, constants={})
    trace = replace(trace, events=(rule, *trace.events))
    message = falsified("liveness", trace).message
    assert ("no optimizer has it in a group" in message) == is_told


def of_own(**weights: Sequence[float]) -> Trace:
    """Return a run whose weights a class of the script's own steps. All have gradients."""
    by_step = [
        dict(zip(weights, map(values, some), strict=True))
        for some in zip(*weights.values(), strict=True)
    ]
    names = (*weights,)
    rule = Ruled(step=0, rank=0, rule="", names=names, constants={}, derived=True)
    gradient = dict.fromkeys(names, values(0.5))
    steps = traces.reaching(by_step, trainable=names, gradient=gradient)
    return traces.hand_written(rule, *steps)


def test_tensors_that_an_own_rule_steps_in_turn() -> None:
    """One that moves later is alive. One whose turn did not come is open, and not dead."""
    late = of_own(u=[1, 2, 2, 2, 2], v=[1, 1, 2, 3, 3], w=[1, 1, 1, 1, 2])
    traces.held("liveness", late)
    never = of_own(u=[1, 2, 2, 2, 2], v=[1, 1, 2, 3, 4], w=[1, 1, 1, 1, 1])
    assert "its turn did not come; run longer" in left_open("liveness", never)


def test_a_tensor_that_an_own_rule_forgets() -> None:
    """The others have no turns: they move in every step that moves any."""
    forgetful = of_own(u=[1, 2, 2, 3, 4], v=[1, 2, 2, 3, 3], w=[1] * 5)
    assert falsified("liveness", forgetful).tensor == "w"


def test_a_rate_of_its_own() -> None:
    """A tensor whose parameter group has rate zero need not change; others must."""
    trace = moving([1, 1, 1, 1, 1], gradients=[0.5] * 4)
    assert (
        traces.judge("liveness", [altered(trace, Update, {}, rates={"w": 0.0})]).counterexample
        is None
    )


def test_a_gradient_that_has_no_effect() -> None:
    """A weight kept in bfloat16 stays unchanged under updates that float32 would show."""
    trace = moving([1, 1, 1, 1], gradients=[0.0, 1e-3, 0.0])
    assert falsified("liveness", trace).tensor == "w"


@pytest.mark.parametrize(
    ("weights", "is_bfloat16"),
    [
        pytest.param([1.0] * 16, False, id="a norm's scale, still one"),
        pytest.param([0.1875] * 16, False, id="one number"),
        pytest.param([0.75 + n / 128 for n in range(16)], True, id="numbers of few bits"),
        pytest.param([0.75 + n / 2**20 for n in range(16)], False, id="float32"),
    ],
)
def test_the_precision_is_blamed_if_many_numbers_show_it(
    weights: list[float], is_bfloat16: bool
) -> None:
    """A float32 tensor that the optimizer doesn't hold may be constant, and is not bfloat16."""
    trace = moving([1] * 4, gradients=[0.5] * 3)
    fixed = {"w": values(*weights), "e": values(5.0)}
    trace = traces.altered(trace, Start, {}, weights=fixed)
    slope = {"w": values(*[0.5] * len(weights))}
    trace = traces.altered(trace, Update, {}, weights=fixed, gradient=slope)
    message = falsified("liveness", trace).message
    assert ("bfloat16" in message) is is_bfloat16


def test_a_frozen_tensor_that_moves() -> None:
    """A frozen tensor changed by weight decay is found in the step in which it changes."""
    found = falsified("liveness", moving([1, 2, 3, 4], frozen=[5, 5, 4, 4]))
    assert (found.step, found.rank, found.tensor, found.element) == (1, 0, "e", 0)
    assert "frozen" in found.message


SLOPES = [1e-3] * 3
RESTS = {
    "for two steps, like LoRA's A": moving([1, 1, 1, 2]),
    "below half an ulp": moving([1, 1, 1, 1], gradients=[0, 1e-7, 0]),
    "in too short a run": moving([1, 1, 1]),
    "at a learning rate of zero": moving([1, 1, 1, 1, 1], learning_rate=0.0),
    "as an expert that is used late": moving([1] * 5 + [2], gradients=[0, 0, 0, 0, 1]),
    "clipped to below half an ulp": altered(
        moving([1, 1, 1, 1], gradients=SLOPES), Update, {}, grad_norm=1e3, applied_norm=1e-2
    ),
    "where it was not recorded": altered(
        moving([1, 1, 1, 1, 5, 2], gradients=[0, 0, 0, 1, 1]),
        *(Update, {"step": 3}),
        weights={"e": values(5.0)},
    ),
}


@pytest.mark.parametrize("trace", RESTS.values(), ids=RESTS)
def test_a_tensor_may_rest(trace: Trace) -> None:
    """A tensor without a reason to change may stay unchanged."""
    held("liveness", trace)


def test_adapters_of_the_decoder_hold() -> None:
    """LoRA's A stays unchanged in step 0, while B is zero; its frozen weights always do."""
    subject = scenario(workload="decoder", num_samples=4, batch_size=4, num_steps=3)
    held("liveness", traces.run(subject))


RIGHT, RESTING = moving([1, 2, 3, 4]), moving([1, 1, 1, 1])
OTHER = {"other": values(1.0)}
# what a trace lacks, and what is said of it
UNKNOWN = {
    "a gradient but zeros": (
        moving([1] * 5, gradients=[0] * 4),
        "w never moved and its gradient was zero in all steps on rank",
    ),
    "a gradient but zeros in some steps, and none in others": (
        altered(moving([1] * 4, gradients=[0] * 3), Update, {"step": 1}, gradient=OTHER),
        "w never moved and its gradient was zero in the steps that had one on rank 0",
    ),
    "gradients": (
        RESTING,
        "w did not move, and its weight or gradient is unknown: record Start.weights and "
        "Update.gradient with values",
    ),
    "this tensor's gradient alone, as nothing used it": (
        altered(RESTING, Update, {}, gradient=OTHER),
        "w never moved and never had a gradient on rank 0",
    ),
    "weights in a step": (
        altered(RIGHT, Update, {"step": 1}, weights={}),
        "rank 0 recorded no weights of frozen e in step 1: record Start",
    ),
    "a frozen tensor's weights in a step, which may have changed there": (
        altered(RIGHT, Update, {"step": 2}, weights={"w": values(4.0)}),
        "rank 0 recorded no weights of frozen e in step 2: record",
    ),
    "a frozen tensor's weights": (
        altered(RIGHT, Start, {}, frozen=("e", "f")),
        "rank 0 recorded no weights of frozen f before the first step and later",
    ),
    "names of trainable tensors": (
        altered(RIGHT, Start, {}, trainable=()),
        "rank 0 named no trainable tensor before the first step: record Start.tr",
    ),
    "a Start": (
        without(RESTING, Start),
        "rank 0 made updates, but its first weights are unknown in step 0",
    ),
}


@pytest.mark.parametrize(("trace", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_left_open(trace: Trace, reason: str) -> None:
    """The reason says what was not recorded, or what its gradient was."""
    assert left_open("liveness", trace).startswith(reason)


@pytest.mark.parametrize("end", [1, 2])
def test_a_late_gradient_without_effect(end: float) -> None:
    """A gradient large enough to change its weight must do so, even if the weight changes later."""
    trace = moving([1, 1, 1, 1, 1, end], gradients=[0, 0, 0, 0.5, 0.5])
    assert falsified("liveness", trace).tensor == "w"


def test_one_rank_without_a_start() -> None:
    """The trainable tensors of a rank without a Start are unknown, whatever others declared."""
    reason = left_open("liveness", without(traces.run(scenario()), Start, rank=1))
    assert reason.startswith(
        "rank 1 made updates, but its first weights are unknown in step 0: record a Start"
    )


def test_a_gradient_that_never_came_to_the_optimizer() -> None:
    """If a shard had a gradient and no update has one, a bug cleared it."""
    trace = moving([1, 1, 1, 1])
    shards = passes()
    found = falsified("liveness", replace(trace, events=(*shards, *trace.events)))
    assert (found.step, found.tensor) == (2, "w")


@pytest.mark.parametrize(("size", "is_open"), [(1, False), (2, True)])
def test_a_gradient_that_a_script_takes_away_on_one_worker(size: int, is_open: bool) -> None:
    """It may do so for an epoch, which is longer there; the run on several is judged."""
    trace = moving([1, 1, 1, 1])
    trace = altered(trace, Update, {}, gradient={"e": values(0.5)})
    own = trace.scenario.with_(system=OBSERVED, workload="own", world_size=size)
    run = replace(trace, scenario=own, events=(*passes(), *trace.events))
    finding = traces.judge("liveness", [run])
    assert (finding.verdict is Verdict.FALSIFIED) is is_open, finding.reason


def test_what_the_script_declares() -> None:
    """A declaration counts, whatever requires a gradient; without one a change is inconclusive."""
    trace = moving([1, 2, 3, 4], frozen=[5, 5, 4, 4])
    begun, rest = trace.events[:1], trace.events[1:]

    def judged(frozen: tuple[str, ...] | None) -> Finding:
        declared = Declared(step=0, rank=0, frozen=frozen)
        return traces.judge("liveness", [replace(trace, events=(*begun, declared, *rest))])

    undeclared = judged(None)
    assert undeclared.verdict is Verdict.INCONCLUSIVE
    assert "e changed in step 1 without a gradient" in undeclared.reason
    assert "but were not declared" in undeclared.notes[0]
    assert broken(judged(("e",))).message == "a frozen tensor changed: e differs"
    assert judged(()).verdict is Verdict.HELD
    assert broken(judged(("e", "w"))).message.startswith("a frozen tensor changed (it requires a")


def test_a_tensor_that_should_train_and_requires_no_gradient() -> None:
    """What is not declared frozen must train: a tensor without a gradient is named."""
    trace = moving([1, 2, 3, 4])
    declared = Declared(step=0, rank=0, frozen=())
    events = (*trace.events[:1], declared, *trace.events[1:])
    found = falsified("liveness", replace(trace, events=events))
    assert (found.step, found.tensor) == (2, "e")
    assert "requires no gradient" in found.message


def named(
    weights: Sequence[Mapping[str, Sequence[float]]], shapes: Mapping[str, tuple[int, ...]]
) -> Trace:
    """Return a script's run whose tensors take `weights`; those named `a` or `b` are trained."""
    held = [{name: values(*numbers) for name, numbers in step.items()} for step in weights]
    trained = tuple(name for name in shapes if name.rpartition(".")[2] in ("a", "b", "fast"))
    events = traces.reaching(
        held,
        trainable=trained,
        frozen=tuple(name for name in shapes if name not in trained),
        shapes=shapes,
        loss=None,
        gradient={name: values(*[0.5] * len(weights[0][name])) for name in trained},
    )
    return traces.hand_written(*events, Declared(step=0, rank=0))


SHAPES = {"0.base": (2, 3), "0.a": (1, 3), "0.b": (2, 1), "1.base": (3,)}
ADAPTERS = [([0.5, 1.0, -1.0 + step], [1.0 + step, 2.0]) for step in range(5)]


def adapted(base: Sequence[Sequence[float]]) -> Trace:
    """Return a run of adapters, whose frozen weight takes the values of `base`."""
    steps = [
        {"0.base": weight, "0.a": first, "0.b": second, "1.base": [1.0, 2.0, 3.0]}
        for weight, (first, second) in zip(base, ADAPTERS, strict=True)
    ]
    return named(steps, SHAPES)


def merged(scale: float, after: int) -> list[float]:
    """Return a frozen weight of ones with the product of the adapters after a step."""
    first, second = ADAPTERS[after]
    return [1 + scale * row * column for row in second for column in first]


def test_adapters_that_are_merged_and_go_on() -> None:
    """A frozen weight that moves by the product of its adapters counts them twice from there."""
    base = [[1.0] * 6, [1.0] * 6, merged(0.5, 1), merged(0.5, 1), merged(0.5, 1)]
    found = falsified("liveness", adapted(base))
    assert (found.step, found.tensor) == (1, "0.base")
    assert "adapters were merged into the weights that they adapt" in found.message


@pytest.mark.parametrize("left", [0.0, 0.5])
def test_adapters_that_are_emptied_as_they_are_merged(left: float) -> None:
    """They may begin anew from a weight that holds what they have learned (ReLoRA)."""
    base = [[1.0] * 6, [1.0] * 6, merged(0.5, 1), merged(0.5, 1), merged(0.5, 1)]
    trace = traces.altered(adapted(base), Update, {"step": 1}, edited={"0.b": values(left, 0.0)})
    due = Verdict.INCONCLUSIVE if left else Verdict.HELD
    assert traces.judge("liveness", [trace]).verdict is due


def test_adapters_that_are_merged_and_taken_out_again() -> None:
    """A rounding is left of it, which is no move, and no multiple of their product."""
    base = [[1.0] * 6, [1.0] * 6, [1.0 + 2.0**-23] * 6, [1.0] * 6, [1.0] * 6]
    traces.held("liveness", adapted(base))


def test_a_frozen_weight_that_moves_otherwise_is_left_open() -> None:
    """A memory or a codebook may be written to on purpose."""
    base = [[1.0 + step * n for n in range(6)] for step in range(5)]
    assert "no declaration says whether it may" in left_open("liveness", adapted(base))


@pytest.mark.parametrize("num_shrunk", [1, 2])
def test_weight_decay_by_hand_of_all_frozen_tensors(num_shrunk: int) -> None:
    """What multiplies every frozen tensor by one number means other ones; one may be a memory."""
    factors = [0.999**step for step in range(5)]
    steps = [
        {
            "0.base": [factor * n for n in range(1, 7)],
            "0.a": first,
            "0.b": second,
            "1.base": [(factor if num_shrunk == 2 else 1.0) * n for n in (1.0, 2.0, 3.0)],
        }
        for factor, (first, second) in zip(factors, ADAPTERS, strict=True)
    ]
    finding = traces.judge("liveness", [named(steps, SHAPES)])
    due = Verdict.FALSIFIED if num_shrunk == 2 else Verdict.INCONCLUSIVE
    assert finding.verdict is due
    assert ("decays weights by hand" in finding.reason) is (num_shrunk == 2)


def test_an_average_is_found_among_tensors_of_the_same_size() -> None:
    """What a tensor without a gradient follows is the one that it moves to, not the first one."""
    slow, steps = 0.0, []
    for step in range(5):
        steps.append(
            {"x.fast": [step, 1.0], "y.fast": [-2.0 * step, 3.0], "slow.y.fast": [slow, 3.0]}
        )
        slow += 0.25 * (-2.0 * step - slow)
    trace = named(steps, dict.fromkeys(steps[0], (2,)))
    start = {"trainable": ("x.fast", "y.fast"), "frozen": ("slow.y.fast",)}
    traces.held("liveness", traces.altered(trace, Start, {}, **start))


@pytest.mark.parametrize("slope", [0.5, 0.0])
def test_a_bias_that_the_loss_can_not_see(slope: float) -> None:
    """Its layer's weight has a gradient, so it is used; a loss of differences cancels it out.

    Some passes train another model.
    """
    trained = {"1.weight": (2, 2), "1.bias": (2,)}
    weights = [{"1.weight": [1.0 + step, 1, 1, 1], "1.bias": [1.0, 1.0]} for step in range(5)]
    gave = {"1.weight": values(*[slope] * 4), "1.bias": values(0.0, 0.0)}
    trace = traces.altered(named(weights, trained), Start, {}, trainable=(*trained,), frozen=())
    trace = traces.altered(trace, Update, {}, gradient=gave)
    shards = [
        traces.shard(n, ids=(n,), gradient=gave if n % 2 else {"2.weight": values(1.0)})
        for n in range(4)
    ]
    finding = traces.judge("liveness", [replace(trace, events=(*shards, *trace.events))])
    assert (finding.verdict is Verdict.HELD) is (slope > 0)
