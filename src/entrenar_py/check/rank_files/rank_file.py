"""The file in which one rank of a user's trainer records a run.

The file has JSON lines: a header, then one event per line. Lines between the events say how the
ranks are arranged, which pieces of tensors this rank has, which buffers depend on its own samples,
and whether the optimizer's constants or the compression of gradients have changed. The last line
says that training ended. Each line is written immediately, so it remains if the process dies.

`RankFile` writes the file, and `load` reads it. A file may come from anywhere: every line is
untrusted, and the code that judges a run relies on the types checked here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from entrenar_py.check.rank_files import layout
from entrenar_py.check.rank_files.layout import Layout, Piece
from entrenar_py.shared import trace
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import records
from entrenar_py.shared.trace.traits import CHOICES
from entrenar_py.shared.untrusted import files, json_text

VERSION = 1
RANKS_MAX = 2**16
_WHOLE_MAX = 2**63 - 1

Test = Callable[[Any], bool]


def _whole(least: int, most: int = _WHOLE_MAX) -> Test:
    return lambda value: type(value) is int and least <= value <= most


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | float) or _whole(-_WHOLE_MAX)(value)


def _is_norm(value: Any) -> bool:
    return value is None or (_is_number(value) and value > 0)


def _is_probability(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_constant(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return all(number is None or _is_number(number) for number in numbers)


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_group, value))


def _is_group(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    # These must be numbers, since they are used in arithmetic. Other values are only compared.
    numbers = [value[name] for name in ("lr", "initial_lr") if name in value]
    decay = value.get("weight_decay")
    numbers += [] if decay is None else [decay]
    return all(map(_is_number, numbers)) and all(map(_is_constant, value.values()))


def _are_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


_FLAGS = (
    *("values", "auto", "replicas", "unseeded", "alone", "drawn", "drop_last", "replacement"),
    *("selects_in_steps", "one_source", "splits", "thorough", "ordered", "varied", "joined"),
    *("batch_norm", "short_betas"),
)
# Key -> whether it is required, the test of its value, and the allowed values in words.
_KEYS: Mapping[str, tuple[bool, Test, str]] = {
    "rank": (True, _whole(0, RANKS_MAX - 1), f"a whole number from 0 to {RANKS_MAX - 1}"),
    "world_size": (True, _whole(1, RANKS_MAX), f"a whole number from 1 to {RANKS_MAX}"),
    "versions": (False, _are_versions, "a mapping from names to texts"),
    "pid": (False, _whole(0), "a whole number"),
    "samples": (False, _is_text, "index, content or unknown"),
    "losses": (False, CHOICES["losses"].__contains__, "known or backward"),
    "num_samples": (
        *(False, lambda value: value is None or _whole(0)(value)),
        "a whole number, or null where it is not known",
    ),
    "selects": (False, _is_text, "a line, as train.py:12"),
    "by_epoch": (False, _is_text, "a line, as train.py:12"),
    "clip_norm": (False, _is_norm, "a number above 0, or null where none was declared"),
    "clips": (False, _is_norm, "a number above 0, or null where no calls show one norm"),
    "reduction": (False, _is_text, "the name of a number format"),
    "loss_over": (False, CHOICES["loss_over"].__contains__, "batch, micro-batch, or nothing"),
    "optimizer": (False, _is_text, "the name of a class"),
    "groups": (False, _are_groups, "a list of mappings from names to numbers"),
    "dropout": (False, _is_probability, "a number from 0 to 1"),
    **dict.fromkeys(_FLAGS, (False, _is_flag, "true or false")),
}
# The keys that a later line may set, since they are unknown when the script declares the others.
OF_THE_DATA = (
    *("num_samples", "drop_last", "replacement", "thorough", "varied", "samples", "replicas"),
    *("losses", "clips", "alone", "selects", "selects_in_steps", "one_source", "by_epoch"),
    *("drawn", "ordered", "joined"),
)


def require_header(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return `record` if it is the header of a rank's file of this version.

    Unknown keys are ignored, since a later release may write more. Raises TraceError, with a
    message that begins with `where`, if `record` is not such a header.
    """
    if record.get("kind") != "rank" or record.get("version") != VERSION:
        given = f"kind={record.get('kind')!r:.40}, version={record.get('version')!r:.40}"
        raise TraceError(f"{where}: {given}: give a rank's file of version {VERSION}")
    for name, (needed, fits, allowed) in _KEYS.items():
        if name not in record:
            if needed:
                raise TraceError(f"{where}: header without {name}, {allowed}; record the run again")
        elif not fits(record[name]):
            raise TraceError(f"{where}: {name}={reprlib.repr(record[name])}: use {allowed}")
    if record["rank"] >= record["world_size"]:
        raise TraceError(
            f"{where}: rank={record['rank']} with world_size={record['world_size']}: ranks count "
            "from 0"
        )
    return record


# --- writing --------------------------------------------------------------------------------------


SUFFIX = ".rank.jsonl"
STACK_SUFFIX = ".stack.txt"  # the file with the rank's stack, written on SIGUSR1


def line(kind: str, **fields: Any) -> str:
    """Return the text of a line that isn't an event."""
    return json.dumps({"kind": kind, **fields}) + "\n"


class RankFile:
    """A new file in `folder` for the next `life` of a rank.

    A rank that is started again, or that calls `observe` twice, has a file for each life. `stack`
    is the path of a file for the rank's stack.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self.life = _new(folder, int(header["rank"]))
        self.path = Path(os.fsdecode(self._file.name))
        self.stack = folder / f"{header['rank']:05}-{self.life:03}{STACK_SUFFIX}"
        self.note("rank", version=VERSION, **header)

    def append(self, events: Iterable[trace.Event]) -> None:
        """Write `events`; none of them is lost if the process is killed afterwards."""
        self._write(trace.dump_events(events).decode())

    def note(self, kind: str, **fields: Any) -> None:
        """Write a line that isn't an event. `_NOTES` lists the kinds of these lines."""
        self._write(line(kind, **fields))

    def close(self, problem: str = "") -> None:
        """Write that training is over, with the error `problem` ("" if none); close the file."""
        self.note("closed", problem=problem)
        self._file.close()

    def _write(self, text: str) -> None:
        if self._file.closed:
            return  # later reports of the script don't belong to the training
        rest = memoryview(text.encode())
        while rest.nbytes:
            rest = rest[self._file.write(rest) :]


def _new(folder: Path, rank: int) -> tuple[FileIO, int]:
    for life in count():
        with suppress(FileExistsError):
            return FileIO(folder / f"{rank:05}-{life:03}{SUFFIX}", "x"), life
    raise AssertionError("there is always one more")


def environment_rank() -> tuple[int, int]:
    """Return rank and world size as torchrun sets them; 0 and 1 without torchrun.

    ENTRENAR_RANK and ENTRENAR_WORLD_SIZE have precedence, since RANK may count ranks of only a part
    of the job. Raises UsageError if only one of them is set.
    """
    own = {name: os.environ.get(f"ENTRENAR_{name}") for name in ("RANK", "WORLD_SIZE")}
    is_own = None not in own.values()
    if not is_own and any(own.values()):
        said, left = sorted(own, key=lambda name: own[name] is None)
        raise UsageError(
            f"ENTRENAR_{said}={own[said]} is set, and ENTRENAR_{left} isn't: set both, to the "
            "place of this process in the whole job, or neither"
        )
    names = own if is_own else {name: os.environ.get(name) for name in own}
    rank, world_size = names.values()
    return int(rank or 0), int(world_size or 1)


# --- reading --------------------------------------------------------------------------------------


# A check has the whole run in memory. This is ten times the size of 1000 steps of 300 tensors.
FILE_BYTES_MAX = 2**30
EVENTS_MAX = 2**20
OUTER_RULES = CHOICES["outer"]

_NAME = re.compile(rf"[0-9]{{1,9}}-(?P<life>[0-9]{{1,9}}){re.escape(SUFFIX)}")
_CLOSED_WELL = line("closed", problem="").encode()


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The record of one rank in one `life` (from one start to the next), counted from 0.

    - `header`: how the rank was launched and what it declared.
    - `events`: the events, in the order in which they were written.
    - `ended`: whether training reached its end. `problem` is the error that ended it, or "".
    - `layout`: how the ranks are arranged; None if the file doesn't say.
    - `pieces`: tensor name -> the rank's piece of it, for tensors that the rank doesn't have whole.
    - `local`: the buffers that depend on the rank's own samples; None if unknown.
    - `changed`: whether the optimizer's constants, except learning rates, changed after the header.
    - `compression`: the dtype in which gradients were sent, "" if they were not compressed;
      `compressed_from` is the first compressed step.
    - `outer`: the rule of the outer step, with which ranks that step alone are averaged: `rule`,
      for known rules also `lr` and `momentum`, and `inner_steps`, the steps of a round, if
      declared.
    - `drops_last`: whether the script skipped a last, short batch of its loader.
    - `replaces`: whether the script says that it draws with replacement.
    - `cut`: the epochs that the script ended before its loader had yielded all batches.
    - `epochs`: whether the script reports epochs with its samples; None if a loader shows them.
    - `is_limited`: whether the harness, not the script, ended the rank after its last step, and
      `limited_where`, if this is not the last step that was asked for.
    """

    life: int
    header: Mapping[str, Any]
    events: tuple[trace.Event, ...]
    ended: bool
    problem: str
    layout: Layout | None = None
    pieces: dict[str, Piece] = field(default_factory=dict)
    local: frozenset[str] | None = None
    changed: bool = False
    copies: bool = False
    inner: bool = False
    compression: str = ""
    compressed_from: int = 0
    outer: Mapping[str, Any] = field(default_factory=dict)
    drops_last: bool = False
    replaces: bool = False
    cut: frozenset[int] = frozenset()
    epochs: bool | None = None
    is_limited: bool = False
    limited_where: str = ""

    @property
    def rank(self) -> int:
        """The number of the rank."""
        return int(self.header["rank"])


def load(path: Path) -> RankTrace:
    """Return the record in the file of one rank, read with one line in memory at a time.

    An incomplete last line, cut off when its writer died, is left out. Raises TraceError, with the
    line number, for a line that no rank writes. Also raises TraceError for a file larger than
    FILE_BYTES_MAX, and for more than EVENTS_MAX events.
    """
    life = life_of(path)
    try:
        with files.open_file(path, bytes_max=FILE_BYTES_MAX) as file:
            return _read(path, file, life)
    except OSError as error:
        too_large = error.errno == errno.EFBIG
        advice = "record fewer steps (--steps)" if too_large else "check that you may read it"
        raise TraceError(f"rank file {path}: can't be read ({error.strerror}); {advice}") from error


def _read(path: Path, file: BinaryIO, life: int) -> RankTrace:
    """Return the record in `file`. Errors name the line number."""
    rank: RankTrace | None = None
    events: list[trace.Event] = []
    for number, text in enumerate(files.lines(file), start=1):
        if not text.endswith(b"\n"):
            break
        where = f"{path}:{number}"
        record = _record(where, text)
        if rank is None:
            header = require_header(record, where)
            rank = RankTrace(life=life, header=header, events=(), ended=False, problem="")
            continue
        try:
            # Written by a loader's worker.
            if rank.ended and record.get("kind") != trace.Drawn.kind:
                raise TraceError("a line after the end of training; give the file as written")
            if rank.ended:
                continue
            note = _NOTES.get(str(record.get("kind")))
            if note is None:
                event = _event(record, len(events))
                events[:] = _without_earlier(event, events)
                events.append(event)
            else:
                rank = note(rank, record)
        except UsageError as error:
            raise TraceError(f"{where}: {error}") from error
    if rank is None:
        raise TraceError(f"{path}: no header: the process died before it wrote one; run it again")
    return replace(rank, events=tuple(events))


def _without_earlier(event: trace.Event, events: list[trace.Event]) -> list[trace.Event]:
    # Between two starts the script loaded its initial state.
    is_again = isinstance(event, trace.Start)
    if not is_again or any(isinstance(one, trace.Update) for one in events):
        return events
    return [one for one in events if not isinstance(one, trace.Start)]


def _event(record: Mapping[str, Any], num_before: int) -> trace.Event:
    event = records.from_record(record)
    if isinstance(event, trace.Injected):
        Fault.from_dict(event.fault)  # raises UsageError if it isn't a fault
    step = getattr(event, "step", None)
    if (step or 0) < 0:
        raise TraceError(f"step={step}: steps count from 0")
    if num_before == EVENTS_MAX:
        raise TraceError(f"more than {EVENTS_MAX} events; record fewer steps (--steps)")
    return event


def _with_local(rank: RankTrace, record: Mapping[str, Any]) -> RankTrace:
    names = record.get("buffers", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TraceError(f"buffers={names!r:.80}: use a list of names")
    return replace(rank, local=(rank.local or frozenset()).union(names))


def _with_layout(rank: RankTrace, record: Mapping[str, Any]) -> RankTrace:
    try:
        axes = layout.require(dict(record["axes"]), rank.header["world_size"], "layout")
        arranged = Layout(axes=axes, tied=layout.require_ties(record["tied"]))
        pieces = {name: layout.piece_from(parts) for name, parts in record["pieces"].items()}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(f"layout can't be read ({error!r}); record the run again") from error
    rank.pieces.update(pieces)  # in place: a file may have a line for each of many pieces
    return replace(rank, layout=arranged)


def _with_outer(rank: RankTrace, record: Mapping[str, Any]) -> RankTrace:
    """Return `rank` with the rule of the outer step. A rule that changes becomes `other`."""
    rule = {
        name: record[name] for name in ("rule", "lr", "momentum", "inner_steps") if name in record
    }
    numbers = [rule[name] for name in ("lr", "momentum") if name in rule]
    if rule.get("rule") not in OUTER_RULES or not all(type(number) is float for number in numbers):
        raise TraceError(f"outer={rule!r:.80}: use a rule ({', '.join(OUTER_RULES)}) and numbers")
    if rule["rule"] != "other" and len(numbers) < 2:
        raise TraceError(f"outer={rule!r:.80}: give lr and momentum")
    if type(rule.get("inner_steps", 1)) is not int or rule.get("inner_steps", 1) < 1:
        raise TraceError(f"inner_steps={rule['inner_steps']!r:.40}: use a whole number >= 1")
    if rank.outer and rank.outer != rule:
        rule["rule"] = "other"
    return replace(rank, outer=rule)


def _with_compression(rank: RankTrace, record: Mapping[str, Any]) -> RankTrace:
    step = record.get("step", 0)
    if type(step) is not int or step < 0:
        raise TraceError(f"compressed, step={step!r:.40}: use a whole number >= 0")
    return replace(rank, compression=str(record.get("to", "")), compressed_from=step)


def _epochs(value: Any) -> frozenset[int]:
    if not isinstance(value, list) or not all(map(_whole(0), value)):
        raise TraceError(f"cut={reprlib.repr(value)}: use a list of whole numbers >= 0")
    return frozenset(value)


def _of_the_data(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in OF_THE_DATA if name in record}


# Kind of a line that isn't an event -> the function that adds its content to the record.
_NOTES: Mapping[str, Callable[[RankTrace, Mapping[str, Any]], RankTrace]] = {
    "closed": lambda rank, record: replace(
        rank, ended=True, problem=str(record.get("problem", ""))
    ),
    "layout": _with_layout,
    "local": _with_local,
    "changed": lambda rank, _: replace(rank, changed=True),
    "copies": lambda rank, _: replace(rank, copies=True),
    "inner": lambda rank, _: replace(rank, inner=True),
    "outer": _with_outer,
    "sampling": lambda rank, record: replace(
        rank,
        drops_last=rank.drops_last or record.get("drop_last") is True,
        replaces=rank.replaces or record.get("replacement") is True,
        epochs=bool(record["epochs"]) if "epochs" in record else rank.epochs,
        cut=rank.cut | _epochs(record.get("cut", [])),
    ),
    "compressed": _with_compression,
    "limit": lambda rank, record: replace(
        rank, is_limited=True, limited_where=str(record.get("where", ""))
    ),
    "data": lambda rank, record: replace(
        rank, header=require_header({**rank.header, **_of_the_data(record)}, "data")
    ),
}


def life_of(path: Path) -> int:
    """Return the number, from 0, of the life that the file at `path` records.

    Raises TraceError if the file's name is not in the form in which ranks name their files.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise TraceError(
            f"rank file {path}: its name is not RANK-RESTARTS{SUFFIX}, as in 00000-000{SUFFIX}; "
            "keep the names that the ranks gave their files"
        )
    return int(match["life"])


def is_closed(path: Path) -> bool:
    """Return whether the rank has recorded that training ended without an error.

    Only the end of the file is read. Return False if it can't be read.
    """
    try:
        with files.open_file(path) as file:
            file.seek(max(0, path.stat().st_size - len(_CLOSED_WELL)))
            return file.read(len(_CLOSED_WELL)) == _CLOSED_WELL
    except OSError:
        return False


def _record(where: str, line: bytes) -> dict[str, Any]:
    try:
        record = json_text.load(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON ({error}); give a file that a rank wrote") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: not a JSON object; give a file that a rank wrote")
    return record
