"""How a wrong vector follows from the right one, in words."""

from __future__ import annotations

import numpy as np
import pytest

from entrenar_py.check.evidence import factors
from tests.traces import scenario

RIGHT = np.random.default_rng(0).normal(size=12).astype(np.float32)
FOUR = scenario(system="command", workload="own", world_size=4, num_shards=12, accumulation=3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (2 * RIGHT, "it is twice as large"),
        (RIGHT / 2, "it is half as large"),
        (4 * RIGHT, "it is 4 times as large (world_size)"),
        (RIGHT / 3, "it is 1/3 as large (1/accumulation)"),
        (12 * RIGHT, "it is 12 times as large (world_size * accumulation)"),
        (RIGHT / 12, "it is 1/12 as large (1/(world_size * accumulation))"),
        (RIGHT / 65536, "it is 1/65536 as large (2^-16)"),
        (RIGHT * np.float32(3**0.5), "it is 1.73205 times as large (the root of accumulation)"),
        (RIGHT * np.float32(0.37), "it is 0.37 times as large, in all elements"),
        (-RIGHT, "it has the opposite sign"),
        (-2 * RIGHT, "it is twice as large and of the opposite sign"),
        (0 * RIGHT, "it is zero"),
        (np.roll(RIGHT, 1), "it is shifted by one element"),
        (RIGHT[::-1].copy(), "it has the same values in another order"),
        (RIGHT, ""),
        (RIGHT + 1, ""),
        (RIGHT[:5], ""),
        (RIGHT * np.float32(np.nan), ""),
    ],
)
def test_a_relation_is_named(wrong: np.ndarray, words: str) -> None:
    """Only a relation that all elements have gets words; a reason if the scenario has one."""
    assert factors.of(RIGHT, wrong, FOUR) == words


@pytest.mark.parametrize(
    ("wrong", "meaning"),
    [
        (4 * RIGHT, "gradients are added over the workers, not averaged"),
        (RIGHT / 4, "gradients are divided by the number of workers twice"),
        (3 * RIGHT, "the loss is not divided by the number of micro-batches"),
        (RIGHT / 3, "the loss is divided by the number of micro-batches twice"),
        (2 * RIGHT, ""),
        (RIGHT * np.float32(3**0.5), ""),
        (-RIGHT, ""),
    ],
)
def test_a_factor_of_a_gradient_has_its_own_cause(wrong: np.ndarray, meaning: str) -> None:
    """A factor that the run explains names one cause; any other names none."""
    words = factors.of(RIGHT, wrong, FOUR, of_gradients=True)
    assert words.startswith(factors.of(RIGHT, wrong, FOUR))
    assert words.partition("which could mean: ")[2] == meaning


def test_nothing_is_said_of_a_multiple_of_zero() -> None:
    """Any vector could follow from zeros."""
    assert factors.of(0 * RIGHT, RIGHT) == ""
    assert factors.ratio(0 * RIGHT, RIGHT) is None


def test_a_factor_without_reason_is_simple_only_if_it_is_a_small_number() -> None:
    """1/65536 is the scale of a loss; 1/65 is nothing."""
    assert factors.named(2.0**-16, None) == ("1/65536", "2^-16")
    assert factors.named(1 / 65, None) is None
    assert factors.named(2.0, None) == ("2", "")


def test_rounding_that_is_allowed_hides_no_factor() -> None:
    """Within a bound for 16 bits, a factor is still found; within no bound are two of them."""
    noise = 1 + 1e-3 * np.random.default_rng(1).normal(size=12)
    assert factors.of(RIGHT, 2 * RIGHT * noise, bound=0.06) == "it is twice as large"
    assert factors.of(RIGHT, 2 * RIGHT * noise) == ""
