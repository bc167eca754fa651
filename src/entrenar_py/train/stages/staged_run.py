"""A run whose stages are workers: its scenario, and what is told of its cut."""

from __future__ import annotations

from collections.abc import Iterator

from entrenar_py.shared import wording, workers
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.stages.cut import Cut


def scenario(plain: Scenario) -> Scenario:
    """Return the scenario of the same training by stages, whatever their number."""
    options = {**plain.options, workers.OPTION: workers.SERVER}
    return plain.with_(world_size=1, options=options)


def lines(cut: Cut) -> Iterator[str]:
    """Yield a line for each stage."""
    for stage, (own, ranks) in enumerate(zip(cut.stages, cut.ranks, strict=True)):
        names = [cut.names[rank] or f"rank {rank}" for rank in ranks]
        needed = f" on {cut.backends[stage]}" if cut.backends[stage] else ""
        yield f"stage {stage}: {wording.spanned('block', own)}, {', '.join(names)}{needed}"
