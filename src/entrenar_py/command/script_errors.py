"""Find the script's own error, not its launcher's, in what a failed command printed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

BYTES_MAX = 2**18
_BEGINS = "Traceback (most recent call last):"
_RANK = re.compile(r"\[(?:rank)?\d+\]:\s?|\[default\d+\]:\s?")  # in front of a rank's lines
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?::(?:\s.*)?)?")
# What launchers raise when a worker has failed.
_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException")


def error(output: Path) -> str:
    """Return the line of the script's last exception in the file `output`; "" for none."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - BYTES_MAX))
            text = file.read(BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
    return _last_error(text.splitlines())


def _last_error(lines: Iterable[str]) -> str:
    error_line, within = "", False
    for printed in lines:
        prefix = _RANK.match(printed)
        line = printed[prefix.end() :] if prefix else printed
        if line.rstrip() == _BEGINS:
            within = True
        elif within and _ERROR.fullmatch(line.rstrip()):
            within = False
            if line.partition(":")[0].rpartition(".")[2] not in _OF_LAUNCHERS:
                error_line = line.rstrip()
    return error_line
