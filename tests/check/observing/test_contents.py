"""The contents of samples in a few numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from entrenar_py.check.observing import contents


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
