"""The coordinator's configuration: a YAML file, in which every key is known and in its place.

`config_keys` lists the keys. Some are a scenario's, the rest describe the service.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from entrenar_py.shared import systems, updates
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.config.tree import MapNode, Node, plain
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import DEFAULTS, OF_USERS, Scenario
from entrenar_py.shared.untrusted import files
from entrenar_py.train.coordinator import audited, topology
from entrenar_py.train.service import address, config_keys
from entrenar_py.train.service.address import Address
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.tcp import SECRET_BYTES_MIN

SECRET_BYTES_MAX = 2**16

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The file that keeps the state, and the number of steps from one save to the next."""

    path: Path
    every_steps: int


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one coordinator. `context` is None without TLS."""

    scenario: Scenario
    listen: Address
    secret: bytes
    context: ssl.SSLContext | None
    wait_for: int
    timing: Timing
    checkpoint: Checkpoint | None
    metrics: Path | None
    ledger: Path | None


def load(path: Path) -> Config:
    """Return the configuration at `path`. Relative paths in it start from its folder.

    Raises ContractError with all problems at once, each as `file:line:column: error: ...`.
    """
    problems = Problems()
    form = "a configuration is a mapping (workload, world_size, secret_file, ...)"
    root = composer.load(path, problems, form=form)
    if root is None:
        problems.settle(strict=True)
    assert root is not None, "a file without a tree has a problem"
    reader = _Reader(root, path.parent, problems)
    config = reader.config()
    problems.settle(strict=True)
    assert config is not None, "what is missing is a problem"
    return config


def secret(path: Path) -> bytes:
    """Return the secret in the file at `path`; UsageError if unreadable, too short or too long."""
    try:
        value = files.read(path, bytes_max=SECRET_BYTES_MAX).strip()
    except OSError as error:
        problem = f"can't be read ({error.strerror}); give a file that can be read"
        raise UsageError(f"secret_file={path}: {problem}") from error
    if len(value) < SECRET_BYTES_MIN:
        raise UsageError(
            f"secret_file={path}: {len(value)} bytes; use at least {SECRET_BYTES_MIN}, e.g. of "
            "`head -c 32 /dev/urandom | base64`"
        )
    return value


class _Reader:
    """Reads one file key by key. Every problem goes to `problems`, with its place."""

    def __init__(self, root: MapNode, folder: Path, problems: Problems) -> None:
        known = (*config_keys.TRAINING, *config_keys.SERVICE)
        self._root = Record(root, what="configuration", known=known, problems=problems)
        self._folder, self._problems = folder, problems
        self._root.warn_unread()

    def config(self) -> Config | None:
        """Return the configuration, or None if a required part is missing or wrong."""
        scenario = self._scenario()
        shared = self._secret()
        listen, context = self._listen(), self._context()
        timing = self._timing()
        checkpoint = self._checkpoint()
        wait_for = self._whole(self._root, "wait_for", default=1)
        metrics, ledger = self._path(self._root, "metrics"), self._path(self._root, "ledger")
        if scenario is not None and wait_for > scenario.world_size:
            self._error(
                "wait_for",
                f"wait_for={wait_for}: world_size is {scenario.world_size}; wait for no more",
            )
        if scenario is None or shared is None or listen is None:
            return None
        return Config(
            scenario=scenario,
            listen=listen,
            secret=shared,
            context=context,
            wait_for=wait_for,
            timing=timing,
            checkpoint=checkpoint,
            metrics=metrics,
            ledger=ledger,
        )

    def _scenario(self) -> Scenario | None:
        nodes = self._root.node.fields
        missing = [name for name in config_keys.REQUIRED if self._root.present(name) is None]
        for name in missing:
            self._problems.error(self._root.node.at, f"{name} is missing; give it")
        named = [name for name in config_keys.TRAINING if name in nodes and name not in missing]
        values = {name: _value(name, nodes[name]) for name in named}
        scenario = self._possible(values)
        if scenario is None:
            return None
        scenario = self._with_option(scenario, "audit_share", audited.share_of)
        scenario = self._with_option(scenario, updates.OPTION, updates.by_server)
        workload = scenario.workload
        if workload in OF_USERS:
            other = (
                "`entrenar finetune` trains it" if workload != "own" else "stored traces have it"
            )
            self._error("workload", f"workload={workload!r}: only {other}; use another one")
            return None
        if "width" in values and workload not in config_keys.SIZED:
            sized = " or ".join(config_keys.SIZED)
            width = f"width={scenario.width}"
            self._error("width", f"{width}: {workload} has one size; leave it out, or use {sized}")
        return None if missing else scenario

    def _possible(self, values: dict[str, Any]) -> Scenario | None:
        """Return the scenario of the valid fields in `values`; None if a required one is invalid.

        Invalid fields are reported and removed from `values`.
        """
        while True:
            try:
                return Scenario.from_dict({**DEFAULTS, **values, "system": self._system()})
            except UsageError as error:
                self._error(error.field, str(error))
                if error.field in config_keys.REQUIRED or error.field not in values:
                    return None
                del values[error.field]

    def _system(self) -> str:
        """Return the system of the configured topology."""
        text = self._root.text("topology") or config_keys.TOPOLOGIES[0]
        if text not in config_keys.TOPOLOGIES:
            allowed = " or ".join(config_keys.TOPOLOGIES)
            self._error("topology", f"topology={text!r}: use {allowed}")
            text = config_keys.TOPOLOGIES[0]
        return topology.BY_NAME[text].system

    def _with_option(
        self, scenario: Scenario, name: str, read: Callable[[Scenario], object]
    ) -> Scenario:
        """Return `scenario` with the file's option `name`, unless that is missing or invalid."""
        node = self._root.present(name)
        if node is None:
            return scenario
        changed = scenario.with_(options={**scenario.options, name: plain(node)})
        value = self._read(name, lambda: read(changed))
        if value is not None and name in systems.SYSTEMS[scenario.system].options:
            return changed
        if value:
            self._error(
                name,
                f"{name}={plain(node)!r} with topology: mesh: no gradient passes the coordinator "
                "there; leave it out, or use topology: star",
            )
        return scenario

    def _secret(self) -> bytes | None:
        path = self._path(self._root, "secret_file")
        if path is None:
            self._error("secret_file", "secret_file is missing; give the file of the secret")
            return None
        return self._read("secret_file", lambda: secret(path))

    def _listen(self) -> Address | None:
        text = self._root.text("listen") or config_keys.LISTEN
        return self._read("listen", lambda: address.parse(text, port_min=0))

    def _context(self) -> ssl.SSLContext | None:
        record = self._block("tls", config_keys.TLS)
        if record is None:
            return None
        cert, key, ca = (self._path(record, name) for name in config_keys.TLS)
        if cert is None or key is None:
            self._error("tls", f"tls: {'key' if cert else 'cert'} is missing; give its file")
            return None
        return self._read("tls", lambda: sockets.server_context(cert=cert, key=key, ca=ca))

    def _timing(self) -> Timing:
        record = self._block("timing", config_keys.TIMING)
        if record is None:
            return Timing()
        given = {name: record.number(name) for name in config_keys.TIMING}
        try:
            return Timing(**{name: value for name, value in given.items() if value is not None})
        except UsageError as error:
            self._problems.error(record.place(error.field), str(error))
            return Timing()

    def _checkpoint(self) -> Checkpoint | None:
        record = self._block("checkpoint", config_keys.CHECKPOINT)
        if record is None:
            return None
        path, every = self._path(record, "path"), self._whole(record, "every_steps", default=0)
        for name, value in (("path", record.text("path")), ("every_steps", every)):
            if not value:
                self._problems.error(record.place(name), f"checkpoint: {name} is missing; give it")
        if path is None or not every:
            return None
        # A link is resolved, so that its target is written and locked. A rename would replace it.
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        return Checkpoint(path=target, every_steps=every)

    def _block(self, name: str, known: Mapping[str, Any]) -> Record | None:
        node = self._root.present(name)
        if node is None:
            return None
        if not isinstance(node, MapNode):
            self._error(name, f"{name} is a mapping of {', '.join(known)}")
            return None
        record = Record(node, what=name, known=tuple(known), problems=self._problems)
        record.warn_unread()
        return record

    def _path(self, record: Record, name: str) -> Path | None:
        text = record.text(name)
        if "\0" in text:
            self._problems.error(
                record.place(name), f"{name}={text!r}: a path can't contain a NUL; remove it"
            )
            return None
        return self._folder / text if text else None

    def _whole(self, record: Record, name: str, *, default: int) -> int:
        node = record.present(name)
        if node is None:
            return default
        value = plain(node)
        if type(value) is not int or value < 1:
            self._problems.error(node.at, f"{name}={value!r}: use a whole number >= 1")
            return 1
        return value

    def _read(self, name: str, read: Callable[[], T]) -> T | None:
        """Return the result of `read`, or None after reporting its UsageError at the key `name`."""
        try:
            return read()
        except UsageError as error:
            self._error(name, str(error))
            return None

    def _error(self, name: str, message: str) -> None:
        self._problems.error(self._root.place(name), message)


def _value(name: str, node: Node) -> Any:
    """Return the value of a scenario's field. A float like 1e-3, text in YAML 1.1, is converted."""
    value = plain(node)
    if not isinstance(value, str) or "float" not in str(Scenario.__dataclass_fields__[name].type):
        return value
    try:
        return float(value)
    except ValueError:
        return value
