"""What is foreseen of the wire is what stages send, byte by byte of each payload."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.finetuned.by_stages import _Training
from entrenar_py.systems.finetuned.small_run import Request
from entrenar_py.train.model import prepared as preparing
from entrenar_py.train.model.settings import Data, Lora, Settings, StagePlan, Training
from entrenar_py.train.plan import plan as planning
from entrenar_py.train.plan.stages import planned
from entrenar_py.train.plan.stages.stage_costs import StageCosts
from entrenar_py.train.plan.stages.stage_workers import StageWorker
from entrenar_py.train.wire_io.peer_ends import MeshEnd

NUM_STEPS, NUM_SHARDS = 3, 4
WORDS = "list the files of the folder, and count their lines one by one"  # of each row


@pytest.mark.parametrize(
    ("method", "places"),
    [
        ("lora", ((0, 1), (1, 3), (3, 4))),
        ("lora", ((0, 2), (0, 2), (2, 4))),
        ("full", ((0, 1), (1, 4))),
    ],
)
def test_stages_send_what_is_foreseen(
    llama: Path, tmp_path: Path, method: str, places: tuple[tuple[int, int], ...]
) -> None:
    """Rows are equally long, as a plan knows the longest one only."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(8 * (json.dumps({"text": WORDS}) + "\n"), encoding="utf-8")
    names = {own: tuple(str(r) for r, one in enumerate(places) if one == own) for own in places}
    settings = Settings(
        model=llama,
        task="text",
        output=tmp_path / "out",
        method=method,
        strategy="layer_pipeline",
        stages=tuple(StagePlan(layers=own, worker=names[own]) for own in names),
        data=Data(train=rows, max_tokens=64),
        lora=Lora(rank=4, targets=("q_proj", "down_proj")),
        training=Training(batch_size=8, num_shards=NUM_SHARDS, epochs=NUM_STEPS),
    )
    prepared = preparing.prepare(settings, tmp_path / "cache")
    longest = prepared.train.length(0)
    run = planning.of(settings, [], longest=longest, bandwidth=1e9)
    workers = [StageWorker(name=str(rank), kind="cpu") for rank in range(len(places))]
    plan = planned.of_settings(StageCosts(run), workers)

    scenario = Scenario(
        system="finetuned_by_stages",
        workload="finetune",
        world_size=len(places),
        seed=0,
        num_shards=NUM_SHARDS,
        num_samples=8,
        batch_size=8,
        num_steps=NUM_STEPS,
        optimizer="adamw",
        options={"cuts": [places]},
    )
    training = _Training(scenario, prepared, Request.of(scenario))
    assert training.train().end.status == "completed"

    sent: dict[int, Counter[str]] = {}
    for node in training.transport.simulation.nodes:
        end, counts = node.end, Counter[str]()
        assert isinstance(end, MeshEnd)
        for kind, count in (*end.meter.sent.items(), *end.links_meter.sent.items()):
            counts[kind] += count.payload_bytes
        counts["Weights"] = end.meter.got["Weights"].payload_bytes
        assert end.machine.rank is not None
        sent[end.machine.rank] = counts
    for index, stage in enumerate(plan.stages):
        ranks = [rank for rank, own in enumerate(places) if own == (*_ends(stage.blocks),)]
        found = sum((sent[rank] for rank in ranks), Counter[str]())
        told = {
            "Activation": stage.hidden_bytes * NUM_SHARDS,
            "ActivationGradient": plan.stages[index - 1].hidden_bytes * NUM_SHARDS if index else 0,
            "TreeNode": stage.sent_bytes,
            "Weights": stage.received_bytes,
        }
        for kind, due in told.items():
            assert found[kind] == NUM_STEPS * due, (index, kind)


def _ends(blocks: range) -> tuple[int, int]:
    return blocks.start, blocks.stop
