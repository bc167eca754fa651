"""A rank that computes wrong bits, once or always, is found by others before anyone commits.

Not exercised: chips that are really broken, and GPUs. Bits are changed by hooks of one rank.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import entrenar_py
from entrenar_py.shared.errors import UsageError
from entrenar_py.train.elastic.audit import Dispute, draw
from entrenar_py.train.elastic.exchange import share
from tests.train.elastic.audits import PLACES
from tests.train.elastic.runs import MICRO_BATCHES, STEPS, in_a_process

FAULTS = [f"{place} {kind}" for place in PLACES for kind in ("flips", "sticks")]
SETTLED = [*FAULTS, "two ranks, flips", "another dies", "the culprit dies"]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Make all planned runs, on ranks forked from one process."""
    found = in_a_process("audits")
    return {"stderr": found.stderr, **json.loads(found.stdout)}


def said(outcome: dict[str, Any], word: str) -> list[list[str]]:
    """Return what ranks reported with `word`, each report as its other words."""
    lines = [line.split() for lines in outcome["reports"].values() for line in lines]
    return [line[1:] for line in lines if line[0] == word]


@pytest.mark.parametrize("name", [*SETTLED, "clean", "one rank"])
def test_a_run_ends_with_the_bits_of_one_process(outcomes: dict[str, Any], name: str) -> None:
    """No wrong gradient is in any step that was committed."""
    outcome = outcomes[name]
    assert {digest for (digest,) in said(outcome, "digest")} == {outcomes["one process"]}
    assert set(outcome["statuses"]) == {0}


@pytest.mark.parametrize("name", SETTLED)
def test_the_culprit_is_named_and_stays_away(outcomes: dict[str, Any], name: str) -> None:
    """It is rank 1, which ends by an error. Nobody commits the step with it."""
    outcome = outcomes[name]
    assert [*outcome["convicted"]] == ["1"]
    reason = outcome["convicted"]["1"]
    assert reason.startswith("rank 1 of the launcher (")
    assert ", cpu) computes wrong bits: the gradients of micro-batch " in reason
    assert "of step 2, first in first." in reason
    assert "no audit has found it right after step 1, so checkpoints from then on" in reason
    assert f"ConvictedError: {reason}" in outcomes["stderr"]
    own = [lines for at, lines in outcome["reports"].items() if at.startswith("1.")]
    assert len(own) == (2 if name == "the culprit dies" else 1)
    assert not any("committed 2" in lines for lines in own)


def test_how_many_bits_differ(outcomes: dict[str, Any]) -> None:
    """One, in a gradient of which one bit flipped."""
    reason = outcomes["gradient flips"]["convicted"]["1"]
    assert "of step 2, first in first.weight (1 bit) are not what others get" in reason


def test_two_ranks_are_named_if_no_third_can_settle_it(outcomes: dict[str, Any]) -> None:
    """Both get again what they got, so either may be broken. Neither goes on."""
    outcome = outcomes["two ranks, sticks"]
    assert outcome["statuses"] == [1, 1]
    first, second = (outcome["convicted"][seat] for seat in ("0", "1"))
    assert first == second
    assert first.startswith("rank 0 of the launcher (")
    assert " and rank 1 of the launcher (" in first
    assert "no majority of ranks says which one" in first
    assert {step for (step,) in said(outcome, "committed")} == {"0", "1"}


def test_the_dispute_outlives_a_third_rank(outcomes: dict[str, Any]) -> None:
    """Rank 3 dies in the step's repetition. Those that are left settle it, and rank 3 is back."""
    reasons = [one.partition(": ")[2] for one in outcomes["another dies"]["interrupts"]]
    assert reasons[0].startswith("an audit: rank ")
    assert reasons[0].endswith("which all repeat")
    assert "computes wrong bits" not in reasons[1]
    assert sum("computes wrong bits" in reason for reason in reasons) == 1


def test_nobody_is_blamed_while_ranks_die_and_join(outcomes: dict[str, Any]) -> None:
    """Half of all micro-batches are audited. A newcomer counts those since it joined."""
    outcome = outcomes["clean"]
    assert not outcome["convicted"]
    assert not any("audit" in reason for reason in outcome["interrupts"])
    assert {step for (step,) in said(outcome, "joined")} > {"0"}
    assert all(0 < int(count) < MICRO_BATCHES * STEPS for (count,) in said(outcome, "audited"))


def test_nobody_is_blamed_where_kernels_do_not_repeat(outcomes: dict[str, Any]) -> None:
    """No two of three ranks agree. All end with the reason, and none is started again."""
    outcome = outcomes["unrepeatable"]
    assert not outcome["convicted"]
    assert outcome["statuses"] == [1] * 3
    assert len(outcome["reports"]) == 3
    assert not said(outcome, "committed")
    assert outcomes["stderr"].count("SystemFailure: the gradients of micro-batch ") == 3
    assert "differ when ranks compute them again: kernels don't repeat" in outcomes["stderr"]


def test_who_is_audited(outcomes: dict[str, Any]) -> None:
    """With audit=1, all micro-batches of two ranks or more, and none of a single one."""
    assert {count for (count,) in said(outcomes["weight flips"], "audited")} == {"96"}
    assert said(outcomes["one rank"], "audited") == [["0"]]


# --- what is drawn --------------------------------------------------------------------------------


def drawn(audited: float, world_size: int, step: int) -> list[set[int]]:
    """Return by rank the micro-batches of 16 that it digests."""
    shares = [share(16, rank=rank, world_size=world_size) for rank in range(world_size)]
    return draw(audited, seed=5, step=step, shares=shares)


@pytest.mark.parametrize("world_size", [2, 3, 4, 16])
@pytest.mark.parametrize("audited", [0.01, 0.3, 1.0])
def test_as_many_are_audited_as_was_said(audited: float, world_size: int) -> None:
    """Two ranks digest each of them. All ranks have as many more to compute as the others."""
    num_audited, num_steps = 0, 4000
    for step in range(num_steps):
        digested = drawn(audited, world_size, step)
        all_of_them = set().union(*digested)
        assert all(sum(shard in one for one in digested) == 2 for shard in all_of_them)
        shares = [set(share(16, rank=rank, world_size=world_size)) for rank in range(world_size)]
        extra = {len(one - own) for one, own in zip(digested, shares, strict=True)}
        assert max(extra) - min(extra) <= (16 % world_size > 0)
        num_audited += len(all_of_them)
    found = num_audited / (16 * num_steps)
    # Four standard deviations, if all micro-batches of a step were drawn together.
    assert found >= audited - 4 * (audited * (1 - audited) / num_steps) ** 0.5
    # Ranks with five of sixteen micro-batches have one audited as often as those with six.
    assert found <= audited * (1.2 if 16 % world_size else 1) + 4 * (audited / num_steps) ** 0.5


def test_every_pair_of_ranks_is_drawn() -> None:
    """Any two ranks that are broken alike are compared with a third one in time."""
    pairs = set()
    for step in range(200):
        digested = drawn(0.3, 4, step)
        pairs |= {
            tuple(rank for rank in range(4) if shard in digested[rank]) for shard in range(16)
        }
    assert pairs - {()} == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}


@pytest.mark.parametrize(
    ("claims", "repeated", "wrong", "known"),
    [
        ({"0": "a", "1": "b"}, {"0": "a", "1": "b", "2": "a"}, {"1"}, True),
        ({"0": "a", "1": "b"}, {"0": "b", "1": "b", "2": "b"}, {"0"}, True),  # it was once
        ({"0": "a", "1": "b"}, {"0": "b", "1": "b"}, {"0"}, True),  # it contradicts itself
        ({"0": "a", "1": "b"}, {"2": "b"}, {"0"}, True),  # both have died
        ({"0": "a", "1": "b"}, {"0": "a", "1": "b"}, {"0", "1"}, False),
        ({"0": "a", "1": "b"}, {"0": "a"}, {"0", "1"}, False),
        ({"0": "a", "1": "b"}, {"0": "a", "1": "b", "2": "a", "3": "b"}, {"0", "1"}, False),
        ({"0": "a", "1": "b"}, {"0": "c", "1": "b"}, {"0", "1"}, False),
        # Kernels don't repeat.
        ({"0": "a", "1": "b"}, {"0": "a", "1": "b", "2": "c"}, set(), False),
        ({"0": "a", "1": "b"}, {"2": "c", "3": "d", "4": "b"}, set(), False),
        ({"0": "a", "1": "b"}, {"0": "c", "1": "d"}, set(), False),
        ({"0": "a", "1": "b"}, {"0": "b", "1": "a", "2": "a"}, set(), False),
        ({"0": "a", "1": "b"}, {"1": "b", "2": "b", "3": "c"}, set(), False),
        ({"0": "a", "1": "b"}, {"0": "a", "1": "a", "2": "b"}, set(), False),
        # It happened once, to both.
        ({"0": "a", "1": "b"}, {"0": "c", "1": "c", "2": "c"}, set(), True),
    ],
)
def test_what_most_get_is_right(
    claims: dict[str, str], repeated: dict[str, str], wrong: set[str], *, known: bool
) -> None:
    """A rank's last word counts in the vote. Every word of it has to be right."""
    dispute = Dispute(step=1, shard=2, claims=claims, parameter="weight", num_bits=3)
    assert dispute.verdict(repeated) == (wrong, known)


@pytest.mark.parametrize("audit", [-0.1, 1.5, float("nan")])
def test_shares_out_of_range(audit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before ranks meet."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    layers = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"audit=.*: give a share of all micro-batches, 0 to 1"):
        entrenar_py.elastic(layers, optimizer, micro_batches=2, audit=audit)
