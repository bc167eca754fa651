"""What is foreseen of a stage's memory is what its passes take on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from entrenar_py.train.arithmetic.engine import Dropout
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import model
from entrenar_py.train.model import prepared as preparing
from entrenar_py.train.model.prepared import Prepared
from entrenar_py.train.plan import plan as planning
from entrenar_py.train.plan.rehearsal import _Storages
from entrenar_py.train.plan.stages.stage_costs import Place, StageCosts
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages import stage_loading
from entrenar_py.train.stages.stage_step import TorchStage
from entrenar_py.train.stages.stage_workload import Received, StageWorkload
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
    return preparing.prepare(settings_file.load(folder / "run.yaml"), folder)


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
    return stage_loading.load(prepared, cut, number)


def _step(workload: StageWorkload) -> tuple[TorchStage, list[torch.Tensor]]:
    held = dict(workload.module.named_parameters())
    tensors = {
        spec.name: held[spec.name].detach().clone().requires_grad_() for spec in workload.specs
    }
    step = TorchStage(workload, tensors, place=torch.device("cpu"), scale=1.0)
    step.begin()
    return step, [*tensors.values()]
