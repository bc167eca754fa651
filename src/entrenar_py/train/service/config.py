"""The settings of one coordinator, and the file of its secret."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.scenario import TrainingPlan
from entrenar_py.shared.untrusted import files
from entrenar_py.train.model.settings import Key
from entrenar_py.train.service.address import Address
from entrenar_py.train.wire.terms import Timing
from entrenar_py.train.wire_io.tcp import SECRET_BYTES_MIN

LISTEN = "127.0.0.1:7411"
TOPOLOGIES = ("star", "mesh")
SECRET_BYTES_MAX = 2**16


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The file for the state, and the number of steps between saves."""

    path: Annotated[Path, Key("the file; it is replaced atomically")]
    every_steps: Annotated[int, Key("steps from one save to the next", least=1)]


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
