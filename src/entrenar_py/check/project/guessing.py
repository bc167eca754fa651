"""Turn a command that trains into a command that can be checked, and report each change.

Nothing is run. Options that may change the training (micro-batches, clipping) are only reported.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py.check.project import launchers
from entrenar_py.check.project import script as scripts
from entrenar_py.check.project.script import Script

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
# The same for knobs, which are only suggested, as a name can't promise that training is the same.
_KNOBS = {
    "accumulation": (
        *("accumulation", "grad_accum", "gradient_accumulation_steps", "accum_steps"),
        *("accumulate_grad_batches", "grad_accum_steps", "accumulation_steps"),
    ),
    "clip": ("clip", "max_norm", "max_grad_norm", "grad_clip", "clip_grad_norm", "clip_norm"),
    "loss_scale": ("loss_scale",),
}
_WEAK = ("dir",)  # may as well be where the data lies
_EPOCHS = ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "n_epochs")


@dataclass
class Guess:
    """The `command` with its placeholders, and the `folder` where it will run.

    `taken` are the guesses that were made. `look` are questions that only the author can answer.
    """

    command: list[str]
    folder: Path
    world_size: int | None = None
    taken: list[str] = field(default_factory=list)
    look: list[str] = field(default_factory=list)


def guess(command: Sequence[str], folder: Path) -> Guess:
    """Return `command`, which will run in `folder`, with the placeholders that can be guessed."""
    launch = launchers.of(command)
    draft = Guess(
        command=[*launch.command],
        folder=folder,
        world_size=launch.world_size,
        taken=[*launch.changes],
    )
    program = draft.command[0]
    if "{" not in program and shutil.which(program, path=None) is None:
        draft.look.append(f"there is no program {program!r} here: nothing can be run yet")
    if launchers.is_for_shell(draft.command):
        draft.look.append(
            f"the text for {program} is not read: put {{world_size}}, {{steps}}, {{workdir}} and "
            f"{{seed}} into it, or give init the command alone, without {program}"
        )
        return draft
    place, path = launchers.script(draft.command, folder)
    _look_at_workers(draft, place)
    script = scripts.read(path) if path is not None else None
    if script is None:
        named = (
            "no script (*.py) or module (-m) that lies here was found in the command"
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
            "far as can be seen: without it every clause is inconclusive (docs/your-trainer.md)"
        )
    return draft


def _look_at_workers(draft: Guess, end: int) -> None:
    """Report what the launcher, among the words before `end`, says of machines."""
    command = draft.command
    nodes = launchers.num_nodes(command, end)
    if nodes is not None:
        draft.look.append(
            f"{nodes} machines: {{world_size}} counts the workers of all; start it on one for a "
            "first look (docs/multi-node.md)"
        )
    if not any("{world_size}" in word for word in command):
        draft.look.append(
            f"no launcher was recognised ({launchers.NAMES}): put {{world_size}} into the command "
            "as the number of workers to start"
        )


def _guess_options(draft: Guess, script: Script, name: str) -> None:
    """Put in placeholders for the script's own options; list what a person has to look at."""
    _put_placeholders(draft, script, name)
    _tell_of_steps_and_folders(draft, script, name)
    _tell_of_knobs(draft, script)


def _put_placeholders(draft: Guess, script: Script, name: str) -> None:
    """Put in each placeholder as the value of an option that fits by name, if it is clear which."""
    known = (*script.options, *(one for one in _given(draft.command) if one not in script.options))
    places = _PLACES
    if not any(_plain(option) in _PLACES["steps"] for option in known):
        places = {**_PLACES, "epochs": _EPOCHS}
    for placeholder, names in places.items():
        slot = "{" + placeholder + "}"
        if any(slot in word for word in draft.command):
            continue
        options = [one for one in known if _plain(one) in names]
        if any(_plain(one) in _WEAK and _has(draft.command, one) for one in options):
            draft.look.append(f"is {options[0]} the folder for checkpoints? then give it {slot}")
            continue
        before = launchers.replace(draft.command, options, slot)
        if before is not None:
            draft.taken.append(f"{slot} replaces {before} in the options of {name}")
        elif len(options) == 1:
            draft.command += [options[0], slot]
            draft.taken.append(f"{options[0]} {slot} was added: {name} has such an option")
        elif options:
            draft.look.append(f"{slot} could be any of {', '.join(options)} of {name}")


def _tell_of_steps_and_folders(draft: Guess, script: Script, name: str) -> None:
    """Report if no option was found for the number of steps, or for the folder to save to."""
    if not any("{steps}" in word for word in draft.command):
        epochs = [one for one in script.options if _plain(one) in _EPOCHS]
        told = f"; {epochs[0]} counts epochs: give it a small number" if epochs else ""
        if any("{epochs}" in word for word in draft.command):
            told = ", of so many epochs; a run can be stopped only between epochs"
        draft.look.append(
            f"no option of {name} was found for the number of steps: each run makes as many as "
            f"the script does{told}"
        )
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
    """Return the options after the script, some of which it may read without argparse."""
    words = command[launchers.script(command, Path())[0] + 1 :]
    return list(dict.fromkeys(word.partition("=")[0] for word in words if word[:2] == "--"))


def _has(command: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in command)


def _plain(option: str) -> str:
    return re.sub("-", "_", option.lstrip("-"))
