"""Reads a `hetero_config.json` of an earlier framework: every field is known, in its place.

Its `end` is exclusive, as in Python's ranges, and so is ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py.shared import scenario
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.config.tree import ListNode, MapNode, Node, ScalarNode
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.plan.stages import old_plan_problems
from entrenar_py.train.plan.stages.old_plan_problems import LOCAL, OldStage, OldWorker
from entrenar_py.train.service.address import PORT_MAX, Address

FORM = "a hetero_config is a mapping (version, coordinator, workers, shard_plan)"
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")
_VERSIONS = ("1", "1.0")
_TYPES: Mapping[type[Any], str] = {int: "a whole number", str: "a text", bool: "true or false"}
_TOP = ("version", "coordinator", "workers", "shard_plan")
_WORKER = ("id", "hostname", "ip", "port", "device")
_STAGE = ("id", "start", "end", "is_last")


@dataclass(frozen=True, kw_only=True)
class OldConfiguration:
    """The whole file."""

    coordinator: Address
    workers: tuple[OldWorker, ...]
    stages: tuple[OldStage, ...]


def load(path: Path, num_blocks: int | None) -> OldConfiguration:
    """Return what the file at `path` says, of a model with `num_blocks`, None if not known.

    Raises ContractError with all problems, each at its line.
    """
    problems = Problems()
    root = composer.load(path, problems, form=FORM)
    found = None if root is None else _Reader(problems).whole(root, num_blocks)
    problems.settle(strict=True)
    assert found is not None, "what can't be read is a problem"
    return found


class _Reader:
    """Reads the file key by key. What is wrong is a problem, and None is read in its place."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def whole(self, root: MapNode, num_blocks: int | None) -> OldConfiguration | None:
        """Return the file's content; None after reporting that it has no coordinator."""
        top = self._record(root, "hetero_config", _TOP)
        self._version(top)
        coordinator = self._coordinator(top)
        workers = [self._worker(one) for one in self._items(top, "workers", _WORKER)]
        stages = [self._stage(one) for one in self._items(top, "shard_plan", _STAGE)]
        old_plan_problems.tell_hosts(coordinator, workers)
        has_plan = isinstance(root.fields.get("shard_plan"), ListNode)
        if has_plan and isinstance(root.fields.get("workers"), ListNode):
            old_plan_problems.tell_ids(workers, stages)
        if has_plan:
            old_plan_problems.tell_layers(top, stages, num_blocks)
        if coordinator is None:
            return None
        return OldConfiguration(
            coordinator=coordinator, workers=tuple(workers), stages=tuple(stages)
        )

    def _version(self, top: Record) -> None:
        node = top.node.fields.get("version")
        if node is None:
            top.error("version", f"version is missing; use {_VERSIONS[0]}")
        elif not isinstance(node, ScalarNode) or node.text not in _VERSIONS:
            shown = f"={node.text!r}" if isinstance(node, ScalarNode) else ""
            top.error("version", f"version{shown}: unknown; use {_VERSIONS[0]}")

    def _coordinator(self, top: Record) -> Address | None:
        node = top.node.fields.get("coordinator")
        if not isinstance(node, MapNode):
            told = "is missing: give" if node is None else "is"
            top.error("coordinator", f"coordinator {told} a mapping of host or ip, and port")
            return None
        own = self._record(node, "coordinator", ("host", "ip", "port"))
        hosts, port = self._hosts(own, ("ip", "host")), self._port(own)
        if "port" not in node.fields:
            own.error("port", "port is missing, where workers connect")
        return Address(hosts[0], port) if hosts and port else None

    def _worker(self, record: Record) -> OldWorker:
        device = self._value(record, "device", str)
        if device is not None:
            try:
                scenario.backend_kind(device)
            except UsageError:
                known = scenario.backends_in_words(scenario.BACKENDS)
                record.error("device", f"device={device!r}: unknown; use {known}")
        return OldWorker(
            record=record,
            number=self._value(record, "id", int),
            hosts=self._hosts(record, ("hostname", "ip")),
            port=self._port(record),
            device=device or "cpu",
        )

    def _stage(self, record: Record) -> OldStage:
        node = record.node.fields.get("id")
        number: int | str | None = LOCAL
        if not isinstance(node, ScalarNode) or node.value != LOCAL:
            number = self._value(record, "id", int, f'{_TYPES[int]} or "{LOCAL}"')
        start, end = (self._value(record, key, int) for key in ("start", "end"))
        is_last: bool | None = False
        if "is_last" in record.node.fields:
            is_last = self._value(record, "is_last", bool)
        layers = None if start is None or end is None else (start, end)
        return OldStage(record=record, number=number, layers=layers, is_last=is_last)

    def _hosts(self, record: Record, keys: Sequence[str]) -> tuple[str, ...]:
        """Return the texts of those of `keys` that are given; one has to be."""
        given = [key for key in keys if key in record.node.fields]
        if not given:
            record.error(keys[0], f"{' and '.join(keys)} are missing; give one")
        hosts = list[str]()
        for key in given:
            host: str | None = self._value(record, key, str)
            if host and not _HOST.fullmatch(host):  # it gets into commands and a comment
                record.error(key, f"{key}={host!r}: use the name of a host, or its address")
            elif host:
                hosts.append(host)
        return tuple(hosts)

    def _port(self, record: Record) -> int | None:
        if "port" not in record.node.fields:
            return None
        port: int | None = self._value(record, "port", int)
        if port is not None and not 1 <= port <= PORT_MAX:
            record.error("port", f"port={port}: use 1 to {PORT_MAX}")
            return None
        return port

    def _value(self, record: Record, key: str, kind: type[Any], form: str = "") -> Any:
        """Return the value of `key`, if it is a `kind`, which `form` describes."""
        node: Node | None = record.node.fields.get(key)
        form = form or _TYPES[kind]
        if node is None:
            record.error(key, f"{key} is missing; give {form}")
        elif not isinstance(node, ScalarNode):
            record.error(key, f"{key}: use {form}")
        elif type(node.value) is not kind or node.text == "":
            record.error(key, f"{key}={node.value!r}: use {form}")
        else:
            return node.value
        return None

    def _items(self, top: Record, key: str, known: Sequence[str]) -> Iterator[Record]:
        node = top.node.fields.get(key)
        if not isinstance(node, ListNode):
            told = "is missing: give" if node is None else "is"
            top.error(key, f"{key} {told} a list of mappings ({', '.join(known)})")
            return
        for index, item in enumerate(node.items):
            if isinstance(item, MapNode):
                yield self._record(item, f"{key}[{index}]", known)
            else:
                self._problems.error(item.at, f"{key}[{index}] is a mapping ({', '.join(known)})")

    def _record(self, node: MapNode, what: str, known: Sequence[str]) -> Record:
        """Return the mapping as a record; a key that nothing here corresponds to is a problem."""
        for key in node.fields:
            if key not in known:
                message = f"{what}: {key} is not known here; leave it out (known: "
                self._problems.error(node.keys[key], f"{message}{', '.join(known)})")
        return Record(node, what=what, known=known, problems=self._problems)
