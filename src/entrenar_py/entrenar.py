"""The command `entrenar`: the trainer's commands, and two commands of the checker.

The trainer's packages import nothing from the checker, so this module adds the two.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from entrenar_py.train import cli
from entrenar_py.train.service import exit_codes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. `--help` and `--version` raise SystemExit."""
    return cli.main(argv, {"watch": _watch, "doctor": _doctor})


def _watch(options: argparse.Namespace) -> int:
    from entrenar_py.check.cli import watching

    return watching.run(options)


def _doctor(options: argparse.Namespace) -> int:
    from entrenar_py.check import doctor

    doctor.run(options.json, clauses=options.clauses, color=not options.no_color)
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
