"""Buffers that follow from the samples of a rank, such as BatchNorm's running statistics.

They rightly differ between ranks. But a rank's own must be the same in two runs, and after a
resume. That is judged for the lowest rank, whose buffers people save for all.
"""

from __future__ import annotations

from collections.abc import Mapping

from entrenar_py.check import evidence
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.trace import Trace, Update
from entrenar_py.shared.verdict import Tally
from entrenar_py.shared.wording import listed

_AGREED_MIN = 2  # steps in which ranks with other samples don't agree by chance


def tell(tally: Tally, trace: Trace) -> None:
    """Note which buffers are not compared between ranks; report those that began to differ."""
    names: dict[str, None] = {}
    agreed: dict[str, int] = {}  # name -> steps after which all ranks had the same
    for step, by_rank in evidence.ranks_by_step(trace):
        if len(by_rank) < 2:
            continue
        for name in evidence.any_rank(by_rank).local:
            names[name] = None
            if _agree(name, by_rank):
                agreed[name] = agreed.get(name, 0) + 1
            elif agreed.pop(name, 0) >= _AGREED_MIN and _is_float(name, by_rank):
                tally.miss(
                    f"{name} agreed on all ranks until step {step}, and differs from there on: if "
                    f"ranks synchronise it, declare {_declaration(name)}"
                )
    if names:
        tally.note(
            f"not compared between ranks, as a rank's own samples may change them: "
            f"{listed([*names], most=4)}; if all ranks change them alike, declare "
            f"{_declaration(next(iter(names)))}"
        )


def compare(tally: Tally, model: Trace, trace: Trace, message: str) -> None:
    """Compare the lowest rank's local buffers after each step that both runs made."""
    expected = evidence.updates(model)
    for step, by_rank in evidence.ranks_by_step(trace):
        lowest = evidence.any_rank(by_rank)
        other = expected.get(step, {}).get(lowest.rank)
        if other is None or not other.local or not lowest.local:
            continue
        place = evidence.place(trace, lowest)
        closeness.compare_exact(tally, other.local, lowest.local, message, **place)


def _declaration(name: str) -> str:
    return f'observe(..., synchronised_buffers=("{name}",))'


def _agree(name: str, by_rank: Mapping[int, Update]) -> bool:
    records = [update.local.get(name) for update in by_rank.values()]
    return len({record.digest if record else "absent" for record in records}) == 1


def _is_float(name: str, by_rank: Mapping[int, Update]) -> bool:
    return evidence.any_rank(by_rank).local[name].dtype.startswith("float")
