"""The words that a command is given for each knob of its script."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from entrenar_py.checks.knobs import KNOBS
from entrenar_py.errors import UsageError, did_you_mean


def beside(name: str, given: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Return the knobs among `given` that are turned with knob `name`, and what to."""
    return tuple((other, KNOBS[other].others[0]) for other in KNOBS[name].beside if other in given)


def require_spelled(spelled: Mapping[str, Mapping[str, str]], given: Collection[str]) -> None:
    """Return if each knob and each value in `spelled` is one that turns; else raise UsageError.

    `given` are the knobs that the command has.
    """
    for name, values in spelled.items():
        if name not in KNOBS:
            raise UsageError.of("knobs", name, f"no knob; {did_you_mean(name, KNOBS)}")
        if name not in given:
            raise UsageError.of("knobs", name, f"the command has no {{{name}}}; say where it goes")
        known = (KNOBS[name].usual, *KNOBS[name].others)
        for value in values:
            if value not in known:
                raise UsageError(
                    f"knobs {name}={value!r}: it has no such value; it has {', '.join(known)}",
                    field="knobs",
                )
