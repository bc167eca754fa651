"""`entrenar-check init`: writes a configuration, and reports what was guessed and must be checked.

A training command gets placeholders, so that it can be checked; each change is reported. Nothing is
run. Options that may change the training (micro-batches, clipping) are only reported.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py.check.project import commands, toml_file
from entrenar_py.check.project import commands as scripts
from entrenar_py.check.project.command_line import PROG, Parser, split
from entrenar_py.check.project.commands import Script
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import printing

# Placeholder -> names of options, without dashes, that usually take its value.
_PLACES = {
    "steps": (
        *("steps", "max_steps", "num_steps", "n_steps", "total_steps", "train_steps"),
        *("max_train_steps", "num_train_steps", "iterations", "max_iters", "num_iters", "iters"),
    ),
    "workdir": (
        *("workdir", "work_dir", "output_dir", "out_dir", "outdir", "save_dir", "dir", "run_dir"),
        *("checkpoint_dir", "ckpt_dir", "checkpoints_dir", "default_root_dir"),
    ),
    "seed": ("seed", "random_seed", "manual_seed"),
}
# Knob -> such names. Knobs are only suggested: a name can't promise that the training is the same.
_KNOBS = {
    "accumulation": (
        *("accumulation", "grad_accum", "gradient_accumulation_steps", "accum_steps"),
        *("accumulate_grad_batches", "grad_accum_steps", "accumulation_steps"),
    ),
    "clip": ("clip", "max_norm", "max_grad_norm", "grad_clip", "clip_grad_norm", "clip_norm"),
    "loss_scale": ("loss_scale",),
}
_WEAK = ("dir",)  # may also be the folder of the data
_EPOCHS = ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "n_epochs")


@dataclass
class Guess:
    """The `command` with its placeholders, and the `folder` in which it will run.

    `taken` has texts on the guesses that were made. `look` has questions that only the author can
    answer.
    """

    command: list[str]
    folder: Path
    world_size: int | None = None
    taken: list[str] = field(default_factory=list)
    look: list[str] = field(default_factory=list)


def guess_command(command: Sequence[str], folder: Path) -> Guess:
    """Return `command`, which will run in `folder`, with the placeholders that can be guessed."""
    launch = commands.of(command)
    draft = Guess(
        command=[*launch.command],
        folder=folder,
        world_size=launch.world_size,
        taken=[*launch.changes],
    )
    program = draft.command[0]
    beside = str(Path(sys.executable).parent)  # of this Python, as when the command is run
    if "{" not in program and not (shutil.which(program) or shutil.which(program, path=beside)):
        draft.look.append(f"there is no program {program!r} here: nothing can be run yet")
    if commands.is_for_shell(draft.command):
        draft.look.append(
            f"init does not read the text for {program}: put {{world_size}}, {{steps}}, "
            "{workdir} and {seed} into it, or give init the command alone, without "
            f"{program}"
        )
        return draft
    place, path = commands.script(draft.command, folder)
    _look_at_workers(draft, place)
    script = scripts.read_script(path) if path is not None else None
    if script is None:
        named = (
            "no local script (*.py) or module (-m) was found in the command"
            if path is None
            else (f"{path.name} can't be read as Python")
        )
        draft.look.append(
            f"{named}: put {{steps}}, {{workdir}} and {{seed}} into the command as its options "
            "need them, and check that the script calls entrenar_py.observe"
        )
        return draft
    assert path is not None, "it was read"
    _guess_options(draft, script, path.name)
    if why := scripts.without_a_test_for_nan(path):
        draft.look.append(why)
    if not script.is_observed:
        draft.look.append(
            f"{path.name} does not call entrenar_py.observe(model, optimizer, sampler=loader), as "
            "far as can be seen: it is observed without the line, and what only the line can say "
            "stays open (docs/auto.md)"
        )
    return draft


def _look_at_workers(draft: Guess, end: int) -> None:
    """Report what the launcher, among the words before `end`, says about machines and workers."""
    command = draft.command
    nodes = commands.num_nodes(command, end)
    if nodes is not None:
        draft.look.append(
            f"{nodes} machines: {{world_size}} counts the workers of all; start it on one for a "
            "first look (docs/multi-node.md)"
        )
    if not any("{world_size}" in word for word in command):
        draft.look.append(
            f"no launcher was recognised ({commands.NAMES}): put {{world_size}} into the command "
            "as the number of workers to start"
        )


def _guess_options(draft: Guess, script: Script, name: str) -> None:
    _put_placeholders(draft, script, name)
    _tell_of_steps_and_folders(draft, script, name)
    _tell_of_knobs(draft, script)


def _put_placeholders(draft: Guess, script: Script, name: str) -> None:
    """Insert each placeholder as the value of an option with a fitting name, if only one fits."""
    known = (
        *script.options,
        *(option for option in _given(draft.command) if option not in script.options),
    )
    places = _PLACES
    if not any(_plain(option) in _PLACES["steps"] for option in known):
        places = {**_PLACES, "epochs": _EPOCHS}
    for placeholder, names in places.items():
        slot = "{" + placeholder + "}"
        if any(slot in word for word in draft.command):
            continue
        options = [option for option in known if _plain(option) in names]
        if any(_plain(option) in _WEAK and _has(draft.command, option) for option in options):
            draft.look.append(f"is {options[0]} the folder for checkpoints? then give it {slot}")
            continue
        before = commands.replace(draft.command, options, slot)
        if before is not None:
            draft.taken.append(f"{slot} replaces {before} in the options of {name}")
        elif len(options) == 1:
            draft.command += [options[0], slot]
            draft.taken.append(f"{options[0]} {slot} was added: {name} has such an option")
        elif options:
            draft.look.append(f"{slot} could be any of {', '.join(options)} of {name}")


def _tell_of_steps_and_folders(draft: Guess, script: Script, name: str) -> None:
    """Report a missing option for the number of steps, or for the folder for saved files."""
    if not any("{steps}" in word for word in draft.command):
        epochs = [one for one in script.options if _plain(one) in _EPOCHS]
        remark = f"; {epochs[0]} counts epochs: give it a small number" if epochs else ""
        ends = f"each run takes as many steps as the script does{remark}"
        if any("{epochs}" in word for word in draft.command):
            ends = "each run takes that many epochs; a run can be stopped only between epochs"
        elif not script.is_observed:
            ends = f"entrenar-check ends each run after {STEPS} steps (docs/auto.md)"
        draft.look.append(f"no option of {name} was found for the number of steps: {ends}")
    if script.saves and not any("{workdir}" in word for word in draft.command):
        draft.look.append(
            f"{name} saves files, and no option was found for the folder: a run may resume from "
            "what an earlier one saved; give the script an option for it, with the value {workdir}"
        )


def _tell_of_knobs(draft: Guess, script: Script) -> None:
    """Report the options that matter when the number of workers, or a knob, changes."""
    batches = [one for one in script.options if "batch_size" in _plain(one)]
    if batches and "{share:" not in " ".join(draft.command):
        draft.look.append(
            f"{batches[0]}: if it is the size for one worker, two workers train on other batches "
            f"than one, and F-DP-005 can't compare them; {batches[0]} {{share:16}} divides a "
            "global batch of 16 among the workers"
        )
    for knob, names in _KNOBS.items():
        for option in script.options:
            if _plain(option) in names and "{" + knob + "}" not in " ".join(draft.command):
                draft.look.append(
                    f"{option} {{{knob}}} could be tried, if the training is the same with any of "
                    "its values (knobs, in docs/your-trainer.md)"
                )


def _given(command: Sequence[str]) -> list[str]:
    """Return the options after the script in the command, since a script may not use argparse."""
    words = command[commands.script(command, Path())[0] + 1 :]
    return list(dict.fromkeys(word.partition("=")[0] for word in words if word[:2] == "--"))


def _has(command: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in command)


def _plain(option: str) -> str:
    return re.sub("-", "_", option.lstrip("-"))


NAME = "init"
CONTRACT, INTEGRITY = package_data.FOR_SCRIPTS
STEPS = 8
DEADLINE_S = 300
_LINE_CHARS_MAX = 100
_PLAIN = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)


def run(arguments: Sequence[str]) -> int:
    """Write the configuration of the current folder and return 0.

    Raises UsageError if that is impossible.
    """
    cli = _parser()
    own, command = split(arguments, cli)
    options = cli.parse_args(own)
    folder = Path.cwd()
    path, before = _file(folder)
    guess = guess_command(command, folder) if command else None
    chosen = tuple(options.contract or package_data.FOR_SCRIPTS)
    for contract in chosen:
        package_data.contract_path(contract)
    lines = _lines(guess, chosen)
    header = [f"[tool.{toml_file.TABLE}]"] if path.name == toml_file.SHARED else []
    _append(path, before, [*header, *lines])
    _tell(path, guess)
    return 0


def _parser() -> argparse.ArgumentParser:
    cli = Parser(
        prog=f"{PROG} {NAME}",
        usage="%(prog)s [--contract FILE] [-- COMMAND ...]",
        description="Writes the configuration of this folder: into pyproject.toml, if there is "
        f"one, else {toml_file.OWN}. COMMAND is what trains, as it is run today; without it the "
        "reference trainers are configured.",
        allow_abbrev=False,
    )
    cli.add_argument(
        "--contract",
        metavar="FILE",
        action="append",
        help=f"a contract to check, instead of {CONTRACT} and {INTEGRITY}; may be given several "
        "times",
    )
    return cli


def _file(folder: Path) -> tuple[Path, str | None]:
    """Return the path to write to, and the present text of that file (None if there is none).

    Raises UsageError if the folder is already configured.
    """
    for name in (toml_file.OWN, toml_file.SHARED):
        path = folder / name
        if not path.exists():
            continue
        text = toml_file.read(path)
        try:
            tools = toml_file.parse(text).get("tool", {})
        except ValueError as error:
            raise UsageError(f"{name} is not valid TOML ({error}); correct it first") from error
        if name == toml_file.OWN or (isinstance(tools, dict) and toml_file.TABLE in tools):
            raise UsageError(
                f"{name} configures entrenar-check already; edit it, or remove what is there first "
                "(nothing was written)"
            )
        return path, text
    return folder / toml_file.OWN, None


def _lines(guess: Guess | None, chosen: Sequence[str]) -> list[str]:
    """Return the lines of the keys to write, with a comment where a reader needs one."""
    lines = [
        f"# Written by `{PROG} {NAME}`; all keys: docs/configuration.md of entrenar-py.",
        f"contract = {_toml(list(chosen) if len(chosen) > 1 else chosen[0])}",
    ]
    if guess is None:
        return lines
    lines.append(f"command = {_command(guess.command)}")
    if any("{steps}" in word for word in guess.command):
        lines.append(f"steps = {STEPS}")
    if guess.world_size is not None:
        lines.append(f"world-size = {guess.world_size}")
    lines.append(f"deadline = {DEADLINE_S}  # seconds; a run that takes longer is ended")
    return lines


def _command(words: Sequence[str]) -> str:
    text = _typed(words)
    if len(text) <= _LINE_CHARS_MAX:
        return _toml(text)
    return f"[\n{''.join(f'  {_toml(word)},{chr(10)}' for word in words)}]"


def _typed(words: Sequence[str]) -> str:
    return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


def _toml(value: str | list[str]) -> str:
    # JSON strings are TOML strings, except for the character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _append(path: Path, before: str | None, lines: Sequence[str]) -> None:
    """Append `lines` to the file, with the file's own line ends. The present text stays."""
    end = "\r\n" if before and "\r\n" in before else "\n"
    text = end.join("\n".join(lines).split("\n")) + end
    if before:
        text = ("" if before.endswith("\n") else end) + end + text
    try:
        encoded = text.encode()
        toml_file.parse((before or "") + text)
    except UnicodeEncodeError as error:
        raise UsageError("the command has bytes that are not UTF-8; put it in a script") from error
    except ValueError as error:  # for example, `tool` is an inline table
        raise UsageError(
            f"{path.name}: a table can't be added at its end ({error}); write one into "
            f"{toml_file.OWN} by hand (nothing was written)"
        ) from error
    try:
        with path.open("ab") as file:
            file.write(encoded)
    except OSError as error:
        problem = f"can't be written ({error.strerror}); make it writable and run this again"
        raise UsageError(f"{path.name} {problem}") from error


def _tell(path: Path, guess: Guess | None) -> None:
    """Print what was written, what was guessed, and what the author must look at."""
    shared = path.name == toml_file.SHARED
    printing.say(f"wrote {f'[tool.{toml_file.TABLE}] of ' * shared}{path.name}")
    if guess is None:
        printing.say("no command was given: the reference trainers will be checked")
    else:
        printing.say(f"command: {_typed(guess.command)}", indent=2)
        for line in guess.taken:
            printing.say(f"guessed: {line}", indent=2)
        for line in guess.look:
            printing.say(f"look at: {line}", indent=2)
    printing.say(f"now run: {PROG}")
