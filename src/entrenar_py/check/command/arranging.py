"""Finds out how the ranks of a command share the model, from its runs on one worker and on several.

The run on one worker shows where pieces lie, and is made after others: these are read again then.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from entrenar_py.check.command.asked import Asked
from entrenar_py.check.command.launch import Ended
from entrenar_py.check.rank_files import arrangements, assembly, rank_file
from entrenar_py.check.rank_files.arrangements import Arrangement
from entrenar_py.check.rank_files.layout import Layout
from entrenar_py.check.rank_files.rank_file import SUFFIX

Made = tuple[str, Asked, Ended]


@dataclass
class Arranging:
    """Follows the runs of a command, each with its ranks' files in a folder below `folder`.

    `known` are the arrangements of its ranks, by number of workers, and is added to.
    """

    folder: Path
    known: MutableMapping[int, Arrangement]
    _made: list[Made] = field(default_factory=list)
    _plain: dict[int, str] = field(default_factory=dict)  # by number of workers
    _seen: set[int] = field(default_factory=set)

    def layout(self, name: str) -> Layout | None:
        """Return the layout that a rank of the run `name` declares, or its meshes show."""
        files = sorted((self.folder / name).glob(f"*{SUFFIX}"))
        return rank_file.load(files[0]).layout if files else None

    def after(self, name: str, asked: Asked, ended: Ended) -> list[Made]:
        """Return the earlier runs that are to be read again, now that the run `name` is made."""
        before = [*self._made]
        self._made.append((name, asked, ended))
        if asked.is_plain and not asked.repeat:
            self._plain.setdefault(asked.world_size, name)
        if 1 not in self._plain or self._plain.keys() <= {1, *self._seen}:
            return []
        alone, _ = assembly.load(self.folder / self._plain[1])
        fresh: set[int] = set()
        for size in sorted(self._plain.keys() - {1, *self._seen}):
            self._seen.add(size)
            ranks, _ = assembly.load(self.folder / self._plain[size])
            arrangement = arrangements.shown(ranks, alone)
            if arrangement is not None:
                self.known[size] = arrangement
                fresh.add(size)
                if (one := arrangement.alone()) is not None:
                    self.known[1] = one
                    fresh.add(1)
        return [made for made in before if made[1].world_size in fresh]
