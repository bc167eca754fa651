"""Scripts of users: right ones, and the same with a bug planted, which a named check must find.

Each folder is a family. Its scripts are right. `twins.yaml` lists what is tried: a script, of this
folder or of `examples/user_trainers`, with some text replaced. These bugs are no mutants of the
catalogue, because the text of a script is changed, not a function at a dotted path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "user_trainers"
# Tried by tests of their own, as they need libraries that not every machine has.
APART = ("anatomy", "integrations", "nondeterminism", "zero")


@dataclass(frozen=True, kw_only=True)
class Twin:
    """`script` with `changes`, pairs of old and new text, which each occur once.

    `script` is a path below this folder, or the name of an example. `text` is used in its place if
    it is given. `check` must find the bug with `world_size` workers, at `step` (-1: before the
    first one), `rank` and `tensor`, as far as these are given. `turned` are the knobs of the script
    that are turned. Without a check the script is right: nothing may be found, by the checks
    `wanted` if these are given. `verdict` is what the check finds, if that isn't a bug, and
    `arguments` follow the script in its command. `source` tells where the bug was seen.
    """

    name: str
    script: str
    text: str = ""
    source: str = ""
    changes: tuple[tuple[str, str], ...] = ()
    arguments: tuple[str, ...] = ()
    check: str = ""
    wanted: tuple[str, ...] = ()
    verdict: str = "falsified"
    world_size: int = 2
    turned: tuple[str, ...] = ()
    step: int | None = None
    rank: int | None = None
    tensor: str | None = None
    words: str = ""

    @property
    def file(self) -> str:
        """The name of the script's file."""
        return Path(self.script).name

    def original(self) -> str:
        """Return the script's text without the changes."""
        folder = HERE if "/" in self.script else EXAMPLES
        return self.text or (folder / self.script).read_text(encoding="utf-8")

    def changed(self) -> str:
        """Return the script's text with the changes."""
        text = self.original()
        for old, new in self.changes:
            if (times := text.count(old)) != 1:
                raise ValueError(f"{self.name}: {old!r} occurs {times} times in {self.script}")
            text = text.replace(old, new)
        return text


@cache
def family(name: str) -> tuple[Twin, ...]:
    """Return the twins of the folder `name`, in the order of its file."""
    rows = yaml.load((HERE / name / "twins.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)
    return tuple(_twin(row) for row in rows)


def _twin(row: dict[str, Any]) -> Twin:
    changes = tuple((change["old"], change["new"]) for change in row.pop("changes", ()))
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
    }
    return Twin(changes=changes, **fields)


def families() -> Sequence[str]:
    """Return the names of the families that need nothing but torch, in order."""
    folders = sorted(path.parent.name for path in HERE.glob("*/twins.yaml"))
    return [name for name in folders if name not in APART]


def every(names: Iterable[str] | None = None) -> tuple[Twin, ...]:
    """Return the twins of the families `names`, or of all that need nothing but torch."""
    return tuple(twin for name in names or families() for twin in family(name))


def right(*names: str) -> tuple[Twin, ...]:
    """Return the right scripts among the twins of the families `names`."""
    return tuple(twin for twin in every(names) if not twin.check)
