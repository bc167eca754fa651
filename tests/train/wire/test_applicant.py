"""The machines of peers that are no workers yet: an applicant, and a fetcher of files."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py.shared.errors import ProtocolError
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire import terms
from entrenar_py.train.wire.applicant import Applicant, Fetcher
from entrenar_py.train.wire.attendance import FETCHING_MAX
from entrenar_py.train.wire.coordinator import Coordinator
from entrenar_py.train.wire.messages import (
    APPLICANT_MAY_HEAR,
    APPLICANT_MOVES,
    FETCHING_PEER_MOVES,
    MESSAGES,
    VERSION,
    ApplicantPhase,
    Challenge,
    Heartbeat,
    Hello,
    Message,
    Offer,
    PeerPhase,
    Piece,
    Refuse,
    Shutdown,
    Want,
)
from entrenar_py.train.wire.terms import PIECE_BYTES, WANTED_MAX, Package, Part, piece_bytes
from tests.train.wire.moves import Follower
from tests.train.wire.samples import SAMPLES
from tests.train.wire.star import SECRET, TIMING, run_of

PEER = "up"
CHALLENGE = Challenge(version=VERSION, nonce="0" * 32)


def new(secret: bytes = SECRET) -> Applicant:
    """Return an applicant that has just connected."""
    return Applicant(PEER, "1" * 32, secret=secret, backend="cpu")


def hello(machine: Applicant) -> Hello:
    """Return the applicant's answer to the challenge."""
    said, _ = machine.receive(CHALLENGE)
    assert isinstance(said, do.Send)
    assert isinstance(said.message, Hello)
    return said.message


def coordinator() -> Coordinator:
    """Return a coordinator to which peer `down` has connected, after it has sent CHALLENGE."""
    machine = Coordinator(run_of(), secret=SECRET, timing=TIMING, now=0.0)
    machine.connected("down", CHALLENGE.nonce, 0.0)
    return machine


def reach(phase: ApplicantPhase) -> Applicant:
    """Return an applicant in this phase; only one that fetches files is ever FETCHING."""
    if phase is ApplicantPhase.FETCHING:
        return fetching().fetcher
    machine = new()
    if phase is not ApplicantPhase.CONNECTED:
        machine.receive(CHALLENGE)
    if phase is ApplicantPhase.OVER:
        machine.receive(Refuse(reason="no", retry=False))
    return machine


def test_it_asks_and_is_told() -> None:
    """Its hello names no run; the offer is keyed, and the connection ends after it."""
    machine, above = new(), coordinator()
    said = hello(machine)
    assert (said.run, said.manifest, said.data, said.rank) == ("", "", "", None)
    secure, send, close = above.receive("down", said, 0.0)
    key = terms.session_key(SECRET, CHALLENGE, said)
    assert secure == do.Secure("down", key)
    assert isinstance(send, do.Send)
    assert isinstance(send.message, Offer)
    assert (send.message.heartbeat_s, send.message.dead_after_s) == (5.0, 30.0)
    assert close == do.Close("down", "told what the run is")
    assert above.peers == {}
    done = [do.Close(PEER, "completed"), do.Finish("completed")]
    assert machine.receive(send.message) == done
    assert machine.offer == send.message


def test_the_key_is_set_before_anything_else_is_read() -> None:
    """A forged offer fails the checksum of its frame."""
    machine = new()
    said, secure = machine.receive(CHALLENGE)
    assert isinstance(said, do.Send)
    assert isinstance(said.message, Hello)
    assert secure == do.Secure(PEER, terms.session_key(SECRET, CHALLENGE, said.message))


@pytest.mark.parametrize("proof", ["0" * 64, "worker's own"])
def test_an_offer_without_the_secret_is_not_believed(proof: str) -> None:
    """A made-up proof and a reflected one are refused."""
    machine = new()
    said = hello(machine)
    proof = said.proof if "own" in proof else proof
    offer = Offer(heartbeat_s=1.0, dead_after_s=2.0, package=None, proof=proof)
    with pytest.raises(ProtocolError, match="this coordinator does not know the secret"):
        machine.receive(offer)
    assert machine.offer is None


@pytest.mark.parametrize(
    "changes",
    [{"proof": "0" * 64}, {"backend": "cuda"}, {"nonce": "2" * 32}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_stranger_is_told_nothing(changes: dict[str, Any]) -> None:
    """A peer with a wrong secret or an altered hello gets no scenario."""
    said = replace(hello(new()), **changes)
    send, close = coordinator().receive("down", said, 0.0)
    refusal = Refuse(reason="wrong secret", retry=False)
    assert send == do.Send("down", refusal)
    assert close == do.Close("down", "refused: wrong secret")


@pytest.mark.parametrize("given", ["run", "manifest", "data"])
def test_half_a_question_is_none(given: str) -> None:
    """A hello with only part of the run's terms asks to join, and is refused."""
    named: dict[str, Any] = {given: "x"}
    said = replace(hello(new()), **named)
    said = replace(said, proof=terms.proof_of_worker(SECRET, CHALLENGE, said))
    send, _ = coordinator().receive("down", said, 0.0)
    assert isinstance(send, do.Send)
    assert isinstance(send.message, Refuse)
    assert send.message.reason.endswith(": this run has 'r'")


def test_another_version_is_told_so() -> None:
    """Either end checks the version before anything else."""
    later = replace(CHALLENGE, version=VERSION + 1)
    finish = new().receive(later)[-1]
    assert finish == do.Finish(
        "failed", f"version={VERSION + 1}: this worker speaks version {VERSION}"
    )
    said = replace(hello(new()), version=VERSION + 1)
    said = replace(said, proof=terms.proof_of_worker(SECRET, CHALLENGE, said))
    send, _ = coordinator().receive("down", said, 0.0)
    reason = f"version={VERSION + 1}: this run has {VERSION}"
    assert send == do.Send("down", Refuse(reason=reason, retry=False))


def test_a_refusal_is_the_end() -> None:
    """It finishes with the coordinator's reason."""
    machine = reach(ApplicantPhase.ASKING)
    close, finish = machine.receive(Refuse(reason="wrong secret", retry=False))
    assert close == do.Close(PEER, "refused: wrong secret")
    assert finish == do.Finish("failed", "refused: wrong secret")


ILLEGAL: list[tuple[ApplicantPhase, type[Message]]] = [
    (phase, kind)
    for phase, legal in APPLICANT_MAY_HEAR.items()
    for kind in MESSAGES.values()
    if kind not in legal
]


@pytest.mark.parametrize(("phase", "kind"), ILLEGAL)
def test_what_is_not_legal_is_refused(phase: ApplicantPhase, kind: type[Message]) -> None:
    """In each phase every message that the table does not list is refused."""
    with pytest.raises(ProtocolError, match=f"{kind.__name__} to an applicant that is {phase}"):
        reach(phase).receive(SAMPLES[kind][0])


PATIENCE_S = 60.0
LIST, FIRST, SECOND = "0" * 64, "1" * 64, "2" * 64
SIZES = {LIST: 100, FIRST: 3 * PIECE_BYTES + 5, SECOND: PIECE_BYTES}


class Ends:
    """One coordinator, and one fetcher at a time; messages pass from hand to hand.

    `there` has how much of each file is stored, `come` all pieces that came.
    """

    def __init__(self, sizes: Mapping[str, int] = SIZES, *, package: str = LIST) -> None:
        self.sizes, self._package = sizes, package
        self.now = 0.0
        run = run_of(package=Package(LIST, sizes))
        self.coordinator = Coordinator(run, secret=SECRET, timing=TIMING, now=0.0)
        self.there = dict.fromkeys(sizes, 0)
        self.come: list[tuple[str, int]] = []
        self.served: list[Piece] = []
        self.finished: do.Finish | None = None
        self.taken: set[Any] = set()
        self._num_connections = 0

    def connect(self) -> None:
        """Connect a fetcher that wants what is missing."""
        self._num_connections += 1
        self.up, self.down = deque[Message](), deque[Message]()
        self._above = Follower(FETCHING_PEER_MOVES, PeerPhase.CHALLENGED)
        self._below = Follower(APPLICANT_MOVES, ApplicantPhase.CONNECTED)
        parts = [Part(file, size, self.there[file]) for file, size in self.sizes.items()]
        self.fetcher = Fetcher(
            "up",
            "1" * 32,
            secret=SECRET,
            backend="cpu",
            package=self._package,
            parts=parts,
            timing=TIMING,
            patience_s=PATIENCE_S,
            now=self.now,
        )
        self.peer = f"down {self._num_connections}"
        self.above(self.coordinator.connected(self.peer, "2" * 32, self.now))

    def cut(self) -> None:
        """Break the connection: messages on their way are lost."""
        self.up.clear()
        self.down.clear()
        self.above(self.coordinator.lost(self.peer, "cut", self.now))

    def step(self) -> bool:
        """Deliver one message; return whether there was one."""
        if self.up:
            message = self.up.popleft()
            effects = self.coordinator.receive(self.peer, message, self.now)
            self._above.passed(message)
            self.above(effects)
        elif self.down:
            message = self.down.popleft()
            effects = self.fetcher.receive(message)
            self._below.passed(message)
            self.below(effects)
        else:
            return False
        return True

    def run(self) -> None:
        """Deliver all messages."""
        while self.step():
            pass

    def above(self, effects: list[do.Effect]) -> None:
        """Do what the coordinator wants."""
        for effect in effects:
            if isinstance(effect, do.Serve):
                self.served.append(effect.piece)
                self._say_down(effect.piece)
            elif isinstance(effect, do.Send) and effect.peer == self.peer:
                self._say_down(effect.message)
        member = self.coordinator.peers.get(self.peer)
        if member is not None:
            self._above.stands(member.phase)
            self.taken |= self._above.taken

    def below(self, effects: list[do.Effect]) -> None:
        """Do what the fetcher wants."""
        for effect in effects:
            if isinstance(effect, do.Send):
                self._below.passed(effect.message)
                self.up.append(effect.message)
            elif isinstance(effect, do.Store):
                assert effect.offset == self.there[effect.file], "pieces come in order"
                size = piece_bytes(self.sizes[effect.file], effect.offset)
                self.there[effect.file] += size
                self.come.append((effect.file, effect.offset))
            elif isinstance(effect, do.Finish):
                self.finished = effect
        self._below.stands(self.fetcher.phase)
        self.taken |= self._below.taken

    def _say_down(self, message: Message) -> None:
        self._above.passed(message)
        self.down.append(message)


def fetching(**how: Any) -> Ends:
    """Return both ends when the fetcher has been told what the run is."""
    ends = Ends(**how)
    ends.connect()
    while ends.fetcher.phase is not ApplicantPhase.FETCHING and ends.finished is None:
        assert ends.step()
    return ends


def test_all_files_come_in_pieces() -> None:
    """Each byte comes once; few pieces are wanted at a time; then the fetcher disconnects."""
    ends = fetching()
    assert list(ends.up) == [
        Want(file=LIST, offset=0),
        *(Want(file=FIRST, offset=n * PIECE_BYTES) for n in range(3)),
    ]
    most = 0
    while ends.step():
        most = max(most, len(ends.up) + len(ends.down))
    assert most == WANTED_MAX
    assert ends.there == SIZES
    assert len(ends.come) == len(set(ends.come)) == 6
    assert ends.finished == do.Finish("completed")


@given(
    st.lists(st.integers(1, 9 * PIECE_BYTES), min_size=1, max_size=4),
    st.lists(st.integers(1, 40), max_size=6),
)
def test_a_cut_costs_only_what_was_on_its_way(sizes: list[int], cuts: list[int]) -> None:
    """After each cut the rest is fetched, from the byte on that is missing."""
    ends = Ends({f"{number:064x}": size for number, size in enumerate(sizes)})
    for messages in [*cuts, 10**9]:
        ends.connect()
        for _ in range(messages):
            if not ends.step():
                break
        if ends.finished is not None:
            break
        ends.cut()
    assert ends.finished == do.Finish("completed")
    assert ends.there == ends.sizes
    assert len(ends.come) == sum(-(-size // PIECE_BYTES) for size in sizes)
    assert len(ends.served) <= len(ends.come) + WANTED_MAX * len(cuts)


def test_nothing_is_missing() -> None:
    """A fetcher that has all there is disconnects at once."""
    ends = Ends()
    ends.there = dict(SIZES)
    ends.connect()
    ends.run()
    assert (ends.finished, ends.served) == (do.Finish("completed"), [])


def test_every_move_is_made() -> None:
    """The moves of the tables are made in these runs, and no others."""
    taken = set[Any]()
    for ending in (None, Refuse(reason="no", retry=False), Shutdown(problem=None)):
        ends = fetching()
        if ending is None:
            ends.run()
        else:
            ends.down.appendleft(ending)
            ends.up.clear()
            ends.step()
        taken |= ends.taken
    fetched = [move for move in APPLICANT_MOVES if ApplicantPhase.FETCHING in (move[0], move[2])]
    assert {move[:2] for move in taken} >= {
        move[:2] for move in (*fetched, *FETCHING_PEER_MOVES) if move[1].__name__ != "Halt"
    }


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "want",
    [
        Want(file="f" * 64, offset=0),
        Want(file=FIRST, offset=SIZES[FIRST]),
        Want(file=FIRST, offset=2**62),
    ],
)
def test_what_there_is_not_is_refused(want: Want) -> None:
    """A file that is not of the package, or an offset behind its end, ends the connection."""
    ends = fetching()
    effects = ends.coordinator.receive(ends.peer, want, 0.0)
    assert [type(one) for one in effects] == [do.Close]
    assert "no such piece" in str(effects[0])
    assert ends.peer not in ends.coordinator.peers


@pytest.mark.parametrize("message", [Hello, Offer, Piece])
def test_what_a_fetcher_may_not_hear_is_refused(message: type[Message]) -> None:
    """A fetching peer may say Want, a heartbeat and that it leaves."""
    from tests.train.wire.samples import SAMPLES

    ends = fetching()
    effects = ends.coordinator.receive(ends.peer, SAMPLES[message][0], 0.0)
    assert effects == [do.Close(ends.peer, f"{message.__name__} from a peer that is fetching")]


def test_a_stranger_gets_nothing() -> None:
    """A Want before the proof is refused."""
    ends = Ends()
    ends.connect()
    effects = ends.coordinator.receive(ends.peer, Want(file=LIST, offset=0), 0.0)
    assert effects == [do.Close(ends.peer, "Want from a peer that is challenged")]


@pytest.mark.parametrize(
    "piece",
    [
        Piece(file=FIRST, offset=0),
        Piece(file=LIST, offset=PIECE_BYTES),
        Piece(file="f" * 64, offset=0),
    ],
)
def test_a_piece_that_is_not_due_is_refused(piece: Piece) -> None:
    """Pieces come in the order of their requests, each once."""
    ends = fetching()
    with pytest.raises(ProtocolError, match="it is not due"):
        ends.fetcher.receive(piece)


def test_a_piece_twice_is_refused() -> None:
    """The same piece again is not due."""
    ends = fetching(sizes={LIST: 5})
    ends.fetcher.receive(Piece(file=LIST, offset=0))
    with pytest.raises(ProtocolError, match="Piece to an applicant that is over"):
        ends.fetcher.receive(Piece(file=LIST, offset=0))


def test_another_package_is_not_taken() -> None:
    """A coordinator that has now has a different run is told apart by the package's digest."""
    ends = fetching(package="3" * 64)
    assert ends.finished is not None
    assert "now has a different run" in ends.finished.reason


def test_an_offer_without_a_proof_is_not_believed() -> None:
    """Nothing is fetched from a coordinator that does not know the secret."""
    ends = Ends()
    ends.connect()
    while not (ends.down and isinstance(ends.down[0], Offer)):
        ends.step()
    forged = replace(ends.down[0], proof="0" * 64)
    with pytest.raises(ProtocolError, match="does not know the secret"):
        ends.fetcher.receive(forged)


def test_an_unreadable_file_ends_the_fetching() -> None:
    """The worker hears why; the run goes on."""
    ends = fetching()
    ends.above(ends.coordinator.unreadable(ends.peer, "model.safetensors: has changed", 0.0))
    assert ends.coordinator.unreadable("gone", "x", 0.0) == []
    ends.up.clear()
    ends.run()
    assert ends.finished == do.Finish("failed", "refused: model.safetensors: has changed")
    assert ends.coordinator.stage.value == "gathering"


def test_the_run_ends_meanwhile() -> None:
    """A fetcher hears that the run is over, and why it failed."""
    for problem, reason in ((None, "the run is complete"), ("no workers", "no workers")):
        ends = fetching()
        finish = ends.fetcher.receive(Shutdown(problem=problem))[-1]
        assert finish == do.Finish("failed", f"the run is over: {reason}")


# --- time -------------------------------------------------------------------------------------


def test_silence_ends_it_at_both_ends() -> None:
    """Each end sends heartbeats, and gives up one that is silent."""
    ends = fetching()
    ends.fetcher.heard(0.0)
    assert ends.fetcher.tick(TIMING.heartbeat_s) == [do.Send("up", Heartbeat())]
    assert ends.fetcher.tick(TIMING.heartbeat_s + 0.1) == []
    with pytest.raises(ProtocolError, match=r"silent for 30\.0 s"):
        ends.fetcher.tick(TIMING.dead_after_s)
    beats = ends.coordinator.tick(TIMING.heartbeat_s)
    assert beats == [do.Send(ends.peer, Heartbeat())]
    assert do.Close(ends.peer, "silent for 30.0 s") in ends.coordinator.tick(TIMING.dead_after_s)


def test_a_coordinator_that_only_beats_is_given_up() -> None:
    """Heartbeats are no progress: after the patience without a byte the connection is over."""
    ends = fetching()
    for now in (20.0, 40.0, PATIENCE_S - 1):
        ends.fetcher.heard(now)
        ends.fetcher.tick(now)
    ends.fetcher.progressed(50.0)
    ends.fetcher.heard(50.0 + PATIENCE_S)
    ends.fetcher.tick(49.0 + PATIENCE_S)
    with pytest.raises(ProtocolError, match=r"is alive, and sent no byte for 60\.0 s"):
        ends.fetcher.tick(50.0 + PATIENCE_S)


def test_the_run_waits_for_who_fetches() -> None:
    """A run that has too few workers isn't given up while one fetches its files."""
    ends = fetching()
    last = TIMING.gather_s - 1
    for now in range(0, int(last), 20):
        ends.coordinator.receive(ends.peer, Heartbeat(), now)
        assert not any(isinstance(one, do.Finish) for one in ends.coordinator.tick(now))
    ends.coordinator.receive(ends.peer, Want(file=FIRST, offset=0), last)
    assert not any(isinstance(one, do.Finish) for one in ends.coordinator.tick(last + 20))
    ends.coordinator.lost(ends.peer, "done", last + 20)
    given_up = ends.coordinator.tick(last + TIMING.gather_s)
    assert any(isinstance(one, do.Finish) for one in given_up)


def test_many_fetchers_take_turns() -> None:
    """Beyond a number of fetchers another one is told what the run is, and comes again."""
    ends = Ends()
    kept = []
    for _ in range(40):
        ends.connect()
        ends.step()  # the challenge; its answer is on the way
        ends.step()
        kept.append(ends.peer in ends.coordinator.peers)
    assert kept == [True] * (ends.coordinator.run.world_size + FETCHING_MAX) + [False] * 21
    assert isinstance(ends.down[-1], Offer)


def test_nobody_fetches_where_there_is_nothing() -> None:
    """In a run without files an applicant is told what the run is, and sent away."""
    ends = Ends()
    ends.coordinator = Coordinator(run_of(), secret=SECRET, timing=TIMING, now=0.0)
    ends.connect()
    for _ in range(2):
        ends.step()
    assert ends.peer not in ends.coordinator.peers
    offer = ends.down[-1]
    assert isinstance(offer, Offer)
    assert offer.package is None


def test_a_package_is_of_digests() -> None:
    """Wire forms: a digest that isn't one is refused before anything else."""
    from entrenar_py.train.wire import frames

    header = frames.dump_header(Want(file=LIST, offset=0)).replace(b"0" * 64, b"../etc/passwd")
    with pytest.raises(ProtocolError, match="use 64 lower-case hex digits"):
        frames.parse_header(Want.tag, header)
