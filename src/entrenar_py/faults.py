"""What can be made to go wrong in a run, as plain records inside a scenario.

Says what and where; the system that runs the scenario makes it happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from entrenar_py.errors import UsageError

# kind -> what it does. One table: the docs, the validation and the systems read it.
KINDS: dict[str, str] = {
    "non_finite_gradient": "one element of one shard's gradient becomes `value` (nan, inf, -inf)",
    "non_finite_loss": "one shard's loss becomes `value` (nan, inf, -inf), its gradient stays",
    "huge_gradient": "one element of every shard's per-sample gradients becomes `value`, finite",
    "leave": "worker `rank` dies while it computes step `step`; its shards go to the others",
    "join": "worker `rank` comes (back) before step `step` with the full state",
    "absent": "backend `backend` is not there",
    "init_error": "backend `backend` fails when it is opened",
    "out_of_memory": "backend `backend` runs out of memory while computing",
    "non_finite_output": "backend `backend` returns a result with a NaN in it",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planned fault. `step` counts from 0; `value` is text ("nan") so that JSON can hold it."""

    kind: str
    step: int | None = None
    rank: int | None = None
    shard: int | None = None
    tensor: str | None = None
    element: int | None = None
    value: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"fault kind={self.kind!r}: allowed are {', '.join(KINDS)}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready mapping of the fields that are set."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Fault:
        """The fault `record` describes; UsageError names an unknown key."""
        unknown = sorted(set(record) - set(cls.__dataclass_fields__))
        if unknown:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise UsageError(f"fault key={unknown[0]!r}: allowed are {allowed}")
        if "kind" not in record:
            raise UsageError(f"fault without kind: allowed kinds are {', '.join(KINDS)}")
        return cls(**record)
