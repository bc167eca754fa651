"""The settings that a run of a command is launched with, its trace, and which checks judge it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from entrenar_py.check.clauses.check import Check
from entrenar_py.check.evidence import run_names
from entrenar_py.check.evidence.needs import (
    ALONE,
    KILLED,
    POISONED,
    REPEATED,
    RESUMED,
    SAVED,
    Need,
    Runs,
    turned,
)
from entrenar_py.shared.faults import LONGER, Fault, are_of_witnesses
from entrenar_py.shared.scenario import OBSERVED, Scenario
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.wording import counted, named


@dataclass(frozen=True)
class Turn:
    """A knob of the script, set to a value other than its usual one.

    Other knobs are turned together with it. Alone these change no result, but they expose a script
    that applies `knob` too early. For example, it may clip the gradient of each micro-batch instead
    of their sum.
    """

    knob: str
    value: str
    beside: tuple[tuple[str, str], ...] = ()

    @property
    def values(self) -> dict[str, str]:
        """The name and the value of each knob that is turned."""
        return {self.knob: self.value, **dict(self.beside)}


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings that a run was launched with.

    The run is stopped before each step in `stops` and launched again. A smaller {steps} stops it
    or, if `interrupted`, the observer in its process. `repeat` distinguishes a second run with the
    same settings. `option` is the script's own way to resume, or "".
    """

    world_size: int
    seed: int
    repeat: int = 0
    faults: tuple[Fault, ...] = ()
    stops: tuple[int, ...] = ()
    interrupted: bool = False
    option: str = ""
    turn: Turn | None = None

    @classmethod
    def of(cls, scenario: Scenario) -> RunSettings:
        """Return the settings of a run as far as the scenario of its trace records them.

        `interrupted` and `option` are not recorded, since no verdict depends on them.
        """
        pair = run_names.pair_of(scenario)
        return cls(
            world_size=scenario.world_size,
            seed=scenario.seed,
            repeat=scenario.repeat,
            faults=scenario.faults,
            stops=scenario.stops,
            turn=None if pair is None else Turn(pair.knob, pair.value, tuple(pair.beside.items())),
        )

    @property
    def is_plain(self) -> bool:
        """True if the run has no faults or stops, and no knob was turned."""
        return self.is_unstruck and self.turn is None

    @property
    def is_unstruck(self) -> bool:
        """True if the run has no faults or stops."""
        return not (self.faults or self.stops)

    @property
    def is_witness(self) -> bool:
        """True if the run shows whether other runs can be compared, and how closely."""
        return self.is_plain or (are_of_witnesses(self.faults) and not self.stops)

    @property
    def unstopped(self) -> RunSettings:
        """The same settings without stops."""
        return replace(self, stops=(), interrupted=False, option="")


def in_words(settings: RunSettings, most: int) -> str:
    """Return what a run is for, compared with the usual run on `most` workers."""
    values = settings.turn.values if settings.turn else {}
    parts = [f"with {name}={value}" for name, value in values.items()]
    parts += [run_names.done(fault) for fault in settings.faults]
    if settings.stops:
        parts.append(f"stopped before {named('step', settings.stops)} and resumed")
    if settings.world_size != most:
        parts.insert(0, f"on {counted(settings.world_size, 'rank')} instead of {most}")
    if parts:
        return f"the same run {', '.join(parts)}"
    return "the same run again" if settings.repeat else f"the usual run on {counted(most, 'rank')}"


def judges(check: Check, settings: RunSettings) -> bool:
    """Return whether `check` judges a run with these settings.

    A run with faults, stops or a turned knob is judged only by checks that are made for such runs.
    """
    struck = {fault.kind for fault in settings.faults}
    borne = {"non_finite_gradient" for need in check.needs if need is POISONED}
    borne |= {"leave" for need in check.needs if need is KILLED}
    borne |= {LONGER} if settings.stops else set()
    takes_resumed = check.takes_resumed or bool({RESUMED, SAVED}.intersection(check.needs))
    stops = takes_resumed or not settings.stops
    return struck <= borne and stops and (check.takes_turned or settings.turn is None)


def answers(settings: RunSettings) -> set[Need]:
    """Return the needs that a run with these settings answers, besides those of plain runs."""
    kinds = {fault.kind for fault in settings.faults}
    needs = {turned(settings.turn.knob)} if settings.turn is not None else set()
    needs |= {POISONED} if "non_finite_gradient" in kinds else set()
    needs |= {KILLED} if "leave" in kinds else set()
    return needs | ({RESUMED} if settings.stops else set())


def beside(needs: Collection[Need], settings: RunSettings) -> Runs[RunSettings]:
    """Return `settings`, and the settings of the runs that a check with `needs` compares it with.

    If `settings` are those of a killed, resumed or turned run, the base is the same run without
    that change.
    """
    for need in needs:
        base = settings
        if need is KILLED:
            base = replace(settings, faults=())
        elif need in (RESUMED, SAVED):
            base = settings.unstopped
        elif settings.turn is not None and need.knob == settings.turn.knob and not settings.stops:
            base = replace(settings, turn=None)
        if base != settings:
            return Runs(base, {need: (settings,)})
    runs = {
        ALONE: replace(settings, world_size=1, repeat=0, faults=(), stops=(), option=""),
        REPEATED: replace(settings, repeat=settings.repeat + 1),
    }
    if settings.turn is not None:
        return Runs(settings)
    return Runs(
        settings, {need: (run,) for need, run in runs.items() if need in needs and run != settings}
    )


# --- runs as they were recorded -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run: its settings, its trace, and the settings of the runs that follow it (`ahead`).

    A run with `is_tried` counts only if it shows an error, since the user did not request its
    number of workers.
    """

    settings: RunSettings
    trace: Trace
    ahead: tuple[RunSettings, ...] = ()
    is_tried: bool = False


def stored(traces: Mapping[Path, Trace]) -> dict[Path, Run]:
    """Return file of a trace -> run, for the traces that one call with a command stored.

    Return {} if `traces` has anything else: a run of a different system, files of single ranks, no
    plain run, or two runs with the same settings or name. The runs are in the order in which they
    were launched, which is the order in which verdicts name them.
    """
    pairs = [(file, RunSettings.of(trace.scenario)) for file, trace in traces.items()]
    runs = {
        file: Run(settings=settings, trace=traces[file])
        for file, settings in sorted(pairs, key=lambda pair: (_place(pair[1]), pair[0].stem))
    }
    is_whole = all(
        run.trace.scenario.system == OBSERVED and not file.is_dir() for file, run in runs.items()
    )
    settings, names = {run.settings for run in runs.values()}, {file.stem for file in runs}
    is_plain = any(run.is_plain and not run.repeat for run in settings)
    return runs if is_whole and is_plain and len(settings) == len(names) == len(runs) else {}


def _place(settings: RunSettings) -> tuple[bool, int, int, bool]:
    return not settings.is_plain, settings.repeat, -settings.world_size, settings.turn is not None
