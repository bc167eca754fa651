"""A small model under observation, and the record that its rank leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import entrenar_py
from entrenar_py.check.observing import Observation
from entrenar_py.check.rank_files import rank_file
from entrenar_py.check.rank_files.rank_file import RankTrace
from entrenar_py.shared.trace import E


def begun(
    model: nn.Module | None = None, **options: Any
) -> tuple[Any, torch.optim.Optimizer, Observation]:
    """Return a model, by default of one weight and one bias, its SGD, and their observation."""
    model = nn.Linear(1, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, entrenar_py.observe(model, optimizer, **options)


def recorded(folder: Path) -> RankTrace:
    """Return the record of the only life of the only rank."""
    (path,) = folder.glob("*.rank.jsonl")
    return rank_file.load(path)


def of(kind: type[E], record: RankTrace | Path) -> list[E]:
    """Return the events of one kind, of a record or of the only one in a folder."""
    record = recorded(record) if isinstance(record, Path) else record
    return [event for event in record.events if isinstance(event, kind)]
