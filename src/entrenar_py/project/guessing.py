"""What a command that trains is made into, so that it can be checked: each change is told.

Nothing is run. What may be another training (micro-batches, clipping) is pointed out, not changed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py.project import script as scripts
from entrenar_py.project.script import Script

# Placeholder -> the names of options, without dashes, that usually hold what it stands for.
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
# The same for knobs: turning one must leave the training as it is, which no name can promise.
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
# Launcher -> its options for the number of workers, the first of which is added where none is.
_LAUNCHERS = {
    "torchrun": ("--nproc_per_node", "--nproc-per-node"),
    "torch.distributed.run": ("--nproc_per_node", "--nproc-per-node"),
    "torch.distributed.launch": ("--nproc_per_node", "--nproc-per-node"),
    "launch": ("--num_processes",),  # accelerate launch
    "mpirun": ("-np", "-n", "--np"),
    "mpiexec": ("-n", "-np", "--np"),
}
_RESTARTS = ("--max-restarts", "--max_restarts")
_WORKERS_MAX = 64


@dataclass
class Guess:
    """`command` with its placeholders, `folder` where it will run. `taken` are the guesses, `look`
    what only its author can say.
    """

    command: list[str]
    folder: Path
    world_size: int | None = None
    restarts: bool = False
    taken: list[str] = field(default_factory=list)
    look: list[str] = field(default_factory=list)


def guess(command: Sequence[str], folder: Path) -> Guess:
    """What is made of `command`, which is to run in `folder`."""
    found = Guess(command=list(command), folder=folder)
    if "{" not in command[0] and shutil.which(command[0], path=None) is None:
        found.look.append(f"there is no program {command[0]!r} here: nothing can be run yet")
    place = _script_place(command)
    path = folder / command[place] if place is not None else None
    _guess_workers(found, len(command) if place is None else place)
    script = scripts.read(path) if path is not None else None
    if script is None:
        named = (
            "no script (*.py) was found in the command"
            if path is None
            else (f"{path.name} can't be read as Python")
        )
        found.look.append(
            f"{named}: put {{steps}}, {{workdir}} and {{seed}} where it is told these, and see "
            "that it calls entrenar_py.observe"
        )
        return found
    assert path is not None, "it was read"
    _guess_options(found, script, path.name)
    if not script.is_observed:
        found.look.append(
            f"{path.name} does not call entrenar_py.observe(model, optimizer, sampler=loader), as "
            "far as can be seen: without it every clause is inconclusive (docs/your-trainer.md)"
        )
    return found


def _script_place(command: Sequence[str]) -> int | None:
    return next((at for at, word in enumerate(command) if word.endswith(".py")), None)


def _guess_workers(found: Guess, end: int) -> None:
    """Puts {world_size} where the launcher, among the words before `end`, is told how many."""
    command = found.command
    if any("{world_size}" in word for word in command):
        found.restarts = _restarts(command, end)
        return
    for at, word in enumerate(command[:end]):
        options = _LAUNCHERS.get(Path(word).name)
        if options is None or (word == "launch" and Path(command[at - 1]).name != "accelerate"):
            continue
        found.restarts = _restarts(command, end)
        number = _replace(command, options, "{world_size}", start=at + 1, end=end)
        if number is None:
            separate = options[0].startswith("--")
            added = [f"{options[0]}={{world_size}}"] if separate else [options[0], "{world_size}"]
            command[at + 1 : at + 1] = added
            found.taken.append(f"{' '.join(added)} was added to {word}")
            return
        found.taken.append(f"{{world_size}} stands for the number of workers, instead of {number}")
        if number.isdecimal() and 2 < int(number) <= _WORKERS_MAX:
            found.world_size = int(number)
        return
    found.look.append(
        "no launcher was recognised (torchrun, accelerate launch, mpirun): put {world_size} where "
        "the command is told how many workers to start"
    )


def _restarts(command: Sequence[str], end: int) -> bool:
    """Whether the launcher is told to start ranks again."""
    for at, word in enumerate(command[:end]):
        name, _, value = word.partition("=")
        if name in _RESTARTS:
            return (value or "".join(command[at + 1 : at + 2])) != "0"
    return False


def _replace(
    command: list[str],
    options: Collection[str],
    text: str,
    *,
    start: int = 0,
    end: int | None = None,
) -> str | None:
    """Gives the first of `options` in the command the value `text`; what it was, or None."""
    for at in range(start, len(command) if end is None else end):
        name, equals, value = command[at].partition("=")
        if name in options and equals:
            command[at] = f"{name}={text}"
            return value
        if name in options and at + 1 < len(command):
            value, command[at + 1] = command[at + 1], text
            return value
    return None


def _guess_options(found: Guess, script: Script, name: str) -> None:
    """Puts in what the script is told by its own options, where the names leave no doubt."""
    for placeholder, names in _PLACES.items():
        told = "{" + placeholder + "}"
        if any(told in word for word in found.command):
            continue
        options = [one for one in script.options if _plain(one) in names]
        if any(_plain(one) in _WEAK and _has(found.command, one) for one in options):
            found.look.append(f"is {options[0]} where checkpoints go? then let it be {told}")
            continue
        before = _replace(found.command, options, told)
        if before is not None:
            found.taken.append(f"{told} is what {name} is told instead of {before}")
        elif len(options) == 1:
            found.command += [options[0], told]
            found.taken.append(f"{options[0]} {told} was added: {name} has such an option")
        elif options:
            found.look.append(f"{told} could be any of {', '.join(options)} of {name}")
    if not any("{steps}" in word for word in found.command):
        epochs = [one for one in script.options if _plain(one) in _EPOCHS]
        told = f"; {epochs[0]} counts epochs: make these few" if epochs else ""
        found.look.append(
            f"no option of {name} was seen that says how many steps to make: runs are as long as "
            f"the script has them{told}"
        )
    if script.saves and not any("{workdir}" in word for word in found.command):
        found.look.append(
            f"{name} saves something, and no option was seen that says where: a run that finds "
            "what an earlier one saved may go on from it; let it be told a folder, {workdir}"
        )
    batches = [one for one in script.options if "batch_size" in _plain(one)]
    if batches:
        found.look.append(
            f"{batches[0]}: if it is one worker's, two of them train on other batches than one, "
            "and F-DP-005 can't compare them; divide a global batch by the number of workers"
        )
    for knob, names in _KNOBS.items():
        for option in script.options:
            if _plain(option) in names and "{" + knob + "}" not in " ".join(found.command):
                found.look.append(
                    f"{option} {{{knob}}} could be tried, if the training stays the same whatever "
                    "it is (knobs, in docs/your-trainer.md)"
                )


def _has(command: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in command)


def _plain(option: str) -> str:
    return re.sub("-", "_", option.lstrip("-"))
