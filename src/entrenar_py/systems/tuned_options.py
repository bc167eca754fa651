"""The options of the systems that fine-tune, for the table; `finetuned.asked` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TUNED = (
    *("task", "method", "family", "rank", "alpha", "class_weights", "oversample", "blocks"),
    "marks",
)
OWN = (*TUNED, "facts", "recompute")  # of what the trainer itself fine-tunes
BY_RANKS = (*TUNED, "strategy")
# Those that say which part of the model each worker has.
PLACES = ("cuts",)
DISTILLED = (*TUNED, "packing", "facts", "top_k", "temperature", "share")
STAGED = (*OWN, *PLACES, "network_seed")


def unplaced(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` for another number of workers than they have places for."""
    return {name: value for name, value in options.items() if name not in PLACES}
