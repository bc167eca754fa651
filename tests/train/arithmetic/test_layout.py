"""The places of tensors in the flat vector."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.train.arithmetic.layout import Layout
from entrenar_py.train.arithmetic.tensors import TensorSpec

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
all_specs = st.lists(
    st.tuples(shapes, st.sampled_from(["trainable", "frozen", "buffer"]), st.booleans()),
    max_size=6,
).map(
    lambda drawn: tuple(
        TensorSpec(f"t{i}", shape, role, decayed)  # type: ignore[arg-type]
        for i, (shape, role, decayed) in enumerate(drawn)
    )
)


@given(all_specs)
def test_slices_tile_the_vector(specs: tuple[TensorSpec, ...]) -> None:
    """Trainable tensors come first, then buffers, in order, without gaps or frozen tensors."""
    layout = Layout(specs)
    parts = {**layout.trainable, **layout.buffers}
    expected = [
        *(spec for spec in specs if spec.role == "trainable"),
        *(spec for spec in specs if spec.role == "buffer"),
    ]
    assert list(parts) == [spec.name for spec in expected]
    end = 0
    for spec in expected:
        assert parts[spec.name] == slice(end, end + prod(spec.shape))
        end += prod(spec.shape)
    assert layout.num_trainable == sum(p.stop - p.start for p in layout.trainable.values())


@given(all_specs)
def test_locate_finds_every_position(specs: tuple[TensorSpec, ...]) -> None:
    """`locate` inverts the slices, and raises outside the vector."""
    layout = Layout(specs)
    found = []
    for name, part in {**layout.trainable, **layout.buffers}.items():
        found += [(name, element) for element in range(part.stop - part.start)]
    assert [layout.locate(position) for position in range(len(found))] == found
    for outside in (-1, len(found)):
        with pytest.raises(IndexError, match=f"position {outside} lies outside"):
            layout.locate(outside)


@given(all_specs)
def test_decayed_marks_decayed_trainable_tensors(specs: tuple[TensorSpec, ...]) -> None:
    """The mask is 1 on decayed tensors and 0 elsewhere, or None if none decays."""
    layout = Layout(specs)
    marks = [
        float(spec.decayed)
        for spec in specs
        if spec.role == "trainable"
        for _ in range(prod(spec.shape))
    ]
    if not any(marks):
        assert layout.decayed is None
        return
    assert layout.decayed is not None
    assert layout.decayed.dtype == np.float32
    assert layout.decayed.tolist() == marks
