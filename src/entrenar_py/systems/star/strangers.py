"""The strangers that a scenario's faults send, and how each of them answers a challenge."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from entrenar_py.shared.faults import Fault
from entrenar_py.train.wire.frames import CHUNK_BYTES, FIELDS, MAGIC, TO_COORDINATOR, Encoder
from entrenar_py.train.wire.messages import VERSION, Challenge, Hello
from entrenar_py.train.wire.terms import Terms, proof_of_worker
from entrenar_py.train.wire_io.injections import Guest

GARBAGE_BYTES = 1_000
CLAIMED_BYTES = 2**62
PACE_S = 1.0
PORT = 1  # where a stranger claims to listen, as a mesh worker must
OTHER = "0" * 64  # a wrong digest of the right length


def guest(fault: Fault, terms: Terms, secret: bytes) -> Guest:
    """Return the stranger that `fault` sends to a run with `terms` and `secret`."""
    match fault.value:
        case "garbage":
            noise = random.Random(fault.step).randbytes(GARBAGE_BYTES)
            return Guest(lambda challenge: noise)
        case "huge_claim":
            return Guest(lambda challenge: _claim())
        case "silent":
            return Guest(lambda challenge: b"")
        case "slow_loris":
            return Guest(_applicant(terms, secret, None), pace_s=PACE_S)
        case "wrong_secret":
            return Guest(_applicant(terms, secret + b"!", None))
        case "wrong_run" | "wrong_manifest" | "wrong_data":
            wrong = {fault.value.removeprefix("wrong_"): OTHER}
            return Guest(_applicant(replace(terms, **wrong), secret, None))
        case _:  # taken_rank, one_too_many: a valid hello, but no rank is free for it
            return Guest(_applicant(terms, secret, fault.rank))


def _applicant(terms: Terms, secret: bytes, rank: int | None) -> Callable[[Challenge], bytes]:
    """Return a function that answers a challenge by a Hello that proves `secret`."""

    def hello(challenge: Challenge) -> bytes:
        plain = Hello(
            version=VERSION,
            run=terms.run,
            manifest=terms.manifest,
            data=terms.data,
            backend="cpu",
            rank=rank,
            port=PORT,
            nonce=challenge.nonce[::-1],
            proof="",
        )
        proof = proof_of_worker(secret, challenge, plain)
        return b"".join(Encoder().encode(replace(plain, proof=proof)))

    return hello


def _claim() -> bytes:
    """Return the prefix of a hello that announces a payload of CLAIMED_BYTES."""
    fields = FIELDS.pack(
        *(MAGIC, VERSION, Hello.tag, True, TO_COORDINATOR, 0),
        *(1, CHUNK_BYTES, CLAIMED_BYTES),
    )
    return fields + bytes(16)
