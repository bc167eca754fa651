"""The trace of a run of a command: what its ranks recorded, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from entrenar_py.check.causes import knob_pairs, own_sums
from entrenar_py.check.clauses import met_rounds
from entrenar_py.check.clauses.knobs import KNOBS
from entrenar_py.check.command import ending
from entrenar_py.check.command.asked import Asked
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.rank_files import assembly, notes, observed_run, rank_file
from entrenar_py.check.rank_files.arrangements import Arrangement
from entrenar_py.check.rank_files.rank_file import SUFFIX, RankTrace
from entrenar_py.shared import systems, trace
from entrenar_py.shared.faults import JOINED, LONGER
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Event, Traits, Update


def of(
    folder: Path,
    asked: Asked,
    ended: Ended,
    like: trace.Trace | None,
    *,
    unclipped: bool,
    seeded: bool,
    starts: str,
    says_how: bool,
    arrangement: Arrangement | None = None,
) -> trace.Trace:
    """Return the trace of the run whose ranks' files are in `folder`.

    If its ranks hold no DTensors, `arrangement` says how they share the model.

    A run may end too early to show its number of steps or its data. These are then taken from
    `like`, a run without faults or stops. `unclipped`: the command was told to clip nothing.
    `seeded`: it was told its seed. `starts` is that trait. `says_how`: the command has a way to
    resume, so that the script is meant to.
    """
    ranks, problems = assembly.load(folder)
    if arrangement is not None and not any(rank.pieces for rank in ranks):
        ranks = arrangement.of(ranks)
    events = assembly.ordered(ranks)
    common = ending.by_all(ranks, events)
    scenario, traits = _scenario(ranks, common, asked, like, unclipped=unclipped)
    saved = notes.saved(folder)
    if says_how:
        saved = replace(saved, loads_late=False)
    is_cut = any(rank.is_limited for rank in ranks)
    traits = replace(traits, seeded=seeded, starts=starts, **saved.traits(is_cut=is_cut))
    how = ending.of(ranks, events, asked, ended, problems)
    recorded = observed_run.trace_of(ranks, common, scenario, traits, how)
    if ended.num_left:
        left = f"{ended.num_left} process{'' if ended.num_left == 1 else 'es'}"
        killed = {**recorded.environment, "killed": f"{left} that it left running"}
        recorded = replace(recorded, environment=killed)
    if is_cut:
        ended_by = {"ended": "by entrenar-check after its steps (--auto, no {steps} or {epochs})"}
        recorded = replace(recorded, environment={**recorded.environment, **ended_by})
    if asked.option:
        recorded = replace(
            recorded, environment={**recorded.environment, "resumed_by": asked.option}
        )
    if why := ending.unresumed(ranks, asked, ended, saved.read_only):
        recorded = replace(recorded, environment={**recorded.environment, "unresumed": why})
    return _with_its_faults(met_rounds.seen(own_sums.seen_through(recorded)))


def have_closed(folder: Path, world_size: int, life: int) -> bool:
    """Return whether all ranks have recorded that training ended without an error.

    Each must have done so in the life `life` (0 is the rank's first), or in a later one.
    """
    last = {
        path.name.partition("-")[0]: path for path in sorted(folder.glob(f"[0-9]*-[0-9]*{SUFFIX}"))
    }
    closed = [path for path in last.values() if rank_file.life_of(path) >= life]
    return len(closed) == world_size and all(map(rank_file.is_closed, closed))


def _with_its_faults(recorded: trace.Trace) -> trace.Trace:
    """Return the trace, changed to `failed` if a fault was planned and never struck."""
    fault = systems.missed(recorded) if recorded.end.status == "completed" else None
    if fault is None:
        return recorded
    reason = (
        f"the planned fault {fault.kind} (rank {fault.rank}, step {fault.step}) never struck: the "
        "rank has no gradient in that step, or does not make it"
    )
    end = trace.End(status="failed", reason=reason)
    return replace(recorded, events=(*recorded.events[:-1], end))


def _scenario(
    ranks: Sequence[RankTrace],
    events: Sequence[Event],
    asked: Asked,
    like: trace.Trace | None,
    *,
    unclipped: bool,
) -> tuple[Scenario, Traits]:
    """Return scenario and traits as the ranks' files show them, or as in `like` if they can't."""
    # Whether one worker has merged batches is to be seen: a script may cut its batches itself.
    is_shown = any(fault.kind in (*JOINED, LONGER) for fault in asked.faults)
    disturbed = (asked.faults and not is_shown) or asked.stops or asked.repeat
    if like is not None and (disturbed or not any(isinstance(event, Update) for event in events)):
        traits = like.traits
        scenario = like.scenario.with_(
            world_size=asked.world_size,
            num_shards=max(like.scenario.num_shards, asked.world_size),
            faults=asked.faults,
            stops=asked.stops,
        )
    else:
        scenario, traits = observed_run.scenario_of(ranks, events, asked.world_size)
        if like is not None:  # the intended rate: a check tells if the run had another
            scenario = scenario.with_(learning_rate=like.scenario.learning_rate)
        if is_shown:
            scenario = scenario.with_(faults=asked.faults)
    scenario = scenario.with_(seed=asked.seed, repeat=asked.repeat)
    turn = asked.turn
    if unclipped:
        traits = _as_told_to_clip(traits, asked)
    if turn is None or like is None or asked.stops:
        return scenario, traits
    usual = KNOBS[turn.knob].usual
    told = knob_pairs.told(
        scenario, knob=turn.knob, value=turn.value, usual=usual, beside=turn.beside
    )
    return told, traits


def _as_told_to_clip(traits: Traits, asked: Asked) -> Traits:
    """Return the traits of a run of a command that was told its clipping norm.

    A script that declares another norm clips to the one that it was told.
    """
    turn = asked.turn
    if not (turn and turn.knob == "clip"):
        traits = replace(traits, clipping="told")
    told = (turn.values if turn else {}).get("clip", KNOBS["clip"].usual)
    declared = traits.clip_norm
    keeps = declared is not None and math.isclose(declared, float(told), rel_tol=1e-6)
    return traits if keeps else replace(traits, clip_norm=None)
