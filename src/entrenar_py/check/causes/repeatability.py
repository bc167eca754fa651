"""Test whether two plain runs of a user's command agree, and whether two runs begin alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import divergence, resumed_data, run_comparison
from entrenar_py.check.causes.compared import Compared
from entrenar_py.check.causes.sensitivity import UNKNOWN
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.run_names import Words, run_name
from entrenar_py.shared.trace import Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Counterexample, Tally

# Two draws of the same weights are about 1.4 apart, relative to their norm. Weights that were
# drawn alike and changed since (decayed, rounded) are far closer.
OTHER_DRAW = 0.5
_SEED = (
    "seed the script alike in every run, before it draws anything: torch.manual_seed(...), or "
    "{seed} in the command"
)


def apart(compared: Compared) -> str:
    """Return why two plain runs of the command don't agree within rounding; "" if they do."""
    if not compared.plain_runs:
        return ""
    first, second = compared.plain_runs
    if why := unseeded(first, second):
        return f"two plain runs of the command differ: {why}: {_SEED}"
    broken = _beyond_rounding(compared, first, second)
    if broken is None:
        return ""
    return (
        f"two plain runs of the command differ ({broken.place()}: {broken.message}), "
        f"so two others can't be compared: {_SEED}"
    )


def agree(compared: Compared) -> bool:
    """Return whether the two runs draw alike, and agree within rounding."""
    first, second = compared.model, compared.trace
    return not unseeded(first, second) and _beyond_rounding(compared, first, second) is None


def _beyond_rounding(compared: Compared, first: Trace, second: Trace) -> Counterexample | None:
    """Return where two runs differ by more than rounding; None if they don't."""
    finite = divergence.before(Compared(runs=compared.runs, model=first, trace=second))
    first, second = finite.model, finite.trace
    trial = Tally("")
    # Chaos from the first step on is no reason why the same operations give other results.
    known = compared.sensitivity
    sensitivity = UNKNOWN if known.is_chaotic(0) else known
    for rank in sorted({update.rank for update in second.of(Update)}):
        runs = _of_rank(first, rank), _of_rank(second, rank)
        run_comparison.compare(trial, *runs, None, _PLAIN, sensitivity=sensitivity)
    return trial.broken


def _of_rank(trace: Trace, rank: int) -> Trace:
    """Return `trace` without the states of other ranks: these may differ, which F-DP-001 judges."""
    kept = (e for e in trace.events if not isinstance(e, Start | Update) or e.rank == rank)
    return replace(trace, events=tuple(kept))


def apart_in_bits(compared: Compared) -> str:
    """Return why two plain runs of the command don't have the same bits; "" if they do."""
    if not compared.plain_runs:
        return ""
    first, second = compared.plain_runs
    if why := unseeded(first, second):
        return f"two plain runs of the command differ: {why}: {_SEED}"
    expected = evidence.updates(first)
    for step, by_rank in evidence.ranks_by_step(second):
        for rank, update in by_rank.items():
            model = expected.get(step, {}).get(rank)
            if model is None:
                continue
            for part in ("gradient", "weights", "optimizer"):
                if name := _first_apart(getattr(model, part), getattr(update, part)):
                    return (
                        f"two plain runs of the command differ in {part} from step {step} on "
                        f"(rank {rank}, {name}), so bits can't be compared: {_SEED}, and "
                        "torch.use_deterministic_algorithms(True)"
                    )
    return ""


_PLAIN = Words(who="the first of them", its="the first one's", before="", elsewhere="")


def drawn_apart(compared: Compared) -> str:
    """Return what a command that was not told a seed draws anew in every run; "" for nothing."""
    if compared.trace.traits.seeded:
        return ""
    why = unseeded(compared.model, compared.trace)
    return why and f"two runs of the command are not seeded alike: {why}: {_SEED}"


def unseeded(first: Trace, second: Trace) -> str:
    """Return what two runs of the same command drew differently: first weights, or samples."""
    if name := _other_beginning(first, second):
        return f"they begin with other weights ({name})"
    return _other_samples(first, second)


def samples_apart(compared: Compared) -> str:
    """Return why two plain runs of the command draw other samples; "" if they don't."""
    if not compared.plain_runs:
        return ""
    why = _other_samples(*compared.plain_runs)
    return why and f"in two plain runs of the command {why}: {_SEED}"


def samples_drawn_apart(compared: Compared) -> str:
    """Return the first step whose samples a command without a {seed} draws anew in each run."""
    if compared.trace.traits.seeded:
        return ""
    why = _other_samples(compared.model, compared.trace)
    return why and f"in two plain runs of the command {why}: {_SEED}"


def drawn_anew(compared: Compared) -> str:
    """Return why a script that seeds nothing may draw other numbers after a stop; "" if it doesn't.

    Its runs have seeds of the harness's, and begin alike; after a stop they would be new ones.
    """
    if not compared.trace.traits.unseeded:
        return ""
    trial = Tally("", observed=True)
    resumed_data.compare(trial, compared.model, compared.trace)
    if trial.broken is None:
        return ""
    return (
        f"the script seeds nothing, so what it draws after a stop is new ({trial.broken.place()}: "
        f"{trial.broken.message}): {_SEED}, and restore the generators' states"
    )


def _other_samples(first: Trace, second: Trace) -> str:
    samples, others = _samples(first), _samples(second)
    for step in sorted(samples.keys() & others.keys()):
        if samples[step] != others[step]:
            return f"step {step} {missing.other_samples(first, second)}"
    return ""


def _other_beginning(first: Trace, second: Trace) -> str:
    """Return the name of a tensor with other first weights in the second run; "" if none has."""
    starts, others = _starts(first), _starts(second)
    for rank in sorted(starts.keys() & others.keys()):
        if name := _first_apart(starts[rank].weights, others[rank].weights):
            return name
    return ""


def _starts(trace: Trace) -> dict[int, Start]:
    return {s.rank: s for s in trace.of(Start) if s.step == 0 and not s.resumed}


def _first_apart(left: Tensors, right: Tensors) -> str:
    return next((n for n in left if n in right and left[n].digest != right[n].digest), "")


def _samples(trace: Trace) -> dict[int, Counter[int]]:
    made = {update.step for update in trace.of(Update)}
    samples: dict[int, Counter[int]] = {}
    for shard in trace.of(Shard):
        if shard.step in made:
            samples.setdefault(shard.step, Counter()).update(shard.ids)
    return samples


def other_beginning(compared: Compared) -> str:
    """Return why the runs begin with weights that were drawn independently; "" if they don't.

    Weights that differ but were drawn alike are left to the comparison: the trainer changed them.
    """
    starts, model_starts = (_starts(run) for run in (compared.trace, compared.model))
    if not starts or not model_starts:
        return ""
    start, model = starts[min(starts)], model_starts[min(model_starts)]
    for name, record in start.weights.items():
        expected = model.weights.get(name)
        if expected is None or expected.digest == record.digest:
            continue
        left, right = expected.vector(), record.vector()
        if left is None or right is None or _are_other_draws(left, right):
            return (
                f"{run_name(compared.trace)} begins with other weights than "
                f"{run_name(compared.model)} ({name}): {_SEED}, and draw the weights before "
                "anything that depends on the rank or on the number of workers"
            )
    return ""


def _are_other_draws(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Return whether two flat arrays differ as independent draws do: both finite and not zero."""
    if left.size != right.size or not (np.isfinite(left).all() and np.isfinite(right).all()):
        return False
    left, right = left.astype(np.float64), right.astype(np.float64)
    sizes = [float(np.linalg.norm(one)) for one in (left, right)]
    return min(sizes) > 0 and float(np.linalg.norm(left - right)) > OTHER_DRAW * max(sizes)
