"""Both ends prove that they know a secret without sending it, and derive the session's key.

Proofs and key are HMAC-SHA256 over a purpose label, the challenge and the hello. Both messages
hold fresh nonces, so no proof can be used twice. With an empty secret the proofs still bind a
session to its nonces, but anyone can compute them.
"""

from __future__ import annotations

import hmac
from dataclasses import replace

from entrenar_py.train.wire import headers
from entrenar_py.train.wire.messages import Challenge, Hello

NONCE_BYTES = 16


def proof_of_worker(secret: bytes, challenge: Challenge, hello: Hello) -> str:
    """Return 64 hex digits that prove the worker knows `secret`; `hello.proof` is not covered."""
    return _mac(secret, b"worker", challenge, hello).hex()


def proof_of_coordinator(secret: bytes, challenge: Challenge, hello: Hello) -> str:
    """Return 64 hex digits that prove the sender of `challenge` knows `secret`, too."""
    return _mac(secret, b"coordinator", challenge, hello).hex()


def session_key(secret: bytes, challenge: Challenge, hello: Hello) -> bytes:
    """Return the 32-byte key for the checksums of all later frames, in both directions."""
    return _mac(secret, b"session", challenge, hello)


def _mac(secret: bytes, use: bytes, challenge: Challenge, hello: Hello) -> bytes:
    lines = [use, headers.dump(challenge), headers.dump(replace(hello, proof=""))]
    return hmac.digest(secret, b"\n".join(lines), "sha256")
