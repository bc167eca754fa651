"""Proofs of a shared secret by both ends, without sending it, and the session's key.

HMAC-SHA256 over what both sides said first (the nonces are fresh, so no proof is worth anything a
second time), with a word that tells the directions and the uses apart. Without a secret the proofs
still bind a session to its nonces, but keep nobody out.
"""

from __future__ import annotations

import hmac
from dataclasses import replace

from entrenar_py.protocol import headers
from entrenar_py.protocol.messages import Challenge, Hello

NONCE_BYTES = 16


def proof_of_worker(secret: bytes, challenge: Challenge, hello: Hello) -> str:
    """64 hex digits that only who knows `secret` can give; `hello.proof` itself does not count."""
    return _mac(secret, b"worker", challenge, hello).hex()


def proof_of_coordinator(secret: bytes, challenge: Challenge, hello: Hello) -> str:
    """The other direction: that the one who sent the challenge knows `secret` too."""
    return _mac(secret, b"coordinator", challenge, hello).hex()


def session_key(secret: bytes, challenge: Challenge, hello: Hello) -> bytes:
    """32 bytes: the key of every later frame's checksum, in both directions."""
    return _mac(secret, b"session", challenge, hello)


def _mac(secret: bytes, use: bytes, challenge: Challenge, hello: Hello) -> bytes:
    said = [use, headers.dump(challenge), headers.dump(replace(hello, proof=""))]
    return hmac.digest(secret, b"\n".join(said), "sha256")
