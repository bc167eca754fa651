"""The names of backends: `cuda`, `wgpu` and `cpu`, and `wgpu:1` for the second device of a kind.

`entrenar_py.compute` opens them. A scenario, and a configuration, only name them.
"""

from __future__ import annotations

from collections.abc import Iterable

from entrenar_py.shared.errors import UsageError

# Kinds of which a machine may have several devices: `wgpu:1` is the second.
INDEXED = ("cuda", "wgpu")
KINDS = (*INDEXED, "cpu")


def kind_of(name: str) -> str:
    """Return the kind of backend that `name` selects: `wgpu` for `wgpu` and `wgpu:1`.

    Raises UsageError for an unknown or malformed name.
    """
    kind, colon, index = name.partition(":")
    known = kind in (INDEXED if colon else KINDS)
    if not known or (colon and not (index.isascii() and index.isdigit() and len(index) <= 4)):
        raise UsageError(f"backend={name!r}: allowed are {allowed(KINDS)}")
    return kind


def allowed(kinds: Iterable[str]) -> str:
    """Return the names that select a backend of `kinds`, for a message."""
    indexed = [f"{kind}:N" for kind in kinds if kind in INDEXED]
    return ", ".join([*kinds, *indexed])
