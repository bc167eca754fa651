"""Rows of a batch are told apart by their digests, whatever they are padded to."""

from __future__ import annotations

import pytest
import torch

from entrenar_py.check.observing.contents import rows_of


@pytest.mark.parametrize("padding", [0, -100])
def test_padding_behind_a_row_is_no_part_of_it(padding: int) -> None:
    """A batch is padded to its longest row, which may be another one in another run."""
    short = torch.tensor([[1, 2, 3], [4, 5, 6]])
    long = torch.nn.functional.pad(short, (0, 2), value=padding)
    assert rows_of(short) == rows_of(long)


def test_rows_of_one_length_stay_apart() -> None:
    """Zeros inside, and rows that differ in how many zeros they end with, are no padding."""
    rows = torch.tensor([[1, 0, 2], [1, 2, 0], [1, 0, 0], [0, 0, 0], [256, 0, 0]])
    digests = rows_of(rows)
    assert digests is not None
    assert len(set(digests)) == len(rows)
    features = rows_of(rows.float())
    assert features is not None
    assert len(set(features)) == len(rows)
