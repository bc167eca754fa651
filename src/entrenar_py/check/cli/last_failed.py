"""What was falsified in the last call with a command, kept for `--last-failed`.

A call that falsifies a clause leaves `.entrenar-check/` in the project's folder: the ids of the
falsified clauses, the call, and the traces of its runs. A call that falsifies nothing removes it.
The traces are judged again, without a run, if script, command and environment are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from entrenar_py.check.command import run_settings, script_line
from entrenar_py.check.command.run_settings import Run, RunSettings
from entrenar_py.check.evidence.needs import Need
from entrenar_py.check.harness import judgement
from entrenar_py.check.project import toml_file
from entrenar_py.check.project.command_line import FILES, PROG
from entrenar_py.check.reports.report import EXIT_FALSIFIED, EXIT_HELD, Ending, Report
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import EntrenarError, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.untrusted import files, json_text, printing
from entrenar_py.shared.verdict import Verdict

OPTION = "--last-failed"
FOLDER = Path(".entrenar-check")
RUNS_BYTES_MAX = 2**26  # of all traces; larger ones are not kept
FILES_MAX = 4000  # of a project; the runs of a larger one are not used again
_RECORD, _RUNS = "last.json", "runs"
# Options on which the runs of a command depend, besides the command itself.
_SETTINGS = ("steps", "epochs", "seed", "auto", "in_place", "launcher", "world_size", "knobs")
# Variables that differ between two terminals, but not between two trainings.
_OF_TERMINALS = (
    *("PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLUMNS", "LINES", "WINDOWID", "SHELL_SESSION_ID"),
    *("SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "TMUX", "TMUX_PANE", "STY"),
)


@dataclass(frozen=True)
class Last:
    """The last call: its arguments, the falsified ids, and the scenarios of their findings."""

    arguments: tuple[str, ...]
    ids: tuple[str, ...]
    scenarios: tuple[Mapping[str, Any], ...]
    digest: str  # of what its runs depend on; "" if it is unknown

    @property
    def needs(self) -> set[Need]:
        """The needs for runs like those with findings, which other clauses may have needed."""
        needs: set[Need] = set()
        for record in self.scenarios:
            try:
                needs |= run_settings.answers(RunSettings.of(Scenario.from_dict(record)))
            except UsageError:  # written by a different release
                continue
        return needs


def repeated(typed: Sequence[str]) -> list[str]:
    """Return the arguments of a call; with --last-failed and no command, after the last call's.

    Raises UsageError if no earlier call is known.
    """
    own, command = _split(typed)
    if OPTION not in own or command or toml_file.find(Path.cwd()) is not None:
        return [*typed]
    last = read(Path.cwd())
    if last is None or "--" not in last.arguments:
        raise UsageError(
            f"{OPTION}: no call in this folder is known that falsified a clause; give the command "
            f"that trains: {PROG} -- torchrun ... my_train.py"
        )
    before, command = _split(last.arguments)
    return [*before, *typed, *command]


def folder_of(options: argparse.Namespace) -> Path:
    """Return the project's folder: that of its configuration, or else the current one."""
    return options.project.folder if options.project is not None else Path.cwd()


def read(folder: Path) -> Last | None:
    """Return the last call that falsified a clause in `folder`; None if none is known."""
    file = folder / FOLDER / _RECORD
    try:
        record = json_text.load(files.read(file, bytes_max=2**20))
        if file.stat().st_uid != os.getuid():  # it names a command to run
            return None
        return Last(
            arguments=tuple(map(str, record["arguments"])),
            ids=tuple(map(str, record["ids"])),
            scenarios=tuple(map(dict, record["scenarios"])),
            digest=str(record["digest"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def kept(options: argparse.Namespace) -> dict[Path, Run]:
    """Return the runs of the last call, by file, if nothing that they depend on has changed."""
    last, folder = options.last, folder_of(options) / FOLDER / _RUNS
    if last is not None and last.digest and last.digest == digest(options):
        with suppress(EntrenarError):  # they are incomplete, or from a different release
            return run_settings.stored(judgement.load_stored([folder]))
    return {}


class Conclusion:
    """The end of a call with a command. `runs` has the files of its traces, for each contract."""

    def __init__(
        self, options: argparse.Namespace, typed: Sequence[str], runs: Sequence[Collection[Path]]
    ) -> None:
        self._folder, self._made = folder_of(options) / FOLDER, runs
        self._is_new = options.project is None
        self._before = read(self._folder.parent)
        own, command = _split(typed)
        self._is_again = options.last_failed
        self._is_part = self._is_again or options.only or options.exclude or options.severity
        self._typed = (*(word for word in own if word != OPTION), *command)
        if self._is_again and not command and self._before is not None and self._is_new:
            self._typed = self._before.arguments
        self._digest = digest(options)  # before the runs: a file may be changed meanwhile

    def __call__(self, reports: Sequence[Report], ending: Ending) -> str:
        """Store or remove the state, and return the command to run next, or ""."""
        is_stored = self._store(reports)
        command = shlex.join(_split(self._typed)[1][1:])
        if ending.code == EXIT_FALSIFIED:
            return shlex.join((PROG, OPTION)) if is_stored else ""
        if ending.code == EXIT_HELD:
            if self._is_again:
                return shlex.join((PROG, *self._typed))
            return f"{PROG} init -- {command}" if command and self._is_new else ""
        reasons = [entry.finding.reason for report in reports for entry in report.entries]
        if command and all(" failed: " in reason for reason in reasons):
            return command  # its own error is easier to find without the harness
        is_verbose = "-v" in _split(self._typed)[0]
        return "" if is_verbose else shlex.join((PROG, "-v", *self._typed))

    def _store(self, reports: Sequence[Report]) -> bool:
        """Store the state of a call that falsified something; return whether it was stored.

        If this call judged only some clauses, the others stay as the last call left them.
        """
        entries = [entry for report in reports for entry in report.entries]
        broken = [e for e in entries if e.verdict is Verdict.FALSIFIED and not e.is_accepted]
        ids = [entry.invariant.id for entry in broken]
        if self._is_part and self._before is not None:
            seen = {left.invariant.id for report in reports for left in report.not_applying}
            seen |= {entry.invariant.id for entry in entries}
            ids += [name for name in self._before.ids if name not in seen]
        if not ids:
            shutil.rmtree(self._folder, ignore_errors=True)
            return False
        examples = (entry.finding.counterexample for entry in broken)
        scenarios = [one.scenario for one in examples if one is not None and one.scenario]
        record = {"arguments": self._typed, "ids": ids, "scenarios": scenarios}
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / ".gitignore").write_text("*\n")
            record["digest"] = self._digest if self._keep_runs() else ""
            (self._folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        except OSError as error:
            printing.warn(f"{self._folder} can't be written ({error.strerror}), so {OPTION} can't")
            return False
        return True

    def _keep_runs(self) -> bool:
        """Copy the traces of this call's runs, if any; return False if they are too large."""
        runs = self._folder / _RUNS
        if not self._made:
            return runs.is_dir()
        shutil.rmtree(runs, ignore_errors=True)
        files = (file for of_contract in self._made for file in of_contract)
        traces = {file.name: file for file in files if file.exists()}
        if sum(file.stat().st_size for file in traces.values()) > RUNS_BYTES_MAX:
            return False
        runs.mkdir()
        for name, file in traces.items():
            shutil.copyfile(file, runs / name)
        return True


def _split(typed: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the options of a call, and its command with the `--` before it, or an empty one."""
    at = typed.index("--") if "--" in typed else len(typed)
    return typed[:at], typed[at:]


def digest(options: argparse.Namespace) -> str:
    """Return a digest of what the runs of a command depend on; "" if there are too many files.

    That is the command, its settings and environment, and the time and size of the installed
    packages, of each file in the folder, and of each file that the script imports.
    """
    folder = (options.command_folder or Path.cwd()).resolve()
    project = [*islice(script_line.below(folder), FILES_MAX + 1)]
    if len(project) > FILES_MAX:
        return ""
    written = [getattr(options, name) for name in (*FILES, "trace_dir")]
    patterns = [str(Path(path).absolute()).replace("{contract}", "*") for path in written if path]
    sources = {*project, *script_line.imported(options.command, folder)}
    sources |= {*package_data.PACKAGE.rglob("*.py")}
    facts = {
        "command": [*options.command, str(folder)],
        "settings": {name: getattr(options, name) for name in _SETTINGS},
        "variables": {k: v for k, v in os.environ.items() if k not in _OF_TERMINALS},
        "packages": [_stamp(Path(sysconfig.get_path(name))) for name in ("purelib", "platlib")],
        "files": sorted(_stamp(file) for file in sources if not _is_written(file, patterns)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _stamp(file: Path) -> tuple[str, int, int]:
    try:
        status = file.stat()
    except OSError:
        return str(file), 0, 0
    return str(file), status.st_size, status.st_mtime_ns


def _is_written(file: Path, patterns: Sequence[str]) -> bool:
    return any(
        fnmatch(str(file), pattern) or fnmatch(str(file), f"{pattern}/*") for pattern in patterns
    )
