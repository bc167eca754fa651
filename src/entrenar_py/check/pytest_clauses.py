"""Judging of clauses in a pytest test, with the search and the words of `entrenar-check`."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from entrenar_py.check import cli, contract
from entrenar_py.check.cli import session
from entrenar_py.check.contract import Contract, bindings, records
from entrenar_py.check.harness import falsify, plan
from entrenar_py.check.project import command_line, configuration, toml_file
from entrenar_py.check.reports import evidence
from entrenar_py.check.reports.report import Entry, Report, rank
from entrenar_py.shared import package_data, process
from entrenar_py.shared.errors import EntrenarError
from entrenar_py.shared.untrusted import escaping
from entrenar_py.shared.verdict import Verdict

_CONFIGURABLE = ("system", "world_size", "seed", "examples")  # may come from the configuration


@dataclass(frozen=True, kw_only=True)
class Request:
    """A clause to judge, with the options that `entrenar-check` would get."""

    clause: str
    contract: str
    system: str | None = None
    world_size: tuple[int, ...] = ()
    seed: int = 0
    examples: int = 20
    bind: tuple[Path, ...] = ()
    note: str = ""  # a note of the configuration, shown with the verdict
    left_out: str = ""  # why the configuration excludes it; "" if it doesn't

    def plan(self) -> plan.Plan:
        """Return the plan of the clause's runs. Raises UsageError if they are impossible."""
        return plan.Plan(
            system=self.system,
            world_sizes=self.world_size,
            seed=self.seed,
            num_examples=self.examples,
        )

    def command(self) -> str:
        """Return the `entrenar-check` command that judges the same clause with these options."""
        words = ["entrenar-check", "--contract", self.contract, "--only", self.clause]
        words += [word for path in self.bind for word in ("--bind", str(path))]
        words += ["--system", self.system] if self.system else []
        words += ["--world-size", ",".join(map(str, self.world_size))] if self.world_size else []
        words += ["--seed", str(self.seed)] if self.seed else []
        words += ["--examples", str(self.examples)] if self.examples != 20 else []
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The entry of one clause, and the report that contains it."""

    entry: Entry
    report: Report

    def settle(self, *, allow_inconclusive: bool) -> None:
        """Fail the test if the clause didn't hold.

        Skip it if it is inconclusive and that is allowed.
        """
        if self.entry.verdict is Verdict.INCONCLUSIVE and allow_inconclusive:
            pytest.skip(evidence.one_line(f"inconclusive: {self.entry.finding.reason}"))
        if self.entry.verdict is not Verdict.HELD:
            pytest.fail(self.text(), pytrace=False)

    @property
    def notes(self) -> str:
        """The notes to show with any verdict, such as on scenarios that were left out."""
        return "\n".join(evidence.note_lines(self.entry))

    def text(self) -> str:
        """Return the verdict and its evidence."""
        clause, finding = self.entry.invariant, self.entry.finding
        heading = f"{clause.id} {str(self.entry.verdict).upper()}: {finding.reason}"
        details = evidence.detail_lines(self.report, self.entry)
        details += evidence.note_lines(self.entry)
        return "\n".join(
            [
                evidence.one_line(heading),
                *details,
                f"repeat with: {escaping.exact(self.report.command)}",
            ]
        )


def request_of(mark: pytest.Mark, usual: str | None, root: Path) -> Request:
    """Return the request that a mark expresses. An invalid mark fails the test.

    `usual` is the contract for marks that name none. If it is also None, the configuration of the
    project at `root` provides what the mark leaves out.
    """
    names = ("contract", *_CONFIGURABLE)
    strange = [name for name in mark.kwargs if name not in names]
    if len(mark.args) != 1 or not isinstance(mark.args[0], str) or strange:
        _refuse(f"{mark}: give the id of one clause, and no keywords but {', '.join(names)}")
    options: dict[str, Any] = {"contract": usual, **mark.kwargs}
    if options["contract"] is None:
        options = {**_configured(mark, root), **mark.kwargs}
    sizes = options.pop("world_size", ())
    world_size = (sizes,) if isinstance(sizes, int | str) else tuple(sizes)
    counts = (*world_size, options.get("seed", 0), options.get("examples", 0))
    if not all(isinstance(count, int) for count in counts) or options.get("examples", 0) < 0:
        _refuse(f"{mark}: world_size, seed and examples are integers, examples 0 or more")
    options["contract"] = str(options["contract"])
    return Request(**options, clause=mark.args[0], world_size=world_size)


def _configured(mark: pytest.Mark, root: Path) -> dict[str, Any]:
    """Return the clause's options in the project's configuration, as keywords of Request."""
    try:
        path = toml_file.find(root)
        if path is None:
            _refuse(
                f"{mark}: no contract is named; give contract=FILE, or pytest --contract FILE, or "
                "configure the project (docs/configuration.md)"
            )
        project = configuration.load(path)
        if project.command and "system" not in mark.kwargs:
            _refuse(
                f"{mark}: {project.place} names a command, which entrenar-check runs and pytest "
                "does not; give system=NAME to try a trainer of entrenar-py"
            )
        contracts, files = project.values["contract"], project.values.get("bind", ())
        bind = {name: bindings.for_contract(files, name, contracts) for name in contracts}
        loaded = {name: load(name, bind[name]) for name in contracts}
        ids = {id_: name for name, read in loaded.items() for id_ in records.ids_of(read)}
        records.require_ids(mark.args, ids, f"the contracts of {project.place.file}")
        name = ids[mark.args[0]]
        selected = plan.select(loaded[name], only=mark.args)
    except EntrenarError as error:
        _refuse(str(error))
    standing = configuration.apply(selected, project.exclusions)
    reasons = [f"is excluded {clause.why}" for clause in standing.excluded]
    reasons += [f"does not apply: {clause.reason}" for clause in standing.not_applying]
    values = {name: project.values[name] for name in _CONFIGURABLE if name in project.values}
    note = "; ".join(standing.notes.values())
    left_out = reasons[0] if reasons else ""
    return {"contract": name, "bind": bind[name], "left_out": left_out, "note": note, **values}


def judge(request: Request) -> Judged:
    """Judge the clause, and return the entry. If it can't be judged, fail the test with the reason.

    The test is skipped if the clause is excluded or doesn't apply.
    """
    if request.left_out:
        pytest.skip(evidence.one_line(f"{request.clause} {request.left_out}"))
    started = time.monotonic()
    try:
        loaded = load(request.contract, request.bind)
        tasks, not_applying = plan.divide(
            plan.select(loaded, only=(request.clause,)), request.plan()
        )
        if not_applying:
            why = f"{request.clause} does not apply to {request.system}: {not_applying[0].reason}"
            pytest.skip(evidence.one_line(why))
        with process.deferred_interrupts():
            (entry,) = falsify.falsify(tasks, request.plan())
    except EntrenarError as error:
        _refuse(str(error))
    if request.note:
        notes = (*entry.finding.notes, request.note)
        entry = replace(entry, finding=replace(entry.finding, notes=notes))
    report = Report(
        contract=loaded,
        contract_given=request.contract,
        system=plan.systems_of(scenario for task in tasks for scenario in task.scenarios),
        seed=request.seed,
        entries=(entry,),
        environment={},
        elapsed_s=time.monotonic() - started,
        interrupted=False,
        command=request.command(),
        bindings_given=tuple(map(str, request.bind)),
    )
    return Judged(entry=entry, report=report)


# --- clauses for a command ------------------------------------------------------------------------

_OF_COMMANDS = {"only", "contract", "steps", "epochs", "seed", "deadline"}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The reports on a command, of all its contracts."""

    judged: tuple[Judged, ...]  # worst first

    @property
    def entry(self) -> Entry:
        """The worst entry."""
        return self.judged[0].entry

    @property
    def notes(self) -> str:
        """The notes on all verdicts."""
        return "\n".join(filter(None, (one.notes for one in self.judged)))

    def settle(self, *, allow_inconclusive: bool) -> None:
        """Fail the test if a clause didn't hold; skip if inconclusive and that is allowed.

        A falsification that the project accepts, or that is only advice, doesn't count.
        """
        counted = [one for one in self.judged if not one.entry.is_accepted]
        if broken := [one.text() for one in counted if one.entry.verdict is Verdict.FALSIFIED]:
            pytest.fail("\n\n".join(broken), pytrace=False)
        for judged in counted:
            judged.settle(allow_inconclusive=allow_inconclusive)


def call_of(mark: pytest.Mark) -> tuple[str, ...]:
    """Return the call of `entrenar-check` that a mark means; an invalid mark fails the test."""
    if len(mark.args) != 1 or not isinstance(mark.args[0], str) or {*mark.kwargs} - _OF_COMMANDS:
        names = ", ".join(sorted(_OF_COMMANDS))
        _refuse(f"{mark}: give one command as text, and no keywords but {names}")
    words = []
    for name, value in mark.kwargs.items():
        is_one = isinstance(value, str | int | float | os.PathLike)
        values = [value] if is_one else [*value]
        joined = [",".join(map(str, values))] if name == "only" else map(str, values)
        words += [word for text in joined for word in (f"--{name}", text)]
    return (*words, "--", *shlex.split(mark.args[0]))


def train(call: Sequence[str], root: Path) -> Trained:
    """Make a call with a command in the folder `root`; if that isn't possible, the test fails."""
    try:
        options = command_line.configured(command_line.read(call), root)
        options.command_folder, options.quiet = options.command_folder or root, True
        cli.require_possible(options)
        with process.deferred_interrupts(), ExitStack() as opened:
            cli.begin(options, opened)
            reports = session.reports_of_command(options, call)
    except EntrenarError as error:
        _refuse(str(error))
    if any(report.interrupted for report in reports):
        raise KeyboardInterrupt
    judged = [Judged(entry=entry, report=report) for report in reports for entry in report.ranked]
    if not judged:
        _refuse(f"{shlex.join(call)}: no clause was selected, or none applies")
    return Trained(judged=tuple(sorted(judged, key=lambda one: rank(one.entry))))


def require_possible(request: Request) -> None:
    """Raise UsageError, with the place, if a clause can't be tested as requested."""
    plan.divide(load(request.contract, request.bind).invariants, request.plan())


def load(name: str, bind: Sequence[Path] = ()) -> Contract:
    """Return the contract at a path, or the shipped contract of that name.

    `bind` are files of bindings. Raises ContractError and UsageError.
    """
    path = package_data.contract_path(name)
    return contract.load(path, vocabulary=session.vocabulary(), bind=bind)


def _refuse(message: str) -> NoReturn:
    try:
        pytest.fail(escaping.text(message), pytrace=False)
    except BaseException as failure:
        raise failure from None  # it says all that the error of ours says
