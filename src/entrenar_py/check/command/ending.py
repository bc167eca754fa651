"""Determine how a run of a command ended, and why, from exit code, output and ranks' files.

The exit code alone is not enough: a process group may fail or hang while it is taken down, after
training. A run that hung has completed if all ranks recorded the end of training; one that failed,
if one rank did and all others made as many steps.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from entrenar_py.check.command import own_folder, script_errors, stacks
from entrenar_py.check.command.asked import Asked
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.rank_files import notes
from entrenar_py.check.rank_files.assembly import LastLives
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.trace import Event, Shard
from entrenar_py.shared.untrusted import escaping

LINE = "obs = entrenar_py.observe(model, optimizer, sampler=loader)"

# A report names the run, which is the folder of its output.
NOT_RESTARTED = (
    "the launcher restarted no worker, or none that recorded anything: give torchrun "
    "--max-restarts=1, and go on from a checkpoint in {workdir}; or exclude the clause"
)


def of(
    ranks: Sequence[RankTrace],
    events: Sequence[Event],
    asked: Asked,
    ended: Ended,
    problems: Sequence[str],
) -> tuple[str, str]:
    """Return the status of the run and the reason for it.

    The status is `completed`, `halted` (a planted value stopped it) or `failed`. `problems` say
    what is wrong with the ranks' files.
    """
    last = LastLives(ranks, events)
    error = script_errors.find(ended.output) if ended.code else ""
    ended_by = f"{ended.how}: {_last_words(last, error, ended)}"
    how = f"{ended_by} (its output is in {_shown(ended.output)})"
    folder = ended.output.parent
    if not folder.is_dir():
        why = f"the folder of its records, {folder}, was removed while it ran"
        return "failed", f"{why}; {ended_by}"
    if not ranks and problems:
        return "failed", f"{ended.how}, and what its ranks recorded is damaged: {problems[0]}"
    if ended.code is None and last.closed != set(range(asked.world_size)):
        return (
            "failed",
            f"{ended.how}: {_hanging(last, asked, ended)} (output: {_shown(ended.output)})",
        )
    if not ranks:
        return "failed", _nothing_recorded(ended, error, how)
    world_sizes = {int(rank.header["world_size"]) for rank in last.ranks.values()}
    if world_sizes != {asked.world_size}:
        return "failed", _of_another_size(ranks, world_sizes, asked)
    status, reason = _of_ranks(last, asked, ended, ended_by, how)
    if status == "failed" and (_skip_apart(last, events) or _is_uneven(last, events)):
        return "completed", ""  # it was ended where only some ranks had made all steps
    return ("failed", problems[0]) if problems and status == "completed" else (status, reason)


def _skip_apart(last: LastLives, events: Iterable[Event]) -> bool:
    """Return whether ranks that made fewer steps than those that were ended made all their passes.

    They drop batches that others train on. Ranks that have fewer batches make fewer passes, and
    those that add up more of them in a step make more.
    """
    limited = {rank for rank, file in last.ranks.items() if file.is_limited}
    others = last.ranks.keys() - limited
    passes = Counter(event.rank for event in events if isinstance(event, Shard))
    if not limited or not others:
        return False
    steps = max(last.num_steps.get(rank, 0) for rank in limited)
    most = max(passes[rank] for rank in limited)
    return all(
        last.num_steps.get(rank, 0) < steps <= passes[rank] and abs(passes[rank] - most) <= 1
        for rank in others
    )


def _is_uneven(last: LastLives, events: Iterable[Event]) -> bool:
    """Return whether ranks that have fewer batches failed only as those with more were ended.

    They wait for these at the end of an epoch (torch's `Join`), and have made all their own steps.
    Where samples are known by their rows alone, nothing shows in which epoch a step is.
    """
    if any(file.header.get("samples", "index") != "index" for file in last.ranks.values()):
        return False
    limited = {rank for rank, file in last.ranks.items() if file.is_limited}
    passes = Counter(event.rank for event in events if isinstance(event, Shard))
    others = last.ranks.keys() - limited
    return bool(limited and others) and all(
        script_errors.is_of_peers(last.ranks[rank].problem)
        and 0 < last.num_steps.get(rank, 0) < min(last.num_steps.get(one, 0) for one in limited)
        and 0 < passes[rank] < min(passes[one] for one in limited)
        for rank in others
    )


def by_all(ranks: Sequence[RankTrace], events: Sequence[Event]) -> Sequence[Event]:
    """Return the events of the steps that all ranks made in one epoch, if their numbers are uneven.

    Later steps may have one number and be other steps.
    """
    if not _is_uneven(LastLives(ranks, events), events):
        return events
    epochs: dict[int, dict[int, int]] = defaultdict(dict)  # step -> rank -> epoch
    for event in events:
        if isinstance(event, Shard):
            epochs[event.step][event.rank] = event.epoch
    size = len({rank.rank for rank in ranks})
    apart = (s for s, of in epochs.items() if len(of) < size or len({*of.values()}) > 1)
    end = min(apart, default=0)
    return [event for event in events if (getattr(event, "step", None) or 0) < end]


def unresumed(ranks: Sequence[RankTrace], asked: Asked, ended: Ended, read_only: str) -> str:
    """Return in words that a run, stopped from inside, was not resumed though it read a checkpoint.

    Its last launch ended by an error as it loaded one, or without a step. `read_only` is the line
    of a process that has loaded weights of a step and trained nothing. A {steps} that stops a run
    may rightly end or refuse the next launch: "" then.
    """
    stops = asked.stops if asked.interrupted else ()
    lives = len({rank.life for rank in ranks})
    if not 0 < lives <= len(stops):
        return ""
    stop, error = stops[lives - 1], script_errors.of_loading(ended.output)
    if ended.code and error:
        why = escaping.shortened(error.replace(_copied(ended), ""))
        return f"after the stop before step {stop} the script fails to load its checkpoint: {why}"
    if ended.code == 0 and read_only:
        return (
            f"after the stop before step {stop} the script read a checkpoint ({read_only}), and "
            "ended by itself without a step"
        )
    return ""


def _of_another_size(ranks: Sequence[RankTrace], sizes: Iterable[int], asked: Asked) -> str:
    """Return the reason of a run that had another number of workers than it was launched for."""
    first = sum(rank.header["rank"] == 0 for rank in ranks)
    if first > 1 and first % asked.world_size == 0:
        return (
            f"{first} processes ran as rank 0: if RANK counts within a part of the job (a replica "
            "group), set ENTRENAR_RANK and ENTRENAR_WORLD_SIZE in each to those of the whole job"
        )
    ran = ", ".join(map(str, sorted(sizes)))
    return (
        f"it was launched for {asked.world_size} workers and ran with {ran}: put {{world_size}} "
        "into the command as the number of workers"
    )


def _of_ranks(
    last: LastLives, asked: Asked, ended: Ended, ended_by: str, how: str
) -> tuple[str, str]:
    """Return status and reason of a run whose ranks have recorded something."""
    if ended.code in (0, None) and not last.problem:
        return "completed", ""
    if last.met_a_planted_value:
        return "halted", ended_by
    if "leave" in last.struck and not any(rank.life for rank in last.ranks.values()):
        return "failed", NOT_RESTARTED
    if "leave" in last.struck:
        return "failed", f"after the restart of workers: {how}"
    num_lives = 1 + max(rank.life for rank in last.ranks.values())
    if ended.code and num_lives <= len(asked.stops) and not script_errors.of_loading(ended.output):
        # What was recorded is of an earlier launch.
        return "failed", f"after the stop before step {asked.stops[num_lives - 1]}: {how}"
    if last.all_made_the_same(asked.world_size) and not last.problem:
        return "completed", ""
    limited = sorted(rank for rank, file in last.ranks.items() if file.is_limited)
    if limited and len(limited) < asked.world_size:
        made = ", ".join(f"rank {rank} {num}" for rank, num in sorted(last.num_steps.items()))
        return "failed", (
            f"rank {limited[0]} was ended after its last step (--steps) while others went on; "
            f"steps made: {made}. If ranks make different numbers of steps, put {{steps}} "
            "into the command, and let the script end after so many"
        )
    return "failed", how


def _last_words(last: LastLives, error: str, ended: Ended) -> str:
    """Return the error that was printed, else one that a rank recorded, else the last line."""
    printed = script_errors.last_line(ended.output, ended.tail)
    words = [one for one in (error, last.problem, printed) if one]
    causes = [one for one in words if not script_errors.is_of_peers(one)]
    cause = next(iter(causes or words), "it printed nothing")
    return escaping.shortened(cause.replace(_copied(ended), ""))


def _copied(ended: Ended) -> str:
    """Return what a file's path in the run's own folder has in front of that in the user's."""
    return str(ended.output.parent / own_folder.FOLDER)


def _shown(path: Path) -> str:
    """Return a path as it is seen from the working folder, if it lies below that."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _nothing_recorded(ended: Ended, error: str, how: str) -> str:
    """Return why no rank wrote a file, and what to do about it."""
    if error and not notes.problems(ended.output.parent):
        return f"nothing was recorded before it failed: {how}"
    if why := notes.why_nothing(ended.output.parent):
        return f"nothing was recorded: {why}; {how}"
    if ended.code:  # why it failed comes first: most such scripts have the line
        return f"nothing was recorded: {how}; check that the script that trains calls `{LINE}`"
    return f"nothing was recorded: add `{LINE}` to the script; {how}"


def _hanging(last: LastLives, asked: Asked, ended: Ended) -> str:
    """Return how many steps each rank made, and where it stands."""
    where = {
        rank: replace(one, file=_shown(Path(one.file.removeprefix(_copied(ended)))))
        for rank, one in stacks.places(ended.output.parent).items()
    }
    if not last.num_steps and not where:
        return "no rank had begun"
    steps = ", ".join(f"rank {rank} {num}" for rank, num in sorted(last.num_steps.items()))
    return f"steps made: {steps or 'none'}; {stacks.in_words(where, asked.world_size)}"
