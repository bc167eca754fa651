"""Which files of a checkpoint a stage fetches."""

from __future__ import annotations

import json

import pytest

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.stages import cut

INDEX = {
    "metadata": {"total_size": 7},
    "weight_map": {
        "model.embed_tokens.weight": "a",
        "model.layers.0.mlp.weight": "a",
        "model.layers.1.mlp.weight": "b",
        "model.layers.10.mlp.weight": "c",
        "model.norm.weight": "d",
    },
}


@pytest.mark.parametrize(
    ("own", "files"),
    [(range(1), {"a", "d"}), (range(1, 10), {"a", "b", "d"}), (range(10, 11), {"a", "c", "d"})],
)
def test_files_with_own_blocks_or_none(own: range, files: set[str]) -> None:
    assert cut.files_of_stage(INDEX, "layers", own) == files


def test_names_with_another_list() -> None:
    """A list within a block is none of blocks."""
    index = {"weight_map": {"h.0.experts.7.w": "a", "h.7.experts.0.w": "b"}}
    assert cut.files_of_stage(index, "h", range(1)) == {"a"}


def test_an_index_of_the_files_that_are_here() -> None:
    narrowed = json.loads(cut.narrowed(INDEX, {"b", "c"}))
    assert set(narrowed["weight_map"].values()) == {"b", "c"}
    assert narrowed["metadata"] == INDEX["metadata"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="weight_map"):
        cut.read_index(text)
