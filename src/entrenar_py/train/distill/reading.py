"""A student's way to its teacher's rows: shards are opened when they arrive, and waited for."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.shared.untrusted import printing
from entrenar_py.train.distill import manifest, shards
from entrenar_py.train.distill.manifest import Entry, Listed, Lists
from entrenar_py.train.distill.schema import Facts
from entrenar_py.train.distill.shards import File, Places, Rows

LOOK_EVERY_S = 0.5
TELL_AFTER_S = 10.0
HELD_BYTES = 2**28  # of decoded row groups
OPEN_MAX = 256  # files

Say = Callable[[str], None]


def facts_of(
    folder: Path, *, patience_s: float, ended: threading.Event, say: Say = printing.say
) -> Facts:
    """Return the facts of the shards in `folder`; waits until a first list is there.

    Raises UsageError if none is after `patience_s` seconds, or for one that can't be read, and
    SystemFailure once `ended` is set.
    """
    begin, told = time.monotonic(), False
    lists = Lists(folder)
    while (found := lists.read()) is None:
        waited = time.monotonic() - begin
        if waited >= patience_s:
            raise UsageError(
                f"distill.logits={folder}: there are no shards ({manifest.PATTERN} is missing); "
                "make them by `entrenar distill logits`, or give the folder that they come to"
            )
        if not told:
            say(f"waits for the first list of shards in {folder}")
            told = True
        _wait_on(ended, folder, min(LOOK_EVERY_S, patience_s - waited))
    return found.facts


def _wait_on(ended: threading.Event, folder: Path, seconds: float) -> None:
    if ended.wait(seconds):
        raise SystemFailure(f"distill.logits={folder}: the wait for a shard was ended")


class TeacherRows:
    """The teacher's rows of any samples. Not for several threads at a time."""

    def __init__(
        self,
        folder: Path,
        facts: Facts,
        places: Places,
        *,
        num_tokens: int,
        patience_s: float,
        ended: threading.Event,
        say: Say = printing.say,
    ) -> None:
        """A shard that is missing, or not whole, is waited for, `patience_s` seconds at most.

        All tokens are below `num_tokens`. Once `ended` is set, nothing is waited for.
        """
        self.facts = facts
        self._folder, self._places = folder, places
        self._num_tokens, self._patience_s, self._say = num_tokens, patience_s, say
        self._ended = ended
        self._lists, self._listed = Lists(folder), Listed(facts, {})
        self._files: OrderedDict[int, File] = OrderedDict()
        # Shards whose digests were compared, and their files' states then: a run with a new order
        # in each epoch opens a file again and again.
        self._seen: dict[int, tuple[Entry, tuple[int, ...] | None]] = {}
        self._held: OrderedDict[tuple[int, int], Rows] = OrderedDict()  # by shard and group
        self._held_bytes = 0

    def rows(self, samples: Sequence[int]) -> Rows:
        """Return the rows of `samples`, one sample after another.

        Raises SystemFailure for a shard that doesn't come in time, and one whose rows are not those
        of the samples.
        """
        return shards.joined([self._rows(int(sample)) for sample in samples])

    def interrupt(self) -> None:
        """End a wait in another thread, which raises SystemFailure."""
        self._ended.set()

    def require(self, samples: Sequence[int]) -> None:
        """Wait until the shards of all `samples` are there. Raises SystemFailure as `rows` does."""
        for shard in sorted({self._places.shard_of(int(one)) for one in samples}):
            self._file(shard)

    def _rows(self, sample: int) -> Rows:
        shard = self._places.shard_of(sample)
        starts = self._places.starts(shard)
        index = self._places.index_in(shard, sample)
        begin, end = int(starts[index]), int(starts[index + 1])
        file = self._file(shard)
        group = file.group_of(begin)
        first = file.first_of(group)
        found = self._group(file, shard, group).part(slice(begin - first, end - first))
        positions, targets = self._places.positions(sample), self._places.targets(sample)
        if not (found.sample == sample).all() or not np.array_equal(found.position, positions):
            raise SystemFailure(
                f"{file.path}: rows {begin} to {end - 1} are not those of sample {sample} at "
                f"positions {_shown(positions)}: they are of {_shown(np.unique(found.sample))} at "
                f"{_shown(found.position)}; make the shard again by `entrenar distill logits`"
            )
        if not np.array_equal(found.target, targets):
            raise SystemFailure(
                f"{file.path}: rows {begin} to {end - 1} predict {_shown(found.target)}, and "
                f"sample {sample} has {_shown(targets)} there; make the shard again by `entrenar "
                "distill logits`"
            )
        if found.tokens.min() < 0 or found.tokens.max() >= self._num_tokens:
            wrong = found.tokens[(found.tokens < 0) | (found.tokens >= self._num_tokens)]
            raise SystemFailure(
                f"{file.path}: sample {sample} has token {wrong[0]}, and teacher and student have "
                f"{self._num_tokens}; make the shard again by `entrenar distill logits`"
            )
        return found

    def _group(self, file: File, shard: int, group: int) -> Rows:
        key = shard, group
        if key not in self._held:
            try:
                found = file.read(group)
            except UsageError as error:
                raise SystemFailure(str(error)) from error
            self._held[key] = found
            self._held_bytes += found.num_bytes
            while self._held_bytes > HELD_BYTES and len(self._held) > 1:
                _, old = self._held.popitem(last=False)
                self._held_bytes -= old.num_bytes
        self._held.move_to_end(key)
        return self._held[key]

    def _file(self, shard: int) -> File:
        if shard not in self._files:
            self._wait(shard)
            try:
                file = File(self._folder, self.facts, shard, self._places.starts(shard))
            except UsageError as error:
                raise SystemFailure(str(error)) from error
            self._files[shard] = file
            while len(self._files) > OPEN_MAX:
                self._files.popitem(last=False)
        self._files.move_to_end(shard)
        return self._files[shard]

    def _wait(self, shard: int) -> None:
        """Wait until the shard is listed, and its file has the listed bytes."""
        begin, told = time.monotonic(), ""
        while why := self._lacks(shard):
            waited = time.monotonic() - begin
            if waited >= self._patience_s:
                raise SystemFailure(
                    f"distill.logits={self._folder}: {why} (waited {waited:.0f} s); make it by "
                    "`entrenar distill logits`, or copy it, and resume"
                )
            if why != told and waited >= min(TELL_AFTER_S, self._patience_s / 2):
                self._say(f"waits for shard {shard}: {why}")
                told = why
            _wait_on(self._ended, self._folder, min(LOOK_EVERY_S, self._patience_s - waited))

    def _lacks(self, shard: int) -> str:
        """Return what a shard lacks to be read; "" if nothing."""
        if shard not in self._listed.shards:
            try:
                listed = self._lists.read()
            except UsageError as error:
                raise SystemFailure(str(error)) from error
            if listed is not None and listed.facts != self.facts:
                raise SystemFailure(
                    f"distill.logits={self._folder}: it has other shards now than when the run "
                    "began; give the run its own folder"
                )
            self._listed = listed or self._listed
        entry = self._listed.shards.get(shard)
        if entry is None:
            return f"shard {shard} of {self.facts.num_shards} is not there"
        state = _state(manifest.path_of(self._folder, self.facts, shard))
        if state is not None and self._seen.get(shard) == (entry, state):
            return ""
        why = shards.problem(self._folder, self.facts, entry)
        if why:  # it may be listed anew when it has been made again
            self._listed = Listed(self.facts, {})
        else:
            self._seen[shard] = entry, state
        return why


def _state(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written or replaced; None if it isn't there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _shown(numbers: np.ndarray) -> str:
    told = ", ".join(map(str, numbers[:4].tolist()))
    return f"{told}, ..." if len(numbers) > 4 else told
