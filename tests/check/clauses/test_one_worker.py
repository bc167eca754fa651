"""A command that starts one worker has no replicas to compare, and that is no open question."""

from __future__ import annotations

import pytest

from entrenar_py.check.clauses import CHECKS
from entrenar_py.shared.trace import Noticed, Trace
from tests.check.clauses import traces
from tests.check.clauses.traces import scenario

OF_SEVERAL = ("optimizer_state", "randomness", "recovery", "replica_identity")


def alone(world_size: int = 1, **seen: str) -> Trace:
    return traces.observed(
        scenario(world_size=world_size, optimizer="momentum"),
        **{"starts": "one", "sample_ids": "content", **seen},
    )


@pytest.mark.parametrize("check", OF_SEVERAL)
def test_a_clause_on_several_workers_does_not_apply_to_a_command_that_starts_one(
    check: str,
) -> None:
    """It does where the command can be told to start more, and where a run had more."""
    assert CHECKS[check].absent([alone()]).startswith("the command starts one worker, and nothing")
    assert CHECKS[check].absent([alone(starts="")]) == ""
    assert CHECKS[check].absent([alone(), alone(world_size=2)]) == ""


def test_streams_of_one_worker_are_judged_if_it_draws() -> None:
    """Dropout and a shuffled data set have to differ by step and by epoch on one worker, too."""
    dropped = traces.observed(scenario(world_size=1, dropout=0.5), starts="one")
    assert CHECKS["randomness"].absent([dropped]) == ""
    assert CHECKS["randomness"].absent([alone(sample_ids="known")]) == ""


def test_copies_of_a_tied_tensor_are_judged_on_one_worker() -> None:
    """They are compared within a rank."""
    ran = alone()
    first, second, *_ = next(event for event in ran.events if hasattr(event, "weights")).weights
    noticed = Noticed(step=0, rank=0, shared=((first, second),))
    tied = traces.hand_written(noticed, *ran.events[:-1], subject=ran.scenario)
    assert CHECKS["replica_identity"].absent([traces.was(tied, starts="one")]) == ""
