"""The first line of a rank's file: its keys, and the values that each may have.

A file may come from anywhere: the code that reads it relies on the types checked here.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from entrenar_py.shared.errors import TraceError
from entrenar_py.shared.trace.traits import CHOICES

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
    """Return whether `value` can be an optimizer's constant: number, null, or a list of these."""
    numbers = value if isinstance(value, list) else [value]
    return all(number is None or _is_number(number) for number in numbers)


def _are_groups(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_group, value))


def _is_group(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    # These must be numbers, as they are computed with; the others are only compared.
    numbers = [value[name] for name in ("lr", "initial_lr") if name in value]
    decay = value.get("weight_decay")
    numbers += [] if decay is None else [decay]
    return all(map(_is_number, numbers)) and all(map(_is_constant, value.values()))


def _are_versions(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


# Key -> whether it must be there, the test of its value, and the allowed values in words.
_KEYS: Mapping[str, tuple[bool, Test, str]] = {
    "rank": (True, _whole(0, RANKS_MAX - 1), f"a whole number from 0 to {RANKS_MAX - 1}"),
    "world_size": (True, _whole(1, RANKS_MAX), f"a whole number from 1 to {RANKS_MAX}"),
    "versions": (False, _are_versions, "a mapping from names to texts"),
    "pid": (False, _whole(0), "a whole number"),
    "values": (False, _is_flag, "true or false"),
    "auto": (False, _is_flag, "true or false"),
    "replicas": (False, _is_flag, "true or false"),
    "unseeded": (False, _is_flag, "true or false"),
    "alone": (False, _is_flag, "true or false"),
    "samples": (False, _is_text, "index, content or unknown"),
    "drawn": (False, _is_flag, "true or false"),
    "losses": (False, CHOICES["losses"].__contains__, "known or backward"),
    "num_samples": (
        *(False, lambda value: value is None or _whole(0)(value)),
        "a whole number, or null where it is not known",
    ),
    "drop_last": (False, _is_flag, "true or false"),
    "replacement": (False, _is_flag, "true or false"),
    "selects": (False, _is_text, "a line, as train.py:12"),
    "selects_in_steps": (False, _is_flag, "true or false"),
    "one_source": (False, _is_flag, "true or false"),
    "by_epoch": (False, _is_text, "a line, as train.py:12"),
    "clip_norm": (False, _is_norm, "a number above 0, or null where none was declared"),
    "clips": (False, _is_norm, "a number above 0, or null where no calls show one norm"),
    "reduction": (False, _is_text, "the name of a number format"),
    "loss_over": (False, CHOICES["loss_over"].__contains__, "batch, micro-batch, or nothing"),
    "splits": (False, _is_flag, "true or false"),
    "thorough": (False, _is_flag, "true or false"),
    "ordered": (False, _is_flag, "true or false"),
    "varied": (False, _is_flag, "true or false"),
    "joined": (False, _is_flag, "true or false"),
    "optimizer": (False, _is_text, "the name of a class"),
    "groups": (False, _are_groups, "a list of mappings from names to numbers"),
    "dropout": (False, _is_probability, "a number from 0 to 1"),
    "batch_norm": (False, _is_flag, "true or false"),
    "short_betas": (False, _is_flag, "true or false"),
}
# The keys that a later line may give, since what the script doesn't declare is met later.
OF_THE_DATA = (
    *("num_samples", "drop_last", "replacement", "thorough", "varied", "samples", "replicas"),
    *("losses", "clips", "alone", "selects", "selects_in_steps", "one_source", "by_epoch"),
    *("drawn", "ordered", "joined"),
)


def require(record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return `record` if it is the header of a rank's file of this version.

    Unknown keys are ignored, since a later release may write more. Raises TraceError, led by
    `where`, if `record` is no such header.
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
