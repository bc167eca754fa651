"""Common random numbers: what is drawn doesn't depend on the rank or on how a batch is split."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import fetch

from entrenar_py.check.observing import common_numbers, mirrored_batches
from entrenar_py.check.observing.common_numbers import CommonNumbers
from entrenar_py.shared.faults import MERGED, MIRRORED, Fault


@pytest.fixture
def numbers() -> Iterator[CommonNumbers]:
    """Draw common numbers within a test, and leave the generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with CommonNumbers() as numbers:
        numbers.seed(3)
        yield numbers
    random.setstate(python)
    np.random.set_state(numpy)


DRAWS: dict[str, Callable[[int], Tensor]] = {
    "randn": lambda rows: torch.randn(rows, 5),
    "randn_like": lambda rows: torch.randn_like(torch.zeros(rows, 5)),
    "rand": lambda rows: torch.rand(rows, 5, dtype=torch.float64),
    "randint": lambda rows: torch.randint(3, 90, (rows, 5)),
    "one number a row": lambda rows: torch.randint(1000, (rows,)).unsqueeze(1),
    "in place": lambda rows: torch.empty(rows, 2, 5).exponential_(2.0),
    "spread": lambda rows: torch.normal(torch.zeros(rows, 5), 2.0),
    "of a generator": lambda rows: torch.randn(rows, 5, generator=torch.Generator()),
    "one of some for all": lambda rows: torch.multinomial(
        torch.arange(1.0, 9), 3 * rows, replacement=True
    ).view(rows, 3),
    "one of a row": lambda rows: torch.multinomial(torch.rand(rows, 5), 1),
    "shares of a row": lambda rows: torch._sample_dirichlet(torch.arange(1.0, 6).repeat(rows, 1)),
    "waiting times": lambda rows: torch._standard_gamma(torch.full((rows, 5), 0.4)),
    "one time a row": lambda rows: torch._standard_gamma(torch.full((rows,), 0.4)).unsqueeze(1),
    "counts": lambda rows: torch.poisson(torch.arange(1.0, 6).repeat(rows, 1)),
    "successes": lambda rows: torch.binomial(
        torch.full((rows, 5), 9.0), torch.tensor(0.3).expand(rows, 5)
    ),
    "a share for all": lambda rows: torch.distributions.Beta(0.2, 0.2).sample().expand(rows, 1),
    "dropout": lambda rows: nn.functional.dropout(torch.ones(rows, 5), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_row_gets_the_same(name: str, numbers: CommonNumbers) -> None:
    """So half of a batch gets what the whole of it does, and torch's generator does not move."""
    before, draw = torch.get_rng_state(), DRAWS[name]
    whole = draw(8)
    numbers.seed()
    half = draw(4)
    assert torch.equal(whole[:4], half)
    assert torch.equal(whole[4:], half)
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_are_drawn_anew(numbers: CommonNumbers) -> None:
    """The next draw of a step has other numbers, and so has the next step."""
    first, second = torch.rand(2, 3), torch.rand(2, 3)
    numbers.seed(4)
    third = torch.rand(2, 3)
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)
    assert 0 <= float(first.min()) <= float(first.max()) <= 1


def test_all_units_are_kept(numbers: CommonNumbers) -> None:
    """Dropout is the same for all samples: it scales, and drops nothing."""
    dropped = nn.Dropout(0.2)(torch.ones(3, 4))
    assert torch.allclose(dropped, torch.full((3, 4), 1.25))
    query = torch.ones(1, 1, 3, 4)
    attended = nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert float(attended.std()) < 1e-6


def test_an_order_of_its_own_generator_stays(numbers: CommonNumbers) -> None:
    """Samplers draw these; a permutation of a batch would be another one of half of it."""
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1)).tolist()
    assert order != sorted(order)
    assert torch.randperm(6).tolist() == [*range(6)]


def test_what_is_not_known_shows(numbers: CommonNumbers) -> None:
    """A draw that isn't replaced moves the generator: runs that have one aren't comparable."""
    before = torch.get_rng_state()
    torch.multinomial(torch.ones(4), 2)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("together", [True, False])
def test_copies_of_a_sample_choose_by_numbers_of_their_own(
    together: bool, numbers: CommonNumbers
) -> None:
    """Each copy chooses as that of another sample does, however many samples a batch has."""
    shares = torch.eye(6)[:4] + 0.4

    def chosen(num: int) -> Tensor:
        numbers.begin_batch(num)
        own = shares[:num]
        rows = own.repeat_interleave(5, 0) if together else own.repeat(5, 1)
        first, second = (torch.multinomial(rows, 1) for _ in range(2))
        both = torch.cat([first, second], 1)
        return both.view(num, 5, 2) if together else both.view(5, num, 2).transpose(0, 1)

    whole = chosen(4)
    assert len({tuple(copy.tolist()) for copy in whole[0]}) > 1
    assert torch.equal(chosen(2), whole[:2])


def test_samples_that_are_alike_show_no_copies(numbers: CommonNumbers) -> None:
    """Then all rows choose what is most likely."""
    numbers.begin_batch(4)
    rows = torch.tensor([0.2, 0.5, 0.3]).expand(8, 3)
    assert torch.multinomial(rows, 1).tolist() == [[1]] * 8


def test_numpy_and_python_are_seeded_by_step(numbers: CommonNumbers) -> None:
    """Every rank draws the same for a micro-batch; that they were seeded is told."""
    told: list[int] = []
    numbers.reseeded = lambda: told.append(1)
    numbers.seed(5)
    drawn = random.random(), np.random.rand()
    numbers.seed(5)
    assert (random.random(), np.random.rand()) == drawn
    numbers.seed(6)
    assert random.random() != drawn[0]
    assert len(told) == 3


class _Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.cat([torch.randn(3), torch.tensor([random.random() + np.random.rand()])])


def test_a_sample_has_numbers_of_its_own(
    numbers: CommonNumbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its augmentation follows from its index, whichever batch it is in, in a worker, too."""
    fetcher = fetch._MapDatasetFetcher
    monkeypatch.setattr(fetcher, "fetch", common_numbers._fetching(fetcher.fetch))
    monkeypatch.setattr(common_numbers, "CURRENT", numbers)
    before = random.getstate()
    whole = next(iter(DataLoader(_Noisy(), 8)))
    part = next(iter(DataLoader(_Noisy(), 2, sampler=[5, 3])))
    worker = next(iter(DataLoader(_Noisy(), 2, sampler=[5, 3], num_workers=1)))
    assert torch.equal(part, whole[[5, 3]])
    assert torch.equal(worker, part)
    assert not torch.equal(part[0], part[1])
    assert random.getstate() == before


class _Masking:
    """A collator that masks tokens by draws of its own, as many as a row's length takes."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, rows: list[int]) -> list[list[float]]:
        return [[*self.rng.random(row % 3 + 1)] for row in rows]


OWN = random.Random(7)


def _by_a_global(rows: list[int]) -> list[float]:
    return [OWN.random() for _ in rows]


@pytest.mark.parametrize("kind", ["attribute", "bound", "keyword", "global"])
def test_a_collators_own_generator_is_seeded_by_sample(
    kind: str, numbers: CommonNumbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So noise in a batch is alike whatever the rank's seed, and whoever is in the batch beside."""
    fetcher = fetch._MapDatasetFetcher
    monkeypatch.setattr(fetcher, "fetch", common_numbers._fetching(fetcher.fetch))
    monkeypatch.setattr(common_numbers, "CURRENT", numbers)

    def batch(seed: int, sampler: list[int]) -> list[Any]:
        masking = _Masking(seed)
        collate = {
            "attribute": masking,
            "bound": masking.__call__,
            "keyword": partial(lambda rows, by: by(rows), by=masking),
            "global": _by_a_global,
        }[kind]
        return next(iter(DataLoader(range(12), 4, sampler=sampler, collate_fn=collate)))  # type: ignore[arg-type]

    whole, part = batch(1, [0, 5, 3, 8]), batch(2, [3, 5])
    assert part == [whole[2], whole[1]]
    assert whole[1] != whole[2]


def test_ranks_have_one_share() -> None:
    """Batches of one worker are cut to a share, or have it repeated; a stream is left alone."""
    drawn = [[7, 1, 5, 3], [0, 2, 4, 6], [8, 9]]
    assert shared(drawn) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert shared(drawn, parts=2) == [[0, 1], [2, 3], [4]]
    assert shared(drawn, parts=2, copies=2) == [[0, 1] * 2, [2, 3] * 2, [4] * 2]
    assert shared([[None, None], 3], parts=2) == [[None, None], 3]


def test_ranks_have_parts_of_one_order() -> None:
    """Together they have what one worker has, whatever their samplers drew."""
    whole = shared([[7, 1, 5, 3], [0, 2, 4, 6], [8, 9]])
    halves = [shared([[5, 0], [3, 3], [1]], rank=rank, of=2) for rank in (0, 1)]
    assert [[*one, *other] for one, other in zip(*halves, strict=True)] == whole


def shared(drawn: list[Any], **share: int) -> list[Any]:
    """Return what is fetched of ten samples in place of the batches that were drawn."""
    loader: DataLoader[int] = DataLoader(range(10))  # type: ignore[arg-type]
    return [*mirrored_batches.shares(iter(drawn), loader, mirrored_batches.Share(**share))]


def test_a_share_is_one_of_merged_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch of a worker may have an odd number of samples, of which there is no half."""
    order: list[Any] = []
    monkeypatch.setattr(mirrored_batches, "_CHANGED", set())
    monkeypatch.setattr(mirrored_batches, "_change", lambda drawn: order.append(drawn))
    monkeypatch.setattr(mirrored_batches, "_change_length", lambda _: None)
    kinds = (MIRRORED, MERGED)
    mirrored_batches.begin([Fault(kind=kind, step=0, value="2") for kind in kinds])
    loader: DataLoader[int] = DataLoader(range(10), 3)  # type: ignore[arg-type]
    fetched = iter([[3, 1, 0], [5, 2, 4]])
    for drawn in order:
        fetched = drawn(fetched, loader)
    assert [*fetched] == [[0, 1, 2]]


def test_units_are_kept_however_they_are_dropped(numbers: CommonNumbers) -> None:
    """By hand, by paths, or by a layer in evaluation mode, which drops nothing either way."""
    kept = torch.ones(3)
    assert torch.equal(torch.empty(3).bernoulli_(0.1), kept)
    likely = torch.tensor([0.9, 0.1, 0.6])
    assert torch.equal(torch.empty(3).bernoulli_(likely), torch.tensor([1.0, 0.0, 1.0]))
    assert torch.equal(torch.bernoulli(torch.tensor([0.9, 0.1])), torch.tensor([1.0, 0.0]))
    assert torch.equal(torch.native_dropout(kept, 0.5, False)[0], kept)
    assert torch.equal(nn.Dropout(0.5).eval()(kept), kept)


def test_what_was_drawn_is_known(numbers: CommonNumbers) -> None:
    """Ranks that draw in each row of their own, or choose among them, don't draw alike."""

    def drawn(draw: Callable[[], object]) -> int:
        numbers.seed(3)
        draw()
        return numbers.drawn

    assert drawn(lambda: torch.randn(8, 5)) == drawn(lambda: torch.randn(4, 5)) != drawn(int)
    assert drawn(lambda: torch.randint(9, (8,))) == drawn(lambda: torch.randint(9, (4,)))
    assert drawn(lambda: nn.functional.dropout(torch.ones(3), 0.5)) == drawn(int)
    for draw in (
        lambda rows: [torch.rand(5) for _ in range(rows)],
        lambda rows: torch.randperm(rows)[:2],
        lambda rows: torch.rand(rows).argsort(),
        lambda rows: torch.randint(rows, (2,)),
        lambda rows: torch.multinomial(torch.ones(rows), 2, replacement=True),
        lambda rows: torch.rand(2, rows),
    ):
        assert drawn(lambda draw=draw: draw(8)) != drawn(lambda draw=draw: draw(4))  # type: ignore[misc]
