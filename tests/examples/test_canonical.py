"""The example prints what it promises."""

from __future__ import annotations

from pathlib import Path

from tests.check.command import zygote

SCRIPT = Path(__file__).parents[2] / "examples/canonical_all_reduce.py"


def printed(num_ranks: int, folder: Path) -> str:
    """Return the output of the example on this number of ranks."""
    ended = zygote.forked(SCRIPT, num_ranks, folder=folder)
    assert ended.code == 0, ended.tail
    return ended.output.read_text()


def test_one_digest_for_two_world_sizes(tmp_path: Path) -> None:
    """Two world sizes give one digest, with dropout, clipping and AdamW."""
    digest, _, rest = printed(1, tmp_path / "1").partition(" ")
    assert len(digest) == 16
    assert rest == "on 1 ranks\n"
    assert printed(4, tmp_path / "4") == f"{digest} on 4 ranks\n"
