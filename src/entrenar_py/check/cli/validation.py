"""`entrenar-check --validate`: apply the rules to contracts, report in every requested format."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from entrenar_py.check.cli import reporting
from entrenar_py.check.contract import Invariant, Vocabulary, validation
from entrenar_py.check.contract.validation import Validation
from entrenar_py.check.harness import plan
from entrenar_py.check.reports import validation as report
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import printing

FILES = ("json", "sarif")  # the formats that a validation can write to files


def prepare(
    options: argparse.Namespace,
    contracts: Mapping[Path, Sequence[Path]],
    *,
    vocabulary: Vocabulary,
    command: str,
    output: Console,
) -> Callable[[], int]:
    """Return a function that prints the validation, and returns 0 if all contracts are valid, or 2.

    `contracts` maps the path of each contract to its files of bindings. Raises UsageError for
    unknown rules, and for files that can't be written.
    """
    validation.require_suppressible(options.suppress)
    reporting.require_writable(options, FILES)

    def job() -> int:
        result = validation.validate(
            contracts,
            vocabulary=vocabulary,
            suppressed=options.suppress,
            strict=options.strict,
            unrunnable=_unrunnable,
        )
        _tell(result, options, command, output)
        return report.exit_code(result)

    return job


def _unrunnable(clause: Invariant) -> str:
    try:
        plan.require_runnable([clause])
    except UsageError as error:
        return str(error).removeprefix(f"{clause.position}: ")
    return ""


def _tell(result: Validation, options: argparse.Namespace, command: str, output: Console) -> None:
    for line in report.lines(result):
        printing.warn(line)
    for line in report.verdicts(result):
        output.print(line, markup=False, soft_wrap=True)
    root = reporting.checkout(options)
    reporting.write_files(
        options,
        {
            "json": lambda: report.dump(result, command=command),
            "sarif": lambda: report.dump_sarif(result, root=root, command=command),
        },
    )
    if options.github:
        annotations = report.annotate(result, root=root)
        reporting.tell_github(annotations, report.summary(result), output)
