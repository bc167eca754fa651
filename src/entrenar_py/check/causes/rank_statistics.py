"""Test whether ranks compute with statistics of their own samples. Judges nothing.

BatchNorm does, and so do layers that people write themselves: they keep running statistics in
buffers. Their results rightly depend on how a batch is divided.
"""

from __future__ import annotations

from entrenar_py.check import evidence
from entrenar_py.check.causes.compared import Compared
from entrenar_py.shared.faults import MIRRORED
from entrenar_py.shared.trace import Trace
from entrenar_py.shared.wording import listed


def lacking(compared: Compared) -> str:
    """Return why two runs that divide batches differently can't be compared; "" if they can.

    Buffers that follow from a rank's samples may be without effect (a counter, a monitor): then the
    runs agree.
    """
    names = _statistics(compared.trace) or _statistics(compared.model)
    if not names or _division(compared.trace) == _division(compared.model):
        return ""
    is_mirrored = any(fault.kind == MIRRORED for fault in compared.trace.scenario.faults)
    if is_mirrored or compared.difference is None:
        return ""
    return (
        f"buffers follow from the samples of a rank ({listed(names, most=2)}), and the runs differ "
        "where they may have an effect: another division of the batch is another training; use "
        "statistics of all ranks (SyncBatchNorm), or if the script's own layers do, declare "
        f'observe(..., synchronised_buffers=("{names[0]}",))'
    )


def _division(trace: Trace) -> tuple[int, int]:
    return trace.scenario.world_size, trace.scenario.accumulation


def _statistics(trace: Trace) -> list[str]:
    """Return the local buffers of floating-point numbers."""
    updates = (evidence.any_rank(by_rank) for by_rank in evidence.updates(trace).values())
    first = next((update.local for update in updates if update.local), {})
    return [name for name, record in first.items() if record.dtype.startswith("float")]
