"""The plan of the runs of a user's command that checks need, with the settings of each run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from entrenar_py.check.clauses.knobs import KNOBS
from entrenar_py.check.command import placeholders
from entrenar_py.check.command.launch import Ended, launch
from entrenar_py.check.command.run_settings import RunSettings, Turn
from entrenar_py.check.evidence import closeness
from entrenar_py.check.evidence.needs import (
    ALONE,
    COUNTS,
    KILLED,
    POISONED,
    PROBED,
    REPEATED,
    RESUMED,
    SAVED,
    Need,
)
from entrenar_py.check.observing import TOKENS
from entrenar_py.check.observing.auto import Settings
from entrenar_py.check.rank_files.arrangements import Arrangement
from entrenar_py.check.rank_files.layout import DATA, Layout
from entrenar_py.shared.errors import UsageError, did_you_mean
from entrenar_py.shared.faults import LONGER, Fault, steps_of
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Start, Trace, Traits

WORLD_SIZES = (2,)  # and 1, if a check compares with one worker
WIDER = 4  # the ranks of two mesh axes with two ranks each
DEADLINE_S = 300.0
NUM_STEPS = 8
LONGER_MAX = 64  # steps, since a script may write its first checkpoint at the end of an epoch
NUM_EPOCHS = 2  # since random streams and samples of two epochs are compared

Launcher = Callable[..., Ended]  # has the parameters of `launch.launch`


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of a command for checks with these `needs`, recorded below `folder`.

    - `auto`: whether the script is observed without the line `observe` in it.
    - `spelled`: knob -> value -> the text that is filled in instead of the value.
    - `source`: each run gets a copy of this folder to work in. If it is None, all runs work in the
      launcher's folder.
    - `made`: the runs that were launched, and are not launched again. New runs are added.
    - `arrangements`: number of workers -> how ranks share the model, as far as runs have shown it.

    Raises UsageError for

    - an unknown placeholder,
    - a knob or value in `spelled` that the command doesn't have,
    - a seed, or a number of workers, steps or epochs, that the command has no placeholder for,
    - a global batch (`{share:N}`) that can't be divided as a run needs it.
    """

    command: tuple[str, ...]
    needs: Collection[Need]
    folder: Path
    world_sizes: tuple[int, ...] = WORLD_SIZES
    seed: int = 0
    num_steps: int = NUM_STEPS
    num_epochs: int = NUM_EPOCHS
    deadline_s: float = DEADLINE_S
    auto: bool = False
    launch: Launcher = launch
    source: Path | None = None
    spelled: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    made: MutableMapping[RunSettings, Trace] = field(default_factory=dict)
    arrangements: MutableMapping[int, Arrangement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        placeholders.require_known(self.command)
        self._require_workers()
        self._require_spelled()
        placeholders.require_shares(self.command, self.cuts)
        for option, place, usual in (
            ("seed", "seed", 0),
            ("num_steps", "steps", NUM_STEPS),
            ("num_epochs", "epochs", NUM_EPOCHS),
        ):
            told = self.can_say(place) or (self._is_cut and place == "steps")
            if getattr(self, option) != usual and not told:
                raise UsageError(
                    f"--{place} {getattr(self, option)}: the command has no {{{place}}}, so it "
                    f"would never get the value; put {{{place}}} into it, or leave the option out",
                    field=place,
                )

    def _require_workers(self) -> None:
        """Raise UsageError if the command lacks {world_size} and its runs have different sizes."""
        sizes = [settings.world_size for settings in self.plain().values()]
        if len(sizes) > 1 and not self.can_say("world_size"):
            raise UsageError(
                f"the command would start the same number of workers in each run, and runs on "
                f"{' and '.join(map(str, sizes))} are needed: put {{world_size}} where it takes "
                "their number (torchrun --nproc_per_node={world_size} train.py; a script for a "
                "shell as an argument), or check it on one worker alone: --world-size 1",
                field="command",
            )

    def _require_spelled(self) -> None:
        """Raise UsageError if the command lacks a knob in `spelled`, or the knob lacks a value."""
        for name, values in self.spelled.items():
            if name not in KNOBS:
                raise UsageError.of("knobs", name, f"no knob; {did_you_mean(name, KNOBS)}")
            if not self.can_say(name):
                problem = f"the command has no {{{name}}}; put {{{name}}} into it"
                raise UsageError.of("knobs", name, problem)
            known = (KNOBS[name].usual, *KNOBS[name].others)
            for value in values:
                if value not in known:
                    raise UsageError(
                        f"knobs {name}={value!r}: no such value; use one of {', '.join(known)}",
                        field="knobs",
                    )

    def can_say(self, name: str) -> bool:
        """Return whether the command has the placeholder `name`."""
        return placeholders.has(self.command, name)

    @property
    def is_apart(self) -> bool:
        """True if two runs can be made at a time: they have separate folders and ports.

        torchrun's default port is fixed, and --standalone takes a free one.
        """
        return self.source is not None and "--standalone" in self.command

    def foreseen(self, likely: Traits) -> tuple[tuple[str, ...], list[str]]:
        """Return the names of the planned runs, and lines on what they require of the global batch.

        A stand-in with the traits `likely` replaces the first run, since the stops and the value of
        a limit depend on it.
        """
        steps = self.num_steps if self.can_say("steps") else NUM_STEPS * self.num_epochs
        stand_in = Scenario(
            system="", workload="own", world_size=self.most, seed=self.seed, num_steps=steps
        )
        usual = Trace(scenario=stand_in, environment={}, promises=(), events=(), traits=likely)
        limited = {_name(self.most, turn) for knob in KNOBS for turn in self._limited(knob, usual)}
        names = [*self.plain(), *self.others(usual), *self.pairs(usual)]
        shown = [name.rpartition("-")[0] if name in limited else name for name in names]
        lines = []
        workers, micro_batches = self.cuts[-1]
        if micro_batches > 1:
            parts = workers * micro_batches
            lines.append(
                f"the largest has {workers} workers with {micro_batches} micro-batches each: the "
                f"global batch has to be a multiple of {parts}"
            )
        return tuple(dict.fromkeys(shown)), lines

    def _limited(self, knob: str, usual: Trace) -> list[Turn]:
        """Return the turns of a knob if its value depends on the first run, else an empty list."""
        return self._turns(knob, usual) if KNOBS[knob].limit else []

    @property
    def cuts(self) -> list[tuple[int, int]]:
        """The (number of workers, micro-batches per step) of all runs, the largest last."""
        sizes = [settings.world_size for settings in self.plain().values()]
        needed = {need.knob for need in self.needs}
        turns = self._turns("accumulation")
        if "accumulation" not in needed:  # another knob's run or a resumed run may turn it
            turns = turns[:1] if {RESUMED, SAVED}.intersection(self.needs) or needed - {""} else []
        cuts = [(size, int(KNOBS["accumulation"].usual)) for size in sizes]
        return sorted([*cuts, *((self.most, int(turn.value)) for turn in turns)])

    def observing(self, planned: Collection[Fault] = ()) -> dict[str, str]:
        """Return the environment variables for observing a script with the faults `planned`.

        A script without the line `observe` is ended after its last step if the command has neither
        {steps} nor {epochs}. After a resume it takes the full number of steps again, since the age
        of its checkpoint is unknown. If the command has no {seed}, generators that the script
        doesn't seed are seeded.
        """
        tokens = {TOKENS: "1"} if PROBED in self.needs else {}
        seed = None if self.can_say("seed") else self.seed
        steps = (steps_of(planned) or self.num_steps) if self._is_cut else None
        return {**tokens, **Settings(steps=steps, seed=seed, follows=self.auto).variables()}

    @property
    def _is_cut(self) -> bool:
        """True if runs are ended from outside, since the command has no number of steps or epochs.

        A script that gets its number of epochs is not ended, so that the ends of its epochs are
        seen.
        """
        return self.auto and not (self.can_say("steps") or self.can_say("epochs"))

    @property
    def most(self) -> int:
        """The largest number of workers, which all runs of `others()` and `pairs()` have."""
        return max(self.world_sizes)

    def plain(self) -> dict[str, RunSettings]:
        """Return name -> settings of the plain run on each number of workers, largest first."""
        models = {1} if {ALONE, COUNTS}.intersection(self.needs) else set()
        sizes = sorted({*models, *self.world_sizes}, reverse=True)
        return {_name(size): RunSettings(world_size=size, seed=self.seed) for size in sizes}

    def wider(self, layout: Layout | None) -> dict[str, RunSettings]:
        """Return name -> settings of a run on four workers, if data are split along two mesh axes.

        With two workers, one of the axes has a single rank, so that the run can't show whether
        samples are split along both. Return {} if the user chose the numbers of workers.
        """
        axes = [] if layout is None else [axis for axis in layout.axes if axis in DATA]
        is_free = self.world_sizes == WORLD_SIZES and self.can_say("world_size")
        if len(axes) < 2 or not is_free or not placeholders.can_share(self.command, WIDER):
            return {}
        return {_name(WIDER): RunSettings(world_size=WIDER, seed=self.seed)}

    def longer(self, usual: Trace) -> dict[str, RunSettings]:
        """Return name -> settings of a run with more steps, past the end of an epoch, if needed.

        It is needed if the first run, `usual`, wrote no checkpoint although a line of the script
        may write one later, or if it wrote one only after its last step.
        """
        like, traits = usual.scenario, usual.traits
        wanted = {RESUMED, SAVED}.intersection(self.needs) and self._is_cut
        may_go_on = self.can_say(placeholders.RESUME) or traits.loads != "nothing"
        steps = _steps_per_epoch(usual)
        names_folder = self.can_say("workdir") or not self.source
        is_late = min(traits.saved_after, default=0) >= like.num_steps or (
            traits.unreached and not traits.saved_after
        )
        if not (wanted and may_go_on and is_late and 0 < steps <= LONGER_MAX) or names_folder:
            return {}
        whole = LONGER_MAX // steps * steps
        if whole < like.num_steps:
            return {}
        fault = Fault(kind=LONGER, step=0, value=str(whole + 3))
        settings = RunSettings(world_size=self.most, seed=self.seed, faults=(fault,))
        return {f"{_name(self.most)}-longer": settings}

    def until_the_schedule_moves(
        self, settings: RunSettings, straight: Trace | None, resumed: Trace
    ) -> dict[str, RunSettings]:
        """Return name -> settings of a run of some epochs, if a resume may have lost the schedule.

        A schedule by epochs shows a lost position only when the next epoch begins. {} if not.
        """
        if straight is None or settings.faults or settings.turn is not None or not self._is_cut:
            return {}
        steps = _steps_per_epoch(straight)
        begun = max((start.step for start in resumed.of(Start) if start.resumed), default=0)
        if not (
            0 < steps <= LONGER_MAX and begun and closeness.is_schedule_elsewhere(straight, resumed)
        ):
            return {}
        fault = Fault(kind=LONGER, step=0, value=str(begun + 2 * steps + 1))
        return {f"{_name(self.most)}-longer": replace(settings.unstopped, faults=(fault,))}

    def stopped(self, settings: RunSettings, recorded: Trace) -> dict[str, RunSettings]:
        """Return name -> `settings` (a longer run) with a stop after its checkpoint.

        Return {} if the run wrote no checkpoint.
        """
        if steps_of(settings.faults) is None or settings.stops or not recorded.traits.saved_after:
            return {}
        stops = _stops(recorded, recorded.traits.saved_after)
        name = f"{_name(self.most)}-longer-interrupted"
        stopped = replace(settings, stops=stops, interrupted=True, option=self._option(recorded))
        return {name: stopped} if stops else {}

    def others(self, usual: Trace) -> dict[str, RunSettings]:
        """Return name -> settings of the repeated, faulted and stopped runs that checks need.

        `usual` is the first run. No worker is killed if its traits say that none is restarted.
        """
        like, restarts = usual.scenario, usual.traits.restarts != "nothing"
        name, middle, rank = _name(self.most), like.num_steps // 2, self.most - 1
        nan = Fault(kind="non_finite_gradient", step=middle, rank=rank, value="nan")
        leave = Fault(kind="leave", step=middle, rank=rank)
        stops = self._stops(usual)
        settings = RunSettings(world_size=self.most, seed=self.seed)
        others: dict[str, RunSettings] = {}
        if REPEATED in self.needs:
            others[f"{name}-again"] = replace(settings, repeat=1)
        if POISONED in self.needs:
            others[f"{name}-nan"] = replace(settings, faults=(nan,))
        if KILLED in self.needs and self.most > 1 and restarts:
            others[f"{name}-killed"] = replace(settings, faults=(leave,))
        few = [*self.plain().values()][-1]
        for need in sorted(self.needs, key=lambda need: need.name):
            if need.planned is not None and (fault := need.planned(usual)) is not None:
                others[f"{_name(few.world_size)}-{need.name}"] = replace(few, faults=(fault,))
        interrupted = self._cuts_off(like) or not self.can_say("workdir")
        if {RESUMED, SAVED}.intersection(self.needs) and stops:
            # If possible, with several micro-batches per step: only then does a position in the
            # data that is counted in micro-batches differ from one that is counted in steps.
            turned = next(iter(self._turns("accumulation")), None)
            if turned is not None:
                others[_name(self.most, turned)] = replace(settings, turn=turned)
            name = f"{_name(self.most, turned)}-{'interrupted' if interrupted else 'resumed'}"
            stopped = replace(settings, stops=stops, interrupted=interrupted, turn=turned)
            others[name] = replace(stopped, option=self._option(usual))
        return others

    def _stops(self, usual: Trace) -> tuple[int, ...]:
        """Return the steps to stop before: within epochs, too, unless only {epochs} stops the run.

        Without {workdir}, the run must have a copy of the folder to work in. It is then stopped
        after the first run's checkpoint, if the script may load it or the command says how to
        resume ({resume:...}).
        """
        like, is_told = usual.scenario, self.can_say("workdir")
        says_how = self.can_say(placeholders.RESUME) and not usual.traits.unreached
        if not is_told and not (self.source and (says_how or _resumes(usual))):
            return ()
        if is_told and not (self.can_say("steps") or self._cuts_off(like)):
            return tuple(range(0, like.num_steps, like.num_steps // self.num_epochs))[1:]
        # A run with a smaller {steps} may save at its end, where a longer run doesn't save.
        return _stops(usual, () if is_told else usual.traits.saved_after)

    def _option(self, usual: Trace) -> str:
        """Return the script's own way to resume; "" if it has none or the command already says how.

        The way is an option, `--resume PATH`, or an environment variable, `INIT=resume`.
        """
        option = usual.traits.resume_option
        name, variable = option.partition(" ")[0], option.partition("=")[0]
        is_told = self.can_say("workdir") or self.can_say(placeholders.RESUME)
        is_given = any(word.partition("=")[0] == name for word in self.command)
        is_given |= variable in os.environ
        is_resume = placeholders.RESUME.removesuffix(":") in name.lower()
        return "" if is_told or is_given or not is_resume else option

    def _cuts_off(self, like: Scenario) -> bool:
        """Return whether runs can be stopped only from inside, not by {steps} or {epochs}.

        {epochs} can't stop them if the epochs of `like` have unequal lengths.
        """
        by_epochs = self.can_say("epochs") and like.num_steps % self.num_epochs == 0
        return not (self.can_say("steps") or by_epochs)

    def lengths(self, settings: RunSettings) -> list[tuple[int, int]]:
        """Return (number of steps, number of epochs) for each launch: one more than the stops."""
        steps = (*settings.stops, self.num_steps)
        if settings.interrupted:
            return [(self.num_steps, self.num_epochs) for _ in steps]
        if self.can_say("steps"):
            return [(num_steps, self.num_epochs) for num_steps in steps]
        epochs = (*range(1, len(steps)), self.num_epochs)
        return [(self.num_steps, num_epochs) for num_epochs in epochs]

    def _turns(self, knob: str, usual: Trace | None = None) -> list[Turn]:
        """Return a Turn for each value of `knob` to test; none if the command lacks the knob."""
        if not self.can_say(knob):
            return []
        others = filter(self.can_say, KNOBS[knob].companions)
        beside = tuple((name, KNOBS[name].others[0]) for name in others)
        return [Turn(knob, value, beside) for value in KNOBS[knob].turns(usual)]

    def pairs(self, usual: Trace) -> dict[str, RunSettings]:
        """Return name -> settings of the runs with a turned knob that checks need.

        Knobs without a placeholder in the command are left out.
        """
        needed = {need.knob for need in self.needs}
        settings = RunSettings(world_size=self.most, seed=self.seed)
        return {
            _name(self.most, turn): replace(settings, turn=turn)
            for name in KNOBS
            if name in needed
            for turn in self._turns(name, usual)
        }


def _resumes(usual: Trace) -> bool:
    """Return whether a run saved weights and a line of its script may load them."""
    return usual.traits.saves == "weights" and usual.traits.loads != "nothing"


def _stops(usual: Trace, saved: Sequence[int]) -> tuple[int, ...]:
    """Return up to three steps to stop before, each after a step in `saved`.

    Two are within an epoch if possible. The third is at the end of an epoch, where the position in
    the data is that of the next epoch.
    """
    like, per_epoch = usual.scenario, _steps_per_epoch(usual)
    steps = range(min(saved, default=1), like.num_steps)
    inside = [step for step in steps if step % max(1, per_epoch)] or [*steps]
    # If the length of an epoch is unknown, the last step may be at its end.
    ends = [step for step in steps if per_epoch <= 1 or step % per_epoch == 0]
    places = {inside[len(inside) // 3], inside[2 * len(inside) // 3]} if inside else set()
    return tuple(sorted({*places, *ends[-1:]}))


def _steps_per_epoch(usual: Trace) -> int:
    batches = usual.scenario.num_samples / usual.scenario.batch_size
    return int(batches) if usual.traits.drop_last else math.ceil(batches)


def _name(world_size: int, turn: Turn | None = None) -> str:
    suffix = "" if turn is None else f"-{turn.knob}-{turn.value}"
    return f"{world_size}-worker{'' if world_size == 1 else 's'}{suffix}"
