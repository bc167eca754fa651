"""A real run of three stages whose processes kill themselves, one after the other, at messages."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.service.cluster import Process

COORDINATOR = -1
UNTIL_S = 300.0
WHEN = ("before", "sent", "got")
# What each role sends and gets in a step; ranks 0, 1 and 2 are stages.
SENT = {
    COORDINATOR: ("Assign", "Weights", "Commit"),
    0: ("Activation", "Summed", "TreeNode", "Staged", "Applied"),
    1: ("Activation", "ActivationGradient", "Summed", "TreeNode", "Staged", "Applied"),
    2: ("ActivationGradient", "Summed", "TreeNode", "Staged", "Applied"),
}
GOT = {
    COORDINATOR: ("Summed", "TreeNode", "Staged", "Applied"),
    0: ("Assign", "ActivationGradient", "Weights", "Commit"),
    1: ("Assign", "Activation", "ActivationGradient", "Weights", "Commit"),
    2: ("Assign", "Activation", "Weights", "Commit"),
}


@dataclass(frozen=True)
class Doom:
    """The death of `role` at a message: `when` is `before`, `sent` or `got`."""

    role: int
    when: str
    message: str


def every() -> list[Doom]:
    """Return the deaths of each role at each message of a step."""
    found = []
    for when, of_role in zip(WHEN, (SENT, SENT, GOT), strict=True):
        for role, messages in of_role.items():
            found += [Doom(role, when, message) for message in messages]
    return found


def meet(
    dooms: Sequence[Doom],
    start: Callable[[int, tuple[str, str, int] | None, bool], Process],
) -> list[Process]:
    """Run until every doom is met, in one step each, and the run is over.

    `start` starts a role, told at which message it dies, and whether it has died before. Returns
    the last process of each role.
    """
    left = {
        role: [
            (one.when, one.message, step) for step, one in enumerate(dooms, 1) if one.role == role
        ]
        for role in SENT
    }
    running = {role: start(role, next(iter(left[role]), None), False) for role in SENT}
    end = time.monotonic() + UNTIL_S
    while any(left.values()) or not all(one.has_ended for one in running.values()):
        assert time.monotonic() < end, f"not met: {left}; {running[COORDINATOR].text}"
        time.sleep(0.02)
        for role, process in running.items():
            if not left[role] or not process.has_ended:
                continue
            code = process.code()
            assert code == -signal.SIGKILL, f"role {role} ended with {code}: {process.text}"
            left[role].pop(0)
            running[role] = start(role, next(iter(left[role]), None), True)
    return [*running.values()]
