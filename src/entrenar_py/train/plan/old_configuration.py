"""Reads an old `hetero_config.json`, reports its contradictions by line, and converts it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py.shared import scenario, wording
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import ListNode, MapNode, Node, ScalarNode
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.model.settings import LAYER_PIPELINE, StagePlan
from entrenar_py.train.plan import stage_text
from entrenar_py.train.service.address import PORT_MAX, Address

LOCAL = "local"  # the id of the worker on the coordinator's own machine


@dataclass(frozen=True, kw_only=True)
class OldWorker:
    """A worker in the old file: its hosts, its port, and its device as `--backend` names it.

    `number` is its id, None if that can't be read. `port` is None if it is missing or can't be
    read.
    """

    record: Record
    number: int | None
    hosts: tuple[str, ...]
    port: int | None
    device: str

    @property
    def name(self) -> str:
        """The worker's name for `entrenar worker --id`."""
        return f"worker-{self.number}"


@dataclass(frozen=True, kw_only=True)
class OldStage:
    """A stage with blocks `layers[0]` to `layers[1] - 1`, on the worker `number` or on LOCAL.

    A field that can't be read is None.
    """

    record: Record
    number: int | str | None
    layers: tuple[int, int] | None
    is_last: bool | None

    @property
    def name(self) -> str:
        """The name of the stage's worker for `entrenar worker --id`."""
        return LOCAL if self.number == LOCAL else f"worker-{self.number}"


def tell_hosts(coordinator: Address | None, workers: Sequence[OldWorker]) -> None:
    """Report each port that is used twice on one host."""
    taken = dict[tuple[str, int], str]()
    if coordinator is not None:
        taken[coordinator.host, coordinator.port] = "the coordinator"
    for worker in workers:
        if worker.port is None:
            continue
        places = [(host, worker.port) for host in worker.hosts]
        twice = next((place for place in places if place in taken), None)
        if twice is not None:
            worker.record.error(
                "port", f"port={worker.port} on {twice[0]}: {taken[twice]} has it; use another one"
            )
        taken |= dict.fromkeys(places, worker.record.what)


def tell_ids(workers: Sequence[OldWorker], stages: Sequence[OldStage]) -> None:
    """Report ids that two workers or two stages share, and ids without a worker or without a stage.

    Ids of stages are checked only if the ids of workers are right, and workers without a stage are
    reported only if the ids of stages are right. So each mistake is reported once.
    """
    numbers = [worker.number for worker in workers]
    if None in numbers or not stages:
        return
    for index, worker in enumerate(workers):
        if worker.number in numbers[:index]:
            first = numbers.index(worker.number)
            worker.record.error("id", f"id={worker.number}: workers[{first}] has it, too")
    if len(set(numbers)) == len(numbers) and _tell_stage_ids(numbers, stages):
        named = [stage.number for stage in stages]
        for worker in workers:
            if worker.number not in named:
                worker.record.error(
                    "id",
                    f"id={worker.number}: shard_plan has no stage for it; leave the worker out",
                )


def _tell_stage_ids(numbers: Sequence[int | None], stages: Sequence[OldStage]) -> bool:
    """Report ids that two stages share or that no worker has; return True if there are none."""
    named = [stage.number for stage in stages]
    is_right = None not in named
    for index, stage in enumerate(stages):
        if stage.number is not None and stage.number in named[:index]:
            is_right = False
            stage.record.error(
                "id",
                f"id={stage.number}: shard_plan[{named.index(stage.number)}] has it, too; a worker "
                "has one stage",
            )
        elif stage.number not in (None, LOCAL, *numbers):
            is_right = False
            known = ", ".join(map(str, numbers)) or "none"
            stage.record.error(
                "id", f'id={stage.number}: no worker has it; workers are {known}, and "{LOCAL}"'
            )
    return is_right


def tell_layers(top: Record, stages: Sequence[OldStage], num_blocks: int | None) -> None:
    """Report gaps, overlaps, stages without blocks, a wrong end, and a wrong last stage."""
    if not stages:
        top.error("shard_plan", "shard_plan is empty; give a stage for each worker")
        return
    end: int | None = 0  # of the stages so far; None if the latest of them is wrong
    is_whole = True
    for stage in stages:
        if stage.layers is None:
            return
        start, stop = stage.layers
        if problem := _of_place(start, stop, start if end is None else end):
            is_whole = False
            stage.record.error("start", f"start={start}, end={stop}: {problem}")
        end = stop if 0 <= start < stop else None
    _tell_last(top, stages)
    if is_whole and num_blocks is not None and end != num_blocks:
        stages[-1].record.error(
            "end",
            f"end={end}: the model has {num_blocks} blocks; `end` is exclusive, so use "
            f"{num_blocks}",
        )


def _tell_last(top: Record, stages: Sequence[OldStage]) -> None:
    """Report if no stage is marked as the last, if several are, or if the marked one isn't last."""
    marked = [index for index, stage in enumerate(stages) if stage.is_last]
    if any(stage.is_last is None for stage in stages):
        return
    if not marked:
        top.error("shard_plan", 'shard_plan: no stage has "is_last": true; mark the last one')
    for index in marked[1:]:
        stages[index].record.error(
            "is_last", f"is_last: true: shard_plan[{marked[0]}] is the last one, too; mark one"
        )
    if len(marked) == 1 and marked[0] != len(stages) - 1:
        stages[marked[0]].record.error(
            "is_last",
            f"is_last: true: stages come after it; mark shard_plan[{len(stages) - 1}] alone",
        )


def _of_place(start: int, stop: int, end: int) -> str:
    """Return what is wrong with a stage that follows `end` blocks; "" if nothing is."""
    if start < 0:
        return "blocks are counted from 0"
    if start >= stop:
        return "it has no block; `end` is exclusive, so use start < end"
    if start > end:
        return f"no stage has {wording.spanned('block', range(end, start))}; let it start at {end}"
    if start < end:
        return f"block {start} is in a stage before it, too; let it start at {end}"
    return ""


FORM = "a hetero_config is a mapping (version, coordinator, workers, shard_plan)"
_HOST = re.compile(r"[A-Za-z0-9._:-]{1,253}")
_VERSIONS = ("1", "1.0")
_TYPES: Mapping[type[Any], str] = {int: "a whole number", str: "a text", bool: "true or false"}
_TOP = ("version", "coordinator", "workers", "shard_plan")
_WORKER = ("id", "hostname", "ip", "port", "device")
_STAGE = ("id", "start", "end", "is_last")


@dataclass(frozen=True, kw_only=True)
class OldConfiguration:
    """The whole old file."""

    coordinator: Address
    workers: tuple[OldWorker, ...]
    stages: tuple[OldStage, ...]


def load(path: Path, num_blocks: int | None) -> OldConfiguration:
    """Return the content of the file at `path`, for a model with `num_blocks`, None if unknown.

    Raises ContractError with all problems, each at its line.
    """
    problems = Problems()
    root = composer.load(path, problems, form=FORM)
    old = None if root is None else _Reader(problems).whole(root, num_blocks)
    problems.settle(strict=True)
    assert old is not None, "what can't be read is a problem"
    return old


class _Reader:
    """Reads the file key by key. A wrong value is reported as a problem and read as None."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems

    def whole(self, root: MapNode, num_blocks: int | None) -> OldConfiguration | None:
        """Return the file's content; None after reporting that it has no coordinator."""
        top = self._record(root, "hetero_config", _TOP)
        self._version(top)
        coordinator = self._coordinator(top)
        workers = [self._worker(one) for one in self._items(top, "workers", _WORKER)]
        stages = [self._stage(one) for one in self._items(top, "shard_plan", _STAGE)]
        tell_hosts(coordinator, workers)
        has_plan = isinstance(root.fields.get("shard_plan"), ListNode)
        if has_plan and isinstance(root.fields.get("workers"), ListNode):
            tell_ids(workers, stages)
        if has_plan:
            tell_layers(top, stages, num_blocks)
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
        """Return the values of those `keys` that are present; report a problem if none is."""
        present = [key for key in keys if key in record.node.fields]
        if not present:
            record.error(keys[0], f"{' and '.join(keys)} are missing; give one")
        hosts = list[str]()
        for key in present:
            host: str | None = self._value(record, key, str)
            if host and not _HOST.fullmatch(host):  # it is written into commands and a comment
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
        """Return the value of `key` if its type is `kind`, described by `form`; else report it."""
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
        """Return the mapping as a record. A key that is not in `known` is a problem."""
        for key in node.fields:
            if key not in known:
                message = f"{what}: {key} is not known here; leave it out (known: "
                self._problems.error(node.keys[key], f"{message}{', '.join(known)})")
        return Record(node, what=what, known=known, problems=self._problems)


def lines(
    old: OldConfiguration,
    *,
    source: Path,
    model: Path,
    task: str,
    data: Path,
    output: Path,
    secret: Path,
) -> Iterator[str]:
    """Yield the lines of a configuration that `entrenar coordinator` accepts."""
    yield f"# Made from {source} by `entrenar pipeline import`. Start it by"
    yield "#   entrenar coordinator run.yaml"
    yield "# and each worker, which takes its --backend and --listen-port from the old file, by"
    for command in _commands(old, secret):
        yield f"#   {command}"
    yield f"model: {stage_text.scalar(str(model))}"
    yield f"task: {task}"
    yield f"output: {stage_text.scalar(str(output))}"
    yield f"strategy: {LAYER_PIPELINE}"
    yield f"data: {{train: {stage_text.scalar(str(data))}}}"
    yield from stage_text.section(_stage_plans(old))
    yield "coordinator:"
    yield f"  listen: {stage_text.scalar(str(old.coordinator))}"
    yield f"  secret_file: {stage_text.scalar(str(secret))}"


def _stage_plans(old: OldConfiguration) -> list[StagePlan]:
    """Return the stages. A stage on the coordinator's machine has no device in the old file."""
    kinds = {worker.number: scenario.backend_kind(worker.device) for worker in old.workers}
    plans = []
    for stage in old.stages:
        assert stage.layers is not None, "what can't be read is a problem"
        kind = None if stage.number == LOCAL else kinds[stage.number]  # type: ignore[index]
        plans.append(StagePlan(layers=stage.layers, worker=(stage.name,), backend=kind))
    return plans


def _commands(old: OldConfiguration, secret: Path) -> Iterator[str]:
    """Yield the command that starts each worker, with the machine on which it must run."""
    by_number = {worker.number: worker for worker in old.workers}
    for stage in old.stages:
        where, options, host = "the coordinator's machine", "", old.coordinator.host
        if _is_any(host):
            host = "127.0.0.1" if stage.number == LOCAL else "HOST"
        if stage.number != LOCAL:
            worker = by_number[stage.number]  # type: ignore[index]
            where = " ".join(dict.fromkeys(worker.hosts))
            options = f" --backend {worker.device}"
            if worker.port is not None:
                options += f" --listen-port {worker.port}"
        address, file = Address(host, old.coordinator.port), shlex.quote(str(secret))
        yield (
            f"entrenar worker --coordinator {address} --secret-file {file} --id {stage.name}"
            f"{options}   (on {where})"
        )


def _is_any(host: str) -> bool:
    """Return whether `host` stands for all addresses of a machine, and can't be connected to."""
    return host in ("0.0.0.0", "::")
