"""The examples print what they promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.check.command import zygote

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(script: str, num_ranks: int, folder: Path) -> str:
    """Return the output of an example on this number of ranks."""
    ended = zygote.forked(EXAMPLES / script, num_ranks, folder=folder)
    assert ended.code == 0, ended.tail
    return ended.output.read_text()


@pytest.mark.parametrize(
    ("script", "num_ranks"), [("canonical_all_reduce.py", 4), ("canonical_reduce_scatter.py", 3)]
)
def test_one_digest_for_two_world_sizes(script: str, num_ranks: int, tmp_path: Path) -> None:
    """Two world sizes give one digest, with dropout, clipping and AdamW."""
    digest, _, rest = printed(script, 1, tmp_path / "1").partition(" ")
    assert len(digest) == 16
    assert rest == "on 1 ranks\n"
    assert printed(script, num_ranks, tmp_path / "more") == f"{digest} on {num_ranks} ranks\n"
