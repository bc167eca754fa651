"""Random schedules of faults for the simulated star, mesh and ring, and a judge of their runs.

A seed determines a scenario, and a scenario its run: `attempt(seed)` replays it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from entrenar_py import systems
from entrenar_py.check import clauses as checks
from entrenar_py.check import contract, evidence
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence.needs import ALONE, CALM, KILLED, TWIN, Runs
from entrenar_py.check.harness import companions
from entrenar_py.shared import faults, package_data, trace
from entrenar_py.shared import systems as table
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.scenario import CHOICES, Scenario
from entrenar_py.shared.trace import Halt, Start, Trace, Update
from entrenar_py.shared.verdict import Verdict

STAR, MESH, RING = "parameter_server_simulated", "mesh_simulated", "ring_simulated"
SYSTEMS = (STAR, MESH, RING)
WORKLOADS = ("linear", "linear", "linear", "mlp", "vectors")
# Shorter and longer than the 30 s of silence after which either end is given up.
SECONDS = (0.2, 3.0, 20.0, 50.0)
NUM_FAULTS_MAX = 4
AUDITED = 0.25  # how often a star's shards are audited
SHARES = (1.0, 1.0, 0.3)
SERVED = 0.25  # how often a star's server updates
AGAIN = 0.4  # how often a fault strikes the same worker in the same step as the fault before
# By workload: two blocks or one; eight, three or one; 21 elements in 21, seven or one. More blocks
# cost messages and time.
BLOCK_BYTES = {"linear": (4, 4, 2**20), "mlp": (200, 600, 2**20), "vectors": (4, 12, 2**20)}
WIDTHS = {"linear": 4, "mlp": 4, "vectors": 21}
# No AdamW: its first steps are as long where a gradient is only rounding, which differs in a ring.
SMOOTH = ("sgd", "momentum")
NEAR = 1e-5  # weights of a ring from those of the tree: tens of steps, some roundings each
_VALUES = ("nan", "inf", "-inf")
_CONTRACTS = ("distributed-training-v1", "wire-protocol-v1", "reduction-v1")
_CHECKS = ("replica_identity", "coverage", "finiteness", "recovery", "audits")
_REDUCTIONS = ("reduction_mean", "reduction_traffic")  # of known vectors, which were all reduced


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The result of one seed; `complaint` says what is wrong, and is empty if nothing is."""

    seed: int
    scenario: Scenario
    run: Trace
    complaint: str


def attempt(seed: int, *, mutant: str | None = None, system: str | None = None) -> Attempt:
    """Run the schedule of `seed`, with `mutant` planted if there is one, and judge the run."""
    scenario = draw(seed, system).with_(mutant=mutant)
    # A fault does not strike if an earlier one has removed its worker.
    run = systems.run(scenario, every_fault=False)
    calm = systems.run(undisturbed(scenario))
    other = systems.run(elsewhere(scenario)) if elsewhere(scenario) != scenario else None
    return Attempt(seed=seed, scenario=scenario, run=run, complaint=judge(run, calm, other))


# --- a schedule -------------------------------------------------------------------------------


def draw(seed: int, system: str | None = None) -> Scenario:
    """Return the scenario of `seed`: a small run with up to NUM_FAULTS_MAX faults, and with stops.

    It can always end, because a worker is always present or about to come back. In a mesh or a ring
    only workers have the state, so that no fault strikes the highest rank. Without `system`, seeds
    go through SYSTEMS in turn.
    """
    rng = random.Random(seed)
    system = system or SYSTEMS[seed % len(SYSTEMS)]
    world_size = rng.randint(1 + (system != STAR), 5)
    num_samples = rng.randint(8, 40)
    num_steps = rng.randint(3, 8)
    stops = rng.sample(range(1, num_steps), rng.choice((0, 0, 0, 1, 2)))
    workload = rng.choice(WORKLOADS)
    scenario = Scenario(
        system=system,
        workload=workload,
        width=WIDTHS[workload],
        world_size=world_size,
        seed=rng.randrange(2**32),
        num_shards=rng.randint(world_size, 12),
        num_samples=num_samples,
        batch_size=rng.randint(1, num_samples),
        num_steps=num_steps,
        accumulation=rng.choice((1, 1, 2, 3)),
        optimizer=rng.choice(SMOOTH if system == RING else CHOICES["optimizer"]),
        schedule=rng.choice(CHOICES["schedule"]),
        weight_decay=rng.choice((0.0, 0.1)),
        clip_norm=rng.choice((None, None, 0.05)),
        dropout=rng.choice((0.0, 0.0, 0.2)),
        stops=tuple(sorted(stops)),
        detail="values" if system == RING else "digests",
        options={"block_bytes": rng.choice(BLOCK_BYTES[workload])},
    )
    for _ in range(rng.randint(0, NUM_FAULTS_MAX)):
        scenario = _and_one(scenario, rng)
    scenario = _audited(scenario, random.Random(f"audits of {seed}"))
    return _served(scenario, random.Random(f"updates of {seed}"))


def _audited(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return `scenario`, in some cases with audits, and in some of these with a corrupt worker."""
    if scenario.system != STAR or rng.random() > AUDITED:
        return scenario
    options = {**scenario.options, "audit_share": rng.choice(SHARES)}
    step, rank, shard = map(
        rng.randrange, (scenario.num_steps, scenario.world_size, scenario.num_shards)
    )
    lasting = rng.random() < 0.5
    fault = Fault(
        kind="corrupt_worker" if lasting else "corrupt_gradient",
        step=step,
        rank=rank,
        shard=None if lasting else shard,
        value="0.5",
    )
    scenario = scenario.with_(options=options)
    return scenario if len(scenario.faults) == NUM_FAULTS_MAX else _with(scenario, fault)


def _served(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return `scenario`, in some cases with a server that updates, and faults moved to Weights."""
    if scenario.system != STAR or scenario.workload == "vectors" or rng.random() > SERVED:
        return scenario  # with workload `vectors`, the workers' averages are judged
    return scenario.with_(
        options={**scenario.options, "updates": "server"},
        faults=tuple(
            replace(one, at="Weights") if one.at == "Average" else one for one in scenario.faults
        ),
    )


def _and_one(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return `scenario` with one more fault drawn, or unchanged if that fault is impossible."""
    before = scenario.faults[-1:]
    if before and before[0].rank is not None and rng.random() < AGAIN:
        rank, step = before[0].rank, before[0].step
    else:
        num_struck = scenario.world_size - (scenario.system != STAR)
        rank, step = rng.randrange(num_struck), rng.randrange(scenario.num_steps)
    try:
        fault = _fault(scenario, rng, rank, step)
    except UsageError:  # the fault is impossible in that step
        return scenario
    return _with(scenario, fault)


def _with(scenario: Scenario, fault: Fault) -> Scenario:
    """Return `scenario` with `fault`, or unchanged if `fault` is impossible there."""
    try:
        more = scenario.with_(faults=(*scenario.faults, fault))
        table.require_possible(more)
    except UsageError:  # the worker is absent, already present, or the last one
        return scenario
    return more


def _fault(scenario: Scenario, rng: random.Random, rank: int, step: int | None) -> Fault:
    """Draw a fault of worker `rank` in `step`, or a non-finite value in a shard, which halts."""
    chance, places = rng.random(), table.SYSTEMS[scenario.system].places
    if chance < 0.08:
        kind = rng.choice(("non_finite_gradient", "non_finite_loss"))
        shard = rng.randrange(scenario.num_shards)
        return Fault(kind=kind, step=step, shard=shard, value=rng.choice(_VALUES))
    if chance < 0.25:
        return Fault(kind=rng.choice(("leave", "join")), step=step, rank=rank)
    if chance < 0.3:
        return Fault(kind="restart", step=step, at=rng.choice(places))
    if chance < 0.4:
        value = rng.choice(tuple(faults.LIES))
        at = rng.choice([place for place in faults.LIE_PLACES[value] if place in places])
        return Fault(kind="lie", step=step, rank=rank, at=at, value=value)
    if chance < 0.46:
        value = rng.choice(tuple(faults.STRANGERS))
        claimed = rank if value == "taken_rank" else None
        return Fault(kind="stranger", step=step, rank=claimed, value=value)
    kind = rng.choice(faults.ON_THE_WAY)
    timed = "seconds" in faults.NEEDED[kind]
    return Fault(
        kind=kind,
        step=step,
        rank=rank,
        at=rng.choice(places),
        seconds=rng.choice(SECONDS) if timed else None,
    )


# --- the judgement ----------------------------------------------------------------------------


def undisturbed(scenario: Scenario) -> Scenario:
    """Return the same training on the reference trainer, without faults."""
    return scenario.with_(system="reference", faults=(), stops=(), mutant=None, options={})


def elsewhere(scenario: Scenario) -> Scenario:
    """Return the ring's run on its other system, with equal bits; `scenario` if there is none."""
    if scenario.system != RING or scenario.faults:
        return scenario
    (twin,) = companions.of((TWIN,), scenario).of(TWIN)
    return twin


def judge(run: Trace, calm: Trace, other: Trace | None = None) -> str:
    """Return what is wrong with `run`, or an empty string; `calm` is the undisturbed run.

    The run must end: completed, halted by the first planted value, or halted by an audit that can't
    be decided. Every step until then must be made, and every worker that made it must have the bits
    of `calm`. In a ring, values must be close, and bits those of `other`. No check may say
    FALSIFIED. The consequences of a wrong value that was not audited are ignored.
    """
    return next(_complaints(run, _seen_alike(run, calm), other), "")


def _seen_alike(run: Trace, calm: Trace) -> Trace:
    """Return `calm`, without optimizer state if the server has it and workers don't record it."""
    if run.traits.updates == "workers":
        return calm
    events = (
        replace(one, optimizer={}) if isinstance(one, Start | Update) else one
        for one in calm.events
    )
    return replace(calm, traits=run.traits, events=tuple(events))


def _complaints(run: Trace, calm: Trace, other: Trace | None) -> Iterator[str]:
    planted = [fault for fault in run.scenario.faults if fault.kind in faults.PLANTED]
    steps = [fault.step for fault in planted if fault.step is not None]
    disagreed = [audit.step for audit in checks.audits.undecided(run)]
    limit = min([*steps, *disagreed], default=run.scenario.num_steps)
    expected = "halted" if planted or disagreed else "completed"
    if run.end.status != expected:
        yield f"ended {run.end.status} in place of {expected}: {run.end.reason}"
    for one in run.of(trace.Admission):
        if one.let_in != one.entitled:
            yield f"the stranger {one.case} was let in"
    if not disagreed:
        yield from _wrong_halts(run, calm, limit)
    yield from _wrong_updates(run, calm, limit)
    yield from _falsified(run, calm, other)


def _wrong_halts(run: Trace, calm: Trace, step: int) -> Iterator[str]:
    """Yield a complaint unless a halt names a planted value of `step`, and its shard's samples."""
    ids = {(one.step, one.shard): one.ids for one in calm.of(trace.Shard)}
    culprits = {
        (fault.step, fault.shard): fault
        for fault in run.scenario.faults
        if fault.kind in faults.PLANTED and fault.step == step
    }
    halts = run.of(Halt)
    if len(halts) != bool(culprits):
        yield f"{len(halts)} halts were recorded, with {len(culprits)} values planted"
    for halt in halts:
        place = halt.step, halt.shard
        if place not in culprits:
            yield f"the halt names step {halt.step}, shard {halt.shard}: nothing was planted there"
        elif halt.ids != ids[halt.step, halt.shard or 0]:
            yield f"the halt in step {halt.step}, shard {halt.shard} names different samples"


def _wrong_updates(run: Trace, calm: Trace, limit: int) -> Iterator[str]:
    """Yield complaints unless exactly the steps before `limit` are made, each as undisturbed."""
    models = {one.step: one for one in calm.of(Update)}
    known_until = checks.audits.first_open(run)
    for update in run.of(Update):
        where = f"in step {update.step} worker {update.rank}"
        if update.step >= limit:
            yield f"{where} made an update though a value was not finite"
        elif update.step < known_until and not _alike(
            update, models[update.step], exact=run.scenario.system != RING
        ):
            yield f"{where} made another update than the undisturbed run"
    made = {update.step for update in run.of(Update)}
    lost = [step for step in range(limit) if step not in made]
    if lost:
        yield f"nobody made steps {lost}"


def _alike(update: Update, model: Update, *, exact: bool) -> bool:
    """Return whether two updates made the same step, or close ones from the same samples."""
    if exact:
        return replace(update, rank=model.rank) == model
    ours, theirs = evidence.vectors(update.weights), evidence.vectors(model.weights)
    assert ours is not None, "a ring's schedule records values"
    assert theirs is not None, "and so does the undisturbed one"
    near = (np.abs(ours[name] - theirs[name]).max() <= NEAR for name in theirs)
    return update.weight == model.weight and ours.keys() == theirs.keys() and all(near)


def _is_reduction(run: Trace) -> bool:
    """Return whether the run only reduced known vectors, without audits and corruption."""
    scenario = run.scenario
    silent = any(fault.kind in faults.SILENT for fault in scenario.faults)
    known = scenario.workload == "vectors" and not silent
    return known and not scenario.options.get("audit_share") and run.end.status == "completed"


def _falsified(run: Trace, calm: Trace, other: Trace | None) -> Iterator[str]:
    # A worker that is left alone can't be audited: the check is then inconclusive, which is right.
    # The undisturbed run stands for one of this system, as the checks compare runs of one system.
    alone = replace(calm, scenario=run.scenario.with_(faults=()))
    beside = {name: Runs(run, {ALONE: (alone,)}) for name in _CHECKS}
    beside["audits"] = Runs(run, {CALM: (calm,)})
    beside["recovery"] = Runs(alone, {KILLED: (run,)})
    if _is_reduction(run):
        beside |= {name: Runs(run) for name in _REDUCTIONS}
    if other is not None:
        beside["reduction_bits"] = Runs(run, {TWIN: (other,)})
    for name, runs in beside.items():
        clause = _clauses()[name]
        finding = checks.CHECKS[name].judge(clause, runs)
        if finding.verdict is Verdict.FALSIFIED:
            found = finding.counterexample
            yield f"{clause.id}: {finding.reason} ({found.place() if found else ''})"
        elif finding.verdict is Verdict.INCONCLUSIVE and not (finding.vacuous or name == "audits"):
            yield f"{clause.id} is inconclusive: {finding.reason}"


@cache
def _clauses() -> dict[str, Invariant]:
    """Return the clauses of both contracts by the name of their check."""
    known = contract.Vocabulary(checks=checks.terms(), mutants=lambda: None)
    loaded = [
        contract.load(package_data.contract_path(name), vocabulary=known) for name in _CONTRACTS
    ]
    return {one.check: one for each in loaded for one in each.invariants if one.check}
