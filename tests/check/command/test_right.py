"""The cases of `make right`: every script with each seed, in a fixed order."""

from __future__ import annotations

from itertools import islice

from tests.check.command import right


def test_cases_come_in_a_fixed_order_and_differ() -> None:
    """Each is a script that Python can read; another seed is another script wherever it seeds."""
    first, again = ([*islice(right.cases(), 240)] for _ in range(2))
    assert first == again
    assert len({case.name for case in first}) == len(first)
    assert {case.twin.world_size for case in first} == {1, 2, 3, 4}
    for case in first:
        compile(case.twin.text, case.name, "exec")
    texts = [case.twin.text for case in first if case.twin.script == "ddp.py" and case.seed < 2]
    assert len({text for text in texts if "manual_seed(0)" in text}) > 1
    assert any("manual_seed(1000)" in text for text in texts)
