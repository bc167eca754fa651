"""Shows the rules on hyper-parameters that a configuration breaks, each at its place."""

from __future__ import annotations

from pathlib import Path

from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import hyper_parameters
from entrenar_py.train.model.hyper_parameters import Facts


def show(path: Path, facts: Facts) -> None:
    """Print a warning for each rule that the configuration at `path` breaks.

    Raises ContractError for values that can't train anything.
    """
    problems = Problems()
    root = settings_file.read(path, problems)
    if root is None:
        problems.settle(strict=True)
        return
    for remark in hyper_parameters.remarks(facts):
        at = settings_file.innermost(root, remark.keys).at
        report = problems.error if remark.level == "error" else problems.warn
        report(at, f"{remark.message} [{remark.rule}]", rule=remark.rule)
    for problem in problems.settle(strict=False):
        printing.warn(problem.line)
