"""Strangers that must find no free rank are refused where they might find one."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py.shared import systems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.faults import Fault
from tests.systems.stars import SIMULATED, subject

TAKEN = Fault(kind="stranger", step=2, rank=1, value="taken_rank")
ONE_TOO_MANY = Fault(kind="stranger", step=2, value="one_too_many")


def cut(step: int) -> Fault:
    """Return a fault that cuts worker 0 off in `step`."""
    return Fault(kind="cut", step=step, rank=0, at="Staged")


@pytest.mark.parametrize(
    "faults", [(TAKEN, ONE_TOO_MANY), (TAKEN, cut(3)), (ONE_TOO_MANY, TAKEN, cut(4))]
)
def test_strangers_that_find_no_place(faults: tuple[Fault, ...]) -> None:
    """Such a stranger is accepted while all workers are present."""
    systems.require_possible(subject(SIMULATED, faults=faults))


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ((TAKEN, cut(2)), "value=taken_rank step=2: a fault strikes a worker in step 2"),
        ((ONE_TOO_MANY, cut(0)), "value=one_too_many step=2: a fault strikes a worker in step 0"),
        ((Fault(kind="join", step=3, rank=1), TAKEN), "that worker is not present"),
        ((Fault(kind="join", step=3, rank=1), ONE_TOO_MANY), "2 of 3 workers are present"),
    ],
)
def test_strangers_that_might_find_one(faults: Any, message: str) -> None:
    """After a fault a rank may be free, and the stranger entitled."""
    with pytest.raises(UsageError, match=message):
        systems.require_possible(subject(SIMULATED, faults=faults))
