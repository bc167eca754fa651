"""The record of which every message is a kind, and the types of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias, dataclass_transform

# Lower-case hex digits: a nonce has 32 random ones, a proof the 64 of an HMAC-SHA256, a digest the
# 64 of a SHA-256.
Nonce: TypeAlias = str
Proof: TypeAlias = str
Digest: TypeAlias = str


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True)
class Message:
    """A message. `tag` is its kind on the wire; `carries` names its payload, empty for none.

    Every subclass is a frozen dataclass, whose fields are the message's header.
    """

    tag: ClassVar[int]
    carries: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
