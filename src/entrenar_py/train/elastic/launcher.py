"""A rank as torchrun describes it, and the store in which elastic ranks agree.

torchrun's agent keeps the store, which outlives the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    TCPStore,
)

from entrenar_py.shared.errors import UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(seconds=300)  # for the store to answer
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Seat:
    """A rank of the launcher, of `num_seats`, and its store."""

    store: Store
    seat: int
    num_seats: int


def seat_of_launcher(environment: Mapping[str, str] = os.environ) -> Seat:
    """Return this process's seat: the only one, if no launcher started it.

    Raises UsageError if another launcher than torchrun started it, or if some of its variables are
    missing or are no numbers.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Seat(HashStore(), 0, 1)
    missing = [name for name in _NAMES if name not in environment]
    if missing:
        raise UsageError(
            f"the environment has no {missing[0]}: start ranks with torchrun, which sets "
            f"{', '.join(_NAMES)}; for a single rank set none of them"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not environment[name].isdecimal():
            raise UsageError(f"{name}={environment[name]!r} in the environment is not a number")
        numbers[name] = int(environment[name])
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UsageError(
            "elastic training needs the store of torchrun's agent, which outlives the ranks, and "
            "TORCHELASTIC_USE_AGENT_STORE=True is not in the environment: start ranks with torchrun"
        )
    store = TCPStore(
        environment["MASTER_ADDR"],
        numbers["MASTER_PORT"],
        is_master=False,
        timeout=_TIMEOUT,
        wait_for_workers=False,
    )
    # An agent that starts all ranks anew keeps its store.
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"entrenar-elastic/{environment.get('TORCHELASTIC_RUN_ID', '')}/{attempt}"
    return Seat(PrefixStore(prefix, store), numbers["RANK"], numbers["WORLD_SIZE"])
