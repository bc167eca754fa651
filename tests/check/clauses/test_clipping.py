"""A script's clipping, with a declared norm and without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from entrenar_py.check.causes import explanations, rounding_bounds
from entrenar_py.check.causes.clipping import Clipped
from entrenar_py.check.causes.explanations import Explanation
from entrenar_py.check.clauses import clipping
from entrenar_py.shared.trace import Shard, Start, Tensors, Trace, Traits, Update
from entrenar_py.shared.verdict import Tally, Verdict
from tests import traces
from tests.check.clauses.micro_batch_traces import Vectors, summed, times, trace_of
from tests.traces import broken, records

LIMIT = 0.5
Batches = Sequence[Sequence[Vectors]]  # of each rank
SIZES = {"a": 6, "b": 3, "c": 2}


def batches(seed: int) -> Batches:
    """Return the gradients of two micro-batches of each of two ranks."""
    rng = np.random.default_rng(seed)
    scale = 1 + seed % 3
    return [
        [{name: scale * rng.normal(size=size) for name, size in SIZES.items()} for _ in range(2)]
        for _ in range(2)
    ]


def added(parts: Sequence[Vectors]) -> Vectors:
    return {name: np.sum([part[name] for part in parts], axis=0) for name in SIZES}


def mean(ranks: Batches) -> Vectors:
    """Return the gradient of a step: its micro-batches' added, and divided by four."""
    return multiplied(added([batch for own in ranks for batch in own]), 1 / 4)


def length(vectors: Vectors) -> float:
    """Return the norm of all tensors."""
    return float(np.sqrt(sum(np.square(value).sum() for value in vectors.values())))


def multiplied(vectors: Vectors, factor: float) -> Vectors:
    """Return the tensors times a number."""
    return {name: factor * value for name, value in vectors.items()}


def clipped(vectors: Vectors, limit: float = LIMIT) -> Vectors:
    """Return the tensors as clipping by their norm leaves them."""
    return multiplied(vectors, min(1.0, limit / (length(vectors) + 1e-6)))


def run(step: Callable[[Batches], Vectors], *, reduced: bool = False, seeds: int = 4) -> Trace:
    """Return a run whose steps apply what `step` returns; with `reduced`, norms are recorded."""
    events: list[Shard | Update] = []
    for number in range(seeds):
        ranks = batches(number)
        applied, whole = step(ranks), mean(ranks)
        for rank, own in enumerate(ranks):
            events += [
                traces.shard(
                    number,
                    rank,
                    shard=2 * rank + at,
                    ids=(4 * number + 2 * rank + at,),
                    loss_sum=None,
                    gradient=records(batch),
                )
                for at, batch in enumerate(own)
            ]
        events += [
            traces.update(
                number,
                rank,
                loss=None,
                weight=4.0,
                gradient=records(whole if reduced else applied),
                grad_norm=length(whole) if reduced else None,
                applied_norm=length(applied) if reduced else None,
            )
            for rank in range(2)
        ]
    subject = traces.scenario(world_size=2, accumulation=2, workload="own", learning_rate=0.1)
    made = traces.hand_written(*events, subject=subject)
    return replace(made, traits=Traits(clipping="other", clip_norm=LIMIT))


def judged(trace: Trace) -> Tally:
    """Return what was compared of a run."""
    tally = Tally("F-TI-008")
    clipping.compare(tally, trace)
    return tally


def each_rank(ranks: Batches) -> Vectors:
    """Clip each rank's gradient, and average."""
    return multiplied(added([clipped(multiplied(added(own), 1 / 2)) for own in ranks]), 1 / 2)


def counting_twice(ranks: Batches) -> Vectors:
    """Clip by a norm in which one tensor counts twice."""
    whole = mean(ranks)
    total = np.hypot(length(whole), np.linalg.norm(whole["b"]))
    return multiplied(whole, min(1.0, LIMIT / total))


def scaled_twice(ranks: Batches) -> Vectors:
    """Clip a list in which one tensor is twice."""
    whole = mean(ranks)
    factor = min(1.0, LIMIT / float(np.hypot(length(whole), np.linalg.norm(whole["b"]))))
    return {name: factor ** (1 + (name == "b")) * value for name, value in whole.items()}


ERRORS: Mapping[str, Callable[[Batches], Vectors]] = {
    "has a larger norm than clip_norm=0.5": mean,
    "each element was clipped": lambda ranks: {
        name: np.clip(4 * value, -LIMIT, LIMIT) for name, value in mean(ranks).items()
    },
    "clipped by the maximum": lambda ranks: multiplied(
        mean(ranks), LIMIT / max(float(np.abs(value).max()) for value in mean(ranks).values())
    ),
    "clipped in parts": lambda ranks: {
        name: value
        for group in (("a",), ("b", "c"))
        for name, value in clipped({one: 4 * mean(ranks)[one] for one in group}).items()
    },
    "divided by the 2 micro-batches": lambda ranks: multiplied(clipped(mean(ranks)), 1 / 2),
    "still scaled by 4096": lambda ranks: multiplied(
        clipped(multiplied(mean(ranks), 4096)), 1 / 4096
    ),
    "it was divided after": lambda ranks: multiplied(clipped(mean(ranks)), 1 / 3),
    "counts b twice": counting_twice,
    "b is listed twice among": scaled_twice,
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors(words: str) -> None:
    """Each error is found in the first step, and named."""
    found = broken(judged(run(ERRORS[words])))
    assert words in found.message
    assert found.step == 0


def early(clip: Callable[[Sequence[Vectors]], Vectors]) -> Callable[[Batches], Vectors]:
    """Return the step that clips the micro-batches of each rank, by their sum, before adding."""
    return lambda ranks: multiplied(added([clip(own) for own in ranks]), 1 / 2)


@pytest.mark.parametrize(
    ("words", "clip"),
    [
        ("each rank clipped its own", lambda own: clipped(added(own))),
        ("each micro-batch's gradient was clipped", lambda own: added([*map(clipped, own)])),
        ("clipped after each micro-batch", lambda own: clipped(added([clipped(own[0]), own[1]]))),
    ],
)
def test_clipped_before_the_reduction(
    words: str, clip: Callable[[Sequence[Vectors]], Vectors]
) -> None:
    """What is clipped before it is added has another direction."""
    found = broken(judged(run(early(clip))))
    assert words in found.message


@pytest.mark.parametrize("scale", [1.0, 0.2])
@pytest.mark.parametrize("reduced", [False, True])
def test_right(scale: float, *, reduced: bool) -> None:
    """A whole gradient that is clipped, always or now and then, is right."""
    tally = judged(run(lambda ranks: clipped(multiplied(mean(ranks), scale))))
    assert (tally.broken, tally.missing) == (None, [])
    assert tally.compared > 0
    assert judged(run(lambda ranks: clipped(mean(ranks)), reduced=reduced)).broken is None


@pytest.mark.parametrize("words", ERRORS)
def test_a_norm_that_was_only_seen(words: str) -> None:
    """Without a line, people may change gradients after clipping: only known errors falsify."""
    recorded = run(ERRORS[words])
    tally = judged(replace(recorded, traits=replace(recorded.traits, losses="backward")))
    if words in ("has a larger norm than clip_norm=0.5", "it was divided after"):
        assert tally.broken is None
        assert "the script clips to max_norm=0.5, and gradients have a " in tally.missing[0]
    else:
        assert tally.broken is not None
        assert words in tally.broken.message


@pytest.mark.parametrize("since", [0, 2])
def test_directions_are_known_until_gradients_are_compressed(since: int) -> None:
    """PowerSGD adds the first gradients as they are; other hooks compress all of them."""

    def sent(recorded: Trace) -> Tally:
        facts: dict[str, Any] = {"compressed": "PowerSGD", "compressed_from": since}
        return judged(replace(recorded, traits=replace(recorded.traits, **facts)))

    right = sent(run(lambda ranks: clipped(mean(ranks))))
    assert right.broken is None
    assert bool(right.missing) is (since == 0)
    wrong = broken(sent(run(early(lambda own: clipped(added(own))))))
    assert "each rank clipped its own" in wrong.message


@pytest.mark.parametrize("rests", [False, True])
def test_no_direction_is_known_if_steps_rest_until_gradients_are_compressed(*, rests: bool) -> None:
    """A step applies nothing if the loss scale is too large, and later ones are compressed."""
    recorded_run = run(lambda ranks: clipped(mean(ranks)))
    facts: dict[str, Any] = {"compressed": "PowerSGD", "compressed_from": 1}
    first, second = (records({name: np.full(1, at) for name in SIZES}) for at in (0.0, 1.0))
    begun = [Start(step=0, rank=rank, trainable=tuple(SIZES), weights=first) for rank in (0, 1)]
    events = [
        replace(event, weights=second)
        if isinstance(event, Update) and event.step
        else replace(event, weights=first, gradient={} if rests else event.gradient)
        if isinstance(event, Update)
        else event
        for event in recorded_run.events
    ]
    traits = replace(recorded_run.traits, **facts)
    tally = judged(replace(recorded_run, events=(*begun, *events), traits=traits))
    assert tally.broken is None
    assert any("PowerSGD" in why for why in tally.missing) is rests


def test_nothing_to_clip() -> None:
    """A note says that clipping was not exercised."""
    assert (
        "nothing was clipped" in judged(run(lambda ranks: multiplied(mean(ranks), 0.01))).notes[0]
    )


def test_norms_that_the_script_showed() -> None:
    """With `obs.reduced()` the length is known, and a shorter gradient is an error."""
    found = broken(judged(run(lambda ranks: multiplied(clipped(mean(ranks)), 0.7), reduced=True)))
    assert "the norm of the applied gradient is not min(norm, clip_norm=0.5)" in found.message
    scaled = judged(run(lambda ranks: multiplied(mean(ranks), 2.0**-10), reduced=True))
    assert scaled.broken is None
    assert "obs.reduced() came before gradients were unscaled" in scaled.missing[0]


def test_what_can_not_be_told() -> None:
    """An error of another kind, or lengths that nothing explains, are no errors of clipping."""
    other = judged(run(lambda ranks: {**added(ranks[0]), "b": 0.1 * ranks[1][0]["b"]}, seeds=1))
    assert other.broken is None or "larger" in other.broken.message
    own = judged(run(lambda ranks: multiplied(mean(ranks), 0.1 / (1 + abs(ranks[0][0]["a"][0])))))
    assert own.broken is None
    assert "can't be told: call obs.reduced()" in own.missing[0] or "record" in own.missing[0]


@pytest.mark.parametrize("name", ["", "float16", "bfloat16"])
def test_sums_in_16_bits(name: str) -> None:
    """Terms that were rounded to 16 bits before they were added are recognised, and only those."""

    def rounded(
        value: np.ndarray[tuple[int], np.dtype[np.float64]],
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        wide = value.astype(np.float32)
        if name == "float16":
            return wide.astype(np.float16).astype(np.float64)
        if name == "bfloat16":
            bits = wide.view(np.uint32) + np.uint32(0x8000)
            return (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
        return wide.astype(np.float64)

    def step(ranks: Batches) -> Vectors:
        terms = [{n: rounded(v) for n, v in added(own).items()} for own in ranks]
        return multiplied(added(terms), 1 / 4)

    assert rounding_bounds.undeclared_format(run(step), 1e-4) == name
    assert rounding_bounds.undeclared_format(run(each_rank), 1e-4) == ""


@pytest.mark.parametrize("elements", [slice(None), slice(0, 3)], ids=["all", "some"])
def test_a_small_factor_is_no_rounding(elements: slice, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off by as little as bfloat16 would be, but in proportion, or in some elements only."""
    monkeypatch.setitem(SIZES, "a", 40)

    def step(ranks: Batches) -> Vectors:
        sums = multiplied(added([added(own) for own in ranks]), 1 / 4)
        for value in sums.values():
            value[elements] *= 1.01
        return sums

    assert rounding_bounds.undeclared_format(run(step), 1e-4) == ""


def test_a_verdict() -> None:
    """The check of F-TI-008 judges a declared norm."""
    finding = traces.judge("step_rule", [run(mean)])
    assert finding.verdict is Verdict.FALSIFIED
    assert "has a larger norm than clip_norm" in finding.reason


def called(made: Trace, unclipped: Callable[[Update], Tensors], *, source: str = "calls") -> Trace:
    """Return the run with what was given to torch's clipping, and without its micro-batches."""
    events = tuple(
        replace(event, unclipped=unclipped(event)) if isinstance(event, Update) else event
        for event in made.events
        if not isinstance(event, Shard)
    )
    return replace(made, events=events, traits=replace(made.traits, clip_source=source))


def whole_of(update: Update) -> Tensors:
    """Return the gradient of a step before it is clipped."""
    return records(mean(batches(update.step)))


@pytest.mark.parametrize("source", ["calls", "line"])
def test_a_gradient_that_was_seen_before_it_was_clipped_needs_no_micro_batches(source: str) -> None:
    """What ranks give to torch's clipping decides, where pieces hide what micro-batches gave."""
    made = run(lambda ranks: clipped(mean(ranks)))
    tally = judged(called(made, whole_of, source=source))
    assert tally.finding(nothing="").verdict is Verdict.HELD
    assert tally.compared >= 4


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_gradient_that_is_not_what_clipping_left_of_it_is_not_held(factor: float) -> None:
    """Something else came between, or the norm was another one."""
    tally = judged(called(run(lambda ranks: multiplied(clipped(mean(ranks)), factor)), whole_of))
    assert tally.finding(nothing="").verdict is Verdict.INCONCLUSIVE


def test_a_gradient_that_is_taken_away_after_clipping() -> None:
    """A layer may be frozen for an epoch: what is applied is the rest of what was clipped."""

    def rest(ranks: Any) -> Vectors:
        left = clipped(mean(ranks))
        return {name: left[name] for name in [*left][1:]}

    tally = judged(called(run(rest), whole_of))
    assert tally.finding(nothing="").verdict is Verdict.HELD


def test_gradients_that_are_zeros_when_they_are_clipped() -> None:
    """They were cleared just before, and what is applied came after that: nothing to divide by."""

    def cleared(update: Update) -> Tensors:
        return records(multiplied(mean(batches(update.step)), 0.0))

    tally = judged(called(run(mean), cleared))
    assert tally.finding(nothing="").verdict is Verdict.INCONCLUSIVE


def in_halves(vectors: Vectors) -> Vectors:
    """Return a gradient of which two ranks have the halves, and clip these by their own norms."""
    flat = np.concatenate([*vectors.values()])
    middle = next(iter(vectors.values())).size - 2  # within the first tensor
    halves = np.concatenate([clipped({"": flat[:middle]})[""], clipped({"": flat[middle:]})[""]])
    sizes = np.cumsum([value.size for value in vectors.values()])[:-1]
    return dict(zip(vectors, np.split(halves, sizes), strict=True))


@pytest.mark.parametrize("source", ["calls", "line"])
def test_pieces_that_each_rank_clips_by_their_own_norm(source: str) -> None:
    """They are found by what torch was given to clip: elements of one tensor have two factors."""
    made = run(lambda ranks: in_halves(mean(ranks)))
    tally = judged(called(made, whole_of, source=source))
    finding = tally.finding(nothing="")
    assert finding.verdict is Verdict.FALSIFIED
    assert "each rank clips its pieces by their own norm" in finding.reason


def test_pieces_that_are_scaled_to_no_limit_are_not_explained() -> None:
    """Elements may be scaled on purpose: their norms are not the limit then."""

    def other(ranks: Batches) -> Vectors:
        return multiplied(in_halves(mean(ranks)), 0.9)

    tally = judged(called(run(other), whole_of))
    assert tally.finding(nothing="").verdict is Verdict.INCONCLUSIVE


# --- without a declared norm ----------------------------------------------------------------------


def undeclared(*norms: float) -> Trace:
    """Return a run whose applied gradients have these norms."""
    return trace_of([_of_norm(norm, summed(step)) for step, norm in enumerate(norms)])


def _of_norm(norm: float, vectors: Vectors) -> Vectors:
    return times(norm / np.sqrt(sum(np.square(v).sum() for v in vectors.values())), vectors)


@pytest.mark.parametrize(
    ("norms", "words"),
    [
        ([2.0**-16] * 3, "1 divided by 65536"),
        ([0.25 * 2.0**-16] * 3, "0.25 divided by 65536"),
        ([0.5 * 2.0**-17] * 3, "0.25 divided by 65536"),
        ([2.0**-15, 2.0**-16, 2.0**-16], "2 divided by 65536"),  # the scale grew
    ],
)
def test_a_limit_over_a_power_of_two_is_recognised(norms: Sequence[float], words: str) -> None:
    """The first step is named; the scale may double or halve."""
    found = clipping.first(undeclared(*norms))
    assert found is not None
    assert found[0] == 0
    assert words in found[1].words


@pytest.mark.parametrize(
    "norms",
    [
        [1.0, 1.0, 1.0],  # clipped at a limit that people write
        [1e-5, 1e-5, 1e-5],
        [0.3, 2.0**-16, 0.7],
        [0.001234567] * 3,
        [2.0**-16] * 2,
    ],
)
def test_other_norms_are_left_alone(norms: Sequence[float]) -> None:
    """A limit without a scale, no limit, or too few steps."""
    assert clipping.first(undeclared(*norms)) is None


NAMES = ("inp.weight", "inp.bias", "out.weight", "out.bias")
DECAYED, OTHERS = NAMES[::2], NAMES[1::2]
GIVEN = np.random.default_rng(5)
WHOLE = [{name: GIVEN.normal(size=6) for name in NAMES} for _ in range(6)]


def cut(whole: Vectors, limit: float, *groups: Iterable[str]) -> Vectors:
    """Return a gradient whose groups are each clipped to a norm, as torch does it."""
    applied = {name: 0.5 * value for name, value in whole.items()}
    for group in groups:
        size = np.sqrt(sum(np.square(applied[name]).sum() for name in group))
        applied |= {name: min(1.0, limit / (size + 1e-6)) * applied[name] for name in group}
    return applied


def found(applied: Sequence[Vectors]) -> Explanation | None:
    """Return the explanation of a run that applied these gradients."""
    steps = [
        Clipped(
            applied=one,
            sizes={name: float(np.square(value).sum()) for name, value in one.items()},
            large=False,
            limit=np.nan,
            bound=1e-4,
            whole=whole,
            by_rank={},
            given={},
        )
        for one, whole in zip(applied, WHOLE, strict=False)
    ]
    return explanations.first(
        clipping.LIST,
        clipping.Steps(
            norms={step: one.norm(NAMES) for step, one in enumerate(steps)},
            clipped=dict(enumerate(steps)),
            weights=dict.fromkeys(range(len(steps)), 1.0),
        ),
    )


def test_groups_of_parameters_that_are_clipped_by_their_own_norms() -> None:
    """They divide the layers, as the lists with and without weight decay do."""
    why = found([cut(whole, 0.5, DECAYED, OTHERS) for whole in WHOLE])
    assert why is not None
    assert why.tensor in NAMES
    assert "alone have the norm 0.5" in why.words


@pytest.mark.parametrize(
    "groups",
    [
        (NAMES[:2], NAMES[2:]),  # two networks, each clipped apart
        tuple((name,) for name in NAMES),  # a limit for each tensor
        (NAMES,),
        (DECAYED,),
        (),
    ],
)
def test_what_may_be_clipped_apart_on_purpose(groups: Sequence[Sequence[str]]) -> None:
    """Nothing is said of whole layers, of single tensors, and of the whole gradient."""
    assert found([cut(whole, 0.5, *groups) for whole in WHOLE]) is None


def test_one_step_of_groups_is_too_few() -> None:
    """Two norms may be equal by chance."""
    applied = [
        cut(whole, 0.5, *([DECAYED, OTHERS] if n == 2 else [])) for n, whole in enumerate(WHOLE)
    ]
    assert found(applied) is None


def test_a_generator_of_parameters_is_exhausted_by_the_first_step() -> None:
    """The first gradient alone is clipped, and the others are longer."""
    once = [cut(whole, 0.5, *([NAMES] if n == 0 else [])) for n, whole in enumerate(WHOLE)]
    why = found(once)
    assert why is not None
    assert "is clipped, to 0.5, and later ones are longer" in why.words
    assert found(once[:4]) is None, "too few steps"
    assert (
        found([cut(whole, 0.5123, *([NAMES] if n == 0 else [])) for n, whole in enumerate(WHOLE)])
        is None
    )
    some = [cut(whole, 0.5, *([NAMES] if n in (0, 3) else [])) for n, whole in enumerate(WHOLE)]
    assert found(some) is None, "now and then"
    short = [{n: 0.01 * v for n, v in one.items()} if k else one for k, one in enumerate(once)]
    assert found(short) is None, "the others need no clipping"
