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


def test_pairs_have_a_margin() -> None:
    """No perplexity, which is of tokens, and no confusion."""
    none = np.zeros((0, 0), np.int64)
    scores = Scores(loss=0.5, weight=4, labels=(), confusion=none, num_right=3, margin=0.25)
    assert list(scores.lines()) == ["loss 0.5000, 3 of 4 right", "mean margin 0.2500"]
    assert (scores.accuracy, scores.are_of_tokens) == (0.75, False)
