"""Spread tests over processes, longest first, and write the seconds that each took.

Loaded by `make test` with `-p tests.spread`. Tests that need the same expensive fixture stay in one
process. All others go one by one to the next free process.

Modules and tests stay to the end, so it is in vain to look for garbage while they are loaded. In
each process that took a sixth of the time. And in a fresh checkout one process compiles all modules
(a third of the time), before the others load them, too.
"""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from entrenar_py.shared import process

gc.disable()  # until all tests are collected
_compiling = ExitStack()

DURATIONS = Path("durations.txt")
NUM_SLOWEST = 100

# Tests that share what takes seconds to make, a fixture or a process that has torch loaded and
# forks others: by the beginning of their node id.
TOGETHER = {
    "tests/train/canonical/test_canonical.py": "canonical",
    "tests/train/elastic/test_elastic.py": "elastic",
    "tests/train/elastic/test_audit.py": "audits",
    "tests/train/finetune/": "small checkpoint",
    "tests/train/stages/": "stages and students",
    "tests/train/distill/": "stages and students",
    "tests/train/model/": "small checkpoint, without processes",
    "tests/systems/finetuned/": "small checkpoint, without processes",
    "tests/check/clauses/test_local_sgd.py": "local SGD",
    "tests/systems/probes/test_elastic.py": "elastic",
    "tests/check/clauses/test_wire.py": "wire",
    "tests/examples/test_own_trainer.py": "own trainer",
    "tests/systems/probes/test_memory.py::test_the_estimate_bounds_the_peak": "memory",
    "tests/network/test_namespaces.py": "namespaces",
    "tests/check/anatomy/test_recorder.py": "zygote",
    "tests/check/anatomy/test_suspects.py": "zygote",
    "tests/check/observing/test_dtensors.py": "zygote",
    "tests/check/command/test_auto.py": "zygote",
    "tests/check/command/test_launch.py::test_a_stop_that_hangs_when_all_is_done": "zygote",
    "tests/check/command/test_launch.py::test_a_value_is_planted_where_a_gradient_is": "zygote",
    "tests/check/command/test_launch.py::test_another_number_of_workers_than": "zygote",
    "tests/check/command/test_nudging.py": "zygote",
    "tests/check/command/test_user_trainers.py": "zygote",
    "tests/check/diff/test_again.py": "zygote",
    "tests/check/diff/test_command_line.py::test_a_script_without_a_line": "zygote",
    "tests/check/pytest_plugin/test_plugin.py": "zygote",
    "tests/docs/test_tutorial.py": "zygote",
    "tests/examples/test_canonical.py": "zygote",
    "tests/train/plan/test_plan.py": "plans",
    "tests/check/diff/test_planted.py": "planted",
    "tests/train/service/test_averaging.py": "service",
    "tests/train/service/test_coordinator.py": "service",
    "tests/train/service/test_file_locks.py": "service",
    "tests/train/service/test_mesh.py": "service",
    "tests/train/service/test_service.py": "service",
    "tests/test_architecture.py": "all imports",
    "tests/test_doors.py": "doors",
    "tests/test_wheel.py": "wheel",
    "tests/check/watch/test_watched_ranks.py": "watched ranks",
}


def _compile_alone() -> None:
    """Compile all modules, if no process of this run does so; if one does, wait for it.

    This is done before any large module is loaded. The lock is released when all tests are
    collected, or by the system if the process dies.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    last = max(Path(__file__).parent.rglob("test_*.py"))
    is_compiled = any(last.parent.glob(f"__pycache__/{last.stem}.*-pytest-*.pyc"))
    if run is None or is_compiled or sys.dont_write_bytecode:
        return
    path = Path(tempfile.gettempdir(), f"tests-{run}.lock")
    lock = os.open(path, os.O_CREAT | os.O_RDWR)
    _compiling.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(lock, fcntl.LOCK_SH)
        _compiling.close()
    else:
        _compiling.callback(path.unlink)


_compile_alone()


class Spread(LoadScopeScheduling):  # type: ignore[misc]
    """Scheduling by groups: larger groups first, then single tests in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        for beginning, group in TOGETHER.items():
            if nodeid.startswith(beginning):
                return group
        return nodeid

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Note that `node` is done with a test, and forget a group when it is done.

        The base class keeps all groups and counts through them after every test.
        """
        super().mark_test_complete(node, item_index, duration)
        group = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][group].values()):
            del self.assigned_work[node][group]


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # of pytest-xdist, whose own answer comes later
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of cores plus two: tests of processes and deadlines wait a third of it."""
    return 2 + len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Spread:
    """Return the scheduler of a run over several processes."""
    return Spread(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests first, so that no process ends with one while the others are idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Look for garbage again, but not in what was collected, and as seldom as a command does."""
    _compiling.close()
    gc.freeze()
    process.collect_seldom()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the seconds of each file and of the slowest tests, fixtures included."""
    if hasattr(config, "workerinput"):
        return
    by_test: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                by_test[report.nodeid] += report.duration
    (config.rootpath / DURATIONS).write_text(table(by_test), encoding="utf-8")


def table(seconds_by_test: dict[str, float]) -> str:
    """Return the page: the sum, each file and the slowest tests, longest first."""
    by_file: dict[str, float] = defaultdict(float)
    for test, seconds in seconds_by_test.items():
        by_file[test.partition("::")[0]] += seconds
    total = f"{sum(seconds_by_test.values()):9.2f} s in {len(seconds_by_test)} tests"
    slowest = _longest_first(seconds_by_test)[:NUM_SLOWEST]
    return "\n".join([total, "", *_longest_first(by_file), "", *slowest]) + "\n"


def _longest_first(seconds: dict[str, float]) -> list[str]:
    ordered = sorted(seconds.items(), key=lambda named: -named[1])
    return [f"{seconds:9.2f} {name}" for name, seconds in ordered]
