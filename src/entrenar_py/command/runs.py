"""Which runs of a command the checks need beside each other, and these runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from entrenar_py import trace
from entrenar_py.checks.knobs import KNOBS
from entrenar_py.checks.needs import (
    ALONE,
    COUNTS,
    KILLED,
    POISONED,
    REPEATED,
    RESUMED,
    SAVED,
    Need,
)
from entrenar_py.command import knobs, run_trace
from entrenar_py.command.asked import Asked, Turn
from entrenar_py.command.launch import OUTPUT, Ended, launch
from entrenar_py.errors import UsageError, did_you_mean
from entrenar_py.faults import Fault
from entrenar_py.harness import interrupts
from entrenar_py.observing import FAULTS
from entrenar_py.scenario import Scenario
from entrenar_py.trace import Trace

WORLD_SIZES = (2,)  # and with one, where a check compares with that
DEADLINE_S = 300.0
NUM_STEPS = 8
# What stands in a command for what differs from run to run, and what it is.
PLACEHOLDERS = {
    "world_size": "how many workers there are",
    "seed": "the seed",
    "steps": "how many optimizer steps to make in all, also after a resume",
    "workdir": "a folder of the run, for checkpoints: the same before a stop and after it",
    "trace_dir": "the folder that the ranks record to",
    **{name: knob.says for name, knob in KNOBS.items()},
}

Show = Callable[[str], None]  # told what is run now
Launcher = Callable[..., Ended]  # what `launch.launch` does


@dataclass(frozen=True, kw_only=True)
class Run:
    """The trace of a run, and what it was launched as."""

    asked: Asked
    trace: Trace


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of a command for checks with these `needs`.

    `spelled` says what stands in the command for the values of its knobs, by knob and value; a
    value that is not there stands for itself.
    """

    command: tuple[str, ...]
    needs: Collection[Need]
    folder: Path
    world_sizes: tuple[int, ...] = WORLD_SIZES
    seed: int = 0
    num_steps: int = NUM_STEPS
    deadline_s: float = DEADLINE_S
    launch: Launcher = launch
    spelled: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_placeholders(self.command)
        knobs.require_spelled(self.spelled, [name for name in KNOBS if self.can_say(name)])
        for option, place, usual in (("seed", "seed", 0), ("num_steps", "steps", NUM_STEPS)):
            if getattr(self, option) != usual and not self.can_say(place):
                raise UsageError(
                    f"--{place} {getattr(self, option)}: the command has no {{{place}}}, so that "
                    "it would never hear of it; say where it goes, or leave the option out",
                    field=place,
                )

    def can_say(self, name: str) -> bool:
        """Whether the command has a place for it."""
        return any("{" + name + "}" in word for word in self.command)

    @property
    def most(self) -> int:
        """The largest number of workers: with so many it is run again, disturbed and stopped."""
        return max(self.world_sizes)

    def plain(self) -> dict[str, Asked]:
        """Name -> the undisturbed run with each number of workers, the largest first."""
        models = {1} if {ALONE, COUNTS}.intersection(self.needs) else set()
        sizes = sorted({*models, *self.world_sizes}, reverse=True)
        return {_name(size): Asked(world_size=size, seed=self.seed) for size in sizes}

    def others(self, like: Scenario) -> dict[str, Asked]:
        """Name -> what else is run, where the undisturbed run was `like`."""
        name, middle, rank = _name(self.most), like.num_steps // 2, self.most - 1
        nan = Fault(kind="non_finite_gradient", step=middle, rank=rank, value="nan")
        leave = Fault(kind="leave", step=middle, rank=rank)
        stops = _stops(like) if self.can_say("steps") and self.can_say("workdir") else ()
        asked = Asked(world_size=self.most, seed=self.seed)
        found: dict[str, Asked] = {}
        if REPEATED in self.needs:
            found[f"{name}-again"] = replace(asked, repeat=1)
        if POISONED in self.needs:
            found[f"{name}-nan"] = replace(asked, faults=(nan,))
        if KILLED in self.needs and self.most > 1:
            found[f"{name}-killed"] = replace(asked, faults=(leave,))
        if {RESUMED, SAVED}.intersection(self.needs) and stops:
            # In micro-batches, which the place in the data is counted in or is not; if it can be.
            turned = next(iter(self._turns("accumulation")), None)
            if turned is not None:
                found[_name(self.most, turned)] = replace(asked, turn=turned)
            found[f"{_name(self.most, turned)}-resumed"] = replace(asked, stops=stops, turn=turned)
        return found

    def _turns(self, knob: str, usual: Trace | None = None) -> list[Turn]:
        """What a knob is turned to, if the command has it."""
        if not self.can_say(knob):
            return []
        beside = knobs.beside(knob, [name for name in KNOBS if self.can_say(name)])
        return [Turn(knob, value, beside) for value in KNOBS[knob].turns(usual)]

    def pairs(self, usual: Trace) -> dict[str, Asked]:
        """Name -> a run with one knob turned, of those that the command has."""
        needed = {need.knob for need in self.needs}
        asked = Asked(world_size=self.most, seed=self.seed)
        return {
            _name(self.most, turn): replace(asked, turn=turn)
            for name in KNOBS
            if name in needed
            for turn in self._turns(name, usual)
        }


def record(plan: Plan, show: Show) -> Iterator[tuple[Path, Run]]:
    """Run the command as often as `plan` says: yield each run, and the file that it is kept in.

    Each has a folder of its own below the plan's, with its output and its ranks' files. Where the
    first run fails no other is made: they would, too.
    """
    base = plan.folder
    likes: dict[Turn | None, Trace] = {}  # of the undisturbed runs, by what was turned in them
    planned, first = plan.plain(), True
    while planned:
        name = next(iter(planned))
        asked = planned.pop(name)
        interrupts.check()
        if asked.stops and asked.turn not in likes:
            continue  # the run that it would be compared with has failed
        show(f"{shlex.join(plan.command)} ({name})")
        like = likes.get(asked.turn if asked.stops else None)
        found = _run(plan, asked, (base / name).absolute(), like)
        base.mkdir(parents=True, exist_ok=True)  # what is run may remove whatever it likes
        trace.save(found, base / f"{name}.jsonl")
        yield base / f"{name}.jsonl", Run(asked=asked, trace=found)
        if first:
            first = False
            if found.end.status == "failed":
                return
            planned |= plan.others(found.scenario) | plan.pairs(found)
        undisturbed = not (asked.stops or asked.faults or asked.repeat)
        if undisturbed and found.end.status == "completed":
            likes.setdefault(asked.turn, found)


def _run(plan: Plan, asked: Asked, folder: Path, like: Trace | None) -> Trace:
    """One run, from stop to stop."""
    _clear(folder)
    (folder / "work").mkdir(parents=True)
    ended: Ended | None = None
    for life, num_steps in enumerate((*asked.stops, plan.num_steps)):
        values = {
            "world_size": str(asked.world_size),
            "seed": str(asked.seed),
            "steps": str(num_steps),
            "trace_dir": str(folder),
            "workdir": str(folder / "work"),
            **{knob: one.usual for knob, one in KNOBS.items()},
            **(asked.turn.values if asked.turn else {}),
        }
        closed = partial(run_trace.have_closed, folder, asked.world_size, life)
        ended = plan.launch(
            _words(plan.command, values, plan.spelled),
            folder=folder,
            variables={FAULTS: json.dumps([one.to_dict() for one in asked.faults])},
            deadline_s=plan.deadline_s,
            is_over=closed,
        )
        if ended.code is None and not closed():  # else it hung when all was done, and goes on
            break
    assert ended is not None, "it was launched"
    return run_trace.of(folder, asked, ended, like, unclipped=plan.can_say("clip"))


def _stops(like: Scenario) -> tuple[int, ...]:
    """Two stops in the middle of an epoch, or one, or none."""
    per_epoch = -(-like.num_samples // like.batch_size)
    inside = [step for step in range(1, like.num_steps) if step % per_epoch] or [
        *range(1, like.num_steps)
    ]
    places = {inside[len(inside) // 3], inside[2 * len(inside) // 3]} if inside else set()
    return tuple(sorted(places))


def _name(world_size: int, turn: Turn | None = None) -> str:
    told = "" if turn is None else f"-{turn.knob}-{turn.value}"
    return f"{world_size}-worker{'' if world_size == 1 else 's'}{told}"


def _clear(folder: Path) -> None:
    """Makes way for a run: what an earlier one has left in `folder` is not taken for its.

    UsageError for a folder that no run has left.
    """
    if (folder / OUTPUT).exists():
        shutil.rmtree(folder)
    elif folder.exists():
        raise UsageError(f"--trace-dir: {folder} is there, and of no run; give another folder")


def _words(
    command: Sequence[str], values: dict[str, str], spelled: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """`command` with its placeholders filled in; a word that is a knob, spelled "", is left out."""
    told = {name: spelled.get(name, {}).get(value, value) for name, value in values.items()}
    empty = {"{" + name + "}" for name in spelled if told[name] == ""}
    return [_filled(word, told) for word in command if word not in empty]


def _filled(word: str, values: dict[str, str]) -> str:
    """`word` with its placeholders filled in."""
    for name, value in values.items():
        word = word.replace("{" + name + "}", value)
    return word


def require_placeholders(command: Sequence[str]) -> None:
    """Returns if every placeholder is one; UsageError, with what was meant, for a misspelt one."""
    for word in command:
        for name in re.findall(r"(?<!\$)\{(\w+)\}", word):  # not a shell's ${...}
            if name.isidentifier() and name not in PLACEHOLDERS:
                raise UsageError(f"{word}: {did_you_mean(name, PLACEHOLDERS)}", field="command")


def require_program(word: str, cwd: Path | None = None) -> None:
    """Returns if it can be started in `cwd`, as far as is known; UsageError, with what to do."""
    program = str((cwd or Path()) / word) if os.sep in word else word
    if "{" not in word and shutil.which(program) is None:
        raise UsageError(
            f"the command {word!r} can't be started: there is no such program that may be "
            "executed; give its path, or the name of one on PATH "
            "(for a script: python my_train.py)",
            field="command",
        )
