"""A run as a worker has it: settings and rows from the coordinator, and links to its files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from entrenar_py.shared.errors import ContractError, SystemFailure, UsageError
from entrenar_py.shared.untrusted import files as own_files
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.finetune.package import Contents, File
from entrenar_py.train.finetune.received_files import ReceivedFiles
from entrenar_py.train.model import model, samples
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.model.samples import Samples
from entrenar_py.train.model.settings import Settings

SETTINGS = "the settings"  # in messages
_ADVICE = "use one release on both ends"


def settings_of(listed: Contents) -> Settings:
    """Return the settings of a run; its model is a name. Raises SystemFailure for unknown ones."""
    try:
        return settings_file.of_text(settings_file.to_text(listed.settings), SETTINGS)
    except ContractError as error:
        raise SystemFailure(
            f"the coordinator's settings can't be read: {_ADVICE}\n{error}"
        ) from error


def rows(listed: Contents, files: ReceivedFiles, settings: Settings) -> Samples:
    """Return the run's samples, which are among `files`.

    Raises SystemFailure for samples that are not what a coordinator of this release writes.
    """
    found = samples.read_kept(files.path(listed.samples))
    if found is None or not _fits(found, listed, settings):
        raise SystemFailure(f"the coordinator's rows can't be read: {_ADVICE}")
    return found


def prepared(listed: Contents, train: Samples, settings: Settings) -> Prepared:
    """Return the run with its samples and the tokenizer of its checkpoint."""
    return Prepared(
        settings=settings,
        tokenizer=model.tokenizer(settings),
        train=train,
        validation=None,
        class_weights=tuple(listed.class_weights),
    )


def require_same(folder: Path, files: Sequence[File]) -> None:
    """Raise UsageError unless `folder` has all `files` of the run's checkpoint, unchanged."""
    for file in files:
        path = folder / file.name
        try:
            with own_files.open_file(path) as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
        except OSError as error:
            raise UsageError(
                f"--model {folder}: {file.name} can't be read ({error.strerror or error}), and the "
                "run's checkpoint has it; leave --model out to fetch it"
            ) from error
        if digest != file.digest:
            raise UsageError(
                f"--model {folder}: another model than the run's: {file.name} has SHA-256 {digest},"
                f" the run's {file.digest}; give the run's checkpoint, or leave --model out to "
                "fetch it"
            )


def link(
    wanted: Iterable[File], files: ReceivedFiles, folder: Path, own: Path | None = None
) -> None:
    """Put links to the `wanted` files into `folder`, under the names that these have.

    They are among the received `files`, or in the folder `own` if that is given.
    """
    for file in wanted:
        place = files.path(file) if own is None else own / file.name
        (folder / file.name).symlink_to(place.absolute())


def _fits(found: Samples, listed: Contents, settings: Settings) -> bool:
    """Return whether samples and class weights are consistent; they come from another machine."""
    num_labels = len(settings.classes.labels) if settings.task == "classify" else 0
    return found.is_consistent and len(listed.class_weights) == num_labels
