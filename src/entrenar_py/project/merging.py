"""The configuration laid below a command line: what was typed wins."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from entrenar_py.cli import options
from entrenar_py.errors import ContractError, EntrenarError, UsageError
from entrenar_py.project import location

SUMMARY = "GITHUB_STEP_SUMMARY"  # set in a workflow; elsewhere its reports have no reader
# What chooses a trainer of this package: typed, it puts the configuration's command aside.
_CHOOSES = "system"


def configured(typed: argparse.Namespace) -> argparse.Namespace:
    """`typed`, with what the configuration says where nothing was typed; then found sensible.

    Its `project` is the configuration, None where there is none; `used` names the keys that count
    in this call, `overruled` those that would, had nothing been typed. Raises ContractError for a
    configuration that is wrong, UsageError for what makes no sense.
    """
    typed.project, typed.used, typed.overruled = None, (), ()
    path = _path(typed)
    if path is None:
        options.require_sensible(typed)
        return typed
    from entrenar_py.project import reading  # brings the reader of contracts

    project = reading.load(path)
    told = ""
    if project.command and typed.mode is None and _CHOOSES not in typed.typed:
        typed.mode, typed.command, typed.command_folder = "command", project.command, project.folder
        typed.knobs = project.knobs
        told = (
            f"the command of {project.place} (--system NAME tries a trainer of entrenar-py "
            "instead, --no-config goes without the configuration)"
        )
    typed.project = project
    _lay_below(typed)
    options.require_sensible(typed, mode=told)
    return typed


def located(error: UsageError, given: argparse.Namespace) -> EntrenarError:
    """Return `error` with its place, if the configuration gave the value that is wrong."""
    if error.field.replace("_", "-") not in given.used:
        return error
    return ContractError([f"{given.project.places[error.field]}: error: {error}"])


def _path(typed: argparse.Namespace) -> Path | None:
    if typed.no_config or typed.mode == "mutants":
        return None
    given: Path | None = typed.config
    if given is None:
        return location.find(Path.cwd())
    if not given.is_file():
        problem = "it is no regular file" if given.exists() else "no such file"
        raise UsageError(f"--config {given}: {problem}; give a TOML file")
    return given.absolute()


def _lay_below(typed: argparse.Namespace) -> None:
    """Sets what was not typed and means something in this mode."""
    project, mode = typed.project, typed.mode
    used: list[str] = []
    overruled: list[str] = []
    if project.command and mode in (None, "command"):
        given = overruled if typed.command_folder is None else used
        given += ["command", *(["knobs"] if project.knobs else [])]
    for name, value in project.values.items():
        means_something = name in options.MODES[mode] if mode else name not in options.COMMANDED
        if mode == "validate" and name in options.FILES:  # they are a run's reports
            means_something = False
        if not means_something or (name == "github" and not os.environ.get(SUMMARY)):
            continue
        if name in typed.typed:
            overruled.append(name)
        else:
            used.append(name)
            setattr(typed, name, value)
    if project.exclusions and mode not in ("validate", "replay"):
        used.append("exclude")
    if mode == "validate":
        used += ["rule"] if project.rules else []
        used += ["suppress"] if project.suppressions else []
    typed.used = tuple(name.replace("_", "-") for name in used)
    typed.overruled = tuple(name.replace("_", "-") for name in overruled)
