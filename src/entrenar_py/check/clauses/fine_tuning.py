"""F-FT-001 to F-FT-016, F-LP-001, F-LP-002: weights and steps of a fine-tuning run.

F-FT-006 to F-FT-008 are in `tuned_samples`. Steps are compared with two independent oracles. One is
a textbook in float64, at the recorded weights. The other is a run of `transformers.Trainer` with
`peft` on the same batches. Sources: finetune-v1, equations adapted, merged, loss, followed, moved;
layer-pipeline-v1, equations one_process and own_blocks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.causes import update_rule
from entrenar_py.check.causes.rounding_bounds import (
    ADAM_GRADIENT_BOUND,
    GRADIENT_BOUND,
    LEARNED_AWAY,
    LOSS_BOUND,
)
from entrenar_py.check.clauses import same_bits
from entrenar_py.check.clauses.check import Check, judge_each, probe
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness, missing
from entrenar_py.check.evidence.needs import PEER, SINGLE, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import (
    Adapted,
    Event,
    Explained,
    Frozen,
    Quantised,
    ReadBack,
    Shard,
    Start,
    Tensors,
    Trace,
    Update,
    record_tensor,
)
from entrenar_py.shared.verdict import Finding, Tally

# --- weights --------------------------------------------------------------------------------------

Matrix = NDArray[np.float64]

UNIT = 2.0**-24  # unit roundoff of float32
STEP = "step"  # `Explained.of` of a training step; other values are outputs of a written model


def planned(**changes: object) -> Scenario:
    """Return the scenario of a short fine-tuning run with adapters, on two workers.

    `changes` replace or add fields of the scenario.
    """
    usual: dict[str, object] = {
        "world_size": 2,
        "num_shards": 4,
        "num_samples": 12,
        "batch_size": 6,
        "num_steps": 2,
        "optimizer": "adamw",
        "learning_rate": 0.01,
        "detail": "values",
    }
    return probe("finetuned", workload="finetune", **{**usual, **changes})  # type: ignore[arg-type]


def plan_weights(invariant: Invariant) -> list[Scenario]:
    """Plan adapters of a language model and of a classifier, both written and merged."""
    facts = ["outputs", "merged"]
    return [planned(options={"task": task, "facts": facts}) for task in ("instruct", "classify")]


def plan_quantised(invariant: Invariant) -> list[Scenario]:
    """Plan a model with a head of its own, and one in which the head is the token embedding."""
    return [planned(options={"method": "qlora", "family": one}) for one in ("llama", "qwen3")]


# --- frozen weights -------------------------------------------------------------------------------


def compare_frozen(tally: Tally, trace: Trace) -> None:
    """Compare each record of the untrained weights with the first record of the same weight."""
    first: dict[str, tuple[str, str]] = {}
    for event in trace.of(Frozen):
        for name, record in event.weights.items():
            when, digest = first.setdefault(name, (event.when, record.digest))
            if when != event.when:
                tally.check(
                    digest == record.digest,
                    f"{name} isn't trained, and {event.when} it has different bits than {when}",
                    tensor=name,
                    scenario=trace.scenario,
                )


def compare_quantised(tally: Tally, trace: Trace) -> None:
    """Check that layers within blocks, and no others, are in NF4, with the bits of bitsandbytes."""
    for event in trace.of(Quantised):
        place = {"tensor": event.layer, "scenario": trace.scenario}
        found = "in NF4" if event.held else "not in NF4"
        message = (
            f"{event.layer} is {found}: all layers within blocks should be in NF4, and no others"
        )
        if not tally.check(bool(event.held) == event.due, message, **place) or not event.held:
            continue
        for part, record in event.stock.items():
            got = event.held.get(part)
            message = (
                f"{event.layer} has different {part} than bitsandbytes makes of the checkpoint"
            )
            tally.check(got is not None and got.digest == record.digest, message, **place)


# --- adapters -------------------------------------------------------------------------------------


def compare_rank(tally: Tally, trace: Trace) -> None:
    """Check that the change of each layer has at most the configured rank.

    A matrix X + E has at most rank(X) singular values above norm_F(E) (Weyl).
    """
    for event in trace.of(Adapted):
        matrices = _matrices(event)
        place = {"tensor": event.layer, "scenario": trace.scenario}
        rank = matrices["a"].shape[0]
        message = (
            f"the adapter of {event.layer} has rank {rank}, but the configuration has rank "
            f"{event.rank}"
        )
        tally.check(rank == event.rank, message, **place)
        if "merged" not in matrices:
            continue
        sizes = np.linalg.svd(matrices["merged"] - matrices["base"], compute_uv=False)
        allowed = float(np.linalg.norm(_rounding(event, matrices)))
        beyond = float(sizes[event.rank]) if event.rank < len(sizes) else 0.0
        message = (
            f"the adapter of {event.layer} adds a matrix of a rank above {event.rank}: singular "
            f"value {event.rank + 1} is {beyond:.3g}, rounding explains at most {allowed:.3g}"
        )
        tally.at_most(allowed, beyond, message, form=".3g", **place)


def compare_start(tally: Tally, trace: Trace) -> None:
    """Check that no adapter changes its layer before the first step, so that B A is zero."""
    for event in trace.of(Adapted):
        if event.when == "start":
            found = _matrices(event)
            product = found["b"] @ found["a"]
            tally.check(
                not product.any(),
                f"before the training the adapter of {event.layer} adds up to "
                f"{np.abs(product).max():.3g} to its weights, and should add nothing",
                step=-1,
                tensor=event.layer,
                scenario=trace.scenario,
            )


def compare_merged(tally: Tally, trace: Trace) -> None:
    """Check each merged weight, and the outputs of the written models, within rounding bounds."""
    for event in trace.of(Adapted):
        matrices = _matrices(event)
        if "merged" not in matrices:
            continue
        added = event.alpha / event.rank * (matrices["b"] @ matrices["a"])
        gap = np.abs(matrices["merged"] - matrices["base"] - added)
        allowed = _rounding(event, matrices)
        worst = int((gap - allowed).argmax())
        size = float(np.square(added).sum())
        factor = (
            float(((matrices["merged"] - matrices["base"]) * added).sum()) / size if size else 1.0
        )
        tally.check(
            bool((gap <= allowed).all()),
            f"the merged weight of {event.layer} is off by {gap.flat[worst]:.3g}, rounding "
            f"explains at most {allowed.flat[worst]:.3g}: the added matrix is {factor:.3g} times "
            "(alpha / rank) B A",
            tensor=event.layer,
            element=worst,
            scenario=trace.scenario,
        )
    for explained in trace.of(Explained):
        if explained.of != STEP:
            closeness.judge_explained(tally, explained, trace)


def _matrices(event: Adapted) -> dict[str, Matrix]:
    """Return the matrices of a layer with an adapter, in float64.

    Tensors without recorded values are left out.
    """
    _, width = event.shape
    columns = {"a": width, "base": width, "merged": width}
    matrices = {}
    for name, record in event.tensors.items():
        values = record.values()
        if values is None:
            continue
        wide = values.astype(np.float64)
        matrices[name] = wide.reshape((event.shape[0], -1) if name == "b" else (-1, columns[name]))
    return matrices


def _rounding(event: Adapted, matrices: dict[str, Matrix]) -> Matrix:
    """Return how far each element of W' = W + s B A in float32 may be from the exact result.

    The product B A may be off by gamma_r |B||A| s, the multiplication by s and the rounding of the
    term by one u each, and the last addition by u |W'|, where u is the unit roundoff.
    """
    roundings = matrices["a"].shape[0] + 2
    gamma = roundings * UNIT / (1 - roundings * UNIT)
    terms = event.alpha / event.rank * (np.abs(matrices["b"]) @ np.abs(matrices["a"]))
    bound: Matrix = gamma * terms + UNIT * (1 + gamma) * (np.abs(matrices["merged"]) + terms)
    return bound


# --- what is written ------------------------------------------------------------------------------


def compare_written(tally: Tally, trace: Trace) -> None:
    """Check that stock libraries read the weights of the last step from the files, bit for bit."""
    updates = evidence.updates(trace)
    for event in trace.of(ReadBack):
        if not updates:
            tally.miss("no step was recorded: there is nothing to compare the written files with")
            return
        last = evidence.any_rank(updates[max(updates)])
        place = evidence.place(trace, last)
        for name, record in last.weights.items():
            read = event.tensors.get(name)
            message = f"{name}, as {event.by} reads it, differs from the trained tensor"
            if read is None:
                message = f"{name} was trained, but {event.by} finds no such tensor"
            tally.check(
                read is not None and read.digest == record.digest, message, tensor=name, **place
            )


_ADVICE = "a fine-tuning with the option facts: [outputs, merged] records it"


# --- steps ----------------------------------------------------------------------------------------

# A factor for the second order, since the loss is not linear in the distance of the weights.
SECOND_ORDER = 2.0


def plan_gradients(invariant: Invariant) -> list[Scenario]:
    """Plan adapters of two families, a classifier, and a run that trains all weights."""
    kinds: list[dict[str, object]] = [
        {"task": "instruct"},
        {"task": "classify", "class_weights": "sqrt_inverse"},
        {"task": "text", "method": "full", "family": "llama"},
        {"task": "text", "family": "gpt2"},
    ]
    return [planned(options={**options, "facts": ["gradients"]}) for options in kinds]


def plan_peer(invariant: Invariant) -> list[Scenario]:
    """Plan several steps with warm-up, decay and clipping, with adapters and with all weights."""
    kinds: list[dict[str, object]] = [
        {"task": "instruct"},
        {"task": "classify", "class_weights": "inverse"},
        {"task": "text", "method": "full", "family": "llama"},
    ]
    changes: dict[str, object] = {
        "num_steps": 6,
        "weight_decay": 0.1,
        "clip_norm": 0.5,
        "schedule": "linear",
        "warmup_steps": 2,
    }
    return [planned(options=options, **changes) for options in kinds]


def compare_gradients(tally: Tally, trace: Trace) -> None:
    """Judge that each step's loss and gradients are within their rounding bounds."""
    for explained in trace.of(Explained):
        if explained.of == STEP:
            closeness.judge_explained(tally, explained, trace)


# --- the peer -------------------------------------------------------------------------------------


def judge_peer(invariant: Invariant, runs: Traces) -> Finding:
    """Compare each run with the peer's: losses, gradients, and steps of the weights."""
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    for trace in () if runs.base is None else (runs.base,):
        for peer in runs.of(PEER):
            _compare(tally, peer, trace)
    nothing = "no run of the same fine-tuning by transformers.Trainer to compare with"
    return tally.finding(nothing=missing.probed(invariant, nothing))


def _compare(tally: Tally, peer: Trace, trace: Trace) -> None:
    ours, theirs = evidence.updates(trace), evidence.updates(peer)
    first, other = next(iter(trace.of(Start)), None), next(iter(peer.of(Start)), None)
    if first is None or other is None or not ours:
        tally.miss("a run recorded no start, or no step")
        return
    apart = [n for n, one in other.weights.items() if first.weights.get(n) != one]
    if apart:
        tally.miss(f"the runs begin with different weights, in {apart[0]}: they can't be compared")
        return
    tally.equal(
        sorted(theirs), sorted(ours), "the runs took different steps", scenario=trace.scenario
    )
    before = first.weights, other.weights
    for step, by_rank in evidence.ranks_by_step(trace):
        if step not in theirs:
            continue
        update, model = evidence.any_rank(by_rank), evidence.any_rank(theirs[step])
        _losses(tally, trace, update, model, before)
        _gradients(tally, trace, update, model)
        before = update.weights, model.weights
    for run in (trace, peer):
        _follows(tally, run)


def _losses(
    tally: Tally, trace: Trace, update: Update, model: Update, before: tuple[Tensors, Tensors]
) -> None:
    """Check that rounding and the distance of the weights explain the difference of two losses.

    To first order |L(w) - L(v)| is |g| . |w - v|, with the recorded gradient g at w.
    """
    if update.loss is None or model.loss is None:
        tally.miss(f"the loss of step {update.step} is known in only one run")
        return
    reach = _reach(update, *before)
    if reach is None:
        tally.miss(f"the values of weights and gradients of step {update.step} were not recorded")
        return
    allowed = 2 * LOSS_BOUND * abs(model.loss) + SECOND_ORDER * reach
    message = (
        f"the loss is not the peer's: rounding and different weights explain at most {allowed:.3g}"
    )
    tally.close(model.loss, update.loss, allowed, message, **evidence.place(trace, update))


def _reach(update: Update, own: Tensors, other: Tensors) -> float | None:
    """Return the sum over all weights of |gradient| |own - other|; None if values are unknown."""
    total = 0.0
    for name, record in update.gradient.items():
        slope = record.values()
        left, right = own[name].values(), other[name].values()
        if slope is None or left is None or right is None:
            return None
        apart = left.astype(np.float64) - right.astype(np.float64)
        total += float(np.abs(slope * apart).sum())
    return total


def _gradients(tally: Tally, trace: Trace, update: Update, model: Update) -> None:
    """Compare gradients with the peer's.

    In step 0 weights are equal, so only rounding is allowed. Later, Adam may have moved the weights
    apart.
    """
    bound = ADAM_GRADIENT_BOUND if update.step else GRADIENT_BOUND
    floor = LEARNED_AWAY * (closeness.norm_l2(model.gradient) or 0.0)
    message, place = "the gradient is not the peer's", evidence.place(trace, update)
    if not closeness.compare_close(
        tally, model.gradient, update.gradient, bound, message, floor, **place
    ):
        tally.miss(f"the values of the gradient of step {update.step} were not recorded")


def _follows(tally: Tally, trace: Trace) -> None:
    """Check that each step of the lowest rank follows from its own gradient, within rounding.

    Then nothing but the difference of gradients moves the weights of two runs apart.
    """
    rules: dict[int, update_rule.Rule] = {}
    who = min((start.rank for start in trace.of(Start)), default=0)
    for event in trace.standing.events:
        if not isinstance(event, Update):
            update_rule.prepare(rules, event, trace)
            continue
        if event.rank != who or who not in rules:
            continue
        rounding = update_rule.rounding(trace, event)
        for name, expected in rules[who].step(event):
            got = event.weights[name].values()
            if got is None:
                continue
            gap = np.abs(got - expected.weight)
            allowed = update_rule.allowed(rounding, expected)
            worst = int((gap - allowed).argmax())
            tally.check(
                bool((gap <= allowed).all()),
                f"{name} does not follow from the gradient, the rate and the clipped norm: it is "
                f"off by {gap.flat[worst]:.3g}, rounding explains at most "
                f"{allowed.flat[worst]:.3g}",
                tensor=name,
                element=worst,
                **evidence.place(trace, event),
            )


_NOTHING = (
    "no step was compared with float64: a fine-tuning with the option facts: [gradients] "
    "records what is needed"
)


# --- ranks that train together --------------------------------------------------------------------


def plan_strategies(invariant: Invariant) -> list[Scenario]:
    """Plan adapters, once for each type of strategy."""
    cut = ("tensor_parallel", "pipeline_parallel")
    kinds = ("ddp", "ddp_canonical", "fsdp", "fsdp_canonical", *cut)
    asked = [{"task": "instruct", "strategy": kind} for kind in kinds]
    return [planned(options=one).with_(system="finetuned_by_ranks") for one in asked]


def judge_strategies(invariant: Invariant, runs: Traces) -> Finding:
    """Compare the weights that ranks wrote with a single device's, and their outputs with float64.

    The outputs are those of the written adapters. If the adapters equal the single device's, so do
    the outputs.
    """
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    if runs.base is not None:
        for single in runs.of(SINGLE):
            _compare_strategies(tally, single, runs.base)
        for explained in runs.base.of(Explained) if runs.of(SINGLE) else ():
            closeness.judge_explained(tally, explained, runs.base)
    nothing = "no fine-tuning was recorded both by ranks and on a single device"
    return tally.finding(nothing=missing.probed(invariant, nothing))


def _compare_strategies(tally: Tally, single: Trace, trace: Trace) -> None:
    """Compare the movement of each tensor, with a tolerance relative to its length."""
    start, updates = next(iter(single.of(Start)), None), evidence.updates(single)
    if start is None or not updates:
        tally.miss("the single device recorded no start, or no step")
        return
    last = evidence.any_rank(updates[max(updates)])
    for event in trace.of(ReadBack):
        due, got = _moved(start.weights, last.weights), _moved(start.weights, event.tensors)
        if due is None or got is None:
            tally.miss("the values of the trained tensors were not recorded")
            continue
        message = "the ranks changed the weights differently from the single device"
        closeness.compare_close(
            tally, due, got, ADAM_GRADIENT_BOUND, message, step=last.step, scenario=trace.scenario
        )


def _moved(before: Tensors, after: Tensors) -> Tensors | None:
    """Return the change of each tensor, in float64; None if values were not recorded."""
    moved = {}
    for name, record in after.items():
        first, last = (one.values() for one in (before.get(name, record), record))
        if first is None or last is None or first.size != last.size:
            return None
        apart = last.astype(np.float64) - first.astype(np.float64)
        moved[name] = record_tensor(apart, values=True)
    return moved


# --- stages ---------------------------------------------------------------------------------------

_BLOCKS = 4
_FACTS = ("ids", "weight", "loss_sum", "draws")  # fields of a Shard, in the order of comparison
_SAID = {"ids": "samples", "weight": "weight", "loss_sum": "loss", "draws": "random numbers"}


def planned_stages(**changes: object) -> Scenario:
    """Return the scenario of a short fine-tuning run with dropout, in two stages.

    `changes` replace or add fields of the scenario.
    """
    options = {"task": "text", "family": "llama", "blocks": _BLOCKS}
    usual = {"detail": "digests", "dropout": 0.2, "options": options}
    return planned(**{**usual, **changes}).with_(system="finetuned_by_stages")


def plan_stages(invariant: Invariant) -> list[Scenario]:
    """Plan two, three and four stages of a model with four blocks."""
    return [planned_stages(world_size=number) for number in (2, 3, _BLOCKS)]


def plan_tied(invariant: Invariant) -> list[Scenario]:
    """Plan a model with one matrix as token embedding and head."""
    return [planned_stages(options={"task": "text", "blocks": _BLOCKS})]


def judge_stages(invariant: Invariant, runs: Traces) -> Finding:
    """Compare each shard and each step with those of one process."""
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    if runs.base is not None:
        for single in runs.of(SINGLE):
            _compare_with_one_process(tally, single, runs.base)
    nothing = "no fine-tuning was recorded both by stages and in one process"
    return tally.finding(nothing=missing.probed(invariant, nothing))


def _compare_with_one_process(tally: Tally, single: Trace, trace: Trace) -> None:
    """Compare a run in stages with that in one process: shards first, since they are causes."""
    expected = {(one.step, one.shard): one for one in single.of(Shard)}
    for shard in trace.standing.of(Shard):
        model = expected.get((shard.step, shard.shard))
        place = evidence.place(trace, shard)
        for name in _FACTS if model is not None else ():
            due, got = getattr(model, name), getattr(shard, name)
            message = f"shard {shard.shard} differs from one process in its {_SAID[name]}"
            tally.equal(due, got, message, **place)
    shards = evidence.shards(trace)
    for step in evidence.updates(trace):
        due = sorted(shard for at, shard in expected if at == step)
        got = sorted(shard.shard for shard in shards.get(step, ()))
        message = f"step {step} was made of shards {got}, and not of {due}"
        tally.check(due == got, message, step=step, scenario=trace.scenario)
    message = "stages give different bits from one process"
    same_bits.compare_steps(tally, _as_stages_record(single), trace, message)


def _as_stages_record(trace: Trace) -> Trace:
    """Return `trace` without facts that no stage knows: shard gradients and optimizer state.

    Wrong optimizer state would show in the weights after the step.
    """
    bare: list[Event] = []
    for event in trace.events:
        match event:
            case Shard():
                bare.append(replace(event, gradient={}))
            case Update():
                bare.append(replace(event, optimizer={}))
            case _:
                bare.append(event)
    return replace(trace, events=tuple(bare))


def compare_stages(tally: Tally, trace: Trace) -> None:
    """Check that stages have the checkpoint's bits, and each block's weight is in one stage.

    Trained weights are left out, and so are weights outside the blocks: a token embedding that is
    also the head is in the first and in the last stage.
    """
    compare_frozen(tally, trace)
    files, stages = trace.of(Frozen)[:1], trace.of(Frozen)[1:]
    num_cuts = len(trace.scenario.options.get("cuts", ()))
    is_cut_anew = min(num_cuts, len(set(trace.scenario.stops)) + 1) > 1
    if not files or not stages or is_cut_anew:
        return
    trained = {_in_checkpoint(name) for start in trace.of(Start)[:1] for name in start.trainable}
    # A stage that is loaded twice counts once.
    holders: dict[str, dict[str, None]] = defaultdict(dict)
    for event in stages:
        for name in event.weights:
            holders[name.removesuffix(" in NF4")][event.when] = None
    for name in files[0].weights:
        if not _is_in_block(name) or name in trained:
            continue
        stage_names, place = [*holders[name]], {"tensor": name, "scenario": trace.scenario}
        tally.check(bool(stage_names), f"{name} is in no stage", **place)
        stages_of = f"{len(stage_names)} stages, {' and '.join(stage_names)}"
        message = f"{name} is in {stages_of}, but belongs to one"
        tally.check(len(stage_names) <= 1, message, **place)


def _in_checkpoint(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _is_in_block(name: str) -> bool:
    return any(part.isdecimal() for part in name.split("."))


ROWS = (
    Check(
        name="frozen_weights",
        id="F-FT-001",
        decides="weights that aren't trained keep the bits of the checkpoint",
        spoken_of="frozen base-model adapter-isolation",
        judge=judge_each(
            compare_frozen, "no event Frozen was recorded for a weight that isn't trained"
        ),
        plan=plan_weights,
    ),
    Check(
        name="adapter_rank",
        id="F-FT-002",
        decides="what adapters add to a layer has at most the configured rank",
        spoken_of="low-rank lora-rank",
        judge=judge_each(compare_rank, f"no event Adapted of a layer was recorded: {_ADVICE}"),
        plan=plan_weights,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="adapter_start",
        id="F-FT-003",
        decides="before the first step adapters add zero to their layers",
        spoken_of="lora-initialisation",
        judge=judge_each(compare_start, "no event Adapted of a layer was recorded"),
        plan=plan_weights,
    ),
    Check(
        name="written_weights",
        id="F-FT-004",
        decides="stock libraries load the weights that were trained",
        spoken_of="export adapter-file",
        judge=judge_each(compare_written, f"no event ReadBack was recorded: {_ADVICE}"),
        plan=plan_weights,
    ),
    Check(
        name="merged_model",
        id="F-FT-005",
        decides="the merged model equals the model with its adapters within derived rounding",
        spoken_of="merge merged-weights",
        judge=judge_each(compare_merged, f"no merged model was recorded: {_ADVICE}"),
        plan=plan_weights,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="nf4_weights",
        id="F-FT-015",
        decides="frozen weights in NF4 have the bits of bitsandbytes', and heads stay unquantised",
        spoken_of="nf4 qlora quantisation",
        judge=judge_each(compare_quantised, "no weight in NF4 was recorded"),
        plan=plan_quantised,
    ),
    Check(
        name="textbook_steps",
        id="F-FT-009",
        decides="losses and gradients equal a float64 textbook's within derived rounding",
        spoken_of="oracle finetune-gradient",
        judge=judge_each(compare_gradients, _NOTHING),
        plan=plan_gradients,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="peer_steps",
        id="F-FT-010",
        decides="losses and weights follow transformers.Trainer with peft on the same batches",
        spoken_of="trainer huggingface",
        judge=judge_peer,
        plan=plan_peer,
        needs=(PEER,),
        tolerance_kinds=("relative",),
    ),
    Check(
        name="strategy_adapters",
        id="F-FT-016",
        decides="ranks write the adapters of a single device, with the same outputs",
        spoken_of="strategy torchrun adapters",
        judge=judge_strategies,
        plan=plan_strategies,
        needs=(SINGLE,),
        tolerance_kinds=("relative",),
    ),
    Check(
        name="one_process",
        id="F-LP-001",
        decides="training in stages has the bits of training in one process",
        spoken_of="pipeline stage stages micro-batch activation",
        judge=judge_stages,
        plan=plan_stages,
        needs=(SINGLE,),
    ),
    Check(
        name="stage_weights",
        id="F-LP-002",
        decides="each stage holds the checkpoint's weights of its own blocks only",
        spoken_of="pipeline shard_plan placement layers",
        judge=judge_each(compare_stages, "no weights that stages hold were recorded"),
        plan=plan_tied,
    ),
)
