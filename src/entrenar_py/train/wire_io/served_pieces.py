"""The pieces of files that one peer wants: few at a time, and read only when it is their turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire.frames import Buffer
from entrenar_py.train.wire.messages import Piece
from entrenar_py.train.wire.terms import WANTED_MAX
from entrenar_py.train.wire_io.stream import Stream

# Returns the bytes of a piece, or why they can't be read.
ReadPiece = Callable[[Piece], bytes | str]


def no_piece(piece: Piece) -> bytes | str:
    """Return why a run without a package has no piece."""
    return f"file {piece.file}: this run has no files"


@dataclass(slots=True)
class ServedPieces:
    """The pieces that were wanted over one connection, and are not sent yet."""

    _due: deque[Piece] = field(default_factory=deque)

    def add(self, piece: Piece) -> None:
        """Note that `piece` is wanted; ProtocolError if too many are, so memory stays bounded."""
        # A piece is taken from the list a moment after its last byte went.
        if len(self._due) >= 2 * WANTED_MAX:
            raise ProtocolError(f"Want: more than {WANTED_MAX} pieces at a time")
        self._due.append(piece)

    def encode(self, stream: Stream, piece: Piece, content: bytes) -> Iterator[Buffer]:
        """Yield the bytes of `piece`, each when it can be sent, maybe in a connection's thread."""
        yield from stream.encode(piece, content)
        self._due.popleft()
