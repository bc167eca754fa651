"""One rank's record of a run, read back from its file: every line is untrusted.

`rank_file` writes these files.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from entrenar_py.check.rank_files import layout, rank_header
from entrenar_py.check.rank_files.layout import Layout, Piece
from entrenar_py.check.rank_files.rank_file import SUFFIX, line
from entrenar_py.shared import trace
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.faults import Fault
from entrenar_py.shared.trace import records
from entrenar_py.shared.trace.traits import CHOICES
from entrenar_py.shared.untrusted import files, json_text

# A check has the whole run in memory. This is ten times the size of 1000 steps of 300 tensors.
FILE_BYTES_MAX = 2**30
EVENTS_MAX = 2**20
OUTER_RULES = CHOICES["outer"]

_NAME = re.compile(rf"[0-9]{{1,9}}-(?P<life>[0-9]{{1,9}}){re.escape(SUFFIX)}")
_CLOSED_WELL = line("closed", problem="").encode()


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """The record of one rank in its `life`, 0 for its first one.

    - `header`: how the rank was launched, and what it declared.
    - `events`: in the order in which they were written.
    - `ended`: training came to its end; `problem` is the error that ended it, "" for none.
    - `layout`: how the ranks are arranged, None if the file doesn't say.
    - `pieces`: by name, the place of each tensor of which the rank holds a part.
    - `local`: buffers that depend on the rank's own samples, None if unknown.
    - `changed`: the optimizer's constants, except learning rates, have changed since the header.
    - `compression`: the format in which gradients were sent, "" if uncompressed; `compressed_from`
      is the first step in which they were.
    - `outer`: the rule by which ranks that step alone are brought together: `rule`, and for known
      ones `lr` and `momentum`; `inner_steps`, the steps of a round, if declared.
    - `drops_last`: the script has skipped a last, short batch of its loader.
    - `replaces`: the script says that it draws with replacement.
    - `epochs`: whether the script reports epochs with its samples, None if a loader shows them.
    - `is_limited`: the harness ended the rank after its last step, and not the script.
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
    compression: str = ""
    compressed_from: int = 0
    outer: Mapping[str, Any] = field(default_factory=dict)
    drops_last: bool = False
    replaces: bool = False
    epochs: bool | None = None
    is_limited: bool = False

    @property
    def rank(self) -> int:
        """The number of the rank."""
        return int(self.header["rank"])


def load(path: Path) -> RankTrace:
    """Read the file of one rank, a line in memory at a time.

    An incomplete last line, cut off when its writer died, is left out. Raises TraceError, with the
    line's number, for a line that no rank writes, and for more than FILE_BYTES_MAX or EVENTS_MAX.
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
    """Return the record in `file`; errors name the number of the line."""
    rank: RankTrace | None = None
    events: list[trace.Event] = []
    for number, text in enumerate(files.lines(file), start=1):
        if not text.endswith(b"\n"):
            break
        where = f"{path}:{number}"
        record = _record(where, text)
        if rank is None:
            header = rank_header.require(record, where)
            rank = RankTrace(life=life, header=header, events=(), ended=False, problem="")
            continue
        try:
            if rank.ended and record.get("kind") != trace.Drawn.kind:  # by a loader's worker
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
    """Return `events` without a start, if `event` is one, too, and no step was made since.

    Between the two the script has loaded what it begins with.
    """
    is_again = isinstance(event, trace.Start)
    if not is_again or any(isinstance(one, trace.Update) for one in events):
        return events
    return [one for one in events if not isinstance(one, trace.Start)]


def _event(record: Mapping[str, Any], num_before: int) -> trace.Event:
    event = records.from_record(record)
    if isinstance(event, trace.Injected):
        Fault.from_dict(event.fault)  # raises UsageError for what is none
    step = getattr(event, "step", None)
    if (step or 0) < 0:
        raise TraceError(f"step={step}: steps count from 0")
    if num_before == EVENTS_MAX:
        raise TraceError(f"more than {EVENTS_MAX} events; record fewer steps (--steps)")
    return event


def _local(rank: RankTrace, record: Mapping[str, Any]) -> RankTrace:
    names = record.get("buffers", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TraceError(f"buffers={names!r:.80}: use a list of names")
    return replace(rank, local=(rank.local or frozenset()).union(names))


def _layout(rank: RankTrace, record: Mapping[str, Any]) -> RankTrace:
    try:
        axes = layout.require(dict(record["axes"]), rank.header["world_size"], "layout")
        arranged = Layout(axes=axes, tied=layout.require_ties(record["tied"]))
        pieces = {name: layout.piece_from(parts) for name, parts in record["pieces"].items()}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(f"layout can't be read ({error!r}); record the run again") from error
    rank.pieces.update(pieces)  # in place: a file may have a line for each of many pieces
    return replace(rank, layout=arranged)


def _outer(rank: RankTrace, record: Mapping[str, Any]) -> RankTrace:
    """Add the rule of the outer step. A rule that changes from round to round becomes `other`."""
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


def _compressed(rank: RankTrace, record: Mapping[str, Any]) -> RankTrace:
    step = record.get("step", 0)
    if type(step) is not int or step < 0:
        raise TraceError(f"compressed, step={step!r:.40}: use a whole number >= 0")
    return replace(rank, compression=str(record.get("to", "")), compressed_from=step)


def _data(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a data set that became known after the header was written."""
    return {name: record[name] for name in rank_header.OF_THE_DATA if name in record}


# Kind of a line other than an event -> function that adds the line's content to the record.
_NOTES: Mapping[str, Callable[[RankTrace, Mapping[str, Any]], RankTrace]] = {
    "closed": lambda rank, record: replace(
        rank, ended=True, problem=str(record.get("problem", ""))
    ),
    "layout": _layout,
    "local": _local,
    "changed": lambda rank, _: replace(rank, changed=True),
    "copies": lambda rank, _: replace(rank, copies=True),
    "outer": _outer,
    "sampling": lambda rank, record: replace(
        rank,
        drops_last=rank.drops_last or record.get("drop_last") is True,
        replaces=rank.replaces or record.get("replacement") is True,
        epochs=bool(record["epochs"]) if "epochs" in record else rank.epochs,
    ),
    "compressed": _compressed,
    "limit": lambda rank, _: replace(rank, is_limited=True),
    "data": lambda rank, record: replace(
        rank, header=rank_header.require({**rank.header, **_data(record)}, "data")
    ),
}


def life_of(path: Path) -> int:
    """Return the number, from 0, of the rank's life that the file at `path` records.

    Raises TraceError if the file isn't named as ranks name their files.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise TraceError(
            f"rank file {path}: its name is not RANK-LIFE{SUFFIX}, as in 00000-000{SUFFIX}; keep "
            "the names that the ranks gave their files"
        )
    return int(match["life"])


def is_closed(path: Path) -> bool:
    """Return whether the rank has recorded that training ended without an error.

    Reads only the end of the file.
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
        raise TraceError(f"{where}: no JSON ({error}); give a file that a rank wrote") from error
    if not isinstance(record, dict):
        raise TraceError(f"{where}: not a JSON object; give a file that a rank wrote")
    return record
