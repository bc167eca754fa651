"""`entrenar watch -- COMMAND`: this process becomes the command, and its ranks are watched."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from typing import NoReturn

from entrenar_py.check.observing.auto import Settings
from entrenar_py.check.project import commands
from entrenar_py.check.watch import judge
from entrenar_py.shared import package_data
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import escaping


def run(options: argparse.Namespace) -> NoReturn:
    """Replace this process by the command, which then gets all signals and sets the exit code."""
    judge.select_clauses(options.contract)
    contract = options.contract and str(package_data.contract_path(options.contract).absolute())
    settings = Settings(every=options.every, contract=contract)
    shown = escaping.shortened(shlex.join(options.program))
    words = ["env"] * commands.sets_variable(options.program) + options.program
    program = shutil.which(words[0])
    if program is None:
        raise UsageError(f"{shown}: there is no such program; check its name, or give its path")
    try:
        os.execve(program, words, {**os.environ, **settings.variables()})
    except OSError as error:
        raise UsageError(f"{shown}: can't be started ({error.strerror}); check it") from error
