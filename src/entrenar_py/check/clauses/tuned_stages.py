"""F-LP-001, F-LP-002: a model cut into stages is trained as by one process, and each stage holds
its own part of the checkpoint.

Source: layer-pipeline-v1, equations one_process and own_blocks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from entrenar_py.check import evidence
from entrenar_py.check.clauses import probes, same_bits, tuned_weights
from entrenar_py.check.clauses.check import Check
from entrenar_py.check.contract import Invariant
from entrenar_py.check.evidence import missing
from entrenar_py.check.evidence.needs import SINGLE, Traces
from entrenar_py.shared.scenario import Scenario
from entrenar_py.shared.trace import Event, Frozen, Shard, Start, Trace, Update
from entrenar_py.shared.verdict import Finding, Tally

_BLOCKS = 4
_FACTS = ("ids", "weight", "loss_sum", "draws")  # of a shard, in the order in which they are told
_SAID = {"ids": "samples", "weight": "weight", "loss_sum": "loss", "draws": "random numbers"}


def planned(**changes: object) -> Scenario:
    """Return the scenario of a short fine-tuning with dropout, in two stages."""
    options = {"task": "text", "family": "llama", "blocks": _BLOCKS}
    usual = {"detail": "digests", "dropout": 0.2, "options": options}
    return tuned_weights.planned(**{**usual, **changes}).with_(system="finetuned_by_stages")


def plan(invariant: Invariant) -> list[Scenario]:
    """Plan as many stages as the model has blocks, and fewer."""
    return [planned(world_size=number) for number in (2, 3, _BLOCKS)]


def plan_tied(invariant: Invariant) -> list[Scenario]:
    """Plan a model whose table of tokens is also its head."""
    return [planned(options={"task": "text", "blocks": _BLOCKS})]


def judge(invariant: Invariant, runs: Traces) -> Finding:
    """Compare each shard and each step with those of one process."""
    tally = Tally(invariant.id)
    runs = evidence.usable_runs(runs, tally)
    if runs.base is not None:
        for single in runs.of(SINGLE):
            _compare(tally, single, runs.base)
    nothing = "no run by stages and by one process of one fine-tuning was recorded"
    return tally.finding(nothing=missing.probed(invariant, nothing))


def _compare(tally: Tally, single: Trace, trace: Trace) -> None:
    """Compare a run by stages with that of one process: shards first, as they are the causes."""
    expected = {(one.step, one.shard): one for one in single.of(Shard)}
    for shard in trace.standing.of(Shard):
        model = expected.get((shard.step, shard.shard))
        place = evidence.place(trace, shard)
        for name in _FACTS if model is not None else ():
            due, got = getattr(model, name), getattr(shard, name)
            message = f"shard {shard.shard} has another {_SAID[name]} than in one process"
            tally.equal(due, got, message, **place)
    shards = evidence.shards(trace)
    for step in evidence.updates(trace):
        due = sorted(shard for at, shard in expected if at == step)
        got = sorted(shard.shard for shard in shards.get(step, ()))
        message = f"step {step} was made of shards {got}, and not of {due}"
        tally.check(due == got, message, step=step, scenario=trace.scenario)
    message = "stages give other bits than one process"
    same_bits.compare_steps(tally, _as_stages_record(single), trace, message)


def _as_stages_record(trace: Trace) -> Trace:
    """Return `trace` without what no stage knows: a shard's whole gradient, the optimizer's state.

    Moments that were other ones would show in the weights of the step.
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
    """Check that stages hold the checkpoint's bits, and each weight of a block is in one stage.

    What is trained is left out, as are weights beside the blocks: a table that is also the head is
    in the first and in the last stage.
    """
    tuned_weights.compare_frozen(tally, trace)
    files, stages = trace.of(Frozen)[:1], trace.of(Frozen)[1:]
    num_cuts = len(trace.scenario.options.get("cuts", ()))
    is_cut_anew = min(num_cuts, len(set(trace.scenario.stops)) + 1) > 1
    if not files or not stages or is_cut_anew:
        return
    trained = {_in_checkpoint(name) for start in trace.of(Start)[:1] for name in start.trainable}
    holders: dict[str, dict[str, None]] = defaultdict(dict)  # a stage that is loaded again is one
    for event in stages:
        for name in event.weights:
            holders[name.removesuffix(" in NF4")][event.when] = None
    for name in files[0].weights:
        if not _is_in_block(name) or name in trained:
            continue
        held, place = [*holders[name]], {"tensor": name, "scenario": trace.scenario}
        tally.check(bool(held), f"{name} is in no stage", **place)
        message = f"{name} is in {len(held)} stages, {' and '.join(held)}, and belongs to one"
        tally.check(len(held) <= 1, message, **place)


def _in_checkpoint(name: str) -> str:
    """Return the name that a trained tensor has in the checkpoint's files, if it is there."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _is_in_block(name: str) -> bool:
    """Return whether a tensor is of a numbered block."""
    return any(part.isdecimal() for part in name.split("."))


ROWS = (
    Check(
        name="one_process",
        id="F-LP-001",
        decides="stages train what one process does, bit for bit",
        spoken_of="pipeline stage stages micro-batch activation",
        judge=judge,
        plan=plan,
        needs=(SINGLE,),
    ),
    Check(
        name="stage_weights",
        id="F-LP-002",
        decides="each stage holds the checkpoint's weights of its own blocks, and no others",
        spoken_of="pipeline shard_plan placement layers",
        judge=probes.judge(compare_stages, "no weights that stages hold were recorded"),
        plan=plan_tied,
    ),
)
