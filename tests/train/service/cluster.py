"""Coordinators and workers as processes of their own, in one folder, over loopback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from entrenar_py import systems
from entrenar_py.shared import trace
from entrenar_py.shared.scenario import Scenario
from entrenar_py.train.model.settings import Serving
from entrenar_py.train.service.ledger_account import weights_digest
from tests.train.service import nursery
from tests.train.wire_io.fakes import free_port

SECRET = "open sesame, and do it soon"
PATIENCE_S = 60.0
ENDING_S = 60.0

# What is trained, unless a test says something else.
TRAINING: dict[str, Any] = {
    "workload": "linear",
    "world_size": 3,
    "seed": 7,
    "num_steps": 12,
    "optimizer": "momentum",
}
# Long enough that a kill after the first step comes before the last.
LONG = {**TRAINING, "num_steps": 200}
# Just over 1 MiB of gradient, cheap to compute.
LARGE = {
    **TRAINING,
    "workload": "mlp",
    "width": 490,
    "world_size": 2,
    "num_shards": 2,
    "batch_size": 4,
    "num_steps": 60,
}


class Process:
    """One command in a process, forked from one that has torch loaded; `anew` starts it afresh.

    `lines` holds its output so far, standard output and standard error together.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        limit_bytes: int | None = None,
        anew: bool = False,
        cache: Path | None = None,
        strikes: Sequence[nursery.Strike] = (),
    ) -> None:
        """Start the process. No file that it writes may grow beyond `limit_bytes`.

        A forked one keeps files in the folder `cache`, and is struck at messages (`nursery.start`).
        """
        told = [*map(str, arguments)]
        self._process: subprocess.Popen[str] | nursery.Child
        if anew:
            command = [sys.executable, "-m", "entrenar_py.entrenar", *told]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen(command, text=True, **pipes)
        else:
            self._process = nursery.start(
                told,
                limit_bytes=limit_bytes,
                cache=None if cache is None else str(cache),
                strikes=strikes,
            )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.lines: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """Read until a line matches; AssertionError with all the output if none does."""
        for line in self._output:
            self.lines.append(line.rstrip("\n"))
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it never said {pattern!r}: {self.lines}")

    @property
    def has_ended(self) -> bool:
        """True if the process runs no more."""
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait for its end."""
        self._process.kill()
        self.code()

    def code(self) -> int:
        """Wait for the end of the process, and return its exit code."""
        if not self._output.closed:
            self.lines += [line.rstrip("\n") for line in self._output]
        code = self._process.wait(ENDING_S)
        self._output.close()
        return code

    @property
    def text(self) -> str:
        """The output so far."""
        return "\n".join(self.lines)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def dismiss(self) -> None:
        """Kill the process if it still runs, and close its output."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(ENDING_S)
        self._output.close()


def write_configuration(path: Path, training: Mapping[str, Any], **keys: Any) -> None:
    """Write a configuration as JSON, which is YAML, too; keys of the service go to its section."""
    section = {"secret_file": "secret"}
    for field in fields(Serving):
        if field.name in keys:
            section[field.name] = keys.pop(field.name)
    path.write_text(json.dumps({**training, **keys, "coordinator": section}), encoding="utf-8")


class Cluster:
    """A folder with a configuration and a secret, and the processes started from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: list[Process] = []

    def configure(self, training: dict[str, Any] = TRAINING, **service: Any) -> Path:
        """Write the configuration, as JSON, which is YAML, too."""
        path = self.folder / "run.yaml"
        write_configuration(path, training, listen=self.address, **service)
        return path

    def coordinator(self, *options: object, **how: Any) -> Process:
        """Start a coordinator, which listens at the cluster's address."""
        return self._start(["coordinator", self.folder / "run.yaml", *options], **how)

    def worker(self, *options: object, secret: Path | None = None, **how: Any) -> Process:
        """Start a worker, before or after the coordinator at the cluster's address."""
        given = ["--coordinator", self.address, "--secret-file", secret or self.secret]
        return self._start(["worker", *given, "--patience-s", PATIENCE_S, *options], **how)

    def start(self, *arguments: object, **how: Any) -> Process:
        """Start any other command."""
        return self._start(arguments, **how)

    def verify(self, *options: object) -> Process:
        """Start a verification of the ledger `ledger.jsonl`."""
        return self._start(["ledger", "verify", self.folder / "ledger.jsonl", *options])

    def _start(self, arguments: Sequence[object], **how: Any) -> Process:
        process = Process(arguments, **how)
        self.processes.append(process)
        return process


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Yield a cluster, and leave none of its processes running."""
    made = Cluster(folder)
    try:
        yield made
    finally:
        for process in made.processes:
            process.dismiss()


@cache
def _weights(training: str) -> str:
    scenario = Scenario.from_dict({"system": "reference", **json.loads(training), "world_size": 1})
    last = systems.run(scenario).of(trace.Update)[-1]
    return weights_digest(last.weights, last.buffers)


def weights(training: dict[str, Any]) -> str:
    """Return the digest of the reference's last weights, from one undisturbed worker."""
    return _weights(json.dumps(training))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records in `metrics.jsonl`."""
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]
