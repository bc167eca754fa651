"""Numbers and lists in sentences."""

from __future__ import annotations

from entrenar_py.shared.wording import counted, named


def test_what_is_counted() -> None:
    """One is singular; none and many are plural."""
    assert [counted(n, "run") for n in (0, 1, 2, 1_000)] == [
        "0 runs",
        "1 run",
        "2 runs",
        "1,000 runs",
    ]


def test_what_is_named() -> None:
    """Names are in order, and a long list is cut."""
    assert named("rank", {3}) == "rank 3"
    assert named("rank", [2, 0, 1]) == "ranks 0, 1, 2"
    assert named("step", range(7), most=5) == "steps 0, 1, 2, 3, 4 and 2 more"
