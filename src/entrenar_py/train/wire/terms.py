"""The terms of a run: its identity, timeouts and files, and how both ends prove a secret."""

from __future__ import annotations

import hmac
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.wire import frames
from entrenar_py.train.wire.messages import VERSION, Challenge, Hello, Offer, Refuse
from entrenar_py.train.wire.pipeline import Places

# The files of a run: workers fetch them from the coordinator in pieces, by their SHA-256.
#
# A package is a set of files. One of them lists the others, and its digest is the package's digest.

PIECE_BYTES = 2**20  # pieces for a late worker travel between the messages of a step
WANTED_MAX = 4  # requests that a worker may have open


@dataclass(frozen=True, slots=True)
class Package:
    """The files of a run.

    `sizes` has bytes by file digest; `digest` is the digest of their list.
    """

    digest: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Part:
    """The missing part of a file of `num_bytes`: all bytes from `start` on."""

    file: str
    num_bytes: int
    start: int

    def offsets(self) -> Iterator[int]:
        """Yield the offset of each piece."""
        return iter(range(self.start, self.num_bytes, PIECE_BYTES))


def piece_bytes(num_bytes: int, offset: int) -> int:
    """Return the size of the piece at `offset` of a file of `num_bytes`."""
    return min(PIECE_BYTES, num_bytes - offset)


# Both ends prove that they know a secret without sending it, and derive the session's key.
#
# Proofs and key are HMAC-SHA256 over a purpose label, the challenge and the hello. Both messages
# contain fresh nonces, so no proof can be reused. With an empty secret the proofs still bind a
# session to its nonces, but anyone can compute them.

NONCE_BYTES = 16


def proof_of_worker(secret: bytes, challenge: Challenge, hello: Hello) -> str:
    """Return 64 hex digits that prove that the worker knows `secret`.

    `hello.proof` is not covered.
    """
    return _mac(secret, b"worker", challenge, hello).hex()


def proof_of_coordinator(secret: bytes, challenge: Challenge, hello: Hello) -> str:
    """Return 64 hex digits that prove that the sender of `challenge` knows `secret`, too."""
    return _mac(secret, b"coordinator", challenge, hello).hex()


def session_key(secret: bytes, challenge: Challenge, hello: Hello) -> bytes:
    """Return the 32-byte key for the checksums of all later frames, in both directions."""
    return _mac(secret, b"session", challenge, hello)


def _mac(secret: bytes, use: bytes, challenge: Challenge, hello: Hello) -> bytes:
    lines = [use, frames.dump_header(challenge), frames.dump_header(replace(hello, proof=""))]
    return hmac.digest(secret, b"\n".join(lines), "sha256")


# Shows a digest in full, and shortens longer texts, because anyone may have sent them.
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The identity of a run: name and digests, which must be the same for all participants."""

    run: str
    manifest: str
    data: str


# The terms that an applicant sends to ask for the real ones.
UNKNOWN = Terms(run="", manifest="", data="")


def _none(step: int) -> Collection[int]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run from `first_step` to `num_steps`, by at most `world_size` workers at a time.

    The run waits for `num_awaited` workers before its first step, and later for at least one
    worker; before a step in `awaited` it also waits for the ranks listed there. The reduced vector
    is sent in `num_blocks` parts. A checkpoint is written before each step in `saves`. `resumed`:
    the run started from a checkpoint. `audited(step)` returns the shards that a second worker
    computes, too. `server_updates`: the coordinator applies the optimizer, and sends new weights
    instead of averages. `by_speed`: workers get shards in proportion to their measured speed; if
    false, all get the same number. `package` has the files that workers may fetch, or None.
    `places` has the places of a layer pipeline, or None.
    """

    terms: Terms
    world_size: int
    num_shards: int
    num_steps: int
    num_blocks: int
    first_step: int = 0
    resumed: bool = False
    num_awaited: int = 1
    awaited: Mapping[int, Collection[int]] = field(default_factory=dict)
    saves: Collection[int] = ()
    audited: Callable[[int], Collection[int]] = _none
    server_updates: bool = False
    by_speed: bool = False
    package: Package | None = None
    places: Places | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The timeouts, in seconds.

    Every process sends something on each connection at least every `heartbeat_s`, and counts as
    dead after `dead_after_s` of silence. A connection must be opened within `hello_s`, and its
    handshake must succeed within another `hello_s`. A run with too few workers fails after
    `gather_s`. A worker has `gather_s` to load the state.
    """

    heartbeat_s: float = 5.0
    dead_after_s: float = 30.0
    hello_s: float = 10.0
    gather_s: float = 300.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < float("inf"):
                raise UsageError.of(name, value, "use a number of seconds > 0")
        if self.heartbeat_s >= self.dead_after_s:
            raise UsageError(
                f"heartbeat_s={self.heartbeat_s} with dead_after_s={self.dead_after_s}: "
                "every worker would count as dead between two heartbeats; use a shorter heartbeat",
                field="heartbeat_s",
            )


def offer(timing: Timing, proof: str, package: Package | None) -> Offer:
    """Return the answer to an applicant; its payload is the plan."""
    heartbeat_s, dead_after_s = float(timing.heartbeat_s), float(timing.dead_after_s)
    digest = None if package is None else package.digest
    return Offer(heartbeat_s=heartbeat_s, dead_after_s=dead_after_s, package=digest, proof=proof)


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """A hello with its proof, the proof expected in the answer, and the session's key."""

    hello: Hello
    expected: str
    key: bytes


def greet(
    challenge: Challenge,
    terms: Terms,
    *,
    secret: bytes,
    backend: str,
    nonce: str,
    rank: int | None = None,
    port: int | None = None,
) -> Greeting:
    """Return a worker's answer to `challenge`."""
    plain = Hello(
        version=VERSION,
        run=terms.run,
        manifest=terms.manifest,
        data=terms.data,
        backend=backend,
        rank=rank,
        port=port,
        nonce=nonce,
        proof="",
    )
    return Greeting(
        hello=replace(plain, proof=proof_of_worker(secret, challenge, plain)),
        expected=proof_of_coordinator(secret, challenge, plain),
        key=session_key(secret, challenge, plain),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A peer that knows the secret: its rank, the proof for the answer, and the session's key.

    The rank of an applicant is None.
    """

    rank: int | None = None
    proof: str
    key: bytes


def admit(
    hello: Hello,
    challenge: Challenge,
    terms: Terms,
    *,
    secret: bytes,
    world_size: int,
    taken: Collection[int | None],
    barred: Collection[int] = (),
) -> Admission | Refuse:
    """Return the answer to `hello`. The secret is checked first.

    So a client that doesn't know the secret learns nothing else. `taken` has the ranks in use,
    `barred` the ranks that nobody may have. A hello without a rank gets the lowest free rank.
    """
    asks = Terms(run=hello.run, manifest=hello.manifest, data=hello.data) == UNKNOWN
    refused = refusal(hello, challenge, UNKNOWN if asks else terms, secret=secret)
    if refused is not None:
        return refused
    proof = proof_of_coordinator(secret, challenge, hello)
    key = session_key(secret, challenge, hello)
    if asks:
        return Admission(proof=proof, key=key)
    if hello.rank is not None and hello.rank >= world_size:
        reason = f"rank={hello.rank}: this run has ranks 0 to {world_size - 1}"
        return Refuse(reason=reason, retry=False)
    if hello.rank in barred:
        reason = f"rank={hello.rank}: it was caught with wrong results too often"
        return Refuse(reason=reason, retry=False)
    gone = {*taken, *barred}
    free = [rank for rank in range(world_size) if rank not in gone]
    if not free:
        return Refuse(reason=f"all {world_size} ranks are taken by live workers", retry=True)
    if hello.rank not in (None, *free):
        return Refuse(reason=f"rank={hello.rank}: a live worker has it", retry=True)
    rank = free[0] if hello.rank is None else hello.rank
    return Admission(rank=rank, proof=proof, key=key)


def refusal(hello: Hello, challenge: Challenge, terms: Terms, *, secret: bytes) -> Refuse | None:
    """Return why the sender of `hello` can't take part in a run of `terms`; None if it can."""
    right = proof_of_worker(secret, challenge, hello)
    if not hmac.compare_digest(right.encode(), hello.proof.encode()):
        return Refuse(reason="wrong secret", retry=False)
    for name, ours, theirs in (
        ("version", VERSION, hello.version),
        ("run", terms.run, hello.run),
        ("manifest", terms.manifest, hello.manifest),
        ("data", terms.data, hello.data),
    ):
        if ours != theirs:
            reason = f"{name}={_SHOWN.repr(theirs)}: this run has {_SHOWN.repr(ours)}"
            if name == "manifest":  # such as a layer pipeline that was cut again
                reason += ": it trains something else now; start this worker again"
            return Refuse(reason=reason, retry=False)
    return None
