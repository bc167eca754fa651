"""Members agree on one generation after another, whoever of them ends, hangs or comes late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from entrenar_py.shared.errors import UsageError
from entrenar_py.train.elastic.membership import (
    ConvictedError,
    EndedError,
    Generation,
    InterruptedGenerationError,
    LeftBehindError,
    Membership,
    Roll,
)

DEADLINE_S = 0.3


class Seats:
    """Seats of a launcher, and the processes at them, which here are threads."""

    def __init__(self, num_seats: int, threads: ThreadPoolExecutor) -> None:
        self.store = HashStore()
        self.roll = Roll(self.store)
        self._num_seats, self._threads = num_seats, threads

    def member(self, seat: int, **facts: object) -> Membership:
        """Start a process at `seat`."""
        return Membership(self.store, seat=seat, num_seats=self._num_seats, facts=facts)

    def asks(
        self, member: Membership, step: int = 0, *, trained: bool = False
    ) -> Future[Generation]:
        """Let a process ask for the next generation."""
        return self._threads.submit(member.agree, step, trained=trained, deadline_s=DEADLINE_S)

    def started(self, num_members: int) -> list[Membership]:
        """Return the members of generation 0, at the first seats."""
        members = [self.member(seat) for seat in range(num_members)]
        for asked in [self.asks(member) for member in members]:
            asked.result()
        return members


@contextmanager
def seats(num_seats: int) -> Iterator[Seats]:
    """Yield seats. Wait for their threads in the end."""
    with ThreadPoolExecutor(8) as threads:
        yield Seats(num_seats, threads)


def test_all_who_start_agree() -> None:
    """All have the same generation, and get the state of rank 0."""
    with seats(3) as launcher:
        members = [launcher.member(seat) for seat in (2, 0, 1)]
        generations = {asked.result() for asked in [launcher.asks(one) for one in members]}
    (generation,) = generations
    assert generation == Generation(0, ((0, 1), (1, 1), (2, 1)), source=0, behind=(1, 2), lead=0)


def test_the_most_advanced_state_counts() -> None:
    """One rank had committed a step when another ended, the other one had not."""
    with seats(3) as launcher:
        first, second, third = launcher.started(3)
        launcher.roll.bury(0)
        for member in (first, second, third):
            member.wait(lambda member=member: member.interrupted, deadline_s=5, what="the watch")  # type: ignore[misc]
        asked = [launcher.asks(second, 4, trained=True), launcher.asks(third, 5, trained=True)]
        assert {one.result() for one in asked} == {Generation(1, ((1, 1), (2, 1)), 1, (0,), 1)}


def test_the_lead_stays_although_a_member_misses_generations() -> None:
    """It is in the record. Each member would otherwise have to see all generations."""
    with seats(3) as launcher:
        first, second, third = launcher.started(3)
        launcher.roll.bury(0)
        for step in (4, 4, 5):
            for member in (first, second, third):
                member.interrupt("a test")
                member.wait(lambda member=member: member.interrupted, deadline_s=5, what="the end")  # type: ignore[misc]
            # The third one commits a step that the lead doesn't get.
            steps = {second: 4, third: step}
            asked = [launcher.asks(one, at, trained=True) for one, at in steps.items()]
            (generation,) = {one.result() for one in asked}
            assert generation.members[generation.lead] == (1, 1)
        assert generation.source == 1


def test_a_trained_state_counts_more_than_a_late_checkpoint() -> None:
    """A newcomer that says it is further, by its checkpoint, gets the state of the run."""
    with seats(2) as launcher:
        first, _ = launcher.started(2)
        launcher.roll.bury(1)
        newcomer = launcher.asks(launcher.member(1), 90)
        first.interrupt("a test")
        together = launcher.asks(first, 7, trained=True).result()
        while len(together.members) == 1:  # the newcomer was not there yet
            first.interrupt("a test")
            together = launcher.asks(first, 7, trained=True).result()
        assert newcomer.result() == together
        assert (together.source, together.behind) == (0, (1,))


def test_a_silent_member_is_left_behind() -> None:
    """It is excluded, and can't go on when it wakes."""
    with seats(2) as launcher:
        first, second = launcher.started(2)
        first.interrupt("an exchange took too long")
        assert launcher.asks(first, 3, trained=True).result().members == ((0, 1),)
        assert launcher.roll.excludes(1)
        assert not launcher.roll.excludes(0)
        with pytest.raises(LeftBehindError, match=r"formed without this process \(rank 1"):
            launcher.asks(second, 3, trained=True).result()


def test_nobody_trains_at_a_convicted_seat() -> None:
    """The others don't wait for it, it knows why it must end, and so does a newcomer there."""
    with seats(3) as launcher:
        first, second, third = launcher.started(3)
        launcher.roll.convict(1, "it computes wrong bits")
        launcher.roll.convict(1, "another reason")  # the first one stays
        for member in (first, third):
            member.interrupt("an audit")
        asked = [launcher.asks(one, 3, trained=True) for one in (first, third)]
        assert {one.result().members for one in asked} == {((0, 1), (2, 1))}
        for member in (second, launcher.member(1)):
            with pytest.raises(ConvictedError, match=r"^it computes wrong bits$"):
                launcher.asks(member, 3).result()
        assert launcher.roll.left(3) == [0, 2]


def test_a_convicted_process_is_killed_when_the_run_has_ended() -> None:
    """Until then it may say why it ends."""
    with seats(2) as launcher:
        first, _ = launcher.started(2)
        launcher.roll.convict(1, "it computes wrong bits")
        first.interrupt("an audit")
        assert launcher.asks(first, 3, trained=True).result().members == ((0, 1),)
        assert not launcher.roll.excludes(1)
        launcher.store.set("ended", "")
        assert launcher.roll.excludes(1)


def test_a_dispute_is_in_the_next_records_until_it_is_settled() -> None:
    """Also in that of a generation that follows one that ended too early to settle it."""
    with seats(2) as launcher:
        members, found = launcher.started(2), []
        for written in ("a dispute", None, "", None):
            generation = launcher.roll.newest()
            if written is not None:
                launcher.store.compare_set(f"dispute/{generation}", "", written)
            for member in members:
                member.interrupt("a test")
            asked = [launcher.asks(member, 3, trained=True) for member in members]
            found.append({one.result().dispute for one in asked})
        assert found == [{"a dispute"}, {"a dispute"}, {""}, {""}]


def test_a_run_that_begins_anew_has_no_dispute() -> None:
    """Its weights in the same step are others."""
    with seats(2) as launcher:
        members = launcher.started(2)
        launcher.store.compare_set(f"dispute/{launcher.roll.newest()}", "", "a dispute")
        for member in members:
            member.interrupt("a test")
        asked = [launcher.asks(member, 3, trained=False) for member in members]
        assert {one.result().dispute for one in asked} == {""}


def test_one_that_comes_in_time_is_waited_for() -> None:
    """Members wait for one another for the deadline."""
    with seats(2) as launcher:
        first, second = launcher.started(2)
        first.interrupt("a test")
        asked = launcher.asks(first, 3, trained=True)
        assert not asked.done()
        assert launcher.asks(second, 3, trained=True).result() == asked.result()
        assert len(asked.result().members) == 2


def test_newcomers_join_after_the_same_step_everywhere() -> None:
    """Rank 0 decides at step 5, before its exchange. All pause before step 6."""
    with seats(3) as launcher:
        first, second = launcher.started(2)
        newcomer = launcher.asks(launcher.member(2))
        while not launcher.roll.has("joining/0"):
            pass
        assert not second.pauses(5)
        assert not first.pauses(5)
        assert not second.pauses(5)
        assert (first.pauses(6), second.pauses(6)) == (True, True)
        asked = [launcher.asks(member, 6, trained=True) for member in (first, second)]
        assert {one.result() for one in (*asked, newcomer)} == {
            Generation(1, ((0, 1), (1, 1), (2, 1)), source=0, behind=(2,), lead=0)
        }


def test_if_all_have_ended_the_run_starts_again() -> None:
    """Nobody has the state. Newcomers wait for one another as at the start."""
    with seats(2) as launcher:
        launcher.started(2)
        launcher.roll.bury(0)
        launcher.roll.bury(1)
        asked = [launcher.asks(launcher.member(seat)) for seat in range(2)]
        assert {one.result() for one in asked} == {Generation(1, ((0, 2), (1, 2)), 0, (1,), 0)}


@pytest.mark.parametrize("last", [True, False])
def test_if_a_member_left_by_itself_the_run_does_not_start_again(last: bool) -> None:
    """The other one was killed, before that or after it. A newcomer ends, too."""
    with seats(2) as launcher:
        launcher.started(2)
        launcher.roll.bury(0, by_itself=not last)
        assert not launcher.roll.has("ended")
        launcher.roll.bury(1, by_itself=last)
        with pytest.raises(EndedError):
            launcher.asks(launcher.member(0)).result()


def test_one_that_leaves_by_itself_does_not_end_the_run_of_others() -> None:
    """They go on without it."""
    with seats(2) as launcher:
        _, other = launcher.started(2)
        launcher.roll.bury(0, by_itself=True)
        assert launcher.asks(other, trained=True).result().members == ((1, 1),)


def test_nobody_waits_for_a_seat_that_stays_empty() -> None:
    """A supervisor has given it up."""
    with seats(2) as launcher:
        launcher.roll.leave(1)
        assert launcher.roll.left(2) == [0]
        assert launcher.member(0).agree(0, trained=False, deadline_s=600).members == ((0, 1),)


def test_a_member_that_hangs_before_it_writes() -> None:
    """The next one writes the record after its turn."""
    with seats(2) as launcher:
        first, second = launcher.started(2)
        launcher.store.set(
            "here/1/0",
            f'{{"incarnation": {first.incarnation}, "step": 2, "trained": true, "facts": {{}}}}',
        )
        second.interrupt("a test")
        assert len(launcher.asks(second, 2, trained=True).result().members) == 2


class _DiesAsItIsWritten:
    """A store in which the process at seat 1 ends just after a record with it was written."""

    def __init__(self, store: HashStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, value: str) -> None:
        self._store.compare_set(key, expected, value)
        self._store.set("dead/1.1", "")


def test_a_member_that_ends_as_the_generation_begins() -> None:
    """Its supervisor had not seen the record. Whoever begins sees its death."""
    with seats(2) as launcher:
        first = launcher.member(0)
        first.roll.store = _DiesAsItIsWritten(launcher.store)  # type: ignore[assignment]
        launcher.store.add("incarnation/1", 1)
        launcher.store.set(
            "here/0/1", '{"incarnation": 1, "step": 0, "trained": false, "facts": {}}'
        )
        assert launcher.asks(first).result().members == ((0, 1), (1, 1))
        assert first.interrupted


def test_ranks_with_other_settings_are_refused() -> None:
    """The message names the setting, both values and both ranks."""
    with seats(2) as launcher:
        asked = [launcher.asks(launcher.member(seat, seed=seat)) for seat in range(2)]
        assert len(asked[0].result().members) == 2
        with pytest.raises(UsageError, match="seed = 1 on rank 1 of the launcher and 0 on rank 0"):
            asked[1].result()


def test_a_run_of_another_build_is_not_joined() -> None:
    """A newcomer that can't read its record would fail again each time, so the message says why."""
    with seats(2) as launcher:
        launcher.member(0)
        record = '{"members": [[0, 1]], "source": 0, "behind": [], "dispute": ""}'
        launcher.store.set("record/0", record)
        with pytest.raises(UsageError, match="begun by another build: its record has no 'lead'"):
            launcher.asks(launcher.member(1)).result()


def test_the_end_is_agreed_on() -> None:
    """All finish. Who asks to join after that is told."""
    with seats(3) as launcher:
        first, second = launcher.started(2)
        with ThreadPoolExecutor() as threads:
            asked = [threads.submit(one.finish, deadline_s=5) for one in (first, second)]
        assert [done.result() for done in asked] == [True, True]
        with pytest.raises(EndedError):
            launcher.asks(launcher.member(2)).result()


def test_nobody_finishes_alone() -> None:
    """The other one ended before the last step: it may have to be done again."""
    with seats(2) as launcher:
        first, _ = launcher.started(2)
        launcher.roll.bury(1)
        assert not first.finish(deadline_s=5)


def test_nobody_waits_in_vain_for_the_last_commit() -> None:
    """A member that hangs is given up, and the last step may have to be done again."""
    with seats(2) as launcher:
        first, _ = launcher.started(2)
        assert not first.finish(deadline_s=0.01)
        assert launcher.store.get("interrupt/0") == b"the last commit took longer than 0.01 s"


def test_a_newcomer_waits_for_ranks_that_train() -> None:
    """However long their step takes: it would begin a second run."""
    with seats(2) as launcher:
        launcher.started(2)
        launcher.roll.bury(1)
        launcher.store.delete_key("interrupt/0")  # as if it had ended before it was a member
        newcomer = launcher.asks(launcher.member(1))
        with pytest.raises(TimeoutError):
            newcomer.result(timeout=2 * DEADLINE_S)
        launcher.store.set("ended", "")
        with pytest.raises(EndedError):
            newcomer.result()


def test_a_newcomer_begins_if_the_only_member_hangs() -> None:
    """One member died, the other one doesn't answer: nobody can hand over the state."""
    with seats(2) as launcher:
        launcher.started(2)
        launcher.roll.bury(0)
        assert launcher.asks(launcher.member(0)).result().members == ((0, 2),)
        assert launcher.roll.excludes(1)


@pytest.mark.parametrize("done", [lambda: False])
def test_nobody_waits_longer_than_the_deadline(done: Callable[[], bool]) -> None:
    """The generation ends for all, and the store says why."""
    with seats(2) as launcher:
        first, second = launcher.started(2)
        with pytest.raises(InterruptedGenerationError):
            first.wait(done, deadline_s=0.01, what="an exchange")
        second.wait(lambda: second.interrupted, deadline_s=5, what="the watch")
        assert launcher.store.get("interrupt/0") == b"an exchange took longer than 0.01 s"
