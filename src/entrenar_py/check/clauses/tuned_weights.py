"""F-FT-001 to F-FT-005, F-FT-015: weights of a fine-tuning: frozen, adapted, written, merged.

Source: finetune-v1, equations adapted, merged.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from entrenar_py.check import evidence
from entrenar_py.check.clauses import probes
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import closeness
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Adapted, Explained, Frozen, Quantised, ReadBack, Trace
from entrenar_py.shared.verdict import Tally

Matrix = NDArray[np.float64]

UNIT = 2.0**-24  # of float32, to nearest
STEP = "step"  # `Explained.of` of a training step; other ones are outputs of a written model


def planned(**changes: object) -> Scenario:
    """Return the scenario of a short fine-tuning with adapters, on two workers."""
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
    return probes.scenario("finetuned", workload="finetune", **{**usual, **changes})  # type: ignore[arg-type]


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan adapters of a language model and of a classifier, written and merged."""
    facts = ["outputs", "merged"]
    return [planned(options={"task": task, "facts": facts}) for task in ("instruct", "classify")]


def plan_quantised(invariant: Invariant) -> list[Scenario]:
    """Plan models with a head of its own, and with one that is the embedding."""
    return [planned(options={"method": "qlora", "family": one}) for one in ("llama", "qwen3")]


# --- frozen weights -------------------------------------------------------------------------------


def compare_frozen(tally: Tally, trace: Trace) -> None:
    """Compare each record of the weights that aren't trained with the first one of each weight."""
    first: dict[str, tuple[str, str]] = {}
    for event in trace.of(Frozen):
        for name, record in event.weights.items():
            when, digest = first.setdefault(name, (event.when, record.digest))
            if when != event.when:
                tally.check(
                    digest == record.digest,
                    f"{name} isn't trained, and {event.when} it has other bits than {when}",
                    tensor=name,
                    scenario=trace.scenario,
                )


def compare_quantised(tally: Tally, trace: Trace) -> None:
    """Check that layers within blocks, and no others, are in NF4, with the stock library's bits."""
    for event in trace.of(Quantised):
        place = {"tensor": event.layer, "scenario": trace.scenario}
        found = "in NF4" if event.held else "not in NF4"
        message = f"{event.layer} is {found}: layers within blocks should be, and no others"
        if not tally.check(bool(event.held) == event.due, message, **place) or not event.held:
            continue
        for part, record in event.stock.items():
            got = event.held.get(part)
            message = f"{event.layer} has other {part} than bitsandbytes makes of the checkpoint"
            tally.check(got is not None and got.digest == record.digest, message, **place)


# --- adapters -------------------------------------------------------------------------------------


def compare_rank(tally: Tally, trace: Trace) -> None:
    """Check that what was added to each layer has at most the rank that was asked for.

    A matrix X + E has no more singular values above norm_F(E) than X has rank (Weyl).
    """
    for event in trace.of(Adapted):
        found = _matrices(event)
        place = {"tensor": event.layer, "scenario": trace.scenario}
        given = found["a"].shape[0]
        message = f"the adapter of {event.layer} has {given} rows, rank {event.rank} was asked for"
        tally.check(given == event.rank, message, **place)
        if "merged" not in found:
            continue
        sizes = np.linalg.svd(found["merged"] - found["base"], compute_uv=False)
        allowed = float(np.linalg.norm(_rounding(event, found)))
        beyond = float(sizes[event.rank]) if event.rank < len(sizes) else 0.0
        message = (
            f"what was added to {event.layer} has a rank above {event.rank}: singular value "
            f"{event.rank + 1} is {beyond:.3g}, rounding explains {allowed:.3g}"
        )
        tally.at_most(allowed, beyond, message, form=".3g", **place)


def compare_start(tally: Tally, trace: Trace) -> None:
    """Check that before the training no adapter changes its layer: B A is zero."""
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
    """Check each merged weight, and the outputs of the written models, within their rounding."""
    for event in trace.of(Adapted):
        found = _matrices(event)
        if "merged" not in found:
            continue
        added = event.alpha / event.rank * (found["b"] @ found["a"])
        gap = np.abs(found["merged"] - found["base"] - added)
        allowed = _rounding(event, found)
        worst = int((gap - allowed).argmax())
        size = float(np.square(added).sum())
        factor = float(((found["merged"] - found["base"]) * added).sum()) / size if size else 1.0
        tally.check(
            bool((gap <= allowed).all()),
            f"the merged weight of {event.layer} is off by {gap.flat[worst]:.3g}, rounding "
            f"explains {allowed.flat[worst]:.3g}: what was added is {factor:.3g} times "
            "(alpha / rank) B A",
            tensor=event.layer,
            element=worst,
            scenario=trace.scenario,
        )
    for explained in trace.of(Explained):
        if explained.of != STEP:
            closeness.judge_explained(tally, explained, trace)


def _matrices(event: Adapted) -> dict[str, Matrix]:
    """Return an adapted layer's matrices in float64, those that have values."""
    _, width = event.shape
    columns = {"a": width, "base": width, "merged": width}
    found = {}
    for name, record in event.tensors.items():
        values = record.values()
        if values is None:
            continue
        wide = values.astype(np.float64)
        found[name] = wide.reshape((event.shape[0], -1) if name == "b" else (-1, columns[name]))
    return found


def _rounding(event: Adapted, found: dict[str, Matrix]) -> Matrix:
    """Return how far each element of float32 W + s B A may be from the exact one.

    The product has gamma_r s |B||A|, the multiplication by s and its own rounding one u each, and
    the last addition u |W'|.
    """
    roundings = found["a"].shape[0] + 2
    gamma = roundings * UNIT / (1 - roundings * UNIT)
    terms = event.alpha / event.rank * (np.abs(found["b"]) @ np.abs(found["a"]))
    bound: Matrix = gamma * terms + UNIT * (1 + gamma) * (np.abs(found["merged"]) + terms)
    return bound


# --- what is written ------------------------------------------------------------------------------


def compare_written(tally: Tally, trace: Trace) -> None:
    """Check that stock libraries read the weights after the last step, bit for bit."""
    made = evidence.updates(trace)
    for event in trace.of(ReadBack):
        if not made:
            tally.miss("no step was recorded: there is nothing to compare what was written with")
            return
        last = evidence.any_rank(made[max(made)])
        place = evidence.place(trace, last)
        for name, record in last.weights.items():
            read = event.tensors.get(name)
            message = f"{name} as {event.by} reads it is not what was trained"
            if read is None:
                message = f"{name} was trained, and {event.by} finds no such tensor"
            tally.check(
                read is not None and read.digest == record.digest, message, tensor=name, **place
            )


_ADVICE = "a fine-tuning with the option facts: [outputs, merged] records it"

ROWS = (
    Check(
        name="frozen_weights",
        id="F-FT-001",
        decides="weights that aren't trained keep the bits of the checkpoint",
        spoken_of="frozen base-model adapter-isolation",
        judge=probes.judge(compare_frozen, "no Frozen of a weight that isn't trained was recorded"),
        plan=plan,
    ),
    Check(
        name="adapter_rank",
        id="F-FT-002",
        decides="what adapters add to a layer has at most the rank that was asked for",
        spoken_of="low-rank lora-rank",
        judge=probes.judge(compare_rank, f"no Adapted of a layer was recorded: {_ADVICE}"),
        plan=plan,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="adapter_start",
        id="F-FT-003",
        decides="adapters begin as nothing: before the first step they add zero to their layers",
        spoken_of="lora-initialisation",
        judge=probes.judge(compare_start, "no Adapted of a layer was recorded"),
        plan=plan,
    ),
    Check(
        name="written_weights",
        id="F-FT-004",
        decides="stock libraries read the weights that were trained",
        spoken_of="export adapter-file",
        judge=probes.judge(compare_written, f"no ReadBack was recorded: {_ADVICE}"),
        plan=plan,
    ),
    Check(
        name="merged_model",
        id="F-FT-005",
        decides="the merged model is the model with its adapters, within derived rounding",
        spoken_of="merge merged-weights",
        judge=probes.judge(compare_merged, f"no merged model was recorded: {_ADVICE}"),
        plan=plan,
        tolerance_kinds=("ulp",),
    ),
    Check(
        name="nf4_weights",
        id="F-FT-015",
        decides="frozen weights in NF4 are those of bitsandbytes, bit by bit, and heads are not",
        spoken_of="nf4 qlora quantisation",
        judge=probes.judge(compare_quantised, "no weight in NF4 was recorded"),
        plan=plan_quantised,
    ),
)
