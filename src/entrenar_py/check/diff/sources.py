"""The source of a difference between two runs of the same command: a statement, and its kind.

Both runs have an event for each statement (`rank_files.line_file`). A value that differs comes from
the values that its statement uses, if one of these differs, and otherwise the statement is where it
began. So each differing value has an origin, and the values that the first differing border used
have the origin that matters. Others, such as the time that a script prints, do not reach it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from entrenar_py.check.diff.operations import Culprit
from entrenar_py.check.observing import statements
from entrenar_py.check.observing.statements import Statement
from entrenar_py.check.rank_files import border_file, line_file
from entrenar_py.check.rank_files.border_file import Border
from entrenar_py.check.rank_files.line_file import Event

# Kinds of sources, and how a report calls them.
GENERATOR, HASH, LISTING, CLOCK, ENTROPY = "generator", "hash", "listing", "clock", "entropy"
NAMES = "names"
PROCESS, MEMORY, WORKERS, THREADS, FILE = "process", "memory", "workers", "threads", "file"
ENVIRONMENT, ARRIVAL, WAITING, OPERATION = "environment", "arrival", "waiting", "operation"
WORDS = {
    GENERATOR: "a generator that nothing has seeded",
    HASH: "an order or a number that follows from hashes (strings: PYTHONHASHSEED; objects: their "
    "addresses)",
    LISTING: "the order in which a folder lists its files",
    CLOCK: "the time",
    ENTROPY: "random bits of the system",
    NAMES: "the name of a temporary file or folder",
    PROCESS: "a number of the process or thread",
    MEMORY: "memory that nothing has written to",
    WORKERS: "workers of a loader: their seeds or their order",
    THREADS: "the order in which threads or processes are done",
    FILE: "a file that has changed",
    ENVIRONMENT: "the environment or the state of the machine",
    ARRIVAL: "the order in which messages of ranks arrive",
    WAITING: "a collective that was not waited for",
    OPERATION: "an operation that adds in no fixed order",
}
# By what a statement calls. The first kinds begin there, whatever else it uses.
_BEGINS = (
    (THREADS, {"as_completed", "imap_unordered", "get_nowait"}),
    (
        ENTROPY,
        {"uuid1", "uuid4", "urandom", "token_hex", "token_bytes", "randbits", "SystemRandom"},
    ),
    (NAMES, {"mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile"}),
    (PROCESS, {"getpid", "get_ident", "get_native_id", "getppid"}),
    (CLOCK, {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "now", "strftime"}),
    (CLOCK, {"utcnow", "today", "elapsed_time", "getmtime", "process_time"}),
    (ENVIRONMENT, {"environ", "getenv", "gethostname", "getloadavg", "virtual_memory"}),
    (LISTING, {"listdir", "scandir", "glob", "iglob", "rglob", "iterdir", "walk"}),
    (HASH, {"hash"}),
)
_MAY_BEGIN = (
    (WAITING, {"async_op"}),
    (ARRIVAL, {"recv", "irecv", "recv_object_list"}),
    (MEMORY, {"empty", "empty_like", "new_empty", "empty_strided", "resize_"}),
    (
        FILE,
        {"open", "exists", "read_text", "read_bytes", "load", "loadtxt", "read_csv", "from_file"},
    ),
)
# What differs by these seldom matters: a better reason in reach counts.
_WEAK = (NAMES, MEMORY)
UNSURE = (*_WEAK, FILE, "")  # an experiment may show more
_REACH = 200  # events in which runs may come together again
_SEEDS = {"seed", "manual_seed", "manual_seed_all", "seed_everything", "set_seed", "default_rng"}


@dataclass(frozen=True)
class Source:
    """The statement in which runs begin to differ.

    `kind` is one of WORDS, or "" if the record doesn't show it. `detail` names a generator.
    """

    kind: str
    file: str
    line: int
    detail: str = ""


Processes = Sequence[Sequence[Event]]


def source(
    first: Processes,
    second: Processes,
    border: Border,
    *,
    generators: bool,
) -> Source | None:
    """Return the source of the first differing `border`; None if no value of the script differs.

    Both runs are given by the events of a rank's processes. `generators` tells whether a generator
    differs where the border was recorded.
    """
    if not first or not second:
        return None
    workers = [_Stream(*pair).returned() for pair in zip(first[1:], second[1:], strict=False)]
    stream = _Stream(first[0], second[0], workers)
    found = stream.used_by(border, generators)
    return None if found is None else stream.with_kind(found)


def by_hash(first: Processes, second: Processes) -> Source | None:
    """Return the source if a fixed PYTHONHASHSEED takes the difference away, None if it can't.

    It may be in another thread, so the script's text is searched for calls of `hash`.
    """
    if not first or not second:
        return None
    candidates = [one for one in _Stream(first[0], second[0]).begun() if one.kind == HASH]
    for file in dict.fromkeys(event.file for event in first[0]):
        calling = [one.first for one in _statements(file).values() if "hash" in one.words]
        candidates += [Source(HASH, file, min(calling))] if calling else []
    return candidates[0] if candidates else None


def of_operation(culprit: Culprit) -> Source:
    """Return an operation as the source, if the script's values before it are the same."""
    first, second = (
        caller or site  # the script's line
        for caller, site in (
            (culprit.first_caller, culprit.first_site),
            (culprit.second_caller, culprit.second_site),
        )
    )
    file, _, line = (first or second).rpartition(":")
    return Source(OPERATION, file, int(line or 0))


Key = tuple[int, str]  # the number of a frame, 0 for a module, and a name
# The events of one statement in both runs, and those that only one of them has before it.
Pair = tuple[Event, Event, tuple[Sequence[Event], Sequence[Event]]]


class _Stream:
    """The events of one process in both runs, as far as they are of the same statements.

    `workers` has a source for each worker of a loader, None where nothing differs before that.
    """

    def __init__(
        self,
        first: Sequence[Event],
        second: Sequence[Event],
        workers: Sequence[Source | None] = (),
    ) -> None:
        paired = [*_paired(first, second)]
        self._events = [(event, other) for event, other, _ in paired]
        self._is_whole = len(self._events) == max(len(first), len(second))
        self._workers, self._has_workers = [*filter(None, workers)], len(workers) > 0
        self._states: dict[Key, tuple[str, str]] = {}
        self._from: dict[Key, Source] = {}
        self._by_digest: dict[str, Source] = {}
        self._inner: dict[int, Source] = {}  # frame -> the last source in functions that it calls
        self._parents: dict[int, int] = {}
        self._called: dict[int, Statement] = {}  # frame -> the statement that called it
        self._last: dict[int, Source] = {}  # frame -> a source that its last statement used
        self._sets = {
            (event.file, event.line)
            for event, _ in self._events
            if any(digest.startswith(line_file.SET) for digest in event.values.values())
        }
        self._second_frames: dict[int, int] = {}  # the frame of the second run -> of the first
        self._decided: Source | None = None  # where what the last statement decided comes from
        # Variables that a branch of only one run has set, until both runs show them.
        self._branched: set[Key] = set()
        # The event after each branch of only one run that uses the model, and why only that run
        # takes it: gradients are no values of the script.
        self._branches: list[tuple[int, Source]] = []
        # By event, the names with values that differ, and where these come from.
        self._differing: list[dict[str, Source]] = []
        for event, other, skipped in paired:
            self._pass_over(*skipped)
            self._differing.append(self._follow(event, other))

    def used_by(self, border: Border, generators: bool) -> Source | None:
        """Return the source of the values that the statement with a border used."""
        reached = (n for n, (event, _) in enumerate(self._events) if event.order >= border.order)
        at = next(reached, len(self._events) - 1)
        letters = line_file.MODEL + line_file.TENSOR
        if border.kind in (border_file.PARAMETER, border_file.BUFFER):
            letters = line_file.MODEL
        elif border.kind == border_file.INPUT:
            letters = line_file.TENSOR
        for kinds in (letters, line_file.MODEL + line_file.TENSOR):
            for name, origin in self._differing[at].items() if at >= 0 else ():
                event, _ = self._events[at]
                # A value that is new in this statement may be what the border is about.
                is_here = (origin.kind, origin.file, origin.line) == ("", event.file, event.line)
                if event.values[name][:1] in (*kinds,) and not is_here:
                    return origin
        before = [*zip(self._events[:at], self._differing[:at], strict=True)][::-1]
        wanted = line_file.MODEL + line_file.TENSOR
        for (event, _), sources in before:
            for name, origin in sources.items():
                is_generator = name.startswith(line_file.GENERATOR)
                if generators if is_generator else event.values[name][:1] in (*wanted,):
                    return origin
        branches = [origin for after, origin in self._branches if after <= at]
        if branches or self._is_whole:
            return branches[-1] if branches else None
        # The values decided which statements come next.
        every = [origin for _, sources in before for origin in sources.values()]
        return _best(every)

    def returned(self) -> Source | None:
        """Return the source of the first value that a worker returns; None if its inputs differ."""
        for (event, _), sources in zip(self._events, self._differing, strict=True):
            origin = sources.get(line_file.RETURNED)
            if event.kind == line_file.RETURN and event.parent == 0 and origin is not None:
                return origin if origin.line else None
        before = [one for each in self._differing for one in each.values() if one.line]
        return before[-1] if before and not self._is_whole else None

    def begun(self) -> list[Source]:
        """Return all sources, in order."""
        return [
            *dict.fromkeys(self.with_kind(one) for each in self._differing for one in each.values())
        ]

    def with_kind(self, origin: Source) -> Source:
        """Return a source with its kind, if other statements show it."""
        if origin.kind:
            return origin
        if (origin.file, origin.line) in self._sets:
            return replace(origin, kind=HASH)
        here = _statement(origin.file, origin.line)
        if here is not None:
            for other in {*_statements(origin.file).values()}:
                if "async_op" in other.words and {*other.names} & {*here.names}:
                    return replace(origin, kind=WAITING, line=other.first)
        return origin

    def _pass_over(self, ours: Sequence[Event], theirs: Sequence[Event]) -> None:
        """Let what a branch of only one run has set come from what decided that it is taken."""
        origin = self._decided
        if origin is None or not (ours or theirs):
            return
        for side, events in enumerate((ours, theirs)):
            for event in events:
                frame = self._second_frames.get(event.frame, 0) if side else event.frame
                for name, digest in event.values.items():
                    key = _key(frame, name)
                    if self._states.get(key, ("", ""))[side] != digest:
                        self._from[key] = origin
                        self._branched.add(key)
        values = (digest for event in (*ours, *theirs) for digest in event.values.values())
        if any(digest.startswith(line_file.MODEL) for digest in values):
            self._branches.append((len(self._differing), origin))

    def _forget_equal(self, event: Event, other: Event) -> None:
        """Drop the origins of variables that a branch has set and that are equal nevertheless."""
        for name, digest in event.values.items():
            key = _key(event.frame, name)
            if key in self._branched:
                self._branched.discard(key)
                if digest == other.values.get(name, ""):
                    self._from.pop(key, None)

    def _follow(self, event: Event, other: Event) -> dict[str, Source]:
        """Return the names that differ after an event, and their sources."""
        self._parents[event.frame] = event.parent
        self._second_frames[other.frame] = event.frame
        self._forget_equal(event, other)
        statement = _statement(event.file, event.line)
        if event.kind == line_file.CALL and statement is not None:
            self._called[event.frame] = statement
        words = statement.words if statement else frozenset[str]()
        frame = event.parent if event.kind == line_file.CALL else event.frame
        used = self._used(frame, statement)
        moved = self._generators(event, other, words, used)
        inner = self._inner.pop(event.frame, None) if event.kind == line_file.LINE else None
        before = used or (self._last.get(event.frame) if event.kind == line_file.RETURN else None)
        if event.kind == line_file.LINE:
            begins = _kind(_BEGINS, words)
            here = Source(begins, event.file, event.line) if begins else None
            decided = here or next(iter(moved.values()), None) or inner or used
            self._decided = decided or self._begun(event, statement)
        differing = dict(moved)
        for name, digest in event.values.items():
            if name.startswith(line_file.GENERATOR):
                continue
            key = _key(event.frame, name)
            states = (digest, other.values.get(name, ""))
            if states[0] == states[1]:
                self._from.pop(key, None)
            elif self._states.get(key) != states or key not in self._from:
                begins = _kind(_BEGINS, words) if event.kind != line_file.CALL else ""
                if begins == LISTING and not _is_reordered(*states):
                    begins = ""  # other files, and not another order
                self._from[key] = (
                    (Source(begins, event.file, event.line) if begins else None)
                    or self._by_digest.get(digest)
                    or next(iter(moved.values()), None)
                    or inner
                    or self._better(event, statement, before)
                )
                self._by_digest[digest] = self._from[key]
            self._states[key] = states
            if key in self._from:
                differing[name] = self._from[key]
        newest = _best([*differing.values()][::-1])
        if newest is not None:
            self._last[event.frame] = newest
            outer = event.parent
            while outer:
                self._inner[outer] = newest
                outer = self._parents.get(outer, 0)
        return differing

    def _better(self, event: Event, statement: Statement | None, used: Source | None) -> Source:
        """Return the source of a value that comes from `used`, or begins here."""
        if used is None:
            return self._begun(event, statement)
        if used.kind not in _WEAK or event.kind == line_file.CALL:
            return used
        frames = self._frames(event.frame, statement)
        strong = (
            found
            for (frame, _), found in reversed(self._from.items())
            if frame in frames and found.kind not in _WEAK
        )
        begun = self._begun(event, statement)
        begins = begun.kind not in ("", *_WEAK, FILE)
        return begun if begins else next(strong, used)

    def _used(self, frame: int, statement: Statement | None) -> Source | None:
        """Return the source of a differing variable that a statement uses, None if none differs."""
        if statement is None:
            return None
        frames = self._frames(frame, statement)
        keys = [
            key
            for name in statement.names
            for key in (*((one, name) for one in frames), (0, line_file.GLOBAL + name))
        ]
        return _best(self._from[key] for key in keys if key in self._from)

    def _frames(self, frame: int, statement: Statement | None) -> list[int]:
        """Return the frames with the variables of a statement.

        A comprehension has a frame of its own, which is called in the statement around it.
        """
        is_inside = frame in self._called and self._called[frame] is statement
        return [frame, self._parents[frame]] if is_inside else [frame]

    def _generators(
        self, event: Event, other: Event, words: frozenset[str], used: Source | None
    ) -> dict[str, Source]:
        """Return the generators that a statement has moved and that differ, with their sources."""
        differing = {}
        for name, digest in event.values.items():
            if not name.startswith(line_file.GENERATOR):
                continue
            key = (0, name)
            before = self._states.get(key)
            self._states[key] = (digest, other.values.get(name, digest))
            if self._states[key][0] == self._states[key][1]:
                self._from.pop(key, None)
            elif before is not None:
                begins = _kind(_BEGINS, words)
                was_same = before[0] == before[1]
                if begins:
                    self._from[key] = Source(begins, event.file, event.line)
                elif used is not None and (was_same or words & _SEEDS):
                    self._from[key] = used
                elif key not in self._from:
                    detail = name.removeprefix(line_file.GENERATOR)
                    self._from[key] = Source(GENERATOR, event.file, event.line, detail)
                differing[name] = self._from[key]
        return differing

    def _begun(self, event: Event, statement: Statement | None) -> Source:
        """Return a source for a value that comes from nothing that differs."""
        if event.kind == line_file.CALL:  # given by a library
            return Source("", event.file, 0)
        if self._has_workers and statement is not None and statement.is_loop:
            of_worker = next(iter(self._workers), None)
            at = (event.file, event.line) if of_worker is None else (of_worker.file, of_worker.line)
            return Source(WORKERS, *at)
        words = statement.words if statement else frozenset[str]()
        return Source(_kind(_MAY_BEGIN, words), event.file, event.line)


def _paired(first: Sequence[Event], second: Sequence[Event]) -> Iterator[Pair]:
    """Yield the events of the same statements, after those of a branch that only one run takes."""
    at, other = 0, 0
    skipped: tuple[Sequence[Event], Sequence[Event]] = ((), ())
    while at < len(first) and other < len(second):
        if first[at].place == second[other].place:
            yield first[at], second[other], skipped
            at, other, skipped = at + 1, other + 1, ((), ())
            continue
        ahead = ((skip, reach - skip) for reach in range(1, _REACH) for skip in range(reach + 1))
        for skip, theirs in ahead:
            pair = first[at + skip : at + skip + 1], second[other + theirs : other + theirs + 1]
            if all(pair) and pair[0][0].place == pair[1][0].place:
                skipped = first[at : at + skip], second[other : other + theirs]
                at, other = at + skip, other + theirs
                break
        else:
            return


def _best(found: Iterable[Source]) -> Source | None:
    """Return the first source with a line that is not weak, else one with a line, else any."""
    return min(found, key=lambda one: (not one.line, one.kind in _WEAK), default=None)


def _key(frame: int, name: str) -> Key:
    return (0 if name.startswith((line_file.GLOBAL, line_file.GENERATOR)) else frame, name)


def _is_reordered(digest: str, other: str) -> bool:
    """Return whether values may have the same elements in another order."""
    return digest.partition(line_file.SORTED)[2] == other.partition(line_file.SORTED)[2]


def _kind(table: Iterable[tuple[str, set[str]]], words: frozenset[str]) -> str:
    return next((kind for kind, calls in table if calls & words), "")


@cache
def _statements(file: str) -> Mapping[int, Statement]:
    try:
        return statements.by_line(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}


def _statement(file: str, line: int) -> Statement | None:
    return _statements(file).get(line)
