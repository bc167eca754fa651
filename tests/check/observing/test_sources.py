"""What a loader and its samplers show: whether samples are drawn again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler

from entrenar_py.check.observing.sources import Source

SIZE = 6


class Balanced(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        weights = torch.ones(SIZE)
        drawn = torch.multinomial(weights, SIZE, replacement=True)
        return iter([int(number) for number in drawn])


class Chosen(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(random.choices(range(SIZE), k=SIZE))


class Shuffled(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([int(number) for number in torch.randperm(SIZE)])


class Ranked(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        weights = torch.ones(SIZE)
        drawn = torch.multinomial(weights, SIZE, replacement=False)
        return iter([int(number) for number in drawn])

    def knows(self) -> bool:
        return True


class Seeded(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(random.randint(0, 9))
        return iter([int(number) for number in torch.randperm(SIZE, generator=generator)])


@pytest.mark.parametrize(
    ("sampler", "replaces"),
    [
        (Balanced, True),
        (Chosen, True),
        (Shuffled, False),
        (Ranked, False),
        (Seeded, False),
        (lambda: WeightedRandomSampler([1.0] * SIZE, SIZE), True),
        (lambda: WeightedRandomSampler([1.0] * SIZE, SIZE, replacement=False), False),
    ],
)
def test_samplers_that_draw_samples_again(
    sampler: Callable[[], Sampler[int]], replaces: bool
) -> None:
    """A sampler says so itself, or the text of the script's own class does."""
    assert Source(DataLoader(range(SIZE), sampler=sampler())).replacement is replaces  # type: ignore[arg-type]
