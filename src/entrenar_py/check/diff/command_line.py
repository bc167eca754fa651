"""The command line of `entrenar-check diff`."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from entrenar_py.check.command import launch, warm
from entrenar_py.check.diff import comparison, environment, repetition, report, runs
from entrenar_py.check.diff.runs import CommandSide, Failure, Launching, Side
from entrenar_py.check.project import commands
from entrenar_py.check.project.command_line import PROG, Parser
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import arguments
from entrenar_py.shared.untrusted import printing

EPILOG = """\
exit codes:
  0  the runs are equal, or differ by rounding
  1  a real difference
  2  the command line is invalid; nothing ran
  4  can't be told: a run failed, or nothing could be compared

examples:
  entrenar-check diff 'python old.py' 'python new.py'
  entrenar-check diff --save good -- torchrun --nproc_per_node=2 train.py
  entrenar-check diff good -- torchrun --nproc_per_node=2 train.py
  entrenar-check diff --again -- python train.py
"""
STEPS = 4
_SIDE_HELP = "a command as one word, or the folder of a stored run"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the words before `--`."""
    cli = Parser(
        prog=f"{PROG} diff",
        usage="%(prog)s [options] A B\n"
        "       %(prog)s [options] A -- COMMAND ...\n"
        "       %(prog)s --save DIR [options] -- COMMAND ...\n"
        "       %(prog)s --again [options] -- COMMAND ...",
        description="Says why two training runs differ: by rounding, or by a bug, and where first. "
        "Scripts need no line for that. What rounding does is measured on A, which runs again with "
        "its last bits disturbed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_argument("sides", nargs="*", metavar="A|B", help=_SIDE_HELP)
    cli.add_argument("--save", metavar="DIR", type=Path, help="store the runs of one side here")
    cli.add_argument(
        "--again",
        action="store_true",
        help="compare runs of one command: which statement or operation is not deterministic",
    )
    number: dict[str, Any] = {
        "type": lambda text: arguments.natural(text, least=1),
        "metavar": "N",
    }
    steps = f"steps of each run (default {STEPS}, or those of a stored run)"
    cli.add_argument("--steps", help=steps, **number)
    cli.add_argument(
        "--disturbed", default=3, help="runs of A with disturbed last bits (default 3)", **number
    )
    cli.add_argument(
        "--seed",
        type=arguments.natural,
        metavar="N",
        help="seeds what a script leaves unseeded (default 0, or that of a stored run; with "
        "--again nothing)",
    )
    cli.add_argument(
        "--deadline",
        type=arguments.seconds,
        default=300.0,
        metavar="S",
        help="end each run after S seconds (default 300)",
    )
    cli.add_argument("--in-place", action="store_true", help="run in this folder, not in a copy")
    cli.add_argument(
        "--launcher",
        choices=("forked", "as-is"),
        default="forked",
        help="as for other commands (default forked)",
    )
    cli.add_argument("--json", metavar="FILE", type=Path, help="write the outcome as JSON")
    cli.add_argument("--html", metavar="FILE", type=Path, help="write the outcome as a page")
    return cli


def run(words: Sequence[str]) -> int:
    """Compare two sides, or store one, and return the exit code.

    Raises UsageError for a command line that makes no sense, before anything runs.
    """
    place = list(words).index("--") if "--" in words else len(words)
    options = parser().parse_args(words[:place])
    sides = _sides(options, tuple(words[place + 1 :]), has_command=place < len(words))
    if sides[1:] == sides[:1] and not _is_stored(sides[0]):
        options.again = True
    for option in ("json", "html"):
        if getattr(options, option) is not None:
            arguments.require_writable(getattr(options, option), option)
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="entrenar-diff-")))
        stored = {
            name: runs.load(Path(words[0]), name)
            for name, words in zip("AB", sides, strict=False)
            if _is_stored(words)
        }
        for like in stored.values():
            options.steps = options.steps or like.steps
            options.seed = like.seed if options.seed is None else options.seed
        first, *others = (
            stored.get(name) or _launching(options, words, name, folder, opened)
            for name, words in zip("AB", sides * 2 if options.again else sides, strict=False)
        )
        if options.save is not None:
            return _save(first, options.save)
        (second,) = others
        if options.again:
            assert isinstance(first, CommandSide), "a stored run was refused"
            assert isinstance(second, CommandSide), "it is the same command"
            outcome = repetition.repeat(first, second)
        else:
            _tell_surroundings(first, second)
            outcome = comparison.compare(first, second)
    for line in report.lines(outcome):
        printing.say(line)
    if options.json is not None:
        arguments.write_file(report.record(outcome), options.json)
    if options.html is not None:
        arguments.write_file(report.page(outcome), options.html)
    return outcome.exit_code


Words = tuple[str, ...]


def _sides(options: argparse.Namespace, command: Words, *, has_command: bool) -> list[Words]:
    """Return the words of each side: those of a command, or the folder of a stored run."""
    if has_command and not command:
        raise UsageError("no command after --; write the command that trains")
    sides = [_split(text) for text in options.sides] + ([command] if command else [])
    if options.again and options.save is not None:
        raise UsageError("--again and --save DIR: give one of them")
    single = "--again" if options.again else "--save DIR" if options.save is not None else ""
    if len(sides) != (1 if single else 2):
        what = f"{single} needs one command" if single else "two sides are needed"
        raise UsageError(
            f"{what}, and {len(sides)} were given: write each as one word ('python train.py'), as "
            "the folder of a stored run, or one after --"
        )
    if options.save is not None:
        _require_new(options.save)
        if runs.is_stored(sides[0][0]):
            raise UsageError(f"--save {options.save}: {sides[0][0]} is stored already")
    if options.again and _is_stored(sides[0]):
        raise UsageError(
            f"--again {sides[0][0]}: a stored side can't be run again; give its command"
        )
    for words in sides:
        if not _is_stored(words):
            commands.require_one_machine(words)
            launch.require_program(words[0])
    return sides


def _split(text: str) -> Words:
    if runs.is_stored(text):
        return (text,)
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{text!r}: no command ({error}); close its quotes") from error
    if not words or (len(words) == 1 and Path(words[0]).is_dir()):
        raise UsageError(
            f"{text!r}: no command, and no folder of a stored run; store one with "
            f"{PROG} diff --save {text or 'DIR'} -- COMMAND"
        )
    return ("env", *words) if commands.sets_variable(words) else words


def _require_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--save {folder}: it exists and is not empty; give another folder")


def _is_stored(words: Words) -> bool:
    return len(words) == 1 and runs.is_stored(words[0])


def _launching(
    options: argparse.Namespace, words: Words, name: str, folder: Path, opened: ExitStack
) -> CommandSide:
    parents = warm.Parents(
        None if options.launcher == "as-is" else commands.script(words, Path.cwd())[1]
    )
    opened.callback(parents.close)
    launching = Launching(
        folder=folder,
        steps=options.steps or STEPS,
        seed=options.seed if options.again else options.seed or 0,
        num_disturbed=options.disturbed,
        deadline_s=options.deadline,
        in_place=options.in_place,
        lines=options.again,
    )
    return CommandSide(name=name, command=words, launching=launching, parents=parents)


def _save(side: Side, folder: Path) -> int:
    assert isinstance(side, CommandSide), "a stored run was refused"
    try:
        plain = runs.save(side, folder)
    except Failure as error:
        printing.warn(f"{PROG} diff: {error}")
        return comparison.EXIT_CODES[comparison.UNKNOWN]
    printing.say(f"stored in {folder}: compare with {PROG} diff {folder} -- COMMAND")
    if plain.problem:
        printing.say(f"note: {plain.problem}")
    return 0


def _tell_surroundings(first: Side, second: Side) -> None:
    known = environment.differences(first.environment, second.environment)
    for name, (own, other) in known.items():
        printing.warn(f"differs: {name}: {own or '-'} | {other or '-'}")
