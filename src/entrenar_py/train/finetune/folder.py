"""Writes a model's files to a folder so that a part of them is never taken for the whole."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from entrenar_py.shared.errors import SystemFailure
from entrenar_py.shared.untrusted import escaping, files

PARTIAL = "export.partial"  # in the folder: files that are being written
_FULL = os.strerror(errno.ENOSPC)  # also in the errors of safetensors, which have no number
_WEIGHTS = (".safetensors", ".safetensors.index.json")


@contextmanager
def replacing(folder: Path, *, marks: Sequence[str], advice: str) -> Iterator[Path]:
    """Yield a new folder for files. At the end they are synced, and moved into `folder`.

    Without the files named in `marks` nobody takes `folder` for a model: old ones go before
    anything is moved, new ones come last, in their order. Weights of an earlier model go, too.
    Raises SystemFailure, with `advice`, if a file can't be written, and `folder` is as it was; or
    if one can't be moved, and `folder` is no model then. An interrupt leaves nothing behind.
    """
    partial = folder / PARTIAL
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        names = sorted(path.name for path in partial.iterdir())
        mode = partial.stat().st_mode & 0o666  # as the user's umask has it; safetensors' is 0600
        for path in partial.rglob("*"):
            if path.is_file():
                path.chmod(mode)
            _sync(path)
        _move(partial, folder, [name for name in names if name not in marks], marks)
    except (
        Exception
    ) as error:  # tokenizers and safetensors raise kinds of their own for a full disk
        told = escaping.shortened(_problem(error, partial))
        raise SystemFailure(f"output {folder}: can't be written ({told}); {advice}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _problem(error: Exception, partial: Path) -> str:
    """Return why a file can't be written; for a full disk, which one, and how much is free."""
    told = " ".join(str(error).split())
    if _FULL not in told:
        return told
    written = [path for path in partial.rglob("*") if path.is_file()]
    last = max(written, key=lambda path: path.stat().st_mtime_ns, default=partial)
    return f"{last.name}: {files.problem(OSError(errno.ENOSPC, _FULL), partial)}"


def _move(partial: Path, folder: Path, names: Sequence[str], marks: Sequence[str]) -> None:
    for path in folder.iterdir():
        is_stale = path.name.endswith(_WEIGHTS) and path.name not in names
        if path.name in marks or is_stale:
            path.unlink()
    _sync(folder)
    for name in (*names, *(mark for mark in marks if (partial / mark).exists())):
        if (folder / name).is_dir():  # such as a tokenizer's additional chat templates
            shutil.rmtree(folder / name)
        (partial / name).replace(folder / name)
        _sync(folder)
    partial.rmdir()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
