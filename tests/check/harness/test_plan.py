"""Plans: the scenarios that a command line makes of a clause's, and those it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from entrenar_py import systems
from entrenar_py.check import clauses as checks
from entrenar_py.check import contract
from entrenar_py.check.contract import Contract, Invariant, Vocabulary
from entrenar_py.check.harness import counterexamples, plan
from entrenar_py.check.harness.counterexamples import Saved
from entrenar_py.check.harness.plan import Plan, Task
from entrenar_py.shared import package_data
from entrenar_py.shared.config.problems import Position
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.verdict import Verdict, inconclusive
from entrenar_py.train.coordinator import models

LEAVE = {"kind": "leave", "rank": 0, "step": 1}
NAN = {"kind": "non_finite_gradient", "step": 1, "value": "nan"}


pytestmark = pytest.mark.usefixtures("own_folder")


def clause(*scenarios: Mapping[str, Any], **changes: Any) -> Invariant:
    """Return a clause that coverage decides."""
    usual: dict[str, Any] = {"id": "F-DP-002", "name": "cover", "statement": ""}
    position = Position("c.yaml", 3, 5)
    return Invariant(**{**usual, "position": position, "scenarios": scenarios, **changes})


def planned(given: Plan, *scenarios: Mapping[str, Any], **changes: Any) -> tuple[Scenario, ...]:
    """Return the scenarios that `given` plans for a clause with `scenarios`."""
    ((task,), _) = plan.divide([clause(*scenarios, **changes)], given)
    return task.planned


def test_a_clause_without_scenarios_takes_its_checks() -> None:
    """A clause without scenarios takes those of its check, unchanged by a default plan."""
    own = checks.CHECKS["coverage"].plan(clause())
    assert list(planned(Plan())) == own


@pytest.mark.parametrize(
    ("name", "system"),
    [
        ("distributed-training-v1.yaml", "ddp"),
        ("training-integrity-v1.yaml", "ddp"),
        ("parallelism-v1.yaml", None),
        ("local-sgd-v1.yaml", None),
    ],
)
def test_shipped_contracts_take_eight_ranks(name: str, system: str | None) -> None:
    """Every clause has samples for all ranks of a usual host of GPUs."""
    vocabulary = Vocabulary(checks=checks.terms(), mutants=lambda: None)
    invariants = contract.load(package_data.contract_path(name), vocabulary=vocabulary).invariants
    tasks, _ = plan.divide(invariants, Plan(system=system, world_sizes=(8,)))
    trainers = [one for task in tasks for one in task.planned if plan.is_trainer(one.system)]
    assert {one.world_size for one in trainers} == {8}


def test_seeds_are_shifted() -> None:
    """The plan's seed is added to every scenario's own."""
    seeds = [one.seed for one in planned(Plan(seed=10), {"seed": [0, 5]})]
    assert seeds == [10, 15]


def test_trainers_are_replaced_and_probes_are_not() -> None:
    """A plan's system replaces trainers. A matrix product does not depend on the trainer."""
    wish = Plan(system="textbook", world_sizes=(2,), backends=("wgpu",))
    trainer, probe = planned(wish, {"world_size": 3}, {"system": "matmul", "world_size": 1})
    assert (trainer.system, trainer.world_size, trainer.backends) == ("textbook", 2, ("wgpu",))
    assert (probe.system, probe.world_size, probe.backends) == ("matmul", 1, ("cpu",))


def test_a_clause_about_another_trainer_is_run_on_that_one() -> None:
    """A clause keeps its own trainer unless the plan names one."""
    record = {"system": ["textbook", "reference"]}
    assert [one.system for one in planned(Plan(), record)] == ["textbook", "reference"]
    for system in ("reference", "textbook"):
        assert {one.system for one in planned(Plan(system=system), record)} == {system}


def test_what_presupposes_common_steps_is_left_out() -> None:
    """For a system whose workers step alone, clauses about common steps are left out and named."""
    clauses = [clause(), clause(id="F-DP-001", name="identity")]
    for system, left_out in (("local_sgd", ["F-DP-001"]), ("ddp", []), (None, [])):
        wish = Plan(system=system)
        tasks, not_applying = plan.divide(clauses, wish)
        assert [one.invariant.id for one in not_applying] == left_out
        assert all("all workers take together" in one.reason for one in not_applying)
        assert [task.invariant.id for task in tasks] == [
            one.id for one in clauses if one.id not in left_out
        ]


def test_the_same_bits_are_asked_of_those_that_promise_them() -> None:
    clauses = [clause(id="F-TI-006", name="bits"), clause(id="F-TI-007", name="determinism")]
    for system, left_out in (("ddp", ["F-TI-006"]), ("ddp_canonical", []), ("reference", [])):
        _, not_applying = plan.divide(clauses, Plan(system=system))
        assert [one.invariant.id for one in not_applying] == left_out
        assert all("promises agreement within rounding" in one.reason for one in not_applying)


def test_scenarios_with_faults_that_a_system_can_not_inject() -> None:
    """They are left out with a note. A clause that has no others does not apply."""
    records = ({"faults": [LEAVE]}, {"faults": [NAN], "seed": [1, 2]}, {"system": "matmul"})
    wish = Plan(system="ddp_canonical", world_sizes=(2,))
    (task,), none = plan.divide([clause(*records)], wish)
    assert none == ()
    assert [(one.system, one.seed) for one in task.planned] == [
        *(("ddp_canonical", 1), ("ddp_canonical", 2)),
        ("matmul", 0),
    ]
    assert task.notes == ("left out: 1 scenario with leave, which ddp_canonical can't do",)
    gone = LEAVE | {"rank": 2, "step": 0}
    back = {"kind": "join", "rank": 2, "step": 2}
    tasks, (alone,) = plan.divide([clause({"faults": [gone, back]})], wish)
    assert tasks == ()
    assert alone.reason == "every scenario is with leave or join, which ddp_canonical can't do"
    for system in (None, "ddp"):
        (task,), _ = plan.divide([clause(*records)], Plan(system=system))
        assert (len(task.planned), task.notes) == (4, ())


def test_sizes_are_fitted_to_the_system_that_was_asked_for() -> None:
    """Sizes become the next powers of two, with or without --world-size. All else stays."""
    record = {"num_shards": 3, "accumulation": 3, "num_samples": 3, "batch_size": 3}
    ((task,), _) = plan.divide([clause(record)], Plan(system="ddp_canonical"))
    (one,) = task.planned
    sizes = (one.world_size, one.num_shards, one.accumulation, one.num_samples, one.batch_size)
    assert sizes == (4, 4, 4, 4, 3)
    assert task.notes == ("fitted to the powers of two that ddp_canonical needs: 1 scenario",)
    (one,) = planned(Plan(system="ddp_canonical", world_sizes=(2,)), record)
    assert (one.world_size, one.num_shards, one.num_samples) == (2, 4, 3)
    (one,) = planned(Plan(system="ddp"), record)
    assert (one.world_size, one.num_shards, one.accumulation) == (3, 3, 3)


def test_a_world_size_that_was_given_stays() -> None:
    """A given world size stays, and the run reports that the system can't have it."""
    (one,) = planned(Plan(system="ddp_canonical", world_sizes=(3,)), {})
    assert one.world_size == 3
    reason = systems.run(one).end.reason
    assert "world_size=3 on system ddp_canonical: use a power of two, such as 4" in reason


def test_systems_of() -> None:
    """Trainers are listed once each, probes only if there is no trainer."""
    runs = planned(Plan(), {"system": ["matmul", "textbook", "reference"], "seed": [0, 1]})
    assert plan.systems_of(runs) == "textbook, reference"
    assert plan.systems_of(runs[:2]) == "matmul"
    assert plan.systems_of([]) == ""


def test_world_sizes() -> None:
    """Each size is tried once. Shards grow if too few, and faults of missing ranks are dropped."""
    leaves = [{"kind": "leave", "rank": 1, "step": 1}, {"kind": "leave", "rank": 3, "step": 2}]
    record = {"world_size": [4, 5], "num_shards": 5, "faults": leaves}
    runs = planned(Plan(world_sizes=(2, 9)), record)
    assert [(one.world_size, one.num_shards, len(one.faults)) for one in runs] == [
        (2, 5, 1),
        (9, 9, 2),
    ]


def test_too_many_workers() -> None:
    """Too many workers are refused with the clause's place, however many they are."""
    for world_size in (51, 10**9):
        with pytest.raises(UsageError, match=r"c.yaml:3:5: clause F-DP-002: world_size=.*use wor"):
            planned(Plan(world_sizes=(world_size,)), {})


def test_fixed() -> None:
    """A field given on the command line stays fixed when exploring."""
    assert Plan().fixed == ()
    assert Plan(world_sizes=(2,)).fixed == ("world_size",)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"system": "magic"}, "system='magic': allowed are reference"),
        ({"backends": ["cpu", "tpu"]}, "backend='tpu' on system reference: allowed are cuda, wgpu"),
        ({"system": "matmul", "backends": ["auto"]}, "backend='auto' on system matmul: allowed"),
        ({"mutant": "no-such-bug"}, "mutant='no-such-bug': allowed are "),
        ({"options": {"bogus": 1}}, "option='bogus' on system reference: allowed are terms"),
        ({"system": "memory", "options": {"m": 1}}, "option='m' on system memory: allowed are bud"),
        ({"workload": "own"}, "workload='own': allowed are linear, mlp, decoder"),
        ({"workload": "mlp", "num_samples": 9999}, "num_samples=9999 with workload=mlp"),
        ({"world_size": 1, "faults": [LEAVE]}, "rank=0 step=1: no other worker would be left"),
        ({"faults": [{**NAN, "tensor": "nope"}]}, "tensor='nope': allowed are weight, bias"),
        ({"system": "textbook", "faults": [{**NAN, "element": 1}]}, "element=1: weight of linear"),
        ({"system": "manifest", "faults": [LEAVE]}, "kind='leave' on system manifest: allowed are"),
        (
            {"system": "backend_chain", "faults": [{"kind": "absent", "backend": "tpu"}]},
            "fault absent backend='tpu': allowed are cuda, wgpu, cpu",
        ),
        ({"num_samples": 2}, "world_size=3 with num_samples=2"),
        ({"system": "ddp_canonical"}, "world_size=3 on system ddp_canonical: use a power of two"),
        ({"system": "ddp_canonical", "world_size": 2, "faults": [LEAVE]}, "'leave' on system ddp_"),
    ],
)
def test_what_can_not_be_run(record: dict[str, Any], message: str) -> None:
    """A scenario that can't run is refused before any run, and by validation alone, too."""
    where = f"c.yaml:3:5: clause F-DP-002: .*{message}"
    with pytest.raises(UsageError, match=where):
        planned(Plan(), record)
    with pytest.raises(UsageError, match=where):
        plan.require_runnable([clause({}), clause(record)])


def test_what_the_command_line_makes_impossible_is_left_to_the_run() -> None:
    """The contract stays valid, and its run with one worker reports why it is impossible."""
    (one,) = planned(Plan(world_sizes=(1,)), {"faults": [LEAVE]})
    end = systems.run(one).end
    assert end.status == "failed"
    assert "no other worker would be left" in end.reason


def test_faults_of_workers_that_are_not_there() -> None:
    """Faults of missing workers are dropped. If all are, the last worker takes the first."""
    late = LEAVE | {"rank": 3}
    (one,) = planned(Plan(world_sizes=(2,)), {"world_size": 4, "faults": [late]})
    assert [(fault.kind, fault.rank) for fault in one.faults] == [("leave", 1)]
    (one,) = planned(Plan(world_sizes=(2,)), {"world_size": 4, "faults": [LEAVE, late]})
    assert [fault.rank for fault in one.faults] == [LEAVE["rank"]]


def test_clauses_that_are_not_tried_are_not_required() -> None:
    """Without a check, scenarios need not be runnable. Without scenarios, the check's are."""
    plan.require_runnable([clause({"system": "magic"}, id="F-NEW"), clause()])


def test_backends_of_a_plan() -> None:
    """A plan's backends replace a trainer's, `auto` included."""
    (one,) = planned(Plan(backends=("auto", "cpu")), {})
    assert one.backends == ("auto", "cpu")
    with pytest.raises(UsageError, match="backend='tpu': allowed are cuda, wgpu, cpu, auto"):
        Plan(backends=("tpu",))
    with pytest.raises(UsageError, match="system='matmul': allowed are reference, textbook"):
        Plan(system="matmul")


def test_uncovered() -> None:
    """A clause without a check has nothing planned, and reports why nothing was compared."""
    ((task,), _) = plan.divide([clause({}, id="F-NEW")], Plan())
    assert (task.check, task.scenarios) == (None, [])
    assert task.untried().reason == (
        "c.yaml:3:5: no check covers it: nothing was compared; "
        "--suggest drafts a binding for it (docs/bindings.md)"
    )
    assert task.untried().verdict is Verdict.INCONCLUSIVE


def test_known_counterexamples_come_first() -> None:
    """Those of the chosen trainer, sizes and backends come first, those of probes always."""

    def save(**changes: Any) -> Scenario:
        usual = {"system": "reference", "workload": "linear", "world_size": 2, "seed": 1}
        scenario = Scenario(**{**usual, **changes})
        finding = inconclusive("F-DP-002", "any")
        counterexamples.save(Saved(invariant="F-DP-002", scenario=scenario, finding=finding))
        return scenario

    two, three = save(), save(world_size=3)
    other, probe = save(system="textbook"), save(system="matmul")

    def known(given: Plan) -> set[Scenario]:
        ((task,), _) = plan.divide([clause({"seed": 1, "world_size": 2})], given)
        assert task.scenarios[: len(task.known)] == list(task.known)
        assert len(set(task.scenarios)) == len(task.scenarios)
        return set(task.known)

    assert known(Plan()) == {two, three, probe}
    assert known(Plan(world_sizes=(3,))) == {three, probe}
    assert known(Plan(system="textbook")) == {other, probe}
    assert known(Plan(system="reference")) == {two, three, probe}
    assert known(Plan(backends=("wgpu",))) == {probe}
    save(system="magic")
    with pytest.raises(UsageError, match=r"F-DP-002-.*json: system='magic'"):
        known(Plan())


def test_select_keeps_the_contracts_order() -> None:
    """All three filters apply together, and the contract's order stays."""
    clauses = tuple(
        clause(id=name, severity=s) for name, s in (("A", "P0"), ("B", "P1"), ("C", "P0"))
    )
    contract = Contract(path=Path("c.yaml"), digest="", metadata={}, invariants=clauses)

    def ids(**filters: Any) -> list[str]:
        return [one.id for one in plan.select(contract, **filters)]

    assert ids() == ["A", "B", "C"]
    assert ids(only=("C", "A", "B"), exclude=("A",), severities=("P0",)) == ["C"]
    with pytest.raises(UsageError, match=r"id 'D' is not in c.yaml: it has A, B, C"):
        ids(exclude=("D",))


def test_is_trainer() -> None:
    """An unknown system counts as a trainer."""
    assert plan.is_trainer("reference")
    assert plan.is_trainer("somebody's own")
    assert not plan.is_trainer("matmul")


def test_a_task_lists_each_scenario_once() -> None:
    """A scenario that is both known and planned is tried once."""
    one = Scenario(system="reference", workload="linear", world_size=2, seed=0)
    task = Task(invariant=clause(), check=None, known=(one,), planned=(one, one.with_(seed=1)))
    assert task.scenarios == [one, one.with_(seed=1)]


@pytest.mark.parametrize("workload", plan._SAMPLES_MIN)
def test_what_surely_fits_is_no_more_than_the_workload_has(workload: str) -> None:
    """Without building a workload the plan lets nothing pass that the workload would refuse."""
    num = min(plan._SAMPLES_MIN[workload], 2000)
    sized = Scenario(
        system="reference", workload=workload, world_size=1, seed=0, num_samples=num, width=3
    )
    assert plan._surely_fits(sized)
    systems.require_workload(sized)
    model = models.model_of(sized.with_(num_samples=50))
    for spec in model.specs if workload in ("linear", "mlp") else ():
        for element in (None, prod(spec.shape) - 1, prod(spec.shape)):
            fault = Fault(
                kind="huge_gradient", step=0, value="1.0", tensor=spec.name, element=element
            )
            fits = spec.role == "trainable" and (element or 0) < prod(spec.shape)
            assert plan._surely_fits(sized.with_(faults=(fault,))) is fits
    assert not plan._surely_fits(sized.with_(options={"terms": [[1.0]]}))
