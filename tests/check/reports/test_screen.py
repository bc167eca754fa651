"""The report of a script on both contracts fits on a screen, and ends in its exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from entrenar_py.check import contract
from entrenar_py.check.command import judging, run_trace
from entrenar_py.check.reports.report import Configuration, Entry, NotApplying, Report
from entrenar_py.shared import package_data
from entrenar_py.shared.scenario import OBSERVED, Scenario
from entrenar_py.shared.verdict import Counterexample, Finding, Verdict, inconclusive
from tests.check.reports.conftest import printed

COLUMNS = 100
RUNS = "runs: 2-workers, 1-worker, 2-workers-again, 2-workers-nan"
KNOBS = ("accumulation", "clip", "loss_scale", "permute", "strategy")
UNTRIED = {"F-DP-005": KNOBS, "F-TI-001": KNOBS, "F-TI-002": ("workdir",), "F-TI-008": ("clip",)}
DECLARED = {
    "F-DP-006": "the launcher starts no worker again: it has no --max-restarts",
    "F-TI-003": "the script saves no checkpoint",
}
SCENARIO = Scenario(system=OBSERVED, workload="own", world_size=2, seed=0)
PLACE: dict[str, Any] = {"step": 0, "rank": 0, "tensor": "0.weight", "index": (0, 2)}


def falsified(reason: str, files: str, **place: Any) -> Finding:
    """Return a finding of a run on two workers, as the harness words it."""
    broken = Counterexample(message=reason, scenario=SCENARIO.to_dict(), **place)
    told = f"{reason} [{files}]"
    return Finding(
        invariant="", verdict=Verdict.FALSIFIED, compared=60, reason=told, counterexample=broken
    )


SUMMED = falsified(
    "averaged gradient is not the single device's: 0.weight is off by 1 of its norm, allowed "
    "0.0001: it is twice as large (world_size), which could mean: gradients are added over the "
    "workers, not averaged",
    "2-workers (with 1-worker), 2-workers-again (with 1-worker)",
    **PLACE,
    expected="-0.6259821",
    got="-1.2519642",
)
BROKEN: Mapping[str, Finding] = {
    "F-DP-003": falsified(
        "rank 0 updated in step 8 after a non-finite value at rank 1, step 8, micro-batch 0: stop "
        "there, for example by torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, "
        "error_if_nonfinite=True) before optimizer.step()",
        "2-workers-nan",
        step=8,
        rank=1,
    ),
    "F-DP-005": SUMMED,
    "F-TI-001": SUMMED,
}


# Of a script as it is pasted: without placeholders, restarts or a configuration.
PASTED: Mapping[str, Finding] = {
    "F-DP-006": inconclusive(
        "",
        f"the run on 2 workers with a worker killed failed: {run_trace.NOT_RESTARTED} "
        "[2-workers-killed (with 2-workers)]",
    ),
    "F-TI-003": inconclusive("", f"the run was not stopped and resumed: {judging.NO_WORKDIR}"),
}


def report(name: str, findings: Mapping[str, Finding], *, pasted: bool = False) -> Report:
    """Return the report of a script over a shipped contract; what has no finding held.

    A command that was `pasted` has no configuration, which declares no clause either.
    """
    declared = {} if pasted else DECLARED
    untried = UNTRIED | ({"F-TI-003": ("workdir",)} if pasted else {})
    known = contract.Vocabulary(checks=None, mutants=lambda: None)
    loaded = contract.load(package_data.contract_path(name), vocabulary=known)
    outside = judging.elsewhere(loaded.invariants)
    left_out = {one.invariant.id for one in outside} | declared.keys()
    held = Finding(
        invariant="", verdict=Verdict.HELD, compared=100, notes=("compared with its own run",)
    )
    return Report(
        contract=loaded,
        contract_given=name,
        system="command",
        seed=0,
        entries=tuple(
            Entry(
                invariant=clause,
                finding=replace(findings.get(clause.id, held), invariant=clause.id),
                num_scenarios=3,
                num_explored=0,
                elapsed_s=0.1,
                untried=untried.get(clause.id, ()),
            )
            for clause in loaded.invariants
            if clause.id not in left_out
        ),
        environment={"torch": "2.13.0+cpu"},
        elapsed_s=66.1 if pasted else 13.0,
        interrupted=False,
        command="entrenar-check",
        not_applying=(
            *outside,
            *(
                NotApplying(
                    invariant=clause, reason=f"{declared[clause.id]} (entrenar-check.toml:6:3)"
                )
                for clause in loaded.invariants
                if clause.id in declared
            ),
        ),
        configuration=None
        if pasted
        else Configuration(
            place="entrenar-check.toml:1:1",
            used=("command", "contract", "deadline", "exclude"),
            command=("torchrun", "--standalone", "--nproc_per_node={world_size}", "train.py"),
        ),
    )


def screen(findings: Mapping[str, Finding]) -> list[str]:
    """Return the lines on a terminal of COLUMNS columns, of both contracts for scripts."""
    reports = [report(name, findings) for name in package_data.FOR_SCRIPTS]
    return printed(*reports, tty=True, width=COLUMNS, foreseen=(RUNS,))


def test_a_broken_script_fits_on_a_screen(golden: Callable[[str, str], None]) -> None:
    """Gradients that are added up, and a NaN that goes unnoticed: each is told once."""
    lines = screen(BROKEN)
    golden("screen-broken.txt", "\n".join(lines) + "\n")
    assert len(lines) <= 24
    assert lines[-1] == "exit 1: F-DP-003, F-DP-005, F-TI-001 falsified"
    assert "\n".join(lines).count("-1.2519642") == 1


def test_a_right_script_fits_on_two_thirds_of_a_screen(golden: Callable[[str, str], None]) -> None:
    """What held, what was left out and why, and the gates: 16 lines."""
    lines = screen({})
    golden("screen-right.txt", "\n".join(lines) + "\n")
    assert len(lines) <= 16
    assert lines[-1] == "exit 0: 10 held"


def test_a_right_script_without_a_configuration_fits_too(
    golden: Callable[[str, str], None],
) -> None:
    """A command as it is pasted: what it lacks is said once, with the way out, in 16 lines."""
    reports = [report(name, PASTED, pasted=True) for name in package_data.FOR_SCRIPTS]
    foreseen = (
        f"{RUNS}, 2-workers-killed",
        "command: {world_size} stands for the number of workers, instead of 2",
    )
    lines = printed(*reports, tty=True, width=COLUMNS, foreseen=foreseen)
    golden("screen-pasted.txt", "\n".join(lines) + "\n")
    assert len(lines) <= 16
    assert lines[-1] == "exit 4: F-DP-006, F-TI-003 inconclusive"
