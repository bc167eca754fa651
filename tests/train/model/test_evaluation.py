"""Scores in words."""

from __future__ import annotations

import numpy as np

from entrenar_py.train.model.evaluation import Scores


def test_a_share_of_nothing_is_a_dash() -> None:
    """A class without samples has no recall; one that nothing was taken for has no precision."""
    scores = Scores(
        loss=0.5, weight=4, labels=("safe", "unsafe"), confusion=np.array([[3, 1], [0, 0]])
    )
    assert list(scores.lines()) == [
        "loss 0.5000, 3 of 4 right",
        "safe: recall 0.750 (3 of 4), precision 1.000, F1 0.857",
        "unsafe: recall - (0 of 0), precision 0.000, F1 0.000",
    ]
    scores = Scores(loss=0.5, weight=1, labels=("safe", "unsafe"), confusion=np.diag([1, 0]))
    assert list(scores.lines())[-1] == "unsafe: recall - (0 of 0), precision -, F1 -"
