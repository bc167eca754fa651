"""Two things timed side by side, and their ratios printed when the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

LINES: pytest.StashKey[list[str]] = pytest.StashKey()

# (name, ours, peer, rounds) -> the seconds of each round of ours
Beside = Callable[..., list[float]]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The lines that benchmarks left, under a heading of their own."""
    if LINES in config.stash:
        terminalreporter.section("ratios, of the fastest rounds (and of the medians)")
        for line in config.stash[LINES]:
            terminalreporter.write_line(line)


@pytest.fixture
def say(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Keeps a line for the end of the run."""
    return pytestconfig.stash.setdefault(LINES, []).append


@pytest.fixture
def beside(benchmark: BenchmarkFixture, say: Callable[[str], None]) -> Beside:
    """Times `ours` against `peer`, one round of each in turn, so that both see the same machine.

    The fastest round counts: what else runs on the machine can only add to a time.
    """

    def measure(
        name: str, *, ours: Callable[[], object], peer: Callable[[], object], rounds: int
    ) -> list[float]:
        peers, own = timed(peer), timed(ours)
        for run in (peer, ours):  # what is paid once: imports, first touch of memory
            run()
        benchmark.pedantic(own, setup=peers, rounds=rounds)  # type: ignore[no-untyped-call]
        fastest = min(own.seconds) / min(peers.seconds)
        middle = median(own.seconds) / median(peers.seconds)
        say(f"{name}: {fastest:.2f}x ({middle:.2f}x)")
        return own.seconds

    return measure


class timed:  # noqa: N801  (reads as a verb: it is called like the function it holds)
    """`run`, with the seconds of every call."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.seconds: list[float] = []

    def __call__(self) -> None:
        start = time.perf_counter()
        self._run()
        self.seconds.append(time.perf_counter() - start)
