"""Correct variants of a server that makes the steps: no check may report any of these."""

from __future__ import annotations

from entrenar_py.shared.faults import Fault
from entrenar_py.shared.mutants import Variant
from entrenar_py.train.coordinator.server import Server

from .subjects import SERVER, star

_prepare = Server.prepare


def in_new_memory(self: Server, step: int) -> tuple[float, float]:
    """Prepares every step in new memory."""
    self._beside = None
    return _prepare(self, step)


_LEAVING = Fault(kind="leave", rank=1, step=1)
_SERVED = star(options={"updates": "server", "block_bytes": 400}, optimizer="momentum", num_steps=5)
_TRIED = ("F-DP-001", "F-DP-002", "F-DP-005", "F-DP-006", "F-TI-006", "F-TI-007", "F-WP-005")

VARIANTS = (
    Variant(
        name="server-updates",
        summary="the server takes the steps, and a worker is lost",
        plants={},
        scenario=_SERVED.with_(faults=(_LEAVING,), dropout=0.2, clip_norm=0.05),
        tried=_TRIED,
    ),
    Variant(
        name="server-updates-stopped",
        summary="the server takes the steps, stops in the middle, and resumes from its checkpoint",
        plants={},
        scenario=_SERVED.with_(stops=(2, 3), optimizer="adamw"),
        tried=("F-DP-001", "F-DP-005", "F-TI-003", "F-TI-008"),
    ),
    Variant(
        name="prepared-in-new-memory",
        summary="the server prepares each step in new memory",
        plants={f"{SERVER}.Server.prepare": in_new_memory},
        scenario=_SERVED.with_(
            faults=(Fault(kind="kill", rank=1, step=1, at="Weights"),), world_size=4
        ),
        tried=_TRIED,
    ),
)
