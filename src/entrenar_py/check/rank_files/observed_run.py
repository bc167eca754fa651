"""An observed run, derived from the files of its ranks: its scenario, traits and trace.

`load` reads a run that was stored earlier. No process observed the end of such a run, so only the
files show how it ended.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.evidence import rounds
from entrenar_py.check.rank_files import assembly, rank_file
from entrenar_py.check.rank_files.assembly import LastLives
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import OBSERVED, Scenario
from entrenar_py.shared.trace import (
    Drawn,
    End,
    Event,
    Injected,
    Selection,
    Shard,
    Start,
    Synchronised,
    Trace,
    Traits,
    Update,
)
from entrenar_py.shared.trace.traits import CONSTANTS
from entrenar_py.shared.untrusted import escaping

SYSTEM = OBSERVED
# How samples were identified, if some or all of their numbers are digests and not indices.
_CONTENT = ("content", "unknown")
# The places where a script may draw the random numbers that select rows.
_SELECTING = ("batch", "loss", "gradient", "between")
# Optimizer of torch.optim with a rule that checks know -> the name of the rule in a scenario.
_KINDS = {"SGD": "momentum", "Adam": "adamw", "AdamW": "adamw"}


def scenario_of(
    ranks: Sequence[RankTrace], events: Sequence[Event], world_size: int
) -> tuple[Scenario, Traits]:
    """Return the scenario and traits of a run of `world_size` ranks.

    The seed is 0, since no file has it. `events` are the result of `assembly.ordered` for `ranks`.
    """
    header: Mapping[str, Any] = ranks[0].header if ranks else {}
    shards = [event for event in events if isinstance(event, Shard)]
    updates = [event for event in events if isinstance(event, Update)]
    by_place = {(update.step, update.rank): update for update in updates}
    dropped = [s for s in shards if _is_dropped(s, by_place.get((s.step, s.rank)))]
    # If each step has dropped passes, they are part of it: an inner loop, not a skipped batch.
    skipped = [] if {s.step for s in dropped} == {s.step for s in shards} else dropped
    samples_by_step: Counter[int] = Counter()
    for sign, counted in ((1, shards), (-1, skipped)):
        for shard in counted:
            samples_by_step[shard.step] += sign * len(shard.ids)
    ids = {id_ for shard in shards for id_ in shard.ids}
    samples = population(ranks, events)
    if header.get("samples") in _CONTENT:  # the number of samples is unknown: use that of a step
        samples = range(max(samples_by_step.values(), default=1))
    num_samples = max(max(ids, default=0) + 1 if samples is None else len(samples), world_size)
    batch_size = max(samples_by_step.values(), default=1) or 1
    accumulation = 1 + max((shard.shard for shard in shards), default=0)
    num_parts = len({*assembly.places(ranks).values()})
    optimizer, traits = _optimizer(ranks, header, updates)
    options, outer = outer_step(ranks, events)
    scenario = Scenario(
        system=SYSTEM,
        workload="own",
        world_size=world_size,
        seed=0,
        num_shards=max(accumulation * num_parts, world_size),
        num_samples=num_samples,
        batch_size=min(batch_size, num_samples),
        num_steps=1 + max((update.step for update in updates), default=0),
        accumulation=accumulation,
        dropout=_dropout(header, shards),
        detail="values" if header.get("values") else "digests",
        options=options,
        **optimizer,
    )
    if not is_population_known(ranks, samples):
        traits["population"] = "varied" if samples_vary(ranks) else "guessed"
    if selects := _selecting_line(ranks, events):
        traits["selects"] = selects
        traits["one_source"] = all(rank.header.get("one_source") for rank in ranks)
    return scenario, Traits.from_dict({**_of_the_data(ranks, header), **traits, **outer})


def _is_dropped(shard: Shard, update: Update | None) -> bool:
    """Return whether the gradient of a pass was cleared before the step, which skips the batch."""
    return (
        update is not None
        and bool(shard.gradient)
        and not any(
            shard.shard in update.summed.get(name, (shard.shard,)) for name in shard.gradient
        )
    )


def _dropout(header: Mapping[str, Any], shards: Sequence[Shard]) -> float:
    # If forward passes were seen and none drew numbers, dropout layers are not in use: they are in
    # eval(), as in a teacher.
    is_seen = any(shard.contents for shard in shards)
    is_drawn = any(shard.draws is not None for shard in shards)
    return 0.0 if is_seen and not is_drawn else float(header.get("dropout", 0.0))


def trace_of(
    ranks: Sequence[RankTrace],
    events: Sequence[Event],
    scenario: Scenario,
    traits: Traits,
    ending: tuple[str, str],
) -> Trace:
    """Return the trace of a run. `ending` is its final status and the reason."""
    status, reason = ending
    batches = scenario.num_samples / scenario.batch_size
    samples = population(ranks, events)
    if not are_epochs_reported(ranks) and not is_endless_pass(ranks, events, samples):
        derived = evidence.derived_epochs(events, samples)
        events = events if derived is None else derived
        traits = replace(traits, epochs="untold" if derived is None else "told")
    elif cut := {epoch for rank in ranks for epoch in rank.cut}:
        traits = replace(traits, cut=tuple(sorted(cut)))
    numbered = assembly.numbered(
        events,
        scenario.accumulation,
        assembly.places(ranks),
        reporting={rank.rank for rank in ranks if rank.epochs},
        steps_per_epoch=max(1, int(batches) if traits.drop_last else math.ceil(batches)),
    )
    return Trace(
        scenario=scenario,
        traits=traits,
        environment=dict(ranks[0].header.get("versions", {})) if ranks else {},
        promises=("rounds",) if any(isinstance(e, Synchronised) for e in events) else (),
        events=(*numbered, End(status=status, reason=reason)),
    )


# --- data -------------------------------------------------------------------------------------


def _of_the_data(ranks: Sequence[RankTrace], header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the traits, except those of the optimizer, that differ from their defaults."""
    # Gradients are recorded as they are applied, so a step doesn't show how they were clipped.
    traits: dict[str, Any] = {"clipping": "other"}
    if header.get("auto") or any(rank.header.get("losses") == "backward" for rank in ranks):
        traits["losses"] = "backward"
    if header.get("auto") or any("samples" in rank.header for rank in ranks):
        traits |= _of_found_samples(ranks)
    seen = (rank.header.get("samples") == "index" or rank.header.get("drawn") for rank in ranks)
    if ranks and all(seen):
        traits["sample_ids"] = "seen"
    flags = ("drop_last", "replacement", "splits", "ordered")
    traits |= {name: True for name in flags if header.get(name)}
    if any(rank.drops_last for rank in ranks):
        traits["drop_last"] = True
    if any(rank.replaces for rank in ranks):
        traits["replacement"] = True
    if any(rank.layout is not None for rank in ranks):
        traits["shared"] = True  # ranks that draw the same samples share a shard
    traits["by_epoch"] = str(header.get("by_epoch", ""))
    if any(rank.header.get("unseeded") for rank in ranks):
        traits["unseeded"] = True
    traits["alone"] = len(ranks) > 1 and all(rank.header.get("alone") for rank in ranks)
    sent = next((rank.compression for rank in ranks if rank.compression), "")
    if compressed := header.get("reduction") or sent:
        traits["compressed"] = compressed
    if sent and not header.get("reduction"):
        traits["compressed_from"] = min(r.compressed_from for r in ranks if r.compression)
    joined = "micro-batch" if header.get("joined") else ""  # batches count as in torch's `Join`
    traits["loss_over"] = header.get("loss_over", "") or joined
    if header.get("clip_norm") is not None:
        traits |= {"clip_norm": float(header["clip_norm"]), "clip_source": "line"}
    elif header.get("clips") is not None and traits.get("arranged") != "guessed":
        traits |= {"clip_norm": float(header["clips"]), "clip_source": "calls"}
    if header.get("batch_norm") and any(rank.local for rank in ranks):
        traits["batch_norm"] = True  # forward passes changed the statistics
    return traits


def _selecting_line(ranks: Sequence[RankTrace], events: Sequence[Event]) -> str:
    """Return the line that selects rows at random, if each rank draws such numbers in each step.

    The numbers are drawn outside the passes of the model, in which masks are drawn. Numbers drawn
    before the first pass are not always recorded, and neither are those of a generator that lives
    for only one step. In the last case the line is in the loop that takes the steps. The result is
    "" if there is no such line.
    """
    lines = [str(rank.header.get("selects", "")) for rank in ranks]
    if not lines or not all(lines):
        return ""
    if all(rank.header.get("selects_in_steps") for rank in ranks):
        return lines[0]
    draws = (event for event in events if isinstance(event, Drawn) and event.where in _SELECTING)
    drawn = {(event.step, event.rank) for event in draws}
    shards = [event for event in events if isinstance(event, Shard) and event.ids]
    first = min((shard.step for shard in shards), default=0)
    needed = {(shard.step, shard.rank) for shard in shards if shard.step > first}
    return lines[0] if needed and needed <= drawn else ""


def _of_found_samples(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    traits = {}
    if any(rank.header.get("samples") in _CONTENT for rank in ranks):
        traits["sample_ids"] = "content"
    if not all(rank.layout is not None or rank.header.get("replicas") for rank in ranks):
        traits["arranged"] = "guessed"
    return traits


# --- optimizer --------------------------------------------------------------------------------


def _optimizer(
    ranks: Sequence[RankTrace], header: Mapping[str, Any], updates: Sequence[Update]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the scenario's fields for the optimizer in `header`, and its non-default traits.

    - `rule: own` if checks don't know the optimizer
    - `rule: other` if they know it, but not how it applies a gradient in this run
    - `schedule: other` if the learning rate changes
    - `decay: coupled` if weight decay is added to the gradient
    """
    groups: Sequence[Mapping[str, Any]] = header.get("groups") or [{}]
    name, first = header.get("optimizer", ""), groups[0]
    decays = _decays(groups)
    rate = float(first.get("initial_lr", first.get("lr", 0.0)))
    is_plain = name == "SGD" and not first.get("momentum")
    traits = _unusual(first) if name in _KINDS and not is_plain else {}
    if name not in _KINDS or _is_mixed(groups) or _has_changed(ranks):
        traits["rule"] = "other"
    if not {*name.split(" and ")} <= {*_KINDS, ""}:
        traits["rule"] = "own"
    if decays and name == "Adam" and not first.get("decoupled_weight_decay"):
        traits["decay"] = "coupled"
    if any(update.learning_rate != rate for update in updates) or _rates_change(updates):
        traits["schedule"] = "other"
    if any(rank.copies for rank in ranks):
        traits["steps"] = "copies"
    if any(rank.inner for rank in ranks):
        traits["stepped_by"] = "inner"
    if any(rank.header.get("short_betas") for rank in ranks):
        traits["betas_in"] = "float32"
    fields = {
        "optimizer": "sgd" if is_plain else _KINDS.get(name, "momentum"),
        "learning_rate": rate,
        "weight_decay": max(decays, default=0.0),
    }
    return fields, traits


def _rates_change(updates: Sequence[Update]) -> bool:
    first: dict[tuple[int, str], float] = {}
    return any(
        first.setdefault((update.rank, name), update.rate_of(name)) != update.rate_of(name)
        for update in updates
        for name in update.weights
    )


def _decays(groups: Sequence[Mapping[str, Any]]) -> set[float]:
    return {float(group.get("weight_decay") or 0) for group in groups} - {0.0}


def _unusual(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constants of a parameter group that differ from the defaults of Traits.

    If a constant is invalid, the result is `rule: other`, since no check knows the rule.
    """
    constants = {name: group[name] for name in CONSTANTS if name in group}
    if isinstance(constants.get("nesterov"), int):
        constants["nesterov"] = bool(constants["nesterov"])
    try:
        return Traits.from_dict(constants).to_dict()
    except UsageError:
        return {"rule": "other"}


def _is_mixed(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether parameter groups differ, or have a rule that no check knows."""
    first = groups[0]
    return len(_decays(groups)) > 1 or any(
        group.get("maximize")
        or group.get("amsgrad")
        or any(group.get(name) != first.get(name) for name in CONSTANTS)
        for group in groups
    )


def _has_changed(ranks: Sequence[RankTrace]) -> bool:
    return (
        any(rank.changed for rank in ranks)
        or len({_declared_optimizer(rank) for rank in ranks}) > 1
    )


def _declared_optimizer(rank: RankTrace) -> str:
    groups: Sequence[Mapping[str, Any]] = rank.header.get("groups") or ()
    constants = [[group.get(name) for name in (*CONSTANTS, "weight_decay")] for group in groups]
    return json.dumps([rank.header.get("optimizer", ""), constants])


# --- a stored run ---------------------------------------------------------------------------------


def load(files: Iterable[Path]) -> trace.Trace:
    """Return the trace of the run that left these files, one file for each life of a rank.

    The trace ends with status `failed` if a rank is missing or didn't reach its end. Raises
    TraceError for a file that no rank wrote.
    """
    ranks = assembly.recognised([rank_file.load(path) for path in sorted(files)])
    events = assembly.ordered(ranks)
    world_sizes = sorted({int(rank.header["world_size"]) for rank in ranks})
    scenario, traits = scenario_of(ranks, events, world_sizes[-1])
    ending = _ending(LastLives(ranks, events), world_sizes)
    return trace_of(ranks, events, _disturbed(scenario, events), traits, ending)


def _disturbed(scenario: Scenario, events: Sequence[Event]) -> Scenario:
    """Return `scenario` with the planted faults, and the steps where it stopped and resumed."""
    injected = [event.fault for event in events if isinstance(event, Injected)]
    faults = tuple(dict.fromkeys(Fault.from_dict(fault) for fault in injected))
    begun = {event.step for event in events if isinstance(event, Start)}
    stops = sorted(step for step in begun if 0 < step < scenario.num_steps)
    # If a fault killed or halted all ranks, none completed its step, though the run should have.
    num_steps = max([scenario.num_steps, *((fault.step or 0) + 1 for fault in faults)])
    return scenario.with_(faults=faults, num_steps=num_steps, stops=() if faults else tuple(stops))


def _ending(last: LastLives, world_sizes: Sequence[int]) -> tuple[str, str]:
    """Return the final status of the run and the reason, as far as the files show them."""
    if len(world_sizes) > 1:
        sizes = ", ".join(map(str, world_sizes))
        return "failed", f"files of runs with {sizes} workers: keep each run in a folder of its own"
    (world_size,) = world_sizes
    absent = sorted(set(range(world_size)) - last.ranks.keys())
    if absent:
        numbers = ", ".join(map(str, absent))
        return (
            "failed",
            f"no file of rank {numbers}: give the files of all ranks; each must call observe()",
        )
    if problem := escaping.shortened(last.problem):
        return ("halted" if last.met_a_planted_value else "failed"), f"it ended with {problem}"
    if last.closed == last.ranks.keys() or last.all_made_the_same(world_size):
        return "completed", ""
    steps = ", ".join(f"rank {n} after {last.num_steps.get(n, 0)} steps" for n in last.ranks)
    return "failed", f"not every rank came to its end: the files end with {steps}"


# --- the samples that an epoch should have --------------------------------------------------------


def population(ranks: Sequence[RankTrace], events: Iterable[Event]) -> Collection[int] | None:
    """Return the ids of all samples; None if no loader showed how many there are.

    If ranks select different samples, the result has the samples that any rank selects. If samples
    vary from pass to pass, they are unknown, and the result is None.
    """
    if samples_vary(ranks):
        return None
    num_samples = ranks[0].header.get("num_samples") if ranks else None
    chosen = {event.rank: event.ids for event in events if isinstance(event, Selection)}
    if not chosen or len(chosen) < len({rank.rank for rank in ranks}):
        return range(num_samples) if num_samples else None
    return {id_ for ids in chosen.values() for id_ in ids}


def samples_vary(ranks: Sequence[RankTrace]) -> bool:
    """Return whether the script trains from several data sets, or from different parts of one."""
    return any(rank.header.get("varied") for rank in ranks)


def is_population_known(ranks: Sequence[RankTrace], samples: Collection[int] | None) -> bool:
    """Return whether each epoch should have all `samples`.

    False if `samples` is None, or if a sampler of the script decides which samples are drawn.
    """
    return samples is not None and all(rank.header.get("thorough", True) for rank in ranks)


# --- epochs that a script doesn't report ----------------------------------------------------------


def are_epochs_reported(ranks: Sequence[RankTrace]) -> bool:
    """Return whether all ranks report epochs, or have a loader that shows epochs."""
    return all(rank.epochs is not False for rank in ranks)


def is_endless_pass(
    ranks: Sequence[RankTrace], events: Sequence[Event], population: Collection[int] | None
) -> bool:
    """Return whether all samples come from one pass of a loader that never ends.

    In such a pass, a sample is repeated only after all of `population` have been drawn.
    """
    is_seen = all(rank.header.get("samples") == "index" for rank in ranks)
    shards = [event for event in events if isinstance(event, Shard)]
    if not is_seen or not population or any(shard.epoch or shard.unknown for shard in shards):
        return False
    drawn: dict[int, list[int]] = defaultdict(list)
    for shard in shards:
        drawn[shard.step].extend(shard.ids)
    seen = set[int]()
    for _, ids in sorted(drawn.items()):
        if len({*ids}) < len(ids) or not seen.isdisjoint(ids):
            return seen.union(ids).issuperset(population)
        seen.update(ids)
    return False


# --- rounds of ranks that step alone --------------------------------------------------------------


def outer_step(
    ranks: Sequence[RankTrace], events: Sequence[Event]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the scenario's options and the traits of the outer step.

    Both are empty if no rule was recorded. The option `inner_steps` is left out if it was not
    declared and rounds have several lengths or an unknown length.
    """
    rules = [rank.outer for rank in ranks if rank.outer]
    meetings: dict[int, set[int]] = defaultdict(set)
    for event in events:
        if isinstance(event, Synchronised):
            meetings[event.rank].add(event.step)
    if not rules:
        return {}, {}
    first = rules[0]
    options: dict[str, Any] = {}
    declared = next((rule["inner_steps"] for rule in rules if "inner_steps" in rule), None)
    length = declared or rounds.usual_length([sorted(steps) for steps in meetings.values()])
    if length is not None:
        options["inner_steps"] = length
    if first["rule"] == "other" or any(_bare(rule) != _bare(first) for rule in rules):
        return options, {"outer": "other"}
    options |= {"outer_learning_rate": first["lr"], "outer_momentum": first["momentum"]}
    return options, {} if first["rule"] == "nesterov" else {"outer": first["rule"]}


def _bare(rule: Any) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if name != "inner_steps"}
