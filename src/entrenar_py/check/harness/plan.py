"""The plan: the scenarios that are tried for each clause, all validated before any run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from entrenar_py.check import clauses as checks
from entrenar_py.check.clauses import Check
from entrenar_py.check.contract import Contract, Invariant, records
from entrenar_py.check.harness import counterexamples
from entrenar_py.check.reports.report import NotApplying
from entrenar_py.shared import mutants
from entrenar_py.shared import systems as table
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import Scenario, expand
from entrenar_py.shared.systems import SYSTEMS, TRAINERS
from entrenar_py.shared.verdict import Finding, inconclusive
from entrenar_py.shared.wording import counted

_HOW_TO_BIND = "--suggest drafts a binding for it (docs/bindings.md)"
# Limits of a run in the harness. Larger runs would miss their deadline or fill the memory.
SIZES_MAX = {"num_steps": 10**6, "num_samples": 10**7, "width": 2**28}
PARTS_MAX = 2**20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a run of the harness, apart from the contract.

    - `system`, `world_sizes`, `backends`: replace those of scenarios; None or empty: scenarios keep
      their own.
    - `seed`: added to the seeds of the scenarios.
    - `is_run`: false if stored traces or the runs of a command are judged. The scenarios then only
      say which traces these are, and their workloads are not built.
    - `timeout_s`: a limit for the whole call. Clauses that it cuts short are inconclusive.
    - `trace_folder`: the folder for the traces of all runs, or None to keep none.
    - `saved_folder`: the folder for counterexamples.

    Raises UsageError for an unknown system or backend.
    """

    system: str | None = None
    world_sizes: tuple[int, ...] = ()
    backends: tuple[str, ...] = ()
    seed: int = 0
    is_run: bool = True
    num_examples: int = 20
    timeout_s: float | None = None
    trace_folder: Path | None = None
    saved_folder: Path = counterexamples.FOLDER

    def __post_init__(self) -> None:
        table.require_trainer(self.system, self.backends)

    @property
    def fixed(self) -> tuple[str, ...]:
        """The scenario fields that neither exploring nor shrinking may change."""
        return ("world_size",) if self.world_sizes else ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """One clause and its scenarios: `known` ones that broke it before, and those `planned` for it.

    `check` is None if no check covers the clause; then nothing is tried. `notes` say which
    scenarios of the clause are left out or changed, and why.
    """

    invariant: Invariant
    check: Check | None
    known: tuple[Scenario, ...] = ()
    planned: tuple[Scenario, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def scenarios(self) -> list[Scenario]:
        """Known and planned scenarios, each once."""
        return list(dict.fromkeys((*self.known, *self.planned)))

    def untried(self) -> Finding:
        """Return the finding if nothing was compared: INCONCLUSIVE, with the reason."""
        clause = self.invariant
        if clause.binding is not None and clause.binding.untried:
            return inconclusive(clause.id, f"nothing was compared: {clause.binding.untried}")
        reason = "no run of it was seen: nothing was compared"
        if self.check is None:
            reason = f"no check covers it: nothing was compared; {_HOW_TO_BIND}"
        return inconclusive(clause.id, f"{clause.position}: {reason}")


def select(
    contract: Contract,
    *,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    severities: Collection[str] = (),
) -> list[Invariant]:
    """Return the clauses that pass all three filters.

    Raises UsageError for an unknown clause id.
    """
    records.require_ids((*only, *exclude), records.ids_of(contract), contract.name)
    return [
        invariant
        for invariant in contract.invariants
        if (not only or invariant.id in only or invariant.item in only)
        and not {invariant.id, invariant.item} & set(exclude)
        and (not severities or invariant.severity in severities)
    ]


def divide(
    invariants: Iterable[Invariant], plan: Plan
) -> tuple[tuple[Task, ...], tuple[NotApplying, ...]]:
    """Return a Task for each clause that applies to the plan's system, and the other clauses.

    A clause doesn't apply in three cases. The system may lack what its check presupposes (that
    workers step together, or equal bits for any number of workers). The clause's binding may name
    other systems only. Or each of its scenarios has a fault that the system can't inject. Raises
    UsageError, naming the place, if a scenario can't be run.
    """
    outcomes = [_task(invariant, plan) for invariant in invariants]
    return (
        tuple(outcome for outcome in outcomes if isinstance(outcome, Task)),
        tuple(outcome for outcome in outcomes if isinstance(outcome, NotApplying)),
    )


def applies(check: Check, system: str | None) -> bool:
    """Return whether `system` promises everything that `check` presupposes."""
    return not _lacking(check, system)


def _lacking(check: Check, system: str | None) -> str:
    """Return, as a reason, the precondition of `check` that `system` does not promise, or ""."""
    known = SYSTEMS.get(system or "")
    if known is not None and check.in_step and not known.in_step:
        return f"it compares steps that all workers take together, and {system} takes none"
    if known is not None and check.bitwise and not known.bitwise:
        return (
            f"{system} promises agreement within rounding, not the same bits for any number of "
            "workers"
        )
    return ""


def _elsewhere(invariant: Invariant, system: str | None) -> str:
    binding = invariant.binding
    if binding is None or system is None or not binding.systems or system in binding.systems:
        return ""
    return f"its binding is for {', '.join(binding.systems)} only"


def systems_of(scenarios: Iterable[Scenario]) -> str:
    """Return the names of the trainers in `scenarios`, or of the probes if there is no trainer."""
    names = list(dict.fromkeys(scenario.system for scenario in scenarios))
    return ", ".join([name for name in names if is_trainer(name)] or names)


def is_trainer(system: str) -> bool:
    """Return whether `system` is a trainer. An unknown system counts as a trainer."""
    return system in TRAINERS or system not in SYSTEMS


def require_known(scenario: Scenario, where: str, *, is_run: bool = True) -> None:
    """Raise UsageError if the scenario is too large or impossible, or if its mutant is unknown.

    The scenario's workload is built only if `is_run`.
    """
    for name, largest in SIZES_MAX.items():
        if getattr(scenario, name) > largest:
            raise UsageError(f"{where}: {name}={getattr(scenario, name)}: use at most {largest}")
    if scenario.num_shards * scenario.accumulation > PARTS_MAX:
        given = f"num_shards={scenario.num_shards} with accumulation={scenario.accumulation}"
        raise UsageError(f"{where}: {given}: use at most {PARTS_MAX} micro-batches a step")
    try:
        table.require_possible(scenario)
        if is_run and SYSTEMS[scenario.system].trains and not _surely_fits(scenario):
            from entrenar_py import systems

            systems.require_workload(scenario)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    if scenario.mutant is not None and scenario.mutant not in mutants.catalogue():
        known = ", ".join(mutants.catalogue())
        raise UsageError(f"{where}: mutant={scenario.mutant!r}: allowed are {known}")


# Workload -> the number of samples in its data set, at least.
_SAMPLES_MIN = {"linear": SIZES_MAX["num_samples"], "mlp": 1797, "decoder": 1000}
_SAMPLES_MIN |= {"decoder_full": 1000, "vectors": SIZES_MAX["num_samples"]}


def _surely_fits(scenario: Scenario) -> bool:
    """Return whether a workload surely has all samples and tensors that a scenario names.

    This is decided without torch, and may be False for a possible scenario. Building the workload
    would be exact, but takes seconds, and a contract can be validated where torch is not installed.
    """
    width, sizes = scenario.width, {}
    if scenario.workload == "mlp":
        layers = {"hidden1": (64, width), "hidden2": (width, width), "output": (width, 10)}
        sizes = {f"{layer}.weight": fan_in * out for layer, (fan_in, out) in layers.items()}
        sizes |= {f"{layer}.bias": out for layer, (_, out) in layers.items()}
    if scenario.workload == "linear":
        sizes = {"weight": 1, "bias": 1}
    return (
        scenario.num_samples <= _SAMPLES_MIN.get(scenario.workload, 0)
        and "terms" not in scenario.options
        and all(
            (fault.element or 0) < sizes.get(fault.tensor or next(iter(sizes), ""), 0)
            for fault in scenario.faults
            if fault.tensor is not None or fault.element is not None
        )
    )


def require_runnable(invariants: Iterable[Invariant]) -> None:
    """Raise UsageError if one of the clauses has a scenario that can't be run."""
    for invariant in invariants:
        check = checks.bind(invariant)
        if check is not None:
            _own(invariant, check, is_run=True)


def _task(invariant: Invariant, plan: Plan) -> Task | NotApplying:
    check = checks.bind(invariant)
    if check is None:
        return Task(invariant=invariant, check=None)
    if why := _lacking(check, plan.system) or _elsewhere(invariant, plan.system):
        return NotApplying(invariant=invariant, reason=why)
    own = _own(invariant, check, is_run=plan.is_run)
    unfit = [scenario for scenario in own if _can_not(scenario, plan.system)]
    if own and len(unfit) == len(own):
        return NotApplying(invariant=invariant, reason=f"every scenario is {_why(unfit, plan)}")
    try:
        fitted = _fitted([scenario for scenario in own if scenario not in unfit], plan)
    except UsageError as error:
        raise UsageError(f"{_place(invariant)}: {error}") from error
    return Task(
        invariant=invariant,
        check=check,
        known=tuple(_known(invariant, plan, {scenario.system for scenario in fitted})),
        planned=tuple(fitted),
        notes=tuple(_notes(unfit, sum(fitted.values()), plan)),
    )


def _fitted(own: Iterable[Scenario], plan: Plan) -> dict[Scenario, bool]:
    fitted: dict[Scenario, bool] = {}
    for wanted in (adapted for scenario in own for adapted in _adapted(scenario, plan)):
        runnable = table.fitted(wanted, fixed=plan.fixed)
        fitted[runnable] = fitted.get(runnable, False) or runnable != wanted
    return fitted


def _known(invariant: Invariant, plan: Plan, trainers: Collection[str]) -> Iterator[Scenario]:
    """Yield the saved counterexamples of the clause that fit `trainers` and the plan.

    Counterexamples of probes always fit. Those of unknown systems fit as well, so that they raise
    UsageError.
    """
    for path, saved in counterexamples.known(invariant.id, plan.saved_folder):
        scenario = saved.scenario
        if scenario.system not in TRAINERS or (
            scenario.system in trainers
            and (not plan.world_sizes or scenario.world_size in plan.world_sizes)
            and (not plan.backends or scenario.backends == plan.backends)
        ):
            require_known(scenario, str(path), is_run=plan.is_run)
            yield scenario


def _notes(unfit: Sequence[Scenario], resized: int, plan: Plan) -> Iterator[str]:
    if unfit:
        yield f"left out: {counted(len(unfit), 'scenario')} {_why(unfit, plan)}"
    if resized:
        fitted = counted(resized, "scenario")
        yield f"fitted to the powers of two that {plan.system} needs: {fitted}"


def _can_not(scenario: Scenario, system: str | None) -> list[str]:
    if system is None or scenario.system not in TRAINERS:
        return []
    return [fault.kind for fault in scenario.faults if fault.kind not in SYSTEMS[system].faults]


def _why(unfit: Iterable[Scenario], plan: Plan) -> str:
    kinds = dict.fromkeys(kind for scenario in unfit for kind in _can_not(scenario, plan.system))
    return f"with {' or '.join(kinds)}, which {plan.system} can't do"


def _own(invariant: Invariant, check: Check, *, is_run: bool) -> list[Scenario]:
    """Return the clause's own scenarios, or else those of its check.

    Raises UsageError if one of the clause's own scenarios can't be run.
    """
    where = _place(invariant)
    try:
        scenarios = [scenario for record in invariant.scenarios for scenario in expand(record)]
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
    for scenario in scenarios:
        require_known(scenario, where, is_run=is_run)
    return scenarios or check.plan(invariant)


def _place(invariant: Invariant) -> str:
    return f"{invariant.position}: clause {invariant.id}"


def _adapted(scenario: Scenario, plan: Plan) -> Iterator[Scenario]:
    """Yield the scenario as changed by the plan's options.

    If the change is impossible, runs fail.
    """
    scenario = scenario.with_(seed=scenario.seed + plan.seed)
    if scenario.system not in TRAINERS:
        yield scenario
        return
    scenario = scenario.with_(
        system=plan.system or scenario.system, backends=plan.backends or scenario.backends
    )
    for world_size in plan.world_sizes or (scenario.world_size,):
        # Shards grow with the workers, up to the samples. More workers than samples are refused.
        shards = max(scenario.num_shards, min(world_size, scenario.num_samples))
        faults = tuple(fault for fault in scenario.faults if (fault.rank or 0) < world_size)
        if scenario.faults and not faults and world_size > 1:  # keep a fault in the run
            faults = (replace(scenario.faults[0], rank=world_size - 1),)
        yield scenario.with_(world_size=world_size, num_shards=shards, faults=faults)
