"""The runs of both sides of a comparison: launched when they are needed, or read from a folder.

The second side runs once. The first side runs several times more, with its last bits disturbed by
different seeds. Once the first real difference is known, both run that step again with all of its
operations recorded. A stored side has the operations of its first steps.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from entrenar_py.check.command import folders, launch, warm
from entrenar_py.check.diff import environment
from entrenar_py.check.diff.judge import Ranks
from entrenar_py.check.observing.auto import Settings
from entrenar_py.check.project import commands
from entrenar_py.check.rank_files import border_file, notes
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.untrusted import files, json_text, printing

FILE = environment.STORED
VERSION = 1
TIMED_STEPS, WARM_UP = 40, 1
TIMES = ".times.json"  # the same name is in observing/deterministic.py
OPERATION_STEPS = 2  # the steps in which a stored side has operations
OPERATIONS_BYTES_MAX = 2**28
_FILE_BYTES_MAX = 2**22
PLAIN, OPERATIONS, OPERATIONS_DISTURBED = "plain", "operations", "operations-disturbed"


class Failure(Exception):
    """Raised when a run left nothing to compare; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The values that a run left, and "" or how it ended before its time.

    `folder` has the files of a run that was just launched.
    """

    ranks: Ranks
    problem: str = ""
    folder: Path | None = None


class Side(Protocol):
    """One of the two trainings that are compared."""

    name: str
    environment: environment.Environment

    def plain(self) -> Run:
        """Return the run itself."""

    def disturbed(self) -> Sequence[Ranks]:
        """Return the runs with disturbed last bits."""

    def operations(self, step: int, *, noise: int | None = None) -> Ranks | None:
        """Return a run with the operations of a step, disturbed if `noise`; None if unknown."""


@dataclass(frozen=True, kw_only=True)
class Launching:
    """How commands are run: `steps` of each, `num_disturbed` disturbed runs, below `folder`.

    With `lines` the script's statements are followed. Without a `seed` nothing is seeded.
    """

    folder: Path
    steps: int
    seed: int | None
    num_disturbed: int
    deadline_s: float
    in_place: bool
    lines: bool = False


@dataclass(kw_only=True)
class CommandSide:
    """A training that is run by its command, each time in a copy of the current folder."""

    name: str
    command: tuple[str, ...]
    launching: Launching
    parents: warm.Parents
    environment: environment.Environment = field(init=False)
    _runs: dict[str, Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = environment.of(self.command, Path.cwd())

    def plain(self) -> Run:
        """Return the run itself. Raises Failure if it recorded nothing."""
        return self._run(PLAIN, border_file.Settings(lines=self.launching.lines))

    def again(self, number: int) -> Run:
        """Return a repetition of the run, from 1. Raises Failure as `plain` does."""
        settings = border_file.Settings(lines=self.launching.lines)
        return self._run(f"{PLAIN}-{number}", settings)

    def with_variables(self, **variables: str) -> Run:
        """Return a run with environment variables. Raises Failure as `plain` does."""
        return self._run("-".join(variables), border_file.Settings(), variables)

    def deterministic(self) -> Run:
        """Return a run with torch's deterministic algorithms. Raises Failure as `plain` does."""
        return self._run("deterministic", border_file.Settings(deterministic=True))

    def step_ms(self, *, deterministic: bool) -> list[float]:
        """Return the milliseconds between the steps of a run in which nothing else is observed."""
        folder = self.launching.folder / self.name / f"timed-{deterministic}"
        settings = border_file.Settings(deterministic=deterministic, timed=True)
        self._launch(folder, settings.variables(), TIMED_STEPS)
        ends = [json_text.load(path.read_bytes()) for path in folder.glob(f"*{TIMES}")]
        return [1e3 * (end - begin) for each in ends for begin, end in pairwise(each[WARM_UP:])]

    def disturbed(self) -> Sequence[Ranks]:
        """Return the runs with disturbed last bits. Raises Failure if one recorded nothing."""
        seeds = range(1, self.launching.num_disturbed + 1)
        return [
            self._run(f"disturbed-{seed}", border_file.Settings(noise=seed)).ranks for seed in seeds
        ]

    def operations(self, step: int, *, noise: int | None = None, steps: int = 1) -> Ranks:
        """Return a run with the operations of `steps` steps, disturbed if `noise` is its seed."""
        settings = border_file.Settings(noise=noise, operations=(step, step + steps - 1))
        return self._run(OPERATIONS if noise is None else OPERATIONS_DISTURBED, settings).ranks

    def _run(
        self, kind: str, settings: border_file.Settings, variables: Mapping[str, str] | None = None
    ) -> Run:
        if kind not in self._runs:
            printing.warn(f"{self.name}: {kind} run of {self.environment['command']}")
            folder = self.launching.folder / self.name / kind
            told = {**settings.variables(), **(variables or {})}
            ended = self._launch(folder, told, self.launching.steps)
            self._runs[kind] = self._recorded(folder, ended)
        return self._runs[kind]

    def _recorded(self, folder: Path, ended: launch.Ended) -> Run:
        ranks = border_file.load_folder(folder)
        problems = notes.problems(folder)
        if ended.code != 0:
            problems = [ended.how, *problems, *ended.tail[-3:]]
        if not any(rank.borders for rank in ranks):
            reason = notes.why_nothing(folder) or "it recorded nothing"
            raise Failure(f"{self.name}: {'; '.join([*problems, reason])}")
        return Run(ranks=ranks, problem="; ".join(problems), folder=folder)

    def _launch(self, folder: Path, variables: Mapping[str, str], steps: int) -> launch.Ended:
        launching, command = self.launching, self.command
        folder.mkdir(parents=True)
        (folder / notes.ASKED).touch()
        here = Path.cwd().resolve()
        is_shared = (
            launching.in_place or folders.runs_elsewhere(command) or here == Path(here.anchor)
        )
        with folders.own_folder(None if is_shared else here, folder / folders.FOLDER) as own:
            start = own.launched(launch.launch) if own else launch.launch
            return start(
                command,
                folder=folder,
                variables={**Settings(steps=steps, seed=launching.seed).variables(), **variables},
                usual=commands.usual_variables(command),
                deadline_s=launching.deadline_s,
                parents=self.parents,
            )


def save(side: CommandSide, folder: Path) -> Run:
    """Run a side as often as a comparison may need it, and store all of it in `folder`.

    Raises Failure if a run recorded nothing.
    """
    plain = side.plain()
    side.disturbed()
    for noise in (None, 1):
        side.operations(0, noise=noise, steps=OPERATION_STEPS)
    kept = []
    for run in sorted((side.launching.folder / side.name).iterdir()):
        recorded = sorted(run.glob(f"*{border_file.SUFFIX}"))
        size = sum(file.stat().st_size for file in recorded)
        if run.name.startswith(OPERATIONS) and size > OPERATIONS_BYTES_MAX:
            continue
        kept.append(run.name)
        (folder / run.name).mkdir(parents=True)
        for file in recorded:
            shutil.copy2(file, folder / run.name / file.name)
    about = {
        "version": VERSION,
        "environment": dict(side.environment),
        "steps": side.launching.steps,
        "seed": side.launching.seed,
        "problem": plain.problem,
        "runs": kept,
    }
    (folder / FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return plain


@dataclass(kw_only=True)
class StoredSide:
    """A training that `save` has run and stored."""

    name: str
    folder: Path
    environment: environment.Environment
    steps: int
    seed: int
    problem: str
    runs: Sequence[str]

    def plain(self) -> Run:
        """Return the run itself. Raises TraceError if its files can't be read."""
        return Run(ranks=border_file.load_folder(self.folder / PLAIN), problem=self.problem)

    def disturbed(self) -> Sequence[Ranks]:
        """Return the runs with disturbed last bits. Raises TraceError as `plain` does."""
        names = sorted(name for name in self.runs if name.startswith("disturbed-"))
        return [border_file.load_folder(self.folder / name) for name in names]

    def operations(self, step: int, *, noise: int | None = None) -> Ranks | None:
        """Return the stored run with operations; None if it doesn't have this step."""
        name = OPERATIONS if noise is None else OPERATIONS_DISTURBED
        if step >= OPERATION_STEPS or name not in self.runs:
            return None
        return border_file.load_folder(self.folder / name)


def is_stored(text: str) -> bool:
    """Return whether an argument is the folder of a stored side."""
    return (Path(text) / FILE).is_file()


def load(folder: Path, name: str) -> StoredSide:
    """Return the side that is stored in `folder`. Raises UsageError if it can't be read."""
    path = folder / FILE
    try:
        about = json_text.load(files.read(path, bytes_max=_FILE_BYTES_MAX))
        return StoredSide(name=name, folder=folder, **_require(about))
    except (OSError, ValueError, KeyError, TypeError, TraceError) as error:
        raise UsageError(
            f"{path}: no stored run ({error}); store one with entrenar-check diff --save "
            f"{folder} -- COMMAND"
        ) from error


def _require(about: Any) -> dict[str, Any]:
    if not isinstance(about, dict) or about.get("version") != VERSION:
        raise ValueError(f"use version {VERSION}")
    kinds = {"environment": dict, "steps": int, "seed": int, "problem": str, "runs": list}
    for name, kind in kinds.items():
        if not isinstance(about[name], kind):
            raise ValueError(f"{name}={about[name]!r:.40}")
    texts = [*about["environment"].items(), *((run, "") for run in about["runs"])]
    if not all(isinstance(name, str) and isinstance(text, str) for name, text in texts):
        raise ValueError("names and texts")
    if any(os.sep in run or run in ("", "..") for run in about["runs"]):
        raise ValueError("runs are names of folders")
    return {name: about[name] for name in kinds}
