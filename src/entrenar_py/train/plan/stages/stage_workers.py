"""The workers that stages are planned for: from a file, or from the `devices` of a configuration.

A file is a list of {worker, memory, backend, flops or seconds_per_block, bandwidth}.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import ListNode, MapNode, ScalarNode
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model.settings import KINDS
from entrenar_py.train.plan import devices
from entrenar_py.train.plan.devices import Device

FORM = "workers are a list of mappings (worker, memory, backend, flops, bandwidth)"
_KEYS = ("worker", "memory", "backend", "flops", "seconds_per_block", "bandwidth")
_SPEEDS = ("flops", "seconds_per_block")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StageWorker:
    """A worker on a device of `kind` with `memory` bytes, None if that is not known.

    Its speed is `flops`, operations a second, or `seconds_per_block`, of a shard forward and
    backward, or not known. `bandwidth` of its link is in bytes a second.
    """

    name: str
    kind: str
    memory: int | None = None
    flops: float | None = None
    seconds_per_block: float | None = None
    bandwidth: float | None = None

    @property
    def has_speed(self) -> bool:
        """True if its speed is known."""
        return self.flops is not None or self.seconds_per_block is not None

    def speed(self, block_work: float) -> float:
        """Return its operations a second, if a block has `block_work`; one block without a speed.

        So the time of a worker without a speed is in blocks.
        """
        if self.flops is not None:
            return self.flops
        return block_work / (self.seconds_per_block or 1.0)


def load(path: Path) -> list[StageWorker]:
    """Return the workers in the file at `path`. Raises ContractError with all problems."""
    problems = Problems()
    data = composer.read(path, problems)
    root = None
    if data is not None:
        root = composer.compose_list(data, str(path), problems, form=FORM)
    found = [] if root is None else list(_read(root, problems))
    problems.settle(strict=True)
    return found


def of_devices(given: Sequence[Device]) -> list[StageWorker]:
    """Return a worker for each device; several of one name get numbers."""
    times, so_far = Counter(one.name for one in given), Counter[str]()
    found = []
    for one in given:
        so_far[one.name] += 1
        number = f"-{so_far[one.name]}" if times[one.name] > 1 else ""
        found.append(
            StageWorker(
                name=f"{one.name}{number}",
                kind=one.kind,
                memory=one.memory,
                bandwidth=one.bandwidth,
            )
        )
    return found


def nameless(number: int) -> list[StageWorker]:
    """Return so many workers of which nothing is known."""
    return [StageWorker(name="", kind="cpu")] * number


def _read(root: ListNode, problems: Problems) -> Iterator[StageWorker]:
    lines = dict[str, int]()
    if not root.items:
        problems.error(root.at, "the list is empty: give a worker for each stage")
    for index, item in enumerate(root.items):
        if not isinstance(item, MapNode):
            problems.error(item.at, f"workers[{index}]: use a mapping with {', '.join(_KEYS)}")
            continue
        record = Record(item, what=f"workers[{index}]", known=_KEYS, problems=problems)
        record.warn_unread()
        worker = _worker(record)
        if worker.name in lines:
            record.error(
                "worker", f"worker={worker.name}: line {lines[worker.name]} has it; name each once"
            )
        if worker.name:
            lines.setdefault(worker.name, item.at.line)
        yield worker
    _require_all_speeds(root, problems)


def _worker(record: Record) -> StageWorker:
    """Return a worker; what is wrong with it is a problem, and left out."""
    if all(record.present(key) for key in _SPEEDS):
        record.error("seconds_per_block", "flops and seconds_per_block: give one")
    kind = _text(record, "backend")
    if kind and kind not in KINDS:
        record.error("backend", f"backend={kind!r}: use {' or '.join(KINDS)}")
    return StageWorker(
        name=_text(record, "worker"),
        kind=kind if kind in KINDS else "cpu",
        memory=_parsed(record, "memory", devices.size, needed=True),
        flops=_parsed(record, "flops", _positive),
        seconds_per_block=_parsed(record, "seconds_per_block", _positive),
        bandwidth=_parsed(record, "bandwidth", devices.bandwidth),
    )


def _text(record: Record, key: str) -> str:
    node = record.present(key)
    if isinstance(node, ScalarNode) and node.text.strip():
        return node.text.strip()
    record.error(key, f"{key} is missing" if node is None else f"{key}: use a text")
    return ""


def _parsed(
    record: Record, key: str, parse: Callable[[str], T], *, needed: bool = False
) -> T | None:
    if record.present(key) is None:
        if needed:
            record.error(key, f"{key} is missing")
        return None
    if not (text := _text(record, key)):
        return None
    try:
        return parse(text)
    except UsageError as error:
        record.error(key, f"{key}: {error}" if key not in str(error) else str(error))
        return None


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UsageError(f"{text!r}: use a number > 0, such as 40e12")
    return number


def _require_all_speeds(root: ListNode, problems: Problems) -> None:
    """Report workers without a speed among others that have one: they can't be compared."""
    maps = [item for item in root.items if isinstance(item, MapNode)]
    has = [any(key in item.fields for key in _SPEEDS) for item in maps]
    for item, has_speed in zip(maps, has, strict=True):
        if any(has) and not has_speed:
            problems.error(
                item.at,
                "it has neither flops nor seconds_per_block, and others have; give all or none a "
                "speed",
            )
