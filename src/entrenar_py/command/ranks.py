"""The files of a run's ranks put together: one trace, of the scenario that they show it was."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entrenar_py import systems, trace
from entrenar_py.checks import knob_pairs
from entrenar_py.checks.update_rule import DEFAULTS
from entrenar_py.command import stacks
from entrenar_py.command.knobs import KNOBS
from entrenar_py.command.launch import Ended
from entrenar_py.command.script_errors import error as error_in
from entrenar_py.faults import Fault
from entrenar_py.rank_files import assembly, rank_file
from entrenar_py.rank_files.rank_file import SUFFIX, RankTrace
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Event, Injected, Shard, Start, Update
from entrenar_py.untrusted import escaping

SYSTEM = "command"
LINE = "obs = entrenar_py.observe(model, optimizer, sampler=loader)"
# torch.optim's optimizers whose rule is known to the checks, and the one in a scenario's words.
_RULES = {"SGD": "momentum", "Adam": "adamw", "AdamW": "adamw"}


@dataclass(frozen=True)
class Turn:
    """A knob of the script that does not stand as usual; and others that are to change nothing,
    but for what this one may do wrong beside them.
    """

    knob: str
    value: str
    beside: tuple[tuple[str, str], ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """What stands for each of these knobs in the command."""
        return {self.knob: self.value, **dict(self.beside)}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run was launched as."""

    world_size: int
    seed: int
    repeat: int = 0
    faults: tuple[Fault, ...] = ()
    stops: tuple[int, ...] = ()
    turn: Turn | None = None


def trace_of(
    folder: Path, asked: Asked, ended: Ended, like: Scenario | None, *, unclipped: bool = False
) -> trace.Trace:
    """The trace of the run whose ranks' files are in `folder`; `failed` where it came to no end.

    What a run did not live to show (how many steps it makes, what is in its data) it has from
    `like`, the scenario of an undisturbed one. `unclipped`: the command was told to clip nothing.
    """
    ranks, problems = assembly.load(folder)
    events = assembly.ordered(ranks)
    scenario = _scenario(ranks, events, asked, like)
    if unclipped and not (asked.turn and asked.turn.knob == "clip"):
        options = {name: told for name, told in scenario.options.items() if name != "clipping"}
        scenario = scenario.with_(options=options)
    if asked.turn is not None and like is not None and not asked.stops:
        told, usual = asked.turn, KNOBS[asked.turn.knob].usual
        scenario = knob_pairs.option(scenario, like, told.knob, told.value, usual, told.beside)
    events = in_their_epochs(events, scenario)
    status, reason = _ending(ranks, events, asked, ended)
    if problems and not ranks:
        status, reason = "failed", f"{ended.how}, and what its ranks recorded is damaged: "
        reason += problems[0]
    if problems and status == "completed":
        status, reason = "failed", problems[0]
    environment = dict(ranks[0].header.get("versions", {})) if ranks else {}
    if ended.num_left:
        left = f"{ended.num_left} process{'' if ended.num_left == 1 else 'es'}"
        environment["killed"] = f"{left} that it left running"
    found = trace.Trace(
        scenario=scenario,
        environment=environment,
        promises=("rounds",) if any(isinstance(e, trace.Synchronised) for e in events) else (),
        events=(
            *assembly.numbered(events, scenario.accumulation, assembly.places(ranks)),
            trace.End(status=status, reason=reason),
        ),
    )
    fault = systems.missed(found) if status == "completed" else None
    if fault is None:
        return found
    # What was to go wrong did not: that it went well then says nothing.
    reason = f"fault {fault.to_dict()} never struck: no gradient came by there, or no such step"
    end = trace.End(status="failed", reason=reason)
    return replace(found, events=(*found.events[:-1], end))


def have_closed(folder: Path, world_size: int, life: int) -> bool:
    """Whether all ranks say, in their `life` or a later one, that training is over, and by nothing
    bad.
    """
    last = {
        path.name.partition("-")[0]: path for path in sorted(folder.glob(f"[0-9]*-[0-9]*{SUFFIX}"))
    }
    closed = [path for path in last.values() if rank_file.life_of(path) >= life]
    return len(closed) == world_size and all(map(rank_file.is_closed, closed))


# --- what happened ----------------------------------------------------------------------------


def in_their_epochs(events: Sequence[Event], scenario: Scenario) -> list[Event]:
    """Shards with the epochs of the whole run: who goes on in step k counts its own from 0."""
    batches = scenario.num_samples / scenario.batch_size
    per_epoch = int(batches) if scenario.options.get("drop_last") else math.ceil(batches)
    begun: dict[int, int] = {}  # rank -> epochs before its life
    found: list[Event] = []
    for event in events:
        if isinstance(event, Start):
            begun[event.rank] = event.step // max(per_epoch, 1)
        if isinstance(event, Shard):
            event = replace(event, epoch=event.epoch + begun.get(event.rank, 0))
        found.append(event)
    return found


def _ending(
    ranks: Sequence[RankTrace], events: Sequence[Event], asked: Asked, ended: Ended
) -> tuple[str, str]:
    """How the run ended: `completed`, `halted` (a planted value stopped it) or `failed`; and why.

    An exit code says little where the work was done: a process group may fail, or hang, when it is
    taken down. So a run has completed if its ranks came to their end, or one did and no other made
    fewer steps.
    """
    ranks = [*{one.rank: one for one in sorted(ranks, key=lambda one: one.life)}.values()]
    told = escaping.shortened(next((one.problem for one in ranks if one.problem), ""))
    printed = [line for line in ended.tail if any(map(str.isalnum, line))]  # not torchrun's rulers
    last = printed[-1] if printed else "it printed nothing"
    error = escaping.shortened(error_in(ended.output)) if ended.code else ""
    ended_by = f"{ended.how}: {told or error or last}"
    how = f"{ended_by} (its output is in {ended.output})"
    folder = ended.output.parent
    if not folder.is_dir():
        why = f"the folder that it records to, {folder}, was removed while it ran"
        return "failed", f"{why}; {ended_by}"
    made: dict[int, int] = defaultdict(int)
    for event in events:
        if isinstance(event, Update):
            made[event.rank] = max(made[event.rank], event.step + 1)
    closed = {one.rank for one in ranks if one.ended and not one.problem}
    if ended.code is None and closed != set(range(asked.world_size)):
        return "failed", f"{ended.how}: {_hanging(made, asked, ended)} (output: {ended.output})"
    if not ranks and error:
        return "failed", f"nothing was recorded before it failed: {how}"
    if not ranks:
        if ended.code:  # why it failed comes first: most such scripts have the line
            return "failed", f"nothing was recorded: {how}; the script that trains calls `{LINE}`"
        return "failed", f"nothing was recorded: add `{LINE}` to the script; {how}"
    world_sizes = {one.header["world_size"] for one in ranks}
    if world_sizes != {asked.world_size}:
        found = ", ".join(map(str, sorted(world_sizes)))
        return "failed", (
            f"it was to run with {asked.world_size} workers and ran with {found}: say "
            "{world_size} where the command says how many"
        )
    if not told and (ended.code == 0 or ended.code is None):
        return "completed", ""
    struck = [event.fault["kind"] for event in events if isinstance(event, Injected)]
    if any(kind.startswith("non_finite") for kind in struck):
        return "halted", ended_by
    if "leave" in struck:
        return "failed", (
            f"a worker was killed, and the run ended with it: {how}; it would have to be started "
            "again (torchrun --max-restarts=1) and to go on from a checkpoint in {workdir}"
        )
    ends = [made[rank] for rank in closed]
    if ends and {made[rank] for rank in range(asked.world_size)} == {max(ends)} and not told:
        return "completed", ""
    return "failed", how


def _hanging(made: Mapping[int, int], asked: Asked, ended: Ended) -> str:
    """How far each rank came, and where it stood."""
    where = stacks.places(ended.output.parent)
    if not made and not where:
        return "no rank had begun"
    steps = ", ".join(f"rank {rank} {num}" for rank, num in sorted(made.items()))
    return f"steps made: {steps or 'none'}; {stacks.told(where, asked.world_size)}"


# --- what it was ------------------------------------------------------------------------------


def _scenario(
    ranks: Sequence[RankTrace], events: Sequence[Event], asked: Asked, like: Scenario | None
) -> Scenario:
    disturbed = asked.faults or asked.stops or asked.repeat
    if like is not None and (disturbed or not any(isinstance(one, Update) for one in events)):
        return like.with_(
            world_size=asked.world_size,
            num_shards=max(like.num_shards, asked.world_size),
            seed=asked.seed,
            repeat=asked.repeat,
            faults=asked.faults,
            stops=asked.stops,
        )
    found = scenario_of(ranks, events, asked.world_size)
    if like is not None:  # it is to be the same training, and a check says that it has other rates
        found = found.with_(learning_rate=like.learning_rate)
    return found.with_(seed=asked.seed, repeat=asked.repeat)


def scenario_of(ranks: Sequence[RankTrace], events: Sequence[Event], world_size: int) -> Scenario:
    """The scenario that these files and events show; its seed is not known to them."""
    header: Mapping[str, Any] = ranks[0].header if ranks else {}
    shards_of = [event for event in events if isinstance(event, Shard)]
    steps = {event.step for event in events if isinstance(event, Update)}
    per_step: dict[int, int] = defaultdict(int)
    for shard in shards_of:
        per_step[shard.step] += len(shard.ids)
    ids = [sample for shard in shards_of for sample in shard.ids]
    num_samples = header.get("num_samples") or max(ids, default=0) + 1
    accumulation = max((shard.shard for shard in shards_of), default=0) + 1
    num_samples = max(num_samples, world_size)
    num_parts = len({*assembly.places(ranks).values()})
    told = _optimizer(
        header,
        [event.learning_rate for event in events if isinstance(event, Update)],
        changed=any(one.changed for one in ranks) or len({_constants(one) for one in ranks}) > 1,
    )
    if any(one.layout is not None for one in ranks):
        told["options"]["shared"] = True  # ranks that draw the same samples share a shard
    if compressed := next((one.compression for one in ranks if one.compression), ""):
        told["options"]["compressed"] = compressed
    if header.get("batch_norm") and any(one.local for one in ranks):
        told["options"]["batch_norm"] = True  # whose statistics forward passes changed
    return Scenario(
        system=SYSTEM,
        workload="own",
        world_size=world_size,
        seed=0,
        num_shards=max(accumulation * num_parts, world_size),
        num_samples=num_samples,
        batch_size=min(max(per_step.values(), default=1) or 1, num_samples),
        num_steps=max(steps, default=0) + 1,
        accumulation=accumulation,
        dropout=float(header.get("dropout", 0.0)),
        detail="values" if header.get("values") else "digests",
        **told,
    )


def _optimizer(
    header: Mapping[str, Any], rates: Sequence[float], *, changed: bool
) -> dict[str, Any]:
    """The scenario's fields on the optimizer, and in its `options` what differs from the usual;
    `changed`: its constants were not the same all the time.

    `rule: other` where no check knows what the optimizer makes of a gradient, `schedule: other`
    where the learning rate changes.
    """
    groups: Sequence[Mapping[str, Any]] = header.get("groups") or [{}]
    name, first = header.get("optimizer", ""), groups[0]
    decays = {float(group.get("weight_decay") or 0) for group in groups} - {0.0}
    rule = _RULES.get(name, "momentum")
    if name == "SGD" and not first.get("momentum"):
        rule = "sgd"
    strange = (
        name not in _RULES
        or len(decays) > 1
        or changed
        or any(group.get("maximize") or group.get("amsgrad") for group in groups)
        or any(group.get(key) != first.get(key) for group in groups for key in DEFAULTS)
    )
    options: dict[str, Any] = {"clipping": "other"}  # gradients are recorded as they are applied
    options |= {name: True for name in ("drop_last", "replacement") if header.get(name)}
    for key, usual in DEFAULTS.items():
        if key in first and rule != "sgd" and _plain(first[key]) != _plain(usual):
            options[key] = _plain(first[key])
    options |= {"rule": "other"} if strange else {}
    coupled = name == "Adam" and not first.get("decoupled_weight_decay")
    options |= {"decay": "coupled"} if coupled and decays else {}
    rate = float(first.get("initial_lr", first.get("lr", 0.0)))
    options |= {"schedule": "other"} if any(one != rate for one in rates) else {}
    return {
        "optimizer": rule,
        "learning_rate": rate,
        "weight_decay": max(decays, default=0.0),
        "options": options,
    }


def _constants(one: RankTrace) -> str:
    """What a rank declared of its optimizer when it began, but for rates."""
    groups: Sequence[Mapping[str, Any]] = one.header.get("groups") or ()
    told = [[group.get(key) for key in (*DEFAULTS, "weight_decay")] for group in groups]
    return json.dumps([one.header.get("optimizer", ""), told])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value
