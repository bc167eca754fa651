"""The coordinator's configuration: a YAML file, in which unknown or misplaced keys are errors.

Some keys belong to the training plan, the others describe the service. The docs show the tables of
keys.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entrenar_py.shared import systems, workers
from entrenar_py.shared.config import composer
from entrenar_py.shared.config.composer import MapNode, Node, plain
from entrenar_py.shared.config.fields import Record
from entrenar_py.shared.config.problems import Problems
from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import DEFAULTS, OF_USERS, TrainingPlan
from entrenar_py.shared.untrusted import files
from entrenar_py.train.coordinator import audits, topology
from entrenar_py.train.service import address
from entrenar_py.train.service.address import Address
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io import sockets
from entrenar_py.train.wire_io.tcp import SECRET_BYTES_MIN

LISTEN = "127.0.0.1:7411"
TOPOLOGIES = ("star", "mesh")
SIZED = ("mlp", "vectors")  # workloads with a variable `width`

# Fields of a plan that a service doesn't read: it runs on its workers' backends.
_NOT_HERE = ("trainer", "backends", "detail", "options")
TRAINING = tuple(name for name in TrainingPlan.__dataclass_fields__ if name not in _NOT_HERE)
_DEFAULTS = {name: value for name, value in DEFAULTS.items() if name != "system"}
REQUIRED = ("workload", "world_size", "seed")

# Key -> (type, default, meaning). The docs show this table.
SERVICE: Mapping[str, tuple[str, str, str]] = {
    "topology": (
        *("`star` or `mesh`", "`star`"),
        "where gradients go: all to the coordinator, or from worker to worker",
    ),
    "listen": ("host:port", f"`{LISTEN}`", "where workers connect; port 0 means any free port"),
    "secret_file": (
        "path",
        "required",
        "the file's bytes, stripped of white space, are the secret",
    ),
    "tls": ("mapping", "nothing is encrypted", "all connections use TLS 1.3"),
    "wait_for": ("whole number >= 1", "`1`", "workers that must have joined before the first step"),
    "audit_share": (
        *("number from 0 to 1", "`0`"),
        "fraction of each step's shards that a second worker also computes; at least one if not 0",
    ),
    "updates": (
        *("`workers` or `server`", "`workers`"),
        "what takes the steps: every worker, or the server, which then sends the new weights",
    ),
    "timing": ("mapping", "see below", "how long each end waits"),
    "checkpoint": ("mapping", "none is written", "where the state is saved, for `--resume`"),
    "metrics": ("path", "none are written", "a file with one JSON object for each step"),
    "ledger": (
        "path",
        "none is written",
        "the trace of the run, with one chained line for each event",
    ),
}
CHECKPOINT: Mapping[str, tuple[str, str, str]] = {
    "path": ("path", "required", "the file; it is replaced atomically"),
    "every_steps": ("whole number >= 1", "required", "steps from one save to the next"),
}
TLS: Mapping[str, tuple[str, str, str]] = {
    "cert": ("path", "required", "the coordinator's certificate, PEM; workers check its name"),
    "key": ("path", "required", "its private key, PEM, without a passphrase"),
    "ca": (
        "path",
        "workers need no certificate",
        "the authority that signs the certificates that workers must show",
    ),
}
TIMING: Mapping[str, str] = {
    "heartbeat_s": "time between two heartbeats of each end",
    "dead_after_s": "how long an end may be silent before it counts as dead",
    "hello_s": "how long a new connection may take to prove the secret",
    "gather_s": "how long the run waits for enough workers before it ends",
}


SECRET_BYTES_MAX = 2**16


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The file for the state, and the number of steps between saves."""

    path: Path
    every_steps: int


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one coordinator. `context` is None without TLS."""

    plan: TrainingPlan
    listen: Address
    secret: bytes
    context: ssl.SSLContext | None
    wait_for: int
    timing: Timing
    checkpoint: Checkpoint | None
    metrics: Path | None
    ledger: Path | None


def load(path: Path) -> Config:
    """Return the configuration at `path`. Relative paths in it are relative to its folder.

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
    """Return the secret in the file at `path`.

    Raises UsageError if the file is unreadable or the secret too short or too long.
    """
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
        known = (*TRAINING, *SERVICE)
        self._root = Record(root, what="configuration", known=known, problems=problems)
        self._folder, self._problems = folder, problems
        self._root.warn_unread()

    def config(self) -> Config | None:
        """Return the configuration, or None if a required part is missing or wrong."""
        plan = self._plan()
        shared = self._secret()
        text = self._root.text("listen") or LISTEN
        listen = self._root.attempt("listen", lambda: address.parse(text, port_min=0))
        context = self._context()
        timing = self._root.numbers("timing", Timing, TIMING)
        checkpoint = self._checkpoint()
        wait_for = self._root.whole("wait_for", 1) or 1
        metrics, ledger = (self._root.path(name, self._folder) for name in ("metrics", "ledger"))
        if plan is not None and wait_for > plan.world_size:
            self._root.refuse(
                "wait_for",
                f"wait_for={wait_for}: world_size is {plan.world_size}; wait for no more",
            )
        if plan is None or shared is None or listen is None:
            return None
        return Config(
            plan=plan,
            listen=listen,
            secret=shared,
            context=context,
            wait_for=wait_for,
            timing=timing,
            checkpoint=checkpoint,
            metrics=metrics,
            ledger=ledger,
        )

    def _plan(self) -> TrainingPlan | None:
        nodes = self._root.node.fields
        missing = [name for name in REQUIRED if self._root.present(name) is None]
        for name in missing:
            self._problems.error(self._root.node.at, f"{name} is missing; give it")
        named = [name for name in TRAINING if name in nodes and name not in missing]
        values = {name: _value(name, nodes[name]) for name in named}
        plan = self._possible(values)
        if plan is None:
            return None
        plan = self._with_option(plan, "audit_share", audits.share_of)
        plan = self._with_option(plan, workers.OPTION, workers.by_server)
        workload = plan.workload
        if workload in OF_USERS:
            other = (
                "`entrenar finetune` trains it" if workload != "own" else "stored traces have it"
            )
            self._root.refuse("workload", f"workload={workload!r}: only {other}; use another one")
            return None
        if "width" in values and workload not in SIZED:
            sized = " or ".join(SIZED)
            self._root.refuse(
                "width",
                f"width={plan.width}: {workload} has one size; leave it out, or use {sized}",
            )
        return None if missing else plan

    def _possible(self, values: dict[str, Any]) -> TrainingPlan | None:
        """Return the plan with the valid fields in `values`; None if a required field is invalid.

        Invalid fields are reported and removed from `values`.
        """
        while True:
            try:
                return TrainingPlan(**{**_DEFAULTS, **values, "trainer": self._trainer()})
            except UsageError as error:
                self._root.refuse(error.field, str(error))
                if error.field in REQUIRED or error.field not in values:
                    return None
                del values[error.field]

    def _trainer(self) -> str:
        text = self._root.text("topology") or TOPOLOGIES[0]
        if text not in TOPOLOGIES:
            allowed = " or ".join(TOPOLOGIES)
            self._root.refuse("topology", f"topology={text!r}: use {allowed}")
            text = TOPOLOGIES[0]
        return topology.BY_NAME[text].trainer

    def _with_option(
        self, plan: TrainingPlan, name: str, read: Callable[[TrainingPlan], object]
    ) -> TrainingPlan:
        """Return `plan` with the file's option `name`, unless that is missing or invalid."""
        node = self._root.present(name)
        if node is None:
            return plan
        changed = plan.with_(options={**plan.options, name: plain(node)})
        value = self._root.attempt(name, lambda: read(changed))
        if value is not None and name in systems.SYSTEMS[plan.trainer].options:
            return changed
        if value:
            self._root.refuse(
                name,
                f"{name}={plain(node)!r} with topology: mesh: no gradient passes the coordinator "
                "there; leave it out, or use topology: star",
            )
        return plan

    def _secret(self) -> bytes | None:
        path = self._root.path("secret_file", self._folder)
        if path is None:
            self._root.refuse("secret_file", "secret_file is missing; give the file of the secret")
            return None
        return self._root.attempt("secret_file", lambda: secret(path))

    def _context(self) -> ssl.SSLContext | None:
        record = self._root.block("tls", TLS)
        if record is None:
            return None
        cert, key, ca = (record.path(name, self._folder) for name in TLS)
        if cert is None or key is None:
            self._root.refuse("tls", f"tls: {'key' if cert else 'cert'} is missing; give its file")
            return None
        return self._root.attempt("tls", lambda: sockets.server_context(cert=cert, key=key, ca=ca))

    def _checkpoint(self) -> Checkpoint | None:
        record = self._root.block("checkpoint", CHECKPOINT)
        if record is None:
            return None
        for name in CHECKPOINT:
            if not record.text(name):
                record.error(name, f"{name} is missing; give it")
        path = record.path("path", self._folder)
        every = record.whole("every_steps", 1)
        if path is None or every is None:
            return None
        # A link is resolved, so that its target is written and locked. A rename would replace the
        # link.
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        return Checkpoint(path=target, every_steps=every)


def _value(name: str, node: Node) -> Any:
    """Return the value of a plan's field. A float like 1e-3, text in YAML 1.1, is converted."""
    value = plain(node)
    field = TrainingPlan.__dataclass_fields__[name]
    if not isinstance(value, str) or "float" not in str(field.type):
        return value
    try:
        return float(value)
    except ValueError:
        return value
