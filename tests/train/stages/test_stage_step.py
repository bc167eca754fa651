"""Stages on a wgpu device: what stages on the CPU compute, with one submission a pass."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from entrenar_py.compute import Backend, draws, open_backend
from entrenar_py.compute.wgpu import WgpuBackend, open_wgpu
from entrenar_py.compute.wgpu.bounds import sensitivity
from entrenar_py.compute.wgpu.program import compile_graph
from entrenar_py.compute.wgpu.resident import Resident
from entrenar_py.shared import workers
from entrenar_py.shared.errors import BackendUnavailable, UsageError
from entrenar_py.systems.probes import device_meter
from entrenar_py.train.arithmetic import checkpoint, engine, sharding
from entrenar_py.train.arithmetic.engine import Dropout, Engine
from entrenar_py.train.arithmetic.tensors import Array
from entrenar_py.train.model import model, preparation
from entrenar_py.train.model.settings import Classes, Data, Lora, Settings, StagePlan, Training
from entrenar_py.train.stages import cut as cutting
from entrenar_py.train.stages.member import StageBackend, StageMember
from entrenar_py.train.stages.server import plan_of_stages
from entrenar_py.train.stages.stage_model import Received, StageWorkload
from entrenar_py.train.stages.stage_model import load_stage as load_stage
from entrenar_py.train.stages.stage_step import Backward, Hidden, StageStep, TorchStage, WgpuStage
from entrenar_py.train.wire import effects as do
from entrenar_py.train.wire.messages import Activation, ActivationGradient, Welcome
from entrenar_py.train.wire.pipeline_peers import Passed
from tests import extras

transformers = pytest.importorskip("transformers")
extras.require("peft")
pytestmark = [
    pytest.mark.wgpu,
    # peft asks for what a later transformers will lack.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

IDS, OTHER_IDS = [0, 1, 2], [3]
SCALE = 2.0**-6
# How far the gradients of a step are from the CPU's, relative to their norm. In float32 it is the
# bound for two orders of the same sums (docs/numerics.md, "Training"; 6e-7 was seen). In bfloat16 a
# path through three blocks and back has 7 products a block and direction, and each result is off by
# 2^-9 at most on the CPU alone: to first order 42 of them.
APART = {"float32": 1e-4, "bfloat16": 42 * 2.0**-9}
SIZES = {
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 512, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 64}
CONFIGS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaConfig", SIZES, ("q_proj", "down_proj")),
    "qwen3": ("Qwen3Config", SIZES, ("q_proj", "down_proj")),
    # Positions are learned, and dropout stands in front of the blocks and within them, too.
    "gpt2": ("GPT2Config", GPT2, ("c_attn", "c_fc")),
}


@pytest.fixture(scope="module")
def wgpu() -> WgpuBackend:
    """The wgpu backend; skips without an adapter."""
    try:
        return open_wgpu()
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep tokenised rows out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings_of(folder: Path, small: Path, name: str, **changes: Any) -> Settings:
    """Write a checkpoint of three blocks, and return settings that cut it into three stages."""
    kind, sizes, targets = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes, pad_token_id=0, eos_token_id=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / "model" / file, folder / "model" / file)
    named: dict[str, Any] = {"task": "text", **changes}
    return Settings(
        model=folder / "model",
        output=folder / "out",
        data=Data(train=small / "test.jsonl", max_tokens=32),
        lora=Lora(rank=2, alpha=4, targets=targets, dropout=0.2),
        strategy="layer_pipeline",
        stages=tuple(StagePlan(layers=(n, n + 1)) for n in range(3)),
        **named,
    )


def workloads(settings: Settings) -> list[StageWorkload]:
    """Return the stages of a model."""
    cut = cutting.of(settings, model.shape(settings))
    ready = preparation.prepare(settings)
    return [load_stage(ready, cut, number) for number in range(len(cut.stages))]


def stepper(workload: StageWorkload, backend: Backend) -> StageStep:
    """Return the steps of a stage whose adapters have learned something."""
    initial = workload.initial(np.random.default_rng(0))
    for name, array in initial.items():
        if "lora_B" in name:  # zeros at first, which would hide most of the gradient
            array[:] = np.random.default_rng(1).normal(0, 0.1, array.shape)
    step: Any = Engine(workload, StageBackend(backend), initial, scale=SCALE).stepper
    return step  # type: ignore[no-any-return]


def drop() -> Dropout:
    """Return the dropout of one shard."""
    return Dropout(0.0, np.random.default_rng(5))


@dataclass(frozen=True)
class Run:
    """A graph that a device ran, with its inputs and results."""

    graph: GraphModule
    inputs: list[Tensor]
    results: list[Tensor]


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Run]]:
    """Yield what a device runs within the block."""
    runs, run = list[Run](), Resident.run

    def told(self: Resident, key: Any, body: Any, given: Sequence[Tensor]) -> Any:
        found = run(self, key, body, given)
        tensors = [torch.from_numpy(np.asarray(one)) for one in found]
        runs.append(Run(self.graph(key, body, given), self.inputs(given), tensors))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Resident, "run", told)
        yield runs


@contextmanager
def masks_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Tensor]]:
    """Yield the masks that are drawn within the block, by the number of the draw."""
    drawn: dict[int, Tensor] = {}
    kept = draws.kept

    def told(key: Tensor, number: int, shape: Sequence[int], share: float) -> Tensor:
        drawn[number] = kept(key, number, shape, share)
        return drawn[number]

    with monkeypatch.context() as patch:
        patch.setattr(draws, "kept", told)
        yield drawn


def masks_of_the_device(backend: WgpuBackend, run: Run) -> dict[int, Tensor]:
    """Return the masks that a graph draws, by the number of the draw, as the device draws them."""
    copied = copy.deepcopy(run.graph)
    nodes = [n for n in copied.graph.nodes if n.target is torch.ops.entrenar.kept.default]
    copied.graph.output_node().args = (nodes,)
    copied.graph.eliminate_dead_code()
    copied.recompile()
    program = compile_graph(backend.programs.device, copied, run.inputs)
    found = program.run([one.detach().numpy() for one in run.inputs])
    return {
        int(node.args[1]): torch.from_numpy(mask) for node, mask in zip(nodes, found, strict=True)
    }


def results_of(found: Hidden | Backward, *, is_last: bool) -> list[Tensor]:
    """Return the results of a pass in the order of its graph."""
    if isinstance(found, Hidden):
        return [found.tensor, torch.tensor(found.draws)]
    loss = [torch.tensor(found.loss)] if is_last else []
    hidden = [] if found.hidden is None else [found.hidden]
    return [*loss, *(torch.from_numpy(np.asarray(one)) for one in found.gradients), *hidden]


def require_explained(run: Run, right: Sequence[Tensor]) -> float:
    """Require that rounding explains how far the results of device and CPU are from each other.

    Each is compared with the graph in float64 (docs/numerics.md, "A captured step on a wgpu
    device"): of each tensor, the L1 norm of the difference and its largest element are within their
    first-order bounds for u = 2^-23. So device and CPU are no further apart than two bounds.
    Returns the largest distance of the two, relative to the largest element of its tensor.
    """
    for ours in (run.results, right):
        for one in sensitivity.deviations(ours, run.graph, run.inputs):
            assert one.explained, one
            assert one.size > 0, "what is compared is not zero"
    pairs = zip(run.results, right, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


@dataclass(frozen=True)
class Passes:
    """A stage's passes of a shard on the CPU: what it got, what came of it, and masks by draw.

    `gradient` and `back` are None in the last stage.
    """

    received: Received | None
    forward: Hidden | Backward
    masks: dict[int, Tensor]
    gradient: Tensor | None = None
    back: Backward | None = None


def on_the_cpu(
    stages: Sequence[StageWorkload], ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> list[Passes]:
    """Return the passes of a shard through all stages."""
    steps = [stepper(one, open_backend("cpu")) for one in stages]
    received, passes = None, list[Passes]()
    for step in steps:
        with masks_of_the_cpu(monkeypatch) as drawn:
            found = step.forward(0, ids, received, drop())
        first = 0 if received is None else received.draws  # draws before it go nowhere
        masks = {number: mask for number, mask in drawn.items() if number >= first}
        passes.append(Passes(received, found, masks))
        received = Received(found.tensor, found.draws) if isinstance(found, Hidden) else None
    found = passes[-1].forward
    for number in reversed(range(len(steps) - 1)):
        assert isinstance(found, Backward)
        assert found.hidden is not None
        gradient = found.hidden
        found = steps[number].backward(0, gradient)
        passes[number] = replace(passes[number], gradient=gradient, back=found)
    return passes


# Blocks of Qwen3 are those of Llama, with two norms more.
@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(one, marks=pytest.mark.by_hand) for one in ("llama", "gpt2"))]
)
def test_passes_are_those_of_the_cpu(
    small: Path, tmp_path: Path, wgpu: WgpuBackend, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In each stage hidden states, loss and gradients are the CPU's, and masks in every bit."""
    stages = workloads(settings_of(tmp_path, small, name))
    for stage, right in zip(stages, on_the_cpu(stages, IDS, monkeypatch), strict=True):
        compare(stage, right, wgpu, IDS, monkeypatch)
        assert right.masks


def compare(
    stage: StageWorkload,
    right: Passes,
    wgpu: WgpuBackend,
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Require of each pass on the device what `require_explained` does, and the CPU's masks."""
    is_last, step = stage.stage.is_last, stepper(stage, wgpu)
    with recording(monkeypatch) as runs:
        found: list[Hidden | Backward] = [step.forward(0, ids, right.received, drop())]
        if right.gradient is not None:
            found.append(step.backward(0, right.gradient))
    expected = [right.forward] if right.back is None else [right.forward, right.back]
    for run, ours, theirs in zip(runs, found, expected, strict=True):
        for one, result in zip(results_of(ours, is_last=is_last), run.results, strict=True):
            assert torch.equal(one, result), "nothing is computed after the read-back"
        require_explained(run, results_of(theirs, is_last=is_last))
        masks = masks_of_the_device(wgpu, run)
        assert masks.keys() == right.masks.keys()
        for number, mask in masks.items():
            assert torch.equal(mask, right.masks[number]), f"draw {number}"


def test_a_pass_is_one_submission(
    small: Path, tmp_path: Path, wgpu: WgpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass is one upload, one submission and one read-back, and the CPU computes nothing."""
    stages = workloads(settings_of(tmp_path, small, "llama"))
    for stage, right in zip(stages, on_the_cpu(stages, IDS, monkeypatch), strict=True):
        step = stepper(stage, wgpu)
        for _ in range(2):  # the first time compiles
            with device_meter.watching() as meter:
                unseen = meter.leaving_out
                monkeypatch.setattr(stage, "batch", unseen(type(stage).batch.__get__(stage)))
                step.begin()
                step.forward(0, IDS, right.received, unseen_key(meter))
                num_passes = 1
                if right.gradient is not None:
                    step.backward(0, right.gradient)
                    num_passes = 2
        counts = meter.submissions, meter.uploads, meter.read_backs
        assert counts == (num_passes, num_passes, num_passes)
        assert meter.dispatches > num_passes
        assert (meter.compiled, meter.traced, meter.on_host) == (0, 0, [])


def unseen_key(meter: device_meter.Meter) -> Dropout:
    """Return the dropout of `drop`, whose key is drawn without being counted."""
    found = drop()
    found.key = meter.leaving_out(found.key)  # type: ignore[method-assign]
    return found


def test_frozen_weights_lie_on_the_device_once(
    small: Path, tmp_path: Path, wgpu: WgpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of two shapes of batches, in both directions, read one copy; results are the CPU's.

    A second replica compiles nothing, and is told the same number of draws.
    """
    stage, *_ = stages = workloads(settings_of(tmp_path, small, "llama"))
    for ids in (IDS, OTHER_IDS):
        right = on_the_cpu(stages, ids, monkeypatch)[0]
        compare(stage, right, wgpu, ids, monkeypatch)
    compiled = wgpu.programs.of(stage)
    assert len(compiled.programs) == 4
    assert compiled.constants is not None
    assert [one.shape for one in compiled.constants] == [
        tuple(one.shape) for one in stage.constants.values()
    ]
    assert list(compiled.frozen.values()) == [[]]
    known = list(compiled.programs)
    found = stepper(stage, wgpu).forward(0, OTHER_IDS, None, drop())
    assert isinstance(found, Hidden)
    assert isinstance(right.forward, Hidden)
    assert found.draws == right.forward.draws == max(right.masks) + 1
    assert list(compiled.programs) == known


def test_the_number_of_the_first_draw_decides(
    small: Path, tmp_path: Path, wgpu: WgpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states that begin with another draw have other masks, and a program of their own."""
    _, stage, _ = stages = workloads(settings_of(tmp_path, small, "llama"))
    received = on_the_cpu(stages, OTHER_IDS, monkeypatch)[1].received
    assert received is not None
    step = stepper(stage, wgpu)
    found = []
    for more in (0, 5):
        given = replace(received, draws=received.draws + more)
        with masks_of_the_cpu(monkeypatch) as drawn:
            stepper(stage, open_backend("cpu")).forward(0, OTHER_IDS, given, drop())
        with recording(monkeypatch) as runs:
            step.forward(more, OTHER_IDS, given, drop())
        masks = masks_of_the_device(wgpu, runs[0])
        assert masks.keys() == drawn.keys()
        assert all(torch.equal(mask, drawn[number]) for number, mask in masks.items())
        found.append(runs[0].results)
    assert not torch.equal(found[0][0], found[1][0])
    assert found[1][1] == found[0][1] + 5


def test_without_a_key_nothing_is_dropped(
    small: Path, tmp_path: Path, wgpu: WgpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass without a key draws nothing, and its program is not that of a pass with one."""
    stage, *_ = workloads(settings_of(tmp_path, small, "llama"))
    cpu, ours = stepper(stage, open_backend("cpu")), stepper(stage, wgpu)
    ours.forward(0, OTHER_IDS, None, drop())
    right = cpu.forward(0, OTHER_IDS, None, engine.no_dropout)
    with recording(monkeypatch) as runs:
        found = ours.forward(0, OTHER_IDS, None, engine.no_dropout)
    require_explained(
        Run(only(runs[0].graph, 1), runs[0].inputs, runs[0].results[:1]),
        results_of(right, is_last=False)[:1],
    )
    assert isinstance(found, Hidden)
    assert found.draws == 0
    assert masks_of_the_device(wgpu, runs[0]) == {}


def only(graph: GraphModule, num_results: int) -> GraphModule:
    """Return a copy of `graph` with its first results."""
    copied = copy.deepcopy(graph)
    last = copied.graph.output_node()
    last.args = (list(last.args[0])[:num_results],)  # type: ignore[arg-type]
    copied.graph.eliminate_dead_code()
    copied.recompile()
    return copied


def test_a_step_begins_with_new_weights(small: Path, tmp_path: Path, wgpu: WgpuBackend) -> None:
    """Weights that changed since the pass before are uploaded; shards are forgotten."""
    stage, *_ = workloads(settings_of(tmp_path, small, "llama"))
    initial = stage.initial(np.random.default_rng(0))
    replica = Engine(stage, StageBackend(wgpu), initial, scale=SCALE)
    step: Any = replica.stepper
    before = step.forward(0, OTHER_IDS, None, drop())
    replica.parameters += 0.1
    step.begin()
    with pytest.raises(KeyError):
        step.backward(0, torch.zeros_like(before.tensor))
    after = step.forward(0, OTHER_IDS, None, drop())
    assert not torch.equal(before.tensor, after.tensor)


def test_the_last_stage_of_a_classifier(
    small: Path, tmp_path: Path, wgpu: WgpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of classes, the head's among them, are the CPU's."""
    changes = {"task": "classify", "classes": Classes(labels=("safe", "unsafe"))}
    stages = workloads(settings_of(tmp_path, small, "qwen3", **changes))
    passes = on_the_cpu(stages, IDS, monkeypatch)
    assert any("score" in spec.name for spec in stages[-1].specs)
    compare(stages[-1], passes[-1], wgpu, IDS, monkeypatch)


def members(settings: Settings, names: Sequence[str]) -> list[StageMember]:
    """Return the workers of the stages, each on the backend of that name, before the first step."""
    cut, stages = cutting.of(settings, model.shape(settings)), workloads(settings)
    scenario = plan_of_stages(preparation.plan_of(settings, stages[0]))
    found = []
    for stage, (name, workload) in enumerate(zip(names, stages, strict=True)):
        member = StageMember(
            scenario,
            open_backend(name),
            workload,
            every=cut.blocks,
            stage=stage,
        )
        rng = np.random.default_rng(stage)
        initial = {
            spec.name: rng.normal(0, 0.1, spec.shape).astype(np.float32) for spec in workload.specs
        }
        progress = checkpoint.Progress(position=sharding.Position(), schedule_step=0)
        held = workers.optimizer_of_workers(scenario)
        welcome = Welcome(
            rank=stage, step=0, blocks=cut.blocks.count, resumed=False, proof="0" * 64
        )
        member.load(welcome, checkpoint.dump_state(workload.specs, held, progress, initial, {}))
        found.append(member)
    return found


def step_of(workers: Sequence[StageMember], num_shards: int) -> tuple[list[str], list[Array]]:
    """Make a step's passes; return the formats that were sent on, and the stages' gradients."""
    dtypes = []
    for shard in range(num_shards):
        is_last = shard == num_shards - 1
        forward = do.Pass(ticket=0, step=0, shard=shard, is_forward=True, is_last=is_last)
        backward = replace(forward, is_forward=False)
        for worker, after in pairwise(workers):
            worker.bind(forward)
            passed = worker.run(forward)
            assert isinstance(passed, Passed)
            dtypes.append(passed.dtype)
            sent = Activation(step=0, round=0, shard=shard, dtype=passed.dtype, draws=passed.draws)
            payload = bytearray(worker.payload(sent))
            after.require(sent, payload)
            after.receive(sent, payload)
        workers[-1].bind(forward)
        assert isinstance(workers[-1].run(forward), Passed)
        for before, worker in reversed(list(pairwise(workers))):
            back = ActivationGradient(step=0, round=0, shard=shard)
            payload = bytearray(worker.payload(back))
            before.require(back, payload)
            before.receive(back, payload)
            before.bind(backward)
            assert isinstance(before.run(backward), Passed)
    return dtypes, [worker.member.nodes[max(worker.member.nodes)].vector for worker in workers]


@pytest.mark.parametrize(
    ("names", "precision"),
    [
        (("cpu", "wgpu", "cpu"), "float32"),
        (("cpu", "wgpu", "cpu"), "bfloat16"),
        (("wgpu", "cpu", "wgpu"), "bfloat16"),
        pytest.param(("wgpu", "cpu", "wgpu"), "float32", marks=pytest.mark.by_hand),
    ],
)
def test_stages_of_two_kinds_exchange_what_each_takes(
    small: Path, tmp_path: Path, wgpu: WgpuBackend, names: tuple[str, ...], precision: str
) -> None:
    """Whatever format hidden states come in, their gradient goes back in it; a shard may be empty.

    wgpu computes and sends float32, a CPU stage what the run's precision makes of its blocks.
    """
    settings = settings_of(
        *(tmp_path, small, "llama"),
        precision=precision,
        training=Training(batch_size=3, num_shards=4),
    )
    dtypes, gradients = step_of(members(settings, names), 4)
    sends = {"cpu": precision, "wgpu": "float32"}
    assert dtypes[:2] == [sends[names[0]], "float32"]  # of one that gets float32, all is float32
    _, right = step_of(members(settings, ("cpu",) * 3), 4)
    for one, other in zip(gradients, right, strict=True):
        assert np.linalg.norm(one - other) <= APART[precision] * np.linalg.norm(other)


def test_a_backend_that_no_stage_knows_is_refused() -> None:
    """There is no fallback to the CPU."""
    cpu: Any = open_backend("cpu")
    other = replace(cpu, name="xpu")
    with pytest.raises(UsageError, match="backend='xpu'"):
        StageBackend(other).stepper(None, {}, scale=1.0)


def test_each_kind_of_backend_has_its_step(small: Path, tmp_path: Path, wgpu: WgpuBackend) -> None:
    """A stage on wgpu is no stage of torch."""
    stage, *_ = workloads(settings_of(tmp_path, small, "llama"))
    assert isinstance(stepper(stage, wgpu), WgpuStage)
    assert isinstance(stepper(stage, open_backend("cpu")), TorchStage)
