"""Counterexamples on disk: saved when found, tried first the next time, replayed on request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from blake3 import blake3

from entrenar_py.shared import package_data
from entrenar_py.shared.codec import Form, Schema
from entrenar_py.shared.errors import TraceError, UsageError
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.untrusted import files, json_text
from entrenar_py.shared.verdict import Finding

VERSION = "entrenar-counterexample/1"
BYTES_MAX = 2**22
FOLDER = Path("falsification", "counterexamples")
_TO_DO = "give a counterexample that entrenar-check saved"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A scenario that broke the clause `invariant`, and the finding at that time."""

    invariant: str
    scenario: Scenario
    finding: Finding


_SCHEMA = Schema(
    Saved,
    forms={
        "Scenario": Form(Scenario.from_dict, Scenario.to_dict),
        "Finding": Form(Finding.from_dict, Finding.to_dict),
    },
)


def save(saved: Saved, folder: Path = FOLDER) -> Path:
    """Write `saved` to a file in `folder`, named after its clause and scenario; return the path.

    Raises OSError if the file can't be written.
    """
    record = {"schema": VERSION, **_SCHEMA.dump(saved)}
    record["digest"] = digest_of(record)
    path = folder / f"{_stem(saved.invariant)}-{saved.scenario.digest[:12]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> Saved:
    """Return the counterexample that `save` wrote to `path`.

    Raises TraceError if the file can't be read, has other contents, or was edited.
    """
    try:
        record = json_text.load(files.read(path, bytes_max=BYTES_MAX))
    except OSError as error:
        problem = f"can't be read ({error.strerror}); give a file that can be read"
        raise TraceError(f"replay file {path}: {problem}") from error
    except ValueError as error:
        raise TraceError(f"replay file {path}: not JSON ({error}); {_TO_DO}") from error
    if not isinstance(record, dict) or record.get("schema") != VERSION:
        schema = record.get("schema") if isinstance(record, dict) else type(record).__name__
        problem = f"schema={schema!r}: this release reads {VERSION}; {_TO_DO}"
        raise TraceError(f"replay file {path}: {problem}")
    digest = record.pop("digest", None)
    if digest != digest_of(record):
        raise TraceError(
            f"replay file {path}: its digest does not match its content: it was edited by hand; "
            "put a scenario of your own into a contract's `scenarios` instead"
        )
    try:
        return _SCHEMA.load({name: value for name, value in record.items() if name != "schema"})
    except UsageError as error:
        raise TraceError(f"replay file {path}: not a counterexample ({error}); {_TO_DO}") from error


def known(invariant: str, own: Path = FOLDER) -> Iterator[tuple[Path, Saved]]:
    """Yield the saved counterexamples of `invariant` in the folder `own`, then the shipped ones."""
    ours = package_data.falsification_folder()
    folders = {own.resolve(): None, (ours or FOLDER.parent).resolve() / FOLDER.name: None}
    for folder in folders:
        for path in sorted(folder.glob(f"{_stem(invariant)}-*.json")):
            saved = load(path)
            if saved.invariant == invariant:  # the pattern for F-1 also matches files of F-1-2
                yield path, saved


def _stem(invariant: str) -> str:
    # Quoted, since a clause id may be any text that YAML allows.
    return quote(invariant, safe="", errors="replace")


def digest_of(record: Mapping[str, Any]) -> str:
    """Return the digest that a file with this `record` must have as `digest`.

    It covers all other fields.
    """
    record = {name: value for name, value in record.items() if name != "digest"}
    return str(blake3(json.dumps(record, sort_keys=True).encode()).hexdigest(16))
