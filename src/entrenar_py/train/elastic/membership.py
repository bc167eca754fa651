"""Generations of processes that train together, agreed on in a store.

The launcher's ranks are *seats*. A process at a seat has an *incarnation*, a number that no other
process at that seat has. A *generation* is a set of processes that train together until it is
interrupted: because one of them ended, didn't arrive, or because a newcomer asked to join. The next
generation is whoever says in time that it is still there.

All agreements are made in one key-value store, which answers requests one after another (torch's
TCPStore). It has to outlive the members. The keys, where N is a generation's number:

    incarnation/SEAT  how many processes have started at the seat
    dead/SEAT.INC     the process has ended, its supervisor says, or was convicted
    excluded/SEAT.INC the process was not there in time, and must not go on
    gone/SEAT         no other process will start at the seat
    here/N/SEAT       the process asks to be in generation N (`_Presence`)
    record/N          generation N (`Generation`), written once by a process that is in it
    interrupt/N       generation N has ended; why
    cut/N             exchanges of generation N were cut, or will be: what they give is worthless
    joining/N         a newcomer waits for generation N to make room
    pause/N           the step after which generation N makes room
    done/N/SEAT       the process has committed the last step
    ended             all members of a generation have committed the last step
    place/SEAT        the host and the device of the seat, if there are audits (`audit`)
    dispute/N         what generation N found and the next has to settle; "": it has settled all
    convicted/SEAT    the seat computes wrong bits: nobody trains there any more; why
    stopped           nobody trains any more; why
"""

from __future__ import annotations

import atexit
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from entrenar_py.shared.errors import EntrenarError, SystemFailure, UsageError
from entrenar_py.shared.untrusted import json_text

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_S = 0.002
FINISHED = "all ranks have committed the last step"
_SUCCEEDED = "the next generation began"
_TURN_S = 1.0  # for a process to write a record that is due
_FOREVER = timedelta(days=365)


class LeftBehindError(EntrenarError):
    """Raised in a process without which the others have gone on. It must end or start anew."""


class ConvictedError(EntrenarError):
    """Raised in a process at a seat that computes wrong bits, or may. It must end."""


class EndedError(EntrenarError):
    """Raised in a newcomer if the run ends before it has joined."""


class InterruptedGenerationError(EntrenarError):
    """Raised while a generation's members wait for one another, when the generation has ended."""


@dataclass(frozen=True)
class _Presence:
    """A process's request to be in the next generation.

    `step` counts committed steps. `trained` says whether the process has the state of the run: if
    any has, the state of all others is replaced.
    """

    incarnation: int
    step: int
    trained: bool
    facts: dict[str, str]


@dataclass(frozen=True)
class Generation:
    """Processes that train together. `members[rank]` is (seat, incarnation), in order of seats.

    The ranks `behind` get the state of rank `source`, which has committed the most steps. Rank
    `lead` is the last generation's, or `source` if that one is no member any more. `dispute` is
    what an earlier generation left open (`Roll.dispute`).
    """

    number: int
    members: tuple[tuple[int, int], ...]
    source: int
    behind: tuple[int, ...]
    lead: int
    dispute: str = ""

    @classmethod
    def read(cls, number: int, text: bytes) -> Generation:
        """Return the generation of a record. Raises UsageError for one of another build."""
        fields = json_text.load(text)
        try:
            members = tuple((seat, incarnation) for seat, incarnation in fields["members"])
            ranks = fields["source"], tuple(fields["behind"]), fields["lead"]
            return cls(number, members, *ranks, fields["dispute"])
        except KeyError as error:
            raise UsageError(
                f"the run was begun by another build: its record has no {error}; use the same "
                "build on all ranks, and start the whole run again to change it"
            ) from error


class Roll:
    """The keys of the store that members and supervisors share.

    `store` answers to this process alone: a store's client makes one request at a time.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def clone(self) -> Store:
        """Return another client of the store: one that waits can't make requests."""
        store: Store = self.store.clone()  # type: ignore[attr-defined]
        return store

    def has(self, key: str) -> bool:
        """Return whether `key` was written."""
        return bool(self.store.check([key]))

    def incarnation(self, seat: int) -> int:
        """Return how many processes have started at `seat`."""
        return int(self.store.add(f"incarnation/{seat}", 0))

    def newest(self, known: int = -1) -> int:
        """Return the newest generation's number, at least `known`. -1: there is none."""
        while self.has(f"record/{known + 1}"):
            known += 1
        return known

    def generation(self, number: int) -> Generation:
        """Return a generation that has a record."""
        return Generation.read(number, self.store.get(f"record/{number}"))

    def interrupt(self, number: int, reason: str) -> None:
        """End generation `number`. The first reason stays."""
        self.store.compare_set(f"interrupt/{number}", "", reason)

    def bury(self, seat: int, *, by_itself: bool = False) -> None:
        """Say that the newest process at `seat` has ended, and end the generation that it is in.

        If all members have ended, and one of them `by_itself`, as a script that leaves its loop
        early, then the run has ended: nobody has its state, and nobody shall begin anew.
        """
        process = f"{seat}.{self.incarnation(seat)}"
        if by_itself:
            self.store.set(f"left/{process}", "")
            self._end_if_left()  # before newcomers can see that it has ended
        self.store.set(f"dead/{process}", "")
        # In this order: whoever writes a record looks for deaths after that.
        number = self.newest()
        if self.trains(seat, number):
            self.interrupt(number, f"rank {seat} of the launcher ended")
            self._end_if_left()

    def _end_if_left(self) -> None:
        if (number := self.newest()) < 0:
            return
        members = ["{}.{}".format(*member) for member in self.generation(number).members]
        left = [member for member in members if self.has(f"left/{member}")]
        if left and all(member in left or self.has(f"dead/{member}") for member in members):
            self.store.set("ended", "")

    def trains(self, seat: int, number: int) -> bool:
        """Return whether the newest process at `seat` is in generation `number`. -1: in none."""
        member = (seat, self.incarnation(seat))
        return number >= 0 and member in self.generation(number).members

    def leave(self, seat: int) -> None:
        """Say that no other process will start at `seat`."""
        self.store.set(f"gone/{seat}", "")

    def left(self, num_seats: int) -> list[int]:
        """Return the seats at which a process runs or will start."""
        return [seat for seat in range(num_seats) if not self.has(f"gone/{seat}")]

    def excludes(self, seat: int) -> bool:
        """Return whether the others have gone on without the newest process at `seat`.

        One that has ended doesn't count: the next one may not have said yet that it has started.
        One that was convicted ends in its own time, but not later than the run.
        """
        newest = f"{seat}.{self.incarnation(seat)}"
        ends = self.has(f"dead/{newest}") and not self.has("ended")
        return self.has(f"excluded/{newest}") and not ends

    def dispute(self, number: int) -> str:
        """Return the dispute that generation `number` found, or has from an earlier one, or ""."""
        if number < 0 or self.has(f"dispute/{number}"):
            return self._text(f"dispute/{number}")
        return self.generation(number).dispute

    def convict(self, seat: int, reason: str) -> None:
        """Say that `seat` computes wrong bits, and that nobody trains there any more."""
        self.store.compare_set(f"convicted/{seat}", "", reason)
        self.store.set(f"dead/{seat}.{self.incarnation(seat)}", "")
        self.leave(seat)

    def convicted(self, seat: int) -> str:
        """Return why `seat` was convicted. "": it was not."""
        return self._text(f"convicted/{seat}")

    def stop(self, reason: str) -> None:
        """End the run: all processes raise."""
        self.store.compare_set("stopped", "", reason)

    def stopped(self) -> str:
        """Return why the run was stopped. "": it was not."""
        return self._text("stopped")

    def _text(self, key: str) -> str:
        return self.store.get(key).decode() if self.has(key) else ""


@dataclass(frozen=True)
class Ending:
    """The end of generation `number`, for any thread of this process and at any time."""

    number: int
    _roll: Roll
    _interrupted: threading.Event

    @property
    def interrupted(self) -> bool:
        """Whether the generation has ended. Asks nobody."""
        return self._interrupted.is_set()

    def interrupt(self, reason: str) -> None:
        """End the generation."""
        try:
            self._roll.interrupt(self.number, reason)
        finally:
            self._interrupted.set()

    def void(self) -> None:
        """Say to all that its exchanges are worthless from now on, before they are cut."""
        self._roll.store.add(f"cut/{self.number}", 1)  # unlike `set`, it waits for the answer

    def is_void(self) -> bool:
        """Return whether a member has said that. If not, what was received before is right."""
        return self._roll.has(f"cut/{self.number}")


class Membership:
    """This process's part in the agreement."""

    def __init__(
        self, store: Store, *, seat: int, num_seats: int, facts: Mapping[str, object]
    ) -> None:
        """Take `seat` of `num_seats`. All members must have the same `facts`."""
        self.roll = Roll(store)
        self.seat, self._num_seats = seat, num_seats
        self._facts = {name: repr(value) for name, value in facts.items()}
        self.incarnation = int(store.add(f"incarnation/{seat}", 1))
        self._generation: Generation | None = None
        self._interrupted = threading.Event()
        self._watched: Store | None = None  # the watcher's client
        self._watcher: threading.Thread | None = None
        atexit.register(self._close)

    @property
    def interrupted(self) -> bool:
        """Whether this process's generation has ended. Asks nobody."""
        return self._interrupted.is_set()

    def interrupt(self, reason: str) -> None:
        """End this process's generation."""
        if self._generation is None:
            self._interrupted.set()
        else:
            self.ending().interrupt(reason)

    def ending(self) -> Ending:
        """Return the end of the generation that this process is in now."""
        assert self._generation is not None
        return Ending(self._generation.number, self.roll, self._interrupted)

    def require_innocent(self) -> None:
        """Raise ConvictedError if this process's seat was convicted.

        Raises SystemFailure if the run was stopped.
        """
        if reason := self.roll.stopped():
            raise SystemFailure(reason)
        if reason := self.roll.convicted(self.seat):
            raise ConvictedError(reason)

    def agree(self, step: int, *, trained: bool, deadline_s: float) -> Generation:
        """Return the next generation, with this process in it.

        The process has committed `step` steps. `trained` says whether it has the run's state.
        Waits `deadline_s` for members of the last generation, and for the first processes of all
        seats. Raises LeftBehindError if the others have gone on without this process,
        ConvictedError if its seat was convicted, SystemFailure if the run was stopped, EndedError
        if it has ended, and UsageError if this process has other facts than the source.
        """
        while True:
            last = self._generation
            number = (self.roll.newest() if last is None else last.number) + 1
            presence = _Presence(self.incarnation, step, trained, self._facts)
            self._set(f"here/{number}/{self.seat}", json.dumps(asdict(presence)))
            if last is None and number:
                self._set(f"joining/{number - 1}", "")
            new = self._next(number, deadline_s)
            if (self.seat, self.incarnation) in new.members:
                self._require_same_facts(new)
                self._begin(new)
                return new
            self.require_innocent()
            if last is not None:
                raise LeftBehindError(
                    f"generation {number} was formed without this process (rank {self.seat} of the "
                    f"launcher), which was not there within {deadline_s:g} s: it stops here"
                )

    def wait(self, done: Callable[[], bool], *, deadline_s: float, what: str) -> None:
        """Wait until `done()` is true.

        Raises InterruptedGenerationError if the generation ends before, or after `deadline_s`,
        which ends it.
        """
        end = time.monotonic() + deadline_s
        while not done():
            if self.interrupted:
                raise InterruptedGenerationError
            if time.monotonic() > end:
                self.interrupt(f"{what} took longer than {deadline_s:g} s")
            time.sleep(_POLL_S / 20)

    def pauses(self, step: int) -> bool:
        """Return whether the generation makes room for newcomers, after `step` committed steps.

        All members get the same answer if they ask before each step: rank 0 decides before it sends
        its gradients of a step, and the others ask after they have them.
        """
        assert self._generation is not None
        number, members = self._generation.number, self._generation.members
        if members[0] == (self.seat, self.incarnation) and self.roll.has(f"joining/{number}"):
            # The first one counts, and the others may be one step behind.
            self.roll.store.compare_set(f"pause/{number}", "", str(step + 1))
        key = f"pause/{number}"
        return self.roll.has(key) and int(self.roll.store.get(key)) <= step

    def finish(self, *, deadline_s: float) -> bool:
        """Wait until all members have committed the last step. Return False if they could not.

        After `deadline_s` the generation ends.
        """
        assert self._generation is not None
        number = self._generation.number
        self._set(f"done/{number}/{self.seat}", "")
        waiting = {seat for seat, _ in self._generation.members}
        end = time.monotonic() + deadline_s
        while True:
            waiting -= {seat for seat in waiting if self.roll.has(f"done/{number}/{seat}")}
            if not waiting:
                # Whether it ended well or was interrupted is decided once, for all.
                self.interrupt(FINISHED)
            if self.interrupted:
                break
            if time.monotonic() > end:
                self.interrupt(f"the last commit took longer than {deadline_s:g} s")
            time.sleep(_POLL_S)
        if self.roll.store.get(f"interrupt/{number}") != FINISHED.encode():
            return False
        self._set("ended", "")
        return True

    def why_ended(self, number: int) -> str | None:
        """Return why generation `number` was interrupted, or None if it was not."""
        if number < 0 or not self.roll.has(f"interrupt/{number}"):
            return None
        why = self.roll.store.get(f"interrupt/{number}").decode()
        return None if why == _SUCCEEDED else why

    def _begin(self, generation: Generation) -> None:
        self.interrupt(_SUCCEEDED)  # also ends the watcher
        if generation.number:
            for member in self.roll.generation(generation.number - 1).members:
                if member not in generation.members:
                    self._set("excluded/{}.{}".format(*member), "")
        self._generation = generation
        self._interrupted = threading.Event()
        if len(generation.members) == 1:
            return
        self._watcher = threading.Thread(
            target=self._watch,
            args=(generation.number, self._interrupted),
            name="entrenar-elastic-watch",
            daemon=True,
        )
        self._watcher.start()
        for seat, incarnation in generation.members:
            if self.roll.has(f"dead/{seat}.{incarnation}"):
                self.interrupt(f"rank {seat} of the launcher ended")

    def _watch(self, number: int, interrupted: threading.Event) -> None:
        """Set `interrupted` as soon as generation `number` has ended."""
        with suppress(RuntimeError):  # if the store has ended, the next request raises it
            # Here, since a connection sometimes takes seconds.
            self._watched = self._watched or self.roll.clone()
            self._watched.wait([f"interrupt/{number}"], _FOREVER)
        interrupted.set()

    def _close(self) -> None:
        """End the watcher: the interpreter can't end while a thread waits in the store."""
        if self._watcher is not None and self._watcher.is_alive():
            try:
                self.interrupt("a member ended")
            except RuntimeError:
                return  # the store has ended, and the watcher with it
            self._watcher.join()

    def _set(self, key: str, value: str) -> None:
        self.roll.store.set(key, value)

    def _next(self, number: int, deadline_s: float) -> Generation:
        """Wait for generation `number`. Write its record if it is this process's turn."""
        end = None  # when the members of the last generation should have been here
        while not self.roll.has(f"record/{number}"):
            self.require_innocent()
            if self.roll.has("ended"):
                raise EndedError
            # A newcomer can't know how long a step takes. It waits for the ranks' next pause.
            if end is None and (self._generation or self._is_interrupted(number - 1)):
                end = time.monotonic() + deadline_s
            self._propose(number, -math.inf if end is None else time.monotonic() - end)
            time.sleep(_POLL_S)
        return self.roll.generation(number)

    def _propose(self, number: int, late: float) -> None:
        """Write the record of generation `number` if everyone is here or `late` (s) is positive."""
        here = {
            seat: presence
            for seat in range(self._num_seats)
            if (presence := self._presence(number, seat)) is not None
        }
        last = self.roll.generation(number - 1) if number else None
        before = last.members if last else ()
        alive = [(seat, one) for seat, one in before if not self.roll.has(f"dead/{seat}.{one}")]
        if alive:
            missing = [seat for seat, _ in alive if seat not in here]
        else:  # the run starts, or all have ended: wait for all seats
            missing = [seat for seat in self.roll.left(self._num_seats) if seat not in here]
        # Newcomers write if no member does. Then nobody may have the state.
        first = [seat for seat, _ in alive if seat in here]
        writers = first + [seat for seat in sorted(here) if seat not in first]
        if self.seat not in writers:
            return
        # One that was here and has stopped since can't write: then it is the next one's turn.
        if late < _TURN_S * writers.index(self.seat) and (missing or writers[0] != self.seat):
            return
        seats = sorted(here)
        members = [(seat, here[seat].incarnation) for seat in seats]
        advance = {seat: (here[seat].trained, here[seat].step) for seat in seats}
        source = max(seats, key=lambda seat: advance[seat])  # the first of the most advanced
        lead = last.members[last.lead] if last else None
        record = {
            "members": members,
            "source": seats.index(source),
            # Not left to each member: one that is interrupted early may miss a generation.
            "lead": members.index(lead) if lead in members else seats.index(source),
            "behind": [
                rank
                for rank, seat in enumerate(seats)
                if seat != source and not (here[seat].trained and advance[seat] == advance[source])
            ],
            # Without a trained rank the run begins anew, with other weights in the same steps.
            "dispute": self.roll.dispute(number - 1) if advance[source][0] else "",
        }
        self.roll.store.compare_set(f"record/{number}", "", json.dumps(record))

    def _is_interrupted(self, number: int) -> bool:
        return number < 0 or self.roll.has(f"interrupt/{number}")

    def _presence(self, number: int, seat: int) -> _Presence | None:
        """Return what the newest process at `seat` said, if it is here and may train."""
        key = f"here/{number}/{seat}"
        if not self.roll.has(key) or self.roll.convicted(seat):
            return None
        presence = _Presence(**json_text.load(self.roll.store.get(key)))
        newest = presence.incarnation == self.roll.incarnation(seat)
        alive = not self.roll.has(f"dead/{seat}.{presence.incarnation}")
        return presence if newest and alive else None

    def _require_same_facts(self, generation: Generation) -> None:
        seat, _ = generation.members[generation.source]
        theirs = _Presence(
            **json_text.load(self.roll.store.get(f"here/{generation.number}/{seat}"))
        )
        for name, value in self._facts.items():
            if theirs.facts.get(name) != value:
                raise UsageError(
                    f"{name} = {value} on rank {self.seat} of the launcher and "
                    f"{theirs.facts.get(name)} on rank {seat}: ranks with different settings may "
                    "get different bits; use the same on all ranks"
                )
