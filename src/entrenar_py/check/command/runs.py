"""Launch and record the planned runs of a command, which checks compare with each other."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any, Self

from entrenar_py.check.clauses import stopped_run
from entrenar_py.check.clauses.knobs import KNOBS, UNCLIPPED
from entrenar_py.check.command import controlling, own_folder, placeholders, run_trace
from entrenar_py.check.command.arranging import Arranging, Made
from entrenar_py.check.command.asked import Asked
from entrenar_py.check.command.beginnings import Beginnings, first_step
from entrenar_py.check.command.controlling import Controlling
from entrenar_py.check.command.launch import OUTPUT, Ended
from entrenar_py.check.command.nudging import Nudging
from entrenar_py.check.command.run_plan import Plan
from entrenar_py.check.command.shortening import Shortening
from entrenar_py.check.harness import interrupts
from entrenar_py.check.observing import BATCHES, BATCHES_KEPT, FAULTS, RATES, STOP
from entrenar_py.check.rank_files import notes
from entrenar_py.shared import trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import JOINED, MIRRORED, REPEATED, steps_of
from entrenar_py.shared.scenario import OBSERVED
from entrenar_py.shared.trace import Ruled, Trace, Update
from entrenar_py.shared.untrusted import printing

CHANGING = ("betas", "momentum", "weight_decay")  # constants that schedules change, as rates
SHORT_S = 15.0  # a run that takes less waits for most of it
_PATH = "PATH"  # at the end of an option that needs one

Likes = Mapping[Asked, Trace]  # completed runs that others are like, the first run first
Show = Callable[[str], None]  # is called with the name of each run before it is launched


@dataclass(frozen=True, kw_only=True)
class Run:
    """The trace of a run, and the settings of this run and of those that are made after it.

    A run that is `tried` counts only if it shows an error: nobody asked for its number of workers.
    """

    asked: Asked
    trace: Trace
    ahead: tuple[Asked, ...] = ()
    is_tried: bool = False


def stored(traces: Mapping[Path, Trace]) -> dict[Path, Run]:
    """Return the runs that one call with a command has left, by the file of each trace.

    Return none if `traces` hold anything else: another system's run, files of single ranks, no run
    without changes, or two runs with the same settings or name. The runs come in the order in which
    they were made: verdicts name them in it.
    """
    made = [(file, Asked.of(trace.scenario)) for file, trace in traces.items()]
    runs = {
        file: Run(asked=asked, trace=traces[file])
        for file, asked in sorted(made, key=lambda pair: (_place(pair[1]), pair[0].stem))
    }
    is_whole = all(
        run.trace.scenario.system == OBSERVED and not file.is_dir() for file, run in runs.items()
    )
    settings, names = {run.asked for run in runs.values()}, {file.stem for file in runs}
    is_plain = any(run.is_plain and not run.repeat for run in settings)
    return runs if is_whole and is_plain and len(settings) == len(names) == len(runs) else {}


def _place(asked: Asked) -> tuple[bool, int, int, bool]:
    """Return what sorts runs as they are made: plain ones first, those with a turned knob last."""
    return not asked.is_plain, asked.repeat, -asked.world_size, asked.turn is not None


def record(plan: Plan, show: Show) -> Iterator[tuple[Path, Run]]:
    """Run the command as often as `plan` requires; yield the file of each trace, and its run.

    Each run has a folder of its own below the plan's, with its output and its ranks' files. If the
    first run fails, no other is launched, since the others would fail, too. Raises UsageError if
    the command can't be started, and KeyboardInterrupt after an interrupt.
    """
    with _Ahead(plan) as ahead:
        yield from _recorded(plan, show, ahead)


def _recorded(plan: Plan, show: Show, ahead: _Ahead) -> Iterator[tuple[Path, Run]]:
    base = plan.folder
    likes: dict[Asked, Trace] = {}
    nudging, controls = Nudging(plan.needs), Controlling(plan.needs)
    shortening = Shortening(plan.needs)
    beginnings = Beginnings()
    arranging = Arranging(base, plan.arrangements)
    planned, first = plan.plain(), True
    while planned:
        name = next(iter(planned))
        asked = planned.pop(name)
        interrupts.check()
        if asked.stops and asked.unstopped not in likes:
            continue  # the run that it would be compared with has failed
        like = _like(asked, likes)
        if asked not in plan.made:
            show(f"{shlex.join(plan.command)} ({name})")
            ended = ahead.launched(name, asked, planned, likes)
            before = arranging.after(name, asked, ended)
            for file, run in _read_again(plan, before, likes, (asked, *planned.values())):
                nudging.read_again(run.asked, run.trace)
                yield file, run
            plan.made[asked] = _trace(plan, asked, base / name, ended, like)
        recorded = plan.made[asked]
        if like is not None and _was_told_otherwise(asked, like, recorded):
            # {steps} did more than to stop the run: the script is stopped from inside instead.
            again = name.replace("-resumed", "-interrupted")
            planned = {again: replace(asked, interrupted=True), **planned}
            continue
        if asked.option and not stopped_run.is_telling(recorded):
            planned = {name: replace(asked, option=""), **planned}  # it means something else
            continue
        if controlling.source_of(asked) and recorded.end.status == "failed":
            continue  # the script hands on more than was kept
        is_tried = asked.world_size not in (1, *plan.world_sizes)
        is_longer = steps_of(asked.faults) is not None and not asked.stops
        if (is_tried or is_longer) and recorded.end.status == "failed":
            continue
        recorded = beginnings.seen(name, recorded)
        base.mkdir(parents=True, exist_ok=True)  # the command may have removed it
        trace.save(recorded, base / f"{name}.jsonl")
        if first:
            if begun := first_step(recorded):
                printing.warn(
                    f"{name} began at step {begun}, not at 0: it found an earlier checkpoint, and "
                    "so do all runs. Move it out of the way to see the training's beginning"
                )
            if recorded.end.status == "failed":
                planned.clear()
            else:
                planned |= plan.others(recorded) | plan.pairs(recorded)
                planned |= plan.wider(arranging.layout(name)) | plan.longer(recorded)
            first = False
        if asked.stops:
            planned |= plan.until_the_schedule_moves(asked, like, recorded)
        if asked.is_unstruck and recorded.end.status == "completed":
            planned = {**nudging.after(asked, recorded), **planned}
            if not asked.repeat:
                likes[asked] = recorded
        if is_longer:
            likes[asked] = recorded
            planned = {**plan.stopped(asked, recorded), **planned}
        planned |= shortening.after(asked, recorded)
        if recorded.end.status == "completed":
            planned |= controls.after(asked, recorded)
        rest = tuple(planned.values())
        file, run = base / f"{name}.jsonl", Run(asked=asked, trace=recorded, ahead=rest)
        yield file, replace(run, is_tried=is_tried)


def _read_again(
    plan: Plan, made: Sequence[Made], likes: dict[Asked, Trace], ahead: tuple[Asked, ...]
) -> Iterator[tuple[Path, Run]]:
    """Yield once more the runs `made`, read as it is known by now how ranks share the model.

    A run that failed as it was read before keeps its trace: it began where another had been.
    """
    for name, asked, ended in made:
        recorded = _trace(plan, asked, plan.folder / name, ended, _like(asked, likes))
        if plan.made[asked].end.status != recorded.end.status:
            continue
        plan.made[asked] = recorded
        if asked in likes:
            likes[asked] = recorded
        trace.save(recorded, plan.folder / f"{name}.jsonl")
        yield plan.folder / f"{name}.jsonl", Run(asked=asked, trace=recorded, ahead=ahead)


class _Ahead:
    """Launches runs: where they don't disturb each other, each with the one that comes after it.

    They don't if each has a folder of its own to write in and its launcher looks for a free port,
    if there is no GPU, and if the first run was short and took little memory. Nothing is launched
    beside the first one: if it fails, no other is wanted.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._pool, self._called_off = plan, ThreadPoolExecutor(2), Event()
        self._begun: dict[Asked, Future[Ended]] = {}
        self._may: bool | None = None  # not known before the first run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End what was begun and is not wanted any more."""
        self._called_off.set()
        self._pool.shutdown(cancel_futures=True)

    def launched(
        self, name: str, asked: Asked, planned: Mapping[str, Asked], likes: Likes
    ) -> Ended:
        """Return how the run `name` ended; begin the next of those that are `planned` after it.

        One that is stopped where the run that it is like saved a checkpoint waits for that run, and
        so does one that is given the batches of this one.
        """
        running = self._begun.pop(asked, None) or self._begin(name, asked, likes)
        if self._may:
            others = ((n, a) for n, a in planned.items() if a not in self._plan.made)
            for after, other in islice(others, 1):
                waits = other.stops and other.unstopped not in likes
                waits = waits or controlling.source_of(other) == name
                if other not in self._begun and not waits:
                    self._begun[other] = self._begin(after, other, likes)
        ended = running.result()
        if self._may is None:
            self._may = self._plan.is_apart and ended.is_forked and _is_light(ended, asked)
        return ended

    def _begin(self, name: str, asked: Asked, likes: Likes) -> Future[Ended]:
        folder, like = (self._plan.folder / name).absolute(), _like(asked, likes)
        is_called_off = self._called_off.is_set
        return self._pool.submit(_launched, self._plan, asked, folder, like, is_called_off)


def _like(asked: Asked, likes: Likes) -> Trace | None:
    """Return the run that `asked` is like but for what is done to it, if it was made already."""
    return likes.get(asked.unstopped) if asked.stops else next(iter(likes.values()), None)


def _is_light(ended: Ended, asked: Asked) -> bool:
    """Return whether two runs like this one fit on the machine."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 2 * (asked.world_size + 1) * ended.peak_bytes
    return ended.seconds < SHORT_S and needed < pages and not Path("/dev/nvidiactl").exists()


def _launched(
    plan: Plan,
    asked: Asked,
    folder: Path,
    like: Trace | None,
    is_called_off: Callable[[], bool],
) -> Ended:
    """Launch the command once for each stop and once more; return the end of the last launch."""
    _clear(folder)
    (folder / "work").mkdir(parents=True)
    if plan.auto:
        (folder / notes.ASKED).touch()
    ended: Ended | None = None
    with own_folder.of(plan.source, folder / own_folder.FOLDER) as own:
        launched = own.launched(plan.launch) if own else plan.launch
        for life, (num_steps, num_epochs) in enumerate(plan.lengths(asked)):
            values = _values(asked, folder, num_steps, num_epochs)
            is_last = life == len(asked.stops)
            cut_off = asked.interrupted and not is_last
            made = _made_before(asked, life, like)
            stop = {STOP: f"{asked.stops[life]} from {made}"} if cut_off else {}
            closed = partial(run_trace.have_closed, folder, asked.world_size, life)
            words, told = _resuming(asked.option, folder) if life else ([], {})
            ended = launched(
                placeholders.fill(
                    [*plan.command, *words],
                    values,
                    plan.spelled,
                    resumes_in=(own.path if own else Path.cwd()) if life else None,
                ),
                folder=folder,
                variables={
                    FAULTS: json.dumps([fault.to_dict() for fault in asked.faults]),
                    **_batches(asked, folder.parent),
                    **plan.observing(asked.faults),
                    **_rates(asked, folder, like),
                    **stop,
                    **told,
                },
                deadline_s=plan.deadline_s,
                is_over=closed,
                is_called_off=is_called_off,
            )
            if ended.code is None and not closed():
                break  # else it hung only after training, and can go on
    assert ended is not None, "it was launched"
    return ended


def _batches(asked: Asked, folder: Path) -> dict[str, str]:
    """Return the variable by which a run keeps its batches, or is given those of another run."""
    if source := controlling.source_of(asked):
        return {BATCHES: str(folder / source)}
    return {BATCHES: BATCHES_KEPT} if controlling.are_kept(asked) else {}


def _resuming(option: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return what tells a script to go on from its newest checkpoint: words, and variables.

    There is neither if no checkpoint is known and its path is needed.
    """
    needs_path = option.endswith(_PATH)
    newest = notes.newest_checkpoint(folder) if needs_path else None
    if not option or (needs_path and newest is None):
        return [], {}
    if option.startswith("-"):
        return ([option.split()[0], str(newest)] if needs_path else [option]), {}
    name, _, value = option.partition("=")
    return [], {name: str(newest) if needs_path else value}


def _rates(asked: Asked, folder: Path, like: Trace | None) -> dict[str, str]:
    """Have a run with the batches of several workers step with the learning rates of those.

    So do ranks with one share, and the worker they are compared with: a schedule may follow a score
    of the weights, which are others here.
    """
    kinds = (*JOINED, MIRRORED, REPEATED)
    several = {int(fault.value or 1) for fault in asked.faults if fault.kind in kinds}
    if like is None or like.scenario.world_size not in several:
        return {}
    by_step = {update.step: update for update in reversed(like.of(Update))}
    rates = {
        step: [made.learning_rate, {**made.rates}, _constants(like, step)]
        for step, made in by_step.items()
    }
    file = folder / "rates.json"
    file.write_text(json.dumps(rates), encoding="utf-8")
    return {RATES: str(file)}


def _constants(like: Trace, step: int) -> dict[str, dict[str, Any]]:
    """Return what rank 0 stepped each group with, by the group's first tensor."""
    return {
        event.names[0]: {key: event.constants[key] for key in CHANGING if key in event.constants}
        for event in like.of(Ruled)
        if event.step <= step and not event.rank and event.names
    }


def _trace(plan: Plan, asked: Asked, folder: Path, ended: Ended, like: Trace | None) -> Trace:
    """Return one trace of all launches of a run."""
    return run_trace.of(
        folder.absolute(),
        asked,
        ended,
        like,
        unclipped=plan.can_say("clip") and UNCLIPPED not in plan.spelled.get("clip", {}),
        seeded=plan.can_say("seed"),
        says_how=plan.can_say(placeholders.RESUME) or plan.can_say("workdir"),
        arrangement=plan.arrangements.get(asked.world_size),
        starts="" if plan.can_say("world_size") or plan.most > 1 else "one",
    )


def _made_before(asked: Asked, life: int, like: Trace | None) -> int:
    """Return how many steps a life begins with: those of the last checkpoint, if it is known."""
    if not life:
        return 0
    stop = asked.stops[life - 1]
    if like is None:
        return stop
    saved = [after for after in like.traits.saved_after if after <= stop]
    return max(saved) - like.traits.saved_behind if saved else stop


def _values(asked: Asked, folder: Path, num_steps: int, num_epochs: int) -> dict[str, str]:
    """Return what stands for each placeholder in a launch of the command."""
    return {
        "world_size": str(asked.world_size),
        "seed": str(asked.seed),
        "steps": str(num_steps),
        "epochs": str(num_epochs),
        "trace_dir": str(folder),
        "workdir": str(folder / "work"),
        **{name: knob.usual for name, knob in KNOBS.items()},
        **(asked.turn.values if asked.turn else {}),
    }


def _was_told_otherwise(asked: Asked, like: Trace, recorded: Trace) -> bool:
    """Return whether a smaller {steps}, given to stop the run, changed it before the stop."""
    if not asked.stops or asked.interrupted or recorded.end.status == "failed":
        return False
    return stopped_run.differed_before(like, recorded)


def _clear(folder: Path) -> None:
    """Remove what an earlier run has left in `folder`.

    Raises UsageError if `folder` exists and was not made by an earlier run.
    """
    if (folder / OUTPUT).exists():
        shutil.rmtree(folder)
    elif folder.exists():
        raise UsageError(
            f"--trace-dir: {folder} exists and was not made by an earlier run; give another folder"
        )
