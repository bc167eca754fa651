"""The text of a script: the line that selects rows by random numbers, and what it divides by."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from entrenar_py.check.observing import loss_terms, script_text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ix = torch.randint(len(data) - size, (batch,))\n", "selected.py:1"),
        ("\nrows = random.sample(self.memory, n)\n", "selected.py:2"),
        ("ix = rng.integers(0, n, size=8)\n", "selected.py:1"),
        ("ix = np.random.choice(n, 8)\n", "selected.py:1"),
        ("action = policy.sample()\n", ""),
        ("# ix = torch.randint(n, (8,))\n", ""),
        ("noise = torch.randn(8, 4)\n", ""),
        ("ix = torch.randint(n, (8,))\norder = torch.randperm(n)\n", ""),
        ("ix = torch.randint(n, (8,))\nnp.random.shuffle(files)\n", ""),
        ("ix = torch.randint(n, (8,))\nsampler.set_epoch(1)\n", ""),
    ],
)
def test_the_line_that_selects_rows(text: str, line: str, written: Callable[[str], None]) -> None:
    """What orders rows at random may go through them once: then no line is said to select."""
    written(text)
    assert script_text.selecting_line() == line


@pytest.mark.parametrize(
    ("text", "is_random"),
    [
        ("order = sorted(range(n), key=lengths.__getitem__)[rank::world]\n", False),
        ('"""Nobody shuffles."""\nx = torch.randn(96, 4)\nclass ByLength(Sampler):\n', False),
        ("loader = DataLoader(rows, sampler=own, shuffle=False)\n", False),
        (
            "from torch.utils.data import (\n    DistributedSampler,\n    Sampler,\n)\nx = 1\n",
            False,
        ),
        ("from a import Sampler, \\\n    RandomSampler\nimport numpy.random.shuffle\n", False),
        ("import torch; order = torch.randperm(9)\n", True),
        ("val = DistributedSampler(rows, shuffle=False)\n", False),
        ("train = DistributedSampler(rows, seed=1)\n", True),
        ("loader = DataLoader(rows, shuffle=True)\n", True),
        ("order = torch.randperm(n, generator=generator)\n", True),
        ("random.Random(seed).shuffle(order)\n", True),
        ("order = torch.rand(n).argsort()\n", True),
        ("class Own(DistributedSampler):\n", True),
    ],
)
def test_whether_anything_may_be_shuffled(
    text: str, is_random: bool, written: Callable[[str], None]
) -> None:
    """A script that draws no order has the one that its own sampler states."""
    written(text)
    assert script_text.shuffles() is is_random


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("loss = criterion(out, y) / 4", 4),
        ("loss /= 4.0", 4),
        ("loss = loss.div_(4)", 4),
        ("loss = kl / T**2", 9),
        ("loss = error / (2 * variance)", 6),
        ("loss = error / (2 * 2)", 4),
    ],
)
def test_a_number_that_the_script_divides_by(
    text: str, number: float, written: Callable[[str], None]
) -> None:
    """The number is written, or a part of it is, so that it is no count of micro-batches."""
    written(text)
    loss_terms._divisors.cache_clear()
    assert loss_terms.divides_by(number)
    loss_terms._divisors.cache_clear()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "loss / accumulation",
            "loss / len(parts)",
            "loss / 40",
            "n // 4",
            "x / 10000 ** (i / 8)",
        ),
        *("loss / (a + 4)", "x / -4", "loss / (5 * n)", "loss / 'a'", "a /"),
    ],
)
def test_numbers_that_may_be_counts(text: str, written: Callable[[str], None]) -> None:
    written(text)
    loss_terms._divisors.cache_clear()
    assert not any(map(loss_terms.divides_by, (4, -4, 0, float("inf"))))
    loss_terms._divisors.cache_clear()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("if epoch >= args.swa_start:", "selected.py:1"),
        ("scale = 1.0 if self.epoch < warmup else 0.1", "selected.py:1"),
        ("if start <= current_epoch:", "selected.py:1"),
        ("if epoch % save_every == 0:", "selected.py:1"),
        ("if dist.get_rank() == 0:\n    print(epoch)", ""),
        ("while epoch < num_epochs:", ""),
        ("for epoch in range(first_epoch, 9):", ""),
        ("epoch = 0", ""),
    ],
)
def test_a_line_that_heeds_the_number_of_an_epoch(
    text: str, line: str, written: Callable[[str], None]
) -> None:
    """It may do something else in later epochs; a loop through all of them does not."""
    written(text)
    assert script_text.line_by_epoch() == line


@pytest.mark.parametrize(("text", "is_read"), [("x = 1\n", True), ("{{ x }", False), ("\0", False)])
def test_a_text_is_parsed_once(text: str, *, is_read: bool) -> None:
    """A template is no Python."""
    tree = script_text.parsed(text)
    assert (tree is not None, script_text.parsed(text) is tree) == (is_read, True)
