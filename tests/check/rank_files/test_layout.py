"""The layout of ranks and pieces: what may be declared, and how it is used."""

from __future__ import annotations

from typing import Any

import pytest

from entrenar_py.check.observing import surroundings
from entrenar_py.check.rank_files import layout
from entrenar_py.check.rank_files.layout import Layout, Piece
from entrenar_py.shared.errors import UsageError


def test_ranks_are_row_major() -> None:
    """Ranks are row-major as in torch's meshes; along a DATA axis each draws its own samples."""
    arranged = Layout(axes={"pp": 2, "dp": 2, "tp": 2})
    assert arranged.coordinates(6) == {"pp": 1, "dp": 1, "tp": 0}
    assert [arranged.data(rank) for rank in range(8)] == [(0,), (0,), (1,), (1,)] * 2
    assert [rank for rank in range(8) if arranged.replica(rank) == arranged.replica(6)] == [2, 6]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dp": 2, "tp": 3}, "dp=2 x tp=3 is 6 ranks, world_size=4: use sizes with the world size"),
        ({"shards": 4}, "layout: axis 'shards': did you mean 'dp_shard'"),
        ({"data": 2, "dp": 2}, "layout: 'dp' and another name of it: give each axis once"),
        ({"dp": "4"}, "dp='4': use a number of ranks"),
        ({}, "no axis is 1 ranks"),
        ([2, 2], "use a mapping from axes to sizes, or a DeviceMesh"),
    ],
)
def test_what_can_t_be(given: Any, words: str) -> None:
    """An impossible layout is refused, with what is allowed."""
    with pytest.raises(UsageError, match=words):
        surroundings.declared(given, (), 4)


def test_other_names_of_axes() -> None:
    """The names of libraries are understood, unless two of them mean one axis."""
    arranged = surroundings.declared({"ddp": 2, "shard": 2, "pipeline": 1}, (), 4)
    assert arranged == Layout(axes={"dp": 2, "dp_shard": 2, "pp": 1})
    assert layout.knows(("ddp", "fsdp"))
    assert not layout.knows(("ddp", "data"))


def test_ties() -> None:
    """A tie has two names or more, none of them twice; tensors are compared under the first."""
    declared = surroundings.declared(None, (("in.weight", "out.weight"),), 2)
    assert declared is not None
    assert declared.first_name("out.weight/exp_avg") == "in.weight/exp_avg"
    assert declared.first_name("out.bias") == "out.bias"
    for wrong in ((("a",),), ("ab",), (("a", "b"), ("b", "c"))):
        with pytest.raises(UsageError, match="tie"):
            surroundings.declared(None, wrong, 2)


def test_a_piece_of_nothing_is_none() -> None:
    """A piece that reaches beyond its whole tensor was not written by a rank, and is refused."""
    piece = Piece(offset=(2, 0), shape=(1, 4), whole=(3, 4), ranks=(0, 1))
    assert layout.piece_from(piece.to_list()) == piece
    for wrong in ([[2], [2], [3], [0]], [[0], [1], [1], []], [[0], [1, 1], [1], [0]], 7):
        with pytest.raises((TypeError, ValueError)):
            layout.piece_from(wrong)
