"""What stages cost: their memory and their traffic, as foreseen and as measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from entrenar_py.shared.scenario import Scenario
from entrenar_py.systems.finetuned.asked import Asked
from entrenar_py.systems.finetuned.by_stages import _Training
from entrenar_py.train.arithmetic.engine import Dropout
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import model, preparation
from entrenar_py.train.model.preparation import Prepared
from entrenar_py.train.model.settings import Data, Lora, Settings, StagePlan, Training
from entrenar_py.train.plan import plan as planning
from entrenar_py.train.plan import stage_plan
from entrenar_py.train.plan.shape import _Storages
from entrenar_py.train.plan.stage_costs import Place, StageCosts
from entrenar_py.train.plan.stage_workers import StageWorker
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages import stage_model
from entrenar_py.train.stages.stage_model import Received, StageWorkload
from entrenar_py.train.stages.stage_step import TorchStage
from entrenar_py.train.wire_io.peer_ends import MeshEnd
from tests.train.finetune.strategies import runs as models

STAGES = ((0, 1), (1, 3), (3, 4))


@pytest.fixture(scope="module")
def prepared(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Return a run of three stages of a model with four blocks."""
    folder = tmp_path_factory.mktemp("run")
    record = {
        "model": str(models.llama(small, folder / "model")),
        "task": "text",
        "output": "out",
        "strategy": "layer_pipeline",
        "stages": [{"layers": [*own]} for own in STAGES],
        "data": {"train": str(small / "test.jsonl"), "max_tokens": 64},
        "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]},
    }
    (folder / "run.yaml").write_text(json.dumps(record), encoding="utf-8")
    return preparation.prepare(settings_file.load(folder / "run.yaml"), folder)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_shard_takes_what_is_foreseen(prepared: Prepared, number: int) -> None:
    """All storages of a shard's passes are counted, beyond weights and what is trained."""
    settings, train, num_rows = prepared.settings, prepared.train, 4
    longest = max(train.length(index) for index in range(len(train)))
    ids = num_rows * [next(i for i in range(len(train)) if train.length(i) == longest)]
    costs = StageCosts(planning.of(settings, [], longest=longest, bandwidth=1e9))
    place = Place(stage=number, num_stages=3, kind="cpu", shards=1)
    terms = costs.terms(place, *STAGES[number])
    workload = _stage(prepared, number)
    step, tensors = _step(workload)
    shape = workload.hidden_shape(ids)
    received = Received(torch.randn(shape), 0) if number else None

    counted = _Storages()
    for tensor in (*workload.module.parameters(), *workload.module.buffers(), *tensors):
        counted.add(tensor)
    before = counted.peak = counted.now
    with counted:
        out = step.forward(0, ids, received, Dropout(0.0, np.random.default_rng(0)))
        kept = counted.now - before
        if number < 2:
            step.backward(0, torch.ones(shape))
        del out
    frozen = [one for one in workload.module.parameters() if not one.requires_grad]
    assert terms.weights == sum(one.numel() * one.element_size() for one in frozen)
    if number < 2:  # the last stage makes both passes at once, and keeps nothing
        assert kept == pytest.approx(terms.kept, rel=0.1)
    foreseen = terms.kept + terms.hidden + terms.passing
    assert 0.99 < foreseen / (counted.peak - before) < 1.2


def _stage(prepared: Prepared, number: int) -> StageWorkload:
    cut = cutting.of(prepared.settings, model.shape(prepared.settings))
    return stage_model.load_stage(prepared, cut, number)


def _step(workload: StageWorkload) -> tuple[TorchStage, list[torch.Tensor]]:
    held = dict(workload.module.named_parameters())
    tensors = {
        spec.name: held[spec.name].detach().clone().requires_grad_() for spec in workload.specs
    }
    step = TorchStage(workload, tensors, place=torch.device("cpu"), scale=1.0)
    step.begin()
    return step, [*tensors.values()]


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
    prepared = preparation.prepare(settings, tmp_path / "cache")
    longest = prepared.train.length(0)
    run = planning.of(settings, [], longest=longest, bandwidth=1e9)
    workers = [StageWorker(name=str(rank), kind="cpu") for rank in range(len(places))]
    plan = stage_plan.of_settings(StageCosts(run), workers)

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
    training = _Training(scenario, prepared, Asked.of(scenario))
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
