"""Launching and recording of the planned runs of a command."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any, Self

from entrenar_py.check.clauses import resume
from entrenar_py.check.clauses.knobs import KNOBS, UNCLIPPED
from entrenar_py.check.command import folders, placeholders, run_trace, warm, witnesses
from entrenar_py.check.command.launch import OUTPUT, Ended
from entrenar_py.check.command.run_plan import Plan
from entrenar_py.check.command.run_settings import Run, RunSettings
from entrenar_py.check.command.run_trace import Arranging, Beginnings, Made, first_step
from entrenar_py.check.command.witnesses import Controlling, Nudging, Shortening
from entrenar_py.check.observing import BATCHES, BATCHES_KEPT, FAULTS, RATES, STOP
from entrenar_py.check.project import commands
from entrenar_py.check.rank_files import notes
from entrenar_py.shared import process, trace
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import JOINED, MIRRORED, REPEATED, Fault, steps_of
from entrenar_py.shared.trace import Ruled, Trace, Update
from entrenar_py.shared.untrusted import printing

CHANGING = ("betas", "momentum", "weight_decay")  # constants that schedules change, like rates
SHORT_S = 15.0  # a shorter run spends most of its time waiting
_RUN = re.compile(r"\d+-workers?(?:-|$)")  # begins the name of a run
_ELSEWHERE = "the run was launched for another contract: its output is in that contract's folder\n"
_PATH = "PATH"  # ends an option that needs a path
_NEW_STORE, _SUPERVISOR = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "entrenar_py.supervise"

Likes = Mapping[RunSettings, Trace]  # completed runs that later runs resemble, the first run first
# Called before each launch, with the settings of the run and the number of runs planned after it.
Show = Callable[[RunSettings, int], None]


def forget(folder: Path) -> None:
    """Remove the traces of an earlier call from `folder`, since they may be of another script.

    A file is such a trace if it has the name of a run, and `folder` has the run's output, too.
    """
    for file in folder.glob("*.jsonl"):
        if _RUN.match(file.stem) and (folder / file.stem / OUTPUT).is_file():
            file.unlink(missing_ok=True)


def record(plan: Plan, show: Show) -> Iterator[tuple[Path, Run]]:
    """Run the command as often as `plan` requires; yield the file of each trace, and its run.

    Each run has its own folder below the plan's folder, with its output and its ranks' files. If
    the first run fails, no other run is launched, since it would fail, too. Raises UsageError if
    the command can't be started, and KeyboardInterrupt after an interrupt.
    """
    with _Ahead(plan) as ahead:
        yield from _recorded(plan, show, ahead)


def _recorded(plan: Plan, show: Show, ahead: _Ahead) -> Iterator[tuple[Path, Run]]:
    base = plan.folder
    likes: dict[RunSettings, Trace] = {}
    nudging, controls = Nudging(plan.needs), Controlling(plan.needs)
    shortening = Shortening(plan.needs)
    beginnings = Beginnings()
    arranging = Arranging(base, plan.arrangements)
    planned, first = plan.plain(), True
    while planned:
        name = next(iter(planned))
        settings = planned.pop(name)
        process.check_interrupts()
        if settings.stops and settings.unstopped not in likes:
            continue  # the run to compare it with has failed
        like = _like(settings, likes)
        if settings not in plan.made:
            show(settings, sum(other not in plan.made for other in planned.values()))
            ended = ahead.launched(name, settings, planned, likes)
            before = arranging.after(name, settings, ended)
            for file, run in _read_again(plan, before, likes, (settings, *planned.values())):
                nudging.read_again(run.settings, run.trace)
                yield file, run
            plan.made[settings] = _trace(plan, settings, base / name, ended, like)
        elif not (base / name).exists():  # `forget` looks for an output
            (base / name).mkdir(parents=True)
            (base / name / OUTPUT).write_text(_ELSEWHERE, encoding="utf-8")
        recorded = plan.made[settings]
        if like is not None and _was_told_otherwise(settings, like, recorded):
            # {steps} did more than stop the run, so the script is stopped from inside instead.
            again = name.replace("-resumed", "-interrupted")
            planned = {again: replace(settings, interrupted=True), **planned}
            continue
        if settings.option and not resume.is_telling(recorded):
            planned = {name: replace(settings, option=""), **planned}  # the option has no effect
            continue
        if witnesses.source_of(settings) and recorded.end.status == "failed":
            continue  # the script's batches contain more than was kept
        is_tried = settings.world_size not in (1, *plan.world_sizes)
        is_longer = steps_of(settings.faults) is not None and not settings.stops
        if (is_tried or is_longer) and recorded.end.status == "failed":
            continue
        recorded = beginnings.seen(name, recorded)
        base.mkdir(parents=True, exist_ok=True)  # the command may have removed it
        trace.save(recorded, base / f"{name}.jsonl")
        if first:
            if begun := first_step(recorded):
                printing.warn(
                    f"{name} began at step {begun}, not at 0: it found an earlier checkpoint, "
                    "and so do all runs. Move the checkpoint away, so that runs begin at step 0"
                )
            if recorded.end.status == "failed":
                planned.clear()
            else:
                planned |= plan.others(recorded) | plan.pairs(recorded)
                planned |= plan.wider(arranging.layout(name)) | plan.longer(recorded)
            first = False
        if settings.stops:
            planned |= plan.until_the_schedule_moves(settings, like, recorded)
        if settings.is_unstruck and recorded.end.status == "completed":
            planned = {**nudging.after(settings, recorded), **planned}
            if not settings.repeat:
                likes[settings] = recorded
        if is_longer:
            likes[settings] = recorded
            planned = {**plan.stopped(settings, recorded), **planned}
        planned |= shortening.after(settings, recorded)
        if recorded.end.status == "completed":
            planned |= controls.after(settings, recorded)
        rest = tuple(planned.values())
        file, run = base / f"{name}.jsonl", Run(settings=settings, trace=recorded, ahead=rest)
        yield file, replace(run, is_tried=is_tried)


def _read_again(
    plan: Plan,
    earlier: Sequence[Made],
    likes: dict[RunSettings, Trace],
    ahead: tuple[RunSettings, ...],
) -> Iterator[tuple[Path, Run]]:
    """Yield the runs `earlier` once more, read with what is now known about the ranks' arrangement.

    If the new reading changes the status of a run, the run keeps its earlier trace and is not
    yielded.
    """
    for name, settings, ended in earlier:
        recorded = _trace(plan, settings, plan.folder / name, ended, _like(settings, likes))
        if plan.made[settings].end.status != recorded.end.status:
            continue
        plan.made[settings] = recorded
        if settings in likes:
            likes[settings] = recorded
        trace.save(recorded, plan.folder / f"{name}.jsonl")
        yield plan.folder / f"{name}.jsonl", Run(settings=settings, trace=recorded, ahead=ahead)


class _Ahead:
    """Launches runs, each together with the next one if they don't disturb each other.

    They don't if each has its own working folder and its launcher takes a free port, if there is no
    GPU, and if the first run was short and took little memory. Nothing is launched together with
    the first run, since no other run is wanted if it fails.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._pool, self._called_off = plan, ThreadPoolExecutor(2), Event()
        self._begun: dict[RunSettings, Future[Ended]] = {}
        self._may: bool | None = None  # unknown before the first run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the runs that were begun and are no longer wanted."""
        self._called_off.set()
        self._pool.shutdown(cancel_futures=True)

    def launched(
        self, name: str, settings: RunSettings, planned: Mapping[str, RunSettings], likes: Likes
    ) -> Ended:
        """Return how the run `name` ended, and begin the next one of the `planned` runs.

        The next run waits for the end of `name` if it gets the batches of `name`. A run with stops
        also waits for the run without stops, since the checkpoints of that decide where to stop.
        """
        running = self._begun.pop(settings, None) or self._begin(name, settings, likes)
        if self._may:
            others = ((n, a) for n, a in planned.items() if a not in self._plan.made)
            for after, other in islice(others, 1):
                waits = other.stops and other.unstopped not in likes
                waits = waits or witnesses.source_of(other) == name
                if other not in self._begun and not waits:
                    self._begun[other] = self._begin(after, other, likes)
        try:
            ended = running.result()
        finally:
            process.check_interrupts()  # an interrupt ends both launches, but only this forgets it
        if self._may is None:
            self._may = self._plan.is_apart and ended.is_forked and _is_light(ended, settings)
        return ended

    def _begin(self, name: str, settings: RunSettings, likes: Likes) -> Future[Ended]:
        folder, like = (self._plan.folder / name).absolute(), _like(settings, likes)
        is_called_off = self._called_off.is_set
        return self._pool.submit(_launched, self._plan, settings, folder, like, is_called_off)


def _like(settings: RunSettings, likes: Likes) -> Trace | None:
    return likes.get(settings.unstopped) if settings.stops else next(iter(likes.values()), None)


def _is_light(ended: Ended, settings: RunSettings) -> bool:
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = 2 * (settings.world_size + 1) * ended.peak_bytes
    return ended.seconds < SHORT_S and needed < pages and not warm.GPUS.exists()


def _launched(
    plan: Plan,
    settings: RunSettings,
    folder: Path,
    like: Trace | None,
    is_called_off: Callable[[], bool],
) -> Ended:
    """Launch the command once, and again after each stop; return the end of the last launch."""
    _clear(folder)
    (folder / "work").mkdir(parents=True)
    if plan.auto:
        (folder / notes.ASKED).touch()
    ended: Ended | None = None
    with folders.own_folder(plan.source, folder / folders.FOLDER) as own:
        launched = own.launched(plan.launch) if own else plan.launch
        for life, (num_steps, num_epochs) in enumerate(plan.lengths(settings)):
            values = _values(settings, folder, num_steps, num_epochs)
            is_last = life == len(settings.stops)
            cut_off = settings.interrupted and not is_last
            made = _made_before(settings, life, like)
            stop = {STOP: f"{settings.stops[life]} from {made}"} if cut_off else {}
            closed = partial(run_trace.have_closed, folder, settings.world_size, life)
            words, variables = _resuming(settings.option, folder) if life else ([], {})
            ended = launched(
                placeholders.fill(
                    [*commands.for_workers(plan.command, settings.world_size), *words],
                    values,
                    plan.spelled,
                    resumes_in=(own.path if own else Path.cwd()) if life else None,
                ),
                folder=folder,
                variables={
                    FAULTS: json.dumps([fault.to_dict() for fault in settings.faults]),
                    **_batches(settings, folder.parent),
                    **plan.observing(settings.faults),
                    **_rates(settings, folder, like),
                    **_restarting(plan.command, settings.faults),
                    **stop,
                    **variables,
                },
                deadline_s=plan.deadline_s,
                is_over=closed,
                is_called_off=is_called_off,
            )
            if ended.code is None and not closed():
                break  # otherwise it hung only after training, and the next launch can follow
    assert ended is not None, "it was launched"
    return ended


def _batches(settings: RunSettings, folder: Path) -> dict[str, str]:
    if source := witnesses.source_of(settings):
        return {BATCHES: str(folder / source)}
    return {BATCHES: BATCHES_KEPT} if witnesses.are_kept(settings) else {}


def _restarting(command: Sequence[str], faults: Sequence[Fault]) -> dict[str, str]:
    """Return a variable with which torchrun gives the ranks that it starts again a new store.

    They may otherwise find the addresses of the ranks before them there, and never connect
    (pytorch/pytorch#135712). Supervised ranks are no restarts of torchrun's, and meet in its store.
    """
    ends_ranks = any(fault.kind.startswith(("leave", "non_finite_")) for fault in faults)
    is_needed = ends_ranks and _SUPERVISOR not in command
    return {_NEW_STORE: os.environ.get(_NEW_STORE, "1")} if is_needed else {}


def _resuming(option: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the words and variables that make a script resume from its newest checkpoint.

    Both are empty if there is no `option`, or if it needs a path and no checkpoint is known.
    """
    needs_path = option.endswith(_PATH)
    newest = notes.newest_checkpoint(folder) if needs_path else None
    if not option or (needs_path and newest is None):
        return [], {}
    if option.startswith("-"):
        return ([option.split()[0], str(newest)] if needs_path else [option]), {}
    name, _, value = option.partition("=")
    return [], {name: str(newest) if needs_path else value}


def _rates(settings: RunSettings, folder: Path, like: Trace | None) -> dict[str, str]:
    """Return a variable that makes a run use the learning rates of `like`; {} if it shouldn't.

    It should if a fault gives it the batches or equal shares of as many workers as `like` has,
    since it is then compared with `like`. Otherwise a schedule that follows a score of the weights
    could have other rates, as scores differ between these runs.
    """
    kinds = (*JOINED, MIRRORED, REPEATED)
    several = {int(fault.value or 1) for fault in settings.faults if fault.kind in kinds}
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
    return {
        event.names[0]: {key: event.constants[key] for key in CHANGING if key in event.constants}
        for event in like.of(Ruled)
        if event.step <= step and not event.rank and event.names
    }


def _trace(
    plan: Plan, settings: RunSettings, folder: Path, ended: Ended, like: Trace | None
) -> Trace:
    """Return the trace of all launches of a run together."""
    return run_trace.of(
        folder.absolute(),
        settings,
        ended,
        like,
        command=plan.command,
        unclipped=plan.can_say("clip") and UNCLIPPED not in plan.spelled.get("clip", {}),
        seeded=plan.can_say("seed"),
        says_how=plan.can_say(placeholders.RESUME) or plan.can_say("workdir"),
        arrangement=plan.arrangements.get(settings.world_size),
        starts="" if plan.can_say("world_size") or plan.most > 1 else "one",
    )


def _made_before(settings: RunSettings, life: int, like: Trace | None) -> int:
    """Return how many steps the first weights of a launch have taken.

    These are the steps before the last checkpoint, or before the stop if none is known.
    """
    if not life:
        return 0
    stop = settings.stops[life - 1]
    if like is None:
        return stop
    saved = [after for after in like.traits.saved_after if after <= stop]
    return max(saved) - like.traits.saved_behind if saved else stop


def _values(settings: RunSettings, folder: Path, num_steps: int, num_epochs: int) -> dict[str, str]:
    """Return name of a placeholder -> what is filled in for it in a launch of the command."""
    return {
        "world_size": str(settings.world_size),
        "seed": str(settings.seed),
        "steps": str(num_steps),
        "epochs": str(num_epochs),
        "trace_dir": str(folder),
        "workdir": str(folder / "work"),
        **{name: knob.usual for name, knob in KNOBS.items()},
        **(settings.turn.values if settings.turn else {}),
    }


def _was_told_otherwise(settings: RunSettings, like: Trace, recorded: Trace) -> bool:
    """Return whether the smaller {steps} that stops a run changed it before the stop."""
    if not settings.stops or settings.interrupted or recorded.end.status == "failed":
        return False
    return resume.differed_before(like, recorded)


def _clear(folder: Path) -> None:
    if (folder / OUTPUT).exists():
        shutil.rmtree(folder)
    elif folder.exists():
        raise UsageError(
            f"--trace-dir: {folder} exists and was not made by an earlier run; give another folder"
        )
