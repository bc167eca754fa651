"""F-LM-001 to F-LM-009: which tokens a language model's losses and outputs depend on.

The records of a probed model (`shared/trace/token_events.py`) are measurements: how much an output
changes if tokens are replaced that it must not depend on, which token a target is, and how much
each token's loss counts in the step. A clause does not apply to a script that lacks its subject
(such as packed documents).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from entrenar_py.check import evidence
from entrenar_py.check.causes.random_draws import named
from entrenar_py.check.clauses.check import Check, probe
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.needs import PROBED, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Drawn,
    Evaluated,
    Noticed,
    Reread,
    Scored,
    Shard,
    Start,
    Tokens,
    Trace,
    Update,
)
from entrenar_py.shared.verdict import Finding, Tally

# An output that must not change may change by this many roundings of the largest output, because a
# changed token elsewhere may change the order of sums (experts that get different rows).
ROUNDINGS = 64
# Changes below this many roundings don't matter in float32. In 16 bits a leak may be this small.
SILENT, _FINE = 8, 2.0**-20
TARGETS_MIN = 8  # fewer targets don't show which tokens they are
_HALF, _SHARES_MAX, _SHARES_MAX_HALF = {"float16", "bfloat16"}, 1e-4, 2e-2

Compare = Callable[[Tally, Trace], str]  # returns why there is nothing to compare, or ""


def _judge(compare: Compare) -> Callable[[Invariant, Traces], Finding]:
    """Return a judge that applies `compare` to each run with a probed model."""

    def judge(invariant: Invariant, traces: Traces) -> Finding:
        tally = missing.tally_for(invariant, traces)
        reasons: dict[str, None] = {}
        for trace in evidence.usable(traces, tally):
            if why := _unprobed(trace, invariant.id) or compare(tally, trace):
                reasons[why] = None
        return tally.finding(nothing="; ".join(reasons) or "no run came to an end")

    return judge


def _absent(compare: Compare, by_passes: bool, traces: Sequence[Trace]) -> str:
    """Return the subject that every run lacks, as a reason; "" if a run may have it.

    If `by_passes`, only probing the model (passing tokens to it again) shows whether it has the
    subject.
    """
    reasons: dict[str, None] = {}
    for trace in traces:
        reason = compare(Tally(""), trace)
        is_open = by_passes and any(one.problem for one in trace.of(Tokens))
        if not reason or _unprobed(trace) or is_open:
            return ""
        reasons[reason] = None
    return "; ".join(reasons)


def _unprobed(trace: Trace, clause: str = "") -> str:
    if not trace.of(Tokens) and not trace.of(Scored):
        again = f"run its script with --only {clause} and without --judge"
        return f"no step of a model with token ids as input was examined: {again}"
    return "" if any(one.rows for one in trace.of(Tokens)) or trace.of(Scored) else _why(trace)


def _why(trace: Trace, otherwise: str = "") -> str:
    problem = next((one.problem for one in trace.of(Tokens) if one.problem), "")
    return f"the model was not passed its tokens again: {problem}" if problem else otherwise


def _place(trace: Trace, event: Tokens | Scored | Reread) -> dict[str, Any]:
    return {
        "step": event.step,
        "rank": event.rank,
        "shard": event.rank * trace.scenario.accumulation + event.micro_batch,
        "scenario": trace.scenario,
    }


# --- what targets are -----------------------------------------------------------------------------


def _totals(trace: Trace) -> Iterator[tuple[list[Scored], int, list[int]]]:
    """Yield for each cross-entropy: its losses, its number of known targets, and matches by shift.

    A match of shift s is a target that equals the token s places further on.
    """
    by_call: dict[int, list[Scored]] = defaultdict(list)
    for scored in trace.of(Scored):
        if scored.known:
            by_call[scored.call].append(scored)
    for _, losses in sorted(by_call.items()):
        known = sum(one.known for one in losses)
        yield (
            losses,
            known,
            [sum(equal) for equal in zip(*(o.matches for o in losses), strict=True)],
        )


def _shifts(trace: Trace) -> dict[int, list[Scored]]:
    """Return shift -> the losses for which all targets have this shift: 0, 1 or 2."""
    shifts: dict[int, list[Scored]] = {}
    for losses, known, matches in _totals(trace):
        fits = [shift for shift, equal in enumerate(matches) if equal == known]
        if 1 in fits:
            shifts[1] = losses
        elif len(fits) == 1 and known >= TARGETS_MIN:
            shifts.setdefault(fits[0], losses)
    return shifts


def _restores(trace: Trace) -> bool:
    """Return whether targets are the tokens at their own places, and outputs depend on all tokens.

    Autoencoders are trained in this way. A model that sees no later tokens would only copy.
    """
    sees_all = any(not _is_still(one) for one in _moving(trace, "later"))
    return sees_all and [*_shifts(trace)] == [0] and bool(_sees_own(trace))


_RESTORED = (
    "targets are the tokens at their own positions: the model may be trained to reconstruct its "
    "rows"
)
_NO_TARGETS = "no cross-entropy over the tokens of the model's rows was observed"


def _shifted(tally: Tally, trace: Trace) -> str:
    shifts = _shifts(trace)
    if not shifts:
        return _NO_TARGETS
    if _restores(trace):
        return _RESTORED
    shift = 1 if 1 in shifts else min(shifts)  # other losses may have later tokens as targets
    losses, sees = shifts[shift], _sees_own(trace)
    # In the second case the model shifts its inputs.
    if shift == 1 or (shift == 0 and sees is False):
        tally.compared += len(losses)
    elif sees is None:
        tally.miss(_why(trace, "it is not known which tokens an output depends on"))
    else:
        what = "at their own positions: they are not shifted"
        if shift == 2:
            what = "two positions further on: they are shifted twice"
        tally.check(
            False,
            f"the targets are the tokens {what}",
            expected="the next token",
            got=f"shifted by {shift}",
            **_place(trace, losses[0]),
        )
    return ""


def _sees_own(trace: Trace) -> bool | None:
    known = [
        one for one in trace.of(Reread) if one.own is not None and one.moved > _bound(one, SILENT)
    ]
    return any((one.own or 0.0) > _bound(one, SILENT) for one in known) if known else None


# --- what outputs depend on -----------------------------------------------------------------------


def _bound(reread: Reread, roundings: int) -> float:
    return roundings * reread.unit * reread.scale


def _moving(trace: Trace, replaced: str) -> list[Reread]:
    rereads = [one for one in trace.of(Reread) if one.replaced == replaced]
    return [one for one in rereads if one.moved > _bound(one, SILENT)]


def _is_still(reread: Reread) -> bool:
    return reread.still <= (_bound(reread, SILENT) if reread.unit < _FINE else 0.0)


def _stays(tally: Tally, trace: Trace, rereads: Iterable[Reread], message: str) -> bool:
    """Check that outputs stay the same. Return whether `rereads` is not empty.

    Two changes are no evidence, and are counted as missing: a change of an output although no token
    changed, and a change within a few roundings.
    """
    judged = False
    for reread in rereads:
        judged = True
        if not reread.noise <= _bound(reread, SILENT):
            tally.miss(
                f"outputs change by {reread.noise:.2g} though the row's tokens stay: they depend "
                "on other rows' or other ranks' tokens, or on numbers that no known generator draws"
            )
        elif (is_still := _is_still(reread)) or reread.still > _bound(reread, ROUNDINGS):
            tally.check(
                is_still,
                f"{message} (row {reread.row}, position {reread.position})",
                expected="no change",
                got=f"{reread.still:.3g}, where the largest output is {reread.scale:.3g}",
                **_place(trace, reread),
            )
        else:
            tally.miss(
                f"outputs that should stay change by {reread.still:.2g}, which may be rounding: "
                "train in float32 for this check"
            )
    return judged


def _causal(tally: Tally, trace: Trace) -> str:
    later = _moving(trace, "later")
    if not _shifts(trace) and not all(map(_is_still, later)):
        return f"{_NO_TARGETS}: the model may be trained to see both sides"
    if _restores(trace):
        return _RESTORED
    for cut in sorted({reread.cut or 0 for reread in later}):
        what = (
            f"an output changes if tokens from position {cut} on are replaced: the "
            "model sees later tokens"
        )
        _stays(tally, trace, (reread for reread in later if reread.cut == cut), what)
    return "" if later else _why(trace, "no output depends on the tokens")


def _padding(tally: Tally, trace: Trace) -> str:
    padded = [event for event in trace.of(Tokens) if event.padding]
    losses = [event for event in trace.of(Scored) if event.padded]
    for loss in losses:
        tally.check(
            False,
            f"{loss.padded} padding tokens count as targets, after padding tokens: ignore "
            "these targets",
            expected="0",
            got=str(loss.padded),
            **_place(trace, loss),
        )
    if not padded and not losses:
        return (
            "no padding was recognised: the model gets no mask of padding, and its table has no "
            "padding_idx"
        )
    rereads = [event for event in trace.of(Reread) if event.replaced == "padding"]
    _stays(tally, trace, rereads, "an output changes if the padding is another token")
    for event in rereads:
        most = _bound(event, ROUNDINGS) + ROUNDINGS * event.unit
        if event.loss is not None and event.noise <= _bound(event, SILENT):
            message = "the loss that the model returns changes if the padding is another token"
            tally.at_most(most, event.loss, message, form=".3g", **_place(trace, event))
    if not trace.of(Scored):
        return "" if rereads else _why(trace, _NO_TARGETS)
    tally.compared += len(padded)
    return ""


def _documents(tally: Tally, trace: Trace) -> str:
    packed = [event for event in trace.of(Tokens) if event.documents]
    if not packed:
        return "no argument of the model shows several documents in a row"
    shown, rereads = packed[0].shown, _moving(trace, "earlier")
    what = f"a document sees another document of its row, though {shown or 'a mask'} separates them"
    _stays(tally, trace, rereads, what)
    crossing = [event for event in trace.of(Scored) if event.crossing]
    several = sum(event.tokens_crossing for event in crossing) > len(crossing)
    for scored in crossing if several else ():  # otherwise all may begin with the same token
        tally.check(
            False,
            f"{scored.crossing} targets are the first token of the next document: ignore them",
            expected="0",
            got=str(scored.crossing),
            **_place(trace, scored),
        )
    return "" if rereads else _why(trace, "no output of a document depends on its tokens")


# --- what tokens count ----------------------------------------------------------------------------


def _shares(tally: Tally, trace: Trace) -> str:
    steps: dict[tuple[int, int], list[Scored]] = defaultdict(list)
    even = [one for one in trace.of(Scored) if _agree(one, one)]  # NaN agrees with nothing
    for scored in even:
        steps[scored.step, scored.call].append(scored)
    pairs = [*_pairs(steps.values())]
    if not _shifts(trace) and not all(_agree(*pair) for pair in pairs):
        return (
            f"{_NO_TARGETS}: the model may be trained to fill gaps, and then the mean over a "
            "micro-batch's own gaps is usual"
        )
    for pair in pairs:
        _compare_shares(tally, trace, *pair)
    if pairs:
        return ""
    if len(even) < len(trace.of(Scored)):
        return "the tokens of one micro-batch count differently"
    return "no step had losses over tokens of several micro-batches or ranks"


def _allowed(one: Scored, other: Scored) -> float:
    return _SHARES_MAX_HALF if {one.dtype, other.dtype} & _HALF else _SHARES_MAX


def _agree(one: Scored, other: Scored) -> bool:
    most = max(abs(one.most), abs(other.least))
    return abs(one.most - other.least) <= _allowed(one, other) * most


def _pairs(groups: Iterable[Sequence[Scored]]) -> Iterator[tuple[Scored, Scored]]:
    for losses in groups:
        first = max(losses, key=lambda one: abs(one.most))
        yield from ((first, other) for other in losses if other is not first)


def _compare_shares(tally: Tally, trace: Trace, most: Scored, other: Scored) -> None:
    sums = [scored.most * scored.counted for scored in (most, other)]
    cause = "the loss is not divided by the tokens of the whole step"
    if abs(sums[0] - sums[1]) <= _allowed(most, other) * abs(sums[0]):
        cause = "each loss is the mean over its own tokens; divide sums by the tokens of the step"
    factor = most.most / other.least if other.least else math.inf
    tally.check(
        _agree(most, other),
        f"a token of {_named(most)} counts {factor:.4g} times as much as one of {_named(other)}: "
        f"{cause}",
        expected=repr(other.least),
        got=repr(most.most),
        **_place(trace, most),
    )


def _named(scored: Scored) -> str:
    return f"rank {scored.rank}'s micro-batch {scored.micro_batch} ({scored.counted} tokens)"


# --- embeddings and begins ------------------------------------------------------------------------


def _tied(tally: Tally, trace: Trace) -> str:
    known = [tokens for tokens in trace.of(Tokens) if tokens.tied is not None]
    for tokens in known:
        tally.check(
            tokens.tied is True,
            "the model's settings tie the weights of its first and last layer, but these differ",
            **_place(trace, tokens),
        )
    ties = {tie for event in trace.of(Noticed) for tie in event.shared}
    for tie in sorted(ties):
        _one_tensor(tally, trace, tie)
    return "" if known or ties else "no embedding is tied, and the model's settings don't demand it"


def _one_tensor(tally: Tally, trace: Trace, tie: Sequence[str]) -> None:
    """Compare the names that one tensor had. While it is one tensor, only one name is recorded."""
    for event in trace.standing.events:
        if not isinstance(event, Start | Update):
            continue
        names = [name for name in tie if name in event.weights]
        apart = [n for n in names if event.weights[n].digest != event.weights[names[0]].digest]
        tally.check(
            not apart,
            f"{(apart or names or tie)[0]} was the same tensor as {tie[0]}, and differs now",
            step=event.step - isinstance(event, Start),
            rank=event.rank,
            tensor=(apart or names or tie)[0],
            scenario=trace.scenario,
        )


def _one_begin(tally: Tally, trace: Trace) -> str:
    known = [tokens for tokens in trace.of(Tokens) if tokens.begun]
    for tokens in known:
        tally.check(
            not tokens.doubled,
            f"{tokens.doubled} of {tokens.begun} documents begin with two BOS tokens: "
            "both a template and the tokenizer add one",
            expected="1",
            got="2",
            **_place(trace, tokens),
        )
    return "" if known else "no document begins with the model's BOS token"


# --- modes and masks -----------------------------------------------------------------------------


def _modes(tally: Tally, trace: Trace) -> str:
    if not trace.scenario.dropout:
        return "the model has no dropout"
    losses = trace.of(Evaluated)
    for event in losses:
        tally.check(
            not (event.training and event.drew),
            f"a loss of {event.counted} targets is taken without gradient in training mode, with "
            "dropout: call model.eval() before an evaluation, and model.train() after it",
            **_of_rank(trace, event),
        )
        if event.drew and not event.training:
            tally.miss(
                f"a loss of {event.counted} targets draws random numbers in evaluation "
                "mode: dropout that doesn't look at self.training, or intended noise"
            )
    shards = trace.standing.of(Shard)
    for rank in sorted({event.rank for event in shards}):
        seen: tuple[Evaluated | Shard, ...] = (*losses, *shards)
        own = [event for event in seen if event.rank == rank]
        _mode_after_evaluation(tally, trace, sorted(own, key=_in_step))
    return ""


def _in_step(one: Evaluated | Shard) -> tuple[int, bool]:
    return one.step, isinstance(one, Shard)


def _mode_after_evaluation(tally: Tally, trace: Trace, own: Iterable[Evaluated | Shard]) -> None:
    """Check that a rank that trained before an evaluation is in training mode again after it."""
    was_trained = is_after = False
    for event in own:
        if isinstance(event, Evaluated):
            is_after |= not event.training
        elif not event.evaluating:
            tally.compared += 1
            was_trained, is_after = True, False
        elif was_trained and is_after:
            tally.check(
                False,
                "the model is still in evaluation mode, with dropout off, when it trains after an "
                "evaluation: call model.train()",
                **_of_rank(trace, event),
            )
        else:
            tally.miss(
                f"rank {event.rank} trains in evaluation mode, with dropout off, and no evaluation "
                "was seen before it: call model.train() if it should be on"
            )


def _of_rank(trace: Trace, event: Evaluated | Shard | Drawn) -> dict[str, Any]:
    return {"step": event.step, "rank": event.rank, "scenario": trace.scenario}


def _same_masks(tally: Tally, trace: Trace) -> str:
    drawn = trace.standing.of(Drawn)
    others = [event for event in drawn if event.where == "recomputed"]
    for event in others:
        tally.check(
            False,
            "a layer that is recomputed in the backward pass draws new random numbers, from "
            f"{named(event.generator)}: the gradient uses different masks from the loss; let the "
            "checkpoint restore the generators (preserve_rng_state=True)",
            **_of_rank(trace, event),
        )
    again = {(event.step, event.rank) for event in trace.of(Tokens) if event.recomputed}
    if not again and not others:
        return "no layer was recomputed in a backward pass"
    masked = {(event.step, event.rank) for event in drawn if event.where == "forward"}
    tally.compared += len(again & masked)
    return "" if masked else "recomputed layers draw no random numbers"


# --- the rows of the table ------------------------------------------------------------------------


def _plan(dropout: float, options: Mapping[str, Any]) -> Callable[[Invariant], list[Scenario]]:
    def plan(_: Invariant) -> list[Scenario]:
        """Plan two workers, with two micro-batches each in three steps."""
        usual: dict[str, Any] = {"world_size": 2, "accumulation": 2, "num_steps": 3}
        return [probe("language_model", **usual, dropout=dropout, options=options)]

    return plan


def _row(
    name: str,
    number: int,
    decides: str,
    compare: Compare,
    *,
    words: str,
    dropout: float = 0.0,
    by_passes: bool = False,
    **rows: Any,
) -> Check:
    return Check(
        name=name,
        id=f"F-LM-{number:03}",
        decides=decides,
        spoken_of=words,
        judge=_judge(compare),
        absent=partial(_absent, compare, by_passes),
        plan=_plan(dropout, rows),
        needs=(PROBED,),
        takes_commands=True,
    )


ROWS = (
    _row(
        *("causality", 1, "no output with a target in the loss depends on a later token", _causal),
        words="causal mask future leak attention",
        by_passes=True,
    ),
    _row(
        *("label_shift", 2, "each output's target is the next token", _shifted),
        words="labels shift next token",
    ),
    _row(
        *("padding", 3, "padding is never a target, and its tokens have no effect", _padding),
        words="pad ignored attention mask",
        by_passes=True,
        rows="padded",
    ),
    _row(
        *("packed_documents", 4, "tokens don't attend to other documents in their row", _documents),
        words="packing documents position ids cu_seqlens contamination",
        rows="packed",
    ),
    _row(
        *("token_shares", 5, "all tokens of a step have equal weight in the loss", _shares),
        words="loss divided tokens accumulation ranks",
        rows="padded",
    ),
    _row(
        *("tied_tables", 6, "tied embeddings stay one tensor", _tied),
        words="tied embedding head weights",
    ),
    _row(
        *("one_begin", 7, "a document begins with exactly one BOS token", _one_begin),
        words="bos token twice template",
    ),
    _row(
        *("modes", 8, "dropout is on during training, and off during evaluation", _modes),
        words="dropout eval train mode evaluation",
        dropout=0.1,
    ),
    _row(
        *("same_masks", 9, "a layer that is recomputed draws the same dropout masks", _same_masks),
        words="activation gradient checkpoint recomputed preserve_rng_state",
        dropout=0.1,
    ),
)
