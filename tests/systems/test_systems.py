"""`systems.run` runs every system on one thread, and turns crashes into failed traces."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from entrenar_py import systems
from entrenar_py.shared import trace
from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.faults import KINDS, NEEDED, OF_WITNESSES, OPTIONAL, Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.systems import SYSTEMS
from entrenar_py.systems import reference

GONE = Fault(kind="absent", backend="wgpu")
USUAL = Scenario(system="reference", workload="linear", world_size=1, seed=0, num_steps=1)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_there(name: str) -> None:
    """Every system has a module whose `run` takes a scenario."""
    module = systems.module_of(name)
    assert list(signature(module.run).parameters) == ["scenario"]


def test_an_unknown_system_is_refused() -> None:
    """The refusal lists the known systems; other modules of the folder can't be run."""
    for name in ("membership", "recorder", "", "..cli"):
        with pytest.raises(UsageError, match=f"system='{name}': allowed are reference, textbook"):
            systems.run(USUAL.with_(system=name))


def test_an_unknown_mutant_is_refused() -> None:
    """The refusal has the mutant's name."""
    with pytest.raises(UsageError, match="mutant='no such mutant'"):
        systems.run(USUAL.with_(mutant="no such mutant"))


@pytest.mark.parametrize("error", [SystemFailure("lost"), ValueError("lost"), MemoryError("lost")])
def test_a_crash_is_a_failed_trace(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace has the error's type and message, and the scenario."""

    def crash(scenario: Scenario) -> NoReturn:
        raise error

    monkeypatch.setattr(reference, "run", crash)
    found = systems.run(USUAL)
    assert found.scenario == USUAL
    assert found.events == (trace.End(status="failed", reason=f"{type(error).__name__}: lost"),)


def test_an_interrupt_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt is not caught."""

    def interrupt(scenario: Scenario) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(reference, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        systems.run(USUAL)


def test_runs_are_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads is restored afterwards, even after a crash."""
    before = torch.get_num_threads()
    seen: list[int] = []

    def count(scenario: Scenario) -> NoReturn:
        seen.append(torch.get_num_threads())
        raise ValueError

    monkeypatch.setattr(reference, "run", count)
    torch.set_num_threads(2)
    try:
        systems.run(USUAL)
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def test_every_fault_kind_has_a_system() -> None:
    """Every kind of fault can be injected by some system, or else in a user's script."""
    injected = {kind for one in SYSTEMS.values() for kind in one.faults}
    assert injected | {*OF_WITNESSES} == set(KINDS)
    assert injected.isdisjoint(OF_WITNESSES)


def test_a_fault_that_finds_nobody_there() -> None:
    """A planned fault that does not strike fails the run, unless `every_fault` is False."""
    gone = (Fault(kind="kill", step=0, rank=1, at=at) for at in ("Assign", "Commit"))
    scenario = USUAL.with_(system="parameter_server_simulated", world_size=2, faults=tuple(gone))
    assert "was never injected" in systems.run(scenario).end.reason
    assert systems.run(scenario, every_fault=False).end.status == "completed"


def test_the_docs_have_the_tables() -> None:
    """docs/contract-format.md has what each system accepts, and what faults do and need."""
    page = Path(__file__).parents[2] / "docs" / "contract-format.md"
    lines = page.read_text(encoding="utf-8").splitlines()
    for name, one in SYSTEMS.items():
        assert f"| `{name}` | {one.what} | {_code(one.faults)} | {_code(one.options)} |" in lines
    for kind, what in KINDS.items():
        needed, optional = NEEDED[kind], OPTIONAL.get(kind, ())
        assert f"| `{kind}` | {what} | {_code(needed)} | {_code(optional)} |" in lines


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"bogus": 1}}, "option='bogus' on system reference: allowed are terms"),
        ({"system": "matmul", "options": {"rows": 3}}, "'rows' on system matmul: allowed are m, k"),
        ({"system": "matmul", "faults": (GONE,)}, "'absent' on system matmul: allowed are none"),
        ({"system": "backend_chain", "options": {"shapes": []}}, "option='shapes' on system back"),
        ({"num_samples": 5000, "batch_size": 4, "workload": "mlp"}, "UsageError: .*num_samples"),
        ({"backends": ("tpu",)}, "UsageError: .*backend.*tpu"),
    ],
)
def test_what_a_system_can_not_do_is_a_failed_trace(
    change: dict[str, object], message: str
) -> None:
    """An impossible scenario gives a failed trace, not an error."""
    end = systems.run(USUAL.with_(**change)).end
    assert end.status == "failed"
    assert re.search(message, end.reason), end.reason
