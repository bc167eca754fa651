"""`entrenar-check anatomy -- COMMAND`: what a training step of a script really does."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path

from entrenar_py.check.project.command_line import PROG, Parser, split
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.page import arguments
from entrenar_py.shared.untrusted import escaping, printing

NAME = "anatomy"
EXIT_SUSPECTS, EXIT_NOTHING_SEEN = 1, 4
STEPS, DEADLINE_S = 8, 300.0

DESCRIPTION = """\
Runs a training command for some steps, without any line in the script, and
shows what a usual step does: each call with the script's line, what differs
between steps and ranks, and known anti-patterns that were seen."""
EPILOG = """\
exit codes:
  0  steps were seen; suspects don't change this
  1  with --strict: there are suspects
  2  the command line is invalid; nothing ran
  3  the harness itself failed
  4  no step was seen, or the command failed

example:
  entrenar-check anatomy --html step.html -- torchrun --nproc_per_node=2 train.py
"""


def run(words: Sequence[str]) -> int:
    """Run the command of `entrenar-check anatomy WORDS`, and show a usual step; return the code.

    Raises UsageError for an invalid command line, and TraceError for a damaged record.
    """
    cli = build()
    own, command = split(words, cli)
    options = cli.parse_args(own)
    if not command:
        raise UsageError(f"a command is missing: {PROG} {NAME} -- torchrun ... train.py")
    from entrenar_py.check.command import launch
    from entrenar_py.check.project import commands

    typed = commands.split(command)
    if commands.sets_variable(typed):
        typed.insert(0, "env")
    launch.require_program(typed[0])
    for option in ("json", "html"):
        if (path := getattr(options, option)) is not None:
            arguments.require_writable(path, option)
    with tempfile.TemporaryDirectory(prefix="entrenar-anatomy-") as folder:
        return _shown(options, typed, Path(folder))


def build() -> argparse.ArgumentParser:
    """Return the parser of this command's options."""
    cli = Parser(
        prog=f"{PROG} {NAME}",
        usage="%(prog)s [options] -- COMMAND ...",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cli.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    cli.add_argument("--html", type=Path, metavar="FILE", help="write it as one page for browsers")
    cli.add_argument(
        "--steps",
        type=lambda text: arguments.natural(text, least=1),
        default=STEPS,
        metavar="N",
        help=f"end the command after N optimizer steps (default {STEPS})",
    )
    cli.add_argument(
        "--deadline",
        type=arguments.seconds,
        default=DEADLINE_S,
        metavar="S",
        help=f"end the command after S seconds (default {DEADLINE_S:.0f})",
    )
    cli.add_argument("--strict", action="store_true", help="exit 1 if there are suspects")
    cli.add_argument(
        "--in-place",
        action="store_true",
        help="run the command in this folder itself, instead of in a copy of it",
    )
    return cli


def _shown(options: argparse.Namespace, command: Sequence[str], folder: Path) -> int:
    from entrenar_py.check.anatomy import page, record, steps, suspects, text
    from entrenar_py.check.command import folders, launch, run_trace
    from entrenar_py.check.observing import ANATOMY
    from entrenar_py.check.observing.auto import Settings
    from entrenar_py.check.project import commands
    from entrenar_py.check.rank_files import notes

    (folder / notes.ASKED).touch()
    shared = options.in_place or folders.runs_elsewhere(command)
    with folders.own_folder(None if shared else Path.cwd(), folder / folders.FOLDER) as own:
        ended = (own.launched(launch.launch) if own else launch.launch)(
            command,
            folder=folder,
            variables={**Settings(steps=options.steps).variables(), ANATOMY: "1"},
            deadline_s=options.deadline,
            usual=commands.usual_variables(command),
        )
    records = record.load(folder)
    anatomy = steps.of(records)
    # Ranks that wait for one that has taken its last step fail then.
    is_whole = any(len(steps.cut(known)) >= options.steps for known in records.values())
    failed = ended.code != 0 and not is_whole
    if failed:
        error = run_trace.script_error(ended.output)
        printing.warn(f"the command failed ({ended.how}){error and f': {error}'}; its last lines:")
        printing.warn_lines("\n".join(ended.tail))
    if anatomy is None:
        reason = notes.why_nothing(folder) if not failed else "it failed before its first step"
        printing.warn(f"{PROG} {NAME}: no step was seen: {reason}")
        return EXIT_NOTHING_SEEN
    for problem in notes.problems(folder):
        printing.warn(problem)
    seen = suspects.of(records)
    called = shlex.join(command)
    printing.say_lines("\n".join(map(escaping.exact, text.screen(anatomy, seen))))
    if options.json is not None:
        arguments.write_file(text.as_json(anatomy, seen, called), options.json)
    if options.html is not None:
        arguments.write_file(page.page(anatomy, seen, escaping.line(called)), options.html)
    if failed:
        return EXIT_NOTHING_SEEN
    return EXIT_SUSPECTS if options.strict and seen else 0
