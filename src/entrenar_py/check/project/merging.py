"""Merge the configuration with the command line: options that were typed take precedence."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from entrenar_py.check.project import command_line, toml_file
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import ContractError, EntrenarError, UsageError

SUMMARY = "GITHUB_STEP_SUMMARY"  # set in a GitHub workflow: elsewhere `github` has no effect
# The option that chooses a trainer of this package, instead of the configuration's command.
_CHOOSES = "system"


def configured(typed: argparse.Namespace) -> argparse.Namespace:
    """Return `typed` with the configuration's values for options that were not typed.

    `project` is set to the configuration, or None; `used` to its keys that have an effect in this
    call; `overruled` to those that were typed instead. A command without a contract is checked by
    both that are for scripts. Raises ContractError for an invalid
    configuration, UsageError for options that don't go together.
    """
    typed.project, typed.used, typed.overruled = None, (), ()
    path = _path(typed)
    mode = ""
    if path is not None:
        from entrenar_py.check.project import configuration

        typed.project = configuration.load(path)
        mode = _take_command(typed)
        _lay_below(typed)
    if typed.mode == "command" and not typed.contract:
        typed.contract = package_data.FOR_SCRIPTS
    try:
        command_line.require_compatible(typed, mode=mode)
        command_line.require_distinct(typed)
    except UsageError as error:
        raise located(error, typed) from error
    return typed


def _take_command(typed: argparse.Namespace) -> str:
    """Take the configuration's command if no mode was typed; return how messages name it, or ""."""
    project = typed.project
    if not project.command or typed.mode is not None or _CHOOSES in typed.typed:
        return ""
    typed.mode, typed.command, typed.command_folder = "command", project.command, project.folder
    typed.knobs = project.knobs
    return (
        f"the command of {project.place} (--system NAME tries a trainer of entrenar-py "
        "instead, --no-config goes without the configuration)"
    )


def located(error: UsageError, options: argparse.Namespace) -> EntrenarError:
    """Return `error` with its place in the configuration, if the wrong value is from there."""
    if error.field.replace("_", "-") not in options.used:
        return error
    return ContractError([f"{options.project.places[error.field]}: error: {error}"])


def _path(typed: argparse.Namespace) -> Path | None:
    if typed.no_config or typed.mode == "mutants":
        return None
    config: Path | None = typed.config
    if config is None:
        return toml_file.find(Path.cwd())
    if not config.is_file():
        problem = "it is no regular file" if config.exists() else "no such file"
        raise UsageError(f"--config {config}: {problem}; give a TOML file")
    return config.absolute()


def _lay_below(typed: argparse.Namespace) -> None:
    """Set the configuration's options that were not typed and have an effect in this mode."""
    project, mode = typed.project, typed.mode
    used: list[str] = []
    overruled: list[str] = []
    if project.command and mode in (None, "command"):
        keys = overruled if typed.command_folder is None else used
        keys += ["command", *(["knobs"] if project.knobs else [])]
    for name, value in project.values.items():
        if not _has_effect(name, mode):
            continue
        if name in typed.typed:
            overruled.append(name)
        else:
            used.append(name)
            setattr(typed, name, value)
    parts = {
        "exclude": project.exclusions if mode not in ("validate", "replay") else (),
        "accept": project.acceptances if mode not in ("validate", "list", "suggest") else (),
    }
    used += [name for name, part in parts.items() if part]
    typed.used = tuple(name.replace("_", "-") for name in used)
    typed.overruled = tuple(name.replace("_", "-") for name in overruled)


def _has_effect(name: str, mode: str | None) -> bool:
    if mode == "validate" and name in command_line.FILES:  # they are a run's reports
        return False
    if name == "github" and not os.environ.get(SUMMARY):
        return False
    return name in command_line.MODES[mode] if mode else name not in command_line.ALONE
