"""The columns of a shard, and what is known of all shards of a folder.

A row is one position of one sample: the token there, and those before it, are what the teacher saw,
and `target`, the token after it, is what it predicts. Log-probabilities are natural, at temperature
1. `rest` is the log of the mass that the other tokens have together, -inf if there are none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from entrenar_py.shared import shipped
from entrenar_py.shared.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 2
STORED = ("float16", "float32")
KEY = b"entrenar-distill"  # of a file's metadata


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts that all shards of a folder have in common.

    The digests are 32 hex digits each. `rows` are the rows of each shard, and `samples` its
    samples; the order in which shards have them follows from `seed`. `temperature` is always 1:
    that of the loss is chosen later.
    """

    teacher: str
    tokenizer: str
    data: str
    vocabulary: int
    top_k: int
    stored: str
    precision: str
    seed: int
    batch_tokens: int
    samples: tuple[int, ...]
    rows: tuple[int, ...]
    temperature: float = 1.0
    version: int = VERSION

    @property
    def num_shards(self) -> int:
        """The number of shards when all are there."""
        return len(self.rows)

    @property
    def digest(self) -> str:
        """32 hex digits over all of it."""
        return blake3(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest(16)

    @property
    def has_rest(self) -> bool:
        """False if a row has every token of the vocabulary."""
        return self.top_k < self.vocabulary

    def to_dict(self) -> dict[str, Any]:
        """Return a mapping that JSON can hold."""
        return asdict(self) | {"samples": list(self.samples), "rows": list(self.rows)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Facts:
        """Return the facts of which `to_dict` made `record`.

        Raises UsageError for any other record, such as one of another version.
        """
        version = record.get("version")
        if version != VERSION:
            raise UsageError(f"version={version!r}: this is version {VERSION}; make them again")
        known = {field.name: field.type for field in fields(cls)}
        if record.keys() != known.keys():
            odd = sorted(record.keys() ^ known.keys())
            raise UsageError(f"{odd[0]}: it is missing, or of no use here; make them again")
        kinds = {"int": int, "str": str, "float": float, "tuple[int, ...]": list}
        for name, kind in known.items():
            value = record[name]
            is_right = type(value) is kinds[str(kind)]
            if is_right and isinstance(value, list):
                is_right = all(type(one) is int and one >= 0 for one in value)
            if not is_right:
                raise UsageError(f"{name}={value!r}: it is no {kind}; make them again")
        lists = {name: tuple(record[name]) for name in ("samples", "rows")}
        found = cls(**{**record, **lists})
        if len(found.samples) != len(found.rows) or not found.rows:
            raise UsageError("samples and rows don't fit each other; make them again")
        if not 1 <= found.top_k <= found.vocabulary:
            raise UsageError(f"top_k={found.top_k} of {found.vocabulary} tokens; make them again")
        if found.stored not in STORED or found.temperature != 1:
            told = f"stored={found.stored!r}, temperature={found.temperature:g}"
            raise UsageError(f"{told}: unknown here; make them again")
        return found


def vocabulary_digest(tokenizer: Any) -> str:
    """Return 32 hex digits over the text of each token.

    Rows are tokenised once, by the student's tokenizer. So a teacher has to take the same numbers
    for the same texts, and may have another chat template.
    """
    told = sorted(tokenizer.get_vocab().items())
    return blake3(json.dumps(told).encode()).hexdigest(16)


def num_tokens(tokenizer: Any) -> int:
    """Return one more than the largest number of a token; there may be gaps between them."""
    return 1 + max(map(int, tokenizer.get_vocab().values()))


def file_name(number: int, num_shards: int) -> str:
    """Return the name of the shard `number`, counted from 0."""
    return f"shard-{number:05d}-of-{num_shards:05d}.parquet"


def columns(facts: Facts, number: int) -> pa.Schema:
    """Return the Parquet schema of the shard `number`, with the facts in its metadata."""
    pa = arrow()
    value = {"float16": pa.float16(), "float32": pa.float32()}[facts.stored]
    told = {**facts.to_dict(), "shard": number}
    del told["samples"], told["rows"]  # a file need not list those of all others
    return pa.schema(
        [
            pa.field("sample", pa.int32(), nullable=False),
            pa.field("position", pa.int32(), nullable=False),
            pa.field("target", pa.int32(), nullable=False),
            pa.field("tokens", fixed(pa.int32(), facts.top_k), nullable=False),
            pa.field("log_probabilities", fixed(value, facts.top_k), nullable=False),
            pa.field("rest", pa.float32(), nullable=False),
        ],
        metadata={KEY: json.dumps({**told, "facts": facts.digest}, sort_keys=True).encode()},
    )


def fixed(kind: Any, size: int) -> Any:
    """Return the type of lists of `size` values of `kind`."""
    pa = arrow()
    return pa.list_(pa.field("element", kind, nullable=False), size)


def arrow() -> Any:
    """Return pyarrow, which takes a quarter of a second to import. Raises UsageError without it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"entrenar distill needs pyarrow; {shipped.extra_advice('finetune')}"
        ) from error
    return pyarrow
