"""No garbage is collected while a record is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from entrenar_py.check.observing.observer import uncollected


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@uncollected
def _is_enabled(*, fails: bool = False) -> bool:
    if fails:
        raise ValueError("an error of the call")
    return gc.isenabled()


@pytest.mark.parametrize("before", [True, False])
def test_the_state_before_the_call_comes_back(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    assert not _is_enabled()
    assert gc.isenabled() is before
    with pytest.raises(ValueError, match="an error of the call"):
        _is_enabled(fails=True)
    assert gc.isenabled() is before


def test_a_call_within_a_call_does_not_end_it() -> None:
    @uncollected
    def outer() -> bool:
        _is_enabled()
        return gc.isenabled()

    gc.enable()
    assert not outer()
    assert gc.isenabled()
