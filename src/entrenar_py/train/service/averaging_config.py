"""The configuration of `coordinator --wire v2`: a YAML file, in which every key is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from entrenar_py.shared.config import composer
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.config.tree import ListNode, MapNode, plain
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.service import address
from entrenar_py.train.service.address import Address
from entrenar_py.train.service.averaging_keys import KEYS, NOT_HERE, REQUIRED, TIMING
from entrenar_py.train.service.config_keys import LISTEN
from entrenar_py.train.upstream.frames import FRAME_BYTES_MAX, LENGTH_MAX
from entrenar_py.train.upstream.terms import AveragingRun, Patience

PARTS_MAX = 2**16
NUMBER_MAX = 2**63 - 1
FRAME_BYTES_MIN = 2**12
COMPONENT_MAX = 2**8 - 1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AveragingConfig:
    """The settings of one coordinator."""

    run: AveragingRun
    listen: Address
    frame_bytes_max: int
    patience: Patience
    metrics: Path | None
    ledger: Path | None


def load(path: Path) -> AveragingConfig:
    """Return the configuration at `path`. Relative paths in it start from its folder.

    Raises ContractError with all problems at once, each as `file:line:column: error: ...`.
    """
    problems = Problems()
    form = "a configuration is a mapping (num_samples, num_steps, world_size, ...)"
    root = composer.load(path, problems, form=form)
    config = None if root is None else _Reader(root, path.parent, problems).config()
    problems.settle(strict=True)
    assert config is not None, "what can't be read is a problem"
    return config


class _Reader:
    """Reads one file key by key. Every problem goes to `problems`, with its place."""

    def __init__(self, root: MapNode, folder: Path, problems: Problems) -> None:
        self._root = Record(root, what="configuration", known=tuple(KEYS), problems=problems)
        self._folder, self._problems = folder, problems
        for key in root.fields:
            if key in NOT_HERE:
                problems.error(root.keys[key], f"{key}: {NOT_HERE[key]}; leave it out")
        self._root.warn_unread(read_elsewhere=tuple(NOT_HERE))

    def config(self) -> AveragingConfig:
        """Return the configuration; a wrong value is a problem, and its limit in the result."""
        for name in REQUIRED:
            if self._root.present(name) is None:
                meaning = KEYS[name][2]
                self._problems.error(self._root.node.at, f"{name} is missing: {meaning}")
        frame_bytes_max = self._whole(
            "frame_bytes_max", FRAME_BYTES_MAX, least=FRAME_BYTES_MIN, most=LENGTH_MAX
        )
        return AveragingConfig(
            run=self._run(frame_bytes_max),
            listen=self._read("listen", self._listen, Address("", 0)),
            frame_bytes_max=frame_bytes_max,
            patience=self._patience(),
            metrics=self._path("metrics"),
            ledger=self._path("ledger"),
        )

    def _run(self, frame_bytes_max: int) -> AveragingRun:
        num_samples = self._whole("num_samples", 1)
        if self._root.present("num_samples") is None:
            num_samples = NUMBER_MAX  # its absence is a problem already; it limits nothing else
        world_size = self._whole("world_size", 1, most=min(PARTS_MAX, num_samples))
        num_shards = self._whole("num_shards", world_size, least=world_size, most=PARTS_MAX)
        batch_size = self._whole("batch_size", num_samples, least=num_shards, most=num_samples)
        return AveragingRun(
            num_samples=num_samples,
            num_steps=self._whole("num_steps", 1),
            world_size=world_size,
            num_shards=num_shards,
            batch_size=batch_size,
            num_awaited=self._whole("wait_for", world_size, most=world_size),
            gradient_bytes_max=self._whole(
                "gradient_bytes_max", frame_bytes_max, least=frame_bytes_max
            ),
            components=self._components(),
            late_joins=self._root.present("late_joins") is None or self._root.flag("late_joins"),
        )

    def _whole(self, name: str, default: int, *, least: int = 1, most: int = NUMBER_MAX) -> int:
        """Return the number at `name`, or `default`, which has to be within the limits, too."""
        node = self._root.present(name)
        value = default if node is None else plain(node)
        if type(value) is int and least <= value <= most:
            return value
        if node is not None or name not in REQUIRED:
            allowed = f"{least} to {most}" if most < NUMBER_MAX else f"{least} or more"
            self._error(name, f"{name}={value!r}: use a whole number, {allowed}")
        return least

    def _components(self) -> tuple[int, ...] | None:
        node = self._root.present("components")
        if node is None:
            return None
        values: list[Any] = [None]
        if isinstance(node, ListNode):
            values = [plain(item) for item in node.items]
        right = all(type(value) is int and 0 <= value <= COMPONENT_MAX for value in values)
        if not right or len(set(values)) < len(values):
            advice = f"use a list of different numbers from 0 to {COMPONENT_MAX}"
            self._error("components", f"components={plain(node)!r}: {advice}")
            return None
        return tuple(values)

    def _listen(self) -> Address:
        return address.parse(self._root.text("listen") or LISTEN, port_min=0)

    def _patience(self) -> Patience:
        node = self._root.present("timing")
        if node is None:
            return Patience()
        if not isinstance(node, MapNode):
            self._error("timing", f"timing is a mapping of {', '.join(TIMING)}")
            return Patience()
        record = Record(node, what="timing", known=tuple(TIMING), problems=self._problems)
        record.warn_unread()
        given = {name: record.number(name) for name in TIMING}
        try:
            return Patience(**{name: value for name, value in given.items() if value is not None})
        except UsageError as error:
            self._problems.error(record.place(error.field), str(error))
            return Patience()

    def _path(self, name: str) -> Path | None:
        text = self._root.text(name)
        if "\0" in text:
            self._error(name, f"{name}={text!r}: a path can't contain a NUL; remove it")
            return None
        return self._folder / text if text else None

    def _read(self, name: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except UsageError as error:
            self._error(name, str(error))
            return otherwise

    def _error(self, name: str, message: str) -> None:
        self._problems.error(self._root.place(name), message)
