"""What a worker does between the coordinator's offer and joining: it gets settings, rows and model.

Code of a checkpoint is fetched and run only if this worker's own command line allows it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from entrenar_py.shared.errors import SystemFailure, UsageError
from entrenar_py.train.distill import student
from entrenar_py.train.finetune import package, received_run, stage_joining
from entrenar_py.train.finetune.package import Contents, File
from entrenar_py.train.finetune.received_files import ReceivedFiles
from entrenar_py.train.model import fitting
from entrenar_py.train.model import prepared as preparing
from entrenar_py.train.model.settings import LAYER_PIPELINE, Settings
from entrenar_py.train.model.workload import Finetuning
from entrenar_py.train.service.worker import Joining
from entrenar_py.train.wire.effects import Finish
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.terms import PIECE_BYTES, Part
from entrenar_py.train.wire_io import queries
from entrenar_py.train.wire_io.queries import Source

MODEL = "model"

Say = Callable[[str], None]


async def obtain(
    source: Source, given: argparse.Namespace, say: Say
) -> Finetuning | Joining | Finish:
    """Return the workload of the run at `source`, or why it can't be had.

    If the run is a layer pipeline, return what joins it: the stage is known later.

    Raises UsageError for a model of another content, a cache that can't be written, and code that
    is not allowed; SystemFailure for a coordinator that sends what it did not announce.
    """
    listed = await _list(source)
    if isinstance(listed, Finish):
        return listed
    _require_trust(listed, is_trusting=given.trust_remote_code)
    if listed.settings.get("strategy") == LAYER_PIPELINE:
        return await stage_joining.obtain(listed, _received(say, source), source, given)
    wanted: Sequence[File] = listed.files()
    if given.model is not None:
        received_run.require_same(given.model, listed.model)
        wanted = [listed.samples]
    files = _received(say, source)
    if given.id is not None:
        raise UsageError(
            "--id: the run is no layer pipeline, whose stages have names; leave it out"
        )
    finish = await files.get(wanted, partial(queries.fetch, source))
    if finish is not None:
        return finish
    if files.num_fetched:
        say(f"fetched {files.num_fetched} bytes, all verified")
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="entrenar-") as name:
        own = given.model, given.logits
        making = asyncio.to_thread(_workload, listed, files, Path(name), *own, ended=ended)
        try:
            return await making
        except asyncio.CancelledError:
            ended.set()  # else a wait for the first shard would outlive this worker
            raise


def _received(say: Say, source: Source) -> ReceivedFiles:
    return ReceivedFiles(preparing.cache() / "files", say, patience_s=source.patience_s)


async def _list(source: Source) -> Contents | Finish:
    """Return the list of the run's files."""
    content = b""

    def missing() -> list[Part]:
        return [] if content else [Part(source.package, PIECE_BYTES, 0)]

    def store(digest: str, offset: int, data: Buffer) -> None:
        nonlocal content
        content = bytes(data)

    finish = await queries.fetch(source, missing, store)
    if finish.status != "completed":
        return finish
    if hashlib.sha256(content).hexdigest() != source.package:
        raise SystemFailure("the coordinator's list of files is not the one that it announced")
    return package.parse(content)


def _require_trust(listed: Contents, *, is_trusting: bool) -> None:
    if listed.settings.get("trust_remote_code", False) and not is_trusting:
        raise UsageError(
            "the run's checkpoint comes with Python code (trust_remote_code), which this worker "
            "would fetch and run; give --trust-remote-code if you trust who started the run"
        )


def _workload(
    listed: Contents,
    files: ReceivedFiles,
    folder: Path,
    own: Path | None,
    logits: Path | None,
    ended: threading.Event,
) -> Finetuning:
    """Return the model with its samples. `folder` is needed only until then.

    `own` is this machine's copy of the checkpoint, and `logits` that of a teacher's shards, which
    are waited for until `ended` is set.
    """
    settings = _with_shards(received_run.settings_of(listed), logits)
    settings = replace(settings, model=_checkpoint(listed, files, folder) if own is None else own)
    train = received_run.rows(listed, files, settings)
    fitting.require_checkpoint(settings.model)
    return student.workload(received_run.prepared(listed, train, settings), ended=ended)


def _with_shards(settings: Settings, logits: Path | None) -> Settings:
    """Return the settings with this machine's folder of a teacher's shards.

    Raises UsageError if the run needs one that is not given, or the other way round.
    """
    if settings.distill is None:
        if logits is not None:
            raise UsageError("--logits: the run has no teacher; leave it out")
        return settings
    if logits is None:
        raise UsageError(
            "the run learns from a teacher's shards, which no coordinator sends: copy them here "
            "(rsync or NFS, also while they are made), and give their folder by --logits"
        )
    return replace(settings, distill=replace(settings.distill, logits=logits))


def _checkpoint(listed: Contents, files: ReceivedFiles, folder: Path) -> Path:
    """Make a folder with links to the checkpoint's files, under the names that these have."""
    made = folder / MODEL
    made.mkdir()
    received_run.link(listed.model, files, made)
    return made
