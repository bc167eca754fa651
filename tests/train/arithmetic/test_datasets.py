"""The data sets that need no download."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.arithmetic import datasets

NUM_DIGIT_SAMPLES = 1797


def test_digits_are_the_published_test_set() -> None:
    """Pixels and labels have the digest of those that scikit-learn's `load_digits` returns."""
    pixels, labels = datasets.digits(NUM_DIGIT_SAMPLES)
    assert pixels.dtype == np.float32
    assert labels.dtype == np.int64
    rows = np.concatenate([pixels * 16, labels[:, None]], axis=1).astype(np.uint8)
    assert datasets.digest(rows) == "871a762edb23c6d138f1434d0b23e9fe"
    assert (pixels.min(), pixels.max()) == (0, 1)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_do_not_need_torch() -> None:
    """Reading the digits doesn't import torch, which would cost seconds."""
    code = (
        "import sys; from entrenar_py.train.arithmetic import datasets; datasets.digits(5);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@settings(deadline=None)
@given(st.integers(min_value=1, max_value=NUM_DIGIT_SAMPLES))
def test_a_smaller_set_is_a_prefix_of_a_larger(num_samples: int) -> None:
    """Sample k is the same whatever the number of samples."""
    pixels, labels = datasets.digits(num_samples)
    all_pixels, all_labels = datasets.digits(NUM_DIGIT_SAMPLES)
    np.testing.assert_array_equal(pixels, all_pixels[:num_samples])
    np.testing.assert_array_equal(labels, all_labels[:num_samples])
    assert datasets.lines(num_samples) == datasets.lines(NUM_DIGIT_SAMPLES)[:num_samples]


def test_a_callers_change_does_not_reach_the_next_caller() -> None:
    """The arrays handed out are copies: the cached table stays as the file has it."""
    pixels, labels = datasets.digits(3)
    before = pixels.copy(), labels.copy()
    pixels[:] = 7
    labels[:] = 7
    again = datasets.digits(3)
    np.testing.assert_array_equal(again[0], before[0])
    np.testing.assert_array_equal(again[1], before[1])


def test_lines_are_bounded_unindented_and_of_many_lengths() -> None:
    """Every line has something to predict, fits a sequence, and lengths differ early on."""
    lines = datasets.lines(50)
    lengths = {len(line) for line in lines}
    assert lengths <= set(range(datasets.LINE_BYTES_MIN, datasets.LINE_BYTES_MAX + 1))
    assert len(lengths) >= 5
    assert all(line == line.lstrip() and b"\n" not in line for line in lines)


def test_digest_sees_values_and_boundaries_of_rows() -> None:
    """The digest has 32 hex digits, repeats, and changes with one element or with the order."""
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    digest = datasets.digest(rows)
    assert len(digest) == 32
    assert int(digest, 16) >= 0
    assert digest == datasets.digest(rows.copy())
    assert digest == datasets.digest(rows[0], rows[1])
    assert digest != datasets.digest(rows[1], rows[0])
    assert digest != datasets.digest(rows.T)


def test_asking_for_more_digits_than_there_are_names_both_numbers() -> None:
    """Too many samples of `mlp` is a usage error that says how many there are."""
    with pytest.raises(UsageError, match=r"num_samples=1798 with workload=mlp.*<=1797"):
        datasets.digits(NUM_DIGIT_SAMPLES + 1)


def test_asking_for_more_lines_than_there_are_names_both_numbers() -> None:
    """Too many samples of `decoder` is a usage error that says how many there are."""
    with pytest.raises(UsageError, match=r"num_samples=999999 with workload=decoder.*has (\d+)"):
        datasets.lines(999_999)
