"""The pytest plugin: marks for a clause or a command that must hold, and a test per clause.

It imports nothing of the harness before a test needs it, since pytest loads the plugin in every
run. A falsified clause fails a test. An inconclusive clause fails it, too, or skips it with
`contract_allow_inconclusive`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from entrenar_py.check.pytest_clauses import Judged, Request, Trained
    from entrenar_py.shared.verdict import Finding

MARK, TRAINS = "contract", "trains"
_KNOWN: pytest.StashKey[dict[Any, Any]] = pytest.StashKey()  # the results of this session
EXAMPLES = 20
ALLOW = "contract_allow_inconclusive"
_USAGE = (
    "contract(id, *, contract=FILE, system=NAME, world_size=N, seed=N, examples=N): "
    "the clause must hold for the system; `finding` is what was found (entrenar-py)"
)
_USAGE_TRAINS = (
    "trains(command, *, only=IDS, contract=FILE, steps=N, epochs=N, seed=N, deadline=S): "
    "the command that trains must hold all clauses, or `only` these (entrenar-py)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, and the setting that makes inconclusive tests skip."""
    group = parser.getgroup("entrenar-py")
    group.addoption(
        "--contract",
        metavar="FILE",
        help="a YAML contract: a test per clause is collected, and marks need not name it",
    )
    group.addoption(
        "--contract-system", metavar="NAME", help="the trainer, instead of the contract's"
    )
    group.addoption(
        "--contract-examples",
        metavar="N",
        type=int,
        help=f"random scenarios to explore per clause of --contract (default {EXAMPLES})",
    )
    parser.addini(
        ALLOW, type="bool", default=False, help="skip inconclusive clauses instead of failing"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark. Raises UsageError for an option that has no effect."""
    config.addinivalue_line("markers", _USAGE)
    config.addinivalue_line("markers", _USAGE_TRAINS)
    for option in ("--contract-system", "--contract-examples"):
        if config.getoption("--contract") is None and config.getoption(option) is not None:
            raise pytest.UsageError(
                f"{option} has no effect without --contract; add --contract FILE, or leave it out"
            )


@pytest.hookimpl(tryfirst=True)  # before -k and -m select tests
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for each clause of `--contract`."""
    if config.getoption("--contract") is None:
        return
    from entrenar_py.check import pytest_clauses as judging
    from entrenar_py.shared.errors import EntrenarError
    from entrenar_py.shared.untrusted import escaping

    examples = config.getoption("--contract-examples")
    try:
        request = judging.Request(
            clause="",
            contract=config.getoption("--contract"),
            system=config.getoption("--contract-system"),
            examples=EXAMPLES if examples is None else examples,
        )
        loaded = judging.load(request.contract)
        judging.require_possible(request)
    except EntrenarError as error:
        raise pytest.UsageError(escaping.line(error)) from error
    file = ContractFile.from_parent(session, path=loaded.path.resolve())
    added: list[pytest.Item] = []
    for clause in loaded.invariants:
        item = ContractItem.from_parent(file, name=escaping.line(clause.id))
        item.request, item.line = replace(request, clause=clause.id), clause.position.line
        item.add_marker(pytest.mark.contract(clause.id, contract=request.contract))
        added.append(item)
    items += added
    # Without this, pytest would count more deselected tests than collected ones.
    found = pytest.CollectReport(file.nodeid, "passed", None, [*added])
    config.hook.pytest_collectreport(report=found)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Judge the clauses of a marked test, and fail or skip it accordingly before its body runs."""
    for judged in _judged(item):
        if judged.notes:
            item.add_report_section("call", "contract", judged.notes)
        judged.settle(allow_inconclusive=item.config.getini(ALLOW))


@pytest.fixture
def finding(request: pytest.FixtureRequest) -> Finding:
    """Return the finding for the clause in the test's mark; for several marks, the nearest one.

    For a command it is the worst finding.
    """
    for judged in _judged(request.node):
        return judged.entry.finding
    raise pytest.UsageError(
        "the fixture `finding` needs a clause; mark the test with @pytest.mark.contract or trains"
    )


class ContractFile(pytest.File):
    """A contract; each of its clauses is a test."""

    def collect(self) -> Iterator[pytest.Item]:
        """Return nothing: the clauses are added after all other tests were collected."""
        return iter(())


class ContractItem(pytest.Item):
    """One clause as a test without a body: `pytest_runtest_call` judges the clause."""

    request: Request
    line: int

    def runtest(self) -> None:
        """Do nothing: this is called only if the clause has held."""

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return the place of the clause."""
        return self.path, self.line - 1, self.name


def _judged(item: pytest.Item) -> Iterator[Judged | Trained]:
    """Yield the result for each mark of `item`; each is judged once per session.

    A mark without arguments belongs to a different plugin, and is ignored.
    """
    marks = [mark for mark in item.iter_markers(MARK) if mark.args or mark.kwargs]
    commands = [mark for mark in item.iter_markers(TRAINS) if mark.args or mark.kwargs]
    if not marks and not commands:
        return
    from entrenar_py.check import pytest_clauses as judging

    usual = item.config.getoption("--contract")
    own = [item.request] if isinstance(item, ContractItem) else None
    known = item.session.stash.setdefault(_KNOWN, {})
    for request in own or [judging.request_of(mark, usual, item.config.rootpath) for mark in marks]:
        if request not in known:
            known[request] = judging.judge(request)
        yield known[request]
    for call in map(judging.call_of, commands):
        if call not in known:
            known[call] = judging.train(call, item.config.rootpath)
        yield known[call]
