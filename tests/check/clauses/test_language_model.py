"""F-LM-001 to 009, on traces written by hand: held, falsified, not applied, inconclusive."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from entrenar_py.check.clauses import language_model
from entrenar_py.shared.trace import (
    Drawn,
    Evaluated,
    Event,
    Noticed,
    Reread,
    Scored,
    Shard,
    Start,
    Tokens,
)
from entrenar_py.shared.verdict import Finding, Verdict
from tests import traces
from tests.traces import broken, undecided, values

UNIT = 2.0**-23
TOKENS = Tokens(step=0, rank=0, micro_batch=0, rows=2, positions=8)
SCORED = Scored(
    step=0,
    rank=0,
    micro_batch=0,
    call=0,
    counted=14,
    least=0.1,
    most=0.1,
    dtype="float32",
    known=12,
    matches=(1, 12, 2),
)
LATER = Reread(
    step=0,
    rank=0,
    micro_batch=0,
    replaced="later",
    still=0.0,
    moved=0.5,
    own=0.5,
    noise=0.0,
    scale=1.0,
    unit=UNIT,
    cut=3,
)


def judged(check: str, *events: Event) -> Finding:
    """Return the finding of a check on a run of two ranks."""
    subject = traces.scenario(world_size=2)
    return traces.judge(check, [traces.hand_written(*events, subject=subject)])


def is_not_applied(finding: Finding) -> bool:
    """Return whether the finding says that the script lacks the clause's subject."""
    return finding.vacuous


@pytest.mark.parametrize("check", [row.name for row in language_model.ROWS])
def test_a_run_that_was_not_probed_has_nothing_to_judge(check: str) -> None:
    """Without a probe, or with the reason why there was none, no clause is applied."""
    assert is_not_applied(judged(check))
    why = "it is given no token ids"
    finding = judged(check, replace(TOKENS, rows=0, problem=why))
    assert is_not_applied(finding)
    assert why in finding.reason


def test_losses_are_judged_without_a_pass() -> None:
    """Weights in pieces are not passed anything, and targets are what they are."""
    pieces = replace(TOKENS, problem="its weights are sharded")
    other = replace(SCORED, rank=1, counted=7, least=0.2, most=0.2)
    broken(judged("token_shares", pieces, SCORED, other))
    assert judged("label_shift", pieces, SCORED).verdict is Verdict.HELD
    finding = judged("causality", pieces, SCORED)
    assert is_not_applied(finding)
    assert "its weights are sharded" in finding.reason


def test_what_arguments_and_settings_show_is_known_without_a_pass() -> None:
    """Weights in pieces are not passed anything: only padding and order need that."""
    pieces = replace(TOKENS, problem="its weights are sharded")
    run = traces.hand_written(pieces, SCORED, subject=traces.scenario(world_size=2))
    absent = {row.name: row.absent([run]) for row in language_model.ROWS}
    assert (absent["causality"], absent["padding"]) == ("", "")
    assert "no argument of the model shows several documents" in absent["packed_documents"]
    assert "no dropout" in absent["modes"]


# --- what outputs depend on -----------------------------------------------------------------------


def test_outputs_that_stay_are_causal() -> None:
    """Each cut is compared in each step that was probed."""
    finding = judged("causality", TOKENS, SCORED, LATER, replace(LATER, step=2))
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 2)


def test_an_output_that_sees_later_tokens_is_found_at_its_place() -> None:
    """The step, the rank and the position are named."""
    leak = replace(LATER, step=2, rank=1, still=0.01, row=1, position=2)
    found = broken(judged("causality", TOKENS, SCORED, LATER, leak))
    assert (found.step, found.rank) == (2, 1)
    assert "from position 3 on are replaced" in found.message
    assert "row 1, position 2" in found.message


@pytest.mark.parametrize(
    "changes",
    [
        {"still": 30 * UNIT},  # experts with other rows add in another order
        {"still": 0.01, "noise": 0.01},  # ranks that share a row
        {"still": 0.01, "unit": 2.0**-8},
        {"noise": float("nan")},
    ],
)
def test_a_change_that_rounding_or_others_explain_decides_nothing(changes: dict[str, Any]) -> None:
    """It is neither held nor falsified."""
    finding = judged("causality", TOKENS, SCORED, replace(LATER, **changes))
    assert finding.verdict is Verdict.INCONCLUSIVE
    assert not finding.vacuous


HELD, FALSIFIED, OPEN, NONE = "held", "falsified", "inconclusive", "not applied"
PADDED = replace(TOKENS, padding=3)
STILL = replace(LATER, replaced="padding", cut=None, own=None, moved=0.0, loss=0.0)
PACKED = replace(TOKENS, documents=4, shown="cu_seqlens")
APART = replace(LATER, replaced="earlier", cut=None, own=None)
ACROSS = replace(SCORED, crossing=2, tokens_crossing=2)
OWN = replace(SCORED, matches=(12, 1, 2))
MASKED = replace(SCORED, matches=(2, 1, 1))
AHEAD = replace(SCORED, call=1, matches=(0, 1, 12))
WEIGHTED = [replace(SCORED, rank=rank, least=0.1, most=0.4) for rank in (0, 1)]
OF_CLASSES = [replace(one, least=math.nan, most=math.nan) for one in WEIGHTED]
AGAIN = replace(TOKENS, recomputed=True)
MASK = Drawn(
    step=0,
    rank=0,
    micro_batch=0,
    where="forward",
    worker=None,
    ids=(),
    generator="torch",
    before="a",
    after="b",
)


@pytest.mark.parametrize(
    ("check", "events", "verdict"),
    [
        # A masked model sees both sides rightly, and outputs that never move show nothing. A fused
        # loss shows no targets, which only a model that may see both sides needs.
        (
            "causality",
            [TOKENS, replace(SCORED, matches=(2, 1, 1)), replace(LATER, still=0.5)],
            NONE,
        ),
        ("causality", [TOKENS, SCORED, replace(LATER, moved=0.0, own=0.0)], NONE),
        ("causality", [TOKENS, LATER], HELD),
        ("causality", [TOKENS, replace(LATER, still=0.5)], NONE),
        # Outputs and loss must stay if padding is another token, and no padding is a target.
        ("padding", [PADDED, SCORED, STILL], HELD),
        ("padding", [PADDED, SCORED, replace(STILL, still=0.1)], FALSIFIED),
        ("padding", [PADDED, SCORED, replace(STILL, loss=0.1)], FALSIFIED),
        ("padding", [PADDED, replace(SCORED, padded=2), STILL], FALSIFIED),
        ("padding", [TOKENS, SCORED], NONE),
        # Documents may not see each other. All of them may begin with the same token, whose
        # prediction at the end of the one before does no harm.
        ("packed_documents", [PACKED, SCORED, APART], HELD),
        ("packed_documents", [TOKENS, SCORED], NONE),
        ("packed_documents", [PACKED, ACROSS, APART], FALSIFIED),
        ("packed_documents", [PACKED, replace(ACROSS, tokens_crossing=1), APART], HELD),
        # A model that shifts its inputs has its own tokens as targets: its outputs don't depend on
        # the token at their place. A second head predicts the token after the next.
        ("label_shift", [TOKENS, OWN, replace(LATER, own=0.0)], HELD),
        ("label_shift", [TOKENS, OWN], OPEN),
        ("label_shift", [TOKENS, AHEAD, SCORED, LATER], HELD),
        # In a row of one token all targets fit; of few tokens nothing is concluded.
        ("label_shift", [TOKENS, replace(SCORED, known=4, matches=(4, 3, 4)), LATER], NONE),
        ("label_shift", [TOKENS, replace(SCORED, known=12, matches=(12, 12, 12)), LATER], HELD),
        # Advantages, or weights of classes, make tokens count differently on purpose.
        ("token_shares", [TOKENS, *WEIGHTED], NONE),
        ("token_shares", [TOKENS, *OF_CLASSES], NONE),
        # Settings that tie no tables leave it open, and so do those without a known first token.
        ("tied_tables", [replace(TOKENS, tied=True)], HELD),
        ("tied_tables", [replace(TOKENS, tied=False)], FALSIFIED),
        ("tied_tables", [TOKENS], NONE),
        ("one_begin", [replace(TOKENS, begun=2, doubled=0)], HELD),
        ("one_begin", [replace(TOKENS, begun=2, doubled=1)], FALSIFIED),
        ("one_begin", [replace(TOKENS, begun=0, doubled=0)], NONE),
        ("one_begin", [TOKENS], NONE),
        # What draws nothing, or is not computed again, has no masks to compare.
        ("same_masks", [AGAIN, MASK], HELD),
        ("same_masks", [AGAIN, MASK, replace(MASK, where="recomputed")], FALSIFIED),
        ("same_masks", [AGAIN], NONE),
        ("same_masks", [TOKENS, MASK], NONE),
    ],
)
def test_what_is_right_wrong_or_left_alone(check: str, events: list[Event], verdict: str) -> None:
    """Each clause holds, is falsified, or is not applied to a model that it is not about."""
    finding = judged(check, *events)
    assert (NONE if is_not_applied(finding) else finding.verdict.value) == verdict, finding.reason


def test_the_argument_that_shows_documents_is_named() -> None:
    """It is that of the model."""
    packed = replace(TOKENS, documents=4, shown="position_ids")
    found = broken(judged("packed_documents", packed, SCORED, replace(APART, still=0.2)))
    assert "though position_ids separates them" in found.message


# --- targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matches", "words"),
    [((12, 1, 2), "they are not shifted"), ((0, 1, 12), "they are shifted twice")],
)
def test_targets_at_another_place_are_found(matches: tuple[int, ...], words: str) -> None:
    """Not shifted at all, or twice."""
    found = broken(judged("label_shift", TOKENS, replace(SCORED, matches=matches), LATER))
    assert words in found.message


def test_rows_that_are_restored_have_no_next_token() -> None:
    """An autoencoder sees all of its row, and its targets are the row's own tokens."""
    own = replace(SCORED, matches=(12, 1, 2))
    for check in ("label_shift", "causality"):
        finding = judged(check, TOKENS, own, replace(LATER, still=0.3))
        assert is_not_applied(finding), check
        assert "may be trained to reconstruct its rows" in finding.reason


# --- shares ---------------------------------------------------------------------------------------


def test_a_mean_of_means_is_found_and_named() -> None:
    """A token counts more where there are fewer."""
    other = replace(SCORED, rank=1, counted=7, least=0.2, most=0.2)
    found = broken(judged("token_shares", TOKENS, SCORED, other))
    assert "rank 1's micro-batch 0 (7 tokens) counts 2 times" in found.message
    assert "mean over its own tokens" in found.message


def test_equal_shares_are_held_and_one_micro_batch_shows_nothing() -> None:
    """Steps may have other shares; half precision has rounding of its own."""
    again = replace(SCORED, rank=1, counted=7)
    later = [replace(one, step=1, least=0.3, most=0.3) for one in (SCORED, again)]
    finding = judged("token_shares", TOKENS, SCORED, again, *later)
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 2)
    half = replace(again, least=0.1004, most=0.1004, dtype="bfloat16")
    assert judged("token_shares", TOKENS, SCORED, half).verdict is Verdict.HELD
    assert is_not_applied(judged("token_shares", TOKENS, SCORED))


def test_a_mean_over_gaps_is_no_bug_of_a_model_that_fills_gaps() -> None:
    """BERT's loss is the mean over a micro-batch's own gaps, of which it draws a random number."""
    gaps = [replace(SCORED, rank=rank, matches=(2, 1, 1)) for rank in (0, 1)]
    fewer = replace(gaps[1], counted=7, least=0.2, most=0.2)
    finding = judged("token_shares", TOKENS, gaps[0], fewer)
    assert is_not_applied(finding)
    assert "fill gaps" in finding.reason
    assert judged("token_shares", TOKENS, *gaps).verdict is Verdict.HELD


# --- tables and begins ----------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [1.0, 3.0])
def test_names_that_were_one_tensor_stay_one(copy: float) -> None:
    """Found is the first step after which they differ."""
    shared = Noticed(step=0, rank=0, shared=(("w", "v"),))
    start = Start(step=0, rank=0, weights={"w": values(0.0)}, trainable=("w",))
    update = traces.update(0, weights={"w": values(1.0), "v": values(copy)})
    finding = judged("tied_tables", TOKENS, start, shared, update)
    if copy == 1.0:
        assert (finding.verdict, finding.compared) == (Verdict.HELD, 2)
    else:
        assert (broken(finding).step, broken(finding).tensor) == (0, "v")


# --- modes and masks ------------------------------------------------------------------------------


def dropped(check: str, *events: Event) -> Finding:
    """Return the finding of a check on a run of a model with dropout."""
    subject = traces.scenario(world_size=2, dropout=0.1)
    return traces.judge(check, [traces.hand_written(TOKENS, *events, subject=subject)])


def trained(*off: bool) -> list[Shard]:
    """Return the micro-batch of each step of a rank, in evaluation mode where `off` says so."""
    return [traces.shard(step, ids=(step,), evaluating=one) for step, one in enumerate(off)]


EVALUATED = Evaluated(step=1, rank=0, counted=8, training=False, drew=False)


def test_a_model_is_trained_in_training_mode_before_and_after_an_evaluation() -> None:
    """Without dropout there is nothing to switch off."""
    finding = dropped("modes", *trained(False, False), EVALUATED)
    assert (finding.verdict, finding.compared) == (Verdict.HELD, 3)
    assert is_not_applied(judged("modes", TOKENS, *trained(False, True), EVALUATED))


def test_a_model_that_is_left_in_evaluation_mode_is_found() -> None:
    """Only an evaluation explains it: another script may mean it, and nothing is said of that."""
    found = broken(dropped("modes", *trained(False, True, False), EVALUATED))
    assert (found.step, found.rank) == (1, 0)
    assert "call model.train()" in found.message
    for events in (trained(False, True), [*trained(True, True), EVALUATED]):
        assert dropped("modes", *events).verdict is Verdict.INCONCLUSIVE


def test_an_evaluation_with_masks_is_found() -> None:
    """In training mode, but without masks, a model says what it would say in the other."""
    as_trained = replace(EVALUATED, training=True)
    broken(dropped("modes", *trained(False), replace(as_trained, drew=True)))
    assert dropped("modes", *trained(False), as_trained).verdict is Verdict.HELD
    undecided(dropped("modes", *trained(False), replace(EVALUATED, drew=True)))
