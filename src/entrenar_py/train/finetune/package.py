"""The files of a fine-tuning run, as workers fetch them: the list of them, and what may be in it.

A list is written by a coordinator and read by a worker, which trusts none of its names: only plain
ones, of kinds that hold no code and no pickles.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from entrenar_py.shared.errors import UsageError
from entrenar_py.shared.untrusted import json_text
from entrenar_py.train.wire.terms import PIECE_BYTES

VERSION = 1
LIST_BYTES_MAX = PIECE_BYTES
FILE_BYTES_MAX = 2**50
WEIGHTS = ".safetensors"
CODE = ".py"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.model",
    "bpe.codes",
    "dict.txt",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
# What a checkpoint has beside its weights. Other files, such as pickled weights, are left out.
PLAIN = ("config.json", "generation_config.json", "model.safetensors.index.json", *TOKENIZER)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ADVICE = "use one release on both ends"


@dataclass(frozen=True, slots=True, order=True)
class File:
    """A file: its name in its folder, its size, and the SHA-256 of its content in hex digits."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a worker needs: settings as a record, class weights, samples, and the checkpoint."""

    settings: Mapping[str, Any]
    class_weights: Sequence[float]
    samples: File
    model: Sequence[File]

    def files(self) -> list[File]:
        """Return all files of the package, each content once, in a fixed order."""
        return list({file.digest: file for file in (*self.model, self.samples)}.values())


def may_be_named(name: str, *, with_code: bool) -> bool:
    """Return whether a checkpoint's file may have this name: no path, no pickle, no code unless
    that is wanted.
    """
    if _NAME.fullmatch(name) is None:
        return False
    return name in PLAIN or name.endswith(WEIGHTS) or (with_code and name.endswith(CODE))


def dump(contents: Contents) -> bytes:
    """Return the list of `contents`; UsageError if a checkpoint has too many files for one."""
    record = {"version": VERSION, **asdict(contents)}
    text = json.dumps(record, sort_keys=True).encode()
    if len(text) > LIST_BYTES_MAX:
        raise UsageError(
            f"the list of the run's files has {len(text)} bytes, at most {LIST_BYTES_MAX} can be "
            "sent; use a checkpoint with fewer files"
        )
    return text


def parse(data: bytes) -> Contents:
    """Return what a list says. Raises UsageError for anything but what `dump` writes."""
    try:
        record = json_text.load(data, names_once=True)
        version = record.pop("version")
        if version != VERSION:
            raise ValueError(f"version {version!r}, this worker reads {VERSION}")
        contents = Contents(
            settings=_mapping(record.pop("settings")),
            class_weights=tuple(map(_weight, record.pop("class_weights"))),
            samples=_file(record.pop("samples")),
            model=tuple(map(_file, record.pop("model"))),
        )
        if record:
            raise ValueError(f"unknown keys {sorted(record)}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"the coordinator's list of files can't be read ({error}): {_ADVICE}"
        ) from error
    _require_safe(contents)
    return contents


def _require_safe(contents: Contents) -> None:
    trusts = contents.settings.get("trust_remote_code", False) is True
    names = [file.name for file in contents.model]
    for name in names:
        if not may_be_named(name, with_code=trusts):
            raise UsageError(
                f"the coordinator's list names a file {name!r}: a checkpoint has safetensors and "
                "plain text in one folder, and code only with trust_remote_code; nothing was "
                "fetched"
            )
    if len({name.lower() for name in names}) < len(names):
        raise UsageError("the coordinator's list names a file twice; nothing was fetched")
    sizes = dict[str, int]()
    for file in (*contents.model, contents.samples):
        if sizes.setdefault(file.digest, file.num_bytes) != file.num_bytes:
            raise UsageError(f"the coordinator's list gives {file.digest} two sizes")


def _mapping(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("settings are no mapping")
    return value


def _weight(value: object) -> float:
    if not isinstance(value, float) or not (0 < value < math.inf):
        raise ValueError(f"class weight {value!r}")
    return value


def _file(record: Any) -> File:
    name, num_bytes, digest = (record.pop(key) for key in ("name", "num_bytes", "digest"))
    if not isinstance(name, str) or type(num_bytes) is not int or record:
        raise ValueError("a file has name, num_bytes and digest")
    if not 0 < num_bytes <= FILE_BYTES_MAX:
        raise ValueError(f"{name!r} of {num_bytes} bytes")
    if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"digest {digest!r} of {name!r}")
    return File(name, num_bytes, digest)
