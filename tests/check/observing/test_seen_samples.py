"""The samples of forward passes, found by what DataLoaders have yielded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from entrenar_py.check.observing import mirrored_batches, seen_samples
from entrenar_py.check.observing.batches import Iteration
from entrenar_py.check.observing.seen_samples import (
    CUT,
    MANY,
    NO_ROWS,
    PENDING_MAX,
    STRANGE,
    Batches,
    SeenSamples,
)

DATA = torch.arange(12.0).reshape(12, 1)


class Seen:
    """Samples of a loader that yields three batches of four, the first with ids 3, 1, 0, 2."""

    def __init__(self) -> None:
        self.batches = Batches()
        self.samples = SeenSamples(self.batches)
        self.loader: DataLoader[int] = DataLoader([0])  # type: ignore[arg-type]
        self.begin()

    def begin(self, *, last: int = 4) -> None:
        """Begin a pass over the loader, with `last` samples in the last batch."""
        self.iterator = Iteration(self.batches, self.loader)
        self.iterator.drawn([3, 1, 0, 2])
        self.iterator.drawn([7, 5, 4, 6])
        self.iterator.drawn([8, 9, 10, 11][:last])

    def yields(self, *rows: int) -> torch.Tensor:
        """Yield the next batch, of these rows of the data, and labels that don't tell rows."""
        batch = DATA[list(rows)]
        self.iterator.item([torch.zeros(len(rows)), batch])
        return batch

    def given(self, inputs: Any) -> list[int]:
        """Return the samples of a training pass with these inputs, and its backward pass."""
        self.samples.given([inputs], trains=True)
        self.samples.settle()
        told = self.samples.take()
        self.unknown, self.epoch = told.unknown, told.epoch
        return list(told.ids)


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_a_shortened_pass_tells_all_its_samples_with_its_last_batch() -> None:
    """Its batches are as they were, and the last one has the positions of those left out, too."""
    loader: DataLoader[int] = DataLoader(DATA, batch_size=2)  # type: ignore[arg-type]
    order = ([at, at + 1] for at in range(0, 12, 2))
    drawn = [*mirrored_batches.shortened(order, loader, 2)]
    assert drawn == [[0, 1], [2, 3]]
    batches = Batches()
    iterator = Iteration(batches, loader)
    told = []
    for index in drawn:
        iterator.drawn(index)
    for index in drawn:
        iterator.item(torch.tensor(index))
        batch = batches.meant()
        assert batch is not None
        told.append(batches.use(batch, batch.left)[1])
    assert told == [[0, 1], [*range(2, 12)]]


def test_batches_of_several_workers_are_one() -> None:
    """So many batches at a time, and the rest in the last one, as in the loader's length."""
    loader: DataLoader[int] = DataLoader(range(5))  # type: ignore[arg-type]
    drawn = [*mirrored_batches.merged(iter([[0], [1], [2], [3], [4]]), loader, 2)]
    assert drawn == [[0, 1], [2, 3], [4]]
    assert mirrored_batches.merged_length(loader, 5, 2) == 3


def test_a_rest_that_not_every_worker_would_have_is_left_out() -> None:
    """A loader that leaves out what fills no batch leaves out what fills no batch of all."""
    loader: DataLoader[int] = DataLoader(range(5), drop_last=True)  # type: ignore[arg-type]
    drawn = [*mirrored_batches.merged(iter([[0], [1], [2], [3], [4]]), loader, 2)]
    assert drawn == [[0, 1], [2, 3]]
    assert mirrored_batches.merged_length(loader, 5, 2) == 2


def test_a_whole_batch(seen: Seen) -> None:
    """A batch that is given as it was yielded has the indices that were drawn for it."""
    assert seen.given(seen.yields(3, 1, 0, 2)) == [3, 1, 0, 2]
    assert seen.given(seen.yields(7, 5, 4, 6)) == [7, 5, 4, 6]
    assert seen.samples.facts()["samples"] == "index"


def test_micro_batches_of_a_batch(seen: Seen) -> None:
    """Chunks of a batch that was turned around have their own samples each."""
    first, second = seen.yields(3, 1, 0, 2).flip(0).chunk(2)
    assert [seen.given(first), seen.given(second)] == [[2, 0], [1, 3]]


@pytest.mark.parametrize(("rows", "varied"), [([0, 2], True), ([0, 1], False)])
def test_rows_that_are_picked_from_a_batch(seen: Seen, rows: list[int], varied: bool) -> None:
    """Rows here and there, as those with a label; a batch that is cut off is no choice."""
    batch = seen.yields(3, 1, 0, 2)
    assert seen.given(batch[rows]) == [[3, 1, 0, 2][row] for row in rows]
    assert not seen.samples.facts()["varied"]
    seen.given(seen.yields(7, 5, 4, 6))
    assert seen.samples.facts()["varied"] is varied


def test_a_batch_that_was_skipped(seen: Seen) -> None:
    """A resumed script skips batches; the one that is used is recognised."""
    seen.yields(3, 1, 0, 2)
    assert seen.given(seen.yields(7, 5, 4, 6)) == [7, 5, 4, 6]


def test_a_batch_that_was_looked_at_before(seen: Seen) -> None:
    """A batch that an earlier pass yielded, too, is of the pass that goes on, in its epoch."""
    peeked = seen.iterator
    seen.yields(3, 1, 0, 2)
    seen.begin()
    assert (seen.given(seen.yields(3, 1, 0, 2)), seen.epoch) == ([3, 1, 0, 2], 0)
    assert (seen.given(seen.yields(7, 5, 4, 6)), seen.epoch) == ([7, 5, 4, 6], 0)
    assert peeked is not seen.iterator


def test_a_loader_that_looks_ahead(seen: Seen) -> None:
    """The script may get a batch after the next one was yielded."""
    first, second = seen.yields(3, 1, 0, 2), seen.yields(7, 5, 4, 6)
    assert [seen.given(first), seen.given(second)] == [[3, 1, 0, 2], [7, 5, 4, 6]]


def test_inputs_that_were_changed(seen: Seen) -> None:
    """Inputs of another dtype are those of the batch if they are as many."""
    assert seen.given(seen.yields(3, 1, 0, 2).double()) == [3, 1, 0, 2]


@pytest.mark.parametrize("is_mask", [False, True])
def test_texts_that_lost_their_last_token_in_batches_read_ahead(seen: Seen, is_mask: bool) -> None:
    """The source tells which batch a target was cut from; a mask would not."""
    sources = [torch.tensor([[5, 6, 7], [8, 9, 7]]), torch.tensor([[4, 3, 5], [6, 6, 2]])]
    if is_mask:
        sources = [torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.tensor([[1, 0, 0], [1, 1, 0]])]
    seen.iterator = Iteration(seen.batches, seen.loader)
    for positions in ([0, 1], [2, 3]):
        seen.iterator.drawn(positions)
    for source in sources:
        seen.iterator.item((source, torch.cat((source, source), 1)))
    told = []
    for source in sources:
        seen.samples.given([source, torch.cat((source, source), 1)[:, :-1]], trains=True)
        seen.samples.settle()
        told.append([*seen.samples.take().ids])
    assert (told == [[0, 1], [2, 3]]) is not is_mask


def iteration(seen: Seen, loader: Any, *batches: list[int]) -> Iteration:
    """Return a new iteration over a loader, which has drawn these batches."""
    begun = Iteration(seen.batches, loader)
    for batch in batches:
        begun.drawn(batch)
    return begun


def yielded(iterator: Iteration, rows: torch.Tensor) -> torch.Tensor:
    """Yield these rows as the next batch."""
    iterator.item(rows)
    return rows


def told_in_step(seen: Seen, *inputs: torch.Tensor) -> tuple[list[int], int]:
    """Return samples and epoch of a step in which a loss has a pass for each of the inputs."""
    for one in inputs:
        seen.samples.given([one], trains=True)
    seen.samples.settle()
    told = seen.samples.take()
    seen.samples.end_step()
    return [*told.ids], told.epoch


@pytest.mark.parametrize("data", [DATA, DATA[:8] + 20])
def test_two_loaders_in_a_step(data: torch.Tensor) -> None:
    """Their samples differ, also if the data are the same; an epoch ends when either begins."""
    seen = Seen()
    loaders: list[Any] = [DataLoader(DATA), DataLoader(data)]  # type: ignore[arg-type]
    first = iteration(seen, loaders[0], [0, 1], [2, 3], [4, 5])
    second = iteration(seen, loaders[1], [1, 0], [3, 2])
    told = []
    for rows in ([0, 1], [2, 3]):
        batches = yielded(first, DATA[rows]), yielded(second, data[rows[::-1]].double())
        told.append(told_in_step(seen, *batches))
    assert told == [([0, 1, 13, 12], 1), ([2, 3, 15, 14], 1)]
    again = iteration(seen, loaders[1], [1, 5])
    batches = yielded(first, DATA[4:6]), yielded(again, data[[1, 5]].double())
    assert told_in_step(seen, *batches) == ([4, 5, 13, 17], 2)
    assert seen.samples.facts()["varied"]


@pytest.mark.parametrize("is_over", [True, False])
def test_a_pass_that_the_script_ends(seen: Seen, is_over: bool) -> None:
    """Its epoch is recorded when the next one begins."""
    seen.given(seen.yields(3, 1, 0, 2))
    if is_over:
        seen.iterator.over()
    assert "cut" not in seen.samples.news()
    seen.begin()
    seen.given(seen.yields(3, 1, 0, 2))
    assert seen.samples.news().get("cut", []) == ([] if is_over else [0])
    assert "cut" not in seen.samples.news()


def test_two_loaders_of_the_same_data_that_take_turns() -> None:
    """From the second epoch on, each has its own numbers, and no sample comes twice in an epoch."""
    seen = Seen()
    loaders: list[Any] = [DataLoader(DATA), DataLoader(DATA)]  # type: ignore[arg-type]
    first = iteration(seen, loaders[0], [0, 1], [2, 3])
    second = iteration(seen, loaders[1], [1, 2], [3, 0])
    told = [
        told_in_step(seen, yielded(begun, DATA[rows]))
        for begun, rows in ((first, [0, 1]), (second, [1, 2]), (first, [2, 3]), (second, [3, 0]))
    ]
    assert told == [([0, 1], 0), ([1, 2], 1), ([14, 15], 1), ([3, 0], 1)]


def test_a_loader_after_another_one_of_the_same_data() -> None:
    """As in a script that makes a loader for each epoch: the samples are the same."""
    seen = Seen()
    told = []
    for _ in range(2):
        begun = iteration(seen, DataLoader(DATA), [0, 1])  # type: ignore[arg-type]
        told.append(told_in_step(seen, yielded(begun, DATA[:2])))
    assert told == [([0, 1], 0), ([0, 1], 1)]
    assert not seen.samples.facts()["varied"]


@pytest.mark.parametrize("num_probed", [1, 3])
def test_a_probe_before_training(seen: Seen, num_probed: int) -> None:
    """Batches that were looked at, or all of a loader, don't count if no backward pass follows."""
    orders = [3, 1, 0, 2], [7, 5, 4, 6], [8, 9, 10, 11]
    for rows in orders[:num_probed]:
        assert not seen.samples.given([seen.yields(*rows)], trains=True)
    if num_probed == 3:
        seen.iterator.over()
    seen.begin()
    batch = seen.yields(3, 1, 0, 2) / 3
    assert seen.samples.given([batch], trains=True), "earlier passes were probes"
    seen.samples.settle()
    told = seen.samples.take()
    assert (told.ids, told.epoch, told.unknown) == ((3, 1, 0, 2), 0, "")
    assert not seen.samples.facts()["varied"]


def test_micro_batches_that_are_fetched_together() -> None:
    """A step may fetch more batches than it is usual to fetch ahead."""
    data, seen = torch.arange(24.0)[:, None], Seen()
    begun = iteration(seen, DataLoader(data), *([at] for at in range(24)))  # type: ignore[arg-type]
    batches = [yielded(begun, data[at : at + 1]) for at in range(24)]
    assert [seen.given(batch) for batch in batches] == [[at] for at in range(24)]


@pytest.mark.parametrize("is_large", [True, False])
def test_batches_that_are_forgotten(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    """If a few batches take too many bytes, the oldest are forgotten, and samples are unknown."""
    monkeypatch.setattr(seen_samples, "PENDING_FEW", 1)
    monkeypatch.setattr(seen_samples, "PENDING_BYTES_MAX", 80 if is_large else 1000)
    begin_by_accelerate(seen)
    first = seen.yields(3, 1, 0, 2)
    seen.yields(7, 5, 4, 6)
    third = seen.yields(8, 9, 10, 11)
    assert seen.given(first) == ([] if is_large else [3, 1, 0, 2])
    assert seen.unknown == (MANY if is_large else "")
    assert seen.given(third) == [8, 9, 10, 11]


def test_a_sparse_batch(seen: Seen) -> None:
    """A loader may yield tensors without plain memory."""
    seen.iterator.item(torch.eye(4).to_sparse())
    assert seen.batches.pending[-1].num_bytes == 64


def test_a_probe_of_zeros(seen: Seen) -> None:
    """What no loader handed out is no sample if it comes before a pass of the loader."""
    seen.samples.given([torch.zeros(2, 1)], trains=True)
    assert seen.given(seen.yields(3, 1, 0, 2)) == [3, 1, 0, 2]
    assert seen.samples.facts()["samples"] == "index"
    seen.samples.given([torch.zeros(2, 1)], trains=True)
    seen.begin()
    assert (seen.given(seen.yields(3, 1, 0, 2)), seen.unknown) == ([3, 1, 0, 2], "")


def test_an_evaluation_in_training_mode(seen: Seen) -> None:
    """The samples of another loader, all of which were looked at, don't count."""
    seen.given(seen.yields(3, 1, 0, 2))
    seen.samples.end_step()
    held_out = iteration(seen, DataLoader(DATA + 20), [0, 1])  # type: ignore[arg-type]
    seen.samples.given([yielded(held_out, DATA[:2] + 20)], trains=True)
    held_out.over()
    seen.begin()
    assert (seen.given(seen.yields(3, 1, 0, 2)), seen.epoch) == ([3, 1, 0, 2], 1)
    assert not seen.samples.facts()["varied"]


def test_a_loss_over_the_end_of_an_epoch(seen: Seen) -> None:
    """A pass before the loader's next iteration counts if the first one has trained."""
    seen.given(seen.yields(3, 1, 0, 2))
    seen.samples.given([seen.yields(7, 5, 4, 6)], trains=True)
    seen.iterator.over()
    seen.begin()
    assert seen.given(seen.yields(3, 1, 0, 2))[:4] == [7, 5, 4, 6]


@pytest.mark.parametrize("is_new", [True, False])
def test_the_order_of_a_subset(is_new: bool) -> None:
    """It is drawn for each epoch if each has its own subset."""
    seen = Seen()
    subset: Any = Subset(DATA, [1, 0])  # type: ignore[arg-type]
    for _ in range(2):
        subset = Subset(DATA, [1, 0]) if is_new else subset  # type: ignore[arg-type]
        begun = iteration(seen, DataLoader(subset), [0, 1])
        assert told_in_step(seen, yielded(begun, DATA[[1, 0]]))[0] == [1, 0]
    assert seen.samples.facts()["ordered"] is not is_new


@pytest.mark.parametrize("is_same", [True, False])
def test_changed_inputs_of_an_epochs_own_loader(seen: Seen, is_same: bool) -> None:
    """A new loader goes on if it draws from the same data, as where each epoch has its own."""
    seen.given(seen.yields(3, 1, 0, 2).double())
    seen.samples.end_step()
    dataset = seen.loader.dataset if is_same else [0]
    seen.loader = DataLoader(dataset)  # type: ignore[arg-type]
    seen.begin()
    assert seen.given(seen.yields(3, 1, 0, 2).double()) == ([3, 1, 0, 2] if is_same else [])
    assert seen.unknown == ("" if is_same else STRANGE)


def test_changed_inputs_of_a_loader_that_looks_ahead(seen: Seen) -> None:
    """With several batches to choose from, content that was changed tells none of them."""
    first, second = seen.yields(3, 1, 0, 2), seen.yields(7, 5, 4, 6)
    seen.given(first)
    later = seen.yields(8, 9, 10, 11)
    assert (seen.given(second / 3), seen.unknown) == ([], STRANGE)
    assert (seen.given(later / 3), seen.unknown) == ([], STRANGE)


def test_changed_inputs_of_a_library_that_looks_ahead(seen: Seen) -> None:
    """accelerate hands batches out in order, and fetches the next one before: all are known."""
    begin_by_accelerate(seen)
    first, second = seen.yields(3, 1, 0, 2), seen.yields(7, 5, 4, 6)
    seen.samples.given([-first], trains=True)
    assert (seen.given(first / 3), seen.unknown) == ([3, 1, 0, 2], ""), "two views"
    third = seen.yields(8, 9, 10, 11)
    assert seen.given(second / 3) == [7, 5, 4, 6]
    seen.iterator.over()
    assert seen.given(third / 3) == [8, 9, 10, 11]


def test_batches_that_accelerate_has_skipped(seen: Seen) -> None:
    """A resumed script begins within an epoch: the batch that was fetched before the newest."""
    begin_by_accelerate(seen)
    seen.yields(3, 1, 0, 2)
    second, _ = seen.yields(7, 5, 4, 6), seen.yields(8, 9, 10, 11)
    assert seen.given(second / 3) == [7, 5, 4, 6]


def begin_by_accelerate(seen: Seen) -> None:
    """Begin a pass in a frame of accelerate's name."""
    names: dict[str, Any] = {"__name__": "accelerate.data_loader", "begin": seen.begin}
    exec("class DataLoaderShard:\n    def __iter__(self): begin()", names)
    names["DataLoaderShard"]().__iter__()


def test_two_views_of_each_sample(seen: Seen) -> None:
    """Passes with what was made of one batch have its samples, once; another number has not."""
    batch = seen.yields(3, 1, 0, 2)
    seen.samples.given([batch + 0.5], trains=True)
    seen.samples.given([batch - 0.5], trains=True)
    seen.samples.settle()
    told = seen.samples.take()
    assert (list(told.ids), told.unknown) == ([3, 1, 0, 2], "")
    assert (seen.given(torch.ones(3, 1)), seen.unknown) == ([], STRANGE)


def test_several_rows_a_sample(seen: Seen) -> None:
    """A pair for each sample, padded and put together, is the whole batch."""
    batch = seen.yields(3, 1, 0, 2)
    pairs = torch.nn.functional.pad(torch.cat([batch, -batch]), (0, 1))
    assert seen.given(pairs) == [3, 1, 0, 2]


def test_a_batch_with_what_a_model_made(seen: Seen) -> None:
    """Rows next to a whole batch are no samples, also after a pass without training on noise."""
    batch = seen.yields(3, 1, 0, 2)
    seen.samples.given([torch.randn(4, 3)], trains=False)
    assert seen.given(torch.cat([batch, torch.randn(4, 1)])) == [3, 1, 0, 2]
    seen.samples.end_step()
    first, second = seen.yields(7, 5, 4, 6), seen.yields(8, 9, 10, 11)
    assert seen.given(torch.cat([first, second])) == [], "two batches in one tensor"


def test_a_batch_of_another_thread(seen: Seen) -> None:
    """A batch that a thread has fetched may wait in a queue: it is known by content alone."""
    batches: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: batches.append(seen.yields(3, 1, 0, 2)))
    thread.start()
    thread.join()
    assert seen.given(batches[0].double()) != [3, 1, 0, 2]


def test_a_part_that_was_changed(seen: Seen) -> None:
    """A part of a batch that doesn't look like it has no ids, and says why."""
    assert seen.given(seen.yields(3, 1, 0, 2).double()[:2]) == []
    assert seen.unknown == CUT


def test_a_second_pass_at_other_weights(seen: Seen) -> None:
    """The same inputs again are no new samples."""
    batch = seen.yields(3, 1, 0, 2)
    assert [seen.given(batch), seen.given(batch)] == [[3, 1, 0, 2], []]


def test_an_evaluation_between(seen: Seen) -> None:
    """A batch that was changed is still found after another loader's batches were evaluated."""
    seen.given(seen.yields(3, 1, 0, 2))
    batch = seen.yields(7, 5, 4, 6)
    loader: DataLoader[int] = DataLoader([0])  # type: ignore[arg-type]
    iterator = Iteration(seen.batches, loader)
    iterator.drawn([0, 1, 2, 3])
    with torch.no_grad():
        iterator.item(other := DATA[:4])
        seen.samples.given([other], trains=False)
    assert seen.given(batch / 3) == [7, 5, 4, 6]


def test_labels_of_other_batches(seen: Seen) -> None:
    """Inputs that were changed aren't looked for by the labels that a model is given with them."""
    seen.given(seen.yields(3, 1, 0, 2))
    loader: DataLoader[int] = DataLoader([0])  # type: ignore[arg-type]
    iterator = Iteration(seen.batches, loader)
    iterator.drawn([0, 1, 2, 3])
    labels, images = torch.tensor([1, 0, 1, 0]), DATA.repeat(1, 2)
    with torch.no_grad():
        iterator.item([images[:4], labels])
        seen.samples.given([images[:4], labels], trains=False)
    seen.iterator.item([images[4:8], labels])
    seen.samples.given([images[4:8] / 3, labels], trains=True)
    seen.samples.settle()
    assert list(seen.samples.take().ids) == [7, 5, 4, 6]


def test_inputs_of_unknown_origin(seen: Seen) -> None:
    """Inputs that no loader handed out are unknown, not none."""
    seen.given(seen.yields(3, 1, 0, 2))
    assert (seen.given(torch.randn(4, 1)), seen.unknown) == ([], STRANGE)


def made(seen: Seen, inputs: torch.Tensor) -> tuple[list[int], str, int]:
    """Return the samples of a training pass, why they are unknown, and of how many it was made."""
    seen.samples.given([inputs], trains=True)
    seen.samples.settle()
    told = seen.samples.take()
    return list(told.ids), told.unknown, told.num_made


def test_noise_beside_the_samples_of_a_batch(seen: Seen) -> None:
    """What is given after random numbers were drawn was made of the batch, until the next comes."""
    batch = seen.yields(3, 1, 0, 2)
    assert made(seen, batch) == ([3, 1, 0, 2], "", 0)
    seen.samples.drew()
    assert made(seen, torch.randn(4, 1)) == ([], "", 0)  # its step has samples
    seen.samples.end_step()
    assert made(seen, torch.randn(9, 1)) == ([], "", 4)
    seen.yields(7, 5, 4, 6)
    assert made(seen, torch.randn(3, 1)) == ([], CUT, 0)


def test_a_batch_given_again_was_not_made(seen: Seen) -> None:
    """Whatever was drawn since: it may be a batch that is trained on twice by mistake."""
    batch = seen.yields(3, 1, 0, 2)
    assert made(seen, batch) == ([3, 1, 0, 2], "", 0)
    seen.samples.drew()
    seen.samples.end_step()
    assert made(seen, batch) == ([], STRANGE, 0)


def test_what_is_evaluated_is_not_trained_on(seen: Seen) -> None:
    """A batch that a pass without training used isn't guessed to be the next one's."""
    batch = seen.yields(3, 1, 0, 2)
    seen.samples.given([batch], trains=False)
    assert seen.given(torch.ones(4, 1)) != [3, 1, 0, 2]


def attack(seen: Seen, inputs: torch.Tensor) -> None:
    """Run two passes in evaluation mode, each with its backward pass."""
    for _ in range(2):
        seen.samples.given([inputs], trains=False, may_train=True)
        seen.samples.settle()
        seen.samples.take()


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_evaluation_with_backward_passes(seen: Seen, goes_on: bool) -> None:
    """Its loader begins no epoch of the training, and doesn't end the one that goes on."""
    held_out: Any = DataLoader(DATA + 20)  # type: ignore[arg-type]
    seen.given(seen.yields(3, 1, 0, 2))
    seen.samples.end_step()
    for rows in ([0, 1], [2, 3]):
        attack(seen, yielded(iteration(seen, held_out, rows), DATA[rows] + 20))
    if not goes_on:
        seen.begin()
    rows = [7, 5, 4, 6] if goes_on else [3, 1, 0, 2]
    seen.samples.given([seen.yields(*rows)], trains=True)
    assert seen.samples.forget_evaluations()
    told = seen.samples.take()
    assert ([*told.ids], told.epoch) == (rows, 0 if goes_on else 1)
    assert seen.batches.epochs.cut == ([] if goes_on else [0])
    assert not seen.samples.facts()["varied"]


def test_an_attack_on_the_samples_that_train(seen: Seen) -> None:
    """Nothing is forgotten if training goes on with the loader of the attack."""
    attack(seen, seen.yields(3, 1, 0, 2))
    seen.samples.given([seen.yields(7, 5, 4, 6)], trains=True)
    assert not seen.samples.forget_evaluations()
    assert seen.samples.take().ids == (7, 5, 4, 6)


def test_parts_of_each_row_in_turn(seen: Seen) -> None:
    """A loss over a later part of a batch's rows is no loss of data from elsewhere."""
    rows = torch.arange(24.0).reshape(4, 6)
    batch = yielded(iteration(seen, DataLoader(rows), [3, 1, 0, 2]), rows[[3, 1, 0, 2]])  # type: ignore[arg-type]
    assert seen.given(batch[:, :3]) == [3, 1, 0, 2]
    assert (seen.given(batch[:, 3:]), seen.unknown) == ([], "")
    assert (seen.given(batch[:, 3:] + 1), seen.unknown) == ([], STRANGE)


def test_training_in_evaluation_mode(seen: Seen) -> None:
    """A pass in evaluation mode trains if a backward pass follows, and only then."""
    held_out = seen.yields(3, 1, 0, 2)
    seen.samples.given([held_out], trains=False, may_train=True)
    batch = seen.yields(7, 5, 4, 6)
    seen.samples.given([batch], trains=False, may_train=True)
    seen.samples.settle()
    assert seen.samples.take().ids == (7, 5, 4, 6)
    assert seen.given(seen.yields(8, 9, 10, 11)) == [8, 9, 10, 11]


def test_without_a_loader() -> None:
    """Rows without a loader have digests: equal ones for equal rows, new ones for each step."""
    samples = SeenSamples(Batches())

    def given(inputs: torch.Tensor) -> list[int]:
        samples.given([inputs], trains=True)
        samples.settle()
        return list(samples.take().ids)

    first = given(DATA[:3])
    assert len(set(first)) == 3
    assert given(DATA[:3]) == []
    samples.end_step()
    assert given(DATA[1:4])[:2] == first[1:]
    assert samples.facts() == {"samples": "content"}


def test_a_second_loss_of_the_same_rows() -> None:
    """A backward pass without a forward pass has the samples that its step was given before."""
    samples = SeenSamples(Batches())
    unknown = []
    for inputs in (DATA[:3], None, None):
        if inputs is not None:
            samples.given([inputs], trains=True)
        samples.settle()
        unknown.append(samples.take().unknown)
        if len(unknown) == 2:
            samples.end_step()
    assert unknown == ["", "", NO_ROWS]


@pytest.mark.parametrize(
    ("size", "is_over", "dropped"), [(2, True, True), (4, True, False), (2, False, False)]
)
def test_a_short_batch_that_the_script_leaves_out(
    seen: Seen, size: int, is_over: bool, dropped: bool
) -> None:
    """An unused short batch at the end of a pass counts as dropped once the next pass is used."""
    seen.begin(last=size)
    seen.given(seen.yields(3, 1, 0, 2))
    seen.given(seen.yields(7, 5, 4, 6))
    seen.yields(*[8, 9, 10, 11][:size])
    if is_over:
        seen.iterator.over()
    assert not seen.batches.epochs.drops_last
    seen.begin()
    seen.given(seen.yields(3, 1, 0, 2))
    assert seen.batches.epochs.drops_last is dropped
    assert seen.samples.facts()["drop_last"] is dropped


def test_a_short_batch_that_the_script_leaves_out_before_a_long_evaluation(seen: Seen) -> None:
    """It is known to be dropped, however many batches of another loader come after it."""
    seen.begin(last=2)
    seen.given(seen.yields(3, 1, 0, 2))
    seen.given(seen.yields(7, 5, 4, 6))
    seen.yields(8, 9)
    seen.iterator.over()
    evaluated = Iteration(seen.batches, DataLoader([0]))  # type: ignore[arg-type]
    with torch.no_grad():
        for _ in range(PENDING_MAX + 1):
            evaluated.drawn([0])
            evaluated.item(DATA[:1])
    seen.begin()
    seen.given(seen.yields(3, 1, 0, 2))
    assert seen.batches.epochs.drops_last


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), id="nested"
        ),
        pytest.param(lambda: torch.ones(2, 3).to_mkldnn(), id="mkldnn"),
        pytest.param(lambda: torch.ones(2, 3, device="meta"), id="meta"),
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.ones(0, 3), id="empty"),
        pytest.param(lambda: torch.tensor(1.0), id="scalar"),
    ],
)
def test_inputs_without_rows(seen: Seen, inputs: Callable[[], torch.Tensor]) -> None:
    """A model may be given what has no rows to tell: its samples are unknown, and nothing fails."""
    assert seen.given(inputs()) == []


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_rows_of_any_number_format(seen: Seen, kind: torch.dtype) -> None:
    """Rows are told apart in formats that numpy lacks, and where a conjugation is still due."""
    rows = torch.arange(2.0)[:, None].to(kind)
    inputs = rows.conj() if rows.is_complex() else rows
    assert len({*seen.given(inputs)}) == 2
