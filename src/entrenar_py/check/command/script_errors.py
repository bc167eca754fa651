"""Find the error of a failed script in what its launcher has printed.

A launcher adds pages of its own to it: its log, a traceback of itself, advice. And when one rank
has failed, the others fail, too, since they wait for it in vain: that is not the cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

OUTPUT_BYTES_MAX = 2**18
_BEGINS = "Traceback (most recent call last):"
_RANK = re.compile(r"\[(?:rank)?\d+\]:\s?|\[default\d+\]:\s?")  # in front of a rank's lines
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?::(?:\s.*)?)?")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in .*')
# Frames within which a checkpoint is read, or is put into a model or an optimizer.
_LOADS = re.compile(
    r'torch/serialization\.py", line \d+, in \w*load$|/state_dict_loader\.py"|, in load_state_dict$'
)
_NOT_THE_SCRIPT = ("/site-packages/", "/dist-packages/", "/lib/python", "/entrenar_py/", "<")
# Exceptions that launchers raise when a worker has failed.
_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException")
# A line of torchrun's log.
_LOG = re.compile(r"[EWI]\d{4} \d\d:\d\d:\d\d\S* .*\.py:\d+\] ")
# Errors of a rank that lost its peers.
_OF_PEERS = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset|refused)|Broken pipe|wait ?timeout"
    r"|[Tt]imed out waiting|communicator was aborted|DistNetworkError"
    r"|[Ss]ocket [Tt]imeout"
)


@dataclass(frozen=True)
class _Error:
    """The last line of a traceback, and the innermost place of it that is in the script, or "".

    `loads` tells whether it was raised as a checkpoint was loaded.
    """

    line: str
    place: str
    loads: bool = False

    @property
    def of_a_launcher(self) -> bool:
        return self.line.partition(":")[0].rpartition(".")[2] in _OF_LAUNCHERS

    def __str__(self) -> str:
        return f"{self.line} ({self.place})" if self.place else self.line


def find(output: Path) -> str:
    """Return the script's last error in the file `output`, with its place, or "" if it has none.

    Errors of launchers are skipped, and those of ranks that lost their peers, if there is another.
    """
    error = _last(output)
    return "" if error is None else str(error)


def of_loading(output: Path) -> str:
    """Return the error that `find` returns, if the script was loading a checkpoint; else ""."""
    error = _last(output)
    return str(error) if error is not None and error.loads else ""


def _last(output: Path) -> _Error | None:
    errors = [one for one in _errors(_lines(output)) if not one.of_a_launcher]
    causes = [one for one in errors if not is_of_peers(one.line)]
    return next(reversed(causes or errors), None)


def is_of_peers(error: str) -> bool:
    """Return whether a rank has such an error because another has failed."""
    return bool(_OF_PEERS.search(error))


def last_line(output: Path, tail: Sequence[str]) -> str:
    """Return the last line that the script has printed, in `output` or else in `tail`, or "".

    The launcher's lines are skipped: its log, and all from its own traceback on.
    """
    lines = _lines(output) or [*tail]
    words = [line for line in _before_the_launcher(lines) if any(map(str.isalnum, line))]
    return words[-1].strip() if words else ""


def _lines(output: Path) -> list[str]:
    """Return the last lines of the file, without the marks that a launcher puts before them."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - OUTPUT_BYTES_MAX))
            text = file.read(OUTPUT_BYTES_MAX).decode(errors="replace")
            text = _COLOUR.sub("", text)
    except OSError:
        return []
    return [
        _RANK.sub("", line, count=1) if _RANK.match(line) else line for line in text.splitlines()
    ]


def _errors(lines: Sequence[str]) -> Iterator[_Error]:
    """Yield each error that a traceback ends with."""
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
