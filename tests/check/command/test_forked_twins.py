"""Scripts under torchrun, as it is and forked: the same verdicts and the same traces.

`pytest -m by_hand tests/check/command/test_forked_twins.py`: real processes, for the better part of
an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from entrenar_py.check.command import launch, warm
from falsification.twins import Twin
from tests.check.command import scripts, twins

pytestmark = pytest.mark.by_hand
DEADLINE_S = 600.0  # beside other work
SCRIPTS = ("ddp.py", "fsdp.py", "ema.py", "knobs.py", "resume.py", "tensor_parallel.py")


@pytest.fixture(scope="module")
def parents() -> Iterator[warm.Parents]:
    """Return what forks the ranks of all scripts here, whatever they have of sets."""
    made = warm.Parents(scripts.EXAMPLES / "ddp.py")
    yield made
    made.close()


@pytest.mark.parametrize("twin", twins.every(), ids=lambda twin: twin.name)
def test_a_forked_twin_is_judged_as_it_should_be(
    twin: Twin, parents: warm.Parents, tmp_path: Path
) -> None:
    """Each bug is found where it is, and each right script is left alone."""
    found = twins.findings(
        twin,
        tmp_path,
        witnesses=True,
        launch=partial(launch.launch, parents=parents),
        launcher=scripts.TORCHRUN,
        deadline_s=DEADLINE_S,
    )
    assert parents.num_forked
    assert not twins.problem(twin, found)


@pytest.mark.parametrize("auto", [False, True], ids=["line", "auto"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_forked_run_has_the_trace_of_torchrun(
    name: str, auto: bool, parents: warm.Parents, tmp_path: Path
) -> None:
    """All that is recorded is the same, to the bit."""
    traces = []
    for how, forks in (("as-is", None), ("forked", parents)):
        runs = scripts.record(
            scripts.command(scripts.EXAMPLES / name, (), scripts.TORCHRUN),
            {"parity"},
            tmp_path / how,
            launch=partial(launch.launch, parents=forks),
            auto=auto,
            deadline_s=DEADLINE_S,
        )
        traces.append({file.name: run.trace.events for file, run in runs.items()})
    assert parents.num_forked
    assert traces[0] == traces[1]
