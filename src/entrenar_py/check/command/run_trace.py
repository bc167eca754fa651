"""The trace of a run of a command: what its ranks recorded, and how and why the run ended.

The exit code alone is not enough: after training, a process group may fail or hang while it is shut
down. A run that hung counts as completed if all ranks recorded the end of training. A run that
failed counts as completed if one rank recorded that end and all ranks took the same number of
steps, unless the script seems to have ended itself early. A script that catches its error, and ends
with `sys.exit(1)`, looks to its rank as if training had ended.

A launcher adds lines of its own to the script's output: its log, its own traceback, advice. When
one rank has failed, the other ranks fail, too, since they wait for it in vain. Their errors are not
the cause.

Only the run on one worker shows which pieces of the model the ranks hold. It is launched after the
others, and the files of these are then read again.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from entrenar_py.check.causes import accumulation
from entrenar_py.check.clauses import local_sgd
from entrenar_py.check.clauses.knobs import KNOBS
from entrenar_py.check.command import folders, launch, warm
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.command.run_settings import RunSettings
from entrenar_py.check.evidence import run_names
from entrenar_py.check.project import commands
from entrenar_py.check.rank_files import arrangements, assembly, notes, observed_run, rank_file
from entrenar_py.check.rank_files.arrangements import Arrangement
from entrenar_py.check.rank_files.assembly import LastLives
from entrenar_py.check.rank_files.layout import Layout
from entrenar_py.check.rank_files.rank_file import SUFFIX, RankTrace
from entrenar_py.shared import systems, trace
from entrenar_py.shared.faults import JOINED, LONGER
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import End, Event, Shard, Start, Tensors, Trace, Traits, Update
from entrenar_py.shared.untrusted import escaping

_Key = frozenset[tuple[str, str]]  # names and digests of all weights of a rank


@dataclass
class Beginnings:
    """The weights that runs began with, and the run and step that reached each set of weights."""

    _begun: set[_Key] = field(default_factory=set)
    _reached: dict[_Key, tuple[str, int]] = field(default_factory=dict)

    def seen(self, name: str, trace: Trace) -> Trace:
        """Return `trace`, changed to `failed` if its run began with an earlier run's weights.

        Such a run found a checkpoint of the earlier run, and can't be compared with any run.
        """
        known = [self._reached[key] for key in _first_weights(trace) if key in self._reached]
        others = [place for place in known if place[0] != name]
        self._see(name, trace)
        if not others:
            return trace
        other, step = others[0]
        reason = (
            f"it began with the weights that {other} had after step {step}: it found a checkpoint "
            "of that run. Write checkpoints below the folder that the command runs in, "
            "or below {workdir}"
        )
        return replace(trace, events=(*trace.events[:-1], End(status="failed", reason=reason)))

    def _see(self, name: str, trace: Trace) -> None:
        self._begun.update(_first_weights(trace))
        for update in trace.of(Update):
            self._reached.setdefault(_weights_key(update.weights), (name, update.step))
        for key in self._begun.intersection(self._reached):
            del self._reached[key]  # weights that stay, or come back, don't identify a run


def first_step(trace: Trace) -> int:
    """Return the number of steps before the run's first step, according to its first start."""
    return min((start.step for start in trace.of(Start)), default=0)


def _first_weights(trace: Trace) -> list[_Key]:
    first: dict[int, Start] = {}
    for start in trace.of(Start):
        first.setdefault(start.rank, start)
    return [_weights_key(start.weights) for start in first.values() if start.weights]


def _weights_key(weights: Tensors) -> _Key:
    return frozenset((name, record.digest) for name, record in weights.items())


Made = tuple[str, RunSettings, Ended]


@dataclass
class Arranging:
    """The runs of a command so far; each has its ranks' files in a folder below `folder`.

    `known` maps numbers of workers to the arrangement of the ranks. `after` adds to it.
    """

    folder: Path
    known: MutableMapping[int, Arrangement]
    _made: list[Made] = field(default_factory=list)
    _plain: dict[int, str] = field(default_factory=dict)  # number of workers -> plain run
    _seen: set[int] = field(default_factory=set)

    def layout(self, name: str) -> Layout | None:
        """Return the layout that a rank of the run `name` declares or shows, or None."""
        files = sorted((self.folder / name).glob(f"*{SUFFIX}"))
        return rank_file.load(files[0]).layout if files else None

    def after(self, name: str, settings: RunSettings, ended: Ended) -> list[Made]:
        """Return the earlier runs that must be read again, now that the run `name` has ended."""
        before = [*self._made]
        self._made.append((name, settings, ended))
        if settings.is_plain and not settings.repeat:
            self._plain.setdefault(settings.world_size, name)
        if 1 not in self._plain or self._plain.keys() <= {1, *self._seen}:
            return []
        alone, _ = assembly.load(self.folder / self._plain[1])
        fresh: set[int] = set()
        for size in sorted(self._plain.keys() - {1, *self._seen}):
            self._seen.add(size)
            ranks, _ = assembly.load(self.folder / self._plain[size])
            arrangement = arrangements.shown(ranks, alone)
            if arrangement is not None:
                self.known[size] = arrangement
                fresh.add(size)
                if (one := arrangement.alone()) is not None:
                    self.known[1] = one
                    fresh.add(1)
        return [made for made in before if made[1].world_size in fresh]


READ_BYTES_MAX = 2**18
_BEGINS = "Traceback (most recent call last):"
_RANK = re.compile(r"\[(?:rank)?\d+\]:\s?|\[default\d+\]:\s?")  # the prefix of a rank's lines
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?::(?:\s.*)?)?")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in .*')
# Stack frames in which a checkpoint is read, or loaded into a model or an optimizer.
_LOADS = re.compile(
    r'torch/serialization\.py", line \d+, in \w*load$|/state_dict_loader\.py"|, in load_state_dict$'
)
_NOT_THE_SCRIPT = ("/site-packages/", "/dist-packages/", "/lib/python", "/entrenar_py/", "<")
# Exceptions that launchers raise when a worker has failed.
_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException")
# Matches the beginning of a line in torchrun's log.
_LOG = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d\S* .*\.py:\d+\] ")
# Matches errors of a rank that lost its peers.
_OF_PEERS = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset|refused)|Broken pipe|wait ?timeout"
    r"|[Tt]imed out waiting|communicator was aborted|DistNetworkError"
    r"|[Ss]ocket [Tt]imeout"
)


@dataclass(frozen=True)
class _Error:
    """The last line of a traceback, and its innermost place in the script, or "".

    `loads` is true if the error was raised while a checkpoint was loaded.
    """

    line: str
    place: str
    loads: bool = False

    @property
    def of_a_launcher(self) -> bool:
        return self.line.partition(":")[0].rpartition(".")[2] in _OF_LAUNCHERS

    def __str__(self) -> str:
        return f"{self.line} ({self.place})" if self.place else self.line


def script_error(output: Path) -> str:
    """Return the script's last error in the file `output`, with its place; "" if it has none.

    Errors of launchers are skipped. Errors of ranks that lost their peers are skipped if there is
    any other error.
    """
    error = _last(output)
    return "" if error is None else str(error)


def of_loading(output: Path) -> str:
    """Return `script_error(output)` if the script was loading a checkpoint, else ""."""
    error = _last(output)
    return str(error) if error is not None and error.loads else ""


def _last(output: Path) -> _Error | None:
    errors = [one for one in _errors(_output_lines(output)) if not one.of_a_launcher]
    causes = [one for one in errors if not is_of_peers(one.line)]
    return next(reversed(causes or errors), None)


def is_of_peers(error: str) -> bool:
    """Return whether a rank has this error because another rank failed."""
    return bool(_OF_PEERS.search(error))


def last_printed(output: Path, tail: Sequence[str]) -> str:
    """Return the last line that the script printed to `output`; "" if there is none.

    If `output` is empty or can't be read, `tail` is used. The launcher's lines are skipped: its
    log, its own traceback, and everything after that.
    """
    lines = _output_lines(output) or [*tail]
    words = [line for line in _before_the_launcher(lines) if any(map(str.isalnum, line))]
    return words[-1].strip() if words else ""


def _output_lines(output: Path) -> list[str]:
    """Return the last lines of the file, without the prefixes that a launcher adds."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - READ_BYTES_MAX))
            text = file.read(READ_BYTES_MAX).decode(errors="replace")
            text = _COLOUR.sub("", text)
    except OSError:
        return []
    return [
        _RANK.sub("", line, count=1) if _RANK.match(line) else line for line in text.splitlines()
    ]


def _errors(lines: Sequence[str]) -> Iterator[_Error]:
    """Yield the error at the end of each traceback."""
    within, place, loads = False, "", False
    for printed in lines:
        line = printed.rstrip()
        if line == _BEGINS:
            within, place, loads = True, "", False
        elif within and (frame := _FRAME.fullmatch(line)):
            loads |= bool(_LOADS.search(line))
            if not any(part in frame["file"] for part in _NOT_THE_SCRIPT):
                place = f"{Path(frame['file']).name}:{frame['line']}"
        elif within and _ERROR.fullmatch(line):
            within = False
            yield _Error(line, place, loads)


def _before_the_launcher(lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        if line.rstrip() == _BEGINS:
            following = next(_errors(lines[number:]), None)
            if following is not None and following.of_a_launcher:
                return
        if not _LOG.match(line):
            yield line


LINE = "obs = entrenar_py.observe(model, optimizer, sampler=loader)"

# A report names the run by the folder of the output.
NOT_RESTARTED = (
    "the launcher restarted no worker, or none that recorded anything: give "
    "torchrun --max-restarts=1, and continue from a checkpoint in {workdir}; "
    "or exclude the clause"
)


def ending(
    ranks: Sequence[RankTrace],
    events: Sequence[Event],
    settings: RunSettings,
    ended: Ended,
    problems: Sequence[str],
    like: trace.Trace | None = None,
    command: Sequence[str] = (),
) -> tuple[str, str]:
    """Return the status of the run of `command` and the reason for it.

    The status is `completed`, `halted` (a planted value stopped it) or `failed`. `problems` are
    problems with the ranks' files. `like` is a completed run that the run resembles, if there is
    one.
    """
    last = LastLives(ranks, events)
    error = script_error(ended.output) if ended.code != 0 else ""
    ended_by = f"{ended.how}: {_last_words(last, error, ended, settings, command)}"
    how = f"{ended_by} (its output is in {_shown_path(ended.output)})"
    folder = ended.output.parent
    if not folder.is_dir():
        why = f"the folder of its records, {folder}, was removed while it ran"
        return "failed", f"{why}; {ended_by}"
    if not ranks and problems:
        return "failed", f"{ended.how}, and the records of its ranks are damaged: {problems[0]}"
    if ended.code is None and last.closed != set(range(settings.world_size)):
        return (
            "failed",
            f"{ended.how}: {_hanging(last, settings, ended)} (output: {_shown_path(ended.output)})",
        )
    if not ranks:
        return "failed", _nothing_recorded(ended, error, how)
    world_sizes = {int(rank.header["world_size"]) for rank in last.ranks.values()}
    if world_sizes != {settings.world_size}:
        return "failed", _of_another_size(ranks, world_sizes, settings, command)
    status, reason = _of_ranks(last, settings, ended, ended_by, how)
    if status == "completed" and _gave_up(last, settings, ended, error, like):
        return "failed", how
    if status == "failed" and (_skip_apart(last, events) or _is_uneven(last, events)):
        return "completed", ""  # the run was ended when only some ranks had taken all steps
    return ("failed", problems[0]) if problems and status == "completed" else (status, reason)


def _skip_apart(last: LastLives, events: Iterable[Event]) -> bool:
    """Return whether the ranks without enough steps only dropped batches that others trained on.

    These ranks took fewer steps than the ranks that were ended after their last step, but made as
    many passes. Ranks with fewer batches make fewer passes, and ranks that accumulate more batches
    per step make more: neither is meant here.
    """
    limited = {rank for rank, file in last.ranks.items() if file.is_limited}
    others = last.ranks.keys() - limited
    passes = Counter(event.rank for event in events if isinstance(event, Shard))
    if not limited or not others:
        return False
    steps = max(last.num_steps.get(rank, 0) for rank in limited)
    most = max(passes[rank] for rank in limited)
    return all(
        last.num_steps.get(rank, 0) < steps <= passes[rank] and abs(passes[rank] - most) <= 1
        for rank in others
    )


def _is_uneven(last: LastLives, events: Iterable[Event]) -> bool:
    """Return whether ranks with fewer batches failed only when those with more were ended.

    They wait for the others at the end of an epoch (torch's `Join`), after all their own steps.
    Return False if samples are known by their content alone, since the epoch of a step is then
    unknown.
    """
    if any(file.header.get("samples", "index") != "index" for file in last.ranks.values()):
        return False
    limited = {rank for rank, file in last.ranks.items() if file.is_limited}
    passes = Counter(event.rank for event in events if isinstance(event, Shard))
    others = last.ranks.keys() - limited
    return bool(limited and others) and all(
        is_of_peers(last.ranks[rank].problem)
        and 0 < last.num_steps.get(rank, 0) < min(last.num_steps.get(one, 0) for one in limited)
        and 0 < passes[rank] < min(passes[one] for one in limited)
        for rank in others
    )


def by_all(ranks: Sequence[RankTrace], events: Sequence[Event]) -> Sequence[Event]:
    """Return the events before the first step that some ranks lack, or took in another epoch.

    Return all events unless ranks with fewer batches waited for the others (torch's `Join`).
    """
    if not _is_uneven(LastLives(ranks, events), events):
        return events
    epochs: dict[int, dict[int, int]] = defaultdict(dict)  # step -> rank -> epoch
    for event in events:
        if isinstance(event, Shard):
            epochs[event.step][event.rank] = event.epoch
    size = len({rank.rank for rank in ranks})
    apart = (s for s, of in epochs.items() if len(of) < size or len({*of.values()}) > 1)
    end = min(apart, default=0)
    return [event for event in events if (getattr(event, "step", None) or 0) < end]


def unresumed(
    ranks: Sequence[RankTrace], settings: RunSettings, ended: Ended, read_only: str
) -> str:
    """Return why a run that was stopped from inside failed to resume; "" if it didn't fail.

    It failed if the last launch read a checkpoint, but ended with an error while loading it, or
    without a step. `read_only` is the line that loaded weights in a process that trained nothing.
    Return "" for a run that {steps} stopped, since it may rightly end or refuse the next launch.
    """
    stops = settings.stops if settings.interrupted else ()
    lives = len({rank.life for rank in ranks})
    if not 0 < lives <= len(stops):
        return ""
    stop, error = stops[lives - 1], of_loading(ended.output)
    if ended.code and error:
        why = escaping.shortened(error.replace(_copied(ended), ""))
        return f"after the stop before step {stop} the script fails to load its checkpoint: {why}"
    if ended.code == 0 and read_only:
        return (
            f"after the stop before step {stop} the script read a checkpoint ({read_only}), and "
            "ended without taking a step"
        )
    return ""


def _of_another_size(
    ranks: Sequence[RankTrace],
    sizes: Iterable[int],
    settings: RunSettings,
    command: Sequence[str],
) -> str:
    """Return why a run failed that ran with a different number of workers than planned."""
    first = sum(rank.header["rank"] == 0 for rank in ranks)
    if first > 1 and first % settings.world_size == 0:
        return (
            f"{first} processes ran as rank 0: if RANK counts within a part of the job (a "
            "replica group), set ENTRENAR_RANK and ENTRENAR_WORLD_SIZE in each process to the "
            "rank and world size in the whole job"
        )
    ran = ", ".join(map(str, sorted(sizes)))
    return (
        f"it was launched for {settings.world_size} workers and ran with {ran}: "
        f"{commands.sized(command, max(sizes))}"
    )


def _of_ranks(
    last: LastLives, settings: RunSettings, ended: Ended, ended_by: str, how: str
) -> tuple[str, str]:
    """Return the status and reason of a run with records of at least one rank."""
    num_lives = 1 + max(rank.life for rank in last.ranks.values())
    is_earlier = ended.code != 0 and num_lives <= len(settings.stops)  # than the last launch
    if ended.code in (0, None) and not last.problem and not is_earlier:
        return "completed", ""
    if last.met_a_planted_value:
        return "halted", ended_by
    if "leave" in last.struck and not any(rank.life for rank in last.ranks.values()):
        return "failed", NOT_RESTARTED
    if "leave" in last.struck:
        return "failed", f"after the restart of workers: {how}"
    is_told = ended.code and settings.interrupted and of_loading(ended.output)
    if is_earlier and not is_told:  # otherwise `unresumed` gives the reason
        return "failed", f"after the stop before step {settings.stops[num_lives - 1]}: {how}"
    if last.all_made_the_same(settings.world_size) and not last.problem:
        return "completed", ""
    limited = sorted(rank for rank, file in last.ranks.items() if file.is_limited)
    if limited and len(limited) < settings.world_size:
        steps = ", ".join(f"rank {rank} {num}" for rank, num in sorted(last.num_steps.items()))
        return "failed", (
            f"rank {limited[0]} was ended after its last step (--steps) while others continued; "
            f"steps made: {steps}. If ranks make different numbers of steps, put {{steps}} "
            "into the command, and let the script end after that many"
        )
    return "failed", how


def _gave_up(
    last: LastLives, settings: RunSettings, ended: Ended, error: str, like: trace.Trace | None
) -> bool:
    """Return whether the script ended itself before it was done, though its records look whole.

    It did if it failed after fewer steps than `like`, a run that should take as many. If there is
    no such run, it did if it printed an `error` of its own and ended itself.
    """
    num_lives = 1 + max(rank.life for rank in last.ranks.values())
    is_ours = any(rank.is_limited for rank in last.ranks.values())
    if not ended.code or is_ours or num_lives <= len(settings.stops):
        return False  # the last launch recorded nothing in the last case: `unresumed` says why
    is_alike = not settings.faults and settings.turn is None
    if like is not None and is_alike and like.scenario.world_size == settings.world_size:
        num_steps = 1 + max((update.step for update in like.of(Update)), default=-1)
        return max(last.num_steps.values(), default=0) < num_steps
    return bool(error) and not is_of_peers(error) and not _was_aborted(ended)


# The exit code of a rank that failed, in torchrun's summary.
_EXIT_CODE = re.compile(r"\s*exitcode\s*: (-?\d+) \(pid: \d+\)")
_OF_A_SHELL = 128  # plus the number of a signal: a shell's exit code, or mpirun's


def _was_aborted(ended: Ended) -> bool:
    """Return whether signals ended all ranks that failed.

    When a process group is taken down, gloo sometimes aborts its process.
    """
    lines = map(_EXIT_CODE.match, _output_lines(ended.output))
    codes = [int(line[1]) for line in lines if line] or [ended.code or 0]
    return all(code < 0 or code > _OF_A_SHELL for code in codes)


_OF_GPUS = re.compile(
    r"NCCL built in|_cuda_setDevice|CUDA GPUs|not compiled with CUDA|NVIDIA driver"
)
_TOO_FEW_GPUS = re.compile(r"invalid device ordinal|Duplicate GPU detected")
# Matches errors of a script that was started without torchrun's variables.
_UNLAUNCHED = re.compile(
    r"(?:KeyError: '|environment variable )(?:RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)\b"
)
_NO_GPU = "there is no GPU here: give the options with which the script trains on CPUs, with gloo"


def _last_words(
    last: LastLives, error: str, ended: Ended, settings: RunSettings, command: Sequence[str]
) -> str:
    printed = last_printed(ended.output, ended.tail)
    words = [one for one in (error, last.problem, printed) if one]
    causes = [one for one in words if not is_of_peers(one)]
    cause = next(iter(causes or words), "it printed nothing")
    told = escaping.shortened(cause.replace(_copied(ended), ""))
    advice = _advice(told, ended, settings, command)
    return f"{told}; {advice}" if advice else told


def _advice(error: str, ended: Ended, settings: RunSettings, command: Sequence[str]) -> str:
    """Return what to do about `error`; "" if that isn't known."""
    if _UNLAUNCHED.search(error) and commands.starts_one(command):
        return f"start it by torchrun: entrenar-check -- {commands.by_torchrun(command)}"
    if not warm.GPUS.exists():
        return _NO_GPU if _OF_GPUS.search(error) else ""
    most = settings.world_size
    # NCCL's own words follow the last line of the traceback.
    if most > 1 and any(map(_TOO_FEW_GPUS.search, (error, *_output_lines(ended.output)))):
        return f"{most} ranks need {most} GPUs: --world-size 1, or the script's options for CPUs"
    return ""


def _copied(ended: Ended) -> str:
    # The script ran in a copy of the user's folder, which messages shall not name.
    return str(ended.output.parent / folders.FOLDER)


def _shown_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _nothing_recorded(ended: Ended, error: str, how: str) -> str:
    """Return why no rank wrote a file, and what to do about it."""
    folder = ended.output.parent
    if error and not (notes.problems(folder) or notes.problems(folder, notes.UNSEEN)):
        return f"nothing was recorded before it failed: {how}"
    if why := notes.why_nothing(folder):
        parts = (how, why) if ended.code else (why, how)  # a failure comes first
        return f"nothing was recorded: {'; '.join(parts)}"
    if ended.code:  # the reason of a failure comes first: most such scripts have the line
        return f"nothing was recorded: {how}; check that the script that trains calls `{LINE}`"
    return f"nothing was recorded: add `{LINE}` to the script; {how}"


def _hanging(last: LastLives, settings: RunSettings, ended: Ended) -> str:
    """Return how many steps each rank took, and where in the script it stands."""
    where = {
        rank: replace(one, file=_shown_path(Path(one.file.removeprefix(_copied(ended)))))
        for rank, one in launch.places_of_ranks(ended.output.parent).items()
    }
    slow = "; if it is only slow (a download, long steps), give it more time: --deadline S"
    if not last.num_steps and not where:
        return f"no rank had begun{slow}"
    steps = ", ".join(f"rank {rank} {num}" for rank, num in sorted(last.num_steps.items()))
    stood = launch.places_in_words(where, settings.world_size)
    num_steps = max(last.num_steps.values(), default=0)
    may_be_slow = not num_steps or ended.quiet_s <= ended.seconds / (1 + num_steps)
    return f"steps made: {steps or 'none'}; {stood}{slow if may_be_slow else ''}"


def of(
    folder: Path,
    settings: RunSettings,
    ended: Ended,
    like: trace.Trace | None,
    *,
    command: Sequence[str],
    unclipped: bool,
    seeded: bool,
    starts: str,
    says_how: bool,
    arrangement: Arrangement | None = None,
) -> trace.Trace:
    """Return the trace of the run that has its ranks' files in `folder`.

    If the ranks hold no DTensors, `arrangement` says how they share the model.

    If the run ended too early to show its number of steps or its data, these are taken from `like`,
    a run without faults or stops.

    - `unclipped`: the command got a clipping norm that clips nothing.
    - `seeded`: the command got its seed.
    - `starts`: the value of the trait `starts`.
    - `says_how`: the command has a way to resume, so that the script is expected to resume.
    """
    ranks, problems = assembly.load(folder)
    if arrangement is not None and not any(rank.pieces for rank in ranks):
        ranks = arrangement.of(ranks)
    events = assembly.ordered(ranks)
    common = by_all(ranks, events)
    scenario, traits = _scenario(ranks, common, settings, like, unclipped=unclipped)
    saved = notes.saved(folder)
    if says_how:
        saved = replace(saved, loads_late=False, resumes=True)
    is_cut = any(rank.is_limited for rank in ranks)
    traits = replace(traits, seeded=seeded, starts=starts, **saved.traits(is_cut=is_cut))
    how = ending(ranks, events, settings, ended, problems, like, command)
    recorded = observed_run.trace_of(ranks, common, scenario, traits, how)
    if ended.code and how[0] == "completed" and not (is_cut or _was_aborted(ended)):
        words = _last_words(
            LastLives(ranks, events), script_error(ended.output), ended, settings, command
        )
        exited = {**recorded.environment, "ended with": f"{ended.how}: {words}"}
        recorded = replace(recorded, environment=exited)
    if ended.num_left:
        left = f"{ended.num_left} process{'' if ended.num_left == 1 else 'es'}"
        killed = {**recorded.environment, "killed": f"{left} that it left running"}
        recorded = replace(recorded, environment=killed)
    if is_cut:
        where = next((rank.limited_where for rank in ranks if rank.limited_where), "")
        where = where or "after its steps (--auto, no {steps} or {epochs})"
        ended_by = {**recorded.environment, "ended": f"by entrenar-check {where}"}
        recorded = replace(recorded, environment=ended_by)
    if settings.option:
        recorded = replace(
            recorded, environment={**recorded.environment, "resumed_by": settings.option}
        )
    if why := unresumed(ranks, settings, ended, saved.read_only):
        recorded = replace(recorded, environment={**recorded.environment, "unresumed": why})
    return _with_its_faults(local_sgd.seen(accumulation.seen_through(recorded)))


def have_closed(folder: Path, world_size: int, life: int) -> bool:
    """Return whether all ranks have recorded that training ended without an error.

    Each rank must have recorded it in the life (launch) number `life`, from 0, or in a later life.
    """
    last = {
        path.name.partition("-")[0]: path for path in sorted(folder.glob(f"[0-9]*-[0-9]*{SUFFIX}"))
    }
    closed = [path for path in last.values() if rank_file.life_of(path) >= life]
    return len(closed) == world_size and all(map(rank_file.is_closed, closed))


def _with_its_faults(recorded: trace.Trace) -> trace.Trace:
    """Return the trace, changed to `failed` if a planted fault never struck."""
    fault = systems.missed(recorded) if recorded.end.status == "completed" else None
    if fault is None:
        return recorded
    reason = (
        f"the planned fault {fault.kind} (rank {fault.rank}, step {fault.step}) never struck: "
        "the rank has no gradient in that step, or does not make the step"
    )
    end = trace.End(status="failed", reason=reason)
    return replace(recorded, events=(*recorded.events[:-1], end))


def _scenario(
    ranks: Sequence[RankTrace],
    events: Sequence[Event],
    settings: RunSettings,
    like: trace.Trace | None,
    *,
    unclipped: bool,
) -> tuple[Scenario, Traits]:
    """Return scenario and traits as the ranks' files show them; from `like` if they don't."""
    # Whether one worker merged batches must be observed, since a script may split its batches
    # itself.
    is_shown = any(fault.kind in (*JOINED, LONGER) for fault in settings.faults)
    disturbed = (settings.faults and not is_shown) or settings.stops or settings.repeat
    if like is not None and (disturbed or not any(isinstance(event, Update) for event in events)):
        traits = like.traits
        scenario = like.scenario.with_(
            world_size=settings.world_size,
            num_shards=max(like.scenario.num_shards, settings.world_size),
            faults=settings.faults,
            stops=settings.stops,
        )
    else:
        scenario, traits = observed_run.scenario_of(ranks, events, settings.world_size)
        if like is not None:  # the intended rate; a check reports a run with another one
            scenario = scenario.with_(learning_rate=like.scenario.learning_rate)
        if is_shown:
            scenario = scenario.with_(faults=settings.faults)
    scenario = scenario.with_(seed=settings.seed, repeat=settings.repeat)
    turn = settings.turn
    if unclipped:
        traits = _as_told_to_clip(traits, settings)
    if turn is None or like is None or settings.stops:
        return scenario, traits
    usual = KNOBS[turn.knob].usual
    turned = run_names.with_turned(
        scenario, knob=turn.knob, value=turn.value, usual=usual, beside=turn.beside
    )
    return turned, traits


def _as_told_to_clip(traits: Traits, settings: RunSettings) -> Traits:
    """Return the traits of a run with a command that passes its clipping norm as {clip}.

    A norm that the script declares is dropped if it differs, since the script clips to {clip}.
    """
    turn = settings.turn
    if not (turn and turn.knob == "clip"):
        traits = replace(traits, clipping="told")
    told = (turn.values if turn else {}).get("clip", KNOBS["clip"].usual)
    declared = traits.clip_norm
    keeps = declared is not None and math.isclose(declared, float(told), rel_tol=1e-6)
    return traits if keeps else replace(traits, clip_norm=None)
