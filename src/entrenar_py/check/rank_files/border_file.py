"""The file of one rank with values at the borders of modules, for `entrenar-check diff`.

A border is a place in a step that has a name in any run of the same training: the output of a
module, the gradient that reaches it, the update of a parameter. Each line has one value, in the
order of execution. Small tensors are kept as values, larger ones as projections
(`shared.trace.Sketch`). Both are linear, so the distance of two runs is the norm of a difference.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.untrusted import files, json_text

BORDERS = "ENTRENAR_BORDERS"  # how to record values at borders, as JSON; without it nothing is
SUFFIX = ".borders.jsonl"
VERSION = 1
FILE_BYTES_MAX = 2**31
PHASES = ("start", "forward", "backward", "update")

# Kinds of values. Those of EXACT are compared bit by bit.
INPUT, OUTPUT, LOSS = "input", "output", "loss"
OUTPUT_GRADIENT, INPUT_GRADIENT = "gradient of the output", "gradient of the input"
PARAMETER_GRADIENT, APPLIED_GRADIENT = "gradient", "applied gradient"
UPDATE, PARAMETER, BUFFER = "update", "parameter", "buffer"
RATE, GENERATOR, SAMPLES, OPERATION = "setting", "generator", "samples", "operation"
KINDS = (
    *(INPUT, OUTPUT, LOSS, OUTPUT_GRADIENT, INPUT_GRADIENT, PARAMETER_GRADIENT, APPLIED_GRADIENT),
    *(UPDATE, PARAMETER, BUFFER, RATE, GENERATOR, SAMPLES, OPERATION),
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings with which a process records its borders.

    - `noise`: seeds the last bits of weights and activations, which are then changed; None for no
      change.
    - `operations`: the first and the last step in which operations are recorded; None for none.
    - `lines`: whether the script's statements are followed (`line_file`).
    - `deterministic`: whether torch is told to use deterministic algorithms.
    - `timed`: whether steps are timed, and nothing is recorded.
    """

    noise: int | None = None
    operations: tuple[int, int] | None = None
    lines: bool = False
    deterministic: bool = False
    timed: bool = False

    def variables(self) -> dict[str, str]:
        """Return the environment variable that makes ranks record with these settings."""
        return {BORDERS: json.dumps(asdict(self))}

    @classmethod
    def planned(cls) -> Settings | None:
        """Return the settings in the environment of this process; None if nothing is recorded."""
        text = os.environ.get(BORDERS)
        if text is None:
            return None
        fields = json_text.load(text)
        steps = fields["operations"]
        return cls(**{**fields, "operations": None if steps is None else tuple(steps)})


@dataclass(slots=True, kw_only=True, eq=False)
class Border:
    """One value at a border.

    - `order`: its place in the order of execution of the rank.
    - `micro_batch`: the micro-batch of the rank in the step; -1 outside of micro-batches.
    - `name`: the path of the module, the name of a parameter, buffer or generator, of an operation,
      or of a setting of optimizers.
    - `call`, `part`: the call of the module in the micro-batch, and the part of its output.
    - `where`: the path of the module in which a difference that is first seen here has arisen.
    - `scale`: the norm by which rounding is measured: that of the value, or of the parameter for an
      update.
    - `fan_in`: the number of terms of the longest sums that gave the value.
    - `numbers`: the elements, flat, or the projection of a larger tensor, float64 or float32; None
      if only equality is known.
    - `text`: the arguments of an operation, the digests of samples, or the parameters that have the
      numbers of a setting, in order.
    - `site`: the line of code that called an operation.
    - `caller`: the script's line from which `site` was reached, "" if `site` is the script's.
    """

    order: int
    step: int
    micro_batch: int
    phase: str
    kind: str
    name: str
    digest: str
    call: int = 0
    part: str = ""
    where: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    scale: float = 0.0
    fan_in: int = 1
    numbers: NDArray[Any] | None = None
    text: str = ""
    site: str = ""
    caller: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What names the border in each run, apart from step, rank and micro-batch."""
        return self.kind, self.name, self.call, self.part


@dataclass(kw_only=True)
class RankBorders:
    """The borders of one rank, in order, and facts about its process."""

    rank: int
    facts: dict[str, str] = field(default_factory=dict)
    borders: list[Border] = field(default_factory=list)


_PLAIN = ("order", "step", "micro_batch", "phase", "kind", "name", "digest", "call", "part")
_MORE = ("where", "dtype", "shape", "scale", "fan_in", "text", "site", "caller")
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("order", "step", "micro_batch", "call", "fan_in"), int),
    **dict.fromkeys(("phase", "kind", "name", "digest", "part", "where", "dtype"), str),
    **dict.fromkeys(("text", "site", "caller"), str),
    "scale": (int, float),
    "shape": list,
}
_DEFAULTS = {
    "where": "",
    "dtype": "",
    "shape": (),
    "scale": 0.0,
    "fan_in": 1,
    "text": "",
    "site": "",
    "caller": "",
}
_RECENT = 64  # arrays that may be written as a reference to an earlier line


class BorderFile:
    """A new file that a rank writes below `folder`; a rank may have several, as for two models."""

    def __init__(self, folder: Path, rank: int, facts: Mapping[str, str]) -> None:
        self._file = new_file(folder, f"{rank:05}", SUFFIX)
        self._written: dict[int, tuple[NDArray[Any], int]] = {}
        self._write({"version": VERSION, "rank": rank, "facts": dict(facts)})

    def append(self, border: Border) -> None:
        """Write one border; it isn't lost if the process is killed afterwards."""
        record: dict[str, Any] = {name: getattr(border, name) for name in _PLAIN}
        for name in _MORE:
            if (value := getattr(border, name)) != _DEFAULTS[name]:
                record[name] = value if np.isfinite(border.scale) or name != "scale" else -1.0
        numbers = border.numbers
        if numbers is not None:
            # One tensor is the output of a module, of the module around it, and the next one's
            # input.
            known = self._written.get(id(numbers))
            if known is not None:
                record["same"] = known[1]
            else:
                record["numbers"] = base64.b64encode(numbers.tobytes()).decode()
                record["format"] = numbers.dtype.str
                self._written[id(numbers)] = (numbers, border.order)
                if len(self._written) > _RECENT:
                    del self._written[next(iter(self._written))]
        self._write(record)

    def close(self) -> None:
        """Close the file; what follows isn't recorded."""
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file.closed:
            return
        rest = memoryview((json.dumps(record) + "\n").encode())
        while rest.nbytes:
            rest = rest[self._file.write(rest) :]


def new_file(folder: Path, name: str, suffix: str) -> FileIO:
    """Return a new file of a process; it gets a number, as a process may have several."""
    for number in count():
        with suppress(FileExistsError):
            return FileIO(folder / f"{name}-{number:03}{suffix}", "x")
    raise AssertionError("there is always one more")


def load(path: Path) -> RankBorders:
    """Return the borders in the file of a rank; an incomplete last line is left out.

    Raises TraceError, with the line number, for a line that no rank writes, and for a file that
    can't be read or is larger than FILE_BYTES_MAX.
    """
    rank: RankBorders | None = None
    arrays: dict[int, NDArray[Any]] = {}
    try:
        with files.open_file(path, bytes_max=FILE_BYTES_MAX) as file:
            for number, text in enumerate(files.lines(file), start=1):
                if not text.endswith(b"\n"):
                    break
                try:
                    record = json_text.load(text)
                    if rank is None:
                        rank = _header(record)
                    else:
                        rank.borders.append(_border(record, arrays))
                except (ValueError, TypeError, KeyError) as error:
                    raise TraceError(f"{path}:{number}: no border of a run ({error})") from error
    except OSError as error:
        advice = "record fewer steps (--steps)" if error.errno == errno.EFBIG else "check it"
        raise TraceError(f"{path}: can't be read ({error.strerror}); {advice}") from error
    if rank is None:
        raise TraceError(f"{path}: no header: the process died before it wrote one; run it again")
    return rank


def _header(record: Any) -> RankBorders:
    facts = record["facts"]
    if record["version"] != VERSION or type(record["rank"]) is not int:
        raise ValueError(f"use version {VERSION}, and a number of a rank")
    if not isinstance(facts, dict) or not all(isinstance(text, str) for text in facts.values()):
        raise ValueError("facts are a mapping from names to texts")
    return RankBorders(rank=record["rank"], facts=facts)


def _border(record: Any, arrays: dict[int, NDArray[Any]]) -> Border:
    fields = {name: record[name] for name in _PLAIN}
    fields |= {name: record[name] for name in _MORE if name in record}
    for name, value in fields.items():
        if not isinstance(value, _TYPES[name]) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r:.40}")
    if fields["kind"] not in KINDS or fields["phase"] not in PHASES:
        raise ValueError(f"kind={fields['kind']!r:.40}, phase={fields['phase']!r:.40}")
    if "shape" in fields:
        fields["shape"] = tuple(int(size) for size in fields["shape"])
    if fields.get("scale", 0.0) < 0:
        fields["scale"] = float("nan")
    numbers = None
    if "same" in record:
        numbers = arrays[record["same"]]
    elif "numbers" in record:
        if record["format"] not in ("<f4", "<f8"):
            raise ValueError(f"format={record['format']!r:.40}")
        data = base64.b64decode(record["numbers"], validate=True)
        numbers = arrays[fields["order"]] = np.frombuffer(data, dtype=record["format"])
    return Border(numbers=numbers, **fields)


def load_folder(folder: Path) -> list[RankBorders]:
    """Return the borders of all ranks that recorded to `folder`, in the order of ranks."""
    ranks: Iterable[RankBorders] = map(load, sorted(folder.glob(f"*{SUFFIX}")))
    return sorted(ranks, key=lambda rank: rank.rank)
