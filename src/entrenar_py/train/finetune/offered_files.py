"""The coordinator's files: hashed when a run begins, and read piece by piece for workers."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import files
from entrenar_py.train.finetune import package, settings_file
from entrenar_py.train.finetune.package import Contents, File
from entrenar_py.train.model import fitting, samples
from entrenar_py.train.model import prepared as preparing
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.model.settings import Settings
from entrenar_py.train.wire.messages import Piece
from entrenar_py.train.wire.terms import PIECE_BYTES, Package

_Stamp: TypeAlias = tuple[int, int, int]  # inode, bytes, nanoseconds of the last change


class OfferedFiles:
    """The package of one run. `package` is what the protocol must know of it."""

    def __init__(self, prepared: Prepared) -> None:
        """Hash all files. Raises UsageError if one can't be read."""
        settings = prepared.settings
        self._places: dict[str, tuple[Path, _Stamp]] = {}  # digest -> file, as it was hashed
        model = [self._hashed(settings.model / name) for name in checkpoint_files(settings)]
        kept = samples.keep_chosen(prepared.train, preparing.cache())
        contents = Contents(
            settings=shared_settings(settings),
            class_weights=prepared.class_weights,
            samples=self._hashed(kept),
            model=model,
        )
        self._list = package.dump(contents)
        self._digest = hashlib.sha256(self._list).hexdigest()
        self.num_bytes = sum(file.num_bytes for file in contents.files())
        sizes = {file.digest: file.num_bytes for file in contents.files()}
        self.package = Package(self._digest, {**sizes, self._digest: len(self._list)})

    def read(self, piece: Piece) -> bytes | str:
        """Return the bytes of `piece`, in any thread, or why they can't be read."""
        if piece.file == self._digest:
            return self._list
        path, stamp = self._places[piece.file]
        try:
            with files.open_file(path) as file:
                if _stamp(file.fileno()) != stamp:
                    return f"{path.name} was changed since the run began; start the run again"
                return os.pread(file.fileno(), PIECE_BYTES, piece.offset)
        except OSError as error:
            return f"{path.name} can't be read by the coordinator ({error.strerror or error})"

    def _hashed(self, path: Path) -> File:
        try:
            with files.open_file(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                stamp = _stamp(file.fileno())
        except OSError as error:
            raise UsageError(
                f"{path}: can't be read ({error.strerror or error}); workers need it"
            ) from error
        self._places[digest] = path, stamp
        return File(path.name, stamp[1], digest)


def _stamp(handle: int) -> _Stamp:
    status = os.fstat(handle)
    return status.st_ino, status.st_size, status.st_mtime_ns


def checkpoint_files(settings: Settings) -> list[str]:
    """Return the names of the checkpoint's files that a worker needs, in order.

    Of several sets of weights in the folder only the one that is loaded counts.
    """
    folder = settings.model
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    names = [
        name
        for name in names
        if package.may_be_named(name, with_code=settings.trust_remote_code)
        and (folder / name).stat().st_size
    ]
    loaded = fitting.weight_files(folder)
    left_out = {name for name in names if name.endswith(package.WEIGHTS)}.difference(loaded)
    if fitting.WHOLE in loaded:
        left_out.add(fitting.INDEX)
    return [name for name in names if name not in left_out]


def shared_settings(settings: Settings) -> dict[str, object]:
    """Return the settings that a worker needs, as a record. It names no path of this machine.

    What is for the coordinator alone has its default: a worker has no rows to evaluate on.
    """
    plain = replace(
        settings, coordinator=None, workers=Settings.workers, evaluate_every=Settings.evaluate_every
    )
    record = settings_file.to_record(plain)
    return {**record, "model": "model", "output": "output", "data": _data(record["data"])}


def _data(record: dict[str, object]) -> dict[str, object]:
    """Return the section about rows without those that are for evaluation alone."""
    left_out = ("validation", "validation_share", "on_error")
    return {key: value for key, value in record.items() if key not in left_out} | {
        "train": "rows.jsonl"
    }
