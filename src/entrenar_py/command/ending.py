"""Determine how a run of a command ended, and why, from exit code, output and ranks' files.

The exit code alone is not enough: a process group may fail or hang while it is taken down, after
training. A run that hung has completed if all ranks recorded the end of training; one that failed,
if one rank did and all others made as many steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from entrenar_py.command import stacks
from entrenar_py.command.asked import Asked
from entrenar_py.command.launch import Ended
from entrenar_py.rank_files.assembly import LastLives
from entrenar_py.rank_files.rank_trace import RankTrace
from entrenar_py.trace import Event
from entrenar_py.untrusted import escaping

OUTPUT_BYTES_MAX = 2**18
_BEGINS = "Traceback (most recent call last):"
_RANK = re.compile(r"\[(?:rank)?\d+\]:\s?|\[default\d+\]:\s?")  # in front of a rank's lines
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?::(?:\s.*)?)?")
# Exceptions that launchers raise when a worker has failed.
_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException")
LINE = "obs = entrenar_py.observe(model, optimizer, sampler=loader)"


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
    error = escaping.shortened(script_error(ended.output)) if ended.code else ""
    ended_by = f"{ended.how}: {_last_words(last, error, ended)}"
    how = f"{ended_by} (its output is in {ended.output})"
    folder = ended.output.parent
    if not folder.is_dir():
        why = f"the folder of its records, {folder}, was removed while it ran"
        return "failed", f"{why}; {ended_by}"
    if not ranks and problems:
        return "failed", f"{ended.how}, and what its ranks recorded is damaged: {problems[0]}"
    if ended.code is None and last.closed != set(range(asked.world_size)):
        return "failed", f"{ended.how}: {_hanging(last, asked, ended)} (output: {ended.output})"
    if not ranks:
        return "failed", _nothing_recorded(ended, error, how)
    world_sizes = {int(rank.header["world_size"]) for rank in last.ranks.values()}
    if world_sizes != {asked.world_size}:
        sizes = ", ".join(map(str, sorted(world_sizes)))
        return "failed", (
            f"it was launched for {asked.world_size} workers and ran with {sizes}: put "
            "{world_size} into the command as the number of workers"
        )
    status, reason = _of_ranks(last, asked, ended, ended_by, how)
    return ("failed", problems[0]) if problems and status == "completed" else (status, reason)


def _of_ranks(
    last: LastLives, asked: Asked, ended: Ended, ended_by: str, how: str
) -> tuple[str, str]:
    """Return status and reason of a run whose ranks have recorded something."""
    if ended.code in (0, None) and not last.problem:
        return "completed", ""
    if last.met_a_planted_value:
        return "halted", ended_by
    if "leave" in last.struck and not any(rank.life for rank in last.ranks.values()):
        return "failed", (
            "a worker was killed, and the launcher restarted nobody: let it restart workers "
            "(torchrun --max-restarts=1), and let the script go on from a checkpoint in {workdir} "
            f"(output: {ended.output})"
        )
    if "leave" in last.struck:
        return "failed", f"after a worker was killed and restarted, the run failed: {how}"
    if last.all_made_the_same(asked.world_size) and not last.problem:
        return "completed", ""
    return "failed", how


def _last_words(last: LastLives, error: str, ended: Ended) -> str:
    """Return the error that a rank recorded, else the script's own, else the last line printed."""
    printed = [line for line in ended.tail if any(map(str.isalnum, line))]  # not torchrun's rulers
    fallback = printed[-1] if printed else "it printed nothing"
    return escaping.shortened(last.problem) or error or fallback


def _nothing_recorded(ended: Ended, error: str, how: str) -> str:
    """Return why no rank wrote a file, and what to do about it."""
    if error:
        return f"nothing was recorded before it failed: {how}"
    if ended.code:  # why it failed comes first: most such scripts have the line
        return f"nothing was recorded: {how}; check that the script that trains calls `{LINE}`"
    return f"nothing was recorded: add `{LINE}` to the script; {how}"


def _hanging(last: LastLives, asked: Asked, ended: Ended) -> str:
    """Return how many steps each rank made, and where it stands."""
    where = stacks.places(ended.output.parent)
    if not last.num_steps and not where:
        return "no rank had begun"
    steps = ", ".join(f"rank {rank} {num}" for rank, num in sorted(last.num_steps.items()))
    return f"steps made: {steps or 'none'}; {stacks.in_words(where, asked.world_size)}"


def script_error(output: Path) -> str:
    """Return the line of the script's last exception in the file `output`, or "" if it has none.

    Exceptions of launchers are skipped.
    """
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - OUTPUT_BYTES_MAX))
            text = file.read(OUTPUT_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
    return _last_error(text.splitlines())


def _last_error(lines: Iterable[str]) -> str:
    error_line, within = "", False
    for printed in lines:
        prefix = _RANK.match(printed)
        line = printed[prefix.end() :] if prefix else printed
        if line.rstrip() == _BEGINS:
            within = True
        elif within and _ERROR.fullmatch(line.rstrip()):
            within = False
            if line.partition(":")[0].rpartition(".")[2] not in _OF_LAUNCHERS:
                error_line = line.rstrip()
    return error_line
