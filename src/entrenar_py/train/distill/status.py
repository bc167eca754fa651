"""The state of a folder of shards: those there, missing, damaged, or just being made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py.shared import wording
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.distill import claims, manifest, shards
from entrenar_py.train.distill.schema import Facts


@dataclass(frozen=True, kw_only=True)
class Status:
    """The shards of a folder by number; `damaged` says what is wrong, `making` which process."""

    facts: Facts
    rows: int
    num_bytes: int
    missing: tuple[int, ...]
    damaged: dict[int, str]
    making: dict[int, int]

    @property
    def is_whole(self) -> bool:
        """True if every shard is there, and undamaged."""
        return not self.missing and not self.damaged

    def lines(self) -> Iterator[str]:
        """Yield the lines for a person."""
        facts = self.facts
        yield f"teacher {facts.teacher}, tokenizer {facts.tokenizer}, rows {facts.data}"
        yield (
            f"{facts.top_k} of {facts.vocabulary} tokens at each position, log-probabilities in "
            f"{facts.stored}, weights in {facts.precision}"
        )
        there = facts.num_shards - len(self.missing) - len(self.damaged)
        yield (
            f"{there} of {facts.num_shards} shards, {self.rows:,} of {sum(facts.rows):,} rows, "
            f"{self.num_bytes:,} bytes"
        )
        if self.making:
            yield f"being made: {wording.named('shard', self.making)}"
        if self.missing:
            yield f"missing: {wording.named('shard', self.missing)}"
        for shard, why in self.damaged.items():
            yield f"damaged: shard {shard}: {why}"
        yield "all rows are there" if self.is_whole else "go on with `entrenar distill logits`"

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {
            "facts": self.facts.to_dict(),
            "rows": self.rows,
            "bytes": self.num_bytes,
            "missing": list(self.missing),
            "damaged": {str(shard): why for shard, why in self.damaged.items()},
            "making": {str(shard): process for shard, process in self.making.items()},
            "is_whole": self.is_whole,
        }


def look(folder: Path) -> Status:
    """Return what is in `folder`; reads every shard. Raises UsageError if it has no list."""
    listed = manifest.read(folder)
    if listed is None:
        raise UsageError(
            f"{folder}: there are no shards ({manifest.PATTERN} is missing); give the folder that "
            "`entrenar distill logits` writes"
        )
    facts = listed.facts
    absent = {n for n in listed.shards if not manifest.path_of(folder, facts, n).exists()}
    damaged = {
        shard: why
        for shard, entry in sorted(listed.shards.items())
        if shard not in absent and (why := shards.problem(folder, facts, entry))
    }
    there = listed.shards.keys() - damaged.keys() - absent
    making = claims.being_made(folder, facts.num_shards)
    whole = [listed.shards[shard] for shard in there]
    return Status(
        facts=facts,
        rows=sum(entry.rows for entry in whole),
        num_bytes=sum(entry.bytes for entry in whole),
        missing=tuple(sorted({*listed.missing, *absent})),
        damaged=damaged,
        making={shard: process for shard, process in making.items() if shard not in there},
    )
