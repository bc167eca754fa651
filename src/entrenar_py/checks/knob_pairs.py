"""Two runs of somebody's own trainer that differ in one of its knobs, and should not be told apart.

What a run on one worker does wrong, too, a comparison with that one can't show; a turn of a knob
that should change nothing can. A clipping norm is the knob that changes something: the size of the
gradient, and not its direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from entrenar_py.checks import evidence, missing, oracles, run_comparison
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Shard, Tensors, Trace, record_tensor
from entrenar_py.verdict import Tally

# Where a script's scenario says which knob was turned.
OPTION = "pair"
# torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6; others don't.
CLIP_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Pair:
    """`knob` is at `value`; the run that has it at `usual` is that of `model`.

    Knobs `beside` it are turned with it, which alone change nothing.
    """

    knob: str
    value: str
    usual: str
    model: Scenario
    beside: Mapping[str, str]

    @property
    def words(self) -> run_comparison.Words:
        """How findings speak of the two."""
        turned = {self.knob: self.value, **self.beside}
        told = ", ".join(f"{knob}={value}" for knob, value in turned.items())
        return run_comparison.Words(
            who=f"the run with {self.knob}={self.usual}",
            its=f"that of {self.knob}={self.usual}",
            before=f"with {told}: ",
            elsewhere=", so the knob did more than it should",
        )


def option(
    run: Scenario,
    model: Scenario,
    knob: str,
    value: str,
    usual: str,
    beside: Iterable[tuple[str, str]] = (),
) -> Scenario:
    """`run`, which has a knob at `value`, saying so, and how `model` differs from it."""
    mine, theirs = run.to_dict(), model.to_dict()
    differing = {name: held for name, held in theirs.items() if held != mine[name]}
    told = {"knob": knob, "value": value, "usual": usual, "model": differing}
    told |= {"beside": dict(beside)}
    return run.with_(options={**run.options, OPTION: told})


def pair_of(scenario: Scenario) -> Pair | None:
    """Which knob was turned for a run; None for a run as the script usually is."""
    told = scenario.options.get(OPTION)
    if told is None:
        return None
    options = {name: held for name, held in scenario.options.items() if name != OPTION}
    fields = {**scenario.to_dict(), "options": options, **told["model"]}
    model = evidence.plain(Scenario.from_dict(fields), repeat=0)
    names = ("knob", "value", "usual", "beside")
    return Pair(model=model, **{name: told[name] for name in names})


def family(scenario: Scenario) -> list[Scenario]:
    """The run, and the one without the knob turned, if it was."""
    pair = pair_of(scenario)
    return [scenario] if pair is None else [scenario, pair.model]


def family_of_parity(scenario: Scenario) -> list[Scenario]:
    """The same; and where no knob was turned the runs on a single device."""
    return oracles.family(scenario) if pair_of(scenario) is None else family(scenario)


def compare(tally: Tally, traces: Sequence[Trace], knobs: Sequence[str] | None = None) -> list[int]:
    """Compares every run that had one of `knobs` (None: any) turned with the one that had not.

    Of each how many gradients were compared.
    """
    counts = []
    models = {trace.scenario: trace for trace in traces}
    for trace in traces:
        pair = pair_of(trace.scenario)
        if pair is None or (knobs is not None and pair.knob not in knobs):
            continue
        model = models.get(pair.model)
        if model is None:
            tally.miss(f"{pair.words.before}no run with {pair.knob}={pair.usual} is there")
            continue
        tally.note(f"compared {pair.knob}={pair.value} with {pair.knob}={pair.usual}")
        if pair.knob == "clip":
            counts.append(_compare_clipped(tally, pair, model, trace))
        elif _took_effect(tally, pair, model, trace):
            counts.append(run_comparison.compare(tally, model, trace, None, pair.words))
    return counts


def _took_effect(tally: Tally, pair: Pair, model: Trace, trace: Trace) -> bool:
    """Whether the knob did what it is for: two equal runs say nothing."""
    if trace.scenario.dropout and not oracles.same_masks(model, trace):
        tally.miss(f"{pair.words.before}dropout draws other masks: run the script without dropout")
        return False
    if pair.knob in ("accumulation", "permute") and trace.traits.batch_norm:
        why = "batch normalisation is by each micro-batch's own samples: another one"
        tally.miss(f"{pair.words.before}{why}")
        return False
    if pair.knob == "accumulation":
        return _accumulated(tally, pair, model, trace)
    if pair.knob == "permute" and _orders(model) == _orders(trace):
        tally.miss(f"{pair.words.before}the samples come in the same order: nothing was permuted")
        return False
    if pair.knob == "loss_scale" and _local(model) == _local(trace) != {}:
        tally.miss(f"{pair.words.before}gradients before unscaling are the same: not scaled at all")
        return False
    return True


def _accumulated(tally: Tally, pair: Pair, model: Trace, trace: Trace) -> bool:
    """Whether a step has the same samples in more micro-batches; a step for each is a finding."""
    before, after = _micro_batches(model), _micro_batches(trace)
    due, drawn = _first_samples(model), _first_samples(trace)
    each = not drawn - due and drawn.total() * int(pair.value) == due.total() * int(pair.usual)
    if before and before == after and each and drawn != due:
        num_due, num_made = (1 + max(evidence.updates(one)) for one in (model, trace))
        tally.check(
            False,
            f"{pair.words.before}the optimizer steps after every micro-batch",
            step=0,
            expected=f"{num_due} steps of {due.total()} samples",
            got=f"{num_made} steps of {drawn.total()} samples",
            scenario=trace.scenario,
        )
        return False
    if due and drawn and due.total() != drawn.total():
        tally.miss(
            f"{pair.words.before}step 0 has {drawn.total()} samples, and {due.total()} with "
            f"{pair.knob}={pair.usual}: keep the global batch, with micro-batches of GLOBAL // "
            "({world_size} * {accumulation})"
        )
        return False
    if before and before == after:
        tally.miss(f"{pair.words.before}as many micro-batches in a step as with {pair.usual}")
        return False
    return True


def _compare_clipped(tally: Tally, pair: Pair, model: Trace, trace: Trace) -> int:
    """No step's gradient is longer than the clipping norm; that of the first, whose weights are the
    same, is the unclipped one made so long.
    """
    limit = float(pair.value)
    bounds = run_comparison.Bounds.of({}, model, trace)
    expected = evidence.updates(model).get(0)
    one = evidence.any_rank(expected) if expected else None
    whole = evidence.norm_l2(one.gradient) if one is not None else None
    if one is None or whole is None:
        missing.ask(tally, "clipping was not judged", f"Update.gradient {missing.WITH_VALUES}")
        return 0
    if whole <= limit:
        tally.miss(f"{pair.words.before}the gradient of step 0 is no longer than that: {whole:.3g}")
        return 0
    if _first_samples(model) != _first_samples(trace):
        what = f"step 0 draws other samples than {pair.words.its}"
        tally.miss(f"{pair.words.before}{what}{pair.words.elsewhere}")
        return 0
    clipped = _scaled(one.gradient, limit / whole)
    num_gradients = 0
    for step, by_rank in evidence.ranks_by_step(trace):
        for rank, update in by_rank.items():
            place: dict[str, Any] = {"step": step, "rank": rank, "scenario": trace.scenario}
            norm = evidence.norm_l2(update.gradient)
            if norm is None:
                continue
            num_gradients += 1
            tally.check(
                norm <= limit * (1 + bounds.gradient),
                f"{pair.words.before}the norm of the applied gradient is larger",
                expected=repr(limit),
                got=repr(norm),
                **place,
            )
            if step == 0:
                message = (
                    f"{pair.words.before}the gradient is not that of {pair.knob}={pair.usual} "
                    "clipped to this norm"
                )
                evidence.compare_close(
                    tally,
                    clipped,
                    update.gradient,
                    bounds.gradient + CLIP_EPSILON / whole,
                    message,
                    **place,
                )
    return num_gradients


def _scaled(tensors: Tensors, factor: float) -> Tensors:
    known = evidence.vectors(tensors) or {}
    return {
        name: record_tensor((factor * value.astype(np.float64)), values=True)
        for name, value in known.items()
    }


def _micro_batches(trace: Trace) -> int:
    """Of one rank in its first step; 0 where none was recorded."""
    first = evidence.shards(trace).get(0, [])
    return max(Counter(shard.rank for shard in first).values(), default=0)


def _first_samples(trace: Trace) -> Counter[int]:
    return Counter(i for shard in evidence.shards(trace).get(0, []) for i in shard.ids)


def _orders(trace: Trace) -> list[tuple[int, ...]]:
    return [shard.ids for shard in trace.of(Shard)]


def _local(trace: Trace) -> dict[str, str]:
    """The digests of the first micro-batch's gradient."""
    first = trace.of(Shard)[:1]
    return {name: record.digest for one in first for name, record in one.gradient.items()}
