"""What a model is given, recognised by its content."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from entrenar_py.check.observing import contents
from entrenar_py.check.observing.contents import Carried, rows_of


def test_a_sample_has_its_numbers_wherever_it_is() -> None:
    """They do not depend on the other samples of the batch, nor on their number."""
    x, y = torch.randn(6, 3, 4), torch.arange(6)
    whole = contents.contents_of(((x,), {"labels": y, "mask": torch.ones(4, 4), "flag": True}))
    assert len(whole) == 6
    assert contents.contents_of(((x[2:4],), {"labels": y[2:4]})) == whole[2:4]


def test_a_flip_shows() -> None:
    """Also where norm and sum are what they were."""
    x = torch.randn(1, 8)
    assert contents.contents_of(((x.flip(1),), {})) != contents.contents_of(((x,), {}))


def test_large_samples_are_looked_at_in_part() -> None:
    """Noise on a large sample shows, though not each element is looked at."""
    x = torch.randn(2, 3 * contents.ELEMENTS_MAX)
    assert contents.contents_of(((x + 0.1 * torch.randn_like(x),), {})) != contents.contents_of(
        ((x,), {})
    )


@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
def test_what_cannot_be_read_is_left_out() -> None:
    """Without tensors that have samples nothing is known."""
    assert contents.contents_of(((torch.tensor(1.0), [], "text"), {})) == ()
    assert contents.contents_of(((torch.zeros(2, dtype=torch.complex64),), {})) == ()
    assert contents.contents_of(((torch.empty(2, 1, device="meta"),), {})) == ()
    assert contents.contents_of(((torch.eye(2).to_sparse(),), {})) == ()
    assert contents.contents_of(((torch.eye(2).to_sparse_csr(),), {})) == ()
    assert (
        contents.contents_of(((torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),), {}))
        == ()
    )
    assert contents.contents_of(((torch.zeros(0, 3), torch.zeros(0)), {})) == ()
    assert len(contents.contents_of(((torch.zeros(2, 0), torch.full((2,), torch.inf)), {}))) == 2


def test_a_model_under_vmap_is_left_alone() -> None:
    """Samples of a mapped function have no numbers that can be read."""

    def call(x: Tensor) -> Tensor:
        assert contents.contents_of(((x,), {})) == ()
        return x

    torch.func.vmap(call)(torch.ones(2, 3))


def test_several_passes() -> None:
    """Each pass has a part of the samples, or each has all of them in another form."""
    one, two = ((1.0,), (2.0,)), ((3.0,), (4.0,))
    assert contents.of_samples([one, two], 4) == (*one, *two)
    assert contents.of_samples([one, two], 2) == ((1.0, 3.0), (2.0, 4.0))
    assert contents.of_samples([one], 3) == ()
    assert contents.of_samples([], 0) == ()


def test_a_text_is_the_same_whatever_it_is_padded_to() -> None:
    """A rank's longest text is another one than the whole batch's; labels are padded, too."""
    short, long = [3, 5, 0, 7], [1, 1, 0, 0]
    wide = torch.tensor([[*short, 0, 0], [*long, 0, 0], [2, 2, 2, 2, 2, 2]])
    labels = torch.where(wide == 0, -100, wide)
    rows = contents.rows_together([wide, labels])
    assert rows is not None
    assert contents.rows_together([wide[:2, :4], labels[:2, :4]]) == rows[:2]
    assert contents.rows_together([wide[1:2, :2], labels[1:2, :2]]) == rows[1:2]
    assert len({*rows}) == 3
    counts = contents.rows_together(wide.float())
    assert counts != contents.rows_together(wide[:, :4].float()), "numbers are no texts"


def test_returned_state_is_left_out() -> None:
    """It is known by its storage: a script detaches it, or takes a part of it."""
    carried, words = Carried(), torch.arange(6).reshape(2, 3)
    memory = torch.zeros(2, 4)
    assert carried.fresh((words, memory)) == (words, memory)
    grown = torch.ones(2, 4, requires_grad=True) * 2
    carried.note((words, memory), (torch.tensor(1.0), [grown]))
    fresh = carried.fresh((words, [grown.detach()[:, 1:]]))
    assert [tensor is words for tensor in fresh] == [True]


def test_what_was_given_is_no_state() -> None:
    """A model may hand on its batch, which is a part of the data set."""
    carried, data = Carried(), torch.randn(8, 3)
    carried.note((data[:4], data[4:, 0]), {"features": data[:4], "loss": torch.tensor(1.0)})
    inputs = data[4:], torch.ones(4)
    assert carried.fresh(inputs) is inputs


def test_inputs_are_kept_if_nothing_else_is_left() -> None:
    """A discriminator is given what another pass has made."""
    carried, made = Carried(), torch.randn(4, 3)
    carried.note((torch.randn(4, 2),), made)
    assert carried.fresh((made,)) == (made,)


def test_storage_that_is_used_again_is_new() -> None:
    """A batch may lie where a state has been that is no more."""
    carried = Carried()
    for _ in range(4):
        inputs = torch.randn(4, 2), torch.randn(4, 3)
        assert carried.fresh(inputs) is inputs
        carried.note(inputs, torch.randn(4, 3))
        del inputs


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
