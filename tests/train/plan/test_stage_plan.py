"""Plans of stages: cuts, orders and refusals, by hand and by the command."""

from __future__ import annotations

import json
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from entrenar_py import entrenar as cli
from entrenar_py.shared.errors import ContractError
from entrenar_py.train.finetune import settings_file
from entrenar_py.train.model import masks
from entrenar_py.train.model.settings import StagePlan, Training
from entrenar_py.train.plan import plan as planning
from entrenar_py.train.plan import stage_plan, stage_text, stage_workers
from entrenar_py.train.plan.costs import Load, memory_of
from entrenar_py.train.plan.stage_costs import Place, StageCosts
from entrenar_py.train.plan.stage_plan import Costs
from entrenar_py.train.plan.stage_workers import StageWorker
from entrenar_py.train.service import exit_codes
from tests import extras
from tests.train.plan.qwen3 import TINY, settings

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
extras.require("peft", "transformers")
CONFIG = """\
model: .
task: text
output: out
strategy: layer_pipeline
data: {{train: rows.jsonl}}
training: {{batch_size: 8, num_shards: 4}}
{more}
"""
WORKERS = """\
- {worker: a, memory: 2GB, backend: cpu, flops: 1e12, bandwidth: 1Gbit}
- {worker: b, memory: 2GB, backend: cuda, flops: 3e12}
"""


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> StageCosts:
    """Return the costs of a model with four blocks, whose table is its head."""
    return _costs(tmp_path_factory.mktemp("model"))


def _costs(folder: Path, **changes: Any) -> StageCosts:
    training = Training(batch_size=8, num_shards=4)
    found = settings(folder, TINY, task="text", training=training, **changes)
    return StageCosts(planning.of(found, [], longest=64, bandwidth=1e9))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Return a configuration for a model of which only config.json is there."""
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    (tmp_path / "workers.yaml").write_text(WORKERS, encoding="utf-8")
    return configured(tmp_path, "")


def configured(folder: Path, more: str) -> Path:
    """Write a configuration with `more` lines, and return its path."""
    path = folder / "run.yaml"
    path.write_text(CONFIG.format(more=more), encoding="utf-8")
    return path


def place(stage: int, num_stages: int, kind: str = "cuda", shards: int = 4) -> Place:
    """Return a place with these values."""
    return Place(stage=stage, num_stages=num_stages, kind=kind, shards=shards)


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_a_stage_with_all_blocks_keeps_what_one_process_keeps(
    tmp_path: Path, recompute: str
) -> None:
    """Its weights are the model's, and its activations those of the rehearsal of all blocks."""
    found = _costs(tmp_path, recompute=recompute)
    terms, run = found.terms(place(0, 1), 0, 4), found.run
    whole = run.shape.rehearsed(
        rows=run.rows, length=run.length, kind="cuda", recompute=run.recompute
    )
    assert terms.weights == run.shape.counts().frozen_bytes
    assert terms.kept == pytest.approx(whole.kept, rel=0.02)
    assert terms.kept + terms.passing == pytest.approx(whole.peak, rel=0.05)
    assert terms.hidden == 0


def test_weights_of_stages_are_those_of_the_model_and_a_second_table(costs: StageCosts) -> None:
    """The table is the head, too, so the first and the last stage have it, and no other one."""
    parts = [
        costs.terms(place(index, 3), *own) for index, own in enumerate(((0, 1), (1, 3), (3, 4)))
    ]
    table = 2 * 0 + 4 * TINY["vocab_size"] * TINY["hidden_size"]
    norms = 2 * 4 * TINY["hidden_size"]  # the last norm is counted in each stage
    total = sum(part.weights for part in parts)
    assert total == costs.run.shape.counts().frozen_bytes + table + norms
    trained = sum(
        costs.trained_bytes(place(i, 3), a, b) for i, (a, b) in enumerate(((0, 1), (1, 3), (3, 4)))
    )
    assert trained == 4 * costs.run.shape.counts().trained


@pytest.mark.parametrize(("stage", "shards", "kept"), [(0, 5, 4), (1, 5, 3), (2, 5, 1), (0, 2, 2)])
def test_a_stage_keeps_one_shard_more_than_there_are_stages_from_it_on(
    costs: StageCosts, stage: int, shards: int, kept: int
) -> None:
    """Stage s of P has min(P - s + 1, shards) shards between their passes, the last one has one."""
    here = place(stage, 3, shards=shards)
    assert here.num_kept == kept
    one, two = (costs.terms(here, 1, end).kept for end in (2, 3))
    block = (two - one) // kept
    assert (two - one) % kept == 0
    assert block == costs.terms(place(2, 3), 1, 3).kept - costs.terms(place(2, 3), 1, 2).kept


def test_runtime_and_vectors_depend_on_the_device(costs: StageCosts) -> None:
    host, gpu = (costs.terms(place(1, 3, kind), 1, 2) for kind in ("cpu", "cuda"))
    vector = costs.trained_bytes(place(1, 3), 1, 2)
    assert (host.runtime, gpu.runtime) == (450_000_000, 700_000_000)
    assert (host.gradients, gpu.gradients) == (4 * vector, vector)
    assert (host.arriving, gpu.arriving) == (vector, 0)


def test_memory_is_near_that_of_torchs_pipeline(costs: StageCosts) -> None:
    """Both plans rehearse the same blocks; terms of their own are in the vectors of each."""
    run = costs.run
    load = Load(
        rows=run.rows, length=run.length, shards=4, num_workers=2, kind="cuda", recompute=False
    )
    theirs = memory_of("pipeline_parallel", run.shape, load)
    ours = [costs.terms(place(stage, 2), 2 * stage, 2 * stage + 2) for stage in (0, 1)]
    num_kept = place(0, 2).num_kept  # of the first stage, which keeps most; theirs has two
    most = max(one.kept for one in ours)
    assert 2 * most / num_kept == pytest.approx(theirs.activations, rel=0.15)


# --- cuts -------------------------------------------------------------------------------------


def workers(*flops: float, memory: int | None = 10**10) -> list[StageWorker]:
    """Return workers of these speeds, on CPUs."""
    return [
        StageWorker(name=f"w{index}", kind="cpu", memory=memory, flops=one)
        for index, one in enumerate(flops)
    ]


def test_a_faster_worker_has_more_blocks(costs: StageCosts) -> None:
    found = stage_plan.propose(costs, workers(1e12, 4e12))
    assert [stage.blocks for stage in found.stages] == [range(1), range(1, 4)]
    assert found.slowest == max(stage.seconds for stage in found.stages)
    assert found.bubble == pytest.approx(1 / 5)


def test_a_step_is_its_stages_and_the_slowest_one_for_each_further_shard(
    costs: StageCosts,
) -> None:
    found = stage_plan.propose(costs, workers(1e12, 1e12))
    first, last = (stage.seconds for stage in found.stages)
    moved = 2 * 4 * costs.run.shape.counts().trained / 1e9
    assert found.step_seconds == pytest.approx(first + last + 3 * max(first, last) + moved)
    wire = costs.hidden_bytes / 1e9
    work = costs.work(place(0, 2), 0, found.stages[0].blocks.stop)
    assert first == pytest.approx(work / 1e12 + wire)


def test_memory_moves_blocks_to_others(costs: StageCosts) -> None:
    """The faster worker has room for one block alone."""
    room = int(costs.terms(place(1, 2, "cpu"), 3, 4).needed)
    fast = StageWorker(name="fast", kind="cpu", memory=room, flops=9e12)
    found = stage_plan.propose(costs, [*workers(1e12), fast])
    assert [stage.blocks for stage in found.stages] == [range(3), range(3, 4)]


def test_the_fastest_order_is_that_of_all_orders(costs: StageCosts) -> None:
    given = [*workers(1e12, 4e12), StageWorker(name="x", kind="cpu", memory=None, flops=2e12)]
    found = stage_plan.faster_order(costs, given)
    assert found is not None
    every = [stage_plan.propose(costs, order).slowest for order in permutations(given)]
    assert found.slowest == min(every)


def test_without_speeds_times_are_in_blocks(costs: StageCosts) -> None:
    found = stage_plan.propose(costs, stage_workers.nameless(4))
    assert [stage.seconds for stage in found.stages[:3]] == [1, 1, 1]
    assert found.step_seconds is None
    assert found.plan()[0] == StagePlan(layers=(0, 1))


# --- the command ------------------------------------------------------------------------------


def test_the_section_can_be_pasted(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = config.parent / "plan.json"
    command = ["pipeline", "plan", str(config), "--json", str(record)]
    assert cli.main([*command, "--workers", str(config.parent / "workers.yaml")]) == 0
    told = capsys.readouterr().out
    section = told[told.index("\nstages:\n- ") :]
    configured(config.parent, section)
    planned_stages = settings_file.load(config).stages
    assert [stage.worker for stage in planned_stages] == [("a",), ("b",)]
    assert [stage.backend for stage in planned_stages] == ["cpu", "cuda"]
    found = json.loads(record.read_text(encoding="utf-8"))
    assert found["schema"] == stage_text.SCHEMA
    assert [one["layers"] for one in found["stages"]] == [[*own.layers] for own in planned_stages]
    needs = found["stages"][0]["workers"][0]
    assert sum(needs["needs"].values()) == needs["needed_bytes"]
    assert cli.main([*command, "--workers", str(config.parent / "workers.yaml")]) == 0
    assert "\nstages:\n- " not in capsys.readouterr().out
    assert json.loads(record.read_text(encoding="utf-8")) == found


def test_stages_that_do_not_fit(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configured(
        config.parent,
        "stages:\n- {layers: [0, 2], worker: cpu-a}\n- {layers: [2, 4], worker: cpu-b}\n"
        "devices: ['cpu-a:1GB', 'cpu-b:100MB']",
    )
    assert cli.main(["pipeline", "plan", str(config)]) == exit_codes.INVALID
    told = capsys.readouterr().err
    assert f"{config}:9:3: error: stage 1 (cpu-b) with blocks 2 to 3: it needs 4" in told
    assert "and its worker has 100 MB" in told


def test_no_cut_fits(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configured(config.parent, "devices: ['2 x cpu:1MB']")
    assert cli.main(["pipeline", "plan", str(config)]) == exit_codes.INVALID
    assert "no cut fits; the one that comes closest has stage 1 (cpu-2) with block" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("more", "arguments", "told"),
    [
        (
            "stages: [{layers: [0, 2]}, {layers: [2, 3]}]",
            [],
            ":7:37: error: stages[1] layers=[2, 3]: the model has 4 blocks, 0 to 3; use layers: "
            "[2, 4]",
        ),
        (
            "stages: [{layers: [0, 4], worker: z}]",
            ["--workers", "workers.yaml"],
            ":7:35: error: stages[0] worker=z: the workers are a, b; give all that stages name",
        ),
        (
            "stages: [{layers: [0, 4], worker: a, backend: cuda}]",
            ["--workers", "workers.yaml"],
            ":7:47: error: stages[0] backend=cuda: worker a computes on cpu",
        ),
        (
            "stages: [{layers: [0, 2]}, {layers: [2, 4]}]\ndevices: [cpu:1GB]",
            [],
            "stages[1]: no worker is left for this stage; give one more",
        ),
        ("workers: 5", [], "5 workers and 4 blocks: a stage would have no block"),
        ("devices: ['7 x cpu:1GB']", [], "7 workers and 4 blocks"),
        ("", ["--workers", "none.yaml"], "none.yaml:1:1: error: can't be read"),
        ("", ["--bandwidth", "fast"], "bandwidth 'fast': use a number with its unit"),
    ],
)
def test_what_is_refused(
    config: Path,
    more: str,
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(config.parent)
    configured(config.parent, more)
    assert cli.main(["pipeline", "plan", str(config), *arguments]) == exit_codes.INVALID
    assert told in capsys.readouterr().err


def test_another_strategy_has_no_stages(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = config.read_text(encoding="utf-8").replace("layer_pipeline", "ddp")
    config.write_text(text, encoding="utf-8")
    assert cli.main(["pipeline", "plan", str(config)]) == exit_codes.INVALID
    assert "ddp: stages belong to strategy: layer_pipeline; set it" in capsys.readouterr().err


def test_this_machines_devices_are_measured(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["pipeline", "plan", str(config), "--workers", "doctor"]) == exit_codes.DONE
    told = capsys.readouterr()
    assert "measured on cpu (" in told.err
    assert "for block 1 of 4, forward and backward, 2 x 512 tokens, random weights" in told.err
    assert "time     a step takes" in told.out


@pytest.mark.parametrize("form", ["mermaid", "dot", "svg"])
def test_diagrams(
    config: Path,
    form: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without Graphviz, an SVG is our own; names can't break any form."""
    monkeypatch.setenv("PATH", str(config.parent))
    name = 'a"<b>&]|\\'
    stages = [{"layers": [0, 1], "worker": name}, {"layers": [1, 4], "worker": "c"}]
    configured(config.parent, f"stages: {json.dumps(stages)}")
    assert cli.main(["pipeline", "plan", str(config), "--diagram", form]) == exit_codes.DONE
    told = capsys.readouterr().out
    assert "stage 0: block 0" in told
    assert "stage 1: blocks 1-3" in told
    assert "1.05 MB each way" in told
    if form == "svg":
        texts = [one.text for one in ElementTree.fromstring(told).iter() if one.text]
        assert name in texts
    elif form == "dot":
        assert r'label="a\"<b>&]|\\\nstage 0' in told
    else:
        assert "a#34;#60;b#62;#38;#93;#124;#92;<br/>" in told


def test_graphviz_draws_the_svg_where_it_is(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = config.parent / "dot"
    program.write_text('#!/bin/sh\nread first\necho "<svg>$1 $first</svg>"\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{config.parent}:/bin:/usr/bin")
    command = ["pipeline", "plan", str(config), "--diagram", "svg"]
    assert cli.main(command) == exit_codes.DONE
    assert capsys.readouterr().out == "<svg>-Tsvg digraph pipeline {</svg>\n"
    program.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    assert cli.main(command) == exit_codes.DONE
    assert capsys.readouterr().out.startswith('<svg xmlns="http://www.w3.org/2000/svg"')


# --- workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("worker: a", "1:1: error: workers are a list of mappings (worker, memory, backend, flops"),
        ("", "1:1: error: workers are a list of mappings"),
        ("[]", "1:1: error: the list is empty: give a worker for each stage"),
        ("- 3", "1:3: error: workers[0]: use a mapping with worker, memory, backend"),
        ("- {memory: 1GB, backend: cpu}", "1:3: error: workers[0]: worker is missing"),
        ("- {worker: a, backend: cpu}", "1:3: error: workers[0]: memory is missing"),
        ("- {worker: a, memory: 1GB}", "1:3: error: workers[0]: backend is missing"),
        ("- {worker: a, memory: 1, backend: cpu}", "1:23: error: workers[0]: memory '1': use a"),
        ("- {worker: a, memory: 1GB, backend: tpu}", "1:37: error: workers[0]: backend='tpu': use"),
        (
            "- {worker: a, memory: 1GB, backend: cpu, flops: -1}",
            "1:49: error: workers[0]: flops: '-1': use a number > 0, such as 40e12",
        ),
        (
            "- {worker: a, memory: 1GB, backend: cpu, flops: 1, seconds_per_block: 1}",
            "1:71: error: workers[0]: flops and seconds_per_block: give one",
        ),
        (
            "- {worker: a, memory: 1GB, backend: cpu, bandwidth: 1}",
            "1:53: error: workers[0]: bandwidth '1': use a number with its unit",
        ),
        (
            "- {worker: a, memory: 1GB, backend: cpu}\n- {worker: a, memory: 1GB, backend: cpu}",
            "2:12: error: workers[1]: worker=a: line 1 has it; name each once",
        ),
        (
            "- {worker: a, memory: 1GB, backend: cpu, flops: 1}\n"
            "- {worker: b, memory: 1GB, backend: cpu}",
            "2:3: error: it has neither flops nor seconds_per_block, but other workers do",
        ),
        (
            "- {worker: a, memory: 1GB, backend: cpu, flop: 1}",
            "1:42: error: workers[0]: key 'flop' is not read; did you mean 'flops'?",
        ),
    ],
)
def test_a_file_of_workers_is_refused_by_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "workers.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ContractError) as raised:
        stage_workers.load(path)
    (line,) = raised.value.problems
    assert line.removeprefix(f"{path}:").startswith(told)


@pytest.mark.parametrize("name", ["a", "yes", "1", "a b", "a: b", "null", "-", 'a"b', "😀", "a,b"])
def test_names_are_read_back(name: str) -> None:
    (line,) = [*stage_text.section([StagePlan(layers=(0, 1), worker=(name,))])][1:]
    assert yaml.safe_load(line) == [{"layers": [0, 1], "worker": name}]


@st.composite
def some_costs(draw: st.DrawFn) -> list[Costs]:
    """Draw costs of up to four stages and seven blocks, some of them infinite."""
    num_stages, num_blocks = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    cost = st.sampled_from([0.0, 1.0, 2.0, 3.5, 7.0, np.inf])
    size = num_blocks + 1
    table = st.lists(cost, min_size=size * size, max_size=size * size)
    return [np.array(draw(table)).reshape(size, size) for _ in range(num_stages)]


@given(some_costs())
def test_no_cut_is_better(costs: list[Costs]) -> None:
    """Brute force finds no cut with a smaller largest cost, or with as large a one and less sum."""
    num_blocks = len(costs[0]) - 1
    known = []
    for inner in combinations(range(1, num_blocks), len(costs) - 1):
        cut = tuple(range(a, b) for a, b in pairwise((0, *inner, num_blocks)))
        known.append((stage_plan.slowest(costs, cut), stage_plan.total(costs, cut)))
    known = [one for one in known if np.isfinite(one[0])]
    found = stage_plan.best_cut(costs)
    if found is None:
        assert not known
        return
    assert [block for own in found for block in own] == [*range(num_blocks)]
    assert all(found)
    assert (stage_plan.slowest(costs, found), stage_plan.total(costs, found)) == min(known)


def test_more_stages_than_blocks_have_no_cut() -> None:
    assert stage_plan.best_cut([np.ones((2, 2))] * 2) is None


def test_a_block_is_measured_as_a_worker_computes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one thread, and with the second forward pass of `recompute: blocks`."""
    run = _costs(tmp_path, recompute="blocks").run
    forward, threads = masks._Body.forward, list[int]()

    def counted(*given: Any, **named: Any) -> Any:
        threads.append(torch.get_num_threads())
        return forward(*given, **named)

    monkeypatch.setattr(masks._Body, "forward", counted)
    monkeypatch.setattr(stage_workers, "_ENOUGH_S", 0.0)  # one pass
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        stage_workers.block_seconds(stage_workers._two_blocks(run), run, torch.device("cpu"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads[-2:] == [1, 1]
    assert len(threads) in (2, 3)  # finding the arguments may run the first block


def test_devices_of_other_names_are_not_the_stages_workers(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = "stages: [{layers: [0, 2], worker: laptop}, {layers: [2, 4], worker: tower}]"
    configured(config.parent, f"{stages}\ndevices: [cpu:8GB]")
    assert cli.main(["pipeline", "plan", str(config)]) == exit_codes.DONE
    assert "devices: not used, since stages name other workers" in capsys.readouterr().err
