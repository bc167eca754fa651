"""Ranks that agree: what fails on one of them fails on all, with one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from entrenar_py.shared.errors import CheckpointError, ContractError, EntrenarError, UsageError

Result = TypeVar("Result")
_KINDS = (CheckpointError, UsageError)  # raised again as what they are; others as EntrenarError


def together(action: Callable[[], Result]) -> Result:
    """Return the result of `action` on this rank, once all ranks have theirs.

    If one or more raise an error of this package, or an OSError, all raise that of the lowest rank.
    A collective within `action` must come before anything that can fail on some ranks alone, or
    after that was agreed on: a rank that has left waits for the others here.
    """
    problem: tuple[str, object] | None = None
    try:
        result = action()
    except ContractError as error:
        problem = ContractError.__name__, error.problems
    except (EntrenarError, OSError) as error:
        kinds = [kind.__name__ for kind in _KINDS if isinstance(error, kind)]
        problem = (kinds or [EntrenarError.__name__])[0], str(error)
    everyone: list[tuple[str, object] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem)
    for rank, theirs in enumerate(everyone):
        if theirs is not None:
            raise _as_error(*theirs, rank)
    return result


def _as_error(kind: str, told: object, rank: int) -> EntrenarError:
    if isinstance(told, list):
        return ContractError(told)
    text = str(told) if rank == 0 else f"rank {rank}: {told}"
    kinds = {one.__name__: one for one in _KINDS}
    return kinds.get(kind, EntrenarError)(text)
