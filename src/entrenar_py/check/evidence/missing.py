"""Find facts that a trace lacks, and advise how to provide them. Nothing is judged here.

A judge that can't decide says why, and which record or call would make a decision possible. A
clause that compared nothing is never held, so each missing fact must lead to a reason. Ranks that
lack the same fact share one reason (`Gaps`), and the same advice is given only once.

`tally_for` chooses the vocabulary of the reasons. For a trace written by hand, they name events and
fields as `entrenar_py.trace` does (docs/traces.md lists them all). For an observed script, they
name the calls of the observer. `facts` has both. An empty field may mean that the state is unknown,
or that the trainer lost it, which is an error. `is_unknown` decides by the run's other records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import facts
from entrenar_py.check.evidence.facts import Fact
from entrenar_py.check.evidence.needs import Need, Traces
from entrenar_py.shared import wording
from entrenar_py.shared.scenario import OBSERVED
from entrenar_py.shared.trace import Event, Gap, Saved, Shard, Start, Tensors, Trace, Update
from entrenar_py.shared.verdict import Tally


def tally_for(invariant: Invariant, runs: Iterable[Trace]) -> Tally:
    """Return an empty tally for `runs`. For an observed script, its reasons name calls."""
    return Tally(invariant.id, observed=any(run.scenario.system == OBSERVED for run in runs))


def ask(tally: Tally, reason: str, fact: Fact) -> None:
    """Count `reason` as missing, with the advice for `fact` unless that was already given."""
    advice = f": {fact.advice(observed=tally.observed)}"
    if not any(known.endswith(advice) for known in tally.missing):
        tally.miss(reason + advice)


def nothing(tally: Tally, why: str, fact: Fact) -> str:
    """Return the reason why nothing was compared: `why`, and how to provide `fact`."""
    return f"{why}: {fact.advice(observed=tally.observed)}"


def nearest(tally: Tally, runs: Traces, need: Need) -> str:
    """Return how the run nearest to `need` differs, to end a reason; "" for an observed script."""
    return "" if tally.observed else runs.nearly(need)


def told(tally: Tally, *, trace: str, script: str) -> str:
    """Return the text `trace` for a trace written by hand, and `script` for an observed script."""
    return script if tally.observed else trace


def other_samples(*runs: Trace) -> str:
    """Return `draws different samples`, or `gives the model different rows` if ids are contents.

    If a sample's id is a digest of its contents, noise or padding changes the id, too.
    """
    is_content = any(run.traits.sample_ids == "content" for run in runs)
    return "gives the model different rows" if is_content else "draws different samples"


class Gaps:
    """The facts that ranks did not record. Ranks that lack the same fact share one reason."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Fact], list[tuple[int, int]]] = {}

    def add(self, why: str, fact: Fact, *, rank: int, step: int) -> None:
        """Add that `rank` lacks `fact` in `step` (-1: before the first); `why` says it in words."""
        self._found.setdefault((why, fact), []).append((step, rank))

    def tell(self, tally: Tally) -> None:
        """Count each gap as missing: `ranks 0, 2 recorded no weights in step 3: record ...`."""
        for (reason, fact), places in self._found.items():
            steps, ranks = ({place[at] for place in places} for at in (0, 1))
            later = " and later" if len(steps) > 1 else ""
            ask(tally, f"{named(ranks)} {reason} {when(min(steps))}{later}", fact)


def named(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0, 1, 2` for these ranks."""
    return wording.named("rank", ranks)


Recorded = Set[tuple[type[Event], int, str]]
# Field of Shard -> its contents, in words.
_FIELDS = {"ids": "known samples", "draws": "known random draws", "gradient": "local gradients"}


def recorded(trace: Trace) -> Recorded:
    """Return (event type, rank, part) for each start and update with optimizer state or buffers."""
    return {
        (type(event), event.rank, part)
        for event in trace.events
        if isinstance(event, Start | Update)
        for part in ("optimizer", "buffers")
        if getattr(event, part)
    }


def is_unknown(known: Recorded, holder: Start | Update | Saved, part: str) -> bool:
    """Return True if the empty `part` of `holder` was not recorded, False if the trainer lost it.

    Weights and gradients never count as lost. Optimizer state and buffers count as lost from an
    update if the rank has them in another update, from a start if the rank has them in any event,
    and from a checkpoint if any rank has them. `known` is the result of `recorded`.
    """
    if part in ("weights", "gradient"):
        return True
    return not any(
        part == there
        and (isinstance(holder, Saved) or rank == holder.rank)
        and (kind is Update or not isinstance(holder, Update))
        for kind, rank, there in known
    )


def require_shards(tally: Tally, trace: Trace) -> set[int]:
    """Return the steps that were made with unknown shards. Count them as missing."""
    bare = _unsharded(trace)
    if lacking := sorted(bare - evidence.shards(trace).keys()):
        ask(tally, f"no micro-batch of {_steps(lacking)} was recorded", facts.SHARDS)
    elif bare:
        ask(tally, f"{named(_silent(trace))} made steps without a micro-batch", facts.SHARDS)
    return bare


def require_beginning(tally: Tally, trace: Trace) -> set[int]:
    """Return the steps before the start of this ledger. If there are any, count them as missing."""
    lacking = max((gap.step for gap in trace.of(Gap)), default=0)
    if lacking:
        tally.miss(
            f"steps 0 to {lacking - 1} are not in this ledger, which was started over from a "
            "checkpoint: the samples that they drew are unknown"
        )
    return set(range(lacking))


def _silent(trace: Trace) -> set[int]:
    return {update.rank for update in trace.of(Update)} - {shard.rank for shard in trace.of(Shard)}


def _unsharded(trace: Trace) -> set[int]:
    # For a rank that never records shards, steps with fewer samples than its updates count as
    # unknown, too.
    known, silent = evidence.shards(trace), _silent(trace)
    return {
        step
        for step, by_rank in evidence.updates(trace).items()
        if step not in known or (silent & by_rank.keys() and lacks_samples(known[step], by_rank))
    }


def lacks_samples(shards: Sequence[Shard], by_rank: Mapping[int, Update]) -> bool:
    """Return whether a step's shards have fewer samples (or tokens) than one of its updates."""
    most = max(update.weight for update in by_rank.values())
    return sum(shard.weight for shard in shards) < most * (1 - 1e-9)


def require_ids(tally: Tally, trace: Trace) -> set[int]:
    """Return the steps that were made with unknown samples. Count them as missing."""
    bare = require_shards(tally, trace)
    if nameless := _unnamed(trace):
        ask(tally, f"the samples of {_steps(sorted(nameless))} are unknown{_why(trace)}", facts.IDS)
    return bare | nameless


def _steps(steps: Sequence[int]) -> str:
    later = " and later" if steps[5:] else ""
    return f"{wording.named('step', steps[:5])}{later}"


def _why(trace: Trace) -> str:
    why = next((shard.unknown for shard in trace.of(Shard) if shard.unknown), "")
    return f" ({why})" if why else ""


def unknown_steps(trace: Trace) -> set[int]:
    """Return the steps with unknown samples, as `require_ids` does, but without counting them."""
    return _unsharded(trace) | _unnamed(trace)


def _unnamed(trace: Trace) -> set[int]:
    """Return the steps with a shard that has samples but no ids; all steps if no shard has ids."""
    never = not any(shard.ids for shard in trace.of(Shard))
    observed = trace.scenario.system == OBSERVED
    return {
        step
        for step, shards in evidence.shards(trace).items()
        if never or any(s.unknown or _is_unnamed(s, shards, observed) for s in shards)
    }


def _is_unnamed(shard: Shard, shards: Sequence[Shard], observed: bool) -> bool:
    """Return whether a shard has samples without known ids.

    In an observed script, a micro-batch without ids may reuse the samples of another one of its
    rank.
    """
    if shard.ids or shard.made or not shard.weight > 0:
        return False
    return not (observed and any(other.ids and other.rank == shard.rank for other in shards))


def require_updates(tally: Tally, *traces: Trace) -> bool:
    """Return whether every completed run recorded steps.

    The first run without steps is counted as missing, unless a reason is already known (such as
    that all steps met a NaN).
    """
    for trace in traces:
        if trace.end.status == "completed" and not trace.of(Update):
            if not tally.missing:
                ask(tally, "no step was recorded", facts.UPDATES)
            return False
    return True


def require_moves(tally: Tally, trace: Trace) -> None:
    """Count a run as missing if no step changes a weight, since all its states are equal.

    A rate that begins at zero, or skipped steps, don't matter if a later step changes a weight.
    """
    last: dict[int, Tensors] = {}
    for event in trace.events:
        if isinstance(event, Start | Update):
            before, last[event.rank] = last.get(event.rank), event.weights
            is_known = bool(before and event.weights)
            if isinstance(event, Update) and (
                not is_known or evidence.first_difference(before or {}, event.weights)
            ):
                return
    if num_steps := len(evidence.updates(trace)):
        tally.miss(
            f"no weight changes in {wording.counted(num_steps, 'step')}, as in a trainer that "
            "loses its gradients: nothing was compared that could differ; is the learning rate "
            "0, does the optimizer step other tensors than the model's, or is the loss detached "
            "from them?"
        )


def bare_fields(tally: Tally, model: Trace, trace: Trace) -> dict[str, Any]:
    """Return field -> empty value, for the fields of Shard that are not recorded in both runs.

    A field that only one run records, or a step with shards in only one run, counts as missing.
    """
    bare: dict[str, Any] = {}
    for name, unknown in (("ids", ()), ("draws", None), ("gradient", {})):
        if name == "draws" and not trace.scenario.dropout:
            continue  # without dropout there are no draws, so None is right
        filled = [any(getattr(shard, name) for shard in run.of(Shard)) for run in (model, trace)]
        if not all(filled):
            bare[name] = unknown
        if any(filled) and not all(filled):
            ask(tally, f"only one run has {_FIELDS[name]}", facts.of_shards(name))
    steps = [
        evidence.shards(run).keys() & evidence.updates(other).keys()
        for run, other in ((model, trace), (trace, model))
    ]
    if lacking := sorted(steps[0] ^ steps[1]):
        ask(tally, f"only one run has micro-batches of step {lacking[0]}", facts.SHARDS_IN_BOTH)
    return bare


def when(step: int) -> str:
    """Return `in step 3`, or `before the first step` for -1."""
    return "before the first step" if step < 0 else f"in step {step}"


def probed(invariant: Invariant, what: str) -> str:
    """Return `what`, then why no training trace decides the clause, and which system to run."""
    return (
        f"{what}: {invariant.id} is decided by a probe that the harness runs itself, not by a "
        f"trainer's trace; run entrenar-check with --only {invariant.id} and without --judge"
    )
