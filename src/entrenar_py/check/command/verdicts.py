"""Judge the clauses while a command's runs are made: each as soon as no later run can change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py.check.command import asked, judging
from entrenar_py.check.command.runs import Run
from entrenar_py.check.harness.judgement import Listener, ignore
from entrenar_py.check.harness.plan import Task
from entrenar_py.check.reports.report import Entry
from entrenar_py.shared.verdict import Verdict


def as_known(
    tasks: Sequence[Task],
    recorded: Iterable[tuple[Path, Run]],
    runs: MutableMapping[Path, Run],
    *,
    on_judged: Listener = ignore,
) -> Iterator[Entry]:
    """Yield an entry per task that applies, and add each recorded run to `runs`, by its file.

    A clause is judged once all runs that it needs were made. If a run falsifies it earlier, it has
    an entry at once. At the end it has another, of all its runs, which replaces the first. A run
    that is only tried is dropped if it falsifies nothing: it may lack what others have. After an
    interrupt the clauses that are falsified by then have an entry, and KeyboardInterrupt is raised.
    """
    waiting = _Waiting([task for task in tasks if task.check is not None])
    yield from judging.judge([task for task in tasks if task.check is None], runs)
    try:
        for file, run in recorded:
            runs[file] = run
            if run.is_tried and not waiting.is_broken_by(runs, file):
                del runs[file]
                file.unlink(missing_ok=True)
                yield from judging.judge(waiting.decided(run), runs, on_judged=on_judged)
                continue
            yield from judging.judge(waiting.decided(run), runs, on_judged=on_judged)
            yield from waiting.broken(runs, file)
    except KeyboardInterrupt:  # only what is falsified: the rest needs all runs
        known = judging.judge(waiting.tasks, runs, on_judged=on_judged)
        yield from (entry for entry in known if entry.verdict is Verdict.FALSIFIED)
        raise
    yield from judging.judge(waiting.tasks, runs, on_judged=on_judged)


@dataclass
class _Waiting:
    """The tasks that are not decided yet; `told` are the ids of those that broke."""

    tasks: list[Task]
    told: set[str] = field(default_factory=set)

    def decided(self, run: Run) -> list[Task]:
        """Return, and no longer keep, the tasks that no run after `run` can change."""
        done = [task for task in self.tasks if not _is_awaited(task, run)]
        self.tasks = [task for task in self.tasks if task not in done]
        return done

    def is_broken_by(self, runs: Mapping[Path, Run], file: Path) -> bool:
        """Return whether the run in `file`, by itself or beside others, falsifies a task."""
        entries = judging.judge(self.tasks, runs, having=file)
        return any(entry.verdict is Verdict.FALSIFIED for entry in entries)

    def broken(self, runs: MutableMapping[Path, Run], file: Path) -> Iterator[Entry]:
        """Yield an entry for each task that the run in `file` has falsified, the first time.

        Runs on which it depends whether others may be compared are made first: the plain ones, and
        a nudged one.
        """
        if any(ahead.is_witness for ahead in runs[file].ahead):
            return
        for task in self.tasks:
            if task.invariant.id not in self.told:
                for entry in judging.judge([task], runs, having=file):
                    if entry.verdict is Verdict.FALSIFIED:
                        self.told.add(task.invariant.id)
                        yield entry


def _is_awaited(task: Task, run: Run) -> bool:
    """Return whether a later run is judged by the task's check, or is a witness for others."""
    return task.check is not None and any(
        ahead.is_witness or asked.judges(task.check, ahead) for ahead in run.ahead
    )
