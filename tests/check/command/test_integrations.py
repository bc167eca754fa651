"""Trainers that own the loop: correct examples cause no alarm, and planted bugs are found.

Each test takes ten seconds and more, mostly for imports: `make integrations`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from entrenar_py.check.clauses import language_model
from entrenar_py.shared.verdict import Verdict
from falsification.twins import Twin, family
from tests.check.command import scripts, twins, zygote

pytestmark = pytest.mark.integrations

OF_LANGUAGE = {row.name for row in language_model.ROWS}  # a model is probed only if asked for
OPEN = {"recovery", "resume"}  # these scripts write no checkpoint
# What a script needs that not every installation has.
NEEDS = {
    "accelerate_loop.py": "accelerate",
    "trainer.py": "transformers",
    "lightning_module.py": "lightning",
    "zero_loop.py": "deepspeed",
}
DEADLINE_S = 300.0  # they are long in loading


def require(script: str) -> None:
    """Skip the test if a package that the script named `script` needs is missing."""
    if importlib.util.find_spec(NEEDS[script]) is None:
        pytest.skip(f"{NEEDS[script]} is not installed: make integrations")


@pytest.mark.parametrize("script", sorted(NEEDS.keys() - {"zero_loop.py"}))
def test_no_alarm_on_what_is_right(script: str, tmp_path: Path) -> None:
    """No clause is falsified, and every clause that the script shows enough of is held."""
    require(script)
    told = scripts.command(scripts.EXAMPLES / script)
    wanted = ("coverage", "finiteness", "determinism", "resume", "parity")
    recorded = scripts.record(told, wanted, tmp_path, launch=zygote.launch, deadline_s=DEADLINE_S)
    judged = scripts.findings(recorded).items()
    found = {n: one for n, one in judged if not n.startswith("outer_") and n not in OF_LANGUAGE}
    assert {name: one for name, one in found.items() if one.verdict is Verdict.FALSIFIED} == {}
    undecided = {name for name, one in found.items() if one.verdict is Verdict.INCONCLUSIVE}
    assert undecided == OPEN, {name: found[name].reason for name in undecided}
    assert all(one.compared for name, one in found.items() if name not in undecided)


@pytest.mark.parametrize(
    "twin", family("integrations"), ids=lambda twin: twin.name.replace(" ", "-")
)
def test_every_broken_twin_is_found(twin: Twin, tmp_path: Path) -> None:
    """Each bug is found by its check, at its place."""
    require(twin.script)
    assert twins.problem(twin, twins.findings(twin, tmp_path, deadline_s=DEADLINE_S)) == ""


@pytest.mark.parametrize("twin", family("zero"), ids=lambda one: one.name)
def test_deepspeed_is_judged(twin: Twin, tmp_path: Path) -> None:
    """Loops with DeepSpeed's partitions are right, or their bug is found by its check."""
    require(twin.script)
    assert twins.problem(twin, twins.findings(twin, tmp_path, deadline_s=DEADLINE_S)) == ""


def test_samples_that_one_rank_draws_for_all(tmp_path: Path) -> None:
    """With accelerate's dispatcher no rank knows its samples: none are reported or judged."""
    require("accelerate_loop.py")
    dispatched = Twin(
        name="",
        script="accelerate_loop.py",
        changes=(("split_batches=True, use", "dispatch_batches=True, split_batches=True, use"),),
    )
    found = twins.findings(dispatched, tmp_path, deadline_s=DEADLINE_S)
    assert [*filter(twins.is_broken, found.values())] == []
    assert found["replica_identity"].verdict is Verdict.HELD
    assert found["coverage"].verdict is Verdict.INCONCLUSIVE
    assert "call obs.samples(ids)" in found["coverage"].reason
